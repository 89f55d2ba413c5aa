"""The work inside one chunk of 64 tokens, and its gradient.

A chunk is four tiles of 16 tokens. With D the log decay since a tile's first
row and R that row's own cumulative log decay, every decay between two rows is
a product of factors that depend on rows up to the later one only:

  same tile         exp(D_i) exp(-D_j)
  an earlier tile   exp(D_i) exp(R_tile(i) - R_tile(j)+1) exp(E - D_j)

with E - D_j the decay from row j to the first row of the next tile. So a row
of tiles is one dense product, its diagonal tile included, and what comes
later in time cannot reach it.
"""

import functools
from typing import NamedTuple

import jax
from jax import numpy as jnp
import numpy as np

CHUNK = 64
TILE = 16
_TILES = CHUNK // TILE
# exp(D) is kept times 2^32 and exp(-D) times 2^-32. Both are exact, so no
# rounding depends on the shift; it keeps exp(D) a normal number down to the
# bound at which exp(-D) overflows.
_SHIFT = 2.0**32


class Decays(NamedTuple):
  """Decay factors of a batch of chunks; Z = B * HV, t tiles of c rows."""

  up: jax.Array  # [n, Z, t, c, K] exp(D) * 2^32
  down: jax.Array  # [n, Z, t, c, K] exp(-D) * 2^-32
  rest: jax.Array  # [n, Z, t, c, K] exp(E - D), row to the next tile's start
  between: list  # per r, [n, Z, r, K] exp(R_r - R_{s+1}), s < r
  entry: jax.Array  # [n, Z, C, K] exp(G), 0 outside the state's segment
  exit: jax.Array  # [n, Z, C, K] exp(G_end - G), 0 outside the last segment
  end: jax.Array  # [n, Z, K] exp(G_end), 0 if a segment starts inside


def decays(g, runs, previous) -> Decays:
  """Builds a chunk's factors.

  Args:
    g: [n, Z, C, K] log decay.
    runs: [n, Z, C] of the tokens, or None.
    previous: [n, Z, C] of the tokens before them, or None.
  """
  n, z, _, width = g.shape
  tiles = g.reshape(n, z, _TILES, TILE, width)
  first = tiles[..., 0, :]  # [n, Z, t, K]
  zero = jnp.zeros_like(first[..., None, :])
  inner = jnp.concatenate([zero, tiles[..., 1:, :]], axis=3)
  inner = jax.lax.cumsum(inner, axis=3)  # D
  following = jnp.concatenate([first[:, :, 1:], zero[:, :, :1, 0]], axis=2)
  step = inner[..., -1, :] + following  # E
  start = jnp.concatenate([first[:, :, :1], step], axis=2)
  start = jax.lax.cumsum(start, axis=2)  # R_0 ... R_t = G_end
  between = [
      jnp.exp(start[:, :, r : r + 1] - start[:, :, 1 : r + 1])
      for r in range(_TILES + 1)
  ]
  half_up = jnp.exp(0.5 * inner)
  half_down = 1.0 / half_up  # exp(-37.5) at the least: no cliff
  up = (half_up * _SHIFT) * half_up
  down = (half_down / _SHIFT) * half_down
  rest = jnp.exp(step[..., None, :] - inner)
  from_start = jnp.exp(start)
  end = from_start[:, :, -1]
  from_start = (from_start[:, :, :-1] / _SHIFT)[..., None, :]
  entry = (up * from_start).reshape(g.shape)
  exit_ = (rest * between[-1][..., None, :]).reshape(g.shape)
  if runs is not None:
    before = previous[..., :1]  # the run that the incoming state belongs to
    same = runs[..., -1:] == before
    entry = jnp.where((runs == before)[..., None], entry, 0.0)
    exit_ = jnp.where((runs == runs[..., -1:])[..., None], exit_, 0.0)
    end = jnp.where(same, end, 0.0)
  return Decays(up, down, rest, between, entry, exit_, end)


def dot(equation, a, b, operand):
  """Multiplies in the operand dtype and accumulates in at least fp32."""
  accumulator = jnp.promote_types(operand, jnp.float32)
  precision = None if operand.itemsize == 2 else jax.lax.Precision.HIGHEST
  return jnp.einsum(
      equation,
      a.astype(operand),
      b.astype(operand),
      precision=precision,
      preferred_element_type=accumulator,
  )


def tile_rows(q, k, factors: Decays):
  """Returns, per row of tiles, the decayed rows and the decayed columns.

  Args:
    q: [n, Z, C, K].
    k: [n, Z, C, K].
    factors: of the same chunks.

  Returns:
    left: per r, [n, Z, 2c, K]: q then k rows of tile r.
    right: per r, [n, Z, (r + 1) c, K]: k rows of tiles 0 ... r.
  """
  shape = factors.up.shape
  q_up = q.reshape(shape) * factors.up
  k_up = k.reshape(shape) * factors.up
  k_down = k.reshape(shape) * factors.down
  k_rest = k.reshape(shape) * factors.rest
  left, right = [], []
  for r in range(_TILES):
    left.append(jnp.concatenate([q_up[:, :, r], k_up[:, :, r]], axis=2))
    earlier = k_rest[:, :, :r] * _across(factors, r)
    earlier = earlier.reshape(*shape[:2], r * TILE, shape[-1])
    right.append(jnp.concatenate([earlier, k_down[:, :, r]], axis=2))
  return left, right


def _across(factors, r):
  """[n, Z, r, 1, K] from the tiles after s < r to tile r, times 2^-32."""
  return (factors.between[r] / _SHIFT)[:, :, :, None]


