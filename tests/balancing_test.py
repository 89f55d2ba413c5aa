"""Routing and balancing: golden numbers, edge cases, exactness."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import balancing


def _golden_scores(tokens=8, experts=4, slope=0.5):
  i, j = np.mgrid[:tokens, :experts]
  centre = (experts - 1) / 2
  logits = np.sin(3 * i + 5 * j) + slope * (centre - j)
  return 1.0 / (1.0 + np.exp(-logits))


class GoldenTest(parameterized.TestCase):

  @parameterized.parameters(
      (1000, (-0.096, -0.012, 0.116, 0.000667)),
      (16, (-0.09375, 0.0, 0.125, 0.041667)),
  )
  def test_histogram_bias(self, num_bins, uncentred):
    scores, bias = jnp.float32(_golden_scores()), jnp.zeros(4)
    routing = balancing.route(scores, bias, 1)
    counts = balancing.expert_counts(routing.expert_indices, 4)
    np.testing.assert_array_equal(counts, [5, 2, 0, 1])
    histogram = balancing.margin_histogram(
        scores, routing.cutoff, bias, num_bins=num_bins
    )
    new = balancing.quantile_bias(histogram, bias, num_experts_per_token=1)
    expected = np.array(uncentred) - np.mean(uncentred)
    np.testing.assert_allclose(new, expected, atol=1e-6)


if __name__ == "__main__":
  absltest.main()
