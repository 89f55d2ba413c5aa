"""Products that one warp makes from its own registers, on `mma.sync`.

A [64, N] array in the wgmma layout gives warp w the rows 16w .. 16w+15, and of
each 16x16 block just the fragment that a warp's own matrix instruction takes
as its left operand. Small chained products then need no other warp, no shared
memory for the left operand and no asynchronous proxy: a third of the latency of
a wgmma whose right operand has to be written first.

Each function has a twin in array terms for the interpreter.
"""

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm
from jaxlib.mlir.dialects import math
from jaxlib.mlir.dialects import nvvm
from jaxlib.mlir.dialects import scf
from jaxlib.mlir.dialects import vector
import numpy as np

SIZE = 16
# Operands of `invert` that another warp made, [BLOCKS] bf16: the corner and the
# inverse of the upper half, each as a high and a low part.
BLOCKS = (4, 32, 32)
_CORNER, _UPPER = 0, 2
_EQ, _UGE = arith.CmpIPredicate.eq, arith.CmpIPredicate.uge
_SGE, _SLE = arith.CmpIPredicate.sge, arith.CmpIPredicate.sle
_PART_BYTES = 32 * 32 * 2
_WGMMA = plgpu.Layout.WGMMA
_ROW = _WGMMA.reduce(1)
_SQUARE = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=_WGMMA)


def invert(scores, beta, first, blocks, shift, interpret: bool) -> jax.Array:
  """(I + L)^-1 - I in bf16, L = beta times the scores below the diagonal.

  16x16 substitutions and two block merges in fp32,

    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-(B^-1 C) A^-1, B^-1]],

  operands of the merges' products being split in two bf16 parts. B^-1 C comes
  first: it is the left operand of the next product as it stands in registers.

  Args:
    scores: [64, 64 + 32] fp32, the diagonal 32x32 blocks of the first 64
      columns, and in rows 32 .. 63 of the rest 2^shift times the lower left
      block. What is elsewhere may be anything.
    beta: [64] by rows.
    first: [64] int32, the first column that a row sees, or None.
    blocks: [BLOCKS] bf16 in shared memory, overwritten and free afterwards.
    shift: see scores.
    interpret: use array terms.
  """
  if interpret:
    scores = _joined(scores, first, shift, 0)
    return _invert_by_arrays(scores * beta[:, None]).astype(jnp.bfloat16)
  by_row = [beta] if first is None else [beta, first]

  @plgpu.inline_mgpu(
      arg_types=(plgpu.RefType(()), _WGMMA, *[_ROW] * len(by_row)),
      return_type=_SQUARE,
  )
  def run(_, memory, scores, beta, *first):
    values = _scalars(beta)
    return _invert(_Scores(scores, first, shift), values, memory)

  return run(blocks, scores, *by_row)


def causal(scores, first, shift, interpret: bool) -> jax.Array:
  """The scores up to the diagonal in bf16, zero above; see `invert`."""
  if interpret:
    return _joined(scores, first, shift, 1).astype(jnp.bfloat16)
  by_row = [] if first is None else [first]

  @plgpu.inline_mgpu(
      arg_types=(_WGMMA, *[_ROW] * len(by_row)), return_type=_SQUARE
  )
  def run(_, scores, *first):
    return _causal(_Scores(scores, first, shift))

  return run(scores, *by_row)


def row_squares(tile, interpret: bool) -> jax.Array:
  """Sums of squares over the rows of a swizzled [64, K] bf16 tile, [64] fp32.

  A warp multiplies its rows by themselves and keeps the diagonal.
  """
  if interpret:
    x = plgpu.load(tile, layout=_WGMMA).astype(jnp.float32)
    return jnp.sum(x * x, axis=1)
  width = tile.shape[1]

  @plgpu.inline_mgpu(
      arg_types=(plgpu.RefType(_tiled()),),
      return_type=plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=_ROW),
  )
  def run(_, memory):
    return _row_squares(memory, width)

  return run(tile)


