"""Softmax attention inside segments."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax.layers import attention
from tests import testing

SCALE = 0.3


def _inputs(length=13):
  keys = jax.random.split(jax.random.key(0), 3)
  shape = (2, length, 3)
  q = jax.random.normal(keys[0], (*shape, 6))
  k = jax.random.normal(keys[1], (*shape, 6))
  v = jax.random.normal(keys[2], (*shape, 5))
  segments = np.ones((2, length), np.int32)
  segments[0, 5:] = 2
  segments[1, 10:] = 0
  return q, k, v, jnp.asarray(segments)


def _float64(q, k, v, segments, causal):
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  logits = np.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
  allowed = segments[:, :, None] == segments[:, None]
  if causal:
    allowed = allowed & np.tri(q.shape[1], dtype=bool)
  logits = np.where(allowed[:, None], logits, -np.inf)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  valid = np.asarray(segments != 0)[:, None, :, None]
  top = np.where(valid, logits, -np.inf).max((0, 2, 3))
  return np.einsum("bhqk,bkhd->bqhd", weights, v), top


class AttentionTest(parameterized.TestCase):

  @parameterized.product(causal=(False, True), block=(4, 13, 1024))
  def test_matches_float64_in_blocks_or_at_once(self, causal, block):
    q, k, v, segments = _inputs()
    attend = functools.partial(
        attention.attention, scale=SCALE, causal=causal, query_block=block
    )
    out, top = jax.jit(attend)(q, k, v, segments)
    expected, expected_top = _float64(q, k, v, np.asarray(segments), causal)
    testing.assert_close(out, expected, "float64 oracle, fp32")
    testing.assert_close(top, expected_top, "float64 oracle, fp32")

  def test_gradients_in_blocks_equal_those_at_once(self):
    q, k, v, segments = _inputs()

    def gradients(block):
      def loss(q, k, v):
        out, _ = attention.attention(
            q, k, v, segments, scale=SCALE, causal=True, query_block=block
        )
        return jnp.sum(out**2)

      return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    for actual, expected in zip(gradients(4), gradients(1024), strict=True):
      testing.assert_close(actual, expected, "fp32 gradient")

  def test_blocks_keep_no_square_of_logits(self):
    length = 512
    shape = jax.ShapeDtypeStruct((1, length, 4, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(q, k, v, ids):
      out, _ = attention.attention(
          q, k, v, ids, scale=1.0, causal=True, query_block=32
      )
      return jnp.sum(out**2)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(
        shape, shape, shape, ids
    ).compile()  # fmt: skip
    square = 4 * 4 * length**2
    self.assertLess(compiled.memory_analysis().temp_size_in_bytes, square / 2)

  def test_output_is_fp32_from_bf16_inputs(self):
    q, k, v, segments = _inputs()
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    out, top = attention.attention(*low, segments, scale=SCALE, causal=True)
    self.assertEqual(out.dtype, jnp.float32)
    self.assertEqual(top.dtype, jnp.float32)
    exact = [x.astype(jnp.float32) for x in low]
    expected, _ = attention.attention(
        *exact, segments, scale=SCALE, causal=True
    )
    testing.assert_close(out, expected, "bf16")


if __name__ == "__main__":
  absltest.main()
