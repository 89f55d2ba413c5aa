"""The Hopper kernels in the interpreter, and the tiles they walk."""

import contextlib
import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
import numpy as np

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import mosaic_gpu
from pallas_kernels.grouped_matmul import mosaic_gpu_schedule as schedule
from tests import testing
from tests.pallas_kernels import races

# Small tiles, two blocks, rings that wrap: everything that the real plan does.
_PLAN = mosaic_gpu.Plan(
    heights=(16, 32),
    slice=64,
    weight_rows=64,
    weight_columns=128,
    row_stages=2,
    weight_stages=2,
    cluster=1,
    clusters=2,
    panel=2,
    interpret=plgpu.InterpretGPUParams(),
)
_RACES = dataclasses.replace(
    _PLAN, interpret=plgpu.InterpretGPUParams(detect_races=True)
)
_ROWS, _IN, _OUT = 83, 128, 72


@functools.partial(jax.jit, static_argnums=4)
def _value_and_gradients(lhs, rhs, d_out, group_sizes, plan):
  product = lambda lhs, rhs: mosaic_gpu.grouped_matmul(
      lhs, rhs, group_sizes, plan=plan
  )
  out, pull = jax.vjp(product, lhs, rhs)
  return out, *pull(d_out)


def _inputs(num_groups):
  rng = np.random.default_rng(0)
  shapes = (_ROWS, _IN), (num_groups, _IN, _OUT), (_ROWS, _OUT)
  return [np.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes]


def _oracle(lhs, rhs, d_out, group_sizes):
  lhs, rhs, d_out = (np.asarray(x, np.float64) for x in (lhs, rhs, d_out))
  out, d_lhs, d_rhs = (np.zeros_like(x) for x in (d_out, lhs, rhs))
  start = 0
  for group, size in enumerate(group_sizes):
    rows = slice(start, start + size)
    out[rows] = lhs[rows] @ rhs[group]
    d_lhs[rows] = d_out[rows] @ rhs[group].T
    d_rhs[group] = lhs[rows].T @ d_out[rows]
    start += size
  return out, d_lhs, d_rhs


class InterpretedTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("empty_groups_and_rows_past", [0, 45, 0, 30], True),
      ("all_rows_in_one", [0, 0, 83, 0], False),
  )
  def test_equals_float64_without_races(self, group_sizes, detect_races):
    plan = _RACES if detect_races else _PLAN
    watch = races.none_found() if detect_races else contextlib.nullcontext()
    lhs, rhs, d_out = _inputs(len(group_sizes))
    past = sum(group_sizes)
    lhs[past:], d_out[past:] = np.nan, np.nan
    with watch:
      actual = self.check(lhs, rhs, d_out, group_sizes, plan)
    np.testing.assert_array_equal(actual[0][past:], 0)
    np.testing.assert_array_equal(actual[1][past:], 0)
    empty = np.array(group_sizes) == 0
    np.testing.assert_array_equal(actual[2][empty], 0)

  def test_a_nan_stays_in_its_group(self):
    lhs, rhs, d_out = _inputs(4)
    lhs[21], d_out[21] = np.nan, np.nan  # the second group's
    self.check(lhs, rhs, d_out, [20, 3, 17, 43], _PLAN)

  @parameterized.parameters(128, 72)
  def test_stacks_count_as_joined(self, width):
    # Of 128 columns no tile straddles two stacks; of 72 they are joined first.
    rng = np.random.default_rng(1)
    draw = lambda *shape: np.asarray(rng.normal(size=shape), jnp.bfloat16)
    sizes = np.array([20, 0, 43], np.int32)
    lhs, d_out = draw(_ROWS, _IN), draw(_ROWS, 2 * width)
    stacks = draw(3, _IN, width), draw(3, _IN, width)
    out, d_lhs, d_stacks = _value_and_gradients(
        lhs, stacks, d_out, sizes, _PLAN
    )
    actual = out, d_lhs, np.concatenate(d_stacks, axis=2)
    d_out[63:] = 0
    joined = np.concatenate(stacks, axis=2)
    expected = _oracle(lhs, joined, d_out, sizes)
    kinds = "bf16", "bf16 gradient", "bf16 gradient"
    for value, exact, kind in zip(actual, expected, kinds, strict=True):
      testing.assert_close(value, exact, kind)

  def check(self, lhs, rhs, d_out, group_sizes, plan):
    """Compares what the oracle says is finite, the groups' rows only."""
    actual = _value_and_gradients(
        lhs, rhs, d_out, np.array(group_sizes, np.int32), plan
    )
    expected = _oracle(lhs, rhs, d_out, group_sizes)
    kinds = "bf16", "bf16 gradient", "bf16 gradient"
    for value, exact, kind in zip(actual, expected, kinds, strict=True):
      self.assertEqual(value.dtype, jnp.bfloat16)
      finite = np.isfinite(exact)
      testing.assert_close(np.asarray(value)[finite], exact[finite], kind)
    return actual


def _items(sizes, num_rows, column_tiles=1, **fields):
  """Items in use, [n, 6], and how many lines the table has for them."""
  plan = dataclasses.replace(_PLAN, **fields)
  make = jax.jit(schedule.row_items, static_argnums=(1, 2, 3))
  count, *items = np.asarray(make(sizes, num_rows, column_tiles, plan))
  return np.array(items[: count[0]]), count[0], len(items)


