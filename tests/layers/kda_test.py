"""The KDA layer around the operation."""

from absl.testing import absltest
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax.layers import kda
from sparsemm_jax.layers import layout as layout_lib
from tests import testing
from tests.models import small_model


class KimiDeltaAttentionTest(absltest.TestCase):

  def test_the_decay_starts_slow(self):
    dt_bias = kda.init_dt_bias(jax.random.key(0), (64, 128), jnp.float32)
    dt = np.log1p(np.exp(np.asarray(dt_bias, np.float64)))
    self.assertGreater(dt.min(), 0.999e-3)
    self.assertLess(dt.max(), 1.001e-1)
    # Log-uniform: half of it below the geometric mean.
    self.assertAlmostEqual(np.mean(dt < 1e-2), 0.5, delta=0.02)

  def test_nothing_has_a_bias_but_the_decay(self):
    module = kda.KimiDeltaAttention(small_model.BASE)
    x = jax.ShapeDtypeStruct((1, 4, 32), jnp.float32)
    layout = layout_lib.packed(jnp.ones((1, 4), jnp.int32))
    variables = jax.eval_shape(
        lambda key, x: module.init(key, x, layout), jax.random.key(0), x
    )
    names = set(variables["params"])
    kernels = {
        "q_proj", "k_proj", "v_proj", "q_conv", "k_conv", "v_conv",
        "decay_down", "decay_up", "beta_proj", "g_proj", "o_proj",
    }  # fmt: skip
    self.assertEqual(names, kernels | {"a_log", "dt_bias", "out_norm"})
    for name in kernels:
      self.assertEqual(set(variables["params"][name]), {"kernel"})

  def test_padding_never_reaches_the_cache(self):
    config = small_model.BASE
    module = kda.KimiDeltaAttention(config)
    x = jax.random.normal(jax.random.key(0), (1, 3, config.d_model))
    heads, value_heads = config.kda.num_heads, config.kda.value_heads
    key_dim, value_dim = config.kda.head_dim, config.kda.value_dim
    cache = kda.KdaCache(*(
        jax.random.normal(jax.random.key(1), shape)
        for shape in (
            (1, value_heads, key_dim, value_dim), (1, 3, heads, key_dim),
            (1, 3, heads, key_dim), (1, 3, value_heads, value_dim),
        )
    ))  # fmt: skip
    lengths = jnp.int32([5])
    layout = layout_lib.appended(jnp.ones((1, 3), jnp.int32), lengths)
    shapes = jax.eval_shape(
        lambda key: nn.unbox(module.init(key, x, layout)), jax.random.key(2)
    )
    variables = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), shapes)
    apply = jax.jit(module.apply)
    for length in 1, 3:  # the recurrence and the chunked form
      padding = layout_lib.appended(jnp.zeros((1, length), jnp.int32), lengths)
      nothing = jnp.full_like(x[:, :length], jnp.nan)
      _, after = apply(variables, nothing, padding, cache)
      for new, old in zip(after, cache, strict=True):
        testing.assert_same(new, old)


if __name__ == "__main__":
  absltest.main()
