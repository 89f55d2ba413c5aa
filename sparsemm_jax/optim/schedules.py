"""The learning rate over a whole run."""

import math

import optax

from sparsemm_jax import config as config_lib


def learning_rate(
    config: config_lib.OptimConfig, num_steps: int
) -> optax.Schedule:
  """Returns a linear warm-up followed by one half of a cosine.

  With W = ceil(warmup_fraction num_steps), peak P and final F:
  step s < W gets P (s + 1) / (W + 1), step s >= W gets
  F + (P - F) (1 + cos(pi (s - W) / (num_steps - W))) / 2. The stages of a
  curriculum share it: only the position on the one curve changes.

  Args:
    config: of the optimizer.
    num_steps: optimizer steps of all stages.

  Source: Kimi K3 report, section 3.3 (cosine, 1% warm-up).
  """
  peak = config.learning_rate
  warmup_steps = min(
      math.ceil(config.warmup_fraction * num_steps), num_steps - 1
  )
  # The warm-up starts above zero, or the first step would be wasted.
  warmup = optax.linear_schedule(
      peak / (warmup_steps + 1), peak, max(warmup_steps, 1)
  )
  decay = optax.cosine_decay_schedule(
      peak, num_steps - warmup_steps, config.final_learning_rate_fraction
  )
  return optax.join_schedules([warmup, decay], [warmup_steps])