def scores(left, right, masks, operand):
  """Returns masked decayed products of q with k, and of k with k.

  Args:
    left: see tile_rows.
    right: see tile_rows.
    masks: (i >= j, i > j) pairs of one segment, each [1 or n, 1 or Z, C, C].
    operand: dtype of the product's operands.

  Returns:
    qk: [n, Z, C, C] lower triangular.
    kk: [n, Z, C, C] strictly lower triangular.
  """
  rows_q, rows_k = [], []
  for r in range(_TILES):
    block = dot("nzik,nzjk->nzij", left[r], right[r], operand)
    pad = [(0, 0)] * 3 + [(0, CHUNK - block.shape[-1])]
    block = jnp.pad(block, pad)
    rows_q.append(block[:, :, :TILE])
    rows_k.append(block[:, :, TILE:])
  qk = jnp.where(masks[0], jnp.concatenate(rows_q, axis=2), 0.0)
  kk = jnp.where(masks[1], jnp.concatenate(rows_k, axis=2), 0.0)
  return qk, kk


def pair_masks(runs):
  """Returns the masks of `scores` for runs [n, Z, C], or None (one run)."""
  row, column = np.indices((CHUNK, CHUNK))
  masks = (jnp.asarray(row >= column), jnp.asarray(row > column))
  masks = tuple(m[None, None] for m in masks)
  if runs is None:
    return masks
  same = runs[..., :, None] == runs[..., None, :]
  return tuple(m & same for m in masks)


def scores_gradient(d_qk, d_kk, left, right, factors: Decays, operand):
  """Pulls masked score gradients back to the decayed rows and columns.

  Args:
    d_qk: [n, Z, C, C], zero where `scores` masks.
    d_kk: [n, Z, C, C], zero where `scores` masks.
    left: see tile_rows.
    right: see tile_rows.
    factors: of the same chunks.
    operand: dtype of the products' operands.

  Returns:
    dq: [n, Z, C, K].
    dk: [n, Z, C, K].
    d_decay: [n, Z, C, K], of the cumulative log decay G. It weighs the rounded
      rows and columns that the products saw, so that the two ends of every
      pair cancel in the sum over tokens at any operand dtype.
  """
  dq, dk_row, rising, dk_column, falling = [], [], [], 0.0, 0.0
  for r in range(_TILES):
    rows = slice(r * TILE, (r + 1) * TILE)
    width = (r + 1) * TILE
    block = jnp.concatenate(
        [d_qk[:, :, rows, :width], d_kk[:, :, rows, :width]], axis=2
    )
    d_left = dot("nzij,nzjk->nzik", block, right[r], operand)
    weighed = d_left * left[r].astype(operand).astype(d_left.dtype)
    rising.append(weighed[:, :, :TILE] + weighed[:, :, TILE:])
    up = factors.up[:, :, r]
    dq.append(d_left[:, :, :TILE] * up)
    dk_row.append(d_left[:, :, TILE:] * up)
    d_right = dot("nzij,nzik->nzjk", block, left[r], operand)
    weighed = d_right * right[r].astype(operand).astype(d_right.dtype)
    earlier = factors.rest[:, :, :r] * _across(factors, r)
    factor = jnp.concatenate([earlier, factors.down[:, :, r : r + 1]], axis=2)
    pad = [(0, 0), (0, 0), (0, CHUNK - width), (0, 0)]
    dk_column += jnp.pad(d_right * factor.reshape(d_right.shape), pad)
    falling += jnp.pad(weighed, pad)
  join = functools.partial(jnp.concatenate, axis=2)
  return join(dq), join(dk_row) + dk_column, join(rising) - falling


def sum_from_here(x):
  """Sums [n, Z, C, K] over each chunk's tokens from every token onwards."""
  n, z, _, width = x.shape
  tiles = x.reshape(n, z, _TILES, TILE, width)
  inner = jax.lax.cumsum(tiles, axis=3, reverse=True)
  later = jnp.pad(inner[:, :, 1:, 0], ((0, 0), (0, 0), (0, 1), (0, 0)))
  later = jax.lax.cumsum(later, axis=2, reverse=True)
  return (inner + later[:, :, :, None]).reshape(x.shape)


def unit_lower_inverse(lower):
  """Inverts I + lower for strictly lower triangular [..., C, C], in fp32.

  Substitution on the 16-row diagonal blocks, then
  [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]] twice. A product of
  powers of lower would overflow on correlated keys that hardly decay.
  """
  inverse = _substitute(_diagonal(lower, TILE, 0))  # [..., C / 16, 16, 16]
  for size in (TILE, 2 * TILE):
    a, d = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
    b = _diagonal(lower, size, 1)
    corner = -_exact(d, _exact(b, a))
    top = jnp.concatenate([a, jnp.zeros_like(a)], axis=-1)
    bottom = jnp.concatenate([corner, d], axis=-1)
    inverse = jnp.concatenate([top, bottom], axis=-2)
  return inverse[..., 0, :, :]


def _diagonal(x, size, below):
  """Stacks the size-wide blocks on the diagonal, or those below every other.

  Args:
    x: [..., C, C].
    size: of a block.
    below: 0 for blocks (i, i); 1 for blocks (2 i + 1, 2 i).
  """
  corners = range(0, CHUNK, size * (1 + below))
  return jnp.stack(
      [
          x[..., i + below * size : i + (1 + below) * size, i : i + size]
          for i in corners
      ],
      axis=-3,
  )


def _exact(a, b):
  return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _substitute(lower):
  """Inverts I + lower for 16-row blocks: row i is e_i - lower_i rows_<i."""
  inverse = jnp.broadcast_to(jnp.eye(TILE, dtype=lower.dtype), lower.shape)
  for j in range(TILE - 1):
    # lower[:, j] is zero down to row j: only later rows change.
    inverse -= lower[..., :, j : j + 1] * inverse[..., j : j + 1, :]
  return inverse
