"""Row tiles times their group's matrix on Hopper.

Both products over rows are computed transposed,

  out^T = rhs[e]^T lhs^T          d_lhs^T = rhs[e] d_out^T

so that the ragged dimension is wgmma's N, which comes in steps of 8 rather
than 64, and the matrix is its M. A block makes 2 x 128 columns of a tile, one
warpgroup each; a third warpgroup fetches. Two blocks of a cluster make
neighbouring columns of the same rows, and each fetches half of the rows for
both. A block lives through the launch and takes an item of each round.

A tile's height is part of the instruction, so the loop over the contraction is
compiled once for each; the output is written by code that all of them share.
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
_FETCHED = (
    schedule.GROUP,
    schedule.START,
    schedule.HEIGHT,
    schedule.COLUMN,
)
_COMPUTED = (
    schedule.GROUP,
    schedule.START,
    schedule.BEGIN,
    schedule.END,
    schedule.HEIGHT,
    schedule.COLUMN,
)


@functools.partial(jax.jit, static_argnums=0, static_argnames="transpose")
def rows_times_matrices(
    plan: schedule.Plan,
    rows: jax.Array,
    stacks: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    *,
    transpose: bool,
) -> jax.Array:
  """out[r] = rows[r] @ matrix[e] (or its transpose), 0 past the groups.

  A group's matrix is what the stacks hold for it, side by side.

  Args:
    plan: the static part.
    rows: [M, I], or [M, N] if transpose, bf16; M a multiple of 8 and no less
      than the highest tile.
    stacks: S arrays [E, I, N / S]; I and N / S multiples of 64, I and N no less
      than a slice, N / S a multiple of a slice unless S is 1.
    group_sizes: [E] int32.
    transpose: whether to use the matrices' transposes.

  Returns:
    [M, N], or [M, I] if transpose, bf16.
  """
  num_rows, contracted = rows.shape
  num_groups, _, share = stacks[0].shape
  columns = stacks[0].shape[1] if transpose else share * len(stacks)
  stages, size = plan.row_stages, plan.slice
  block_columns = WARPGROUPS * size
  column_tiles = -(-columns // (block_columns * plan.cluster))
  steps = contracted // CHUNK
  matrix_tile = (size, CHUNK) if transpose else (CHUNK, size)

  def body(rows_gm, *refs, **smem):
    *stacks_gm, items_gm, out_gm = refs
    group = lax.axis_index("warpgroup")
    cluster = lax.axis_index("tile")
    half = lax.axis_index("pair") if plan.cluster > 1 else 0
    items = items_gm[0, 0]
    rounds = lax.div(items - cluster + plan.clusters - 1, plan.clusters)

    def fields_of(n, fields):
      """Fields of the n-th item; of the last item from there on."""
      item = lax.min(n * plan.clusters + cluster, items - 1)
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

      def with_part(use, owner, k, column):
        """use(part of the matrix), of 64 to contract and a slice to make."""
        wide, long = pl.ds(column, size), pl.ds(k * CHUNK, CHUNK)

        def use_stack(stack, place):
          if transpose:
            use(stack.at[owner, wide, pl.ds(place, CHUNK)])
          else:
            use(stack.at[owner, long, pl.ds(place, size)])

        schedule.within_share(
            k * CHUNK if transpose else column, share, stacks_gm, use_stack
        )

      def fetch_item(n, carry):
        done, owner, start, index, column = carry
        following = fields(n + 1)  # reads of global memory: early
        length, column = steps_of(owner), first_column(column)

        def one(k, _):
          slot = lax.rem(done + k, stages)
          ready = smem["loaded"].at[slot]

          @pl.when(done + k >= stages)
          def _():
            plgpu.barrier_wait(smem["consumed"].at[slot])

          def fetch_rows(height):
            plgpu.copy_gmem_to_smem(
                rows_gm.at[pl.ds(start, height), pl.ds(k * CHUNK, CHUNK)],
                smem["rows_in"].at[slot, pl.ds(0, height)],
                ready,
                collective_axes="pair" if plan.cluster > 1 else None,
            )

          for_height(index, fetch_rows)
          for i in range(WARPGROUPS):
            there = smem["matrices_in"].at[slot, i]
            copy = lambda part, there=there: plgpu.copy_gmem_to_smem(
                part, there, ready
            )
            with_part(copy, owner, k, column + i * size)

        lax.fori_loop(0, length, one, None)
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

        def multiply(height):
          def product(acc):
            def one(k, before):
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
              release(before)
              return slot

            last = lax.fori_loop(0, length, one, jnp.int32(stages))
            return plgpu.wgmma_accumulator_load(acc), last

          out, last = pl.run_scoped(product, plgpu.ACC((size, height)))
          out = lanes.computed_here(
              out.astype(jnp.bfloat16), interpret=plan.interpret is not None
          )
          return widen(out), last

        with jax.named_scope("multiply"):
          out, last = for_height(index, multiply)
        # Nothing may arrive in a neighbour after what its fetching waits for.
        pl.when(last < stages)(lambda: release(last))
        following = fields(n + 1)
        with jax.named_scope("write"):
          write(out, start, begin, end, column + group * size)
        return done + length, *following

      def release(slot):
        """Gives a slot back; before an item's first there is no slot."""
        arrive = lambda: plgpu.barrier_arrive(smem["consumed"].at[slot])
        if plan.interpret is None:
          arrive()
        else:  # it wants somebody to wait for every barrier
          pl.when(slot < stages)(arrive)

      def widen(out):
        """To the highest tile's width; what is added is not written."""
        missing = plan.heights[-1] - out.shape[1]
        if not missing:
          return out
        zeros = jnp.zeros((size, missing), out.dtype)
        zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        return jnp.concatenate([out, zeros], axis=1)

      def write(out, start, begin, end, column):
        for i, first in enumerate(range(0, out.shape[1], _PIECE)):
          piece = out[:, first : first + _PIECE]
          stage = smem["out"].at[group, i % _BUFFERS, pl.ds(0, piece.shape[1])]

          @pl.when(start + first < end)
          def _(i=i, first=first, piece=piece, stage=stage):
            if i == 0 or i >= _BUFFERS:  # until this buffer has been read
              others = _BUFFERS - 1 if i else 0
              plgpu.wait_smem_to_gmem(others, wait_read_only=True)
            lanes.stage_tile(
                stage,
                piece,
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
          num_barriers=stages + 1,
      )
      if plan.cluster > 1
      else plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages + 1)
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
  items = schedule.row_items(group_sizes, num_rows, column_tiles, plan)
  return kernel(rows, *stacks, items)
