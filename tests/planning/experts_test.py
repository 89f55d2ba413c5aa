"""Plans of experts: published numbers, hard limits, sums that must agree."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from sparsemm_jax import balancing
from sparsemm_jax import planning
from sparsemm_jax.models import presets

K3 = planning.Budget(
    total=2.78e12,
    active=1.04e11,
    memory_gib=141,
    bandwidth_gb=400,
    tokens_per_step=2**26,
    devices=1024,
)
_plan = functools.cache(planning.plan_experts)


def _changed(**changes):
  return _plan(dataclasses.replace(K3, **changes))


class K3Test(absltest.TestCase):

  def test_its_budgets_give_its_experts(self):
    k3 = presets.get_preset("k3_text")
    model = _plan(K3).model
    for name in ("d_model", "num_layers", "dense_hidden_dim"):
      self.assertEqual(getattr(model, name), getattr(k3, name), name)
    for name in (
        "num_experts", "num_experts_per_token", "latent_dim",
        "expert_hidden_dim", "num_shared_experts",
    ):  # fmt: skip
      self.assertEqual(getattr(model.moe, name), getattr(k3.moe, name), name)
    self.assertEqual(_plan(K3).count, planning.count_parameters(k3))

  def test_the_exchange_is_what_each_rank_receives(self):
    exchange = _plan(K3).exchange
    self.assertEqual(K3.devices % exchange.ranks, 0)
    self.assertEqual(896 % exchange.ranks, 0)
    self.assertEqual(exchange.rows, 8192 * 16)
    elsewhere = 1 - 1 / exchange.ranks
    self.assertAlmostEqual(
        exchange.token_bytes, 2 * 131072 * 3584 * 2 * elsewhere, delta=1
    )
    self.assertAlmostEqual(
        exchange.seconds,
        (2 * exchange.token_bytes + exchange.weight_bytes) / 400e9,
    )

  def test_the_floors_are_those_of_simulations(self):
    # Of one device's 32,768 tokens on 8 ranks.
    plan = _changed(tokens_per_step=32768, devices=512)
    self.assertAlmostEqual(plan.sampling_floor, 0.152, places=3)
    self.assertEqual(plan.model.moe.balancing, "quantile")
    few = _changed(tokens_per_step=2048, devices=512)
    self.assertEqual(few.model.moe.balancing, "quantile_pooled")

  def test_the_planned_rows_hold_a_stream_once_it_is_balanced(self):
    tokens, experts, ranks = 4096, 896, 8  # all tokens of one exchange
    plan = _changed(devices=1000, tokens_per_step=1000 * tokens / ranks)
    self.assertEqual(plan.exchange.ranks, ranks)
    self.assertEqual(plan.exchange.rows, tokens * 16 / ranks)
    popular = 1.5 * np.random.default_rng(0).normal(size=experts)

    @jax.jit
    def step(logits, bias):
      scores = jax.nn.sigmoid(logits)
      routing = balancing.route(scores, bias, 16)
      histogram = balancing.margin_histogram(scores, routing.cutoff, bias)
      new = balancing.quantile_bias(histogram, bias, num_experts_per_token=16)
      return balancing.expert_counts(routing.expert_indices, experts), new

    bias, needed = np.zeros(experts, np.float32), []
    for seed in range(7):
      noise = np.random.default_rng(1 + seed).normal(size=(tokens, experts))
      counts, bias = step(np.float32(popular + noise), bias)
      rows = np.asarray(counts).reshape(ranks, -1).sum(axis=1)
      needed.append(rows.max() / rows.mean())
    self.assertGreater(needed[0], plan.model.moe.row_budget)
    self.assertLess(max(needed[3:]), plan.model.moe.row_budget)
    # What is expected by chance is what is seen, within its own scatter.
    self.assertBetween(
        np.mean(needed[3:]) - 1,
        plan.exchange.overload / 2,
        2 * plan.exchange.overload,
    )

  def test_every_choice_has_a_reason(self):
    lines = _plan(K3).lines()
    names = [name for name, _, _ in lines]
    self.assertContainsSubset(
        ("experts", "experts per token", "latent width", "expert width",
         "shared experts", "expert ranks", "rows per rank", "max violation",
         "dispatch and combine", "time on the wire", "router"),
        names,
    )  # fmt: skip
    for name, value, reason in lines:
      self.assertGreater(len(reason), 10, name)
      self.assertNotEmpty(value, name)

  def test_ranks_below_the_visits_gather(self):
    exchange = _changed(devices=8 * 125).exchange
    self.assertEqual((exchange.ranks, exchange.form), (8, "gather"))
    # z in bf16, indices and weights there, fp32 sums back.
    expected = 7 * 8192 * (3584 * 2 + 16 * 8 + 3584 * 4)
    self.assertEqual(exchange.token_bytes, expected)


class BudgetTest(parameterized.TestCase):

  @parameterized.parameters(
      (1e10, 1e9, 32000), (1e11, 5e9, 163840), (1e12, 3.2e10, 163840)
  )
  def test_other_budgets_are_met(self, total, active, vocab_size):
    plan = _changed(total=total, active=active, vocab_size=vocab_size)
    for asked, actual in (
        (total, plan.count.total),
        (active, plan.count.active),
    ):
      self.assertLess(abs(actual / asked - 1), 0.05)
    self.assertEqual(plan.count, planning.count_parameters(plan.model))

  @parameterized.named_parameters(
      ("dense", dict(active=3e12), "total=2.78e[+]12 is not above active=3e"),
      ("tiny_active", dict(active=1e7), "active=1e[+]07 is too small: the out"),
      (
          "few_experts",
          dict(total=1.05e11),
          "holds 17 experts a layer, of which active",
      ),
      (
          "no_ratio",
          dict(total=1e13, active=1e9),
          "active=1e[+]09 cannot be met",
      ),
      (
          "memory",
          dict(devices=8),
          "3883 GiB on each of 8 devices.*at least 221",
      ),
      ("few_ranks", dict(devices=300), "46 GiB on the 4 ranks that divide"),
      ("tokens", dict(tokens_per_step=20), "at least 56 tokens are needed"),
      ("negative", dict(memory_gib=-1), "memory_gib=-1 must be positive"),
  )
  def test_the_impossible_is_refused_with_the_reason(self, changes, message):
    with self.assertRaisesRegex(planning.PlanError, message):
      _changed(**changes)


if __name__ == "__main__":
  absltest.main()
