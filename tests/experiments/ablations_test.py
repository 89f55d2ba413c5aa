"""The ablations measure the library's own rules and residuals."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.ablations.balancing import measures
from experiments.ablations.balancing import rules
from experiments.ablations.balancing import simulation
from experiments.ablations.depth import model as depth_model
from sparsemm_jax import config as config_lib
from sparsemm_jax import models
from sparsemm_jax.training import losses
from sparsemm_jax.training import state as state_lib
from sparsemm_jax.training import step as step_lib
from tests import testing
from tests import tiny_run


class BalancingTest(parameterized.TestCase):

  def test_quantile_alone_balances_the_stream_within_three_steps(self):
    counts = simulation.simulate(
        simulation.RULES,
        0,
        steps=4,
        num_experts=32,
        num_experts_per_token=4,
        tokens=4096,
    )
    floor = measures.sampling_floor(32, 4096 * 4 / 32)
    for rule, loads in counts.items():
      np.testing.assert_array_equal(loads.sum(-1), 4096 * 4)
      last = measures.max_violations(loads)[-1]
      if rule == "quantile":
        self.assertLess(last, 2 * floor)
      else:
        self.assertGreater(last, 10 * floor)

  def test_a_member_step_is_the_library_step_of_its_rule(self):
    compared = ("quantile", "sign 1e-2")
    configs = [tiny_run.text_config(rules.RULES[rule]) for rule in compared]
    first = jax.jit(lambda: state_lib.init_state(configs[0]))()
    step = jax.jit(rules.make_train_step(configs))
    own = jax.jit(step_lib.make_train_step(configs[1]))
    actual = expected = first
    for batch in tiny_run.batches(configs[0], 2):
      actual, metrics = step(actual, batch, 1)
      expected, _ = own(expected, batch)
    jax.tree.map(
        lambda a, b: testing.assert_close(a, b, "fp32 gradient"),
        (actual.params, actual.router_state),
        (expected.params, expected.router_state),
    )
    tokens = np.sum(batch["segment_ids"] > 0)
    np.testing.assert_array_equal(metrics["counts"].sum(-1), [2 * tokens])
    # The other rule counts the same and moves the bias elsewhere.
    other, _ = step(first, batch, 0)
    (bias,) = jax.tree.leaves(actual.router_state)
    (other_bias,) = jax.tree.leaves(other.router_state)
    self.assertGreater(float(jnp.linalg.norm(bias - other_bias)), 1e-3)

  def test_measures_of_a_run(self):
    counts = np.zeros((measures.DEAD_WINDOW + 5, 2, 3), int)  # layers, E
    counts[:, 0] = (3, 0, 0)
    counts[:, 1] = (1, 1, 1)
    counts[2, 0] = (1, 1, 1)  # too long ago to count as alive
    np.testing.assert_array_equal(measures.dead_experts(counts), [2, 0])
    violation = measures.max_violations(counts)
    np.testing.assert_array_equal(violation[:3, 0], [2, 2, 0])
    self.assertEqual(measures.first_below(violation[:, 0], 0.5), 2)
    self.assertIsNone(measures.first_below(violation[3:, 0], 0.5))
    # The mean of 2, 2, 0, 2 is the first of four steps within 1.5.
    self.assertEqual(measures.first_below(violation[:, 0], 1.5, window=4), 3)
    self.assertIsNone(measures.first_below(violation[:3, 0], 9, window=4))


class DepthModelTest(parameterized.TestCase):

  CONFIG = config_lib.ModelConfig(
      vocab_size=31, d_model=16, num_layers=4, num_dense_layers=4, mla_every=1,
      dense_hidden_dim=24, attn_res_block_size=4,
      mla=config_lib.MlaConfig(
          num_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8,
          qk_rope_head_dim=4, v_head_dim=8, rope_theta=1e4,
      ),
  )  # fmt: skip

  @parameterized.parameters(0, 3)
  def test_loss_and_gradients_are_those_of_the_library_model(self, size):
    config = self.CONFIG
    params = self._params()
    rng = np.random.default_rng(1)
    batch = {
        "tokens": rng.integers(0, 31, (2, 8)),
        "targets": rng.integers(0, 31, (2, 8)),
        "segment_ids": np.repeat([[1, 2], [1, 0]], 4, axis=1),
        "loss_mask": np.repeat([[True, True], [True, False]], 4, axis=1),
    }
    own = depth_model.make_loss(config, 3)
    starts = depth_model.starts(4, size)
    actual = jax.jit(jax.value_and_grad(own, has_aux=True))(
        params, batch, starts
    )
    library = models.SparseMultimodalModel(
        dataclasses.replace(config, attn_res_block_size=size or None)
    )

    def loss(params):
      output = library.apply(
          {"params": _regroup(params, size)},
          batch["tokens"],
          segment_ids=batch["segment_ids"],
      )
      nats, _ = losses.next_token_losses(output.logits, batch["targets"])
      mask = batch["loss_mask"]
      return jnp.sum(jnp.where(mask, nats, 0.0)) / jnp.sum(mask)

    expected = jax.jit(jax.value_and_grad(loss))(params)
    testing.assert_close(actual[0][0], expected[0], "fp32")
    jax.tree.map(
        lambda a, b: testing.assert_close(a, b, "fp32 gradient"),
        actual[1],
        expected[1],
    )

  def test_weights_cover_the_filled_bank_and_the_sum(self):
    config = self.CONFIG
    tokens = np.arange(8)[None]
    _, depth = jax.jit(
        lambda params, starts: depth_model.apply(
            config, params, tokens, np.ones_like(tokens), starts, rows=4
        )
    )(self._params(), depth_model.starts(4, 2))
    np.testing.assert_allclose(depth.weights.sum(-1), 1.0, rtol=1e-6)
    # Before block 1 nothing but the embedding, after it its sum as well.
    np.testing.assert_array_equal(depth.weights[0], [1, 0, 0, 0, 0])
    self.assertTrue(np.all(depth.weights[1, [0, 4]] > 0))
    self.assertTrue(np.all(depth.weights[-1, [0, 1, 4]] > 0))
    np.testing.assert_array_equal(depth.weights[-1, 2:4], 0)

  def _params(self):
    shapes = jax.eval_shape(
        lambda: state_lib.init_variables(self.CONFIG, jax.random.key(0))
    )["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.float32(rng.normal(0, 0.3, leaf.shape)),
        nn.unbox(shapes),
    )


def _regroup(params, size):
  """Cuts the stack of layers as the library does for this block size."""
  decoder = dict(params["decoder"])
  stacked = decoder.pop("layers_0")["layer_0"]
  if not size:
    del decoder["output_res"]
    stacked = {k: v for k, v in stacked.items() if not k.endswith("_res")}
    decoder["layers_0"] = {"layer_0": stacked}
  for start in range(0, 4, size) if size else ():
    part = jax.tree.map(lambda x, s=start: x[s : s + size], stacked)
    if jax.tree.leaves(part)[0].shape[0] == 1:
      decoder[f"layer_{start}"] = jax.tree.map(lambda x: x[0], part)
    else:
      decoder[f"layers_{start}"] = {"layer_0": part}
  return {**params, "decoder": decoder}


if __name__ == "__main__":
  absltest.main()
