"""What happens inside two neighbouring chunks of one head, on a TPU.

The algebra is `intra_chunk`'s: tiles of 16 rows around their first row, one
dense product per row of tiles, an fp32 block inverse. The layout is the
TPU's. A [C, C] matrix of either chunk is half of a vector register wide, so
the two stand side by side in 128 lanes, [C, 2C]. `on_diagonal` moves them onto
the diagonal of a [2C, 2C] matrix without moving a lane, and then

  beside(x) @ on_diagonal(y) = beside(x y)      on_diagonal(x) @ rows = x rows

fill a 128-wide matrix unit with products of both chunks.
"""

from typing import NamedTuple

import jax
from jax import numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import intra_chunk

CHUNK = intra_chunk.CHUNK
TILE = intra_chunk.TILE
PAIR = 2 * CHUNK
_TILES = CHUNK // TILE
_SHIFT = 2.0**32  # see intra_chunk
# Contracted dimensions of a and b.
NN, NT, TN = (1, 0), (1, 1), (0, 0)


def dot(a, b, contract, operand):
  """Multiplies in the operand dtype and accumulates in fp32."""
  exact = operand.itemsize > 2
  return _dot(
      a.astype(operand),
      b.astype(operand),
      contract,
      jax.lax.Precision.HIGHEST if exact else None,
  )


def _dot(a, b, contract, precision):
  left, right = contract
  return jax.lax.dot_general(
      a,
      b,
      (((left,), (right,)), ((), ())),
      precision=precision,
      preferred_element_type=jnp.float32,
  )


def _iota(axis):
  return jax.lax.broadcasted_iota(jnp.int32, (CHUNK, PAIR), axis)


def beside(first, second):
  """[C, 2C] and [C, 2C], or [C, 1] each: the left half and the right half."""
  left = jax.lax.broadcasted_iota(jnp.int32, (first.shape[0], PAIR), 1) < CHUNK
  first, second = (
      jnp.broadcast_to(x, (x.shape[0], PAIR)) for x in (first, second)
  )
  return jnp.where(left, first, second)


def on_diagonal(x):
  """[n, 2C] side by side -> [2n, 2C]: the right half below the left one."""
  zero = jnp.zeros_like(x)
  return jnp.concatenate([beside(x, zero), beside(zero, x)], axis=0)


class Rows(NamedTuple):
  """Where segments begin and what is padding; columns of 0 or 1, int32."""

  valid: jax.Array  # [2C, 1] not padding
  reads: jax.Array  # [2C, 1] of the incoming state's segment
  writes: jax.Array  # [2C, 1] of the outgoing state's segment
  keeps: list  # per chunk, [1, 1]: the incoming state reaches the end
  same: jax.Array  # [C, 2C] side by side, bool: pairs of one segment


ROW_FIELDS = (
    8  # run, valid, reads, writes, keeps, and padding to a sublane tile
)


def read_rows(fields) -> Rows:
  """Unpacks [ROW_FIELDS, 2C] int32."""
  column = fields.T
  run, valid, reads, writes, keeps = (column[:, i : i + 1] for i in range(5))
  return Rows(
      valid,
      reads,
      writes,
      [keeps[:1], keeps[CHUNK : CHUNK + 1]],
      beside(run[:CHUNK], run[CHUNK:])
      == jnp.broadcast_to(fields[:1], (CHUNK, PAIR)),
  )


def select(flags, x):
  """Zero where the column of flags is 0, whatever stands there."""
  return jnp.where(jnp.broadcast_to(flags, x.shape) > 0, x, 0.0)


def _by_tile(x):
  return x.reshape(2, _TILES, TILE, x.shape[-1])


def _sum_tile(x, sign):
  """Sums [2C, K] from each tile's first row (sign 1), or to its last (-1)."""
  row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) % TILE
  for shift in (1, 2, 4, 8):
    moved = pltpu.roll(x, sign * shift % PAIR, 0)
    reached = row >= shift if sign > 0 else row < TILE - shift
    x += jnp.where(reached, moved, 0.0)
  return x


def sum_from_here(x):
  """Sums [2C, K] over each chunk's tokens from every token onwards."""
  inner = _by_tile(_sum_tile(x, -1))
  first = inner[:, :, :1]
  later = [jnp.zeros_like(first[:, :1])]
  for t in reversed(range(1, _TILES)):
    later.append(later[-1] + first[:, t : t + 1])
  return (inner + jnp.concatenate(later[::-1], axis=1)).reshape(x.shape)


class Decays(NamedTuple):
  """Decay factors of two chunks, [2, t, c, K]; see `intra_chunk.Decays`."""

  up: jax.Array  # exp(D) * 2^32
  down: jax.Array  # exp(-D) * 2^-32
  rest: jax.Array  # exp(E - D)
  across: list  # per r, [2, r, 1, K] exp(R_r - R_{s+1}) * 2^-32, s < r
  entry: jax.Array  # [2C, K] exp(G), 0 outside the state's segment
  exit: jax.Array  # [2C, K] exp(G_end - G), 0 outside the last segment
  end: list  # per chunk, [1, K] exp(G_end), 0 if a segment starts inside


