"""The token-by-token recurrence against NumPy float64."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from pallas_kernels import kda
from tests import testing
from tests.pallas_kernels.kda import cases
from tests.pallas_kernels.kda import oracle

SEGMENTS = np.array([
    [3] * 7 + [0] * 2 + [3] * 4 + [5] * 9 + [3] * 5 + [0] * 3,
    [0] * 4 + [1] * 3 + [2] * 1 + [0] * 1 + [1] * 20 + [4] * 1,
])


class ReferenceTest(parameterized.TestCase):

  @parameterized.parameters(1, 2)
  def test_is_the_float64_recurrence(self, value_heads):
    inputs = cases.fused_inputs(30, batch=2, value_heads=value_heads, key=60)
    for segment_ids in (None, SEGMENTS):
      actual = cases.forward("fused_kda", "reference")(inputs, segment_ids)
      expected = oracle.fused_kda(**inputs, segment_ids=segment_ids)
      for name, a, e in zip(
          ("out", "final_state"), actual, expected, strict=True
      ):
        testing.assert_close(a, e, "float64 oracle, fp32", name)

  def test_decode_is_the_float64_recurrence(self):
    inputs = cases.chunk_inputs(9, batch=2)
    step = jax.jit(kda.recurrent_kda)
    expected, expected_state = oracle.kda(**inputs)
    out, state = step(**inputs)
    testing.assert_close(out, expected, "float64 oracle, fp32")
    testing.assert_close(state, expected_state, "float64 oracle, fp32")
    state, rows = inputs.pop("initial_state"), []
    for t in range(9):
      token = {name: x[:, t : t + 1] for name, x in inputs.items()}
      out, state = step(**token, initial_state=state)
      rows.append(out)
    out = np.concatenate(rows, axis=1)
    testing.assert_close(out, expected, "float64 oracle, fp32")
    testing.assert_close(state, expected_state, "float64 oracle, fp32")

  def test_gradient_is_the_slope_of_the_float64_recurrence(self):
    inputs = cases.fused_inputs(20)
    cotangents = cases.cotangents(inputs)
    _, grads = cases.gradient("fused_kda", "reference")(inputs, cotangents)
    for name, x in inputs.items():
      direction = np.random.RandomState(0).randn(*x.shape)
      slope = _slope(inputs, cotangents, name, direction)
      actual = float(np.sum(np.float64(grads[name]) * direction))
      testing.assert_close(actual, slope, "fp32 gradient", name)


def _slope(inputs, cotangents, name, direction, step=1e-5):
  """The central difference of <cotangents, outputs> along direction."""

  def loss(amount):
    x = np.asarray(inputs[name], np.float64) + amount * direction
    outputs = oracle.fused_kda(**(inputs | {name: x}))
    return sum(
        np.sum(np.float64(c) * o)
        for c, o in zip(cotangents, outputs, strict=True)
    )

  return (loss(step) - loss(-step)) / (2 * step)


if __name__ == "__main__":
  absltest.main()
