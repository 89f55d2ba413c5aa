"""What happens inside two neighbouring chunks of a few heads, on a TPU.

The algebra is `intra_chunk`'s: tiles of 16 rows around their first row, one
dense product per row of tiles, an fp32 block inverse. The layout is the
TPU's. A [C, C] matrix of one chunk is half a vector register wide, so the two
chunks' stand side by side in 128 lanes, [C, 2C]. `on_diagonal` puts them on
the diagonal of a [2C, 2C] matrix without moving a lane, and then

  beside(x) @ on_diagonal(y) = beside(x y)      on_diagonal(x) @ rows = x rows

fill a 128-wide matrix unit with products of both chunks. Every array has a
leading axis of n heads: independent work that fills the units' latency.
"""

import math
from typing import NamedTuple

import jax
from jax import numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import intra_chunk

CHUNK = intra_chunk.CHUNK
TILE = intra_chunk.TILE
PAIR = 2 * CHUNK
LOG2_E = math.log2(math.e)
_TILES = CHUNK // TILE
# exp(D) is kept times 2^32: a normal number down to the bound at which its
# reciprocal overflows.
_SHIFT = 32.0
# Contracted dimensions of a and b.
NN, NT, TN = (1, 0), (1, 1), (0, 0)


def dot(a, b, contract, operand):
  """Multiplies [n, ...] in the operand dtype and accumulates in fp32."""
  precision = None if operand.itemsize == 2 else jax.lax.Precision.HIGHEST
  return _dot(a.astype(operand), b.astype(operand), contract, precision)


def _dot(a, b, contract, precision=None):
  left, right = contract
  return jax.lax.dot_general(
      a,
      b,
      (((left + 1,), (right + 1,)), ((0,), (0,))),
      precision=precision,
      preferred_element_type=jnp.float32,
  )


def _iota(axis, rows=CHUNK):
  return jax.lax.broadcasted_iota(jnp.int32, (rows, PAIR), axis)


def join(arrays):
  """Concatenates [n, rows, width] below each other."""
  return jnp.concatenate(arrays, axis=1)


def halves(x):
  """The rows of the first and of the second chunk."""
  middle = x.shape[1] // 2
  return x[:, :middle], x[:, middle:]


def beside(first, second):
  """Two [n, rows, 2C or 1]: the left half and the right half of the lanes."""
  shape = (*first.shape[:2], PAIR)
  left = jnp.broadcast_to(_iota(1, shape[1]) < CHUNK, shape)
  first, second = (jnp.broadcast_to(x, shape) for x in (first, second))
  return jnp.where(left, first, second)


def on_diagonal(x):
  """[n, rows, 2C] side by side: the right half below the left one."""
  zero = jnp.zeros_like(x)
  return join([beside(x, zero), beside(zero, x)])


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
  own = beside(*halves(run[None]))[0]
  return Rows(
      valid,
      reads,
      writes,
      [keeps[:1], keeps[CHUNK : CHUNK + 1]],
      own == jnp.broadcast_to(fields[:1], own.shape),
  )


def select(flags, x):
  """Zero where the column of flags is 0, whatever stands there."""
  return jnp.where(jnp.broadcast_to(flags, x.shape) > 0, x, 0.0)


def _by_tile(x):
  return x.reshape(x.shape[0], 2, _TILES, TILE, x.shape[-1])


def _by_row(x):
  return x.reshape(x.shape[0], PAIR, x.shape[-1])


def _sum_tile(x, sign):
  """Sums [n, 2C, K] from each tile's first row (sign 1) or to its last."""
  row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) % TILE
  for shift in (1, 2, 4, 8):
    moved = pltpu.roll(x, sign * shift % PAIR, 1)
    reached = row >= shift if sign > 0 else row < TILE - shift
    x += jnp.where(reached, moved, 0.0)
  return x


