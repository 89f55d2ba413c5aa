"""All-to-all of unequal numbers of rows, inside a shard_map."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from pallas_kernels import dispatch


class Route(NamedTuple):
  """What one rank sends to and receives from each of R ranks, in rows."""

  send_sizes: Int[Array, " r"]
  send_offsets: Int[Array, " r"]  # in what is sent here
  receive_sizes: Int[Array, " r"]
  receive_offsets: Int[Array, " r"]  # in what is received here
  landing_offsets: Int[Array, " r"]  # in what each rank receives, of our part
  origin_offsets: Int[Array, " r"]  # in what each rank sent, of its part for us

  @property
  def back(self) -> "Route":
    """The way back: everything to where it came from."""
    return Route(
        send_sizes=self.receive_sizes,
        send_offsets=self.receive_offsets,
        receive_sizes=self.send_sizes,
        receive_offsets=self.send_offsets,
        landing_offsets=self.origin_offsets,
        origin_offsets=self.landing_offsets,
    )


def route(sizes: Int[Array, "r r"], axis: str) -> Route:
  """Plans an exchange: parts stand one after the other at both ends.

  Args:
    sizes: [source, target] rows, the same on every rank.
    axis: of the mesh, of size R.
  """
  me = jax.lax.axis_index(axis)
  by_source = jnp.cumsum(sizes, axis=0) - sizes  # place at the target
  by_target = jnp.cumsum(sizes, axis=1) - sizes  # place at the source
  return Route(
      send_sizes=sizes[me],
      send_offsets=by_target[me],
      receive_sizes=sizes[:, me],
      receive_offsets=by_source[:, me],
      landing_offsets=by_source[me],
      origin_offsets=by_target[:, me],
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def exchange(
    rows: Float[Array, "n l"],
    there: Route,
    axis: str,
    num_rows: int,
    at_most: int,
) -> Float[Array, "m l"]:
  """Sends each rank its part of the rows; the gradient takes the way back.

  Args:
    rows: [N, L].
    there: the route.
    axis: of the mesh, as for the route.
    num_rows: M, no fewer than any rank receives.
    at_most: rows that one rank sends another; a part is padded to so many
      where the backend has no ragged all-to-all.

  Returns:
    [M, L]: what came, in the order of ranks, then zeros.
  """
  if dispatch.device_platform() == "cpu":
    return _padded(rows, there, axis, num_rows, at_most)
  return jax.lax.ragged_all_to_all(
      rows,
      jnp.zeros((num_rows, rows.shape[1]), rows.dtype),
      there.send_offsets,
      there.send_sizes,
      there.landing_offsets,
      there.receive_sizes,
      axis_name=axis,
  )


def _forward(rows, there, axis, num_rows, at_most):
  # No values, only how many rows there were.
  residuals = there, rows[:, :0]
  return exchange(rows, there, axis, num_rows, at_most), residuals


def _backward(axis, num_rows, at_most, residuals, d_out):
  del num_rows
  there, sent = residuals
  return exchange(d_out, there.back, axis, sent.shape[0], at_most), None


exchange.defvjp(_forward, _backward)


def _padded(rows, there, axis, num_rows, at_most):
  """The same by an all-to-all of equal parts."""
  sent = there.send_offsets[:, None] + jnp.arange(at_most)[None]
  parts = jnp.take(rows, sent, axis=0, mode="clip")
  parts = jax.lax.all_to_all(parts, axis, 0, 0)
  row = jnp.arange(num_rows)
  ends = there.receive_offsets + there.receive_sizes
  source = jnp.searchsorted(ends, row, side="right")
  inside = source < ends.size
  source = jnp.minimum(source, ends.size - 1)
  received = parts[source, row - there.receive_offsets[source]]
  return jnp.where(inside[:, None], received, 0)
