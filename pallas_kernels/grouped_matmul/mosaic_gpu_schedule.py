"""Which rows every tile of a grouped product covers, and tile shapes.

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
from jax.experimental.pallas import mosaic_gpu as plgpu
import numpy as np

ALIGNMENT = 8  # rows of a shared-memory tile
CHUNK = 64  # contracted per step: a swizzled row of 128 bytes
_NEVER = np.iinfo(np.int32).max

# Fields of a row tile and of an item, after one row that holds their number.
GROUP, START, BEGIN, END, HEIGHT, COLUMN = range(6)


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


def row_tiles(
    group_sizes: jax.Array, num_rows: int, heights: tuple[int, ...]
) -> jax.Array:
  """Cuts the groups, and the rows past them, into tiles.

  Args:
    group_sizes: [E] int32.
    num_rows: M, a multiple of 8.
    heights: rows that a tile can have, ascending.

  Returns:
    [1 + T, 5] int32: first the number of tiles in use, then for each its
    group (E for the rows past the groups), its first row, the rows [begin,
    end) that are its to write, and the index of its height. T bounds the
    number for any sizes.
  """
  num_groups = group_sizes.shape[0]
  starts, ends = bounds(group_sizes, num_rows)
  starts = jnp.append(starts, ends[-1])
  ends = jnp.append(ends, num_rows)
  aligned = starts // ALIGNMENT * ALIGNMENT
  rows = jnp.where(ends > starts, ends - aligned, 0)
  tiles = -(-rows // heights[-1])
  # Of every pair of heights, as few of the higher as are needed; 0 is unused.
  pairs = itertools.combinations(enumerate((0, *heights), start=-1), 2)
  (low_index, low), (high_index, high) = np.array(
      list(pairs), np.int32
  ).T.swapaxes(0, 1)
  step = (high - low)[None]
  lowest = tiles[:, None] * low[None]
  few = jnp.maximum(-(-(rows[:, None] - lowest) // step), 0)
  computed = lowest + few * step
  possible = few <= tiles[:, None]
  pair = jnp.argmin(jnp.where(possible, computed, _NEVER), axis=1)
  few = jnp.take_along_axis(few, pair[:, None], axis=1)[:, 0]

  last = _running_sum(tiles)
  spans = min(num_groups + 1, num_rows)
  most = (num_rows + ALIGNMENT * spans) // heights[-1] + spans
  number = jnp.arange(most, dtype=jnp.int32)
  group = jnp.sum(last[None, :] <= number[:, None], axis=1, dtype=jnp.int32)
  group = jnp.minimum(group, num_groups)
  within = number - (last - tiles)[group]
  few, pair = few[group], pair[group]
  low, high, low_index, high_index = (
      jnp.asarray(x)[pair] for x in (low, high, low_index, high_index)
  )
  is_high = within < few
  start = jnp.minimum(within, few) * high + jnp.maximum(within - few, 0) * low
  start = aligned[group] + start
  begin = jnp.maximum(start, starts[group])
  end = jnp.minimum(start + jnp.where(is_high, high, low), ends[group])
  height = jnp.where(is_high, high_index, low_index)
  fields = jnp.stack([group, start, begin, end, height], axis=1)
  header = jnp.full((1, fields.shape[1]), last[-1], jnp.int32)
  return jnp.concatenate([header, fields])


def row_items(tiles: jax.Array, column_tiles: int, panel: int) -> jax.Array:
  """Tiles times columns, in the order of execution.

  Args:
    tiles: from `row_tiles`.
    column_tiles: how many columns of tiles there are.
    panel: row tiles that run side by side before the next columns.

  Returns:
    [1 + T * column_tiles, 6] int32: first the number of items, then each
    item's tile and the index of its column.
  """
  count = tiles[0, 0]
  index = jnp.arange((tiles.shape[0] - 1) * column_tiles, dtype=jnp.int32)
  first = index // (panel * column_tiles) * panel
  height = jnp.clip(count - first, 1, panel)
  rest = index - first * column_tiles
  column = rest // height
  tile = first + rest - column * height
  fields = jnp.concatenate([tiles[1 + tile], column[:, None]], axis=1)
  header = jnp.full((1, fields.shape[1]), count * column_tiles, jnp.int32)
  return jnp.concatenate([header, fields])


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
