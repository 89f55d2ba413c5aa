"""Batches, held-out examples and text, from a RunConfig."""

from collections.abc import Iterator
from collections.abc import Sequence
import itertools
from typing import NamedTuple

import grain
from jaxtyping import Int
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax import data
from sparsemm_jax.data import digits
from sparsemm_jax.data import documents
from sparsemm_jax.data import images
from sparsemm_jax.data import mixture
from sparsemm_jax.data import packing
from sparsemm_jax.data import tokenizer as tokenizer_lib

Batch = dict[str, np.ndarray]


def make_tokenizer(config: config_lib.RunConfig) -> tokenizer_lib.Tokenizer:
  """Returns the run's tokenizer, checked against the model's vocabulary."""
  tokenizer = tokenizer_lib.make_tokenizer(config.data.tokenizer)
  if tokenizer.vocab_size > config.model.vocab_size:
    raise data.DataError(
        f"model.vocab_size={config.model.vocab_size} is below the tokenizer's"
        f" {tokenizer.vocab_size}"
    )
  vision = config.model.vision
  if vision and vision.media_pad_id != tokenizer.media_pad_id:
    raise data.DataError(
        f"model.vision.media_pad_id={vision.media_pad_id} is not the"
        f" tokenizer's {tokenizer.media_pad_id}"
    )
  return tokenizer


def _row_shape(
    config: config_lib.RunConfig, seq_len: int, max_patches: int
) -> packing.RowShape:
  vision = config.model.vision
  return packing.RowShape(
      seq_len, max_patches, vision.patch_dim if vision else 0
  )