def sum_from_here(x):
  """Sums [n, 2C, K] over each chunk's tokens from every token onwards."""
  inner = _by_tile(_sum_tile(x, -1))
  first = inner[:, :, :, :1]
  later = [jnp.zeros_like(first[:, :, :1])]
  for t in reversed(range(1, _TILES)):
    later.append(later[-1] + first[:, :, t : t + 1])
  return _by_row(inner + jnp.concatenate(later[::-1], axis=2))


class Decays(NamedTuple):
  """Decay factors; D, E and R as in `intra_chunk`, _SHIFT undone by rows."""

  up: jax.Array  # [n, 2, t, c, K] exp(D) * 2^32
  down: jax.Array  # [n, 2, t, c, K] exp(-D) * 2^-32
  rest: jax.Array  # [n, 2, t, c, K] exp(E - D)
  across: list  # per r, [n, 2, r, 1, K] exp(R_r - R_{s+1}) * 2^-32, s < r
  start: jax.Array  # [n, 2, t, 1, K] exp(R) * 2^-32
  finish: jax.Array  # [n, 2, t, 1, K] exp(G_end - R_{s+1})
  end: list  # per chunk, [n, 1, K] exp(G_end)


def decays(g) -> Decays:
  """Builds the factors from log2 decays [n, 2C, K]."""
  first = _by_tile(g)[:, :, :, :1]
  row = jax.lax.broadcasted_iota(jnp.int32, g.shape, 1) % TILE
  inner = _by_tile(_sum_tile(jnp.where(row > 0, g, 0.0), 1))  # D
  last = inner[:, :, :, TILE - 1 :]
  step = [last[:, :, t : t + 1] for t in range(_TILES)]  # E
  start = [first[:, :, :1]]  # R_0 ... R_t = G_end
  for t in range(_TILES):
    if t + 1 < _TILES:
      step[t] += first[:, :, t + 1 : t + 2]
    start.append(start[t] + step[t])
  step, start = (jnp.concatenate(x, axis=2) for x in (step, start))

  def between(r, shift):
    return jnp.exp2(start[:, :, r : r + 1] - start[:, :, 1 : r + 1] - shift)

  shifted = inner + _SHIFT
  end = jnp.exp2(start[:, :, _TILES])
  return Decays(
      up=jnp.exp2(shifted),
      down=jnp.exp2(-shifted),
      rest=jnp.exp2(step - inner),
      across=[between(r, _SHIFT) for r in range(1, _TILES)],
      start=jnp.exp2(start[:, :, :_TILES] - _SHIFT),
      finish=between(_TILES, 0.0),
      end=[end[:, c] for c in (0, 1)],
  )


def entry_and_exit(factors, rows):
  """[n, 2C, K] e^G and e^(G_end - G), zero where another segment stands."""
  entry = _by_row(factors.up * factors.start)
  exit_ = _by_row(factors.rest * factors.finish)
  if rows is None:
    return entry, exit_
  return select(rows.reads, entry), select(rows.writes, exit_)


class Local(NamedTuple):
  """What two chunks of n heads hold that does not depend on the state."""

  q: jax.Array  # [n, 2C, K] fp32, as k
  k: jax.Array
  beta: jax.Array  # [n, 2C, 1]
  factors: Decays
  left: list  # per r, [n, 4c, K] operand: q, k rows of tile r, by chunk
  right: list  # per r, [n, 2C, K] operand: k of tiles up to r, zero later
  q_entry: jax.Array  # [n, 2C, K] q e^G, 0 outside the state's segment
  k_entry: jax.Array  # [n, 2C, K] k e^G
  k_exit: jax.Array  # [n, 2C, K] k e^(G_end - G), 0 outside the last segment
  end: list  # per chunk, [n, 1, K] e^G_end, 0 if a segment starts inside
  causal: jax.Array  # [C, 2C] bool: i >= j, and i > j, of one segment
  strict: jax.Array
  qk: jax.Array  # [n, C, 2C] P, masked, side by side
  kk: jax.Array  # [n, C, 2C] A, masked
  inverse: jax.Array  # [n, C, 2C] (I + b A)^-1


