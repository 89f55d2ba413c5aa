"""The judge of the kernel benchmark must itself be right."""

from absl.testing import absltest
from jax import numpy as jnp
import numpy as np

from experiments.kda_bench import hard
from experiments.kda_bench import inputs as inputs_lib
from pallas_kernels.kda import arg_specs
from tests import testing
from tests.pallas_kernels.kda import oracle

_HEADS = 33  # more than the recurrence takes at once
_SPEC = arg_specs.ArgSpec(1, 6, _HEADS, 2 * _HEADS, 4, 3, jnp.float32)


class ExactTest(absltest.TestCase):

  def test_it_is_the_recurrence_in_float64_with_segments(self):
    x = inputs_lib.make_inputs(_SPEC, "correlated")
    ids = jnp.asarray([[1, 1, 0, 2, 2, 2]], jnp.int32)
    out, gradients = inputs_lib.exact(
        x, inputs_lib.cotangent(x), ids, gradients=False
    )
    state = np.zeros((1, 2 * _HEADS, 4, 3))
    expected, _ = oracle.fused_kda(
        **x, initial_state=state, segment_ids=np.asarray(ids)
    )
    testing.assert_close(out, expected, "float64 oracle, fp32", "output")
    self.assertEqual(gradients, {})

  def test_its_gradients_are_those_of_its_output(self):
    x = inputs_lib.make_inputs(_SPEC)
    cotangent = inputs_lib.cotangent(x)
    _, gradients = inputs_lib.exact(x, cotangent)
    rng = np.random.default_rng(0)
    step = 1e-3
    for name in inputs_lib.GRADIENTS:
      direction = rng.standard_normal(x[name].shape)
      ends = [
          inputs_lib.exact(
              x | {name: x[name] + sign * step * direction},
              cotangent,
              gradients=False,
          )[0]
          for sign in (1, -1)
      ]
      slope = np.sum((ends[0] - ends[1]) * np.asarray(cotangent, np.float64))
      self.assertAlmostEqual(
          np.sum(gradients[name] * direction) / (slope / (2 * step)),
          1.0,
          delta=1e-2,
          msg=name,
      )

  def test_nan_is_an_error_and_fails_a_case(self):
    expected = np.ones((2, 2))
    value = inputs_lib.error(jnp.full((2, 2), jnp.nan), expected)
    self.assertTrue(np.isnan(value))
    good, _ = hard.verdict([{"output": 0.0}, {"output": value}])
    self.assertFalse(good)
    good, _ = hard.verdict([{"output": 0.0, "d q": 1e-3, "d a_log": 1e-2}])
    self.assertTrue(good)


if __name__ == "__main__":
  absltest.main()
