"""The gradient by the matrices on Hopper: d_rhs[e] = lhs_e^T d_out_e.

One output tile of 128 x 256 per block and item, 64 rows to a warpgroup: a
wgmma that is wide in N reads its operands from shared memory the least often.
The contraction runs over the group's rows in chunks of 32 that start on a
multiple of 8. Rows of a chunk that are not the group's are set to zero in
shared memory, in both operands, so that not even a NaN of a neighbour gets in.
Two blocks of a cluster share the d_out rows. Large groups come first. A group
without rows writes zeros.
"""

import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import mosaic_gpu_lanes as lanes
from pallas_kernels.grouped_matmul import mosaic_gpu_schedule as schedule

_COMPUTE_REGISTERS, _FETCH_REGISTERS = 232, 40
WARPGROUPS = 2  # that compute


@functools.partial(jax.jit, static_argnums=(0, 4))
def outer_products(
    plan: schedule.Plan,
    lhs: jax.Array,
    d_out: jax.Array,
    group_sizes: jax.Array,
    num_stacks: int,
) -> tuple[jax.Array, ...]:
  """Per group, lhs^T @ d_out over its rows.

  Args:
    plan: the static part.
    lhs: [M, I] bf16, M a multiple of 8 and no less than a chunk.
    d_out: [M, N] bf16; I and N multiples of 64 and no less than a tile.
    group_sizes: [E] int32.
    num_stacks: S, into how many arrays the columns are shared out; N / S is a
      multiple of a tile's columns unless S is 1.

  Returns:
    S arrays [E, I, N / S] bf16.
  """
  num_rows, rows_out = lhs.shape
  columns, share = d_out.shape[1], d_out.shape[1] // num_stacks
  num_groups = group_sizes.shape[0]
  stages, chunk = plan.weight_stages, plan.weight_chunk
  size, width = plan.weight_rows, plan.weight_columns
  tiled = lanes.tiled(chunk)  # wgmma contracts a swizzled row at a time
  block_rows = WARPGROUPS * size
  row_tiles = -(-rows_out // (block_rows * plan.cluster))
  column_tiles = -(-columns // width)
  per_group = row_tiles * column_tiles
  items = num_groups * per_group
  groups = schedule.largest_first(group_sizes, num_rows)

  def body(lhs_gm, d_out_gm, groups_gm, *stacks_gm, **smem):
    warpgroup = lax.axis_index("warpgroup")
    cluster = lax.axis_index("tile")
    half = lax.axis_index("pair") if plan.cluster > 1 else 0
    rounds = schedule.rounds(items, cluster, plan.clusters)

    def fields_of(n):
      """The n-th item's group, rows and tile; the last item's from there on."""
      item = lax.min(schedule.dealt(n, cluster, plan.clusters), items - 1)
      place = lax.div(item, per_group)
      rest = item - place * per_group
      column = lax.div(rest, row_tiles)
      row = (rest - column * row_tiles) * plan.cluster + half
      owner, begin, end = (groups_gm[place, f] for f in range(3))
      return owner, begin, end, row * block_rows, column * width

    def chunks_of(begin, end):
      start = lax.div(begin, schedule.ALIGNMENT) * schedule.ALIGNMENT
      chunks = lax.div(end - start + chunk - 1, chunk)
      return start, jnp.where(end > begin, chunks, 0)

    @pl.when(warpgroup == WARPGROUPS)
    def _fetch():
      plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

      def fetch_item(n, carry):
        done, _, begin, end, row, column = carry
        following = fields_of(n + 1)  # reads of global memory: early
        start, chunks = chunks_of(begin, end)

        def one(k, _):
          slot = lax.rem(done + k, stages)
          ready = smem["loaded"].at[slot]

          @pl.when(done + k >= stages)
          def _():
            plgpu.barrier_wait(smem["consumed"].at[slot])

          here = pl.ds(start + k * chunk, chunk)
          plgpu.copy_gmem_to_smem(
              d_out_gm.at[here, pl.ds(column, width)],
              smem["d_out_in"].at[slot],
              ready,
              collective_axes="pair" if plan.cluster > 1 else None,
          )
          for i in range(WARPGROUPS):
            plgpu.copy_gmem_to_smem(
                lhs_gm.at[here, pl.ds(row + i * size, size)],
                smem["lhs_in"].at[slot, i],
                ready,
            )

        lax.fori_loop(0, chunks, one, None)
        return done + chunks, *following

      done, *_ = lax.fori_loop(0, rounds, fetch_item, (0, *fields_of(0)))
      lanes.drain(smem["consumed"], done, stages)

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
      plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")

      def compute_item(n, carry):
        done, owner, begin, end, row, column = carry
        following = fields_of(n + 1)
        start, chunks = chunks_of(begin, end)

        def product(acc):
          def one(k, _):
            slot = lax.rem(done + k, stages)
            plgpu.barrier_wait(smem["loaded"].at[slot])
            first = start + k * chunk

            @pl.when((first < begin) | (first + chunk > end))
            def _():
              mask_rows(slot, begin - first, end - first)

            plgpu.wgmma(
                acc,
                smem["lhs_in"].at[slot, warpgroup].transpose((1, 0)),
                smem["d_out_in"].at[slot],
            )
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _():
              before = lax.rem(done + k - 1, stages)
              plgpu.barrier_arrive(smem["consumed"].at[before])

          lax.fori_loop(0, chunks, one, None)
          return plgpu.wgmma_accumulator_load(acc)

        with jax.named_scope("multiply"):
          out = pl.run_scoped(product, plgpu.ACC((size, width)))

        @pl.when(chunks > 0)
        def _():
          last = lax.rem(done + chunks - 1, stages)
          plgpu.barrier_arrive(smem["consumed"].at[last])

        with jax.named_scope("write"):
          write(out.astype(jnp.bfloat16), owner, row, column)
        return done + chunks, *following

      def write(out, owner, row, column):
        stage = smem["out"].at[warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        lanes.stage_tile(stage, out, interpret=plan.interpret is not None)
        plgpu.commit_smem()
        here = pl.ds(row + warpgroup * size, size)

        def copy(stack, column):
          there = stack.at[owner, here, pl.ds(column, width)]
          plgpu.copy_smem_to_gmem(stage, there)

        schedule.within_share(column, share, stacks_gm, copy)

      def mask_rows(slot, low, high):
        """Zeroes rows outside [low, high): own lhs, half of d_out."""
        zero = functools.partial(
            lanes.zero_rows,
            interpret=plan.interpret is not None,
            transforms=tiled,
        )
        zero(smem["lhs_in"].at[slot, warpgroup], low, high)
        share = width // WARPGROUPS
        for i in range(WARPGROUPS):
          part = smem["d_out_in"].at[slot, :, pl.ds(i * share, share)]
          pl.when(warpgroup == i)(lambda part=part: zero(part, low, high))
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["masked"])
        plgpu.barrier_wait(smem["masked"])

      lax.fori_loop(0, rounds, compute_item, (0, *fields_of(0)))
      plgpu.wait_smem_to_gmem(0)

  consumed = (
      plgpu.ClusterBarrier(
          collective_axes=("pair",),
          num_arrivals=WARPGROUPS,
          num_barriers=stages,
      )
      if plan.cluster > 1
      else plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
  )
  dtype = lhs.dtype
  kernel = plgpu.kernel(
      body,
      out_type=[jax.ShapeDtypeStruct((num_groups, rows_out, share), dtype)]
      * num_stacks,
      scratch_types=dict(
          lhs_in=plgpu.SMEM(
              (stages, WARPGROUPS, chunk, size), dtype, transforms=tiled
          ),
          d_out_in=plgpu.SMEM((stages, chunk, width), dtype, transforms=tiled),
          out=plgpu.SMEM(
              (WARPGROUPS, size, width), dtype, transforms=lanes.TILED
          ),
          loaded=plgpu.Barrier(
              num_arrivals=1 + WARPGROUPS, num_barriers=stages
          ),
          masked=plgpu.Barrier(num_arrivals=WARPGROUPS),
          consumed=consumed,
      ),
      **lanes.launch(plan, "grouped_matmul_d_rhs", WARPGROUPS + 1),
  )
  return tuple(kernel(lhs, d_out, groups))
