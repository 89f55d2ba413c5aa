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
  between: list  # [r][s] -> [n, Z, K] exp(R_r - R_{s+1}), s < r
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
  inner = jnp.cumsum(tiles.at[..., 0, :].set(0.0), axis=3)
  last = inner[..., -1, :]
  step = last.at[..., :-1, :].add(first[..., 1:, :])  # E
  start = [first[..., 0, :]]
  for s in range(_TILES):
    start.append(start[-1] + step[..., s, :])  # R_0 ... R_t = G_end
  half_up, half_down = jnp.exp(0.5 * inner), jnp.exp(-0.5 * inner)
  up = (half_up * _SHIFT) * half_up
  down = (half_down / _SHIFT) * half_down
  rest = jnp.exp(step[..., None, :] - inner)
  to_start = jnp.stack([jnp.exp(r) / _SHIFT for r in start[:-1]], axis=2)
  to_end = jnp.stack([jnp.exp(start[-1] - r) for r in start[1:]], axis=2)
  entry = (up * to_start[..., None, :]).reshape(g.shape)
  exit_ = (rest * to_end[..., None, :]).reshape(g.shape)
  end = jnp.exp(start[-1])
  if runs is not None:
    before = previous[..., :1]  # the run that the incoming state belongs to
    same = runs[..., -1:] == before
    entry = jnp.where((runs == before)[..., None], entry, 0.0)
    exit_ = jnp.where((runs == runs[..., -1:])[..., None], exit_, 0.0)
    end = jnp.where(same, end, 0.0)
  between = [
      [jnp.exp(start[r] - start[s + 1]) for s in range(r)]
      for r in range(_TILES)
  ]
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
    columns = [
        k_rest[:, :, s] * (factors.between[r][s] / _SHIFT)[:, :, None]
        for s in range(r)
    ]
    right.append(jnp.concatenate([*columns, k_down[:, :, r]], axis=2))
  return left, right


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
  dq, dk_row, rising = [], [], []
  dk_column, falling = [0.0] * _TILES, [0.0] * _TILES
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
    for s in range(r + 1):
      columns = slice(s * TILE, (s + 1) * TILE)
      if s < r:
        across = (factors.between[r][s] / _SHIFT)[:, :, None]
        factor = factors.rest[:, :, s] * across
      else:
        factor = factors.down[:, :, s]
      dk_column[s] += d_right[:, :, columns] * factor
      falling[s] += weighed[:, :, columns]
  join = functools.partial(jnp.concatenate, axis=2)
  dk = join(dk_row) + join(dk_column)
  return join(dq), dk, join(rising) - join(falling)


def unit_lower_inverse(lower):
  """Inverts I + lower for strictly lower triangular [..., C, C], in fp32.

  Substitution on the 16-row diagonal blocks, then
  [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]] twice. A product of
  powers of lower would overflow on correlated keys that hardly decay.
  """
  size = TILE
  blocks = [
      lower[..., i : i + size, i : i + size] for i in range(0, CHUNK, size)
  ]
  blocks = list(
      jnp.moveaxis(_substitute(jnp.stack(blocks, axis=-3)), -3, 0)
  )
  while size < CHUNK:
    merged = []
    for i in range(0, len(blocks), 2):
      a, d = blocks[i], blocks[i + 1]
      top = i * size
      b = lower[..., top + size : top + 2 * size, top : top + size]
      corner = -_exact(d, _exact(b, a))
      upper = jnp.concatenate([a, jnp.zeros_like(a)], axis=-1)
      merged.append(
          jnp.concatenate(
              [upper, jnp.concatenate([corner, d], axis=-1)], axis=-2
          )
      )
    blocks, size = merged, 2 * size
  return blocks[0]


def _exact(a, b):
  return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _substitute(lower):
  """Inverts I + lower for 16-row blocks: row i is e_i - lower_i rows_<i."""
  inverse = jnp.broadcast_to(jnp.eye(TILE, dtype=lower.dtype), lower.shape)
  for j in range(TILE - 1):
    # lower[:, j] is zero down to row j: only later rows change.
    inverse -= lower[..., :, j : j + 1] * inverse[..., j : j + 1, :]
  return inverse
