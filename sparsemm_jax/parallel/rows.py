"""Rows on their way to experts and back: sorts and gathers, no scatters.

A token's A visits to experts become rows sorted by expert. Both directions are
gathers, and so are their gradients: the sums run in fp32 in a fixed order, and
nothing of A times the tokens' size is ever stored.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int


class SortedVisits(NamedTuple):
  """Where each visit of N tokens stands among M rows sorted by expert."""

  order: Int[Array, " m"]  # visit n * A + a of each row
  position: Int[Array, "n a"]  # row of each visit; M: it has none
  group_sizes: Int[Array, " e"]  # rows of each expert

  @property
  def inverse(self) -> "SortedVisits":
    """The way back, where A is 1 and every visit has a row."""
    return SortedVisits(
        self.position[:, 0], self.order[:, None], self.group_sizes
    )


def sort_by_expert(
    expert_indices: Int[Array, "n a"],
    num_experts: int,
    num_rows: int | None = None,
) -> SortedVisits:
  """Sorts visits by expert, those of one expert by token.

  Args:
    expert_indices: [N, A]; a visit to none of 0..E-1 comes after all groups.
    num_experts: E.
    num_rows: M, at least the number of visits to 0..E-1; None: N A.

  Returns:
    The places; rows past the groups hold visits to no expert.
  """
  total = expert_indices.size
  num_rows = total if num_rows is None else min(num_rows, total)
  inside = (expert_indices >= 0) & (expert_indices < num_experts)
  key = jnp.where(inside, expert_indices, num_experts).reshape(-1)
  order = jnp.argsort(key, stable=True)
  position = jnp.zeros(total, jnp.int32)
  position = position.at[order].set(
      jnp.arange(total, dtype=jnp.int32), unique_indices=True
  )
  group_sizes = jnp.zeros(num_experts, jnp.int32).at[key].add(1, mode="drop")
  return SortedVisits(
      order[:num_rows].astype(jnp.int32),
      jnp.minimum(position, num_rows).reshape(expert_indices.shape),
      group_sizes,
  )


@jax.custom_vjp
def to_experts(
    x: Float[Array, "n l"], visits: SortedVisits
) -> Float[Array, "m l"]:
  """Copies each token to the rows of its visits.

  out[r] = x[order[r] // A]; the gradient of a token is the fp32 sum over its
  visits in the router's order.

  Args:
    x: [N, L].
    visits: of these tokens.

  Returns:
    [M, L] in x's dtype.
  """
  return jnp.take(x, visits.order // visits.position.shape[1], axis=0)


def _to_experts_fwd(x, visits):
  return to_experts(x, visits), (visits, x[:0])


def _to_experts_bwd(residuals, d_rows):
  visits, like = residuals
  d_x = sum(
      _rows_or_zero(d_rows, place).astype(jnp.float32)
      for place in visits.position.T
  )
  return d_x.astype(like.dtype), None


to_experts.defvjp(_to_experts_fwd, _to_experts_bwd)


@jax.custom_vjp
def to_tokens(
    rows: Float[Array, "m l"],
    weights: Float[Array, "n a"],
    visits: SortedVisits,
) -> Float[Array, "n l"]:
  """Sums what the experts return for each token, in the router's order.

  u[n] = sum_a weights[n, a] rows[position[n, a]], a visit without a row left
  out; in fp32.

  Args:
    rows: [M, L], 0 past the groups.
    weights: [N, A] fp32.
    visits: of these tokens.

  Returns:
    [N, L] fp32.
  """
  return sum(
      weight[:, None] * _rows_or_zero(rows, place).astype(jnp.float32)
      for weight, place in zip(weights.T, visits.position.T, strict=True)
  )


def _to_tokens_fwd(rows, weights, visits):
  return to_tokens(rows, weights, visits), (rows, weights, visits)


def _to_tokens_bwd(residuals, d_u):
  rows, weights, visits = residuals
  d_rows = jnp.take(d_u, visits.order // weights.shape[1], axis=0)
  d_rows = d_rows * jnp.take(weights.reshape(-1), visits.order)[:, None]
  d_weights = jnp.stack(
      [
          jnp.sum(_rows_or_zero(rows, place).astype(jnp.float32) * d_u, axis=1)
          for place in visits.position.T
      ],
      axis=1,
  )
  return d_rows.astype(rows.dtype), d_weights, None


to_tokens.defvjp(_to_tokens_fwd, _to_tokens_bwd)


def _rows_or_zero(rows, index):
  """rows[index], 0 where the index is past the last row."""
  return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)
