"""Tests of the bigram model that a language model has to beat."""

import math

from absl.testing import absltest
import numpy as np

from sparsemm_jax.data import bigram
from tests import testing


class BigramTest(absltest.TestCase):

  def test_probabilities_are_smoothed_pair_counts(self):
    model = bigram.BigramModel(3).fit([[0, 1, 0, 1], [2, 1]])
    # Pairs: 01 twice, 10 once, 21 once. Next tokens: 0 once, 1 three times.
    unigram = {0: 2 / 7, 1: 4 / 7, 2: 1 / 7}
    expected = {
        (0, 1): (2 + unigram[1]) / 3,
        (0, 0): unigram[0] / 3,
        (1, 0): (1 + unigram[0]) / 2,
        (2, 2): unigram[2] / 2,
    }
    tokens, targets = np.array(list(expected)).T
    testing.assert_close(
        model.nats(tokens, targets),
        [-math.log(p) for p in expected.values()],
        "float64 oracle, fp32",
    )

  def test_probabilities_sum_to_one_for_every_token(self):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 20, n) for n in (0, 1, 2, 50, 400)]
    model = bigram.BigramModel(23).fit(documents)  # 20, 21, 22 never seen
    tokens, targets = np.indices((23, 23))
    total = np.exp(-model.nats(tokens, targets)).sum(axis=1)
    testing.assert_close(total, np.ones(23), "float64 oracle, fp32")

  def test_no_pair_joins_two_documents(self):
    together = bigram.BigramModel(4).fit([[0, 1, 2, 3]])
    apart = bigram.BigramModel(4).fit([[0, 1], [2, 3]])
    self.assertLess(together.nats(1, 2), math.log(2))
    self.assertGreater(apart.nats(1, 2), math.log(4))

  def test_documents_may_come_in_several_calls(self):
    once = bigram.BigramModel(4).fit([[0, 1, 2], [3, 1]])
    twice = bigram.BigramModel(4).fit([[0, 1, 2]]).fit([[3, 1]])
    pairs = np.indices((4, 4))
    testing.assert_same(once.nats(*pairs), twice.nats(*pairs))


if __name__ == "__main__":
  absltest.main()
