"""Grouped matrix product as a loop over row tiles, in plain XLA.

Every group is cut into tiles of a fixed number of rows; a tile is one dense
product with its group's matrix, read in place. At most M / tile + min(E, M)
tiles cover any group sizes, so nothing is dropped, no row meets a matrix that
is not its own, and neither work nor memory follows E at fixed M.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class _Tiles(NamedTuple):
  """One entry per tile; spare ones lie past the groups and hold no row."""

  group: jax.Array  # int32
  begin: jax.Array  # int32, the tile's first row
  end: jax.Array  # int32, one past its group's last row


@jax.custom_vjp
def grouped_matmul(lhs, rhs, group_sizes):
  """Multiplies row tiles by their group's matrix; see the api."""
  return _rows_times_matrices(lhs, rhs, group_sizes, transpose=False)


def _forward(lhs, rhs, group_sizes):
  out = _rows_times_matrices(lhs, rhs, group_sizes, transpose=False)
  return out, (lhs, rhs, group_sizes)


def _backward(residuals, d_out):
  lhs, rhs, group_sizes = residuals
  d_lhs = _rows_times_matrices(d_out, rhs, group_sizes, transpose=True)
  d_rhs = _outer_products(lhs, d_out, group_sizes).astype(rhs.dtype)
  return d_lhs, d_rhs, None


grouped_matmul.defvjp(_forward, _backward)


def _rows_times_matrices(rows, matrices, group_sizes, *, transpose):
  """rows[r] @ matrices[e], or @ matrices[e].T, by tiles: [M, N]."""
  num_rows = rows.shape[0]
  width = matrices.shape[1 if transpose else 2]
  out = jnp.zeros((num_rows, width), rows.dtype)
  if num_rows == 0:
    return out
  size = _tile_rows(num_rows, matrices.shape[0])
  contract = ((1,), (1 if transpose else 0,))

  def write_tile(out, tile):
    start, inside = _placement(tile, size, num_rows)
    product = jax.lax.dot_general(
        jax.lax.dynamic_slice_in_dim(rows, start, size),
        jax.lax.dynamic_index_in_dim(matrices, tile.group, keepdims=False),
        (contract, ((), ())),
        preferred_element_type=jnp.float32,
    )
    kept = jax.lax.dynamic_slice_in_dim(out, start, size)
    product = jnp.where(inside, product.astype(out.dtype), kept)
    return jax.lax.dynamic_update_slice_in_dim(out, product, start, 0), None

  tiles = _tiles(group_sizes, num_rows, size)
  return jax.lax.scan(write_tile, out, tiles)[0]


def _outer_products(lhs, d_out, group_sizes):
  """Per group, lhs.T @ d_out over its rows: [E, I, N] in lhs's dtype."""
  num_rows = lhs.shape[0]
  shape = (lhs.shape[1], d_out.shape[1])
  out = jnp.zeros((group_sizes.shape[0], *shape), lhs.dtype)
  if num_rows == 0:
    return out
  size = _tile_rows(num_rows, group_sizes.shape[0])

  def add_tile(carry, tile):
    # A group's tiles are consecutive: one fp32 sum serves, and is written out
    # after each tile rather than held for every group.
    out, total, previous = carry
    start, inside = _placement(tile, size, num_rows)
    product = jax.lax.dot_general(
        jnp.where(inside, jax.lax.dynamic_slice_in_dim(lhs, start, size), 0),
        jnp.where(inside, jax.lax.dynamic_slice_in_dim(d_out, start, size), 0),
        (((0,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    total = product + jnp.where(tile.group == previous, total, 0.0)
    out = jax.lax.dynamic_update_index_in_dim(
        out, total.astype(out.dtype), tile.group, 0
    )
    return (out, total, tile.group), None

  carry = (out, jnp.zeros(shape, jnp.float32), jnp.int32(-1))
  tiles = _tiles(group_sizes, num_rows, size)
  (out, _, _), _ = jax.lax.scan(add_tile, carry, tiles)
  return out


def _tile_rows(num_rows, num_groups):
  """Rows per tile: a power of two near half the mean group, in [8, 512].

  Tiles of half a mean group waste a quarter of it each on average; longer ones
  waste more rows, shorter ones read each matrix more often.
  """
  half = max(num_rows // (2 * num_groups), 1)
  return min(max(1 << (half.bit_length() - 1), 8), 512, num_rows)


def _tiles(group_sizes, num_rows, size):
  """Tiles that cover any group sizes: M // size + min(E, M) of them."""
  num_groups = group_sizes.shape[0]
  ends = jnp.minimum(jnp.cumsum(group_sizes), num_rows)
  starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
  per_group = (ends - starts + size - 1) // size
  last = jnp.cumsum(per_group)
  count = num_rows // size + min(num_groups, num_rows)
  tile = jnp.arange(count, dtype=jnp.int32)
  group = jnp.searchsorted(last, tile, side="right").astype(jnp.int32)
  spare = group == num_groups
  group = jnp.minimum(group, num_groups - 1)
  begin = starts[group] + (tile - (last - per_group)[group]) * size
  begin = jnp.where(spare, num_rows, begin)
  return _Tiles(group, begin, jnp.where(spare, num_rows, ends[group]))


def _placement(tile, size, num_rows):
  """Where to slice so that the slice fits, and the rows that are the tile's."""
  start = jnp.minimum(tile.begin, num_rows - size)
  rows = start + jnp.arange(size, dtype=jnp.int32)
  return start, ((rows >= tile.begin) & (rows < tile.end))[:, None]
