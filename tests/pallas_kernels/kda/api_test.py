"""Bounds, refusals and the choice of an implementation."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp
import numpy as np

from pallas_kernels import kda
from pallas_kernels.kda import arg_specs
from tests import testing
from tests.pallas_kernels.kda import cases


class LowerBoundTest(parameterized.TestCase):

  @parameterized.parameters(
      (jnp.float32, 16, -5.915),
      (jnp.bfloat16, 16, -5.915),
      (jnp.float16, 16, -0.739),
      (jnp.float32, 32, -2.862),
  )
  def test_range_is_the_tiles(self, dtype, tile, expected):
    self.assertAlmostEqual(kda.safe_lower_bound(dtype, tile), expected, 3)

  @parameterized.parameters(
      -5.92, -16.0, 0.0, 5.0, float("nan"), float("inf"), -float("inf")
  )
  def test_outside_is_refused_with_the_range(self, lower_bound):
    inputs = cases.fused_inputs(3)
    for implementation in (None, "chunked", "reference"):
      with self.assertRaisesRegex(ValueError, r"lower_bound.*\(-5\.91.., 0\)"):
        kda.fused_kda(
            **inputs, lower_bound=lower_bound, implementation=implementation
        )
    with self.assertRaisesRegex(ValueError, r"lower_bound.*\(-5\.91.., 0\)"):
      kda.bounded_log_decay(
          inputs["z"],
          inputs["a_log"],
          inputs["dt_bias"],
          lower_bound=lower_bound,
      )

  def test_gate_gradient_sums_the_bias_before_rounding(self):
    raw = cases.fused_inputs(400, batch=4)
    z = raw["z"].astype(jnp.bfloat16)

    def gate(z, a_log, dt_bias):
      return kda.bounded_log_decay(z, a_log, dt_bias).sum()

    gradient = jax.jit(jax.grad(gate, argnums=(0, 1, 2)))
    rounded = gradient(z, raw["a_log"], raw["dt_bias"])
    exact = gradient(z.astype(jnp.float32), raw["a_log"], raw["dt_bias"])
    self.assertEqual(rounded[0].dtype, jnp.bfloat16)
    testing.assert_same(rounded[1], exact[1])
    testing.assert_same(rounded[2], exact[2])

    def plain(z, a_log, dt_bias):
      slope = jnp.exp(a_log)[None, None, :, None]
      return jnp.sum(-5.0 * jax.nn.sigmoid(slope * (z + dt_bias[None, None])))

    expected = jax.jit(jax.grad(plain, argnums=(0, 1, 2)))(
        z.astype(jnp.float32), raw["a_log"], raw["dt_bias"]
    )
    for a, e in zip(exact, expected, strict=True):
      testing.assert_close(a, e, "fp32")


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      ("q", lambda x: x[0], r"q must be .* float32\[5, 1, 64\]"),
      ("q", lambda x: x.astype(jnp.int32), r"q must be floating.*int32"),
      ("k", lambda x: x[..., :7], r"k must be .*\[1, 5, 1, 7\]"),
      ("v", lambda x: x[..., 0], r"v must be .*\[1, 5, 2\]"),
      ("v", lambda x: x[:, :4], r"v must be .*\[1, 4, 2, 32\]"),
      ("g", lambda x: x[..., 0], r"g must be \[1, 5, 2, 64\].*\[1, 5, 2\]"),
      ("beta", lambda x: x[:, :, :1], r"beta must be \[1, 5, 2\].*1, 5, 1"),
      (
          "initial_state",
          lambda x: x.astype(jnp.bfloat16),
          r"initial_state must be float32.*bfloat16",
      ),
      (
          "initial_state",
          lambda x: x.swapaxes(2, 3),
          r"initial_state must be .*\[1, 2, 32, 64\]",
      ),
  )
  def test_names_the_argument_and_its_shape(self, name, change, message):
    inputs = cases.chunk_inputs(5)
    inputs[name] = change(inputs[name])
    with self.assertRaisesRegex(ValueError, message):
      kda.chunk_kda(**inputs)
    with self.assertRaisesRegex(ValueError, message):
      kda.recurrent_kda(**inputs)

  def test_value_heads_are_a_multiple_of_heads(self):
    inputs = cases.chunk_inputs(5, heads=2, value_heads=3)
    with self.assertRaisesRegex(ValueError, "v must have a multiple of q's 2"):
      kda.chunk_kda(**inputs)

  def test_segment_ids_are_integers_of_the_right_shape(self):
    inputs = cases.chunk_inputs(5)
    for ids in (jnp.ones((1, 5)), jnp.ones((1, 4), jnp.int32)):
      with self.assertRaisesRegex(ValueError, "segment_ids must be integer"):
        kda.chunk_kda(**inputs, segment_ids=ids)

  @parameterized.parameters("a_log", "dt_bias")
  def test_gate_parameters_are_per_value_head(self, name):
    inputs = cases.fused_inputs(5)
    inputs[name] = inputs[name][:1]
    with self.assertRaisesRegex(ValueError, f"{name} must be floating"):
      kda.fused_kda(**inputs)


class DispatchTest(parameterized.TestCase):

  def test_none_is_the_chunk_form_here(self):
    inputs = cases.chunk_inputs(20)
    for a, e in zip(
        kda.chunk_kda(**inputs),
        kda.chunk_kda(**inputs, implementation="chunked"),
        strict=True,
    ):
      testing.assert_same(a, e)

  def test_unknown_name_is_refused(self):
    with self.assertRaisesRegex(ValueError, "triton"):
      kda.chunk_kda(**cases.chunk_inputs(5), implementation="triton")

  @parameterized.parameters("mosaic_gpu", "mosaic_tpu")
  def test_a_device_implementation_says_why_it_cannot_serve(self, name):
    with self.assertRaisesRegex(NotImplementedError, name):
      kda.chunk_kda(**cases.chunk_inputs(5), implementation=name)

  def test_the_first_that_serves_is_taken(self):
    inputs = cases.chunk_inputs(20)
    out, _ = kda.chunk_kda(**inputs, implementation=("mosaic_gpu", "reference"))
    expected, _ = kda.chunk_kda(**inputs, implementation="reference")
    testing.assert_same(out, expected)


class ArgSpecsTest(parameterized.TestCase):

  @parameterized.parameters(*arg_specs.SPECS)
  def test_shapes_are_accepted(self, name):
    args = arg_specs.SPECS[name].shapes()
    out, state = jax.eval_shape(lambda a: kda.fused_kda(**a), args)
    self.assertEqual(out.shape, args["v"].shape)
    self.assertEqual(out.dtype, args["v"].dtype)
    self.assertEqual(state.dtype, np.float32)


if __name__ == "__main__":
  absltest.main()
