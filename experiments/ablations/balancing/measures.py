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


def first_below(
    values: np.ndarray, limit: float, *, window: int = 1
) -> int | None:
  """Returns the step that ends the first window whose mean is within limit.

  Args:
    values: [steps].
    limit: that the mean may reach.
    window: steps; some more than one, where a single step may dip by chance.
  """
  if len(values) < window:
    return None
  means = np.convolve(values, np.full(window, 1 / window), "valid")
  (steps,) = np.nonzero(means <= limit)
  return int(steps[0]) + window - 1 if len(steps) else None


def dead_experts(counts: np.ndarray) -> np.ndarray:
  """Counts the experts without a token in the last DEAD_WINDOW steps.

  Args:
    counts: [steps, ..., E] tokens per expert.

  Returns:
    [...] how many.
  """
  return np.sum(counts[-DEAD_WINDOW:].sum(0) == 0, axis=-1)
