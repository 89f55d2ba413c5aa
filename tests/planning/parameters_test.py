"""Parameter counts."""

import math

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp

from sparsemm_jax import models
from sparsemm_jax import planning
from sparsemm_jax.models import presets
from tests.models import small_model


class CountParametersTest(parameterized.TestCase):

  @parameterized.parameters("tiny", "small")
  def test_presets_have_as_many_as_counted(self, name):
    self._check(presets.get_preset(name))

  def test_unequal_widths_have_as_many_as_counted(self):
    self._check(small_model.config(vision=small_model.VISION))
    self._check(small_model.config(attn_res_block_size=None))

  def _check(self, config):
    model = models.SparseMultimodalModel(config)
    tokens = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    size = lambda tree: sum(
        math.prod(leaf.shape) for leaf in jax.tree.leaves(tree)
    )
    params = variables["params"]
    count = planning.count_parameters(config)
    self.assertEqual(count.total + count.vision + count.projector, size(params))
    self.assertEqual(count.embedding, size(params["token_embedding"]))
    if config.vision is not None:
      self.assertEqual(count.projector, size(params["vision"]["projector"]))

  def test_k3_has_its_published_size(self):
    count = planning.count_parameters(presets.get_preset("k3"))
    self.assertEqual(f"{count.total:.4e}", "2.7795e+12")
    self.assertEqual(f"{count.active:.4e}", "1.0419e+11")
    self.assertEqual(f"{count.vision:.3e}", "4.012e+08")
    self.assertEqual(f"{count.projector:.2e}", "4.61e+07")
    self.assertEqual(count.experts, 92 * 896 * 3 * 3584 * 3072)

  def test_k3_has_69_kda_and_24_mla_layers(self):
    config = presets.get_preset("k3_text")
    mla = [i + 1 for i in range(config.num_layers) if config.is_mla(i)]
    self.assertEqual(mla, [*range(4, 93, 4), 93])

  def test_an_unknown_preset_is_named(self):
    with self.assertRaisesRegex(ValueError, "'huge'; known: tiny, small"):
      presets.get_preset("huge")


if __name__ == "__main__":
  absltest.main()
