"""Routing and balancing: golden numbers, edge cases, exactness."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import balancing
from tests import testing

_route = jax.jit(balancing.route, static_argnums=2)
_histogram = jax.jit(balancing.margin_histogram, static_argnames="num_bins")
_quantile = jax.jit(
    balancing.quantile_bias, static_argnames="num_experts_per_token"
)
_counts = jax.jit(balancing.expert_counts, static_argnums=1)


def _golden_scores(tokens, experts, slope):
  i, j = np.mgrid[:tokens, :experts]
  logits = np.sin(3 * i + 5 * j) + slope * ((experts - 1) / 2 - j)
  return 1.0 / (1.0 + np.exp(-logits))


def _oracle_margins(scores, bias, k):
  """Loads and r_ij = cutoff_i - s_ij in float64."""
  biased = scores + bias
  order = np.argsort(-biased, axis=-1, kind="stable")
  cutoff = np.take_along_axis(biased, order[:, k : k + 1], axis=-1)
  loads = np.bincount(order[:, :k].ravel(), minlength=scores.shape[1])
  return loads, cutoff - scores, cutoff[:, 0]


def _step(scores, bias, k, num_bins=1000, token_mask=None):
  """One optimizer step's counts and next bias."""
  routing = _route(scores, bias, k)
  histogram = _histogram(
      scores, routing.cutoff, bias, num_bins=num_bins, token_mask=token_mask
  )
  counts = _counts(routing.expert_indices, scores.shape[1], token_mask)
  return counts, _quantile(histogram, bias, num_experts_per_token=k)