class ScheduleTest(parameterized.TestCase):

  @parameterized.parameters(12, 300)
  def test_every_row_is_written_once_by_its_group(self, num_groups):
    heights, num_rows = (32, 64, 96), 1000
    rng = np.random.default_rng(0)
    for trial in range(100):
      share = rng.dirichlet(np.full(num_groups, 0.3))
      total = num_rows if trial % 2 else rng.integers(0, num_rows + 1)
      sizes = rng.multinomial(total, share).astype(np.int32)
      tiles, count, most = _items(sizes, num_rows, heights=heights)
      self.assertLessEqual(count, most)
      owner = np.full(num_rows, -1)
      for group, start, begin, end, height, column in tiles:
        self.assertEqual(start % schedule.ALIGNMENT, 0)
        self.assertEqual(column, 0)
        self.assertTrue(start <= begin < end <= start + heights[height])
        np.testing.assert_array_equal(owner[begin:end], -1)
        owner[begin:end] = group
      expected = np.full(num_rows, num_groups)
      expected[: sizes.sum()] = np.repeat(np.arange(num_groups), sizes)
      np.testing.assert_array_equal(owner, expected)

  def test_little_is_computed_for_nothing(self):
    heights = mosaic_gpu.Plan().heights
    for rows_per_group in (146, 220, 250, 1170, 2340):
      sizes = np.full(16, rows_per_group, np.int32)
      total = int(sizes.sum())
      tiles, *_ = _items(sizes, total, heights=heights)
      computed = sum(heights[t[schedule.HEIGHT]] for t in tiles)
      waste = heights[-1] - heights[-2] + schedule.ALIGNMENT
      self.assertLess(computed, total + waste * len(sizes))

  def test_a_groups_tiles_meet_every_column_panel_by_panel(self):
    sizes = np.array([40, 0, 700, 3], np.int32)
    tiles, *_ = _items(sizes, 800, heights=(32, 64), clusters=1)
    tiles = tiles[:, : schedule.COLUMN].tolist()
    for column_tiles, panel in ((1, 8), (3, 4), (5, 100)):
      items, *_ = _items(
          sizes, 800, column_tiles, heights=(32, 64), panel=panel, clusters=1
      )
      expected = []
      for group in range(len(sizes) + 1):
        own = [tile for tile in tiles if tile[schedule.GROUP] == group]
        for first in range(0, len(own), panel):
          expected += [
              [*tile, column]
              for column in range(column_tiles)
              for tile in own[first : first + panel]
          ]
      self.assertEqual(items.tolist(), expected)

  def test_clusters_get_the_same_of_every_height_in_order(self):
    sizes = np.array([90, 0, 300, 3, 70, 20, 33, 64], np.int32)
    fields = dict(heights=(32, 64, 80))
    ordered, *_ = _items(sizes, 700, 3, clusters=1, **fields)
    place = {tuple(item): i for i, item in enumerate(ordered)}
    for clusters in (2, 5, 7, 64):
      items, *_ = _items(sizes, 700, 3, clusters=clusters, **fields)
      self.assertEqual({tuple(item) for item in items}, set(place))
      for height in range(3):
        counts = [
            np.sum(items[c::clusters, schedule.HEIGHT] == height)
            for c in range(clusters)
        ]
        self.assertLessEqual(max(counts) - min(counts), 1)
      for c in range(clusters):
        places = [place[tuple(item)] for item in items[c::clusters]]
        self.assertEqual(places, sorted(places))

  def test_every_item_is_dealt_once_and_late_rounds_run_backwards(self):
    for items in (0, 1, 6, 7, 12, 23):
      dealt = []
      for cluster in range(6):
        rounds = int(schedule.rounds(jnp.int32(items), cluster, 6))
        dealt += [int(schedule.dealt(n, cluster, 6)) for n in range(rounds)]
      self.assertEqual(sorted(dealt), list(range(items)))
    self.assertEqual(int(schedule.dealt(1, 5, 6)), 6)

  def test_large_groups_come_first_and_keep_their_rows(self):
    sizes = np.array([5, 0, 9, 5, 1], np.int32)
    groups = np.asarray(schedule.largest_first(sizes, 20))
    expected = [[2, 5, 14], [0, 0, 5], [3, 14, 19], [4, 19, 20], [1, 5, 5]]
    np.testing.assert_array_equal(groups, expected)


class RefusalTest(absltest.TestCase):

  def test_what_it_cannot_serve_is_named(self):
    lhs, rhs, _ = _inputs(2)
    sizes = np.array([80, 3], np.int32)
    with self.assertRaisesRegex(NotImplementedError, "not bfloat16"):
      mosaic_gpu.grouped_matmul(
          lhs.astype(np.float32), rhs.astype(np.float32), sizes
      )
    with self.assertRaisesRegex(NotImplementedError, "no Hopper GPU"):
      grouped_matmul.grouped_matmul(
          lhs, rhs, sizes, implementation="mosaic_gpu"
      )
    with self.assertRaisesRegex(NotImplementedError, "no elements"):
      mosaic_gpu.grouped_matmul(lhs[:0], rhs, sizes, plan=_PLAN)


if __name__ == "__main__":
  absltest.main()
