"""Grouped matrix product: equal to the masked oracle, and no more work."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_matmul
from tests import testing


def _inputs(num_rows, num_groups, width_in, width_out, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (
      (num_rows, width_in),
      (num_groups, width_in, width_out),
      (num_rows, width_out),
  )
  return [
      jax.random.normal(k, s).astype(dtype)
      for k, s in zip(keys, shapes, strict=True)
  ]


def _value_and_gradients(lhs, rhs, d_out, group_sizes, implementation):
  @jax.jit
  def run(lhs, rhs, d_out, group_sizes):
    out, pull = jax.vjp(
        lambda lhs, rhs: grouped_matmul.grouped_matmul(
            lhs, rhs, group_sizes, implementation=implementation
        ),
        lhs,
        rhs,
    )
    return out, *pull(d_out)

  return run(lhs, rhs, d_out, jnp.int32(group_sizes))


class GroupedMatmulTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("empty_groups", [0, 30, 0, 50, 1, 2, 0], 83),
      ("all_in_one", [0, 0, 100, 0], 100),
      ("rows_past_the_groups", [20, 0, 17], 64),
      ("one_group", [50], 50),
      ("no_row_in_any", [0, 0, 0], 10),
      ("fewer_rows_than_a_tile", [1, 0, 2], 3),
  )
  def test_equals_reference(self, group_sizes, num_rows):
    arrays = _inputs(num_rows, len(group_sizes), 48, 160)
    actual = _value_and_gradients(*arrays, group_sizes, "xla")
    expected = _value_and_gradients(*arrays, group_sizes, "reference")
    for a, e, kind in zip(
        actual, expected, ("fp32", "fp32 gradient", "fp32 gradient")
    ):
      testing.assert_close(a, e, kind)
    for group, size in enumerate(group_sizes):
      if size == 0:
        np.testing.assert_array_equal(actual[2][group], 0.0)


if __name__ == "__main__":
  absltest.main()
