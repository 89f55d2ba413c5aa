"""Row tiles times their group's matrix on Hopper.

Both products over rows are computed transposed,

  out^T = rhs[e]^T lhs^T          d_lhs^T = rhs[e] d_out^T

so that the ragged dimension is wgmma's N, which comes in steps of 8 rather
than 64, and the matrix is its M. A block makes 2 x 128 columns of a tile, one
warpgroup each; a third warpgroup fetches. Two blocks of a cluster make
neighbouring columns of the same rows, and each fetches half of the rows for
both. A block lives through the launch and takes an item of each round.
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

_PIECE, _BUFFERS = 32, 3  # rows of the output staged at a time
_COMPUTE_REGISTERS, _FETCH_REGISTERS = 232, 40
WARPGROUPS = 2  # that compute
# What either kind of warpgroup has to know of an item.
_FETCHED = schedule.GROUP, schedule.START, schedule.HEIGHT, schedule.COLUMN
_COMPUTED = range(6)


@functools.partial(jax.jit, static_argnums=0, static_argnames="transpose")
def rows_times_matrices(
    plan: schedule.Plan,
    rows: jax.Array,
    matrices: jax.Array,
    tiles: jax.Array,
    *,
    transpose: bool,
) -> jax.Array:
  """out[r] = rows[r] @ matrices[e] (or its transpose), 0 past the groups.

  Args:
    plan: the static part.
    rows: [M, K] bf16, M a multiple of 8 and no less than the highest tile.
    matrices: [E, K, N], or [E, N, K] if transpose; K and N multiples of 64
      and no less than a slice.
    tiles: from `schedule.row_tiles`.
    transpose: whether to use the matrices' transposes.

  Returns:
    [M, N] bf16.
  """
  num_rows, contracted = rows.shape
  num_groups = matrices.shape[0]
  columns = matrices.shape[1 if transpose else 2]
  stages, size = plan.row_stages, plan.slice
  block_columns = WARPGROUPS * size
  column_tiles = -(-columns // (block_columns * plan.cluster))
  steps = contracted // CHUNK
  matrix_tile = (size, CHUNK) if transpose else (CHUNK, size)

  def body(rows_gm, matrices_gm, items_gm, out_gm, **smem):
    group = lax.axis_index("warpgroup")
    cluster = lax.axis_index("tile")
    half = lax.axis_index("pair") if plan.cluster > 1 else 0
    items = items_gm[0, 0]
    rounds = schedule.rounds(items, cluster, plan.clusters)

    def fields_of(n, fields):
      """Fields of the n-th item; of the last item from there on."""
      item = lax.min(schedule.dealt(n, cluster, plan.clusters), items - 1)
      return tuple(items_gm[1 + item, field] for field in fields)

    def first_column(column):
      return (column * plan.cluster + half) * block_columns

    def steps_of(owner):
      return jnp.where(owner < num_groups, steps, 0)

    def for_height(index, run):
      branches = [functools.partial(run, h) for h in plan.heights]
      return lax.switch(index, branches)

    @pl.when(group == WARPGROUPS)
    def _fetch():
      plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

      fields = functools.partial(fields_of, fields=_FETCHED)

      def fetch_item(n, carry):
        done, owner, start, index, column = carry
        following = fields(n + 1)  # reads of global memory: early
        length, column = steps_of(owner), first_column(column)

        def fetch(height):
          def one(k, _):
            slot = lax.rem(done + k, stages)
            ready = smem["loaded"].at[slot]

            @pl.when(done + k >= stages)
            def _():
              plgpu.barrier_wait(smem["consumed"].at[slot])

            chunk = pl.ds(k * CHUNK, CHUNK)
            plgpu.copy_gmem_to_smem(
                rows_gm.at[pl.ds(start, height), chunk],
                smem["rows_in"].at[slot, pl.ds(0, height)],
                ready,
                collective_axes="pair" if plan.cluster > 1 else None,
            )
            for i in range(WARPGROUPS):
              here = pl.ds(column + i * size, size)
              at = (owner, here, chunk) if transpose else (owner, chunk, here)
              plgpu.copy_gmem_to_smem(
                  matrices_gm.at[at], smem["matrices_in"].at[slot, i], ready
              )

          lax.fori_loop(0, length, one, None)

        for_height(index, fetch)
        return done + length, *following

      done, *_ = lax.fori_loop(0, rounds, fetch_item, (0, *fields(0)))
      lanes.drain(smem["consumed"], done, stages)

    @pl.when(group < WARPGROUPS)
    def _compute():
      plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")

      fields = functools.partial(fields_of, fields=_COMPUTED)

      def compute_item(n, carry):
        done, owner, start, begin, end, index, column = carry
        length, column = steps_of(owner), first_column(column)

        def compute(height):
          def product(acc):
            def one(k, _):
              slot = lax.rem(done + k, stages)
              plgpu.barrier_wait(smem["loaded"].at[slot])
              left = smem["matrices_in"].at[slot, group]
              right = smem["rows_in"].at[slot, pl.ds(0, height)]
              plgpu.wgmma(
                  acc,
                  left if transpose else left.transpose((1, 0)),
                  right.transpose((1, 0)),
              )
              plgpu.wgmma_wait(1)

              @pl.when(k > 0)
              def _():
                before = lax.rem(done + k - 1, stages)
                plgpu.barrier_arrive(smem["consumed"].at[before])

            lax.fori_loop(0, length, one, None)
            return plgpu.wgmma_accumulator_load(acc)

          with jax.named_scope("multiply"):
            out = pl.run_scoped(product, plgpu.ACC((size, height)))

          @pl.when(length > 0)
          def _():
            last = lax.rem(done + length - 1, stages)
            plgpu.barrier_arrive(smem["consumed"].at[last])

          with jax.named_scope("write"):
            here = column + group * size
            write(out.astype(jnp.bfloat16), start, begin, end, here)
          return fields(n + 1)

        following = for_height(index, compute)
        return done + length, *following

      def write(out, start, begin, end, column):
        height = out.shape[1]
        for i, first in enumerate(range(0, height, _PIECE)):
          piece = min(_PIECE, height - first)
          stage = smem["out"].at[group, i % _BUFFERS, pl.ds(0, piece)]
          if i == 0 or i >= _BUFFERS:  # until this buffer has been read
            others = _BUFFERS - 1 if i else 0
            plgpu.wait_smem_to_gmem(others, wait_read_only=True)
          lanes.stage_tile(
              stage,
              out[:, first : first + piece],
              interpret=plan.interpret is not None,
              transpose=True,
          )
          plgpu.commit_smem()
          write_piece(stage, start + first, begin, end, column)
          plgpu.commit_smem_to_gmem_group()

      def write_piece(stage, row, begin, end, column):
        """By the copy engine, unless some rows are a neighbour's."""
        rows = pl.ds(row, stage.shape[0])
        whole = (row >= begin) & (row + stage.shape[0] <= end)

        @pl.when(whole)
        def _():
          there = out_gm.at[rows, pl.ds(column, size)]
          plgpu.copy_smem_to_gmem(stage, there, commit_group=False)

        @pl.when(~whole)
        def _():
          lanes.write_rows(
              stage,
              out_gm,
              row,
              begin,
              end,
              column,
              interpret=plan.interpret is not None,
          )

      lax.fori_loop(0, rounds, compute_item, (0, *fields(0)))
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
  tiled = lanes.TILED
  name = "grouped_matmul_d_lhs" if transpose else "grouped_matmul"
  kernel = plgpu.kernel(
      body,
      out_type=jax.ShapeDtypeStruct((num_rows, columns), rows.dtype),
      scratch_types=dict(
          rows_in=plgpu.SMEM(
              (stages, plan.heights[-1], CHUNK), rows.dtype, transforms=tiled
          ),
          matrices_in=plgpu.SMEM(
              (stages, WARPGROUPS, *matrix_tile), rows.dtype, transforms=tiled
          ),
          out=plgpu.SMEM(
              (WARPGROUPS, _BUFFERS, _PIECE, size), rows.dtype, transforms=tiled
          ),
          loaded=plgpu.Barrier(
              num_arrivals=1 + WARPGROUPS, num_barriers=stages
          ),
          consumed=consumed,
      ),
      **lanes.launch(plan, name, WARPGROUPS + 1),
  )
  items = schedule.row_items(tiles, column_tiles, plan.panel)
  return kernel(rows, matrices, items)
