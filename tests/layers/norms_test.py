"""RMSNorm and L2 norm."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import norms
from tests import testing


class NormsTest(parameterized.TestCase):

  def test_rms_norm_matches_float64(self):
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=(3, 5, 16)), rng.normal(size=16)
    expected = scale * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5)
    actual = norms.rms_norm(jnp.float32(x), jnp.float32(scale), eps=1e-5)
    testing.assert_close(actual, expected, "float64 oracle, fp32")

  def test_l2_normalize_matches_float64_and_keeps_zero(self):
    x = np.random.default_rng(0).normal(size=(3, 5, 16))
    x[0, 0] = 0.0
    expected = x / np.sqrt(np.sum(x**2, -1, keepdims=True) + 1e-6)
    actual = norms.l2_normalize(jnp.float32(x))
    testing.assert_close(actual, expected, "float64 oracle, fp32")

  @parameterized.parameters("float32", "bfloat16")
  def test_rms_norm_keeps_the_dtype_unless_told(self, dtype):
    module = norms.RMSNorm(config_lib.ModelConfig(), 8, "embed")
    x = jnp.ones((2, 8), dtype)
    out, variables = module.init_with_output(jax.random.key(0), x)
    self.assertEqual(out.dtype, jnp.dtype(dtype))
    out = module.apply(variables, x, "float32")
    self.assertEqual(out.dtype, jnp.float32)


if __name__ == "__main__":
  absltest.main()