def local(q, k, g, beta, rows, operand) -> Local:
  """Computes decays, scores and the inverse.

  Args:
    q: [n, 2C, K] fp32, two chunks of n heads; zero on padding, as all.
    k: [n, 2C, K] fp32.
    g: [n, 2C, K] fp32 log2 decay.
    beta: [n, 2C, 1] fp32.
    rows: Rows, or None for one segment without padding.
    operand: dtype of the products' operands.
  """
  factors = decays(g)
  q_up, k_up = _by_tile(q) * factors.up, _by_tile(k) * factors.up
  k_down, k_rest = _by_tile(k) * factors.down, _by_tile(k) * factors.rest
  left, right, scores_q, scores_k = [], [], [], []
  for r in range(_TILES):
    rows_of = (q_up[:, 0, r], k_up[:, 0, r], q_up[:, 1, r], k_up[:, 1, r])
    left.append(join(rows_of).astype(operand))
    right.append(_columns(k_rest, k_down, factors, r, operand))
    s = dot(left[r], right[r], NT, operand)
    s = [s[:, i * TILE : (i + 1) * TILE] for i in range(4)]
    scores_q.append(beside(s[0], s[2]))
    scores_k.append(beside(s[1], s[3]))
  causal, strict = _masks(rows)
  qk = jnp.where(_like(causal, q), join(scores_q), 0.0)
  kk = jnp.where(_like(strict, q), join(scores_k), 0.0)
  q_entry, k_entry = (_by_row(x * factors.start) for x in (q_up, k_up))
  k_exit = _by_row(k_rest * factors.finish)
  end = factors.end
  if rows is not None:
    q_entry, k_entry = (select(rows.reads, x) for x in (q_entry, k_entry))
    k_exit = select(rows.writes, k_exit)
    end = [select(keep, x) for keep, x in zip(rows.keeps, end, strict=True)]
  return Local(
      q,
      k,
      beta,
      factors,
      left,
      right,
      q_entry,
      k_entry,
      k_exit,
      end,
      causal,
      strict,
      qk,
      kk,
      unit_lower_inverse(beside(*halves(beta)) * kk, operand),
  )


def _like(mask, x):
  return jnp.broadcast_to(mask, (x.shape[0], *mask.shape))


