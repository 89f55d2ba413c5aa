"""Grouped matrix product: equal to the masked oracle, at no more work."""

import functools
import math
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.extend import core as extend_core
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from tests import testing


def _inputs(num_rows, num_groups, width_in, width_out, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  shapes = (
      (num_rows, width_in),
      (num_groups, width_in, width_out),
      (num_rows, width_out),
  )
  return [np.asarray(rng.normal(size=s), dtype) for s in shapes]


@functools.partial(jax.jit, static_argnums=4)
def _value_and_gradients(lhs, rhs, d_out, group_sizes, implementation):
  def product(lhs, rhs):
    return grouped_matmul.grouped_matmul(
        lhs, rhs, group_sizes, implementation=implementation
    )

  out, pull = jax.vjp(product, lhs, rhs)
  return out, *pull(d_out)


def _oracle(lhs, rhs, d_out, group_sizes):
  """Group by group in float64."""
  lhs, rhs, d_out = (np.asarray(x, np.float64) for x in (lhs, rhs, d_out))
  out = np.zeros_like(d_out)
  d_lhs, d_rhs = np.zeros_like(lhs), np.zeros_like(rhs)
  start = 0
  for group, size in enumerate(group_sizes):
    rows = slice(start, start + size)
    out[rows] = lhs[rows] @ rhs[group]
    d_lhs[rows] = d_out[rows] @ rhs[group].T
    d_rhs[group] = lhs[rows].T @ d_out[rows]
    start += size
  return out, d_lhs, d_rhs


def _matmul_flops(jaxpr):
  """Flops of every dot_general, loops counted as often as they run."""
  flops = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      (contracting, _), _ = equation.params["dimension_numbers"]
      lhs = equation.invars[0].aval.shape
      contracted = math.prod(lhs[i] for i in contracting)
      flops += 2 * contracted * math.prod(equation.outvars[0].aval.shape)
    if equation.primitive.name == "while":
      raise AssertionError("a loop of unknown length")
    repeats = equation.params.get("length", 1)
    for inner in extend_core.jaxprs_in_params(equation.params):
      flops += repeats * _matmul_flops(inner)
  return flops


class GroupedMatmulTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("empty_groups", [0, 30, 0, 50, 1, 2, 0], 83),
      ("all_rows_in_one", [0, 0, 83, 0, 0, 0, 0], 83),
      ("all_rows_in_the_last", [0, 0, 0, 0, 0, 0, 83], 83),
      ("rows_past_the_groups", [20, 0, 17, 0, 0, 3, 1], 83),
      ("no_row_in_any", [0, 0, 0, 0, 0, 0, 0], 83),
      ("one_group", [50], 50),
      ("fewer_rows_than_a_tile", [1, 0, 2], 3),
  )
  def test_equals_float64(self, group_sizes, num_rows):
    inputs = _inputs(num_rows, len(group_sizes), 48, 160)
    for implementation in ("xla", "reference"):
      self._check(inputs, group_sizes, implementation)

  @parameterized.parameters(
      ([0, 30, 0, 50, 1, 2, 0],), ([20, 0, 17, 0, 0, 3, 1],)
  )
  def test_the_ragged_dot_equals_float64(self, group_sizes):
    inputs = _inputs(83, len(group_sizes), 48, 160)
    with mock.patch.object(dispatch, "device_platform", lambda: "tpu"):
      self._check(inputs, group_sizes, "ragged_dot")

  def _check(self, inputs, group_sizes, implementation, suffix=("fp32",) * 2):
    actual = _value_and_gradients(
        *inputs, np.array(group_sizes, np.int32), implementation
    )
    value_kind, gradient_kind = suffix[0], f"{suffix[1]} gradient"
    expected = _oracle(*inputs, group_sizes)
    testing.assert_close(actual[0], expected[0], value_kind, "out")
    testing.assert_close(actual[1], expected[1], gradient_kind, "d_lhs")
    testing.assert_close(actual[2], expected[2], gradient_kind, "d_rhs")
    for group, size in enumerate(group_sizes):
      if size == 0:
        np.testing.assert_array_equal(actual[2][group], 0)
    past = sum(group_sizes)
    np.testing.assert_array_equal(actual[0][past:], 0)
    np.testing.assert_array_equal(actual[1][past:], 0)

  @parameterized.parameters("xla", "reference")
  def test_stacks_count_as_joined(self, implementation):
    lhs, rhs, d_out = _inputs(83, 4, 16, 24)
    sizes = np.array([20, 0, 17, 30], np.int32)
    halves = rhs[..., :12], rhs[..., 12:]
    whole = _value_and_gradients(lhs, rhs, d_out, sizes, implementation)
    out, d_lhs, d_halves = _value_and_gradients(
        lhs, halves, d_out, sizes, implementation
    )
    testing.assert_same(out, whole[0])
    testing.assert_same(d_lhs, whole[1])
    testing.assert_same(np.concatenate(d_halves, axis=-1), whole[2])

  def test_every_split_of_a_few_rows(self):
    # 5 rows over 3 groups in all 56 ways, some of them incomplete.
    inputs = _inputs(5, 3, 4, 6)
    for a in range(6):
      for b in range(6 - a):
        for c in range(6 - a - b):
          self._check(inputs, (a, b, c), "xla")

  def test_random_sizes_over_many_tiles(self):
    rng = np.random.default_rng(1)
    inputs = _inputs(600, 9, 16, 24)
    for _ in range(8):
      share = rng.dirichlet(np.full(9, 0.3))
      sizes = rng.multinomial(rng.integers(300, 601), share)
      self._check(inputs, sizes.tolist(), "xla")

  def test_896_groups_of_one_row(self):
    self._check(_inputs(896, 896, 8, 12), [1] * 896, "xla")

  def test_bf16_accumulates_in_fp32(self):
    # Accumulation in bf16 over 512 rows or columns would lose 4 bits.
    inputs = _inputs(512, 3, 512, 40, jnp.bfloat16)
    sizes = [3, 500, 0]
    out, d_lhs, d_rhs = _value_and_gradients(
        *inputs, np.array(sizes, np.int32), "xla"
    )
    for value in (out, d_lhs, d_rhs):
      self.assertEqual(value.dtype, jnp.bfloat16)
    self._check(inputs, sizes, "xla", ("bf16", "bf16"))

  @parameterized.parameters("xla", "reference")
  def test_nan_past_the_groups_reaches_nothing(self, implementation):
    sizes = [20, 0, 17, 0, 0, 3, 1]
    lhs, rhs, d_out = _inputs(83, 7, 48, 160)
    clean = _value_and_gradients(
        lhs, rhs, d_out, np.array(sizes, np.int32), implementation
    )
    lhs[41:], d_out[41:] = np.nan, np.nan
    dirty = _value_and_gradients(
        lhs, rhs, d_out, np.array(sizes, np.int32), implementation
    )
    for a, b in zip(dirty, clean, strict=True):
      testing.assert_same(a, b)

  def test_nan_in_one_group_stays_there(self):
    sizes = [20, 0, 17, 0, 0, 3, 43]
    lhs, rhs, d_out = _inputs(83, 7, 48, 160)
    sizes = np.array(sizes, np.int32)
    clean = _value_and_gradients(lhs, rhs, d_out, sizes, "xla")
    lhs[25], d_out[25] = np.nan, np.nan
    out, d_lhs, d_rhs = _value_and_gradients(lhs, rhs, d_out, sizes, "xla")
    rows, groups = np.arange(83) != 25, np.arange(7) != 2
    testing.assert_same(out[rows], clean[0][rows])
    testing.assert_same(d_lhs[rows], clean[1][rows])
    testing.assert_same(d_rhs[groups], clean[2][groups])

  def test_no_rows(self):
    lhs, rhs, d_out = _inputs(0, 3, 4, 6)
    out, d_lhs, d_rhs = _value_and_gradients(
        lhs, rhs, d_out, np.zeros(3, np.int32), "xla"
    )
    self.assertEqual((out.shape, d_lhs.shape), ((0, 6), (0, 4)))
    np.testing.assert_array_equal(d_rhs, np.zeros((3, 4, 6)))

  def test_work_does_not_grow_with_the_groups(self):
    flops, temp_bytes = {}, {}
    for num_groups in (8, 256):
      inputs = _inputs(4096, num_groups, 64, 32)
      sizes = np.full(num_groups, 4096 // num_groups, np.int32)
      traced = _value_and_gradients.trace(*inputs, sizes, "xla")
      flops[num_groups] = _matmul_flops(traced.jaxpr.jaxpr)
      memory = traced.lower().compile().memory_analysis()
      temp_bytes[num_groups] = memory.temp_size_in_bytes
    ideal = 3 * 2 * 4096 * 64 * 32
    # Tiles of half a mean group, and one that sticks out for each group.
    for value in flops.values():
      self.assertBetween(value, ideal, 1.6 * ideal)
    # A dense expansion holds 32 times as much, lhs alone once per group.
    self.assertLess(temp_bytes[256], max(2 * temp_bytes[8], 4096 * 64 * 4))

  def test_bad_arguments_are_named(self):
    lhs, rhs, _ = _inputs(6, 3, 4, 6)
    sizes = np.full(3, 2, np.int32)
    call = grouped_matmul.grouped_matmul
    with self.assertRaisesRegex(ValueError, r"\(6, 3\), \(3, 4, 6\)"):
      call(lhs[:, :3], rhs, sizes)
    with self.assertRaisesRegex(ValueError, "one shape"):
      call(lhs, (rhs, rhs[..., :5]), sizes)
    with self.assertRaisesRegex(ValueError, "one float dtype"):
      call(lhs, rhs.astype(jnp.bfloat16), sizes)
    with self.assertRaisesRegex(ValueError, r"int32\[3\]"):
      call(lhs, rhs, sizes[:2])
    with self.assertRaisesRegex(ValueError, r"float32\[3\]"):
      call(lhs, rhs, sizes.astype(np.float32))


if __name__ == "__main__":
  absltest.main()
