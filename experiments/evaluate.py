"""Evaluates a run's latest checkpoint on held-out documents.

  python -m experiments.evaluate --workdir=runs/demo

Prints, and writes to `<workdir>/evaluation.json`: held-out bits per byte of
each source (for plain text beside those of a bigram model fitted on the same
training text), the accuracy of captions, and the load of each MoE
layer's experts.
"""

import json
from typing import Any

from absl import flags
import jax
import numpy as np

from experiments import command
from sparsemm_jax import balancing
from sparsemm_jax import config as config_lib
from sparsemm_jax import training
from sparsemm_jax.training import evaluation

_WORKDIR = command.define_workdir("A run's folder, or one checkpoint in it.")
_BATCHES = flags.DEFINE_integer(
    "batches", None, "Batches per source; default: train.eval_batches.",
    lower_bound=1,
)  # fmt: skip
_CAPTIONS = flags.DEFINE_integer(
    "captions", 512, "Questions about images.", lower_bound=0
)


def main(argv) -> None:
  """Evaluates; see the module's docstring."""
  del argv
  run = command.load_run(_WORKDIR.value)
  with command.output(run.workdir / command.EVALUATION) as file:
    file.write_text(json.dumps(_evaluate(run), indent=2) + "\n")


def _evaluate(run: command.Run) -> dict[str, Any]:
  """Prints and returns what the command finds."""
  config = run.config
  stage = config.train.stages[-1]
  variables = run.variables
  eval_step = jax.jit(training.make_eval_step(config))
  results: dict[str, Any] = {"step": run.step}
  counts: dict[str, np.ndarray] = {}
  for source in stage.mixture:
    result = evaluation.held_out(
        config,
        source,
        lambda batch: eval_step(variables, batch),
        seq_len=stage.seq_len,
        batch_size=stage.batch_size,
        max_patches=stage.max_patches,
        num_batches=_BATCHES.value or config.train.eval_batches,
        baseline=_bigram(config, source),
    )
    counts[source] = result.counts
    results[source] = {
        "bits_per_byte": result.bits_per_byte,
        "bigram_bits_per_byte": result.bigram_bits_per_byte,
        "targets": result.targets,
        "depth_weights": result.depth_weights,
    }
    bigram = result.bigram_bits_per_byte
    print(
        f"{source}: {result.bits_per_byte:.3f} bits per byte"
        + (f", bigram {bigram:.3f}" if bigram else "")
        + f", over {result.targets} held-out targets"
    )
  violations = _max_violation(counts, stage.mixture)
  results["max_violation"] = violations
  print(
      "max violation of the expert load on the held-out mixture, by layer:"
      f" {[round(value, 2) for value in violations]}"
  )
  if _CAPTIONS.value and _has_digits(config):
    results |= _ask(config, variables)
  return results


def _ask(config, variables) -> dict[str, Any]:
  """The part of the results on captions; empty if the model cannot answer."""
  try:
    captions = evaluation.captions(config, variables, limit=_CAPTIONS.value)
  except config_lib.ConfigError as error:  # of balancing: it cannot decode
    print(f"captions: none, as {error}")
    return {}
  accuracy = float(np.mean([caption.right for caption in captions]))
  print(f"captions: {accuracy:.1%} of {len(captions)} answers right")
  return {
      "captions": {
          "accuracy": accuracy,
          "questions": len(captions),
          "samples": [_sample(caption) for caption in captions[:8]],
      }
  }


def _bigram(config, source):
  """The baseline of a source of plain text."""
  if config.data.sources[source].kind not in ("python_text", "text"):
    return None
  return evaluation.fit_bigram(config, source)


def _has_digits(config) -> bool:
  kinds = [source.kind for source in config.data.sources.values()]
  return config.model.vision is not None and "digits" in kinds


def _sample(caption) -> dict[str, Any]:
  return {
      "image": caption.example.image.tolist(),
      "question": caption.example.question,
      "answer": caption.answer,
      "right": caption.right,
  }


def _max_violation(counts, mixture) -> list[float]:
  """The load of a batch mixed as in training, [layers]."""
  total = sum(
      weight * counts[source] / counts[source].sum(axis=1, keepdims=True)
      for source, weight in mixture.items()
  )
  return [float(balancing.max_violation(layer)) for layer in total]


if __name__ == "__main__":
  command.run(main)
