"""Prep and the scan of few heads in one Hopper kernel: the scan follows prep.

With few heads the scan takes a part of the chip and is bound by the latency of
a chunk's chain, so the other blocks prepare chunks at the same time. A counter
per chunk of a head says that its tiles can be read: prep adds one when all have
arrived, and the scan's loading warpgroup waits for that before it asks for them.

Blocks that prepare have the lower numbers, so all of them have started when one
that scans starts, and they wait for no one: nothing can stand still. For the
same reason the interpreter, which runs blocks one after another, needs no
counters; it has no word for them either.
"""

import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm

from pallas_kernels.kda import mosaic_gpu_prep as prep_lib
from pallas_kernels.kda import mosaic_gpu_scan as scan_lib
from pallas_kernels.kda import mosaic_gpu_walk as walk_lib
from pallas_kernels.kda.mosaic_gpu_prep import Plan


def leaves_room(batch, value_heads, values):
  """Whether at least half of the chip is free beside the scan's blocks."""
  return 2 * batch * value_heads * (values // walk_lib.SLICE) <= prep_lib.BLOCKS


@functools.partial(jax.jit, static_argnums=0, static_argnames="with_low")
def prep_and_scan(
    plan: Plan, q, k, z, beta, slope, bias, flags, v, initial, *, with_low: bool
):
  """`mosaic_gpu_prep.prep` and then `mosaic_gpu_scan.scan`, bit for bit.

  Args:
    plan: the static part.
    q: see `prep`, as all up to flags.
    k: see `prep`.
    z: see `prep`.
    beta: see `prep`.
    slope: see `prep`.
    bias: see `prep`.
    flags: see `prep`.
    v: [B, T, HV, V] bf16.
    initial: [B, HV, V, K] fp32, the transposed state before the first chunk.
    with_low: see `prep`.

  Returns:
    The tiles of `prep`, and (o, final) of `scan`.
  """
  local = (q, k, z, beta, slope, bias, flags)
  batch, value_heads, values, _ = initial.shape
  slices = values // walk_lib.SLICE
  scanning = batch * value_heads * slices
  preparing = max(prep_lib.num_blocks(plan) - scanning, 1)
  work = prep_lib.Work.of(plan, local, with_low, preparing)
  preparing = work.walk.blocks
  walk = scan_lib.output_walk(work.tiles(work.out_type), v, initial)
  arrived = jnp.zeros((batch, value_heads, work.walk.chunks), jnp.int32)

  def body(*refs):
    refs = iter(refs)
    operands = [next(refs) for _ in work.operands]
    x, start, arrived = (next(refs) for _ in range(3))
    tiles = [next(refs) for _ in work.out_type]
    outputs = list(refs)
    block = lax.axis_index("block")

    @pl.when(block < preparing)
    def _():
      announce = lambda *place: _add_one(arrived.at[place], plan)
      work.run(*operands, *tiles, announce=announce)

    @pl.when(block >= preparing)
    def _():
      this = block - preparing
      inputs = scan_lib.named(work.tiles(tiles), walk.inputs)
      walk_lib.Block(
          plan=plan,
          walk=walk,
          operands=inputs | dict(x=x, initial=start),
          outputs=outputs,
          place=[
              lax.div(this, value_heads * slices),
              lax.rem(lax.div(this, slices), value_heads),
              lax.rem(this, slices),
          ],
          groups=1,
          idle=2 * plan.pairs - 2,
          await_chunk=lambda *place: _await(arrived.at[place], plan),
      ).run()

  kernel = plgpu.kernel(
      body,
      out_type=[*work.out_type, *walk.out_type],
      grid=(preparing + scanning,),
      grid_names=("block",),
      num_threads=2 * plan.pairs,
      thread_name="warpgroup",
      kernel_name="kda_prep_and_scan",
      compiler_params=plgpu.CompilerParams(
          approx_math=True,
          unsafe_no_auto_barriers=True,
          lowering_semantics=plgpu.LoweringSemantics.Lane,
      ),
      interpret=plan.interpret,
  )
  *tiles, out, final = kernel(*work.operands, v, initial, jax.new_ref(arrived))
  return work.tiles(tiles), (out, final)


def _add_one(counter, plan):
  """Adds one, after what has arrived before."""
  if plan.interpret is not None:
    return

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def add(_, ref):
    mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(ref)).signal(
        1, memory_scope="gpu"
    )

  add(counter)


def _await(counter, plan):
  """Waits until one has been added, so that copies may read."""
  if plan.interpret is not None:
    return

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def wait(_, ref):
    pointer = mgpu.utils.memref_ptr(ref)
    mgpu.utils.SemaphoreRef(pointer).wait(decrement=False, memory_scope="gpu")
    llvm.inline_asm(
        None, [], "fence.proxy.async.global;", "", has_side_effects=True
    )

  wait(counter)
