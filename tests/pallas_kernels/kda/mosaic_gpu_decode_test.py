"""The Hopper decode kernel in the interpreter, against the recurrence."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import decode
from pallas_kernels.kda import mosaic_gpu_decode
from tests import testing
from tests.pallas_kernels import races
from tests.pallas_kernels.kda import cases


def _inputs(tokens, dtype, key=64, value=64):
  x = cases.chunk_inputs(
      tokens, batch=2, heads=1, value_heads=2, key=key, value=value
  )
  return cases.cast(x, dtype)


def _kernel(x, interpret):
  state = x["initial_state"]
  tokens = [x[name] for name in ("q", "k", "v", "g", "beta")]
  return mosaic_gpu_decode.recurrent_kda(
      *tokens, state, scale=0.125, interpret=interpret
  )


class MosaicGpuDecodeTest(parameterized.TestCase):

  @parameterized.parameters(
      (1, 64, 64, jnp.float32, "fp32"),
      (3, 64, 64, jnp.bfloat16, "bf16"),
      (2, 128, 128, jnp.bfloat16, "bf16"),
  )
  def test_tokens_match_the_recurrence_without_races(
      self, tokens, key, value, dtype, kind
  ):
    x = _inputs(tokens, dtype, key, value)
    with races.none_found():
      out, state = jax.block_until_ready(
          _kernel(x, plgpu.InterpretGPUParams(detect_races=True))
      )
    wide = cases.cast(x, jnp.float32)
    expected, final = decode.recurrent_kda(
        **wide, scale=0.125, implementation="reference"
    )
    self.assertEqual(out.dtype, dtype)
    testing.assert_close(out.astype(jnp.float32), expected, kind, "output")
    testing.assert_close(state, final, "fp32", "state")

  def test_a_shorter_row_passes_its_state_on(self):
    x = _inputs(2, jnp.float32)
    x["g"] = x["g"].at[1, 1].set(0.0)
    x["beta"] = x["beta"].at[1, 1].set(0.0)
    _, state = _kernel(x, plgpu.InterpretGPUParams())
    _, one = decode.recurrent_kda(
        **{
            name: y if name == "initial_state" else y[:, :1]
            for name, y in x.items()
        },
        scale=0.125,
        implementation="reference",
    )
    testing.assert_close(state[1], one[1], "fp32", "state")

  def test_it_is_differentiated_as_the_recurrence(self):
    x = _inputs(2, jnp.float32)

    def loss(x, run):
      out, state = run(x)
      return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state))

    kernel = lambda x: _kernel(x, plgpu.InterpretGPUParams())
    plain = lambda x: decode.recurrent_kda(
        **x, scale=0.125, implementation="reference"
    )
    actual = jax.grad(loss)(x, kernel)
    expected = jax.grad(loss)(x, plain)
    for name, value in actual.items():
      testing.assert_close(value, expected[name], "fp32 gradient", name)

  def test_other_dtypes_are_refused_by_name(self):
    x = _inputs(1, jnp.float32)
    x["k"] = x["k"].astype(jnp.float16)
    with self.assertRaisesRegex(NotImplementedError, "k is float16"):
      _kernel(x, plgpu.InterpretGPUParams())


if __name__ == "__main__":
  absltest.main()
