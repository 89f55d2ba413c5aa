"""Tests of what a step does with the router's statistics."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax import training
from sparsemm_jax.training import router
from sparsemm_jax.training import step as step_lib
from tests import testing
from tests import tiny_run

SHARDS, LAYERS, EXPERTS, BINS = 3, 2, 4, 20


def _stats(seed=0):
  """Statistics of a plain layer and of two scanned ones, on three shards."""
  rng = np.random.default_rng(seed)

  def layer(*lead):
    draw = lambda *shape: rng.integers(0, 9, (*lead, SHARDS, *shape), np.int32)
    return {
        "moe": {
            "router": {
                "counts": draw(EXPERTS),
                "histogram": draw(EXPERTS, BINS),
            },
            "dropped": draw(),
        }
    }

  return {"layer_0": layer(), "layers_1": {"layer_0": layer(LAYERS)}}


def _state(seed=0):
  rng = np.random.default_rng(seed)

  def layer(*lead):
    bias = np.float32(0.1 * rng.normal(size=(*lead, EXPERTS)))
    pool = np.float32(rng.uniform(size=(*lead, EXPERTS, BINS)))
    return {"moe": {"router": {"bias": bias, "pool": pool}}}

  return {"layer_0": layer(), "layers_1": {"layer_0": layer(LAYERS)}}


def _config(balancing, **changes):
  return config_lib.MoeConfig(
      num_experts=EXPERTS, num_experts_per_token=2, balancing=balancing,
      histogram_bins=BINS, **changes,
  )  # fmt: skip


def _leaves(tree):
  return {
      jax.tree_util.keystr(path): np.asarray(leaf)
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


class TotalTest(absltest.TestCase):

  def test_shards_are_summed_and_layers_are_not(self):
    stats = _stats()
    stats["layer_0"]["moe"]["router"]["switch_loss"] = np.float32(0.5)
    total = router.total(stats)
    plain = stats["layer_0"]["moe"]["router"]
    testing.assert_same(
        total["layer_0"]["moe"]["router"]["histogram"],
        plain["histogram"].sum(axis=0),
    )
    testing.assert_same(total["layer_0"]["moe"]["router"]["switch_loss"], 0.5)
    scanned = stats["layers_1"]["layer_0"]["moe"]
    actual = total["layers_1"]["layer_0"]["moe"]
    for name in ("counts", "histogram"):
      testing.assert_same(
          actual["router"][name], scanned["router"][name].sum(axis=1), name
      )
    testing.assert_same(actual["dropped"], scanned["dropped"].sum(axis=1))
    dropped = router.metrics({"decoder": total})["router/dropped"]
    expected = (
        scanned["dropped"].sum() + stats["layer_0"]["moe"]["dropped"].sum()
    )
    self.assertEqual(int(dropped), expected)
    self.assertGreater(expected, 0)

  def test_a_model_without_experts_has_nothing_to_sum(self):
    self.assertEqual(router.total({}), {})


class UpdateTest(parameterized.TestCase):

  @parameterized.parameters(
      "quantile", "quantile_pooled", "sequence_quantile", "sign"
  )
  def test_scanned_layers_are_updated_like_plain_ones(self, balancing):
    state, sums = _state(), router.total(_stats())
    config = _config(balancing)
    new = router.update(state, sums, config, step=0)
    for layer in range(LAYERS):
      one = lambda tree, i=layer: jax.tree.map(
          lambda x: x[i], tree["layers_1"]["layer_0"]
      )
      expected = router.update(
          {"layer_9": one(state)}, {"layer_9": one(sums)}, config, step=0
      )
      for name, value in _leaves(expected["layer_9"]).items():
        testing.assert_same(_leaves(one(new))[name], value, name)
    moved = {
        n for n, v in _leaves(new).items() if (v != _leaves(state)[n]).any()
    }
    names = {n.split("'")[-2] for n in moved}
    pooled = balancing == "quantile_pooled"
    self.assertEqual(names, {"bias", "pool"} if pooled else {"bias"})

  @parameterized.parameters(
      "quantile", "quantile_pooled", "sequence_quantile", "sign"
  )
  def test_nothing_moves_from_the_freeze_step_on(self, balancing):
    state, sums = _state(), router.total(_stats())
    free = router.update(state, sums, _config(balancing), step=7)
    config = _config(balancing, freeze_step=7)
    update = jax.jit(lambda step: router.update(state, sums, config, step=step))
    for step, expected in ((6, free), (7, state), (8, state)):
      actual = _leaves(update(jnp.int32(step)))
      for name, value in _leaves(expected).items():
        testing.assert_close(actual[name], value, "fp32", f"{name} {step}")
        if expected is state:
          testing.assert_same(actual[name], value, f"{name} {step}")


class PooledRunTest(absltest.TestCase):

  def test_each_token_counts_once_under_recomputation_and_none_if_skipped(self):
    run = tiny_run.text_config(moe={"balancing": "quantile_pooled"})
    run = dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, remat="full"),
        optim=config_lib.OptimConfig(muon=False),
    )
    state = jax.jit(lambda: training.init_state(run))()
    step = jax.jit(step_lib.make_train_step(run))
    batch = tiny_run.batches(run, 1)[0]
    tokens = (batch["segment_ids"] > 0).sum()
    after, metrics = step(state, batch)
    layer = after.router_state["decoder"]["layer_0"]["moe"]["router"]
    np.testing.assert_array_equal(layer["pool"].sum(axis=1), np.full(8, tokens))
    self.assertGreater(np.abs(layer["bias"]).max(), 0)
    self.assertEqual(int(metrics["router/dropped"]), 0)

    kernel = after.params["head"]["kernel"]
    broken = {**after.params, "head": {"kernel": kernel.at[0, 0].set(jnp.nan)}}
    again, _ = step(after.replace(params=broken), batch)
    self.assertEqual(int(again.skipped), 1)
    for name, value in _leaves(after.router_state).items():
      testing.assert_same(_leaves(again.router_state)[name], value, name)


if __name__ == "__main__":
  absltest.main()
