"""The gradient by the matrices on Hopper: d_rhs[e] = lhs_e^T d_out_e.

One output tile of 256 x 128 per block and item; the contraction runs over the
group's rows in chunks of 64 that start on a multiple of 8. Rows of a chunk
that are not the group's are set to zero in shared memory, in both operands, so
that not even a NaN of a neighbour gets in. Two blocks of a cluster share the
lhs rows. A group without rows writes zeros.
"""

import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import mosaic_gpu_lanes as lanes
from pallas_kernels.grouped_matmul import mosaic_gpu_schedule as schedule
from pallas_kernels.grouped_matmul.mosaic_gpu_schedule import CHUNK

_COMPUTE_REGISTERS, _FETCH_REGISTERS = 232, 40
WARPGROUPS = 2  # that compute


def outer_products(
    plan: schedule.Plan,
    lhs: jax.Array,
    d_out: jax.Array,
    group_sizes: jax.Array,
) -> jax.Array:
  """Per group, lhs^T @ d_out over its rows.

  Args:
    plan: the static part.
    lhs: [M, I] bf16, M a multiple of 8 and no less than a chunk.
    d_out: [M, N] bf16; I and N multiples of 64 and no less than 128.
    group_sizes: [E] int32.

  Returns:
    [E, I, N] bf16.
  """
  num_rows, rows_out = lhs.shape
  columns = d_out.shape[1]
  num_groups = group_sizes.shape[0]
  stages, size, width = plan.weight_stages, plan.slice, plan.width
  block_rows = WARPGROUPS * size
  row_tiles = -(-rows_out // block_rows)
  column_tiles = -(-columns // (width * plan.cluster))
  per_group = row_tiles * column_tiles
  items = num_groups * per_group
  limits = jnp.stack(schedule.bounds(group_sizes, num_rows), axis=1)

  def body(lhs_gm, d_out_gm, limits_gm, out_gm, **smem):
    warpgroup = lax.axis_index("warpgroup")
    cluster = lax.axis_index("tile")
    half = lax.axis_index("pair") if plan.cluster > 1 else 0
    rounds = lax.div(items - cluster + plan.clusters - 1, plan.clusters)

    def place(n):
      """The n-th item's group and this block's tile of its gradient."""
      item = n * plan.clusters + cluster
      owner = lax.div(item, per_group)
      rest = item - owner * per_group
      column = lax.div(rest, row_tiles)
      row = (rest - column * row_tiles) * block_rows
      return owner, row, (column * plan.cluster + half) * width

    def limits_of(n):
      """The n-th item's rows; any group's past the last item."""
      owner = lax.min(place(n)[0], jnp.int32(num_groups - 1))
      return limits_gm[owner, 0], limits_gm[owner, 1]

    def chunks_of(begin, end):
      start = lax.div(begin, schedule.ALIGNMENT) * schedule.ALIGNMENT
      chunks = lax.div(end - start + CHUNK - 1, CHUNK)
      return start, jnp.where(end > begin, chunks, 0)

    @pl.when(warpgroup == WARPGROUPS)
    def _fetch():
      plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

      def fetch_item(n, done):
        _, row, column = place(n)
        start, chunks = chunks_of(*limits_of(n))

        def one(k, _):
          slot = lax.rem(done + k, stages)
          ready = smem["loaded"].at[slot]

          @pl.when(done + k >= stages)
          def _():
            plgpu.barrier_wait(smem["consumed"].at[slot])

          here = pl.ds(start + k * CHUNK, CHUNK)
          for i in range(WARPGROUPS):
            plgpu.copy_gmem_to_smem(
                lhs_gm.at[here, pl.ds(row + i * size, size)],
                smem["lhs_in"].at[slot, i],
                ready,
                collective_axes="pair" if plan.cluster > 1 else None,
            )
          plgpu.copy_gmem_to_smem(
              d_out_gm.at[here, pl.ds(column, width)],
              smem["d_out_in"].at[slot],
              ready,
          )

        lax.fori_loop(0, chunks, one, None)
        return done + chunks

      done = lax.fori_loop(0, rounds, fetch_item, 0)
      lanes.drain(smem["consumed"], done, stages)

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
      plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")

      def compute_item(n, carry):
        done, begin, end = carry
        following = limits_of(n + 1)  # a read of global memory: early
        owner, row, column = place(n)
        start, chunks = chunks_of(begin, end)

        def product(acc):
          def one(k, _):
            slot = lax.rem(done + k, stages)
            plgpu.barrier_wait(smem["loaded"].at[slot])
            first = start + k * CHUNK

            @pl.when((first < begin) | (first + CHUNK > end))
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
        plgpu.commit_smem()
        lanes.stage_tile(stage, out, interpret=plan.interpret is not None)
        plgpu.commit_smem()
        here = pl.ds(row + warpgroup * size, size)
        plgpu.copy_smem_to_gmem(
            stage, out_gm.at[owner, here, pl.ds(column, width)]
        )

      def mask_rows(slot, low, high):
        """Zeroes rows outside [low, high): own lhs, half of d_out."""
        zero = functools.partial(
            lanes.zero_rows, interpret=plan.interpret is not None
        )
        zero(smem["lhs_in"].at[slot, warpgroup], low, high)
        share = width // WARPGROUPS
        for i in range(WARPGROUPS):
          part = smem["d_out_in"].at[slot, :, pl.ds(i * share, share)]
          pl.when(warpgroup == i)(lambda part=part: zero(part, low, high))
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["masked"])
        plgpu.barrier_wait(smem["masked"])

      lax.fori_loop(0, rounds, compute_item, (0, *limits_of(0)))
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
  dtype, tiled = lhs.dtype, lanes.TILED
  kernel = plgpu.kernel(
      body,
      out_type=jax.ShapeDtypeStruct((num_groups, rows_out, columns), dtype),
      scratch_types=dict(
          lhs_in=plgpu.SMEM(
              (stages, WARPGROUPS, CHUNK, size), dtype, transforms=tiled
          ),
          d_out_in=plgpu.SMEM((stages, CHUNK, width), dtype, transforms=tiled),
          out=plgpu.SMEM((WARPGROUPS, size, width), dtype, transforms=tiled),
          loaded=plgpu.Barrier(
              num_arrivals=1 + WARPGROUPS, num_barriers=stages
          ),
          masked=plgpu.Barrier(num_arrivals=WARPGROUPS),
          consumed=consumed,
      ),
      **lanes.launch(plan, "grouped_matmul_d_rhs", WARPGROUPS + 1),
  )
  return kernel(lhs, d_out, limits)