def _columns(k_rest, k_down, factors, r, operand):
  """The columns that tile r's rows multiply, zero in later tiles."""
  own = k_down[:, :, r : r + 1].astype(operand)
  parts = [own]
  if r:
    earlier = k_rest[:, :, :r] * factors.across[r - 1]
    parts = [earlier.astype(operand), own]
  if r + 1 < _TILES:
    shape = (*own.shape[:2], _TILES - r - 1, *own.shape[3:])
    parts.append(jnp.zeros(shape, operand))
  return _by_row(jnp.concatenate(parts, axis=2))


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
    lower: [n, C, 2C] fp32, side by side.
    operand: what the result will be rounded to.
  """
  diagonal = _iota(0) // TILE == _iota(1) % CHUNK // TILE
  diagonal = _like(diagonal, lower)
  packed = jnp.where(diagonal, lower, 0.0)
  packed = sum(packed[:, r * TILE : (r + 1) * TILE] for r in range(_TILES))
  packed = _substitute(packed)
  inverse = jnp.where(diagonal, join([packed] * _TILES), 0.0)
  for size in (TILE, 2 * TILE):
    odd = [slice(i, i + size) for i in range(size, CHUNK, 2 * size)]
    below = _iota(0) // size == _iota(1) % CHUNK // size + 1
    corner = jnp.where(_like(below, lower), lower, 0.0)
    corner = join([corner[:, rows] for rows in odd])
    corner = _exact(corner, inverse, operand)
    own = join([inverse[:, rows] for rows in odd])
    corner = _exact(own, _spread(corner, size), operand)
    inverse -= _spread(corner, size)
  return inverse


def _spread(x, size):
  """Puts blocks of `size` rows back into odd places, zeros between."""
  zero = jnp.zeros_like(x[:, :size])
  blocks = []
  for i in range(0, x.shape[1], size):
    blocks += [zero, x[:, i : i + size]]
  return join(blocks)


def _exact(a, b, operand):
  """Rows of a times b, both side by side, beyond the operand's precision.

  Where the result is rounded to 16 bits, three products of 16-bit halves are
  enough.
  """
  if operand.itemsize > 2:
    return _dot(a, on_diagonal(b), NN, jax.lax.Precision.HIGHEST)
  a_high, a_low = _split(a)
  b_high, b_low = (on_diagonal(x) for x in _split(b))
  high, low = halves(_dot(join([a_high, a_low]), b_high, NN))
  return high + (low + _dot(a_high, b_low, NN))


def _split(x):
  high = x.astype(jnp.bfloat16)
  return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def _substitute(lower):
  """Inverts I + lower for 16-row blocks side by side, [n, c, 2C]."""
  heads = lower.shape[0]
  lane, row = _iota(1, heads * TILE), _iota(0, heads * TILE) % TILE
  block = lane // TILE * TILE
  inverse = jnp.where(row == lane - block, 1.0, 0.0).reshape(lower.shape)
  lower = lower.reshape(heads * TILE, PAIR)
  for j in range(TILE - 1):
    # lower[:, j] is zero down to row j: only later rows change.
    column = jnp.take_along_axis(
        lower, block + j, axis=1, mode="promise_in_bounds"
    )
    column = column.reshape(inverse.shape)
    inverse -= column * inverse[:, j : j + 1]
  return inverse


def scores_gradient(d_qk, d_kk, x: Local, operand):
  """Pulls masked score gradients back, see `intra_chunk.scores_gradient`.

  Args:
    d_qk: [n, C, 2C] side by side, zero where masked.
    d_kk: [n, C, 2C].
    x: of the same chunks.
    operand: dtype of the products' operands.

  Returns:
    dq, dk, d_decay: [n, 2C, K] each.
  """
  heads, _, width = x.q.shape
  dq, dk_row, rising, own = [], [], [], []
  earlier = [0.0] * (_TILES - 1)  # of exp(E - D), per tile
  falling = 0.0
  for r in range(_TILES):
    tile = slice(r * TILE, (r + 1) * TILE)
    pieces = (d_qk[:, tile], d_kk[:, tile])
    block = on_diagonal(join(pieces))  # rows as those of left
    d_left = dot(block, x.right[r], NN, operand)
    weighed = d_left * x.left[r].astype(jnp.float32)
    d_left, weighed = (
        y.reshape(heads, 2, 2, TILE, width) for y in (d_left, weighed)
    )
    rising.append(weighed[:, :, 0] + weighed[:, :, 1])
    up = x.factors.up[:, :, r]
    dq.append(d_left[:, :, 0] * up)
    dk_row.append(d_left[:, :, 1] * up)
    d_right = dot(block, x.left[r], TN, operand)
    falling += d_right * x.right[r].astype(jnp.float32)
    d_right = _by_tile(d_right)
    own.append(d_right[:, :, r])
    for s in range(r):
      earlier[s] += d_right[:, :, s] * x.factors.across[r - 1][:, :, s]

  def stack(tiles):
    return jnp.stack(tiles, axis=2)

  earlier.append(jnp.zeros_like(own[0]))
  dk = stack(dk_row) + stack(own) * x.factors.down
  dk += stack(earlier) * x.factors.rest
  return _by_row(stack(dq)), _by_row(dk), _by_row(stack(rising)) - falling
