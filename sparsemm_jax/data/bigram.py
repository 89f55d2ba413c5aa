"""The bigram model a language model has to beat."""

from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np


class BigramModel:
  """Counts of (token, next token), smoothed towards the unigram.

  p(next | token) = (count(token, next) + p(next)) / (count(token) + 1),
  p(next) = (count(next) + 1) / (number of tokens + vocab_size)
  """

  def __init__(self, vocab_size: int):
    self._pairs = np.zeros((vocab_size, vocab_size), np.int64)
    self._next = np.zeros(vocab_size, np.int64)

  def fit(self, documents: Iterable[Sequence[int]]) -> "BigramModel":
    """Adds the pairs of each document; returns self.

    Args:
      documents: token ids, each document on its own.
    """
    vocab_size = len(self._next)
    for document in documents:
      ids = np.asarray(document, np.int64)
      if len(ids) < 2:
        continue
      pairs = ids[:-1] * vocab_size + ids[1:]
      counts = np.bincount(pairs, minlength=vocab_size**2)
      self._pairs += counts.reshape(vocab_size, vocab_size)
      self._next += np.bincount(ids[1:], minlength=vocab_size)
    return self

  def nats(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns -log p(target | token) for arrays of one shape."""
    unigram = (self._next + 1) / (self._next.sum() + len(self._next))
    pair = self._pairs[tokens, targets]
    total = self._pairs.sum(axis=1)[tokens]
    return -np.log((pair + unigram[targets]) / (total + 1))
