"""Tests that layers see one sequence where a mesh axis spreads its tokens."""

import re

from absl.testing import absltest
from absl.testing import parameterized
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import kda
from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.layers import mla
from sparsemm_jax.parallel import mesh as mesh_lib
from sparsemm_jax.parallel import rules
from tests import testing
from tests import tiny_run

CONFIG = tiny_run.MODEL
LENGTH = 40
IDS = np.repeat([[1, 0, 2, 3], [4, 4, 0, 0]], [13, 4, 22, 1], axis=1)
IDS = IDS.astype(np.int32)


class LayerTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("kda", kda.KimiDeltaAttention, dict(data=2, context=2, tensor=2), 1),
      ("mla", mla.GatedMLA, dict(data=2, context=4), 2),
  )
  def test_values_and_gradients_are_those_of_one_device(
      self, layer, sizes, gathers
  ):
    module = layer(CONFIG)
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(2, 2, LENGTH, CONFIG.d_model)).astype("f")
    layout = layout_lib.packed(jnp.asarray(IDS))
    shapes = jax.eval_shape(module.init, jax.random.key(0), x, layout)
    params = jax.tree.map(
        lambda leaf: 0.3 * rng.normal(size=leaf.shape).astype("f"),
        nn.unbox(shapes),
    )

    def loss(params, x):
      x = nn.with_logical_constraint(x, ("act_batch", "act_length", None))
      y, _ = module.apply(params, x, layout)
      return jnp.sum(y * weights), y

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, expected), expected_grads = jax.jit(step)(params, x)
    mesh = mesh_lib.make_mesh(config_lib.MeshConfig(**sizes))
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules.LOGICAL_RULES):
      (_, actual), grads = jax.jit(step)(params, x)
      program = jax.jit(step).lower(params, x).compile().as_text()
    testing.assert_close(actual, expected, "sharded fp32")
    jax.tree_util.tree_map_with_path(
        lambda path, a, b: testing.assert_close(
            a, b, "sharded fp32", jax.tree_util.keystr(path)
        ),
        grads,
        expected_grads,
    )
    # KDA: the states. MLA: keys and values. (Segment ids are integers.)
    self.assertLen(re.findall(r" f32\S+ all-gather", program), gathers)


if __name__ == "__main__":
  absltest.main()
