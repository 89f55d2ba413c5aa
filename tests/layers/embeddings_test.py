"""Rotary embeddings."""

import functools

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax.layers import embeddings
from tests import testing


class RotaryTest(absltest.TestCase):

  @functools.partial(jax.jit, static_argnums=0)
  def _rotate(self, x, positions):
    frequencies = embeddings.rope_frequencies(x.shape[-1], 100.0)
    positions = jnp.float32(positions)[None, :, None]
    return embeddings.rotate(x, positions * frequencies[None, None])

  def test_matches_complex_multiplication(self):
    x = np.random.default_rng(0).normal(size=(1, 5, 2, 6))
    turns = 100.0 ** (-np.arange(3) / 3)
    phase = np.exp(1j * np.arange(5)[:, None] * turns)[None, :, None]
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * phase
    expected = np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    actual = self._rotate(jnp.float32(x), np.arange(5))
    testing.assert_close(actual, expected, "float64 oracle, fp32")

  def test_products_depend_on_the_distance_alone(self):
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 4, 1, 8))

    @jax.jit
    def products(offset):
      index = np.arange(4) + offset
      return jnp.einsum(
          "bqhd,bkhd->bqk", self._rotate(q, index), self._rotate(k, index)
      )

    testing.assert_close(products(50), products(0), "fp32")


if __name__ == "__main__":
  absltest.main()
