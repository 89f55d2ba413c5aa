"""Attention residuals: against float64, two phases, and w = 0."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attn_res
from tests import testing


class AttnResTest(parameterized.TestCase):

  @parameterized.parameters(1, 2, 9)
  def test_zero_query_gives_the_mean(self, num_sources):
    sources = jax.random.normal(jax.random.key(0), (num_sources, 2, 5, 64))
    mixed = attn_res.attn_res(sources, jnp.zeros(64), jnp.ones(64))
    testing.assert_close(mixed, np.mean(sources, axis=0), "fp32")

  def test_two_phases_equal_one(self):
    keys = jax.random.split(jax.random.key(0), 3)
    sources = jax.random.normal(keys[0], (5, 2, 7, 64))
    queries = jax.random.normal(keys[1], (3, 64))
    scales = 1.0 + 0.1 * jax.random.normal(keys[2], (3, 64))
    partial, log_sum_exp = attn_res.attn_res_stats(
        sources[:4], queries, scales
    )
    for i in range(3):
      merged = attn_res.attn_res_merge(
          partial[i], log_sum_exp[i], sources[4], queries[i], scales[i]
      )
      direct = attn_res.attn_res(list(sources), queries[i], scales[i])
      testing.assert_close(merged, direct, "fp32")


if __name__ == "__main__":
  absltest.main()
