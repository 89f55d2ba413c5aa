"""Attention residuals start as the ordinary residual stream."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.extend
import jax.numpy as jnp

from sparsemm_jax import models
from sparsemm_jax.layers import attn_res
from tests import testing
from tests.models import model_test
from tests.models import small_model


class TwinTest(parameterized.TestCase):

  # The mix is smaller by the number of sources: only eps can tell.
  CHANGES = {"norm_eps": 1e-12}

  @parameterized.parameters(1, 2)
  def test_zero_queries_give_the_loss_and_gradients_of_the_twin(self, size):
    changes = {
        **self.CHANGES, "num_layers": 3, "mla_every": 1, "num_dense_layers": 3,
    }  # fmt: skip
    config = small_model.config(**changes, attn_res_block_size=size)
    twin = small_model.config(**changes, attn_res_block_size=None)
    tokens = small_model.tokens(1, 16)
    params = small_model.variables(twin)["params"]
    expected = model_test.loss_and_gradients(twin, params, {}, tokens)
    merged = self._with_zero_queries(
        small_model.variables(config)["params"], params
    )
    actual = model_test.loss_and_gradients(config, merged, {}, tokens)
    testing.assert_close(actual[0], expected[0], "fp32")
    model_test.assert_trees_close(actual[1], expected[1], "fp32 gradient")
    # Training starts from there: the queries do have a gradient.
    query = actual[1]["decoder"]["output_res"]["pseudo_query"]
    self.assertGreater(float(jnp.linalg.norm(query)), 0.0)

  def test_zero_queries_give_the_logits_of_the_twin_with_kda_and_experts(self):
    config = small_model.config(**self.CHANGES)
    twin = small_model.config(**self.CHANGES, attn_res_block_size=None)
    tokens = small_model.tokens(1, 16)
    variables = small_model.variables(twin)
    expected = small_model.apply(twin, tokens).logits
    merged = self._with_zero_queries(
        small_model.variables(config)["params"], variables["params"]
    )
    model = models.SparseMultimodalModel(config)
    actual = jax.jit(model.apply)({**variables, "params": merged}, tokens)
    testing.assert_close(actual.logits, expected, "fp32")

  def _with_zero_queries(self, own, shared):
    flat = dict(jax.tree_util.tree_leaves_with_path(shared))

    def pick(path, leaf):
      if path in flat:
        return flat[path]
      self.assertIn("_res']", jax.tree_util.keystr(path))
      is_query = "pseudo_query" in jax.tree_util.keystr(path)
      return jnp.zeros_like(leaf) if is_query else leaf

    return jax.tree_util.tree_map_with_path(pick, own)


class TwoPhaseTest(parameterized.TestCase):

  # Two groups of two scanned layers, with one and with two sources.
  CHANGES = {
      "num_layers": 4, "mla_every": 1, "num_dense_layers": 4,
      "attn_res_block_size": 2, "scan_layers": True,
  }  # fmt: skip

  def _loss_and_gradients(self, two_phases, remat):
    config = small_model.config(**self.CHANGES, remat=remat)
    params = small_model.variables(config)["params"]
    tokens = small_model.tokens(1, 16)
    choose = mock.patch.object(
        attn_res, "use_two_phases", return_value=two_phases
    )
    with choose as chosen:
      result = model_test.loss_and_gradients(config, params, {}, tokens)
    self.assertEqual(chosen.call_count, 2)
    return result

  @parameterized.parameters("none", "full")
  def test_two_phases_give_the_loss_and_gradients_of_one(self, remat):
    expected = self._loss_and_gradients(False, "none")
    actual = self._loss_and_gradients(True, remat)
    testing.assert_close(actual[0], expected[0], "fp32")
    model_test.assert_trees_close(actual[1], expected[1], "fp32 gradient")

  def test_rematerialisation_keeps_block_inputs_but_no_partial_mix(self):
    config = small_model.config(**self.CHANGES, remat="full")
    variables = small_model.variables(config)
    tokens = small_model.tokens(1, 16)
    model = models.SparseMultimodalModel(config)

    def pullback(params):
      apply = lambda p: model.apply({**variables, "params": p}, tokens).logits
      return jax.vjp(apply, params)[1]

    with mock.patch.object(attn_res, "use_two_phases", return_value=True):
      kept = jax.eval_shape(pullback, variables["params"])
    stacks = [x for x in jax.tree.leaves(kept) if x.shape == (2, 1, 16, 32)]
    self.assertLen(stacks, 2)  # groups

  def test_no_mask_is_made_before_the_scan_of_rematerialised_blocks(self):
    config = small_model.config(**self.CHANGES, remat="full")
    variables = small_model.variables(config)
    model = models.SparseMultimodalModel(config)
    tokens = small_model.tokens(1, 16)

    def loss(params):
      out = model.apply({**variables, "params": params}, tokens)
      return jnp.sum(out.logits)

    def scans(jaxpr):
      for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
          yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
          yield from scans(inner)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(variables["params"]).jaxpr
    given = [v.aval.shape for eqn in scans(jaxpr) for v in eqn.invars]
    self.assertIn((1, 16, 32), given)  # the running sum
    self.assertEmpty([s for s in given if s[:1] == (1,) and s[-2:] == (16, 16)])


if __name__ == "__main__":
  absltest.main()
