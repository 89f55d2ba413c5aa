"""Tests that experts spread over ranks compute what one device would."""

import dataclasses
import functools
import re

from absl.testing import absltest
from absl.testing import parameterized
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.layers import moe
from sparsemm_jax.parallel import mesh as mesh_lib
from sparsemm_jax.parallel import rules
from sparsemm_jax.training import router
from tests import testing
from tests import tiny_run
from tests.models import small_model

ROWS, LENGTH = 8, 6
CONFIG = small_model.config(
    d_model=24,
    moe=config_lib.MoeConfig(
        num_experts=112, num_experts_per_token=4, latent_dim=16,
        expert_hidden_dim=10, histogram_bins=50,
    ),
)  # fmt: skip
MESHES = {
    "expert_2_data_fsdp": dict(data=2, fsdp=2, expert=2),
    "expert_4_data": dict(data=2, expert=4),
    "expert_8": dict(data=1, expert=8),
    "expert_2_context_tensor": dict(data=1, expert=2, context=2, tensor=2),
}


def _with_moe(config, **changes):
  return dataclasses.replace(
      config, moe=dataclasses.replace(config.moe, **changes)
  )


@functools.cache
def _variables(config):
  """Parameters larger than at initialisation, and where a mesh puts them."""
  x = jnp.zeros((1, 1, config.d_model))
  layout = layout_lib.packed(jnp.ones((1, 1), jnp.int32))
  boxed = jax.eval_shape(
      lambda: moe.LatentMoE(config).init(jax.random.key(0), x, layout)
  )
  rng = np.random.default_rng(0)
  params = jax.tree.map(
      lambda leaf: np.float32(rng.normal(0, 0.2, leaf.shape)),
      nn.unbox(boxed["params"]),
  )
  return params, boxed["params"]


def _inputs(config):
  """Rows of tokens, one of them nothing but padding: a rank without tokens."""
  rng = np.random.default_rng(1)
  x = np.float32(rng.normal(size=(ROWS, LENGTH, config.d_model)))
  segments = np.ones((ROWS, LENGTH), np.int32)
  segments[3] = 0
  segments[5, -2:] = 0
  bias = np.float32(0.1 * rng.normal(size=config.moe.num_experts))
  return x, segments, bias - bias.mean()


def _make_step(config):
  """The layer's loss, its gradients, and the counts for the next bias."""

  def loss(params, x, segments, bias):
    variables = {"params": params, "router_state": {"router": {"bias": bias}}}
    y, sown = moe.LatentMoE(config).apply(
        variables, x, layout_lib.packed(segments), mutable=["router_stats"]
    )
    y = jnp.where((segments > 0)[..., None], jnp.sin(y), 0.0)
    return jnp.sum(y), (y, router.total(sown["router_stats"]))

  def step(params, x, segments, bias):
    gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, (y, sums)), grads = gradient(params, x, segments, bias)
    state = router.update({"router": {"bias": bias}}, sums, config.moe)
    return {
        "loss": value, "y": y, "grads": grads, "sums": sums,
        "bias": state["router"]["bias"],
    }  # fmt: skip

  return step


@functools.cache
def _compiled(config, mesh_name=None):
  """The step, compiled for one device or a mesh; and how to place arrays."""
  params, boxed = _variables(config)
  x, segments, bias = _inputs(config)
  if mesh_name is None:
    step = tiny_run.jit(_make_step(config))
    return step.lower(params, x, segments, bias).compile(), lambda *args: args
  mesh = mesh_lib.make_mesh(config_lib.MeshConfig(**MESHES[mesh_name]))
  replicated = jax.NamedSharding(mesh, jax.P())
  rows = rules.batch_sharding(mesh)
  shardings = (rules.shardings(mesh, boxed), rows, rows, replicated)
  place = lambda *args: jax.device_put(args, shardings)
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules.LOGICAL_RULES):
    step = tiny_run.jit(_make_step(config))
    return step.lower(*place(params, x, segments, bias)).compile(), place


def _run(config, mesh_name=None, **changes):
  """Runs the step on the standard inputs, some of them changed."""
  compiled, place = _compiled(config, mesh_name)
  x, segments, bias = _inputs(config)
  given = {"x": x, "segments": segments, "bias": bias, **changes}
  return jax.device_get(compiled(*place(_variables(config)[0], *given.values())))


class ExpertParallelTest(parameterized.TestCase):

  def _assert_same_step(self, actual, expected):
    self.assertEqual(actual["sums"]["dropped"], 0)
    testing.assert_same(actual["bias"], expected["bias"], "bias")
    jax.tree.map(testing.assert_same, actual["sums"], expected["sums"])
    jax.tree_util.tree_map_with_path(
        lambda path, a, b: testing.assert_close(
            a, b, "sharded fp32", jax.tree_util.keystr(path)
        ),
        {name: actual[name] for name in ("loss", "y", "grads")},
        {name: expected[name] for name in ("loss", "y", "grads")},
    )

  @parameterized.product(
      mesh=list(MESHES), exchange=("gather", "all_to_all")
  )  # fmt: skip
  def test_loss_gradients_and_bias_are_those_of_one_device(
      self, mesh, exchange
  ):
    config = _with_moe(CONFIG, exchange=exchange)
    with self.subTest("all experts"):
      actual, expected = _run(config, mesh), _run(CONFIG)
      self.assertGreater(np.abs(expected["bias"]).max(), 0)
      self._assert_same_step(actual, expected)
    with self.subTest("all tokens to the same experts"):
      bias = np.zeros(112, np.float32)
      bias[[5, 6, 7, 8]] = 9.0  # of one rank; the others get nothing
      actual, expected = _run(config, mesh, bias=bias), _run(CONFIG, bias=bias)
      self.assertEqual(np.count_nonzero(expected["sums"]["router"]["counts"]), 4)
      self._assert_same_step(actual, expected)


if __name__ == "__main__":
  absltest.main()
