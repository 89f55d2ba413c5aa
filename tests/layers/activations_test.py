"""SiTU-GLU: golden values, bound, gradients."""

import functools

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


@functools.partial(jax.jit, static_argnums=2)
def _value_and_slopes(gate, up, up_cap):
  out, pull = jax.vjp(
      lambda *x: activations.situ_glu(*x, up_cap=up_cap), gate, up
  )
  return out, *pull(jnp.ones_like(out))


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
    out, d_gate, d_up = _value_and_slopes(gate, up, up_cap)
    value, gate_slope, up_slope = _oracle(gate, up, up_cap=up_cap)
    # Element by element and relative, however small the value.
    np.testing.assert_allclose(out, value, rtol=2e-6, atol=1e-30)
    np.testing.assert_allclose(d_up, up_slope, rtol=1e-5, atol=1e-30)
    # The gate's slope crosses zero, where only an absolute error makes sense.
    testing.assert_close(d_gate, gate_slope, "fp32")

  def test_slope_far_in_the_cap_keeps_relative_accuracy(self):
    # 1 - tanh^2 in fp32 is exactly 0 here.
    up = np.float32([230.0, -300.0, 600.0])
    gate = np.full(3, 2.0, np.float32)
    _, _, d_up = _value_and_slopes(gate, up, 25.0)
    np.testing.assert_allclose(d_up, _oracle(gate, up)[2], rtol=1e-5)

  def test_bf16_is_the_rounded_fp32(self):
    gate, up = (x.astype(jnp.bfloat16) for x in _inputs(8.0))
    out, d_gate, d_up = _value_and_slopes(gate, up, 25.0)
    for value in (out, d_gate, d_up):
      self.assertEqual(value.dtype, jnp.bfloat16)
    value, gate_slope, up_slope = _oracle(
        np.asarray(gate, np.float64), np.asarray(up, np.float64)
    )
    testing.assert_close(out, value, "bf16")
    testing.assert_close(d_gate, gate_slope, "bf16 gradient")
    testing.assert_close(d_up, up_slope, "bf16 gradient")

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_bounded_and_finite_for_any_finite_input(self, dtype):
    largest = float(jnp.finfo(dtype).max)
    points = np.array([0.0, 1e-30, 1.0, 90.0, 1e4, 1e30, largest])
    points = np.concatenate([points, -points])
    gate, up = np.meshgrid(points, points)
    out, d_gate, d_up = _value_and_slopes(
        jnp.asarray(gate, dtype), jnp.asarray(up, dtype), 25.0
    )
    out = np.asarray(out, np.float64)
    self.assertTrue(np.all(np.abs(out) <= 100.0))
    self.assertEqual(out.max(), 100.0)
    self.assertTrue(np.all(np.isfinite(np.asarray(d_gate, np.float64))))
    self.assertTrue(np.all(np.isfinite(np.asarray(d_up, np.float64))))

  def test_swiglu_to_first_order(self):
    gate, up = _inputs(1e-3)
    swiglu = np.asarray(gate, np.float64) / (1 + np.exp(-np.float64(gate)))
    swiglu *= np.asarray(up, np.float64)
    out, d_gate, d_up = _value_and_slopes(gate, up, 25.0)
    np.testing.assert_allclose(out, swiglu, rtol=1e-5)

  def test_saves_gate_and_up_alone(self):
    gate, up = _inputs(1.0, jnp.bfloat16)
    pull = jax.eval_shape(
        lambda *x: jax.vjp(activations.situ_glu, *x)[1], gate, up
    )
    saved = [(x.shape, x.dtype) for x in jax.tree.leaves(pull)]
    self.assertEqual(saved, [(gate.shape, gate.dtype)] * 2)

  def test_bad_arguments_are_named(self):
    gate, up = _inputs(1.0)
    with self.assertRaisesRegex(ValueError, r"\[64, 95\]"):
      activations.situ_glu(gate, np.zeros((64, 95), np.float32))
    with self.assertRaisesRegex(ValueError, "gate_cap=0"):
      activations.situ_glu(gate, up, gate_cap=0.0)


if __name__ == "__main__":
  absltest.main()