def _tiled():
  return (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def _joined(scores, first, shift, diagonal):
  """The lower triangle of [64, 64] scores, in array terms."""
  row, column = (lax.broadcasted_iota(jnp.int32, (64, 64), d) for d in (0, 1))
  corner = scores[:, 64:] * 2.0**-shift
  left = jnp.where(row[:, :32] >= 32, corner, scores[:, :32])
  joined = jnp.concatenate([left, scores[:, 32:64]], axis=1)
  keep = column < row + diagonal
  if first is not None:
    keep = keep & (column >= first[:, None])
  return jnp.where(keep, joined, 0.0)


def _invert_by_arrays(lower):
  block = lambda i, j: lower[SIZE * i :][:SIZE, SIZE * j :][:, :SIZE]
  d = jnp.stack([block(w, w) for w in range(4)])
  x = jnp.broadcast_to(jnp.eye(SIZE, dtype=jnp.float32), d.shape)
  for j in range(SIZE - 1):
    x = x - d[:, :, j : j + 1] * x[:, j : j + 1, :]
  zero = jnp.zeros((SIZE, SIZE), jnp.float32)
  halves = []
  for w in (0, 2):
    merged = -_split_dot(_split_dot(x[w + 1], block(w + 1, w)), x[w])
    halves.append(jnp.block([[x[w], zero], [merged, x[w + 1]]]))
  upper, bottom = halves
  merged = -_split_dot(_split_dot(bottom, lower[32:, :32]), upper)
  eye, zero = jnp.eye(32, dtype=jnp.float32), jnp.zeros((32, 32), jnp.float32)
  return jnp.block([[upper - eye, zero], [merged, bottom - eye]])


def _split_dot(a, b):
  dot = lambda x, y: jnp.dot(x, y, precision=lax.Precision.HIGHEST)
  parts = []
  for x in (a, b):
    high = x.astype(jnp.bfloat16).astype(jnp.float32)
    low = (x - high).astype(jnp.bfloat16).astype(jnp.float32)
    parts.append((high, low))
  (a_high, a_low), (b_high, b_low) = parts
  return dot(a_high, b_high) + dot(a_low, b_high) + dot(a_high, b_low)


def _types():
  return ir.IntegerType.get_signless(32), ir.F32Type.get()


def _constant(value):
  return arith.constant(_types()[0], value)


def _special(name):
  """A special register; volatile, so that no loop's address keeps it."""
  return llvm.inline_asm(
      _types()[0], [], f"mov.u32 $0, %{name};", "=r", has_side_effects=True
  )


class _Lane:
  """A lane's place: row and column pair of an 8x8 block, and its warp's."""

  def __init__(self):
    c = _constant
    self.lane = _special("laneid")
    thread = _special("tid.x")
    self.warp = arith.remui(arith.divui(thread, c(32)), c(4))
    self.row = arith.divui(self.lane, c(4))
    self.pair = arith.remui(self.lane, c(4))
    # Of a block on the diagonal, the row less the pair's first column.
    self.offset = arith.subi(self.row, arith.muli(self.pair, c(2)))
    self.is_odd = arith.cmpi(_EQ, arith.remui(self.warp, c(2)), c(1))
    self.is_lower = self.is_warp(_UGE, 2)

  def is_warp(self, predicate, value):
    return arith.cmpi(predicate, self.warp, _constant(value))


def _address(memory):
  """The 32-bit shared memory address of a memref's first element."""
  pointer = mgpu_utils.memref_ptr(memory)
  return llvm.ptrtoint(_types()[0], pointer)


def _pack(low, high):
  """Two fp32 as a word of two bf16, the first in the lower half."""
  return llvm.inline_asm(
      _types()[0], [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f"
  )


def _unpack(word):
  f32 = _types()[1]
  low = arith.shli(word, _constant(16))
  high = arith.andi(word, _constant(-65536))
  return [arith.bitcast(f32, x) for x in (low, high)]


def _split_pair(values):
  """Words of the high and of the low bf16 parts of two fp32."""
  high = _pack(*values)
  rest = [arith.subf(x, y) for x, y in zip(values, _unpack(high), strict=True)]
  return high, _pack(*rest)


def _split(block):
  """A block's [column tile][row half] pairs of fp32 as (high, low) words.

  The order of words is that of a left operand: both row halves of the first
  column tile, then of the second.
  """
  pairs = [_split_pair(pair) for tile in block for pair in tile]
  return [list(part) for part in zip(*pairs, strict=True)]


def _multiply(accs, left, right):
  """accs += left @ right for an 16x8 accumulator of four fp32 each.

  Args:
    accs: [N / 8] lists of four fp32: (row half, column of a pair).
    left: four words.
    right: [N / 8] pairs of words.
  """
  f32 = _types()[1]
  struct = llvm.StructType.get_literal([f32] * 4)
  out = []
  for acc, words in zip(accs, right, strict=True):
    result = llvm.inline_asm(
        struct,
        [*left, *words, *acc],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=True,
    )
    out.append([llvm.extractvalue(f32, result, [i]) for i in range(4)])
  return out


def _zeros(tiles):
  zero = arith.constant(_types()[1], 0.0)
  return [[zero] * 4 for _ in range(tiles)]


def _split_multiply(accs, left, right):
  """As `_multiply` for (high, low) operands, without low times low."""
  for a, b in ((0, 0), (1, 0), (0, 1)):
    accs = _multiply(accs, left[a], right[b])
  return accs


def _as_block(accs):
  """Accumulators as [column tile][row half] pairs."""
  return [[acc[:2], acc[2:]] for acc in accs]


def _load_transposed(address, offset, transposed=True):
  """Four 8x8 blocks, of a 16x16 block, at this lane's row address."""
  i32 = _types()[0]
  struct = llvm.StructType.get_literal([i32] * 4)
  result = llvm.inline_asm(
      struct,
      [arith.addi(address, _constant(offset))],
      "ldmatrix.sync.aligned.m8n8.x4"
      + (".trans" if transposed else "")
      + ".shared.b16 {$0, $1, $2, $3}, [$4];",
      "=r,=r,=r,=r,r",
      has_side_effects=True,
  )
  return [llvm.extractvalue(i32, result, [i]) for i in range(4)]


class _Blocks:
  """[BLOCKS] in shared memory: rows of 64 bytes, 16-byte pieces swizzled."""

  def __init__(self, memory, at: _Lane):
    c, base = _constant, _address(memory)
    # For a word of a block in the wgmma layout.
    swizzle = arith.muli(arith.divui(at.row, c(2)), c(16))
    word = arith.addi(arith.muli(at.row, c(64)), arith.muli(at.pair, c(4)))
    self._words = [
        arith.addi(arith.addi(base, word), arith.xori(swizzle, c(16 * piece)))
        for piece in range(4)
    ]
    # For a row of the four 8x8 blocks that a right operand is loaded from.
    row = arith.remui(at.lane, c(8))
    down = arith.remui(arith.divui(at.lane, c(8)), c(2))
    swizzle = arith.muli(arith.divui(row, c(2)), c(16))
    piece = arith.muli(arith.divui(at.lane, c(16)), c(16))
    row = arith.muli(arith.addi(row, arith.muli(down, c(8))), c(64))
    row = arith.addi(base, row)
    self._rows = [
        arith.addi(row, arith.xori(swizzle, arith.addi(piece, c(32 * i))))
        for i in (0, 1)
    ]

  def store(self, part, row, column, words, moved=None):
    """Writes a 16x16 block's four words, in a left operand's order.

    Args:
      part: which of the [32, 32].
      row: of the block, in sixteens.
      column: see row.
      words: what `_split` returns of one part.
      moved: a number of rows, known at run time, to be added.
    """
    for i, word in enumerate(words):
      tile, half = divmod(i, 2)
      offset = part * _PART_BYTES + (row * SIZE + 8 * half) * 64
      address = arith.addi(self._words[2 * column + tile], _constant(offset))
      if moved is not None:
        address = arith.addi(address, arith.muli(moved, _constant(64)))
      llvm.inline_asm(
          ir.Type.parse("!llvm.void"),
          [address, word],
          "st.shared.b32 [$0], $1;",
          "r,r",
          has_side_effects=True,
      )

  def load(self, first, row, column):
    """A right operand's (high, low) parts of two column tiles each.

    Args:
      first: the high part.
      row: in sixteens.
      column: in sixteens, or a condition known at run time.
    """
    if isinstance(column, int):
      address = self._rows[column]
    else:
      address = arith.select(column, self._rows[1], self._rows[0])
    parts = []
    for part in (first, first + 1):
      offset = part * _PART_BYTES + row * SIZE * 64
      a, b, c, d = _load_transposed(address, offset)
      parts.append([(a, b), (c, d)])
    return parts


def _transposed(word):
  """An 8x8 block's word, of the block transposed."""
  return llvm.inline_asm(
      _types()[0],
      [word],
      "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
      "=r,r",
      has_side_effects=True,
  )


def _branch(condition, then, otherwise, count):
  """`count` words of then() in warps where it holds, else of otherwise()."""
  branch = scf.IfOp(condition, [_types()[0]] * count, has_else=True)
  for block, words in (
      (branch.then_block, then),
      (branch.else_block, otherwise),
  ):
    with ir.InsertionPoint(block):
      scf.yield_(words())
  return list(branch.results)


def _only(condition, then):
  branch = scf.IfOp(condition)
  with ir.InsertionPoint(branch.then_block):
    then()
    scf.yield_([])


class _Scores:
  """[64, 64 + 32] scores in registers; see `invert`.

  Attributes:
    at: the lane's place.
    tiles: [column tile][row half] pairs of fp32, the last four the corner's.
  """

  def __init__(self, array, first, shift):
    self.at = at = _Lane()
    self.tiles = _pairs(array, 12)
    self._scale = arith.constant(_types()[1], 2.0**-shift)
    self._seen = None  # [row half] first column seen, less this lane's
    if first:
      own = arith.muli(at.pair, _constant(2))
      self._seen = [arith.subi(x, own) for x in _scalars(first[0])]

  def in_run(self, pair, tile, half):
    """A pair of column tile `tile`, zero where the row does not see it."""
    if self._seen is None:
      return pair
    zero = arith.constant(_types()[1], 0.0)
    seen = [
        arith.cmpi(_SLE, self._seen[half], _constant(8 * tile + i))
        for i in (0, 1)
    ]
    return [arith.select(s, x, zero) for s, x in zip(seen, pair, strict=True)]

  def block(self, tiles):
    """[column tile][row half] pairs of some tiles as far as seen."""
    return [
        [self.in_run(self.tiles[t][h], t, h) for h in (0, 1)] for t in tiles
    ]

  def corner(self):
    """The lower left block, as far as seen; in warps 2 and 3."""
    scaled = [
        [[arith.mulf(x, self._scale) for x in pair] for pair in tile]
        for tile in self.tiles[8:]
    ]
    return [
        [self.in_run(pair, t, h) for h, pair in enumerate(tile)]
        for t, tile in enumerate(scaled)
    ]


def _causal(scores):
  c, at = _constant, scores.at
  zero = c(0)

  def half_square(first):
    """Words of 32 columns around the diagonal."""
    block = scores.block(range(first, first + 4))
    words = [_pack(*pair) for tile in block for pair in tile]
    keeps = [arith.cmpi(_SGE, at.offset, c(i)) for i in (0, 1)]
    triangle = arith.select(keeps[0], c(0xFFFF), zero)
    triangle = arith.select(keeps[1], c(-1), triangle)
    # Even warps have the diagonal in their first 16 columns, odd ones in the
    # last; the columns before it stay, those behind go.
    before = arith.select(at.is_odd, c(-1), triangle)
    behind = arith.select(at.is_odd, triangle, zero)
    every = arith.select(at.is_odd, c(-1), zero)
    masks = [before, None, every, before, behind, every, None, behind]
    masked = [
        word if mask is None else arith.andi(word, mask)
        for word, mask in zip(words, masks, strict=True)
    ]
    masked[6] = zero
    return masked

  def lower_rows():
    corner = [_pack(*pair) for tile in scores.corner() for pair in tile]
    return corner + half_square(4)

  upper_rows = lambda: half_square(0) + [zero] * 8
  return _bf16_array(_branch(at.is_lower, lower_rows, upper_rows, 16))


def _invert(scores, beta, memory):
  at, c = scores.at, _constant
  zero = c(0)
  blocks = _Blocks(memory, at)
  is_odd, is_lower = at.is_odd, at.is_lower

  def nothing(count):
    return lambda: [zero] * count

  def times_beta(block):
    return [
        [[arith.mulf(x, b) for x in pair] for pair, b in zip(tile, beta)]
        for tile in block
    ]

  def write_corner():
    rows = arith.muli(arith.remui(at.warp, c(2)), c(SIZE))
    block = times_beta(scores.corner())
    for column in (0, 1):
      for part, words in enumerate(_split(block[2 * column :][:2])):
        blocks.store(_CORNER + part, 0, column, words, moved=rows)

  _only(is_lower, write_corner)
  inverse = _substitute(at, times_beta(_diagonal_block(scores)))
  x = _split(inverse)

  def write_inverse(row, column):
    def write():
      for part in (0, 1):
        blocks.store(_UPPER + part, row, column, x[part])

    return write

  # The upper half's inverse has a zero block; warp 2's stands there meanwhile.
  for warp, place in enumerate(((0, 0), (1, 1), (0, 1))):
    _only(at.is_warp(_EQ, warp), write_inverse(*place))

  def merge_left():  # B^-1 C
    block = _chosen(is_lower, scores.block((4, 5)), scores.block((0, 1)))
    parts = _split(times_beta(block))
    right = [
        [tuple(_transposed(w) for w in words[2 * t :][:2]) for t in (0, 1)]
        for words in parts
    ]
    left = _split_multiply(_zeros(2), x, right)
    return [w for part in _split(_as_block(left)) for w in part]

  words = _branch(is_odd, merge_left, nothing(8), 8)
  left = words[:4], words[4:]
  mgpu_utils.warpgroup_barrier()

  def merge_right():
    right = blocks.load(_UPPER, 0, column=is_lower)
    accs = _split_multiply(_zeros(2), left, right)
    parts = _split(_negated(_as_block(accs)))
    return [w for part in parts for w in part]

  words = _branch(is_odd, merge_right, nothing(8), 8)
  below = words[:4], words[4:]

  def write_below():
    for part in (0, 1):
      blocks.store(_UPPER + part, 1, 0, below[part])

  _only(at.is_warp(_EQ, 1), write_below)
  # Of the warp's half inverse, its rows' two blocks: [X, 0] or [below, X].
  rows = [
      [
          [arith.select(is_odd, b, v) for b, v in zip(*part, strict=True)]
          for part in zip(below, x, strict=True)
      ],
      [[arith.select(is_odd, w, zero) for w in part] for part in x],
  ]

  def corner_left():
    accs = _zeros(4)
    for k in (0, 1):
      right = [[], []]
      for column in (0, 1):
        for part, pairs in enumerate(blocks.load(_CORNER, k, column)):
          right[part] += pairs
      accs = _split_multiply(accs, rows[k], right)
    block = _as_block(accs)
    parts = [part for k in (0, 1) for part in _split(block[2 * k :][:2])]
    return [w for part in parts for w in part]

  words = _branch(is_lower, corner_left, nothing(16), 16)
  left = [(words[8 * k :][:4], words[8 * k + 4 :][:4]) for k in (0, 1)]
  mgpu_utils.warpgroup_barrier()

  def corner_right():
    first = _split_multiply(_zeros(2), left[0], blocks.load(_UPPER, 0, 0))
    first = _split_multiply(first, left[1], blocks.load(_UPPER, 1, 0))
    second = _split_multiply(_zeros(2), left[1], blocks.load(_UPPER, 1, 1))
    block = _negated(_as_block(first + second))
    return [_pack(*pair) for tile in block for pair in tile]

  words = _branch(is_lower, corner_right, nothing(8), 8)
  mgpu_utils.warpgroup_barrier()  # The blocks may be written from here on.
  own = [_without_diagonal(at, x[0]), below[0]]
  half = [arith.select(is_odd, b, d) for d, b in zip(*own, strict=True)]
  half += [arith.select(is_odd, d, zero) for d in own[0]]
  left = [
      arith.select(is_lower, w, h) for w, h in zip(words, half, strict=True)
  ]
  right = [arith.select(is_lower, h, zero) for h in half]
  return _bf16_array(left + right)


def _diagonal_block(scores):
  """The strictly lower part of a warp's 16x16 block on the diagonal."""
  at = scores.at
  blocks = [scores.block((2 * w, 2 * w + 1)) for w in range(4)]
  pairs = [_chosen(at.is_odd, blocks[w + 1], blocks[w]) for w in (0, 2)]
  block = _chosen(at.is_lower, pairs[1], pairs[0])
  zero = arith.constant(_types()[1], 0.0)
  for t in (0, 1):
    block[t][t] = [
        arith.select(arith.cmpi(_SGE, at.offset, _constant(i + 1)), x, zero)
        for i, x in enumerate(block[t][t])
    ]
  block[1][0] = [zero, zero]
  return block


def _chosen(condition, on_true, on_false):
  """Selects among blocks of pairs."""
  return [
      [
          [arith.select(condition, a, b) for a, b in zip(*pair, strict=True)]
          for pair in zip(*tile, strict=True)
      ]
      for tile in zip(on_true, on_false, strict=True)
  ]


def _negated(block):
  return [[[arith.negf(x) for x in pair] for pair in tile] for tile in block]


def _without_diagonal(at, words):
  """A 16x16 block's words with its diagonal zero."""
  c = _constant
  # The diagonal is in the first or in the second column of the pair.
  mask = arith.select(arith.cmpi(_EQ, at.offset, c(0)), c(-65536), c(-1))
  mask = arith.select(arith.cmpi(_EQ, at.offset, c(1)), c(65535), mask)
  return [
      arith.andi(word, mask) if i in (0, 3) else word
      for i, word in enumerate(words)
  ]


def _pairs(array, tiles):
  """[column tile][row half] pairs of fp32 of an array in the wgmma layout."""
  registers = array.registers.reshape(tiles, 2)
  get = lambda r, i: vector.extract(r, dynamic_position=[], static_position=[i])
  return [[[get(r, i) for i in (0, 1)] for r in tile] for tile in registers]


def _scalars(by_row):
  """[row half] values of an array by rows."""
  return [
      vector.extract(r, dynamic_position=[], static_position=[0])
      for r in by_row.registers.flat
  ]


def _bf16_array(words):
  """A bf16 array in the wgmma layout of [column tile][row half] words."""
  layout = _WGMMA.to_mgpu()
  columns = len(words) // 2 * 8
  registers = np.empty((len(words),), dtype=object)
  i32, pair = _types()[0], ir.VectorType.get((2,), ir.BF16Type.get())
  one = ir.VectorType.get((1,), i32)
  for i, word in enumerate(words):
    registers[i] = vector.bitcast(pair, vector.broadcast(one, word))
  return mgpu.FragmentedArray(
      _registers=registers.reshape(layout.registers_shape((64, columns))),
      _layout=layout,
      _is_signed=None,
  )


def _shuffle(value, source):
  i32, f32 = _types()
  bits = nvvm.shfl_sync(
      _constant(-1),
      arith.bitcast(i32, value),
      source,
      _constant(0x1F),
      nvvm.ShflKind.idx,
  )
  return arith.bitcast(f32, bits)


def _substitute(at, d):
  """(I + D)^-1 of a strictly lower 16x16 block in a warp's registers.

  Column by column, fp32: X starts as I, and for j = 0 .. 14 every row i > j
  takes X_i -= D_ij X_j; D_ij and X_j come by shuffles.

  Args:
    at: the lane's place.
    d: [column tile][row half] pairs.
  """
  c = _constant
  f32 = _types()[1]
  zero, one = arith.constant(f32, 0.0), arith.constant(f32, 1.0)
  x = [[[zero, zero], [zero, zero]], [[zero, zero], [zero, zero]]]
  for half in (0, 1):
    for i in (0, 1):
      diagonal = arith.addi(arith.muli(at.pair, c(2)), c(i))
      is_one = arith.cmpi(_EQ, at.row, diagonal)
      x[half][half][i] = arith.select(is_one, one, zero)
  row_lane = arith.muli(at.row, c(4))
  for j in range(SIZE - 1):
    tile, half, within = j // 8, j // 8, j % 8
    factor_lane = arith.addi(row_lane, c(within // 2))
    source_lane = arith.addi(c(within * 4), at.pair)
    source = {
        (t, i): _shuffle(x[t][half][i], source_lane)
        for t in range(half + 1)
        for i in (0, 1)
    }
    for h in range(half, 2):
      factor = arith.negf(_shuffle(d[tile][h][within % 2], factor_lane))
      for (t, i), value in source.items():
        x[t][h][i] = math.fma(factor, value, x[t][h][i])
  return x


def _row_squares(memory, width):
  c = _constant
  at = _Lane()
  f32 = _types()[1]
  base = _address(memory)
  row = arith.remui(at.lane, c(8))
  tile_row = arith.addi(
      arith.muli(at.warp, c(2)), arith.remui(arith.divui(at.lane, c(8)), c(2))
  )
  tile_bytes = 8 * 128
  start = arith.addi(
      arith.muli(tile_row, c(width // 64 * tile_bytes)),
      arith.muli(row, c(128)),
  )
  start = arith.addi(base, start)
  piece = arith.divui(at.lane, c(16))
  accs = [[_zeros(1), _zeros(1)] for _ in range(2)]  # two chains of products
  for step in range(width // SIZE):
    tile, within = divmod(step, 4)
    column = arith.xori(row, arith.addi(piece, c(2 * within)))
    address = arith.addi(start, arith.muli(column, c(16)))
    words = _load_transposed(address, tile * tile_bytes, transposed=False)
    for half in (0, 1):
      right = [(words[half], words[2 + half])]
      chain = accs[step % 2]
      chain[half] = _multiply(chain[half], words, right)
  # Row r's square is with the lane of column pair r / 2.
  source = arith.addi(arith.muli(at.row, c(4)), arith.divui(at.row, c(2)))
  is_second = arith.cmpi(_EQ, arith.remui(at.row, c(2)), c(1))
  layout = _ROW.to_mgpu()
  registers = np.empty((2,), dtype=object)
  kind = ir.VectorType.get((1,), f32)
  for half, ([even], [odd]) in enumerate(zip(*accs, strict=True)):
    pairs = zip(even[2 * half :][:2], odd[2 * half :][:2], strict=True)
    first, second = (arith.addf(x, y) for x, y in pairs)
    value = _shuffle(arith.select(is_second, second, first), source)
    registers[half] = vector.broadcast(kind, value)
  return mgpu.FragmentedArray(
      _registers=registers.reshape(layout.registers_shape((64,))),
      _layout=layout,
      _is_signed=None,
  )
