"""The TPU attention-residual kernels in the interpreter."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp
from jax.experimental.pallas import tpu as pltpu
import numpy as np

from pallas_kernels import attn_res
from pallas_kernels.attn_res import mosaic_tpu
from pallas_kernels.attn_res import reference
from tests import testing

_EPS = 1e-6


def _inputs(num_sources, tokens, width, dtype):
  keys = jax.random.split(jax.random.key(num_sources), 3)
  sources = 3.0 * jax.random.normal(keys[0], (num_sources, tokens, width))
  query = jax.random.normal(keys[1], (width,)) / np.sqrt(width)
  cotangent = jax.random.normal(keys[2], (tokens, width))
  return sources.astype(dtype), query, cotangent.astype(dtype)


def _with_gradients(mix, sources, query, cotangent):
  out, pull = jax.vjp(mix, sources, query)
  d_sources, d_query = pull(cotangent)
  return out, jnp.stack(tuple(d_sources)), d_query


class MosaicTpuTest(parameterized.TestCase):

  # Tails of tokens and of columns; more than one tile; a single source.
  @parameterized.parameters(
      (3, 37, 200, jnp.float32, False),
      (2, 300, 128, jnp.bfloat16, True),
      (1, 5, 128, jnp.float32, False),
  )
  def test_equals_the_reference(self, num_sources, tokens, width, dtype, one):
    sources, query, cotangent = _inputs(num_sources, tokens, width, dtype)
    interpret = pltpu.InterpretParams(uninitialized_memory="nan")
    actual = _with_gradients(
        lambda *x: mosaic_tpu.mix(_EPS, *x, interpret=interpret),
        sources if one else tuple(sources),
        query,
        cotangent,
    )
    expected = _with_gradients(
        lambda *x: reference.mix(_EPS, *x),
        tuple(sources.astype(jnp.float32)),
        query,
        cotangent.astype(jnp.float32),
    )
    kind = "fp32" if dtype == jnp.float32 else "bf16"
    self.assertEqual(actual[0].dtype, dtype)
    self.assertEqual(actual[1].dtype, dtype)
    for name, a, b in zip(("mix", "d_sources", "d_query"), actual, expected):
      gradient = "" if name == "mix" else " gradient"
      testing.assert_close(a, b, kind + gradient, name)

  def test_a_source_that_is_left_out_changes_nothing(self):
    sources, query, cotangent = _inputs(3, 5, 128, jnp.float32)
    left_out = jnp.bool(False)
    actual = _with_gradients(
        lambda *x: mosaic_tpu.mix(_EPS, *x, left_out, interpret=True),
        tuple(sources),
        query,
        cotangent,
    )
    expected = _with_gradients(
        lambda *x: reference.mix(_EPS, *x), tuple(sources[:2]), query, cotangent
    )
    testing.assert_close(actual[0], expected[0], "fp32")
    testing.assert_close(actual[1][:2], expected[1], "fp32 gradient")
    testing.assert_close(actual[2], expected[2], "fp32 gradient")
    testing.assert_same(actual[1][2], np.zeros((5, 128), np.float32))

  @parameterized.parameters(
      (33, 128, jnp.float32, "33 sources"),
      (2, 8320, jnp.bfloat16, "width 8320"),
      (2, 128, jnp.float16, "float16"),
      (2, 128, jnp.float32, "no TPU"),
  )
  def test_refuses_with_the_reason(self, num_sources, width, dtype, reason):
    sources = (jnp.zeros((2, width), dtype),) * num_sources
    ones = jnp.ones((width,))
    with self.assertRaisesRegex(NotImplementedError, reason):
      attn_res.attn_res(sources, ones, ones, implementation="mosaic_tpu")


if __name__ == "__main__":
  absltest.main()
