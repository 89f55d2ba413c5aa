"""SiTU-GLU: golden values, bound, gradients."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax.layers import activations
from tests import testing

# (gate, up, out) in float64.
_GOLDEN = (
    (1.0, 1.0, 0.7158),
    (3.0, 20.0, 40.176),
    (8.0, 50.0, 92.90),
    (20.0, 100.0, 99.92),
    (-5.0, 10.0, -0.2157),
    (0.0, 7.0, 0.0),
    (7.0, 0.0, 0.0),
)


def _oracle(gate, up, gate_cap=4.0, up_cap=25.0):
  """Value and the two derivatives in float64."""
  gate, up = np.asarray(gate, np.float64), np.asarray(up, np.float64)
  sigmoid = 1.0 / (1.0 + np.exp(-gate))
  tanh = np.tanh(gate / gate_cap)
  gate_branch = gate_cap * tanh * sigmoid
  gate_slope = sigmoid / np.cosh(gate / gate_cap) ** 2
  gate_slope += gate_cap * tanh * sigmoid / (1.0 + np.exp(gate))
  if up_cap is None:
    up_branch, up_slope = up, np.ones_like(up)
  else:
    up_branch = up_cap * np.tanh(up / up_cap)
    up_slope = 1.0 / np.cosh(up / up_cap) ** 2
  return (
      gate_branch * up_branch,
      gate_slope * up_branch,
      gate_branch * up_slope,
  )


def _inputs(scale, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0))
  return [(scale * jax.random.normal(k, (64, 96))).astype(dtype) for k in keys]


class SituGluTest(parameterized.TestCase):

  @parameterized.parameters(*_GOLDEN)
  def test_golden_values(self, gate, up, expected):
    out = activations.situ_glu(jnp.float32(gate), jnp.float32(up))
    half_a_digit = 0.5 * 10 ** np.floor(np.log10(max(abs(expected), 1e-4)) - 3)
    self.assertAlmostEqual(float(out), expected, delta=half_a_digit)

  @parameterized.product(scale=(0.1, 1.0, 8.0, 60.0), up_cap=(25.0, None))
  def test_equals_float64(self, scale, up_cap):
    gate, up = _inputs(scale)
    out, pull = jax.vjp(
        lambda *x: activations.situ_glu(*x, up_cap=up_cap), gate, up
    )
    value, d_gate, d_up = _oracle(gate, up, up_cap=up_cap)
    # Element by element: 2e-6 for values, 1e-5 for slopes.
    np.testing.assert_allclose(out, value, rtol=2e-6, atol=1e-30)
    actual = pull(jnp.ones_like(out))
    testing.assert_close(actual[0], d_gate, "fp32")
    np.testing.assert_allclose(actual[1], d_up, rtol=1e-5, atol=1e-30)


if __name__ == "__main__":
  absltest.main()
