"""Where a step stands in the list of stages."""

import bisect
import itertools
from typing import NamedTuple

from sparsemm_jax import config as config_lib


class Position(NamedTuple):
  """A step inside its stage, both counted from 0."""

  stage: int
  step: int


def boundaries(config: config_lib.TrainConfig) -> tuple[int, ...]:
  """Returns the first step of each stage, then the number of all steps."""
  return tuple(
      itertools.accumulate(
          (stage.num_steps for stage in config.stages), initial=0
      )
  )


def stage_at(config: config_lib.TrainConfig, step: int) -> Position:
  """Returns the stage of the batch that optimizer step `step` consumes.

  Args:
    config: of the run.
    step: optimizer steps taken so far, in [0, num_steps).

  Raises:
    ValueError: a step outside the run.
  """
  starts = boundaries(config)
  if not 0 <= step < starts[-1]:
    raise ValueError(f"step {step} is outside the run's {starts[-1]} steps")
  stage = bisect.bisect_right(starts, step) - 1
  return Position(stage, step - starts[stage])


def num_tokens(
    config: config_lib.TrainConfig, num_steps: int | None = None
) -> int:
  """Returns the tokens, padding included, of the first `num_steps` steps.

  Args:
    config: of the run.
    num_steps: at most all steps of all stages; None: all.
  """
  left = config.num_steps if num_steps is None else num_steps
  total = 0
  for stage in config.stages:
    steps = min(left, stage.num_steps)
    total += steps * stage.batch_size * stage.seq_len
    left -= steps
  return total
