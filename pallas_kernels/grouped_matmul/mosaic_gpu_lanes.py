"""Launch parameters, and the stores that Pallas has no word for."""

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm


def tiled(columns: int) -> tuple:
  """Transforms of bf16 tiles whose swizzled rows hold so many columns."""
  return (
      plgpu.TilingTransform((8, columns)),
      plgpu.SwizzleTransform(2 * columns),
  )


TILED = tiled(64)
_VECTOR = 8  # elements of 2 bytes in one access of a thread
_SCALAR = plgpu.Layout.WG_SPLAT(())


def launch(plan, name: str, warpgroups: int) -> dict:
  """Keyword arguments of `plgpu.kernel` that every kernel here has."""
  cluster = {}
  if plan.cluster > 1:
    cluster = dict(cluster=(plan.cluster,), cluster_names=("pair",))
  return dict(
      grid=(plan.clusters,),
      grid_names=("tile",),
      num_threads=warpgroups,
      thread_name="warpgroup",
      kernel_name=name,
      compiler_params=plgpu.CompilerParams(
          unsafe_no_auto_barriers=True,
          lowering_semantics=plgpu.LoweringSemantics.Lane,
      ),
      interpret=plan.interpret,
      **cluster,
  )


def drain(consumed, done, stages: int) -> None:
  """Waits for the arrivals that no later fetch waits for.

  A block must outlive its neighbour's last arrival in its shared memory.
  """

  def wait(n, _):
    @pl.when(n >= stages)
    def _():
      plgpu.barrier_wait(consumed.at[lax.rem(n, stages)])

  lax.fori_loop(done, done + stages, wait, None)


def stage_tile(stage, value, *, interpret: bool, transpose: bool = False):
  """Stores a register tile in shared memory, and nothing else.

  `stage[...] = value` would load the old contents too.

  Args:
    stage: [P, W] shared memory, tiled and swizzled.
    value: [P, W], or [W, P] if transpose, bf16 in wgmma's layout.
    interpret: use plain assignment.
    transpose: whether to store the transpose.
  """
  if interpret:
    if transpose:
      stage = stage.transpose((1, 0))
      value = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
    stage[...] = value
    return

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TILED), plgpu.Layout.WGMMA))
  def store(_, stage, value):
    if transpose:
      stage = mgpu.memref_transpose(stage, (1, 0, 3, 2))
    value.store_tiled(stage, swizzle=128)

  store(stage, value)


def computed_here(value, *, interpret: bool):
  """Returns a register tile in wgmma's layout that is computed by then.

  LLVM would move what the branches of a switch have in common behind it, here
  the rounding, and so carry the fp32 accumulators out of every branch.
  """
  if interpret:
    return value
  layout = plgpu.Layout.WGMMA
  shape = plgpu.ShapeDtypeStruct(value.shape, value.dtype, layout=layout)

  @plgpu.inline_mgpu(arg_types=(layout,), return_type=shape)
  def barrier(_, value):
    return fragmented_array.optimization_barrier(value)

  return barrier(value)