def make_train_dataset(
    config: config_lib.RunConfig,
    stage_index: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.IterDataset:
  """Returns the endless batches of one stage; see make_train_iterator."""
  stage = config.train.stages[stage_index]
  if stage.batch_size % process_count:
    raise data.DataError(
        f"train.stages[{stage_index}].batch_size={stage.batch_size} is not a"
        f" multiple of {process_count} processes"
    )
  tokenizer = make_tokenizer(config)
  shape = _row_shape(config, stage.seq_len, stage.max_patches)
  rows = {}
  for name in stage.mixture:
    split = mixture.Split(name, config.data.sources[name], "train")
    rows[name] = mixture.packed_rows(
        split.shard(process_index, process_count),
        shape,
        tokenizer,
        config.model.vision,
        seed=mixture.seed_of(
            config.data.seed, stage_index, name, process_index
        ),
        repeat=True,
    )
  mixed = mixture.mix(rows, stage.mixture)
  return mixed.batch(stage.batch_size // process_count, drop_remainder=True)


def make_train_iterator(
    config: config_lib.RunConfig,
    stage_index: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator:
  """Returns the endless iterator over the batches of one stage.

  The order depends on data.seed, the stage and the processes alone; the state
  (get_state, set_state) is JSON and restores it exactly.

  Args:
    config: of the run.
    stage_index: of config.train.stages.
    process_index: of this process.
    process_count: each reads its own documents and batch_size / process_count
      rows.

  Returns:
    Batches of B rows, T = seq_len: tokens, targets, segment_ids, positions,
    modality [B, T] int32, loss_mask [B, T] bool; with images, P = max_patches,
    also patches [B, P, 3 patch_size**2] fp32, patch_positions and patch_grids
    [B, P, 2] int32, patch_segment_ids [B, P] int32.

  Raises:
    DataError: data that cannot be used; the iterator raises it as well.
  """
  return iter(
      make_train_dataset(
          config,
          stage_index,
          process_index=process_index,
          process_count=process_count,
      )
  )


def eval_batches(
    config: config_lib.RunConfig,
    source: str,
    *,
    seq_len: int,
    batch_size: int,
    max_patches: int = 0,
    num_batches: int | None = None,
) -> Iterator[Batch]:
  """Yields batches of a source's held-out documents, the same every time.

  Args:
    config: of the run.
    source: a name in data.sources.
    seq_len: tokens per row.
    batch_size: rows; the last batch is filled up with rows of padding.
    max_patches: patches per row.
    num_batches: stop after so many; None for all documents, each once.
  """
  tokenizer = make_tokenizer(config)
  rows = iter(
      mixture.packed_rows(
          mixture.Split(source, config.data.sources[source], "eval"),
          _row_shape(config, seq_len, max_patches),
          tokenizer,
          config.model.vision,
          seed=mixture.seed_of("eval", source),
          repeat=False,
      )
  )
  count = 0
  while num_batches is None or count < num_batches:
    batch = list(itertools.islice(rows, batch_size))
    if not batch:
      return
    yield _stack(batch, batch_size, tokenizer.pad_id)
    count += 1


def _stack(rows: list[Batch], batch_size: int, pad_id: int) -> Batch:
  batch = {}
  for key, first in rows[0].items():
    fill = pad_id if key in ("tokens", "targets") else 0
    batch[key] = np.full((batch_size, *first.shape), fill, first.dtype)
    batch[key][: len(rows)] = [row[key] for row in rows]
  return batch


class Prompt(NamedTuple):
  """What generation starts from.

  Attributes:
    tokens: [T], beginning with end of document.
    images: patches, patch_positions, patch_grids, patch_segment_ids of one
      row, each [1, P, ...] as in a batch; empty without images.
  """

  tokens: Int[np.ndarray, " t"]
  images: Batch


class CaptionExample(NamedTuple):
  """A question about a held-out image.

  Attributes:
    prompt: the image and the question.
    answer: the text to be generated, up to end of document.
    question: its text.
    image: [8, 8, 3] uint8.
  """

  prompt: Prompt
  answer: str
  question: str
  image: np.ndarray


def encode_prompt(
    config: config_lib.RunConfig, parts: Sequence[str | images.ImageLike]
) -> Prompt:
  """Returns text (str) and images (anything else) as the start of a document.

  Raises:
    DataError: an image that cannot be read, or one without a vision tower.
  """
  tokenizer = make_tokenizer(config)
  document = documents.Document(tuple(parts), "prompt")
  return _prompt(document, tokenizer, config.model.vision)


def _prompt(
    document: documents.Document,
    tokenizer: tokenizer_lib.Tokenizer,
    vision: config_lib.VisionConfig | None,
) -> Prompt:
  encoded = documents.encode(document, tokenizer, vision)
  row = packing.single_row(encoded, tokenizer)  # leaves the last token out
  patches = {k: v[None] for k, v in row.items() if k.startswith("patch")}
  return Prompt(row["tokens"], patches)


def caption_examples(
    config: config_lib.RunConfig, split: str = "eval", limit: int | None = None
) -> list[CaptionExample]:
  """Returns questions about handwritten digits, in a fixed random order.

  Args:
    config: of the run; its source of kind "digits" is asked.
    split: "eval" for images that training never shows.
    limit: how many at most.

  Raises:
    DataError: no source of digits.
  """
  tokenizer = make_tokenizer(config)
  kinds = {source.kind: name for name, source in config.data.sources.items()}
  if "digits" not in kinds:
    raise data.DataError("data.sources has no source of kind 'digits'")
  name = kinds["digits"]
  indices = mixture.Split(name, config.data.sources[name], split).indices
  order = np.random.default_rng(0).permutation(indices)[:limit]
  examples = []
  for index in order:
    asked = digits.ask(index)
    document = documents.Document(asked.prompt, name)
    prompt = _prompt(document, tokenizer, config.model.vision)
    examples.append(
        CaptionExample(prompt, asked.answer, asked.question, asked.image)
    )
  return examples


def iter_text(
    config: config_lib.RunConfig, source: str, split: str
) -> Iterator[Int[np.ndarray, " n"]]:
  """Yields the token ids of the text of each document, nothing special.

  Args:
    config: of the run.
    source: a name in data.sources.
    split: "train" or "eval".
  """
  tokenizer = make_tokenizer(config)
  for document in mixture.Split(source, config.data.sources[source], split):
    text = [part for part in document.parts if isinstance(part, str)]
    yield np.array(
        [i for part in text for i in tokenizer.encode(part)], np.int32
    )
