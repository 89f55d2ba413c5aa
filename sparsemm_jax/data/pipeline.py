"""Batches, held-out examples and text, from a RunConfig."""

from collections.abc import Iterator
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
from sparsemm_jax.data import sources
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
    rows[name] = mixture.packed_rows(
        mixture.Split(name, config.data.sources[name], "train"),
        shape,
        tokenizer,
        config.model.vision,
        seed=mixture.seed_of(config.data.seed, stage_index, name),
        repeat=True,
        process_index=process_index,
        process_count=process_count,
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
    batch = [row for row, _ in zip(rows, range(batch_size))]
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
