"""Which rows every tile of a grouped product covers, and tile shapes.

One small Triton kernel makes the table of items for the row products: as an XLA
program it is seven kernels, which take as long as 3 % of a product.

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
_COMPARED = 1 << 15  # items times groups that a block of the table compares


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

  Args:
    group_sizes: [E] int32.
    num_rows: M, a multiple of 8.
    column_tiles: how many columns of tiles there are.
    plan: the heights that a tile can have, and the panel.

  Returns:
    [1 + I, 6] int32: first the number of items in use, then for each, in the
    order of execution, its group (E for the rows past the groups), its first
    row, the rows [begin, end) that are its to write, and the indices of its
    height and column. I bounds the number for any sizes.
  """
  num_groups = group_sizes.shape[0]
  spans = min(num_groups + 1, num_rows)
  most = (num_rows + ALIGNMENT * spans) // plan.heights[-1] + spans
  length = 1 + most * column_tiles
  lanes = pl.next_power_of_2(num_groups + 1)
  block = max(min(_COMPARED // lanes, 32), 1)

  def body(sizes_ref, items_ref):
    group = jnp.arange(lanes)
    own = group < num_groups
    sizes = pltriton.load(sizes_ref.at[group], mask=own, other=0)
    ends = jnp.cumsum(sizes)
    starts = jnp.minimum(ends - sizes, num_rows)
    ends = jnp.where(group == num_groups, num_rows, jnp.minimum(ends, num_rows))
    _, tiles = _aligned(starts, ends, plan.heights[-1])
    last = jnp.cumsum(tiles)
    count = jnp.sum(tiles)

    # The first line of the table has the count, so an item's is one further.
    line = pl.program_id(0) * block + jnp.arange(block)
    number = jnp.maximum(line - 1, 0)
    first = lax.div(number, plan.panel * column_tiles) * plan.panel
    side = jnp.clip(count - first, 1, plan.panel)
    rest = number - first * column_tiles
    column = lax.div(rest, side)
    tile = first + rest - column * side

    mine = (last - tiles)[None, :] <= tile[:, None]
    mine &= tile[:, None] < last[None, :]
    of_mine = lambda x: jnp.sum(jnp.where(mine, x[None, :], 0), axis=1)
    owner, start, end = of_mine(group), of_mine(starts), of_mine(ends)
    place = tile - of_mine(last - tiles)
    fields = _tile_of_group(start, end, place, plan.heights)
    for field, value in zip(FIELDS, (owner, *fields, column)):
      value = jnp.where(line == 0, count * column_tiles, value)
      there = items_ref.at[line * len(FIELDS) + field]
      pltriton.store(there, value, mask=line < length)

  items = pl.pallas_call(
      body,
      out_shape=jax.ShapeDtypeStruct((length * len(FIELDS),), jnp.int32),
      grid=(-(-length // block),),
      compiler_params=pltriton.CompilerParams(num_warps=4),
      interpret=plan.interpret is not None,
      name="grouped_matmul_items",
  )(group_sizes.astype(jnp.int32))
  return items.reshape(length, len(FIELDS))


def _aligned(start, end, highest: int):
  """The aligned row at or before a group's first, and how many tiles it is."""
  aligned = lax.div(start, ALIGNMENT) * ALIGNMENT
  rows = jnp.where(end > start, end - aligned, 0)
  return aligned, lax.div(rows + highest - 1, highest)


def _tile_of_group(start, end, place, heights: tuple[int, ...]):
  """A group's tile number `place`: start, begin, end, height as in `row_items`.

  Of every pair of heights, as few tiles of the higher as are needed; the pair
  that computes the least. 0 counts as a height, and is unused.
  """
  aligned, tiles = _aligned(start, end, heights[-1])
  best = chosen = None
  for pair in itertools.combinations(enumerate((0, *heights), start=-1), 2):
    (low_index, low), (high_index, high) = pair
    missing = jnp.maximum(end - aligned - tiles * low, 0)
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
  few, low, high, low_index, high_index = chosen
  is_high = place < few
  first = jnp.minimum(place, few) * high + jnp.maximum(place - few, 0) * low
  first = aligned + first
  last = jnp.minimum(first + jnp.where(is_high, high, low), end)
  height = jnp.where(is_high, high_index, low_index)
  return first, jnp.maximum(first, start), last, height


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
