"""How even the loads of experts are, and how even chance lets them be."""

import math

import numpy as np

DEAD_WINDOW = 20  # steps


def sampling_floor(num_experts: int, mean_load: float) -> float:
  """Returns sqrt(2 ln E / q): the max violation that chance alone leaves.

  Args:
    num_experts: E.
    mean_load: q, tokens per expert and step.
  """
  return math.sqrt(2 * math.log(num_experts) / mean_load)


def max_violations(counts: np.ndarray) -> np.ndarray:
  """[..., E] tokens per expert -> [...] max / mean - 1."""
  return counts.max(-1) / counts.mean(-1) - 1


def first_below(values: np.ndarray, limit: float) -> int | None:
  """Returns the first step whose value is at most the limit, if any."""
  (steps,) = np.nonzero(np.asarray(values) <= limit)
  return int(steps[0]) if len(steps) else None


def dead_experts(counts: np.ndarray) -> np.ndarray:
  """Counts the experts without a token in the last DEAD_WINDOW steps.

  Args:
    counts: [steps, ..., E] tokens per expert.

  Returns:
    [...] how many.
  """
  return np.sum(counts[-DEAD_WINDOW:].sum(0) == 0, axis=-1)
