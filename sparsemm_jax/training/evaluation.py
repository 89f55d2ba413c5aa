"""Held-out bits per byte, caption accuracy and router load."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
from jaxtyping import Int
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax.data import bigram
from sparsemm_jax.data import pipeline
from sparsemm_jax.inference import generate
from sparsemm_jax.layers import stats
from sparsemm_jax.models import vision


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """What the held-out documents of one source cost.

  Attributes:
    bits_per_byte: of the model; special tokens cost bits but hold no bytes.
    bigram_bits_per_byte: of the bigram model on the same targets; None where
      none was asked for.
    loss: nats per target.
    targets: how many there were.
    counts: [layers, E] tokens per expert.
    depth_weights: name of each mix over depth -> weight of each source.
  """

  bits_per_byte: float
  bigram_bits_per_byte: float | None
  loss: float
  targets: int
  counts: np.ndarray
  depth_weights: dict[str, list[float]]


def fit_bigram(config: config_lib.RunConfig, source: str) -> bigram.BigramModel:
  """Fits a bigram model on the whole training text of a source."""
  documents = pipeline.iter_text(config, source, "train")
  return bigram.BigramModel(config.model.vocab_size).fit(documents)


def held_out(
    config: config_lib.RunConfig,
    source: str,
    eval_step: Callable[[dict[str, np.ndarray]], dict[str, Any]],
    *,
    seq_len: int,
    batch_size: int,
    max_patches: int = 0,
    num_batches: int,
    baseline: bigram.BigramModel | None = None,
) -> HeldOut:
  """Evaluates one source's held-out documents.

  Args:
    config: of the run.
    source: a name of `config.data.sources`.
    eval_step: batch -> sums, see `step.make_eval_step`, the state bound.
    seq_len: tokens per row.
    batch_size: rows per batch.
    max_patches: image patches per row.
    num_batches: at most so many.
    baseline: scored on the very same targets.
  """
  tokenizer = pipeline.make_tokenizer(config)
  nats = bigram_nats = 0.0
  targets = num_bytes = 0
  counts: Any = 0
  depth: list[Any] = []
  batches = pipeline.eval_batches(
      config,
      source,
      seq_len=seq_len,
      batch_size=batch_size,
      max_patches=max_patches,
      num_batches=num_batches,
  )
  for batch in batches:
    sums = jax.device_get(eval_step(batch))
    nats += sum(float(total) for total, _ in sums["by_modality"].values())
    counts = counts + sums["counts"].astype(np.int64)
    depth.append(sums["depth_weights"])
    mask = batch["loss_mask"]
    chosen = batch["targets"][mask]
    targets += chosen.size
    num_bytes += len(tokenizer.decode(chosen.tolist()).encode())
    if baseline is not None:
      bigram_nats += baseline.nats(batch["tokens"][mask], chosen).sum()
  if not targets:
    raise config_lib.ConfigError(
        f"data.sources.{source}: no held-out targets to evaluate"
    )
  bits = num_bytes * math.log(2.0)
  return HeldOut(
      bits_per_byte=nats / bits,
      bigram_bits_per_byte=bigram_nats / bits if baseline else None,
      loss=nats / targets,
      targets=targets,
      counts=np.asarray(counts),
      depth_weights=_by_mix(jax.tree.map(lambda *w: np.mean(w, 0), *depth)),
  )


def _by_mix(depth_stats: Any) -> dict[str, list[float]]:
  """Names each mix by its block, counted from 1, and its sub-layer."""
  result = {}
  for block, path, weights in stats.by_depth(depth_stats):
    kind = path[0].removesuffix("_res")
    name = "output" if block < 0 else f"{block + 1} {kind}"
    result[name] = np.asarray(weights).tolist()
  return result


@dataclasses.dataclass(frozen=True)
class Caption:
  """One question, the right answer and the model's."""

  example: pipeline.CaptionExample
  answer: str

  @property
  def right(self) -> bool:
    return self.answer == self.example.answer


def captions(
    config: config_lib.RunConfig,
    variables: Any,
    *,
    limit: int,
    batch_size: int = 64,
    max_new_tokens: int = 32,
) -> list[Caption]:
  """Asks about held-out images and takes the likeliest answers.

  Args:
    config: of the run.
    variables: {"params", "router_state"}.
    limit: at most so many questions.
    batch_size: questions at a time.
    max_new_tokens: the longest answer.
  """
  tokenizer = pipeline.make_tokenizer(config)
  examples = pipeline.caption_examples(config, "eval", limit)
  length = max(len(example.prompt.tokens) for example in examples)
  result = []
  for start in range(0, len(examples), batch_size):
    chunk = examples[start : start + batch_size]
    filled = chunk + chunk[:1] * (batch_size - len(chunk))  # one shape
    tokens, lengths, images = stack_prompts(
        [example.prompt for example in filled], length
    )
    answers = generate.generate(
        config.model,
        variables,
        tokens,
        lengths,
        jax.random.key(0),
        images=images,
        max_new_tokens=max_new_tokens,
        end_id=tokenizer.end_of_document_id,
        temperature=0.0,
    )
    for example, ids in zip(chunk, np.asarray(answers), strict=False):
      result.append(Caption(example, answer_text(ids, tokenizer)))
  return result


def stack_prompts(
    prompts: Sequence[pipeline.Prompt], length: int
) -> tuple[Int[np.ndarray, "b t"], Int[np.ndarray, " b"], vision.Images | None]:
  """Stacks prompts, shorter ones filled up at the end.

  Args:
    prompts: of `pipeline.encode_prompt` or `caption_examples`.
    length: T, at least that of the longest prompt.

  Returns:
    tokens [B, T] int32, lengths [B] int32, and the images (None if no prompt
    has any).
  """
  tokens = np.zeros((len(prompts), length), np.int32)
  for row, prompt in zip(tokens, prompts, strict=True):
    row[: len(prompt.tokens)] = prompt.tokens
  lengths = np.array([len(prompt.tokens) for prompt in prompts], np.int32)
  with_images = [prompt.images for prompt in prompts if prompt.images]
  if not with_images:
    return tokens, lengths, None
  most = max(images["patches"].shape[1] for images in with_images)
  batch = {
      key: np.zeros((len(prompts), most, *value.shape[2:]), value.dtype)
      for key, value in with_images[0].items()
  }
  for row, prompt in enumerate(prompts):
    for key, value in prompt.images.items():
      batch[key][row, : value.shape[1]] = value[0]
  return tokens, lengths, vision.Images.from_batch(batch)


def answer_text(ids: Sequence[int], tokenizer: Any) -> str:
  """Decodes generated ids up to the end of the document."""
  kept = []
  for token in ids:
    if token == tokenizer.end_of_document_id:
      break
    kept.append(int(token))
  return tokenizer.decode(kept)