def _random_scores(tokens, experts, seed=0, spread=1.0):
  """Scores of experts with very different popularity."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(tokens, experts))
  offset = spread * np.random.default_rng(99).normal(size=experts)
  return (1.0 / (1.0 + np.exp(-logits - offset))).astype(np.float32)


class GoldenTest(parameterized.TestCase):
  """Two examples worked by hand."""

  @parameterized.parameters(
      (1000, (-0.096, -0.012, 0.116, 0.000667)),
      (16, (-0.09375, 0.0, 0.125, 0.041667)),
      # Fine bins reach the q-th smallest margin itself.
      (100_000, (-0.096625, -0.013952, 0.115766, 0.0)),
  )
  def test_histogram_bias(self, num_bins, uncentred):
    scores = _golden_scores(8, 4, 0.5).astype(np.float32)
    bias = np.zeros(4, np.float32)
    counts, new = _step(scores, bias, 1, num_bins)
    np.testing.assert_array_equal(counts, [5, 2, 0, 1])
    expected = np.array(uncentred) - np.mean(uncentred)
    atol = 2e-5 if num_bins > 1000 else 1e-6
    np.testing.assert_allclose(new, expected, atol=atol)

  def test_cutoffs(self):
    scores = _golden_scores(8, 4, 0.5).astype(np.float32)
    routing = _route(scores, np.zeros(4, np.float32), 1)
    np.testing.assert_allclose(
        routing.cutoff,
        [
            0.475093,
            0.709121,
            0.521650,
            0.761717,
            0.551412,
            0.761867,
            0.505226,
            0.733521,
        ],
        atol=1e-6,
    )

  @parameterized.parameters(
      (8, 4, 1, 0.5, (5, 2, 0, 1), (-0.108648, -0.014776, 0.138199, -0.014776)),
      (
          9,
          6,
          2,
          0.4,
          (7, 4, 2, 5, 0, 0),
          (-0.155947, -0.182762, -0.002493, -0.115939, 0.134771, 0.322370),
      ),
  )
  def test_exact_quantile_bias_and_the_histogram_within_a_bin(
      self, tokens, experts, k, slope, loads, exact
  ):
    scores = _golden_scores(tokens, experts, slope)
    oracle_loads, margins, _ = _oracle_margins(scores, 0.0, k)
    np.testing.assert_array_equal(oracle_loads, loads)
    # The published rule takes the (q+1)-th smallest, the histogram the q-th.
    q = tokens * k // experts
    ordered = np.sort(margins, axis=0)
    np.testing.assert_allclose(ordered[q] - ordered[q].mean(), exact, atol=1e-6)
    counts, new = _step(
        scores.astype(np.float32), np.zeros(experts, np.float32), k
    )
    np.testing.assert_array_equal(counts, loads)
    estimate = ordered[q - 1] - ordered[q - 1].mean()
    np.testing.assert_allclose(new, estimate, atol=2.0 / 1000)


class RouteTest(parameterized.TestCase):

  def test_ties_go_to_the_lower_index(self):
    scores = np.full((3, 8), 0.5, np.float32)
    scores[1, 6] = 0.75
    routing = _route(scores, np.zeros(8, np.float32), 3)
    np.testing.assert_array_equal(
        routing.expert_indices, [[0, 1, 2], [6, 0, 1], [0, 1, 2]]
    )
    np.testing.assert_array_equal(routing.cutoff, [0.5, 0.5, 0.5])

  def test_896_experts_top_16_equal_a_stable_sort(self):
    rng = np.random.default_rng(0)
    # Coarse values make ties common.
    scores = np.round(rng.uniform(size=(64, 896)), 2).astype(np.float32)
    bias = rng.normal(scale=0.1, size=896).astype(np.float32)
    routing = _route(scores, bias, 16)
    biased = scores + bias
    order = np.argsort(-biased, axis=-1, kind="stable")
    np.testing.assert_array_equal(routing.expert_indices, order[:, :16])
    np.testing.assert_array_equal(
        routing.cutoff, np.take_along_axis(biased, order[:, 16:17], -1)[:, 0]
    )
    selected = np.take_along_axis(scores, order[:, :16], -1)
    testing.assert_close(
        routing.combine_weights,
        selected / selected.sum(-1, keepdims=True),
        "float64 oracle, fp32",
    )

  def test_bias_changes_the_selection_and_never_the_weights(self):
    scores = _random_scores(32, 8)
    same = _route(scores, np.full(8, 0.3, np.float32), 2)
    plain = _route(scores, np.zeros(8, np.float32), 2)
    testing.assert_same(same.combine_weights, plain.combine_weights)
    forced = np.array([0, 0, 9, 0, 0, 9, 0, 0], np.float32)
    routing = _route(scores, forced, 2)
    self.assertEqual({2, 5}, set(np.ravel(routing.expert_indices).tolist()))
    chosen = np.take_along_axis(scores, np.array(routing.expert_indices), -1)
    testing.assert_close(
        routing.combine_weights,
        chosen / chosen.sum(-1, keepdims=True),
        "fp32",
    )

  def test_every_expert_selected(self):
    scores = _random_scores(16, 4)
    bias = np.array([0.2, -0.1, 0.0, -0.1], np.float32)
    routing = _route(scores, bias, 4)
    np.testing.assert_array_equal(routing.cutoff, (scores + bias).min(axis=-1))
    counts, new = _step(scores, bias, 4)
    np.testing.assert_array_equal(counts, [16] * 4)
    self.assertTrue(np.all(np.isfinite(new)))

  def test_zero_scores_give_finite_weights(self):
    zeros = np.zeros((2, 4), np.float32)
    routing = _route(zeros, np.zeros(4, np.float32), 2)
    np.testing.assert_array_equal(routing.combine_weights, np.zeros((2, 2)))

  def test_nan_scores_give_valid_indices(self):
    scores = _random_scores(8, 6)
    scores[2] = np.nan
    scores[5, 3] = np.nan
    bias = np.zeros(6, np.float32)
    routing = _route(scores, bias, 2)
    indices = np.array(routing.expert_indices)
    self.assertTrue(np.all((indices >= 0) & (indices < 6)))
    # The other tokens do not notice.
    clean = np.nan_to_num(scores)
    expected = _route(clean, bias, 2)
    keep = np.array([0, 1, 3, 4, 6, 7])
    for actual, wanted in zip(routing, expected, strict=True):
      testing.assert_same(actual[keep], wanted[keep])
    # And the histogram leaves out the margins that are not numbers.
    histogram = np.array(_histogram(scores, routing.cutoff, bias))
    self.assertEqual(histogram[0].sum(), 7)
    self.assertEqual(histogram[3].sum(), 6)
    new = _quantile(histogram, bias, num_experts_per_token=2)
    self.assertTrue(np.all(np.isfinite(new)))

  def test_gradient_facts(self):
    scores = _random_scores(16, 8)
    cotangent = np.random.default_rng(1).normal(size=(16, 3))

    def loss(scores, bias):
      routing = balancing.route(scores, bias, 3)
      # The cutoff's term must not reach the gradient.
      return jnp.sum(routing.combine_weights * cotangent) + jnp.sum(
          routing.cutoff
      )

    bias = np.full(8, 0.1, np.float32)
    d_scores, d_bias = jax.jit(jax.grad(loss, (0, 1)))(scores, bias)
    np.testing.assert_array_equal(d_bias, np.zeros(8))
    # Renormalised weights do not change when a token's scores are scaled.
    along = np.sum(scores * np.array(d_scores, np.float64), axis=-1)
    np.testing.assert_allclose(along, np.zeros(16), atol=1e-6)
    indices = np.array(_route(scores, bias, 3).expert_indices)
    selected = np.zeros((16, 8), bool)
    np.put_along_axis(selected, indices, True, axis=-1)
    np.testing.assert_array_equal(d_scores[~selected], 0.0)
    chosen = np.take_along_axis(scores, indices, -1).astype(np.float64)
    total = chosen.sum(-1, keepdims=True)
    mean = np.sum(cotangent * chosen, axis=-1, keepdims=True) / total
    testing.assert_close(
        np.take_along_axis(np.array(d_scores), indices, -1),
        (cotangent - mean) / total,
        "fp32 gradient",
    )

  def test_bad_arguments_are_named(self):
    scores, bias = np.zeros((2, 4), np.float32), np.zeros(4, np.float32)
    with self.assertRaisesRegex(ValueError, "num_experts_per_token=5"):
      balancing.route(scores, bias, 5)
    with self.assertRaisesRegex(ValueError, "num_experts_per_token=0"):
      balancing.route(scores, bias, 0)
    with self.assertRaisesRegex(ValueError, r"\(3,\)"):
      balancing.route(scores, bias[:3], 1)


class QuantileTest(parameterized.TestCase):

  def test_every_expert_within_one_bin_of_the_pooled_quantile(self):
    tokens, experts, k = 4096, 32, 4
    scores = _random_scores(tokens, experts)
    bias = np.random.default_rng(2).normal(scale=0.1, size=experts)
    bias = bias.astype(np.float32)
    _, margins, cutoff = _oracle_margins(
        scores.astype(np.float64), bias.astype(np.float64), k
    )
    routing = _route(scores, bias, k)
    np.testing.assert_allclose(routing.cutoff, cutoff, rtol=1e-6)
    histogram = np.array(_histogram(scores, routing.cutoff, bias))
    np.testing.assert_array_equal(histogram.sum(axis=-1), tokens)
    new = _quantile(histogram, bias, num_experts_per_token=k)
    exact = np.sort(margins, axis=0)[tokens * k // experts - 1]
    width = (bias.max() - bias.min() + 2) / 1000
    # Both are known up to a constant: compare after the oracle's centring.
    shift = np.mean(np.array(new) - (exact - exact.mean()))
    self.assertLess(abs(shift), 1e-6)
    np.testing.assert_array_less(
        np.abs(np.array(new) - (exact - exact.mean())), width
    )

  def test_micro_batches_and_shards_add_up_bit_for_bit(self):
    scores = _random_scores(64, 12)
    bias = np.random.default_rng(3).normal(scale=0.2, size=12)
    bias = (bias - bias.mean()).astype(np.float32)
    mask = np.arange(64) % 5 != 0
    results = []
    for parts in (1, 4, 8):
      histogram = 0
      for part in np.split(np.arange(64), parts):
        routing = _route(scores[part], bias, 3)
        histogram += np.array(
            _histogram(
                scores[part], routing.cutoff, bias, token_mask=mask[part]
            )
        )
      results.append(
          (histogram, _quantile(histogram, bias, num_experts_per_token=3))
      )
    for histogram, new in results[1:]:
      testing.assert_same(histogram, results[0][0])
      testing.assert_same(new, results[0][1])

  def test_padding_is_not_counted_whatever_it_holds(self):
    scores = _random_scores(64, 12)
    bias = np.zeros(12, np.float32)
    mask = np.arange(64) < 16
    padded = np.where(mask[:, None], scores, np.nan).astype(np.float32)
    counts, new = _step(padded, bias, 3, token_mask=mask)
    expected_counts, expected = _step(scores[:16], bias, 3)
    testing.assert_same(counts, expected_counts)
    testing.assert_same(new, expected)
    self.assertEqual(int(np.sum(counts)), 16 * 3)

  def test_an_empty_histogram_keeps_the_bias(self):
    bias = np.array([0.3, -0.1, 0.4], np.float32)  # not even centred
    new = _quantile(np.zeros((3, 50), np.int32), bias, num_experts_per_token=1)
    testing.assert_same(new, bias)

  def test_the_bias_is_mean_centred(self):
    _, new = _step(_random_scores(64, 12), np.full(12, 0.7, np.float32), 3)
    self.assertLess(abs(np.mean(np.array(new, np.float64))), 1e-7)

  def test_counts_beyond_float32_and_int32_products(self):
    # 2^28 + 1 tokens, top-16 of 32: q = 2^27 + 1/2 is not a float32, and
    # tokens * 16 not an int32. Half of the tokens lie in bin 3, the next one
    # in bin 7: q is half-way through that.
    histogram = np.zeros((32, 10), np.int32)
    histogram[:, 3] = 2**27
    histogram[:, 9] = 2**27
    histogram[:16, 7] = 1
    histogram[16:, 6] = 1
    bias = np.zeros(32, np.float32)
    new = _quantile(histogram, bias, num_experts_per_token=16)
    expected = np.where(np.arange(32) < 16, 7.5, 6.5) * 0.2 - 1.0
    np.testing.assert_allclose(new, expected - expected.mean(), atol=1e-6)

  def test_fewer_assignments_than_experts(self):
    # q = 2 * 1 / 8 < 1: the first bin that holds anything, a quarter of it.
    scores = np.full((2, 8), 0.5, np.float32)
    counts, new = _step(scores, np.zeros(8, np.float32), 1)
    np.testing.assert_array_equal(counts, [2] + [0] * 7)
    np.testing.assert_allclose(new, np.zeros(8), atol=1e-7)

  def test_all_tokens_to_one_expert_and_empty_experts_recover(self):
    tokens, experts, k = 4096, 16, 1
    scores = 0.5 * _random_scores(tokens, experts, spread=0.0)
    scores[:, 3] += 0.5
    bias = np.zeros(experts, np.float32)
    counts, bias = _step(scores, bias, k)
    np.testing.assert_array_equal(counts, tokens * (np.arange(experts) == 3))
    for _ in range(3):
      counts, bias = _step(scores, bias, k)
    self.assertGreater(int(np.min(counts)), 0)
    self.assertLess(float(balancing.max_violation(counts)), 0.1)

  def test_a_stream_reaches_the_sampling_floor(self):
    tokens, experts, k = 8192, 64, 4
    floor = np.sqrt(2 * np.log(experts) / (tokens * k / experts))
    bias = np.zeros(experts, np.float32)
    violations = []
    for step in range(10):
      # A batch is routed with a bias that has never seen it.
      scores = _random_scores(tokens, experts, seed=step)
      counts, bias = _step(scores, bias, k)
      violations.append(np.max(counts) / (tokens * k / experts) - 1)
    self.assertGreater(violations[0], 4.0)
    # The floor is the expected value under the best bias; a bias estimated
    # from one batch of the same size adds as much variance again: sqrt(2).
    self.assertLess(np.mean(violations[3:]), 1.5 * floor)

  def test_memory_does_not_follow_the_bins(self):
    def temp_bytes(num_bins):
      shape = jax.ShapeDtypeStruct
      compiled = jax.jit(
          functools.partial(balancing.margin_histogram, num_bins=num_bins)
      ).lower(
          shape((4096, 32), jnp.float32),
          shape((4096,), jnp.float32),
          shape((32,), jnp.float32),
      )
      return compiled.compile().memory_analysis().temp_size_in_bytes

    # One index and one increment for each margin, and nothing per bin.
    self.assertLess(temp_bytes(1000), 4096 * 32 * 4 * 4)


class PooledTest(absltest.TestCase):

  def test_one_step_is_the_quantile_of_that_step(self):
    scores = _golden_scores(8, 4, 0.5).astype(np.float32)
    bias = np.zeros(4, np.float32)
    routing = _route(scores, bias, 1)
    histogram = balancing.margin_histogram(
        scores, routing.cutoff, bias, margin_range=balancing.POOLED_RANGE
    )
    pool, new = balancing.pooled_quantile_bias(
        jnp.zeros(histogram.shape), histogram, bias, num_experts_per_token=1
    )
    testing.assert_same(pool, histogram)
    expected = balancing.quantile_bias(
        histogram, bias, num_experts_per_token=1,
        margin_range=balancing.POOLED_RANGE,
    )  # fmt: skip
    np.testing.assert_allclose(new, expected, atol=1e-6)
    # Bins of 4 / 1000 instead of 2 / 1000 around the same margins.
    golden = np.array([-0.096625, -0.013952, 0.115766, 0.0])
    np.testing.assert_allclose(new, golden - golden.mean(), atol=8e-3)

  def test_a_step_without_tokens_changes_nothing(self):
    pool = np.float32(np.random.default_rng(0).uniform(size=(3, 50)))
    bias = np.array([0.3, -0.1, 0.4], np.float32)
    actual = balancing.pooled_quantile_bias(
        pool, jnp.zeros((3, 50), jnp.int32), bias, num_experts_per_token=1
    )
    testing.assert_same(actual[0], pool)
    testing.assert_same(actual[1], bias)
    zeros = jnp.zeros((3, 50))
    testing.assert_same(
        balancing.pooled_quantile_bias(
            zeros, zeros.astype(int), bias, num_experts_per_token=1
        )[1],
        bias,
    )

  def test_no_margin_leaves_the_range(self):
    # An expert that scores 1 against others at 0, and the reverse.
    for low in (0.0, 1.0):
      scores = np.full((64, 8), low, np.float32)
      scores[:, 3] = 1.0 - low
      bias = np.zeros(8, np.float32)
      pool = jnp.zeros((8, 1000))
      for _ in range(20):
        routing = _route(scores, bias, 2)
        margins = np.asarray(routing.cutoff)[:, None] - scores
        self.assertLess(np.abs(margins).max(), 2.0)
        histogram = balancing.margin_histogram(
            scores, routing.cutoff, bias, margin_range=balancing.POOLED_RANGE
        )
        pool, bias = balancing.pooled_quantile_bias(
            pool, histogram, bias, num_experts_per_token=2
        )
      self.assertLessEqual(np.ptp(np.asarray(bias)), 1.01)

  def test_few_tokens_balance_fresh_ones_better_than_the_last_step_alone(self):
    tokens, experts, k = 128, 896, 16  # 2.3 per expert and step
    bias = {rule: np.zeros(experts, np.float32) for rule in ("last", "pooled")}
    pool = jnp.zeros((experts, 1000))
    pooled = jax.jit(
        balancing.pooled_quantile_bias, static_argnames="num_experts_per_token"
    )
    in_range = jax.jit(
        functools.partial(
            balancing.margin_histogram, margin_range=balancing.POOLED_RANGE
        )
    )
    for step in range(32):
      scores = _random_scores(tokens, experts, seed=step)
      _, bias["last"] = _step(scores, bias["last"], k)
      routing = _route(scores, bias["pooled"], k)
      histogram = in_range(scores, routing.cutoff, bias["pooled"])
      pool, bias["pooled"] = pooled(
          pool, histogram, bias["pooled"], num_experts_per_token=k
      )
    fresh = _random_scores(8192, experts, seed=999)
    violation = {}
    for rule, value in bias.items():
      counts = _counts(_route(fresh, value, k).expert_indices, experts)
      violation[rule] = float(balancing.max_violation(counts))
    # 3.86 and 0.34 on a like stream.
    self.assertGreater(violation["last"], 2.0)
    self.assertLess(violation["pooled"], 0.6)


class SequencePriceTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.scores = np.float32(rng.uniform(size=(2, 23, 5)))
    # Two documents and padding; padding within a document is skipped over.
    self.segments = np.ones((2, 23), np.int32)
    self.segments[0, 9:] = 2
    self.segments[0, [4, 12]] = 0
    self.segments[1, 17:] = 0
    self.positions = np.zeros_like(self.segments)
    for row, column in np.ndindex(self.segments.shape):
      before = self.segments[row, :column] == self.segments[row, column]
      self.positions[row, column] = before.sum()

  def _price(self, scores=None, chunk_size=4):
    return np.asarray(
        balancing.sequence_price(
            self.scores if scores is None else scores,
            self.segments, self.positions,
            num_experts_per_token=2, num_bins=10, decay=0.8,
            chunk_size=chunk_size,
        )
    )  # fmt: skip

  def test_equals_a_loop_over_tokens(self):
    expected = np.zeros(self.scores.shape)
    for row in range(2):
      for i in np.flatnonzero(self.segments[row]):
        same = np.flatnonzero(
            self.segments[row, : i + 1] == self.segments[row, i]
        )
        weights = 0.8 ** np.arange(len(same))[::-1]
        for j in range(5):
          mass = np.bincount(
              (self.scores[row, same, j] * 10).astype(int), weights, 10
          ).cumsum()
          expected[row, i, j] = (np.argmax(mass >= 0.6 * mass[-1]) + 0.5) / 10
    np.testing.assert_allclose(self._price(), expected, atol=1e-6)

  def test_the_chunk_size_does_not_matter(self):
    testing.assert_close(self._price(), self._price(chunk_size=16), "fp32")

  def test_a_later_token_changes_no_bit_of_an_earlier_price(self):
    changed = self.scores.copy()
    changed[:, 14:] = 1.0 - changed[:, 14:]
    before, after = self._price(), self._price(changed)
    testing.assert_same(after[:, :14], before[:, :14])
    self.assertGreater(np.abs(after[0, 14:] - before[0, 14:]).max(), 0.1)

  def test_prices_even_out_the_load_within_a_document(self):
    # A document about one thing: its scores have an offset of their own.
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4, 256, 16)) + rng.normal(size=(4, 1, 16))
    scores = np.float32(1 / (1 + np.exp(-logits)))
    ones = np.ones((4, 256), np.int32)
    price = balancing.sequence_price(
        scores, ones, np.broadcast_to(np.arange(256), ones.shape),
        num_experts_per_token=2,
    )  # fmt: skip
    bias = np.zeros(16, np.float32)

    def violation(weight):
      per_document = []
      for row in range(4):
        routing = _route(scores[row], bias, 2, weight * price[row])
        counts = _counts(routing.expert_indices, 16)
        per_document.append(float(balancing.max_violation(counts)))
      return np.mean(per_document)

    self.assertLess(violation(0.3), 0.85 * violation(0.0))
    self.assertLess(violation(1.0), 0.5 * violation(0.3))


class OtherRulesTest(parameterized.TestCase):

  def test_sign_step_goes_against_the_load(self):
    bias = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    new = balancing.sign_bias(
        jnp.array([9, 4, 0, 3], jnp.int32), bias, step_size=0.5
    )
    np.testing.assert_allclose(new, [-0.4, 0.2, 0.8, 0.9], atol=1e-7)

  def test_sign_of_a_fractional_mean(self):
    # The mean is 3.25: 3 is below it, 4 above.
    new = balancing.sign_bias(
        jnp.array([3, 3, 3, 4], jnp.int32), np.zeros(4, np.float32), step_size=1
    )
    np.testing.assert_array_equal(new, [1, 1, 1, -1])

  def test_sign_step_of_nothing_keeps_the_bias(self):
    bias = np.array([0.1, -0.1], np.float32)
    new = balancing.sign_bias(jnp.zeros(2, jnp.int32), bias, step_size=0.5)
    testing.assert_same(new, bias)

  def test_switch_loss_is_the_weight_at_uniform_loads(self):
    scores = np.full((8, 4), 0.3, np.float32)
    indices = jnp.stack([jnp.arange(8) % 4, (jnp.arange(8) + 1) % 4], axis=1)
    loss = balancing.switch_loss(scores, indices, weight=0.01)
    self.assertAlmostEqual(float(loss), 0.01, delta=1e-8)

  def test_switch_loss_equals_its_definition(self):
    scores = _random_scores(32, 8)
    mask = np.arange(32) < 20
    indices = np.array(_route(scores, np.zeros(8, np.float32), 2)[0])
    share = scores / scores.sum(-1, keepdims=True, dtype=np.float64)
    load = np.bincount(indices[:20].ravel(), minlength=8) / 40
    expected = 0.1 * 8 * np.sum(load * share[:20].mean(axis=0))
    scores[20:] = np.nan  # padding may hold anything
    value, gradient = jax.jit(
        jax.value_and_grad(
            lambda s: balancing.switch_loss(
                s, indices, weight=0.1, token_mask=mask
            )
        )
    )(scores)
    self.assertAlmostEqual(float(value), expected, delta=1e-7)
    # Descent lowers the busiest expert's scores; padding gets nothing.
    self.assertTrue(np.all(gradient[:20, np.argmax(load)] > 0))
    self.assertTrue(np.all(gradient[:20, np.argmin(load)] < 0))
    np.testing.assert_array_equal(gradient[20:], 0.0)

  def test_max_violation(self):
    counts = jnp.array([9, 1, 1, 1], jnp.int32)
    self.assertAlmostEqual(float(balancing.max_violation(counts)), 2.0)
    self.assertEqual(
        float(balancing.max_violation(jnp.zeros(4, jnp.int32))), 0.0
    )


if __name__ == "__main__":
  absltest.main()
