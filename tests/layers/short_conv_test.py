"""The short convolution."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.layers import short_conv
from tests import testing
from tests.models import small_model

HEADS, DIM, WIDTH = 2, 3, 4
conv = jax.jit(short_conv.short_conv)


def _inputs(length, rows=1):
  rng = np.random.default_rng(length)
  x = rng.normal(size=(rows, length, HEADS, DIM))
  return x, rng.normal(size=(WIDTH, HEADS, DIM))


class ShortConvTest(parameterized.TestCase):

  @parameterized.parameters(0, 1, 3, 9)
  def test_matches_float64(self, length):
    x, kernel = _inputs(length)
    padded = np.pad(x, ((0, 0), (WIDTH - 1, 0), (0, 0), (0, 0)))
    expected = sum(padded[:, j : j + length] * kernel[j] for j in range(WIDTH))
    actual = conv(
        jnp.float32(x), jnp.float32(kernel), jnp.ones((1, length), jnp.int32)
    )
    testing.assert_close(actual, expected, "float64 oracle, fp32")

  def test_documents_and_padding_do_not_leak(self):
    x, kernel = map(jnp.float32, _inputs(9))
    segments = jnp.int32([[1, 1, 2, 2, 2, 2, 0, 0, 0]])
    x = x.at[:, 6:].set(jnp.nan)

    def loss(x):
      out = short_conv.short_conv(x, kernel, segments)
      return jnp.sum(out[:, :6] ** 2), out

    (_, out), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    for start, stop in (0, 2), (2, 6):
      alone = conv(
          x[:, start:stop], kernel, jnp.ones((1, stop - start), jnp.int32)
      )
      testing.assert_close(out[:, start:stop], alone, "append fp32")
    testing.assert_same(gradient[:, 6:], np.zeros_like(gradient[:, 6:]))
    self.assertTrue(np.isfinite(np.asarray(gradient)).all())

  @parameterized.parameters(1, 5)
  def test_pieces_with_their_tail_equal_the_whole(self, size):
    x, _ = _inputs(10, rows=2)
    x = jnp.float32(x)
    module = short_conv.ShortConvolution(small_model.BASE, HEADS, DIM)
    layout = layout_lib.packed(jnp.ones((2, 10), jnp.int32))
    variables = {"params": {"kernel": jnp.float32(_inputs(10)[1])}}
    apply = jax.jit(module.apply)
    whole, none = apply(variables, x, layout)
    self.assertIsNone(none)
    tail, outs = jnp.zeros((2, WIDTH - 1, HEADS, DIM)), []
    for start in range(0, 10, size):
      # Each piece ends with padding, which must not enter the tail.
      piece = jnp.pad(
          x[:, start : start + size], ((0, 0), (0, 2), (0, 0), (0, 0)),
          constant_values=jnp.nan,
      )  # fmt: skip
      ids = jnp.tile(jnp.arange(size + 2) < size, (2, 1)).astype(jnp.int32)
      layout = layout_lib.appended(ids, jnp.int32([start, start]))
      out, tail = apply(variables, piece, layout, tail)
      outs.append(out[:, :size])
    testing.assert_close(jnp.concatenate(outs, axis=1), whole, "append fp32")
    testing.assert_same(tail, x[:, -(WIDTH - 1) :])


if __name__ == "__main__":
  absltest.main()
