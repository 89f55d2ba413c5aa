"""Segment ids as every implementation wants them: valid tokens and runs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Int


def runs_of(
    segment_ids: Int[Array, "B T"],
) -> tuple[Bool[Array, "B T"], Int[Array, "B T"]]:
  """Numbers the maximal runs of equal ids, skipping over padding.

  Run 0 is the row's first segment, the one initial_state belongs to. A
  padding token carries the run of the last token before it, so runs never
  decrease and a run's tokens are contiguous up to padding.

  Args:
    segment_ids: [B, T] integers; 0 is padding.

  Returns:
    valid: [B, T] bool, False on padding.
    runs: [B, T] int32.
  """
  valid = segment_ids != 0
  last = _last_valid_before(valid)
  previous = jnp.take_along_axis(segment_ids, jnp.maximum(last, 0), axis=1)
  starts = valid & (last >= 0) & (previous != segment_ids)
  return valid, jnp.cumsum(starts, axis=1, dtype=jnp.int32)


def _last_valid_before(valid: Bool[Array, "B T"]) -> Int[Array, "B T"]:
  position = jnp.where(valid, jnp.arange(valid.shape[1], dtype=jnp.int32), -1)
  latest = jax.lax.cummax(position, axis=1)
  return jnp.pad(latest, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]


def zero_padding(valid: Bool[Array, "B T"], x: Array) -> Array:
  """Selects zero on padding rows, whatever (NaN too) stands there."""
  mask = valid.reshape(valid.shape + (1,) * (x.ndim - 2))
  return jnp.where(mask, x, jnp.zeros((), x.dtype))
