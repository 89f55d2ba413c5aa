"""Where each token of a row stands: its document, and its place therein."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Int


class Layout(NamedTuple):
  """What the layers need to know of a packed row, or of a step of decode."""

  segments: Int[Array, "b t"]  # document number from 1 in its row; 0 padding
  positions: Int[Array, "b t"]  # tokens of the same document before this one
  lengths: Int[Array, " b"] | None = None  # tokens in the cache; None: no cache

  @property
  def valid(self) -> Bool[Array, "b t"]:
    """False at padding."""
    return self.segments != 0


def packed(segment_ids: Int[Array, "b t"]) -> Layout:
  """Lays out rows of packed documents.

  A document is a run of equal ids; padding (id 0) inside it is skipped over,
  another id ends it.
  """
  valid = segment_ids != 0
  index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
  last_valid = jax.lax.cummax(jnp.where(valid, index, -1), axis=1)
  before = jnp.pad(last_valid, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  id_before = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
  start = valid & ((before < 0) | (segment_ids != id_before))
  rank = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
  first_rank = jax.lax.cummax(jnp.where(start, rank, 0), axis=1)
  number = jnp.cumsum(start, axis=1, dtype=jnp.int32)
  return Layout(
      segments=jnp.where(valid, number, 0),
      positions=jnp.where(valid, rank - first_rank, 0),
  )


def appended(
    segment_ids: Int[Array, "b t"], lengths: Int[Array, " b"]
) -> Layout:
  """Lays out tokens that continue the one document of each cached row."""
  valid = segment_ids != 0
  rank = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
  return Layout(
      segments=valid.astype(jnp.int32),
      positions=jnp.where(valid, lengths[:, None] + rank, 0),
      lengths=lengths,
  )
