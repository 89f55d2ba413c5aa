"""The mix over depth."""

import functools

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax.layers import attn_res
from tests import testing
from tests.models import small_model


class DepthMixTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    dim = small_model.BASE.d_model
    *self.bank, self.prefix = jax.random.normal(
        jax.random.key(0), (3, 2, 5, dim)
    )
    self.module = attn_res.DepthMix(small_model.BASE)
    self.initial = jax.jit(self.module.init)(
        jax.random.key(1), self.bank, self.prefix
    )
    query = jax.random.normal(jax.random.key(2), (dim,))
    self.trained = {"params": {
        "pseudo_query": query, "key_scale": 1.0 + 0.1 * query,
    }}  # fmt: skip

  def test_it_starts_as_the_mean_of_the_sources(self):
    mixed = self.module.apply(self.initial, self.bank, self.prefix)
    mean = np.mean([*self.bank, self.prefix], axis=0)
    testing.assert_close(mixed, mean, "fp32")

  def test_a_prefix_that_does_not_exist_yet_has_no_weight(self):
    apply = functools.partial(
        jax.jit(self.module.apply), self.trained, self.bank
    )
    alone, merged = apply(None), apply(self.prefix)
    testing.assert_same(apply(jnp.zeros_like(alone), jnp.bool(True)), alone)
    testing.assert_same(apply(self.prefix, jnp.bool(False)), merged)
    self.assertGreater(testing.rms_error(alone, merged), 1e-2)

  def test_depth_weights_are_those_of_the_mix(self):
    bank, prefix = [x[:1, :1] for x in self.bank], self.prefix[:1, :1]
    apply = functools.partial(self.module.apply, mutable=["depth_stats"])
    mixed, stats = jax.jit(apply)(self.trained, bank, prefix)
    weights = stats["depth_stats"]["weights"]  # of the only token
    self.assertEqual(weights.shape, (3,))
    sources = jnp.stack([*bank, prefix])
    expected = jnp.einsum("s,sbtd->btd", weights, sources)
    testing.assert_close(mixed, expected, "fp32")


class MovedRowsTest(absltest.TestCase):

  def test_rows_are_those_counted_by_hand(self):
    # 2 x (2 + 1 read, 1 written), 4 read, 3 written, 4 added up.
    rows = attn_res.moved_rows(2, 12, two_phases=False, remat=True)
    self.assertEqual(rows, 2 * 4 + 7 + 4)
    # 2 x (2 read, 1 written, then 2 read, 1 written), 3 read and 2 written,
    # 1 and 1 + 2 read, and 2 written for 12 layers.
    rows = attn_res.moved_rows(2, 12, two_phases=True, remat=True)
    self.assertEqual(rows, 2 * 6 + 5 + 4 + 2 / 12)

  def test_two_phases_are_for_many_sources(self):
    for remat in (False, True):
      choices = [
          attn_res.use_two_phases(num_sources, 12, remat=remat)
          for num_sources in range(1, 9)
      ]
      self.assertEqual(choices, [False, False] + [True] * 6)


if __name__ == "__main__":
  absltest.main()