def write_rows(
    stage, out, first, begin, end, column, *, interpret: bool
) -> None:
  """Writes the rows of a staged tile that lie in [begin, end).

  Args:
    stage: [P, 128] shared memory, tiled and swizzled; P a multiple of 8.
    out: [M, N] global memory.
    first: the row of out of the tile's first row.
    begin, end: rows of out, int32.
    column: the column of out of the tile's first column; columns from N on
      are not written.
    interpret: use the interpreter's twin.
  """
  if interpret:
    _write_rows_twin(stage, out, first, begin, end, column)
    return
  num_rows, width = stage.shape
  columns = out.shape[1]
  threads_per_row = width // _VECTOR
  rows_at_once = 128 // threads_per_row
  assert rows_at_once == 8, "a thread keeps its place in the swizzle"

  @plgpu.inline_mgpu(
      arg_types=(plgpu.RefType(TILED), plgpu.RefType(), *[_SCALAR] * 4)
  )
  def write(_, stage, out, *scalars):
    first, begin, end, column = (s.registers.item() for s in scalars)
    i32, i64 = (ir.IntegerType.get_signless(b) for b in (32, 64))
    word = ir.VectorType.get((4,), i32)
    element = ir.IntegerType.get_signless(16)
    const = lambda value: arith.constant(i32, value)
    below = lambda a, b: arith.cmpi(arith.CmpIPredicate.slt, a, b)
    thread = arith.remui(mgpu_utils.thread_idx(), const(128))
    piece = arith.remui(thread, const(threads_per_row))
    row = arith.divui(thread, const(threads_per_row))
    # 16-byte pieces of a 128-byte row, xor the row.
    swizzled = arith.xori(arith.remui(piece, const(8)), row)
    offset = arith.addi(
        arith.muli(arith.divui(piece, const(8)), const(8 * 64)),
        arith.addi(
            arith.muli(row, const(64)), arith.muli(swizzled, const(_VECTOR))
        ),
    )
    source = mgpu_utils.memref_ptr(stage)
    values = [
        llvm.load(
            word,
            mgpu_utils.getelementptr(
                source,
                [arith.addi(offset, const(slab * 8 * width))],
                element,
            ),
            alignment=16,
        )
        for slab in range(num_rows // 8)
    ]
    column = arith.addi(column, arith.muli(piece, const(_VECTOR)))
    inside = below(column, const(columns))
    target = llvm.addrspacecast(
        llvm.PointerType.get(address_space=1), mgpu_utils.memref_ptr(out)
    )
    wide = lambda x: arith.extsi(i64, x)
    row = arith.addi(first, row)
    for slab, value in enumerate(values):
      here = arith.addi(row, const(slab * 8))
      mine = arith.andi(
          inside,
          arith.andi(
              below(here, end), arith.cmpi(arith.CmpIPredicate.sge, here, begin)
          ),
      )
      index = arith.addi(
          arith.muli(wide(here), arith.constant(i64, columns)), wide(column)
      )
      with mgpu.when(mine):
        llvm.store(
            value,
            mgpu_utils.getelementptr(target, [index], element),
            alignment=16,
        )

  write(stage, out, first, begin, end, column)


def zero_rows(
    ref, low, high, *, interpret: bool, transforms: tuple = TILED
) -> None:
  """Zeroes the rows of a swizzled [R, W] tile outside [low, high).

  The swizzle permutes within a row's 128 bytes, so whole rows need not know
  it. Callers make the writes visible with `commit_smem`.
  """
  num_rows, width = ref.shape
  if interpret:
    rows = lax.broadcasted_iota(jnp.int32, ref.shape, 0)
    ref[...] = jnp.where((rows >= low) & (rows < high), ref[...], 0)
    return
  threads_per_row = width // _VECTOR
  rows_at_once = 128 // threads_per_row

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), *[_SCALAR] * 2))
  def zero(_, ref, *scalars):
    low, high = (s.registers.item() for s in scalars)
    i32 = ir.IntegerType.get_signless(32)
    const = lambda value: arith.constant(i32, value)
    compare = lambda kind, a, b: arith.cmpi(
        getattr(arith.CmpIPredicate, kind), a, b
    )
    kind = ir.MemRefType(ref.type)
    slab, block, line, _ = kind.get_strides_and_offset()[0]
    per_block = kind.shape[3] // _VECTOR
    thread = arith.remui(mgpu_utils.thread_idx(), const(128))
    piece = arith.remui(thread, const(threads_per_row))
    first = arith.divui(thread, const(threads_per_row))
    column = arith.addi(
        arith.muli(arith.divui(piece, const(per_block)), const(block)),
        arith.muli(arith.remui(piece, const(per_block)), const(_VECTOR)),
    )
    word = ir.VectorType.get((4,), i32)
    zeros = arith.constant(
        word, ir.DenseElementsAttr.get_splat(word, ir.IntegerAttr.get(i32, 0))
    )
    target = mgpu_utils.memref_ptr(ref)
    for r in range(0, num_rows, rows_at_once):
      row = arith.addi(first, const(r))
      offset = arith.addi(
          column,
          arith.addi(
              arith.muli(arith.divui(row, const(8)), const(slab)),
              arith.muli(arith.remui(row, const(8)), const(line)),
          ),
      )
      outside = arith.ori(compare("slt", row, low), compare("sge", row, high))
      with mgpu.when(outside):
        pointer = mgpu_utils.getelementptr(
            target, [offset], ir.IntegerType.get_signless(16)
        )
        llvm.store(zeros, pointer, alignment=16)

  zero(ref, low, high)


def _write_rows_twin(stage, out, first, begin, end, column):
  num_rows, width = stage.shape
  columns = pl.ds(column, width)
  whole = (first >= begin) & (first + num_rows <= end)

  @pl.when(whole)
  def _():
    out.at[pl.ds(first, num_rows), columns][...] = stage[...]

  def write(r, _):
    row = first + r

    @pl.when((row >= begin) & (row < end))
    def _():
      out.at[pl.ds(row, 1), columns][...] = stage[pl.ds(r, 1)]

  # No loop round at all where the tile is whole.
  lax.fori_loop(0, jnp.where(whole, 0, num_rows), write, None)
