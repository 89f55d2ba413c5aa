"""Which rows every tile of a grouped product covers, and tile shapes.

One small Triton kernel makes the table of items for the row products; as an XLA
program it was seven.

A group's rows are cut into as few tiles as the highest allows, of the two
heights that waste the least. Tiles start on a multiple of 8 rows, as the copy
engine needs; the few rows of a neighbour that a tile reads at its two ends are
computed and not written.
"""

import dataclasses
import functools
import itertools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as pltriton
import numpy as np

ALIGNMENT = 8  # rows of a shared-memory tile
CHUNK = 64  # contracted per step: a swizzled row of 128 bytes
_NEVER = np.iinfo(np.int32).max

# Fields of an item, after one row that holds their number.
GROUP, START, BEGIN, END, HEIGHT, COLUMN = FIELDS = range(6)
_PROGRAMS = 128  # that make the table of items


@dataclasses.dataclass(frozen=True)
class Plan:
  """The static part of the kernels.

  Attributes:
    heights: rows of a tile of the row products, ascending multiples of 16, for
      two blocks of a cluster fetch half each; each is compiled apart, for
      wgmma's width is part of the instruction.
    slice: output columns of a warpgroup in the row products.
    weight_rows, weight_columns: of the weights' gradient, what a warpgroup
      makes at a time.
    weight_chunk: rows contracted per step there.
    row_stages, weight_stages: depth of the rings in shared memory.
    cluster: blocks that share what they fetch, 1 or 2.
    clusters: how many are resident.
    panel: row tiles that run side by side before the next columns.
    interpret: the interpreter's parameters, or None on a GPU.
  """

  heights: tuple[int, ...] = (64, 144, 160, 192)
  slice: int = 128
  weight_rows: int = 64
  weight_columns: int = 256
  weight_chunk: int = 32
  row_stages: int = 3
  weight_stages: int = 6
  cluster: int = 2
  clusters: int = 66
  panel: int = 8
  interpret: plgpu.InterpretGPUParams | None = None


def row_items(
    group_sizes: jax.Array, num_rows: int, column_tiles: int, plan: Plan
) -> jax.Array:
  """Cuts the groups, and the rows past them, into tiles, for every column.

  A group's items run panel by panel, in a panel column by column. Every cluster
  gets as many items of each height as any other, to within one, and works on
  them in this order: of all items by falling height, the i-th is cluster
  i % clusters's.

  Args:
    group_sizes: [E] int32.
    num_rows: M, a multiple of 8.
    column_tiles: how many columns of tiles there are.
    plan: the heights that a tile can have, the panel and the clusters.

  Returns:
    [1 + I, 6] int32: first the number of items in use, then in line
    n * clusters + c the n-th item of cluster c: its group (E for the rows past
    the groups), its first row, the rows [begin, end) that are its to write, and
    the indices of its height and column. I bounds the number for any sizes.
  """
  num_groups, clusters = group_sizes.shape[0], plan.clusters
  spans = min(num_groups + 1, num_rows)
  most = (num_rows + ALIGNMENT * spans) // plan.heights[-1] + spans
  shape = (1 + most * column_tiles, len(FIELDS))
  lanes = pl.next_power_of_2(num_groups + 1)

  def body(sizes_ref, items_ref):
    group = jnp.arange(lanes)
    sizes = pltriton.load(sizes_ref.at[group], mask=group < num_groups, other=0)
    ends = jnp.cumsum(sizes)
    starts = jnp.minimum(ends - sizes, num_rows)
    ends = jnp.where(group == num_groups, num_rows, jnp.minimum(ends, num_rows))
    aligned = lax.div(starts, ALIGNMENT) * ALIGNMENT
    rows = jnp.where(ends > starts, ends - aligned, 0)
    tiles, few, low, high, low_index, high_index = _two_heights(
        rows, plan.heights
    )
    count = jnp.sum(tiles) * column_tiles
    # Per height: which groups' higher or lower tiles have it, its items in the
    # groups before, and the items that are higher.
    classes, above = [], 0
    for index in reversed(range(len(plan.heights))):
      is_high, is_low = high_index == index, low_index == index
      mine = jnp.where(is_high, few, 0) + jnp.where(is_low, tiles - few, 0)
      before = (jnp.cumsum(mine) - mine) * column_tiles
      classes.append((is_high, is_low, before, above))
      above += jnp.sum(mine) * column_tiles

    def store(place, column):
      """Writes every group's tile number `place`, of those that have one."""
      first = lax.div(place, plan.panel) * plan.panel
      side = jnp.minimum(tiles - first, plan.panel)
      highs = lambda n: jnp.minimum(few, n)  # of a group's first n tiles
      in_panel = highs(first + side) - highs(first)
      before = column_tiles * first + column * side + place - first
      high_before = (
          (column_tiles - 1) * highs(first) + column * in_panel + highs(place)
      )
      earlier = [
          items
          + jnp.where(is_high, high_before, 0)
          + jnp.where(is_low, before - high_before, 0)
          for is_high, is_low, items, _ in classes
      ]
      is_higher = place < few
      cluster = 0
      for (is_high, is_low, _, above), rank in zip(classes, earlier):
        own = jnp.where(is_higher, is_high, is_low)
        cluster += jnp.where(own, lax.rem(above + rank, clusters), 0)
      turn = 0
      upto = lambda n: lax.div(n - cluster + clusters - 1, clusters)
      for (*_, above), rank in zip(classes, earlier):
        turn += upto(above + rank) - upto(above)
      line = 1 + turn * clusters + cluster

      start = aligned + highs(place) * high + (place - highs(place)) * low
      end = jnp.minimum(start + jnp.where(is_higher, high, low), ends)
      begin = jnp.maximum(start, starts)
      height = jnp.where(is_higher, high_index, low_index)
      for field, value in zip(
          FIELDS, (group, start, begin, end, height, column)
      ):
        there = items_ref.at[line * len(FIELDS) + field]
        value = jnp.broadcast_to(value, group.shape)
        pltriton.store(there, value, mask=place < tiles)

    program = pl.program_id(0)
    field = jnp.arange(8)
    is_header = (field < len(FIELDS)) & (program == 0)
    header = jnp.broadcast_to(count, field.shape)
    pltriton.store(items_ref.at[field], header, mask=is_header)

    def store_one(n, _):
      pair = program + n * _PROGRAMS
      place = lax.div(pair, column_tiles)
      store(place, pair - place * column_tiles)

    pairs = jnp.max(tiles) * column_tiles
    own = lax.div(pairs - program + _PROGRAMS - 1, _PROGRAMS)
    lax.fori_loop(0, own, store_one, None)

  items = pl.pallas_call(
      body,
      out_shape=jax.ShapeDtypeStruct((shape[0] * shape[1],), jnp.int32),
      grid=(_PROGRAMS,),
      compiler_params=pltriton.CompilerParams(
          num_warps=4 if lanes < 1024 else 8
      ),
      interpret=plan.interpret is not None,
      name="grouped_matmul_items",
  )(group_sizes.astype(jnp.int32))
  return items.reshape(shape)