def decays(g, rows) -> Decays:
  """Builds the factors from log decays [2C, K]."""
  tiles = _by_tile(g)
  first = tiles[:, :, :1]
  row = jax.lax.broadcasted_iota(jnp.int32, g.shape, 0) % TILE
  inner = _by_tile(_sum_tile(jnp.where(row > 0, g, 0.0), 1))  # D
  last = inner[:, :, TILE - 1 :]
  step = [last[:, t : t + 1] for t in range(_TILES)]  # E
  start = [first[:, :1]]  # R_0 ... R_t = G_end
  for t in range(_TILES):
    if t + 1 < _TILES:
      step[t] += first[:, t + 1 : t + 2]
    start.append(start[t] + step[t])
  step, start = (jnp.concatenate(x, axis=1) for x in (step, start))
  between = [
      jnp.exp(start[:, r : r + 1] - start[:, 1 : r + 1])
      for r in range(1, _TILES + 1)
  ]
  half_up, half_down = jnp.exp(0.5 * inner), jnp.exp(-0.5 * inner)
  up = (half_up * _SHIFT) * half_up
  down = (half_down / _SHIFT) * half_down
  rest = jnp.exp(step - inner)
  from_start = jnp.exp(start)
  entry = (up * (from_start[:, :-1] / _SHIFT)).reshape(g.shape)
  exit_ = (rest * between[-1]).reshape(g.shape)
  end = [from_start[c, _TILES] for c in (0, 1)]
  if rows is not None:
    entry, exit_ = select(rows.reads, entry), select(rows.writes, exit_)
    end = [select(keep, x) for keep, x in zip(rows.keeps, end)]
  across = [x / _SHIFT for x in between[:-1]]
  return Decays(up, down, rest, across, entry, exit_, end)


def _column_factors(factors, r):
  """[2, r + 1, c, K]: what decays the columns that tile r's rows multiply."""
  own = factors.down[:, r : r + 1]
  if not r:
    return own
  earlier = factors.rest[:, :r] * factors.across[r - 1]
  return jnp.concatenate([earlier, own], axis=1)


def _all_columns(x, width):
  """[2, r + 1, c, K] -> [2C, K], zero in later tiles."""
  missing = _TILES - x.shape[1]
  if missing:
    zero = jnp.zeros((2, missing, TILE, width), x.dtype)
    x = jnp.concatenate([x, zero], axis=1)
  return x.reshape(PAIR, width)


class Local(NamedTuple):
  """What two chunks of one head hold that does not depend on the state."""

  q: jax.Array  # [2C, K] fp32, as k
  k: jax.Array
  beta: jax.Array  # [2C, 1]
  factors: Decays
  left: list  # per r, [4c, K] operand: q, k rows of tile r, chunk by chunk
  right: list  # per r, [2C, K] operand: k of tiles up to r
  qk: jax.Array  # [C, 2C] P, masked, side by side
  kk: jax.Array  # [C, 2C] A, masked
  causal: jax.Array  # [C, 2C] the masks, i >= j and i > j in one segment
  strict: jax.Array
  inverse: jax.Array  # [C, 2C] (I + b A)^-1


def local(q, k, g, beta, rows, operand) -> Local:
  """Computes decays, scores and the inverse.

  Args:
    q: [2C, K] fp32, two chunks of one head; zero on padding, as all.
    k: [2C, K] fp32.
    g: [2C, K] fp32 log decay.
    beta: [2C, 1] fp32.
    rows: Rows, or None for one segment without padding.
    operand: dtype of the products' operands.
  """
  factors = decays(g, rows)
  width = q.shape[-1]
  q_up, k_up = _by_tile(q) * factors.up, _by_tile(k) * factors.up
  left, right, scores_q, scores_k = [], [], [], []
  for r in range(_TILES):
    pieces = (q_up[0, r], k_up[0, r], q_up[1, r], k_up[1, r])
    left.append(jnp.concatenate(pieces, axis=0).astype(operand))
    columns = _by_tile(k)[:, : r + 1] * _column_factors(factors, r)
    right.append(_all_columns(columns, width).astype(operand))
    s = dot(left[r], right[r], NT, operand)
    scores_q.append(beside(s[:TILE], s[2 * TILE : 3 * TILE]))
    scores_k.append(beside(s[TILE : 2 * TILE], s[3 * TILE :]))
  causal, strict = _masks(rows)
  qk = jnp.where(causal, jnp.concatenate(scores_q, axis=0), 0.0)
  kk = jnp.where(strict, jnp.concatenate(scores_k, axis=0), 0.0)
  inverse = unit_lower_inverse(beside(beta[:CHUNK], beta[CHUNK:]) * kk, operand)
  return Local(
      q, k, beta, factors, left, right, qk, kk, causal, strict, inverse
  )


