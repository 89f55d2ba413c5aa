"""Latent experts."""

import dataclasses
import functools
from unittest import mock

from absl.testing import absltest
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import balancing
from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.layers import moe
from tests import testing
from tests.models import small_model

CONFIG = small_model.config(norm_eps=1e-12)


def _situ_glu(gate, up):
  return 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)


_apply = jax.jit(moe.LatentMoE(CONFIG).apply)


@functools.cache
def _params():
  """A layer's parameters, larger than at initialisation."""
  x = jnp.zeros((1, 1, CONFIG.d_model))
  layout = layout_lib.packed(jnp.ones((1, 1), jnp.int32))
  shapes = jax.eval_shape(
      lambda: nn.unbox(moe.LatentMoE(CONFIG).init(jax.random.key(1), x, layout))
  )
  rng = np.random.default_rng(1)
  return jax.tree.map(
      lambda leaf: jnp.float32(rng.normal(0, 0.2, leaf.shape)), shapes["params"]
  )


def _mlp(params, x):
  kernel = lambda name: np.asarray(params[name]["kernel"], np.float64)
  hidden = _situ_glu(x @ kernel("gate_proj"), x @ kernel("up_proj"))
  return hidden @ kernel("down_proj")


class LatentMoETest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.x = jax.random.normal(jax.random.key(0), (2, 7, CONFIG.d_model))
    self.layout = layout_lib.packed(jnp.ones((2, 7), jnp.int32))
    self.module = moe.LatentMoE(CONFIG)
    self.params = _params()
    bias = 0.1 * jax.random.normal(jax.random.key(2), (6,))
    self.state = {"router": {"bias": bias}}

  def _apply(self, params=None, state=None, x=None, apply=None):
    apply = apply or _apply
    variables = {
        "params": params or self.params, "router_state": state or self.state,
    }  # fmt: skip
    return apply(variables, self.x if x is None else x, self.layout)

  def test_matches_a_loop_over_tokens_in_float64(self):
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), self.params)
    bias = np.asarray(self.state["router"]["bias"], np.float64)
    tokens = np.asarray(self.x, np.float64).reshape(-1, CONFIG.d_model)
    expected = []
    for x in tokens:
      scores = 1 / (1 + np.exp(-x @ params["router"]["kernel"]))
      chosen = np.argsort(-(scores + bias))[:2]
      z = x @ params["latent_down"]["kernel"]
      u = 0.0
      for expert in chosen:
        own = jax.tree.map(lambda w, e=expert: w[e], params["experts"])
        u += scores[expert] / scores[chosen].sum() * _mlp(own, z)
      u *= params["latent_norm"]["scale"] / np.sqrt(np.mean(u**2) + 1e-12)
      up = u @ params["latent_up"]["kernel"]
      expected.append(up + _mlp(params["shared"], x))
    actual = self._apply().reshape(tokens.shape)
    testing.assert_close(actual, np.stack(expected), "float64 oracle, fp32")

  def test_the_norm_removes_the_scale_of_the_combine_weights(self):
    route = balancing.route

    def doubled(*args):
      routing = route(*args)
      return routing._replace(combine_weights=2 * routing.combine_weights)

    expected = self._apply()
    with mock.patch.object(balancing, "route", doubled):
      actual = self._apply(apply=jax.jit(self.module.apply))
    testing.assert_close(actual, expected, "fp32")

  def test_the_order_of_experts_does_not_matter(self):
    order = np.array([3, 0, 5, 1, 4, 2])
    params = {
        **self.params,
        "experts": jax.tree.map(lambda w: w[order], self.params["experts"]),
        "router": {"kernel": self.params["router"]["kernel"][:, order]},
    }
    state = {"router": {"bias": self.state["router"]["bias"][order]}}
    testing.assert_close(self._apply(params, state), self._apply(), "fp32")

  def test_tokens_do_not_see_each_other(self):
    changed = self.x.at[0, 3].add(1.0)
    before, after = self._apply(), self._apply(x=changed)
    same = np.ones((2, 7), bool)
    same[0, 3] = False
    testing.assert_close(after[same], before[same], "append fp32")

  def test_all_tokens_may_visit_the_same_experts(self):
    state = {"router": {"bias": jnp.float32([9, 0, 0, 0, 0, 9])}}
    apply = functools.partial(self.module.apply, mutable=["router_stats"])
    variables = {"params": self.params, "router_state": state}
    _, stats = jax.jit(apply)(variables, self.x, self.layout)
    np.testing.assert_array_equal(
        stats["router_stats"]["router"]["counts"], [[14, 0, 0, 0, 0, 14]]
    )

  def test_the_bias_gets_no_gradient_and_is_not_written(self):
    def loss(state):
      out, changed = self.module.apply(
          {"params": self.params, "router_state": state},
          self.x, self.layout, mutable=["router_state"],
      )  # fmt: skip
      return jnp.sum(out**2), changed["router_state"]

    gradient, state = jax.jit(jax.grad(loss, has_aux=True))(self.state)
    testing.assert_same(gradient["router"]["bias"], np.zeros(6))
    testing.assert_same(state["router"]["bias"], self.state["router"]["bias"])

  def test_a_price_needs_the_whole_document(self):
    config = small_model.config(
        moe=dataclasses.replace(CONFIG.moe, balancing="sequence_quantile")
    )
    apply = functools.partial(
        jax.eval_shape, moe.LatentMoE(config).apply,
        {"params": self.params, "router_state": self.state}, self.x,
    )  # fmt: skip
    apply(self.layout)
    decode = self.layout._replace(lengths=jnp.zeros(2, jnp.int32))
    with self.assertRaisesRegex(config_lib.ConfigError, "cache of decode"):
      apply(decode)

  def test_scores_are_fp32_under_bf16_compute(self):
    low = moe.LatentMoE(small_model.config(dtype="bfloat16"))
    seen = []
    route = balancing.route

    def spy(scores, *args):
      seen.append(scores.dtype)
      return route(scores, *args)

    with mock.patch.object(balancing, "route", spy):
      jax.eval_shape(
          low.apply,
          {"params": self.params, "router_state": self.state},
          self.x.astype(jnp.bfloat16), self.layout,
      )  # fmt: skip
    self.assertEqual(seen, [jnp.float32])


if __name__ == "__main__":
  absltest.main()
