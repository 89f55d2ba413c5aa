"""Tests that the model in stages is the model."""

import dataclasses
import math

from absl.testing import absltest
from absl.testing import parameterized
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax import models
from sparsemm_jax.models import pipelined
from sparsemm_jax.parallel import mesh as mesh_lib
from sparsemm_jax.parallel import rules
from sparsemm_jax.training import losses
from sparsemm_jax.training import router
from tests import testing
from tests.models import small_model

# KDA and a dense MLP, MLA and experts.
CONFIG = small_model.config(num_layers=2, attn_res_block_size=1, d_model=16)
ROWS, LENGTH = 8, 10


def _step(config):
  """A compiled (variables, tokens, ids) -> ((loss, statistics), gradients)."""
  model = models.SparseMultimodalModel(config)

  def loss(params, variables, tokens, segment_ids):
    variables = {**variables, "params": params}
    output, seen = model.apply(
        variables, tokens, segment_ids, mutable=list(pipelined.STATS)
    )
    nats, _ = losses.next_token_losses(output.logits[:, :-1], tokens[:, 1:])
    auxiliary = router.auxiliary_loss(seen.get("router_stats", {}))
    return jnp.mean(nats) + auxiliary, seen

  gradient = jax.value_and_grad(loss, has_aux=True)
  return jax.jit(
      lambda variables, *args: gradient(variables["params"], variables, *args)
  )


def _initial(config):
  """The model as training starts, but with queries that tell rows apart.

  Parameters drawn far from these (small_model.variables) make deep models so
  ill-conditioned that in fp32 another split of the batch alone, without stages,
  moves some gradients by more than 1e-5.
  """
  model = models.SparseMultimodalModel(config)
  variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    if path[-1] != jax.tree_util.DictKey("pseudo_query"):
      return leaf
    return rng.normal(0.0, 0.3, leaf.shape).astype(np.float32)

  return jax.tree_util.tree_map_with_path(
      draw, {"params": nn.unbox(variables["params"])}
  )


class PipelinedTest(parameterized.TestCase):

  def _check(self, config, variables, pipeline, **mesh):
    """Compares a step in stages with the step of one device."""
    tokens = small_model.tokens(ROWS, LENGTH)
    segments = np.repeat([[1, 2, 0]], [4, 5, 1], axis=1).astype(np.int32)
    args = (variables, tokens, np.tile(segments, (ROWS, 1)))
    expected = _step(config)(*args)
    config = dataclasses.replace(config, pipeline=pipeline)
    devices = jax.devices()[: math.prod(mesh.values())]
    mesh = mesh_lib.make_mesh(config_lib.MeshConfig(**mesh), devices)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules.LOGICAL_RULES):
      actual = _step(config)(*args)
    jax.tree_util.tree_map_with_path(
        lambda path, a, b: testing.assert_close(
            _whole(path, a), _whole(path, b), "sharded fp32", str(path)
        ),
        actual,
        expected,
    )

  def test_loss_gradients_and_counts_are_those_of_the_whole(self):
    self._check(
        CONFIG,
        small_model.variables(CONFIG),
        config_lib.PipelineConfig(micro_batches=2),
        data=2,
        stage=2,
        expert=2,
    )

  @parameterized.named_parameters(
      ("four_by_two_of_kda", 4, 2, dict(mla_every=9)),
      ("eight_of_mla", 8, 1, dict(mla_every=1)),
  )
  def test_deep_models_are_the_whole_too(self, stages, virtual, changes):
    # Experts take long to compile, and are in the test above.
    config = dataclasses.replace(
        CONFIG, num_layers=8, num_dense_layers=8, **changes
    )
    pipeline = config_lib.PipelineConfig(
        virtual_stages=virtual, micro_batches=4
    )
    self._check(config, _initial(config), pipeline, data=1, stage=stages)


def _whole(path, value):
  """Counts are exact once the shards of the tokens are added up."""
  if path[-1] == jax.tree_util.DictKey("max_logit") or value.dtype != np.int32:
    return value
  return np.sum(value, axis=0)


if __name__ == "__main__":
  absltest.main()