def _masks(rows):
  """Returns (i >= j, i > j) pairs of one segment, [C, 2C] side by side."""
  row, column = _iota(0), _iota(1) % CHUNK
  causal, strict = row >= column, row > column
  if rows is None:
    return causal, strict
  return causal & rows.same, strict & rows.same


def unit_lower_inverse(lower, operand):
  """Inverts I + lower for strictly lower triangular blocks side by side.

  Substitution on the eight 16-row diagonal blocks at once, one beside the
  other in the lanes; then block merges, see `intra_chunk`.

  Args:
    lower: [C, 2C] fp32, side by side.
    operand: if 16 bits wide, the merges take three products of 16-bit halves,
      which is more than their result will be rounded to.
  """
  tile_of_row, tile_of_lane = _iota(0) // TILE, _iota(1) % CHUNK // TILE
  diagonal = tile_of_row == tile_of_lane
  packed = jnp.where(diagonal, lower, 0.0)
  packed = sum(packed[r * TILE : (r + 1) * TILE] for r in range(_TILES))
  packed = _substitute(packed)
  inverse = jnp.concatenate([packed] * _TILES, axis=0)
  inverse = jnp.where(diagonal, inverse, 0.0)
  precision = (
      jax.lax.Precision.HIGH
      if operand.itemsize == 2
      else jax.lax.Precision.HIGHEST
  )
  for size in (TILE, 2 * TILE):
    odd = [slice(i, i + size) for i in range(size, CHUNK, 2 * size)]
    below = _iota(0) // size == _iota(1) % CHUNK // size + 1
    corner = _odd_rows(jnp.where(below, lower, 0.0), odd)
    corner = _dot(corner, on_diagonal(inverse), NN, precision)
    corner = on_diagonal(_spread(corner, size))
    corner = _dot(_odd_rows(inverse, odd), corner, NN, precision)
    inverse -= _spread(corner, size)
  return inverse


def _odd_rows(x, odd):
  return jnp.concatenate([x[rows] for rows in odd], axis=0)


def _spread(x, size):
  """Puts blocks of `size` rows back into odd places, zeros between."""
  zero = jnp.zeros_like(x[:size])
  blocks = []
  for i in range(0, x.shape[0], size):
    blocks += [zero, x[i : i + size]]
  return jnp.concatenate(blocks, axis=0)


def _substitute(lower):
  """Inverts I + lower for 16-row blocks side by side, [c, 2C]."""
  lane = jax.lax.broadcasted_iota(jnp.int32, lower.shape, 1)
  row = jax.lax.broadcasted_iota(jnp.int32, lower.shape, 0)
  block = lane // TILE * TILE
  inverse = jnp.where(row == lane - block, 1.0, 0.0)
  for j in range(TILE - 1):
    # lower[:, j] is zero down to row j: only later rows change.
    column = jnp.take_along_axis(
        lower, block + j, axis=1, mode="promise_in_bounds"
    )
    inverse -= column * inverse[j : j + 1]
  return inverse


def scores_gradient(d_qk, d_kk, x: Local, operand):
  """Pulls masked score gradients back, see `intra_chunk.scores_gradient`.

  Args:
    d_qk: [C, 2C] side by side, zero where masked.
    d_kk: [C, 2C].
    x: of the same chunks.
    operand: dtype of the products' operands.

  Returns:
    dq, dk, d_decay: [2C, K] each.
  """
  width = x.q.shape[-1]
  dq, dk_row, rising = [], [], []
  dk_column = falling = jnp.zeros((PAIR, width), jnp.float32)
  for r in range(_TILES):
    tile = slice(r * TILE, (r + 1) * TILE)
    pieces = (d_qk[tile], d_kk[tile])
    zero = jnp.zeros_like(pieces[0])
    block = [beside(y, zero) for y in pieces] + [
        beside(zero, y) for y in pieces
    ]
    block = jnp.concatenate(block, axis=0)
    d_left = dot(block, x.right[r], NN, operand)
    weighed = d_left * x.left[r].astype(jnp.float32)
    d_left, weighed = (y.reshape(2, 2, TILE, width) for y in (d_left, weighed))
    rising.append(weighed[:, 0] + weighed[:, 1])
    up = x.factors.up[:, r]
    dq.append(d_left[:, 0] * up)
    dk_row.append(d_left[:, 1] * up)
    d_right = dot(block, x.left[r], TN, operand)
    falling += d_right * x.right[r].astype(jnp.float32)
    d_right = _by_tile(d_right)[:, : r + 1] * _column_factors(x.factors, r)
    dk_column += _all_columns(d_right, width)

  def join(tiles):
    return jnp.stack(tiles, axis=1).reshape(PAIR, width)

  return join(dq), join(dk_row) + dk_column, join(rising) - falling
