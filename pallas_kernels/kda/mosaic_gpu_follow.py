"""Prep and the scan of few heads in one Hopper kernel: the scan follows prep.

With few heads the scan takes a part of the chip and is bound by the latency of
a chunk's chain, so the other blocks prepare chunks at the same time. A counter
per chunk of a head says that its tiles can be read: either warpgroup of prep
adds one when what it stored has arrived, the scan's loading warpgroup waits for
both before it asks for the chunk, which is still in the L2 cache then.

Blocks that prepare have the lower numbers and wait for no one, so they are
running when a block that scans starts, and the interpreter, which runs blocks
one after another, needs no counters.
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

GROUPS = 1
_STORING_WARPGROUPS = 2  # of prep, per chunk


def leaves_room(batch, value_heads, values):
  """Whether at least half of the chip is free beside the scan's blocks."""
  return 2 * batch * value_heads * (values // walk_lib.SLICE) <= prep_lib.BLOCKS


@functools.partial(jax.jit, static_argnums=0)
def prep_and_scan(plan: Plan, q, k, z, beta, slope, bias, flags, v, initial):
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

  Returns:
    The tiles of `prep`, and (o, final) of `scan`.
  """
  batch, value_heads, values, _ = initial.shape
  slices = values // walk_lib.SLICE // GROUPS
  scanning = batch * value_heads * slices
  work = prep_lib.Work.of(
      plan,
      q,
      k,
      z,
      beta,
      slope,
      bias,
      flags,
      blocks=max(prep_lib.num_blocks(plan) - scanning, 1),
  )
  preparing = work.walk.blocks
  walk = scan_lib.output_walk(work.out_type, v, initial)
  num_tiles, num_operands = len(work.out_type), len(work.operands)
  # The tiles are this kernel's own outputs.
  names = list(walk.inputs)
  counters = jnp.zeros((batch, value_heads, work.walk.chunks), jnp.int32)
  counters = jax.new_ref(counters)

  def body(*refs):
    operands, refs = refs[:num_operands], refs[num_operands:]
    v_ref, initial_ref, counters, *outputs = refs
    tiles, outputs = outputs[:num_tiles], outputs[num_tiles:]
    block = lax.axis_index("block")

    def announce(*place):
      _add_one(counters.at[place], plan)

    def await_chunk(*place):
      _await(counters.at[place], plan)

    def place():
      this = lax.axis_index("block") - preparing
      return [
          lax.div(this, value_heads * slices),
          lax.rem(lax.div(this, slices), value_heads),
          lax.rem(this, slices),
      ]

    @pl.when(block < preparing)
    def _():
      work.run(*operands, *tiles, announce=announce)

    @pl.when(block >= preparing)
    def _():
      walk_lib.Block(
          plan=plan,
          walk=walk,
          operands=scan_lib.named(tiles, names)
          | dict(x=v_ref, initial=initial_ref),
          outputs=outputs,
          place=place,
          groups=GROUPS,
          idle=2 * plan.pairs - 1 - GROUPS,
          await_chunk=await_chunk,
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
  outputs = kernel(*work.operands, v, initial, counters)
  return tuple(outputs[:num_tiles]), tuple(outputs[num_tiles:])


def _add_one(counter, plan):
  """Adds one, after what this warpgroup has stored."""
  if plan.interpret is not None:
    return

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def add(_, ref):
    mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(ref)).signal(
        1, memory_scope="gpu"
    )

  add(counter)


def _await(counter, plan):
  """Waits until both warpgroups have added one, so that copies may read."""
  if plan.interpret is not None:
    return

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def wait(_, ref):
    pointer = mgpu.utils.memref_ptr(ref)
    mgpu.utils.SemaphoreRef(pointer).wait(
        _STORING_WARPGROUPS, decrement=False, memory_scope="gpu"
    )
    llvm.inline_asm(
        None, [], "fence.proxy.async.global;", "", has_side_effects=True
    )

  wait(counter)
