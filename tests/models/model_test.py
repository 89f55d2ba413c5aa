"""Properties of the whole model on text."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax import models
from tests import testing
from tests.models import small_model

LENGTH = 24


def loss_and_gradients(config, params, router_state, tokens):
  model = models.SparseMultimodalModel(config)

  def loss(params):
    logits = model.apply(
        {"params": params, "router_state": router_state}, tokens
    ).logits
    picked = jnp.take_along_axis(
        jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1
    )
    return -jnp.mean(picked)

  return jax.jit(jax.value_and_grad(loss))(params)


def lone_mla(rope_theta):
  """One dense MLA layer."""
  mla = {**vars(small_model.BASE.mla), "rope_theta": rope_theta}
  return small_model.config(
      num_layers=1, mla_every=1, mla=config_lib.MlaConfig(**mla)
  )


def assert_trees_close(actual, expected, kind):
  """Every leaf of expected is in actual and close to it."""
  flat = dict(jax.tree_util.tree_leaves_with_path(actual))
  for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
    name = jax.tree_util.keystr(path)
    testing.assert_close(flat[path], leaf, kind, name)


class ModelTest(parameterized.TestCase):

  def test_logits_are_fp32_and_parameters_keep_their_dtype(self):
    config = small_model.config(dtype="bfloat16")
    model = models.SparseMultimodalModel(config)
    tokens = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    self.assertEqual(set(variables), {"params", "router_state"})
    for leaf in jax.tree.leaves(variables):
      self.assertEqual(leaf.dtype, jnp.float32)
    out = jax.eval_shape(model.apply, variables, tokens)
    self.assertEqual(out.logits.dtype, jnp.float32)
    self.assertEqual(out.logits.shape, (2, LENGTH, config.vocab_size))
    self.assertEqual(out.hidden.dtype, jnp.bfloat16)
    self.assertEqual(out.hidden.shape, (2, LENGTH, config.d_model))
    self.assertIsNone(out.cache)

  def test_bf16_computes_what_fp32_computes(self):
    # One dense KDA and one dense MLA layer: no routing decision to flip.
    changes = {"num_layers": 2, "num_dense_layers": 2}
    config = small_model.config(**changes)
    tokens = small_model.tokens(2, LENGTH)
    expected = small_model.apply(config, tokens).logits
    low = small_model.config(**changes, dtype="bfloat16")
    actual = jax.jit(models.SparseMultimodalModel(low).apply)(
        small_model.variables(config), tokens
    ).logits
    # Rounding to 8 bits at each of some twenty products: 2^-9 sqrt(20) each.
    self.assertLess(testing.rms_error(actual, expected), 0.03)

  def test_later_tokens_change_no_earlier_logit(self):
    tokens = small_model.tokens(2, LENGTH)
    ids = np.ones_like(tokens)
    changed = tokens.copy()
    changed[:, 15:] = (changed[:, 15:] + 7) % 60
    before = small_model.apply(small_model.BASE, tokens, ids).logits
    after = small_model.apply(small_model.BASE, changed, ids).logits
    testing.assert_same(after[:, :15], before[:, :15])
    self.assertFalse(np.array_equal(after[:, 15], before[:, 15]))

  @parameterized.parameters("base", "rope")
  def test_packed_documents_equal_separate_ones(self, name):
    config = small_model.BASE if name == "base" else lone_mla(10000.0)
    tokens = small_model.tokens(2, LENGTH)
    segments = np.repeat([[1, 2, 3]], [9, 11, 4], axis=1).astype(np.int32)
    segments = np.tile(segments, (2, 1))
    packed = small_model.apply(config, tokens, segments).logits[0]
    for start, stop in (0, 9), (9, 20), (20, 24):
      # At the row's beginning and padded to one shape: one compiled program.
      row = np.zeros_like(tokens)
      row[0, : stop - start] = tokens[0, start:stop]
      ids = (np.arange(LENGTH) < stop - start).astype(np.int32)
      ids = np.tile(ids, (2, 1))
      alone = small_model.apply(config, row, ids).logits[0]
      testing.assert_close(
          packed[start:stop], alone[: stop - start], "append fp32"
      )

  def test_padding_tokens_change_no_other_logit(self):
    tokens = small_model.tokens(2, LENGTH)
    segments = np.ones_like(tokens)
    segments[0, 17:] = 0
    segments[1, :] = 0
    changed = np.where(segments == 0, (tokens + 3) % 60, tokens)
    first = small_model.apply(small_model.BASE, tokens, segments).logits
    second = small_model.apply(small_model.BASE, changed, segments).logits
    testing.assert_same(first[0, :17], second[0, :17])
    self.assertTrue(np.isfinite(np.asarray(first)).all())

  def test_positions_matter_only_with_rope(self):
    # In a lone MLA layer nothing but RoPE tells the order of the tokens.
    def last_logits(rope_theta):
      config = lone_mla(rope_theta)
      tokens = small_model.tokens(2, LENGTH)
      swapped = tokens.copy()
      swapped[0, [3, 9]] = tokens[0, [9, 3]]
      ids = np.ones_like(tokens)
      assert tokens[0, 3] != tokens[0, 9]
      return [
          np.asarray(small_model.apply(config, x, ids).logits[0, -1])
          for x in (tokens, swapped)
      ]

    testing.assert_close(*last_logits(None), "append fp32")
    plain, swapped = last_logits(10000.0)
    self.assertGreater(testing.rms_error(swapped, plain), 1e-3)

  @parameterized.parameters("dots", "full")
  def test_rematerialisation_changes_nothing(self, remat):
    # One KDA layer with experts.
    changes = {"num_layers": 1, "num_dense_layers": 0, "last_is_mla": False}
    plain = small_model.config(**changes)
    variables = small_model.variables(plain)
    args = variables["params"], variables["router_state"]
    args += (small_model.tokens(1, LENGTH),)
    actual = loss_and_gradients(
        small_model.config(**changes, remat=remat), *args
    )
    expected = loss_and_gradients(plain, *args)
    assert_trees_close(actual, expected, "fp32 gradient")

  def test_gradients_reach_every_parameter(self):
    config = small_model.config(num_layers=2, attn_res_block_size=1)
    variables = small_model.variables(config)
    _, gradients = loss_and_gradients(
        config, variables["params"], variables["router_state"],
        small_model.tokens(1, LENGTH),
    )  # fmt: skip
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
      name = jax.tree_util.keystr(path)
      self.assertTrue(np.isfinite(np.asarray(leaf)).all(), name)
      # Before the first layer there is one source only: nothing to weigh.
      if "layer_0']['attn_res" not in name:
        self.assertGreater(np.linalg.norm(leaf), 0.0, name)


class ScanTest(absltest.TestCase):
  """Layers that share one compiled body equal layers that do not."""

  def test_scanned_logits_and_stats_equal_unrolled_ones(self):
    # Two passes over (KDA, MLA), then an MLA layer alone.
    changes = {"num_layers": 5, "num_dense_layers": 0, "attn_res_block_size": 4}
    plain = small_model.config(**changes)
    scanned = small_model.config(**changes, scan_layers=True)
    tokens = small_model.tokens(1, LENGTH)
    variables = small_model.variables(plain)
    stacked = {
        name: {**tree, "decoder": self._stack(tree["decoder"])}
        for name, tree in variables.items()
    }
    shapes = jax.tree.map(jnp.shape, small_model.variables(scanned))
    self.assertEqual(jax.tree.map(jnp.shape, stacked), shapes)

    out, stats = small_model.apply_with_stats(plain, tokens)
    model = models.SparseMultimodalModel(scanned)
    apply = functools.partial(model.apply, mutable=list(stats))
    actual_out, actual_stats = jax.jit(apply)(stacked, tokens)
    testing.assert_close(actual_out.logits, out.logits, "fp32")
    for name in "router_stats", "attention_stats":
      expected = self._stack(stats[name]["decoder"])
      assert_trees_close(actual_stats[name]["decoder"], expected, "fp32")
    # The first layer of the residual block has no prefix to weigh.
    weights = actual_stats["depth_stats"]["decoder"]["layers_0"]["layer_0"]
    weights = np.asarray(weights["attn_res"]["weights"])
    self.assertEqual(weights.shape, (2, 2))
    self.assertEqual(weights[0, 1], 0.0)
    self.assertGreater(weights[1, 1], 0.0)

  def _stack(self, decoder):
    """Plain layers in the scanned layout; a layer may have nothing."""
    decoder = dict(decoder)
    layers = [decoder.pop(f"layer_{i}", {}) for i in range(4)]
    stack = lambda *leaves: jnp.stack(leaves)
    pattern = {
        "layer_0": jax.tree.map(stack, layers[0], layers[2]),
        "layer_1": jax.tree.map(stack, layers[1], layers[3]),
    }
    decoder["layers_0"] = {name: x for name, x in pattern.items() if x}
    return decoder

  def test_scanned_gradients_equal_unrolled_ones(self):
    # Where the first layer has no prefix yet: nothing may flow into it.
    changes = {
        "num_layers": 4, "num_dense_layers": 4, "mla_every": 1,
        "attn_res_block_size": 2,
    }  # fmt: skip
    plain = small_model.config(**changes)
    scanned = small_model.config(**changes, scan_layers=True)
    tokens = small_model.tokens(1, LENGTH)
    params = small_model.variables(plain)["params"]

    def stack(params):
      decoder = dict(params["decoder"])
      layers = [decoder.pop(f"layer_{i}") for i in range(4)]
      for start in 0, 2:
        pair = layers[start : start + 2]
        pair = jax.tree.map(lambda *x: jnp.stack(x), *pair)
        decoder[f"layers_{start}"] = {"layer_0": pair}
      return {**params, "decoder": decoder}

    loss, gradients = loss_and_gradients(plain, params, {}, tokens)
    actual = loss_and_gradients(scanned, stack(params), {}, tokens)
    testing.assert_close(actual[0], loss, "fp32")
    assert_trees_close(actual[1], stack(gradients), "fp32 gradient")


class StatsTest(absltest.TestCase):

  def test_stats_sit_beside_the_state_they_update(self):
    tokens = small_model.tokens(2, LENGTH)
    segments = np.ones_like(tokens)
    segments[1, 10:] = 0
    config = small_model.config(num_layers=2)
    _, stats = small_model.apply_with_stats(config, tokens, segments)
    decoder = stats["router_stats"]["decoder"]
    state = small_model.variables(config)["router_state"]["decoder"]
    self.assertEqual(set(decoder), set(state))
    for layer in decoder.values():
      router = layer["moe"]["router"]
      self.assertEqual(router["counts"].dtype, jnp.int32)
      self.assertEqual(router["counts"].shape, (1, 6))  # of one shard
      # 34 tokens that are not padding, two experts each, none dropped.
      self.assertEqual(np.sum(router["counts"]), 2 * 34)
      testing.assert_same(layer["moe"]["dropped"], np.zeros(1))
      self.assertEqual(router["histogram"].shape, (1, 6, 50))
      np.testing.assert_array_equal(
          np.sum(router["histogram"], axis=2), np.full((1, 6), 34)
      )
    attention = stats["attention_stats"]["decoder"]
    self.assertEqual(set(attention), {"layer_1"})
    for layer in attention.values():
      self.assertEqual(layer["attn"]["max_logit"].shape, (2,))
    for path, leaf in jax.tree_util.tree_leaves_with_path(stats["depth_stats"]):
      self.assertAlmostEqual(float(np.sum(leaf)), 1.0, 5, str(path))

  def test_nothing_is_sown_unless_asked_for(self):
    model = models.SparseMultimodalModel(small_model.BASE)
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    apply = functools.partial(model.apply, mutable=["attention_stats"])
    _, sown = jax.eval_shape(apply, variables, tokens)
    self.assertEqual(set(sown), {"attention_stats"})

  def test_each_balancing_rule_gets_its_own_statistics(self):
    names = {
        "quantile": {"counts", "histogram"},
        "quantile_pooled": {"counts", "histogram"},
        "sequence_quantile": {"counts", "histogram"},
        "sign": {"counts"},
        "switch_loss": {"counts", "switch_loss"},
        "none": {"counts"},
    }
    for balancing, expected in names.items():
      moe = {**vars(small_model.BASE.moe), "balancing": balancing}
      config = small_model.config(num_layers=2, moe=config_lib.MoeConfig(**moe))
      model = models.SparseMultimodalModel(config)
      tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
      variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
      apply = functools.partial(model.apply, mutable=["router_stats"])
      _, sown = jax.eval_shape(apply, variables, tokens)
      router = sown["router_stats"]["decoder"]["layer_1"]["moe"]["router"]
      self.assertEqual(set(router), expected)


if __name__ == "__main__":
  absltest.main()
