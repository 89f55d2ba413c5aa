"""What one CUDA thread owns: some channels of some rows.

A warpgroup reads a [64, K] tile as warp w = rows 16w .. 16w+15 and lane =
K / 64 neighbouring channels of the warpgroup's half of K. A running sum over
rows is then one register, every per-channel factor is a register too, and one
row of a 128-byte-swizzled tile is read by a warp without bank conflicts.

The functions here are the few things that Pallas has no word for, written on
MLIR; each has a twin in array terms for the interpreter, which knows no MLIR.
The twins handle the 16 rows at once, as arrays of [4 warps, 16 rows, K / 2].
"""

import dataclasses

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm
from jaxlib.mlir.dialects import nvvm
from jaxlib.mlir.dialects import scf
from jaxlib.mlir.dialects import vector
import numpy as np

ROWS = 16  # rows of a warp
SWIZZLE = 128
TILE = (8, 64)  # of 16-bit elements: rows of SWIZZLE bytes
TILED = (plgpu.TilingTransform(TILE), plgpu.SwizzleTransform(SWIZZLE))


@dataclasses.dataclass(frozen=True)
class Lanes:
  """Thread-per-channel access to tiles of width K by one warpgroup.

  Attributes:
    width: K, 64 or 128.
    half: which half of K the warpgroup owns, a Python or traced integer;
      the device code reads it off the thread index unless it is static.
    interpret: use the interpreter's twins.
    thread: [128] the thread's index, opaque to the compiler. Addresses and
      masks made from it live for one phase of a kernel. Made from the plain
      thread index they would be hoisted out of the loop over items, and
      spilled.
  """

  width: int
  half: int | jax.Array
  interpret: bool = False
  thread: jax.Array | None = None

  @classmethod
  def create(cls, width, half, interpret) -> "Lanes":
    thread = None if interpret else opaque_thread()
    return cls(width, half, interpret, thread)

  @property
  def vector(self) -> int:
    return self.width // 64

  @property
  def size(self) -> int:
    return 128 * self.vector

  @property
  def rows(self) -> tuple:
    """The rows of a warp, r and r + 8 (of one swizzle and address) together."""
    if self.interpret:
      return (slice(None),)
    return tuple(r + h for r in range(8) for h in (0, 8))

  def running_sums(self, values: dict) -> tuple[dict, jax.Array]:
    """Inclusive sums over a warp's rows of {row: value}, and the total."""
    if self.interpret:
      [(key, value)] = values.items()
      sums = jnp.cumsum(value, axis=1)
      return {key: sums}, sums[:, -1:]
    sums, total = {}, None
    for r in range(ROWS):
      total = values[r] if total is None else total + values[r]
      sums[r] = total
    return sums, total

  def sums_from_end(self, values: dict, after: jax.Array) -> dict:
    """`after` plus the sum over a row and the warp's later rows, per row."""
    if self.interpret:
      [(key, value)] = values.items()
      return {key: after + jnp.cumsum(value[:, ::-1], axis=1)[:, ::-1]}
    sums = {}
    for r in reversed(range(ROWS)):
      after = sums[r] = after + values[r]
    return sums

  @property
  def layout(self):
    return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vector)

  def load_tile(self, ref, row) -> jax.Array:
    """Row 16w + row of a swizzled [64, K] 16-bit tile."""
    if self.interpret:
      return self._twin_load(ref)
    return self._load(ref, lambda at: at.tile(row), TILED)

  def load_plain(self, ref, row) -> jax.Array:
    """Row 16w + row of a plain [64, K] tile."""
    if self.interpret:
      return self._twin_load(ref)
    return self._load(ref, lambda at: (at.row(row), at.channel), ())

  def store_tile(self, ref, row, value, *, upper_offset=0) -> None:
    """Writes row 16w + row of a swizzled tile, plus an offset for w >= 2."""
    if self.interpret:
      value = value.reshape(4 * ROWS, -1)
      if upper_offset:
        ref[pl.ds(0, 2 * ROWS), self._columns] = value[: 2 * ROWS]
        upper = pl.ds(2 * ROWS + upper_offset, 2 * ROWS)
        ref[upper, self._columns] = value[2 * ROWS :]
      else:
        ref[pl.ds(0, 4 * ROWS), self._columns] = value
      return
    self._store(ref, value, lambda at: at.tile(row, upper_offset), TILED)

  def store_tile_of_first_half(self, ref, row, value) -> None:
    """Writes row 16w + row of a swizzled [32, K] tile, in warps 0 and 1."""
    if self.interpret:
      value = value.reshape(4 * ROWS, -1)
      ref[pl.ds(0, 2 * ROWS), self._columns] = value[: 2 * ROWS]
      return
    index = lambda at: at.tile(row)
    self._store(ref, value, index, TILED, first_half=True)

  def store_plain(self, ref, row, value) -> None:
    """Writes row 16w + row of a plain [64, >= K] tile."""
    if self.interpret:
      ref[pl.ds(0, 4 * ROWS), self._columns] = value.reshape(4 * ROWS, -1)
      return
    self._store(ref, value, lambda at: (at.row(row), at.channel), ())

  def load_channels(self, ref) -> jax.Array:
    """This thread's channels of a plain [K] array."""
    if self.interpret:
      return jnp.tile(ref[self._columns], (4, 1, 1))
    return self._load(ref, lambda at: (at.channel,), ())

  def store_channels(self, ref, value) -> None:
    """All warps write the same [K] array."""
    if self.interpret:
      ref[self._columns] = value[0, 0]
      return
    self._store(ref, value, lambda at: (at.channel,), ())

  def store_group(self, ref, value) -> None:
    """Warp w writes row w of a plain [4, K] array."""
    if self.interpret:
      ref[:, self._columns] = value[:, 0]
      return
    self._store(ref, value, lambda at: (at.warp, at.channel), ())

  def load_row_value(self, ref, row) -> jax.Array:
    """Element 16w + row of a plain [64] array, for all channels."""
    if self.interpret:
      return ref[...].reshape(4, ROWS, 1)
    return self._load(ref, lambda at: (at.row(row),), (), scalar=True)

  def load_row_vectors(self, ref) -> dict:
    """`load_row_value` of all rows."""
    return {row: self.load_row_value(ref, row) for row in self.rows}

  def load_row_values(self, ref, row) -> list[jax.Array]:
    """As `load_row_value`, of the four columns of a plain [64, 4] array."""
    if self.interpret:
      return [ref[:, i].reshape(4, ROWS, 1) for i in range(4)]
    half = self._static_half
    struct = plgpu.ShapeDtypeStruct((self.size,), ref.dtype, layout=self.layout)

    @plgpu.inline_mgpu(
        arg_types=(_THREAD, plgpu.RefType(())), return_type=[struct] * 4
    )
    def load(_, thread, memory):
      at = self._position(thread, half)
      element = ir.MemRefType(memory.type).element_type
      index = at.row(row), _index_constant(0)
      values = vector.load(ir.VectorType.get((4,), element), memory, index)
      kind = ir.VectorType.get((self.vector,), element)
      return [
          self._array(vector.broadcast(kind, _scalar(values, i)), ref.dtype)
          for i in range(4)
      ]

    return load(self.thread, ref)

  def where_warp_from(self, level: int, x, y) -> jax.Array:
    """x in warps >= level, y below."""
    if self.interpret:
      return jnp.where(jnp.arange(4)[:, None, None] >= level, x, y)
    struct = plgpu.ShapeDtypeStruct((self.size,), x.dtype, layout=self.layout)

    @plgpu.inline_mgpu(
        arg_types=(_THREAD, self.layout, self.layout), return_type=struct
    )
    def select(_, thread, on_true, on_false):
      at = self._position(thread, None)
      condition = arith.cmpi(
          arith.CmpIPredicate.uge, at.warp, _index_constant(level)
      )
      [a], [b] = on_true.registers.flat, on_false.registers.flat
      if x.dtype.itemsize * self.vector == 4 and self.vector > 1:
        word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        packed = arith.select(
            condition, vector.bitcast(word, a), vector.bitcast(word, b)
        )
        return self._array(vector.bitcast(a.type, packed), x.dtype)
      return self._array(arith.select(condition, a, b), x.dtype)

    return select(self.thread, self._cast(x), self._cast(y))

  def reciprocal(self, x: jax.Array) -> jax.Array:
    """1 / x to about one unit in the last place: one instruction."""
    if self.interpret:
      return 1.0 / x
    struct = plgpu.ShapeDtypeStruct(
        (self.size,), jnp.float32, layout=self.layout
    )

    @plgpu.inline_mgpu(arg_types=(self.layout,), return_type=struct)
    def approximate(_, value):
      [register] = value.registers.flat
      f32 = ir.F32Type.get()
      result = register
      for i in range(self.vector):
        scalar = vector.extract(
            register, dynamic_position=[], static_position=[i]
        )
        scalar = llvm.inline_asm(
            f32, [scalar], "rcp.approx.ftz.f32 $0, $1;", "=f,f"
        )
        result = vector.insert(
            scalar, result, dynamic_position=[], static_position=[i]
        )
      return self._array(result, jnp.float32)

    return approximate(x)

  def widen(self, x: jax.Array) -> jax.Array:
    """bf16 to fp32, an instruction an element (`astype` takes three a pair)."""
    if self.interpret or x.dtype == jnp.float32 or self.vector == 1:
      return x.astype(jnp.float32)
    struct = plgpu.ShapeDtypeStruct(
        (self.size,), jnp.float32, layout=self.layout
    )

    @plgpu.inline_mgpu(arg_types=(self.layout,), return_type=struct)
    def convert(_, array):
      [register] = array.registers.flat
      return self._array(_widen(register), jnp.float32)

    return convert(x)

  def _position(self, thread, half):
    return _Position(thread, self.width, half)

  def _cast(self, x):
    return plgpu.layout_cast(jnp.broadcast_to(x, (self.size,)), self.layout)

  @property
  def _static_half(self) -> int | None:
    return self.half if isinstance(self.half, int) else None

  @property
  def _columns(self):
    return pl.ds(self.half * (self.width // 2), self.width // 2)

  def _twin_load(self, ref):
    return ref[pl.ds(0, 4 * ROWS), self._columns].reshape(4, ROWS, -1)

  def _array(self, register, dtype):
    return _one_register(register, self.layout, dtype)

  def _load(self, ref, index, transforms, scalar=False):
    half = self._static_half
    struct = plgpu.ShapeDtypeStruct((self.size,), ref.dtype, layout=self.layout)

    @plgpu.inline_mgpu(
        arg_types=(_THREAD, plgpu.RefType(transforms)), return_type=struct
    )
    def load(_, thread, memory):
      at = self._position(thread, half)
      element = ir.MemRefType(memory.type).element_type
      kind = ir.VectorType.get((self.vector,), element)
      if not scalar:
        return self._array(vector.load(kind, memory, index(at)), ref.dtype)
      one = ir.VectorType.get((1,), element)
      value = vector.extract(
          vector.load(one, memory, index(at)),
          dynamic_position=[],
          static_position=[0],
      )
      return self._array(vector.broadcast(kind, value), ref.dtype)

    return load(self.thread, ref)

  def _store(self, ref, value, index, transforms, first_half=False):
    half = self._static_half

    @plgpu.inline_mgpu(
        arg_types=(_THREAD, plgpu.RefType(transforms), self.layout)
    )
    def store(_, thread, memory, array):
      at = self._position(thread, half)
      [register] = array.registers.flat
      if not first_half:
        vector.store(register, memory, index(at))
        return
      condition = arith.cmpi(
          arith.CmpIPredicate.ult, at.warp, _index_constant(2)
      )
      branch = scf.IfOp(condition)
      with ir.InsertionPoint(branch.then_block):
        vector.store(register, memory, index(at))
        scf.yield_([])

    store(self.thread, ref, self._cast(value))


class Quads(Lanes):
  """As `Lanes`, a thread having twice the channels of half a warp's rows.

  Lanes 0 .. 15 of warp w own rows 16w .. 16w+7, the others the eight below.
  Half as many loads and stores, each twice as wide.
  """

  @property
  def vector(self) -> int:
    return self.width // 32

  @property
  def rows(self) -> tuple:
    return (slice(None),) if self.interpret else tuple(range(ROWS // 2))

  def sums_by_group(self, values: dict):
    """Inclusive sums of {row: value} over a thread's rows.

    Returns:
      the sums, what the warp's earlier rows sum to, and the warp's total.
    """
    if self.interpret:
      sums, total = self.running_sums(values)
      return sums, jnp.zeros_like(total), total
    sums, total = {}, None
    for r in self.rows:
      total = values[r] if total is None else total + values[r]
      sums[r] = total
    struct = plgpu.ShapeDtypeStruct(
        (self.size,), jnp.float32, layout=self.layout
    )

    @plgpu.inline_mgpu(
        arg_types=(_THREAD, self.layout), return_type=[struct] * 2
    )
    def across(_, thread, array):
      at = self._position(thread, None)
      is_second = arith.cmpi(
          arith.CmpIPredicate.ne, at.group, _index_constant(0)
      )
      [own] = array.registers.flat
      zero = arith.constant(ir.F32Type.get(), 0.0)
      earlier, sums = own, own
      place = lambda i: dict(dynamic_position=[], static_position=[i])
      for i in range(self.vector):
        value = vector.extract(own, **place(i))
        other = _exchange(value, ROWS)
        sums = vector.insert(arith.addf(value, other), sums, **place(i))
        earlier = vector.insert(
            arith.select(is_second, other, zero), earlier, **place(i)
        )
      return [self._array(x, jnp.float32) for x in (earlier, sums)]

    return sums, *across(self.thread, total)

  def load_row_vectors(self, ref) -> dict:
    if self.interpret:
      return super().load_row_vectors(ref)
    struct = plgpu.ShapeDtypeStruct((self.size,), ref.dtype, layout=self.layout)
    half, values = self._static_half, {}
    for first in (0, 4):

      @plgpu.inline_mgpu(
          arg_types=(_THREAD, plgpu.RefType(())), return_type=[struct] * 4
      )
      def load(_, thread, memory, first=first):
        at = self._position(thread, half)
        element = ir.MemRefType(memory.type).element_type
        four = ir.VectorType.get((4,), element)
        loaded = vector.load(four, memory, [at.row(first)])
        kind = ir.VectorType.get((self.vector,), element)
        return [
            self._array(vector.broadcast(kind, _scalar(loaded, i)), ref.dtype)
            for i in range(4)
        ]

      values |= zip(range(first, first + 4), load(self.thread, ref))
    return values

  def _position(self, thread, half):
    return _QuadPosition(thread, self.width, half)


_THREAD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def remainder(x: jax.Array, high: jax.Array, interpret: bool) -> jax.Array:
  """What an fp32 array lacks as the bf16 `high`, again in bf16: all but 2^-17."""
  return (x - widen(high, interpret)).astype(jnp.bfloat16)


def opaque_thread() -> jax.Array:
  """[128] int32, each thread's index in the block, made anew at each call."""

  @plgpu.inline_mgpu(
      return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_THREAD)
  )
  def read(_):
    i32 = ir.IntegerType.get_signless(32)
    thread = llvm.inline_asm(
        i32, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True
    )
    kind = ir.VectorType.get((1,), i32)
    return _one_register(vector.broadcast(kind, thread), _THREAD, jnp.int32)

  return read()


def opaque_zero() -> jax.Array:
  """An int32 0 that is made anew at each call and the same in all of a warp.

  Addresses made from it can be uniform registers, which matrix products want.
  """
  layout = plgpu.Layout.WG_SPLAT(())

  @plgpu.inline_mgpu(
      return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=layout)
  )
  def read(_):
    i32 = ir.IntegerType.get_signless(32)
    c = lambda value: arith.constant(i32, value)
    thread = llvm.inline_asm(
        i32, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True
    )
    shared = nvvm.shfl_sync(
        c(-1), arith.shrui(thread, c(20)), c(0), c(0x1F), nvvm.ShflKind.idx
    )
    return mgpu.FragmentedArray(
        _registers=np.array(shared, dtype=object),
        _layout=layout.to_mgpu(),
        _is_signed=True,
    )

  return read()


def tile_indices(columns: int, interpret: bool) -> tuple[jax.Array, jax.Array]:
  """Row and column numbers of a [64, columns] array in the wgmma layout."""
  shape = (64, columns)
  if interpret:
    return tuple(lax.broadcasted_iota(jnp.int32, shape, d) for d in (0, 1))
  layout = plgpu.Layout.WGMMA
  struct = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout)

  @plgpu.inline_mgpu(arg_types=(_THREAD,), return_type=[struct, struct])
  def indices(_, thread):
    rows, cols = (_Fragment(thread, columns, jnp.int32) for _ in range(2))
    kind = ir.VectorType.get((2,), ir.IntegerType.get_signless(32))
    c = rows.constant
    for h in (0, 1):
      row = arith.addi(rows.row, c(8 * h))
      for tile in range(columns // 8):
        rows.registers[tile, h] = vector.broadcast(kind, row)
        cols.registers[tile, h] = vector.from_elements(
            kind, [arith.addi(cols.column, c(8 * tile + i)) for i in (0, 1)]
        )
    return [rows.array(), cols.array()]

  return tuple(indices(opaque_thread()))


def half_factors(ref, first: int, width: int, interpret: bool) -> jax.Array:
  """[64, width] fp32: row `first` of a plain [4, width], below it first + 2."""
  if interpret:
    return jnp.repeat(ref[...][first::2], 32, axis=0)
  layout = plgpu.Layout.WGMMA
  struct = plgpu.ShapeDtypeStruct((64, width), jnp.float32, layout=layout)

  @plgpu.inline_mgpu(arg_types=(_THREAD, plgpu.RefType(())), return_type=struct)
  def load(_, thread, memory):
    at = _Fragment(thread, width)
    row = arith.addi(arith.muli(at.upper, at.constant(2)), at.constant(first))
    index = lambda x: arith.index_castui(ir.IndexType.get(), x)
    kind = ir.VectorType.get((2,), ir.F32Type.get())
    for tile in range(width // 8):
      column = arith.addi(at.column, at.constant(8 * tile))
      value = vector.load(kind, memory, [index(row), index(column)])
      at.registers[tile] = [value, value]
    return at.array()

  return load(opaque_thread(), ref)


def score_parts(
    x: jax.Array,
    *,
    later: bool,
    diagonal: bool,
    with_low: bool,
    flags: jax.Array | None,
    interpret: bool,
) -> tuple[jax.Array, ...]:
  """Masks a score's gradient; its diagonal halves and its corner, in bf16.

  Args:
    x: [64, 64] fp32.
    later: whether rows are the later side, so that columns before are kept;
      otherwise columns after are.
    diagonal: whether the diagonal is kept.
    with_low: whether to give too what the diagonal halves lack, in bf16. Not
      on the diagonal, where both sides' products must be equal in every bit.
    flags: [64] int32 by rows; its second byte is the first column that a
      later row keeps, the rest above is where an earlier row stops.
    interpret: use array terms.
  """
  size = 64
  if interpret:
    row, column = tile_indices(size, True)
    low, high = (column, row) if later else (row, column)
    keep = low <= high if diagonal else low < high
    if flags is not None:
      first, stop = (flags >> 8) & 0xFF, flags >> 16
      same = column >= first[:, None] if later else column < stop[:, None]
      keep = keep & same
    x = jnp.where(keep, x, 0.0)
    high = x.astype(jnp.bfloat16)
    inside = (row >= 32) == (column >= 32)
    parts = jnp.where(inside, high, 0), jnp.where(inside, 0, high)
    if not with_low:
      return parts
    low = remainder(x, high, True)
    return *parts, jnp.where(inside & (row != column), low, 0)
  layout = plgpu.Layout.WGMMA
  struct = plgpu.ShapeDtypeStruct((size, size), jnp.bfloat16, layout=layout)
  arguments = [opaque_thread(), x]
  kinds = [_THREAD, layout]
  if flags is not None:
    arguments.append(flags)
    kinds.append(layout.reduce(1))

  outputs = 3 if with_low else 2

  @plgpu.inline_mgpu(arg_types=tuple(kinds), return_type=[struct] * outputs)
  def split(_, thread, array, *by_row):
    parts = [_Fragment(thread, size, jnp.bfloat16) for _ in range(outputs)]
    at = parts[0]
    c, predicate = at.constant, arith.CmpIPredicate
    values = array.registers.reshape(size // 8, 2)
    words = [_scalar(r) for r in by_row[0].registers.flat] if by_row else ()
    bounds = []  # [row half] of (predicate, bound on 8 tile + i)
    on_diagonal = []  # [row half] of 8 tile + i
    for h in (0, 1):
      row = arith.subi(arith.addi(at.row, c(8 * h)), at.column)
      offset = int(diagonal) if later else int(not diagonal)
      kept = [(predicate.sgt if later else predicate.sle, offset, row)]
      if by_row and later:
        first = arith.andi(arith.shrui(words[h], c(8)), c(0xFF))
        kept.append((predicate.sle, 0, arith.subi(first, at.column)))
      elif by_row:
        stop = arith.shrui(words[h], c(16))
        kept.append((predicate.sgt, 0, arith.subi(stop, at.column)))
      bounds.append([(p, arith.addi(b, c(o))) for p, o, b in kept])
      on_diagonal.append(row)
    upper = arith.cmpi(predicate.ne, at.upper, c(0))
    zero = arith.constant(ir.F32Type.get(), 0.0)
    word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    nothing = arith.constant(word, ir.DenseElementsAttr.get_splat(
        word, ir.IntegerAttr.get(word.element_type, 0)
    ))  # fmt: skip
    for tile in range(size // 8):
      for h in (0, 1):
        kept = []
        for i in (0, 1):
          value = _scalar(values[tile, h], i)
          for p, bound in bounds[h]:
            keep = arith.cmpi(p, bound, c(8 * tile + i))
            value = arith.select(keep, value, zero)
          kept.append(value)
        both = vector.from_elements(
            ir.VectorType.get((2,), ir.F32Type.get()), kept
        )
        high = arith.truncf(pair, both)
        found = [high]
        if with_low:
          rest = arith.subf(both, _widen(high))
          lows = []
          for i in (0, 1):
            at_it = arith.cmpi(predicate.eq, on_diagonal[h], c(8 * tile + i))
            lows.append(arith.select(at_it, zero, _scalar(rest, i)))
          rest = vector.from_elements(rest.type, lows)
          found.append(arith.truncf(pair, rest))
        inner, *rest = (vector.bitcast(word, x) for x in found)
        corner = nothing
        # The two halves' columns that the other half's rows may reach.
        if later and tile < 4:
          corner = arith.select(upper, inner, nothing)
          inner, *rest = (
              arith.select(upper, nothing, x) for x in (inner, *rest)
          )
        elif not later and tile >= 4:
          corner = arith.select(upper, nothing, inner)
          inner, *rest = (
              arith.select(upper, x, nothing) for x in (inner, *rest)
          )
        for part, x in zip(parts, (inner, corner, *rest), strict=True):
          part.registers[tile, h] = vector.bitcast(pair, x)
    return [part.array() for part in parts]

  return tuple(split(*arguments))


def store_diagonal(x: jax.Array, ref, interpret: bool) -> None:
  """Writes the diagonal of a [64, 64] fp32 array to a plain [64] array."""
  if interpret:
    row, column = tile_indices(64, True)
    ref[...] = jnp.sum(jnp.where(row == column, x, 0.0), axis=1)
    return

  @plgpu.inline_mgpu(arg_types=(_THREAD, plgpu.Layout.WGMMA, plgpu.RefType(())))
  def store(_, thread, array, memory):
    at = _Fragment(thread, 64)
    c, predicate = at.constant, arith.CmpIPredicate
    values = array.registers.reshape(8, 2)
    # A warp's 16 columns are two tiles; the lane of row r has column r or r - 1
    # first.
    offset = arith.subi(arith.remui(at.row, c(8)), at.column)
    second = arith.cmpi(predicate.eq, offset, c(1))
    holds = arith.cmpi(predicate.ule, offset, c(1))
    for h in (0, 1):
      value = None
      for warp in range(4):
        register = values[2 * warp + h, h]
        mine = arith.select(second, _scalar(register, 1), _scalar(register))
        if value is None:
          value = mine
          continue
        first = arith.cmpi(predicate.uge, at.row, c(ROWS * warp))
        value = arith.select(first, mine, value)
      branch = scf.IfOp(holds)
      with ir.InsertionPoint(branch.then_block):
        row = arith.addi(at.row, c(8 * h))
        kind = ir.VectorType.get((1,), ir.F32Type.get())
        index = arith.index_castui(ir.IndexType.get(), row)
        vector.store(vector.broadcast(kind, value), memory, [index])
        scf.yield_([])

  store(opaque_thread(), x, ref)


def store_warp_sums(x: jax.Array, ref, interpret: bool) -> None:
  """Writes a [64, K] fp32 array's sums over a warp's rows to a plain [4, K]."""
  columns = x.shape[1]
  if interpret:
    ref[...] = jnp.sum(x.reshape(4, ROWS, columns), axis=1)
    return

  @plgpu.inline_mgpu(arg_types=(_THREAD, plgpu.Layout.WGMMA, plgpu.RefType(())))
  def store(_, thread, array, memory):
    at = _Fragment(thread, columns)
    c, predicate = at.constant, arith.CmpIPredicate
    registers = array.registers.reshape(columns // 8, 2)
    sums = [
        [arith.addf(_scalar(upper, i), _scalar(lower, i)) for i in (0, 1)]
        for upper, lower in registers
    ]
    tile = c(0)
    # Of the lanes with one column each keeps half of the tiles, then a quarter
    # and an eighth.
    for bit in (16, 8, 4):
      half = len(sums) // 2
      is_set = arith.cmpi(predicate.ne, arith.andi(at.thread, c(bit)), c(0))
      kept = []
      for low, high in zip(sums[:half], sums[half:], strict=True):
        kept.append([
            arith.addf(
                arith.select(is_set, high[i], low[i]),
                _exchange(arith.select(is_set, low[i], high[i]), bit),
            )
            for i in (0, 1)
        ])
      tile = arith.select(is_set, arith.addi(tile, c(half)), tile)
      sums = kept
    kind = ir.VectorType.get((2,), ir.F32Type.get())
    index = lambda i: arith.index_castui(ir.IndexType.get(), i)
    for i, pair in enumerate(sums):
      column = arith.addi(tile, c(i))
      column = arith.addi(arith.muli(column, c(8)), at.column)
      vector.store(
          vector.from_elements(kind, pair),
          memory,
          [index(at.warp), index(column)],
      )

  store(opaque_thread(), x, ref)


def _exchange(value, bit):
  """The lane's value whose number differs in one bit."""
  i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
  constant = lambda x: arith.constant(i32, x)
  bits = nvvm.shfl_sync(
      constant(-1),
      arith.bitcast(i32, value),
      constant(bit),
      constant(0x1F),
      nvvm.ShflKind.bfly,
  )
  return arith.bitcast(f32, bits)


class _Fragment:
  """What a thread holds of a [64, columns] array in the wgmma layout.

  Attributes:
    row: of its first register; the second of a tile lies 8 below.
    column: of its first register; the next tiles lie 8 to the right.
    upper: 1 if its rows are 32 or more, else 0.
    thread, warp: its number in the block, its warp's in the warpgroup.
    registers: [column tile, row half], to be filled.
  """

  def __init__(self, thread, columns, dtype=jnp.float32):
    i32 = ir.IntegerType.get_signless(32)
    self.constant = c = lambda value: arith.constant(i32, value)
    self.thread = index = _scalar(thread.registers.flat[0])
    in_group = arith.remui(index, c(128))
    lane = arith.remui(index, c(32))
    self.warp = warp = arith.divui(in_group, c(32))
    self.row = arith.addi(arith.muli(warp, c(ROWS)), arith.divui(lane, c(4)))
    self.column = arith.muli(arith.remui(lane, c(4)), c(2))
    self.upper = arith.divui(warp, c(2))
    self._layout = plgpu.Layout.WGMMA.to_mgpu()
    self._shape = self._layout.registers_shape((64, columns))
    self._signed = True if jnp.issubdtype(dtype, jnp.integer) else None
    self.registers = np.empty((columns // 8, 2), dtype=object)

  def array(self):
    return mgpu.FragmentedArray(
        _registers=self.registers.reshape(self._shape),
        _layout=self._layout,
        _is_signed=self._signed,
    )


def load_wide(ref, interpret: bool) -> jax.Array:
  """A [64, 64] bf16 tile in the wgmma layout, as fp32; see `widen`."""
  return widen(plgpu.load(ref, layout=plgpu.Layout.WGMMA), interpret)


def widen(x: jax.Array, interpret: bool) -> jax.Array:
  """A bf16 array in the wgmma layout as fp32; see `Lanes.widen`.

  What is widened by `astype` is also rounded twice, once for itself and once,
  slowly, for that.
  """
  if interpret:
    return x.astype(jnp.float32)
  layout = plgpu.Layout.WGMMA
  struct = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)

  @plgpu.inline_mgpu(arg_types=(layout,), return_type=struct)
  def convert(_, array):
    registers = np.empty(array.registers.shape, dtype=object)
    for index, register in np.ndenumerate(array.registers):
      registers[index] = _widen(register)
    return mgpu.FragmentedArray(
        _registers=registers, _layout=array.layout, _is_signed=None
    )

  return convert(x)


def make_now(arrays: list[jax.Array], scratch, interpret: bool) -> None:
  """Makes [64, 64] bf16 arrays before the next barrier, not after it.

  The assembler moves arithmetic to where its result is used, past barriers; so
  each thread stores what depends on all of its registers.

  Args:
    arrays: in the wgmma layout.
    scratch: a plain fp32 [64] array, overwritten.
    interpret: nothing is to be done.
  """
  if interpret:
    return
  layouts = (plgpu.Layout.WGMMA,) * len(arrays)

  @plgpu.inline_mgpu(arg_types=(_THREAD, plgpu.RefType(()), *layouts))
  def store(_, thread, memory, *arrays):
    at = _Fragment(thread, 64)
    word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    total = at.constant(0)
    for array in arrays:
      for register in array.registers.flat:
        total = arith.xori(total, _scalar(vector.bitcast(word, register)))
    f32 = ir.F32Type.get()
    total = vector.broadcast(
        ir.VectorType.get((1,), f32), arith.bitcast(f32, total)
    )
    place = arith.remui(at.thread, at.constant(64))
    vector.store(total, memory, [arith.index_castui(ir.IndexType.get(), place)])

  store(opaque_thread(), scratch, *arrays)


def _widen(pairs):
  """A vector of an even number of bf16 as one of fp32."""
  i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
  [size] = ir.VectorType(pairs.type).shape
  words = vector.bitcast(ir.VectorType.get((size // 2,), i32), pairs)
  halves = []
  for i in range(size // 2):
    word = _scalar(words, i)
    low = arith.shli(word, arith.constant(i32, 16))
    high = arith.andi(word, arith.constant(i32, -65536))
    halves += [arith.bitcast(f32, x) for x in (low, high)]
  return vector.from_elements(ir.VectorType.get((size,), f32), halves)


def _scalar(register, i=0):
  return vector.extract(register, dynamic_position=[], static_position=[i])


def _one_register(register, layout, dtype):
  registers = np.empty((1,), dtype=object)
  registers[0] = register
  signed = True if jnp.issubdtype(dtype, jnp.integer) else None
  return mgpu.FragmentedArray(
      _registers=registers, _layout=layout.to_mgpu(), _is_signed=signed
  )


def _index_constant(value: int):
  return arith.constant(ir.IndexType.get(), value)


class _Position:
  """Indices of the calling thread, as MLIR values."""

  _LANES = 32  # that have one row's channels between them

  def _place(self, lane):
    """The lane's place among those."""
    return lane

  def __init__(self, thread, width: int, half: int | None):
    c = _index_constant
    [register] = thread.registers.flat
    thread = vector.extract(register, dynamic_position=[], static_position=[0])
    thread = arith.index_castui(ir.IndexType.get(), thread)
    in_group = arith.remui(thread, c(128))
    self.warp = arith.divui(in_group, c(32))
    lane = self._place(arith.remui(thread, c(32)))
    if half is None:
      warpgroup = arith.divui(thread, c(128))
      start = arith.muli(arith.remui(warpgroup, c(2)), c(width // 2))
    else:
      start = c(half * (width // 2))
    per_lane = width // 2 // self._LANES
    self.channel = arith.addi(start, arith.muli(lane, c(per_lane)))
    self._tile_column = arith.divui(self.channel, c(TILE[1]))
    column = arith.remui(self.channel, c(TILE[1]))
    self._chunk = arith.divui(column, c(8))
    self._in_chunk = arith.remui(column, c(8))

  def row(self, r: int):
    return arith.addi(
        arith.muli(self.warp, _index_constant(ROWS)), _index_constant(r)
    )

  def tile(self, r: int, upper_offset: int = 0):
    """Indices into a [R, K] array stored as swizzled (8, 64) tiles."""
    c = _index_constant
    tile_row = arith.muli(self.warp, c(ROWS // TILE[0]))
    if upper_offset:
      is_upper = arith.divui(self.warp, c(2))
      moved = arith.muli(is_upper, c(upper_offset // TILE[0]))
      tile_row = arith.addi(tile_row, moved)
    tile_row = arith.addi(tile_row, c(r // TILE[0]))
    # The swizzle: 16-byte pieces of a 128-byte row, xor the row.
    piece = arith.xori(self._chunk, c(r % 8))
    column = arith.addi(arith.muli(piece, c(8)), self._in_chunk)
    return tile_row, self._tile_column, c(r % 8), column


class _QuadPosition(_Position):
  """`_Position` of `Quads`; rows are counted from the thread's first."""

  _LANES = 16

  def _place(self, lane):
    self.group = arith.divui(lane, _index_constant(self._LANES))
    return arith.remui(lane, _index_constant(self._LANES))

  def row(self, r: int):
    below = arith.muli(self.group, _index_constant(ROWS // 2))
    return arith.addi(super().row(r), below)

  def tile(self, r: int, upper_offset: int = 0):
    tile_row, *rest = super().tile(r, upper_offset)
    return arith.addi(tile_row, self.group), *rest


def scale_columns(
    sources, targets, signs, powers, keep, interpret: bool
) -> None:
  """Each target = sign * source * a power of two by column and half.

  Args:
    sources: swizzled [64, K] bf16 tiles.
    targets: tiles alike, other ones or the same.
    signs: 1 or -1 each.
    powers: plain [4, K] bf16; warps w < 2 of the rows take its first.
    keep: (flags, bit), rows without the bit become zero; or ().
    interpret: use array terms.
  """
  if interpret:
    power = jnp.repeat(powers[...][::3], 32, axis=0)
    for source, target, sign in zip(sources, targets, signs, strict=True):
      x = source[...] * power * sign
      if keep:
        kept = (keep[0][...] & keep[1]) != 0
        x = jnp.where(kept[:, None], x, 0.0)
      target[...] = x.astype(target.dtype)
    return
  width, count = sources[0].shape[1], len(sources)
  pieces = width // 8  # of 16 bytes in a row
  step = 128 // pieces  # rows that a warpgroup has at once
  plain, tiled = plgpu.RefType(()), plgpu.RefType(TILED)
  kinds = (_THREAD, plain, *(plain for _ in keep[:1]), *[tiled] * (2 * count))

  @plgpu.inline_mgpu(arg_types=kinds)
  def scale(_, thread, powers, *rest):
    c = _index_constant
    flags, tiles = rest[: len(rest) - 2 * count], rest[len(rest) - 2 * count :]
    index = arith.index_castui(
        ir.IndexType.get(), _scalar(thread.registers.flat[0])
    )
    index = arith.remui(index, c(128))
    piece = arith.remui(index, c(pieces))
    first = arith.divui(index, c(pieces))
    within = arith.remui(first, c(TILE[0]))
    column = arith.xori(arith.remui(piece, c(8)), within)
    column = arith.muli(column, c(8))
    tile_column = arith.divui(piece, c(8))
    tile_row = arith.divui(first, c(TILE[0]))
    bf16, i32 = ir.BF16Type.get(), ir.IntegerType.get_signless(32)
    kind = ir.VectorType.get((8,), bf16)
    words = ir.VectorType.get((4,), i32)
    nothing = arith.constant(
        words,
        ir.DenseElementsAttr.get_splat(words, ir.IntegerAttr.get(i32, 0)),
    )
    minus = arith.constant(
        kind, ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(bf16, -1.0))
    )
    start = arith.muli(piece, c(8))
    powers = [vector.load(kind, powers, [c(w), start]) for w in (0, 3)]
    negated = [arith.mulf(p, minus) for p in powers]
    for i in range(64 // step):
      half = step * i // 32
      if flags:
        row = arith.addi(first, c(step * i))
        one = ir.VectorType.get((1,), i32)
        word = _scalar(vector.load(one, flags[0], [row]))
        bit = arith.andi(word, arith.constant(i32, keep[1]))
        kept = arith.cmpi(arith.CmpIPredicate.ne, bit, arith.constant(i32, 0))
      for n, sign in enumerate(signs):
        row = arith.addi(tile_row, c(step * i // TILE[0]))
        at = [row, tile_column, within, column]
        x = vector.load(kind, tiles[n], at)
        x = arith.mulf(x, (powers if sign == 1 else negated)[half])
        if flags:
          chosen = arith.select(kept, vector.bitcast(words, x), nothing)
          x = vector.bitcast(kind, chosen)
        vector.store(x, tiles[count + n], at)

  scale(opaque_thread(), powers, *keep[:1], *sources, *targets)
