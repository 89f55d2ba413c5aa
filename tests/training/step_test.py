"""Tests of what one optimizer step does, and of what it leaves alone."""

import dataclasses
import functools
import math

from absl.testing import absltest
from absl.testing import parameterized
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsemm_jax import config as config_lib
from sparsemm_jax import training
from sparsemm_jax.training import router
from sparsemm_jax.training import state as state_lib
from sparsemm_jax.training import step as step_lib
from tests import testing
from tests import tiny_run


def _mean_loss(sums):
  nats = sum(float(total) for total, _ in sums["by_modality"].values())
  return nats / sum(int(count) for _, count in sums["by_modality"].values())


def _assert_same_tree(actual, expected):
  jax.tree_util.tree_map_with_path(
      lambda path, a, b: testing.assert_same(a, b, jax.tree_util.keystr(path)),
      actual,
      expected,
  )


def _assert_close_tree(actual, expected, kind):
  jax.tree_util.tree_map_with_path(
      lambda path, a, b: testing.assert_close(
          a, b, kind, jax.tree_util.keystr(path)
      ),
      actual,
      expected,
  )


def _bias(state):
  (bias,) = jax.tree.leaves(state.router_state)
  return np.asarray(bias)


class StepTest(parameterized.TestCase):
  """On a batch of text and images, attention residuals on."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = tiny_run.config()
    cls.state = jax.jit(lambda: training.init_state(cls.config))()
    cls.batches = tiny_run.batches(cls.config, 4)
    cls.batch = cls.batches[0]
    cls.gradient_step = staticmethod(
        jax.jit(step_lib.make_gradient_step(cls.config))
    )
    cls.update_step = staticmethod(
        jax.jit(step_lib.make_update_step(cls.config))
    )
    cls.sums = cls.gradient_step(cls.state, cls.batch)

  def _step(self, state, batch):
    return self.update_step(state, self.gradient_step(state, batch))

  def test_the_first_loss_is_that_of_a_uniform_guess(self):
    self.assertAlmostEqual(_mean_loss(self.sums), math.log(264), delta=0.1)
    for name in ("text", "image_text"):
      self.assertGreater(self.sums["by_modality"][name][1], 50, name)

  def test_every_parameter_has_a_gradient(self):
    without = {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, grad in jax.tree_util.tree_leaves_with_path(
            self.sums["grads"]
        )
        if not np.abs(grad).max() > 0
    }
    # While the queries of the mixes over depth are zero their keys have no
    # say, and the first mix has a single source.
    self.assertEqual(
        {name for name in without if not name.endswith(".key_scale")},
        {"decoder.layer_0.attn_res.pseudo_query"},
    )

  def test_the_loss_falls_on_a_repeated_batch(self):
    state, losses = self.state, []
    for _ in range(20):
      state, metrics = self._step(state, self.batch)
      losses.append(float(metrics["train/loss"]))
    self.assertAlmostEqual(losses[0], _mean_loss(self.sums), places=5)
    self.assertLess(losses[-1], losses[0] - 1.0)
    self.assertEqual(int(state.step), 20)
    self.assertEqual(int(state.skipped), 0)

  @pytest.mark.exact
  def test_micro_batches_give_the_same_gradients_and_the_same_bias(self):
    in_four = jax.jit(step_lib.make_gradient_step(self.config, micro_batches=4))
    for index, batch in enumerate(self.batches):
      with self.subTest(batch=index):
        whole = self.gradient_step(self.state, batch)
        parts = in_four(self.state, batch)
        _assert_same_tree(
            parts["stats"]["router_stats"], whole["stats"]["router_stats"]
        )
        testing.assert_same(parts["tokens"], whole["tokens"])
        _assert_close_tree(parts["grads"], whole["grads"], "fp32 gradient")
        for name, (nats, count) in whole["by_modality"].items():
          testing.assert_close(parts["by_modality"][name][0], nats, "fp32")
          testing.assert_same(parts["by_modality"][name][1], count)
        after_whole, _ = self.update_step(self.state, whole)
        after_parts, _ = self.update_step(self.state, parts)
        self.assertGreater(np.abs(_bias(after_whole)).max(), 0)
        testing.assert_same(_bias(after_parts), _bias(after_whole))

  def test_targets_outside_of_the_loss_mask_change_nothing(self):
    mask = self.batch["loss_mask"]
    self.assertFalse(mask.all())
    batch = {**self.batch, "targets": np.where(mask, self.batch["targets"], 7)}
    _assert_same_tree(self.gradient_step(self.state, batch), self.sums)

  def test_what_stands_at_padding_changes_nothing(self):
    # The last row, the end of the first, and every patch without an image.
    segment_ids = self.batch["segment_ids"].copy()
    segment_ids[-1] = 0
    segment_ids[0, -9:] = 0
    padding = segment_ids == 0
    no_image = self.batch["patch_segment_ids"] == 0
    self.assertTrue(no_image.any())
    clean = {
        **self.batch,
        "segment_ids": segment_ids,
        "loss_mask": self.batch["loss_mask"] & ~padding,
    }
    dirty = {
        **clean,
        "tokens": np.where(padding, 11, clean["tokens"]),
        "targets": np.where(padding, 12, clean["targets"]),
        "patches": np.where(no_image[..., None], np.nan, clean["patches"]),
    }
    expected = self.gradient_step(self.state, clean)
    actual = self.gradient_step(self.state, dirty)
    self.assertEqual(int(actual["tokens"]), (~padding).sum())
    self.assertEqual(
        int(router.counts_by_layer(actual["stats"]["router_stats"]).sum()),
        2 * (~padding).sum(),
    )
    _assert_same_tree(
        actual["stats"]["router_stats"], expected["stats"]["router_stats"]
    )
    testing.assert_close(_mean_loss(actual), _mean_loss(expected), "fp32")
    _assert_close_tree(actual["grads"], expected["grads"], "fp32 gradient")

  @parameterized.named_parameters(
      ("in_a_patch", "patch"), ("in_a_parameter", "parameter")
  )
  def test_a_step_that_is_not_finite_changes_only_its_counts(self, where):
    state, batch = self.state, self.batch
    if where == "patch":
      patches = batch["patches"].copy()
      patches[batch["patch_segment_ids"] > 0] = np.inf
      batch = {**batch, "patches": patches}
    else:
      params = jax.tree.map(lambda x: x, state.params)
      head = params["head"]
      head["kernel"] = head["kernel"].at[3, 5].set(jnp.nan)
      state = state.replace(params=params)
    once, metrics = self._step(state, batch)
    self.assertFalse(math.isfinite(metrics["train/grad_norm"]))
    _assert_same_tree(
        once, state.replace(step=once.step, skipped=once.skipped,
                            skipped_in_a_row=once.skipped_in_a_row),
    )  # fmt: skip
    twice, metrics = self._step(once, batch)
    self.assertEqual(int(metrics["train/skipped_in_a_row"]), 2)
    if where == "patch":
      after, metrics = self._step(twice, self.batch)
      self.assertEqual(int(after.step), 3)
      self.assertEqual(int(metrics["train/skipped_steps"]), 2)
      self.assertEqual(int(metrics["train/skipped_in_a_row"]), 0)
      # As if the skipped steps had never been, their learning rate included.
      expected, _ = self._step(self.state, self.batch)
      _assert_same_tree(after.params, expected.params)
      _assert_same_tree(after.router_state, expected.router_state)

  def test_the_router_bias_is_state_and_not_a_parameter(self):
    names = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(
            (self.state.params, self.state.opt_state, self.sums["grads"])
        )
    ]
    self.assertNotEmpty([name for name in names if "router" in name])
    self.assertEmpty([n for n in names if "router" in n and "bias" in n])
    testing.assert_same(_bias(self.state), np.zeros(8, np.float32))


TEXT = tiny_run.text_config()


@functools.cache
def _text_state():
  return jax.jit(lambda: training.init_state(TEXT))()


@functools.cache
def _text_batch():
  return tiny_run.batches(TEXT, 1)[0]


@functools.cache
def _text_sums(balancing):
  config = tiny_run.text_config(moe={"balancing": balancing})
  gradient_step = jax.jit(step_lib.make_gradient_step(config))
  return gradient_step(_text_state(), _text_batch())


def _text_update(balancing, sums=None):
  """The biases after a step under one of the rules."""
  config = dataclasses.replace(TEXT.model.moe, balancing=balancing)
  stats = (sums or _text_sums(balancing))["stats"]["router_stats"]
  state = _text_state()
  return _bias(
      state.replace(
          router_state=router.update(state.router_state, stats, config, step=0)
      )
  )


class BalancingTest(parameterized.TestCase):
  """On text, without attention residuals."""

  def test_quantile_moves_the_bias_to_a_mean_of_zero(self):
    bias = _text_update("quantile")
    self.assertGreater(np.abs(bias).max(), 1e-3)
    self.assertAlmostEqual(float(bias.mean()), 0.0, places=6)

  def test_sign_moves_each_bias_by_a_step_towards_the_mean_load(self):
    (counts,) = np.asarray(
        router.counts_by_layer(_text_sums("sign")["stats"]["router_stats"])
    )
    step = TEXT.model.moe.sign_step_size
    testing.assert_same(
        _text_update("sign"),
        np.float32(step) * np.sign(counts.mean() - counts).astype(np.float32),
    )
    self.assertContainsSubset({-1, 1}, set(np.sign(counts.mean() - counts)))

  @parameterized.parameters("none", "switch_loss")
  def test_other_rules_leave_the_bias_at_zero(self, balancing):
    testing.assert_same(_text_update(balancing), np.zeros(8, np.float32))

  @parameterized.parameters("sign", "none", "switch_loss")
  def test_every_rule_routes_a_first_batch_alike(self, balancing):
    counts = [
        router.counts_by_layer(_text_sums(rule)["stats"]["router_stats"])
        for rule in (balancing, "quantile")
    ]
    testing.assert_same(*counts)

  def test_only_the_switch_loss_adds_to_the_objective(self):
    base = _text_sums("none")
    for rule in ("quantile", "sign"):
      _assert_close_tree(
          _text_sums(rule)["grads"], base["grads"], "fp32 gradient"
      )
    penalised = _text_sums("switch_loss")
    # What is reported stays the cross entropy.
    self.assertAlmostEqual(_mean_loss(penalised), _mean_loss(base), places=5)
    targets = _text_batch()["loss_mask"].sum()
    added = (penalised["objective"] - base["objective"]) / targets
    weight = TEXT.model.moe.switch_loss_weight  # its value at uniform loads
    self.assertBetween(added, weight * 0.99, weight * 1.5)

    def kernel(sums):
      return sums["grads"]["decoder"]["layer_0"]["moe"]["router"]["kernel"]

    change = np.linalg.norm(kernel(penalised) - kernel(base))
    self.assertGreater(change, 1e-3 * np.linalg.norm(kernel(base)))

  def test_an_eval_step_sums_plain_nats_and_the_load_of_the_experts(self):
    config = dataclasses.replace(
        TEXT, train=dataclasses.replace(TEXT.train, z_loss_weight=1.0)
    )
    eval_step = jax.jit(step_lib.make_eval_step(config))
    sums = eval_step(_text_state(), _text_batch())
    self.assertAlmostEqual(
        _mean_loss(sums), _mean_loss(_text_sums("quantile")), places=5
    )
    testing.assert_same(
        sums["counts"],
        router.counts_by_layer(_text_sums("quantile")["stats"]["router_stats"]),
    )
    # A bias that favours expert 5 sends every token there.
    state = _text_state()
    biased = state.replace(
        router_state=jax.tree.map(
            lambda bias: bias.at[5].set(2.0), state.router_state
        )
    )
    sums = eval_step(biased, _text_batch())
    self.assertEqual(
        int(sums["counts"][0, 5]), (_text_batch()["segment_ids"] > 0).sum()
    )


class CountsByLayerTest(absltest.TestCase):

  def test_layers_come_in_order_of_depth_scanned_or_not(self):
    def layer(*markers):
      counts = np.array(markers)[:, None] * np.ones(3, np.int32)
      counts = counts[0] if len(markers) == 1 else counts
      return {"moe": {"router": {"counts": counts, "histogram": np.zeros(3)}}}

    scanned = {
        "layer_1": layer(1),
        "layers_2": {"layer_0": layer(2, 4), "layer_1": layer(3, 5)},
        "layers_6": {"layer_0": layer(6, 7, 8, 9)},
        "layer_10": layer(10),
    }
    unscanned = {
        f"layer_{i}": layer(i) for i in (10, 2, 1, 3, 4, 5, 6, 7, 8, 9)
    }
    for groups in (scanned, unscanned):
      counts = router.counts_by_layer({"decoder": groups})
      testing.assert_same(counts[:, 0], np.arange(1, 11))

  def test_the_names_are_those_of_the_models_groups(self):
    model = dataclasses.replace(
        tiny_run.TEXT_MODEL, num_layers=3, num_dense_layers=1, mla_every=1,
        scan_layers=True,
    )  # fmt: skip
    variables = nn.unbox(state_lib.abstract_variables(model))
    self.assertIn("layers_1", variables["router_state"]["decoder"])
    eval_step = step_lib.make_eval_step(config_lib.RunConfig(model=model))
    sums = jax.eval_shape(eval_step, variables, _text_batch())
    self.assertEqual(sums["counts"].shape, (2, 8))  # MoE layers, experts


if __name__ == "__main__":
  absltest.main()
