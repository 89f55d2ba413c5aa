"""Decoding gives the logits of teacher forcing."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax import models
from sparsemm_jax.inference import cache as cache_lib
from tests import testing
from tests.models import small_model

LENGTH = 200


def _decode(config, variables, tokens, segment_ids, cache):
  """One token after another; logits [B, T, vocab] and the cache."""
  model = models.SparseMultimodalModel(config)

  @jax.jit
  def run(tokens, segment_ids, cache):
    def step(cache, x):
      out = model.apply(variables, x[0][:, None], x[1][:, None], cache=cache)
      return out.cache, out.logits[:, 0]

    cache, logits = jax.lax.scan(step, cache, (tokens.T, segment_ids.T))
    return jnp.moveaxis(logits, 0, 1), cache

  return run(tokens, segment_ids, cache)


class CacheTest(parameterized.TestCase):

  def test_decode_equals_teacher_forcing_after_200_tokens(self):
    # Teacher forcing by the chunked form, RoPE on: both must agree with it.
    config = small_model.config(
        num_layers=3,
        mla_every=3,
        kda=config_lib.KdaConfig(num_heads=2, head_dim=8),
        mla=config_lib.MlaConfig(
            **{**vars(small_model.BASE.mla), "rope_theta": 100.0}
        ),
    )
    tokens = small_model.tokens(2, LENGTH)
    expected = small_model.apply(config, tokens).logits
    actual, cache = _decode(
        config, small_model.variables(config), tokens, np.ones_like(tokens),
        cache_lib.init_cache(config, 2, LENGTH),
    )  # fmt: skip
    testing.assert_close(actual, expected, "decode fp32")
    testing.assert_close(actual[:, -1], expected[:, -1], "decode fp32")
    np.testing.assert_array_equal(cache.lengths, [LENGTH, LENGTH])

  def test_padded_prefill_chunks_then_decode_equal_teacher_forcing(self):
    config = small_model.config(
        num_layers=4, num_dense_layers=0, attn_res_block_size=4,
        scan_layers=True,
    )  # fmt: skip
    tokens = small_model.tokens(2, 40)
    lengths = np.array([25, 14])  # of the prompts
    expected = small_model.apply(config, tokens).logits
    variables = small_model.variables(config)
    cache = cache_lib.init_cache(config, 2, 48)
    for start in range(0, 32, 8):
      index = start + np.arange(8)
      valid = index[None] < lengths[:, None]
      chunk = np.where(valid, tokens[:, index], 0)
      out = small_model.apply(
          config, chunk, valid.astype(np.int32), cache=cache
      )
      cache = out.cache
      for row in range(2):
        testing.assert_close(
            out.logits[row][valid[row]],
            expected[row, index[valid[row]]],
            "decode fp32",
        )
    np.testing.assert_array_equal(cache.lengths, lengths)
    rest = np.stack([tokens[0, 25:40], tokens[1, 14:29]])
    # The second row pauses half-way: its padding must change nothing.
    ids = np.ones_like(rest)
    ids[1, 5:9] = 0
    logits, cache = _decode(config, variables, rest, ids, cache)
    testing.assert_close(logits[0], expected[0, 25:40], "decode fp32")
    testing.assert_close(logits[1, :5], expected[1, 14:19], "decode fp32")
    np.testing.assert_array_equal(cache.lengths, [40, 25])

  def test_only_latents_grow_with_the_length(self):
    def init(max_len):
      return jax.eval_shape(
          lambda: cache_lib.init_cache(small_model.BASE, 3, max_len)
      )

    size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    mla = small_model.BASE.mla
    per_token = mla.kv_lora_rank + mla.qk_rope_head_dim
    two_layers = 2 * 3 * per_token
    self.assertEqual(size(init(101)) - size(init(100)), two_layers)

  def test_the_recurrent_state_is_fp32_under_bf16_compute(self):
    config = small_model.config(dtype="bfloat16")
    layers = cache_lib.init_cache(config, 1, 4).layers
    self.assertEqual(layers["layer_0"].state.dtype, jnp.float32)
    self.assertEqual(layers["layer_0"].q_tail.dtype, jnp.bfloat16)
    self.assertEqual(layers["layer_1"].latents.dtype, jnp.bfloat16)


if __name__ == "__main__":
  absltest.main()