def _two_heights(rows, heights: tuple[int, ...]):
  """Cuts rows into as few tiles as possible, of the two best heights.

  Of every pair of heights, as few of the higher as are needed; the pair that
  computes the least. 0 counts as a height, and is unused.

  Returns:
    How many tiles, how many of them have the higher height, the two heights
    and their indices.
  """
  tiles = lax.div(rows + heights[-1] - 1, heights[-1])
  best = chosen = None
  for pair in itertools.combinations(enumerate((0, *heights), start=-1), 2):
    (low_index, low), (high_index, high) = pair
    missing = jnp.maximum(rows - tiles * low, 0)
    few = lax.div(missing + high - low - 1, high - low)
    computed = tiles * low + few * (high - low)
    computed = jnp.where(few <= tiles, computed, _NEVER)
    this = few, low, high, low_index, high_index
    if best is None:
      best, chosen = computed, this
    else:
      better = computed < best
      chosen = [jnp.where(better, x, y) for x, y in zip(this, chosen)]
      best = jnp.minimum(best, computed)
  return tiles, *chosen


def largest_first(group_sizes: jax.Array, num_rows: int) -> jax.Array:
  """[E, 3] int32: group, first row, row after its last; by falling size."""
  index = jnp.arange(group_sizes.shape[0], dtype=jnp.int32)
  larger = group_sizes[None, :] > group_sizes[:, None]
  equal = group_sizes[None, :] == group_sizes[:, None]
  before = larger | (equal & (index[None, :] < index[:, None]))
  place = jnp.sum(before, axis=1, dtype=jnp.int32)
  fields = jnp.stack([index, *bounds(group_sizes, num_rows)], axis=1)
  return jnp.zeros_like(fields).at[place].set(fields, unique_indices=True)


def within_share(place, share: int, owners, use) -> None:
  """Calls use(owner, place in it) for the owner of a place.

  Args:
    place: int32, of owners side by side.
    share: how long each is.
    owners: one or more; the last has the places past the end too.
    use: what to call.
  """
  if len(owners) == 1:
    use(owners[0], place)
    return
  index = lax.min(lax.div(place, share), len(owners) - 1)
  branches = [
      functools.partial(use, owner, place - i * share)
      for i, owner in enumerate(owners)
  ]
  lax.switch(index, branches)


def dealt(n, cluster, clusters: int):
  """The n-th item of a cluster: items are dealt round the table and back."""
  turn = jnp.where(lax.rem(n, 2) == 0, cluster, clusters - 1 - cluster)
  return n * clusters + turn


def rounds(items, cluster, clusters: int):
  """How many items a cluster gets."""
  full = lax.div(items, clusters)
  return full + jnp.where(dealt(full, cluster, clusters) < items, 1, 0)


def bounds(
    group_sizes: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
  """First row of each group and the row after its last, [E] int32 each."""
  ends = jnp.minimum(_running_sum(group_sizes), num_rows)
  return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def _running_sum(x):
  # One fused kernel; XLA's scan of a short array is several.
  index = jnp.arange(x.shape[0])
  kept = jnp.where(index[None, :] <= index[:, None], x[None, :], 0)
  return jnp.sum(kept, axis=1, dtype=jnp.int32)
