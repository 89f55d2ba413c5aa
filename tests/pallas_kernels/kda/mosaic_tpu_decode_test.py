"""The TPU decode kernel in the interpreter, against the recurrence."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import kda
from pallas_kernels.kda import mosaic_tpu_decode
from tests import testing
from tests.pallas_kernels.kda import cases


@jax.jit
def _kernel(inputs):
  inputs = dict(inputs)
  state = inputs.pop("initial_state")
  return mosaic_tpu_decode.recurrent_kda(
      **inputs,
      state=state,
      scale=inputs["q"].shape[-1] ** -0.5,
      interpret=pltpu.InterpretParams(),
  )


_reference = jax.jit(
    functools.partial(kda.recurrent_kda, implementation="reference")
)


class MosaicTpuDecodeTest(parameterized.TestCase):

  @parameterized.parameters(1, 3)
  def test_a_few_tokens_match_the_recurrence(self, tokens):
    inputs = cases.chunk_inputs(
        tokens, batch=2, heads=2, value_heads=4, key=128, value=64
    )
    for a, e in zip(_kernel(inputs), _reference(**inputs), strict=True):
      testing.assert_close(a, e, "fp32")

  def test_bf16_tokens_keep_an_fp32_state(self):
    inputs = cases.chunk_inputs(1, key=64, value=64)
    inputs = cases.cast(inputs, jnp.bfloat16)
    out, state = _kernel(inputs)
    self.assertEqual((out.dtype, state.dtype), (jnp.bfloat16, jnp.float32))
    expected = _reference(**inputs)
    testing.assert_close(out, expected[0], "bf16")
    testing.assert_close(state, expected[1], "fp32")

  def test_a_shorter_row_hands_its_state_on(self):
    inputs = cases.chunk_inputs(
        3, batch=2, heads=2, value_heads=4, key=128, value=64
    )
    for name in ("g", "beta"):
      inputs[name] = inputs[name].at[0, 1:].set(0.0)
    _, state = _kernel(inputs)
    first = {
        name: x if name == "initial_state" else x[:, :1]
        for name, x in inputs.items()
    }
    testing.assert_same(state[0], _kernel(first)[1][0])

  @parameterized.parameters(
      (dict(key=32), "widths K 32"), (dict(tokens=65), "65 tokens")
  )
  def test_what_is_not_served_is_refused_by_name(self, change, reason):
    inputs = cases.chunk_inputs(**(dict(tokens=1, key=64, value=64) | change))
    with self.assertRaisesRegex(NotImplementedError, reason):
      _kernel(inputs)


if __name__ == "__main__":
  absltest.main()
