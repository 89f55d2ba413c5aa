"""The warps' own products, lane by lane, against their twins in array terms."""

from absl.testing import absltest
from absl.testing import parameterized
from jax import numpy as jnp
import numpy as np

from pallas_kernels.kda import mosaic_gpu_warp
from tests.pallas_kernels import warp_emulator

_SHIFT = 32


def _scores(rng):
  """What the kernel's products leave: anything where no score belongs."""
  keys = rng.normal(size=(64, 16)).astype(np.float32)
  keys /= np.linalg.norm(keys, axis=1, keepdims=True)
  exact = keys @ keys.T
  scores = np.full((64, 96), 1e30, np.float32)
  for half in (slice(0, 32), slice(32, 64)):
    scores[half, half] = exact[half, half]
  scores[32:, 64:] = exact[32:, :32] * 2.0**_SHIFT
  return scores


def _first_seen(has_segments):
  if not has_segments:
    return None
  return np.where(np.arange(64) < 23, 0, 23).astype(np.int32)


def _program_scores(scores, first):
  first = [] if first is None else [warp_emulator.Array.of(np.int64(first))]
  return mosaic_gpu_warp._Scores(warp_emulator.Array.of(scores), first, _SHIFT)


class MosaicGpuWarpTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_causal_scores_are_the_twins_bit_for_bit(self, has_segments):
    scores = _scores(np.random.default_rng(0))
    first = _first_seen(has_segments)
    program = lambda: mosaic_gpu_warp._causal(_program_scores(scores, first))
    out = warp_emulator.Emulator().run(mosaic_gpu_warp, program).values(64)
    twin = mosaic_gpu_warp.causal(scores, first, _SHIFT, True)
    np.testing.assert_array_equal(out, np.float32(twin))
    self.assertTrue(np.all(out[np.triu_indices(64, 1)] == 0))

  @parameterized.parameters(False, True)
  def test_the_inverse_is_the_twins_and_inverts(self, has_segments):
    rng = np.random.default_rng(1)
    scores, first = _scores(rng), _first_seen(has_segments)
    beta = rng.uniform(0.5, 1.0, 64).astype(np.float32)

    def program():
      by_row = mosaic_gpu_warp._scalars(warp_emulator.Array.of(beta))
      return mosaic_gpu_warp._invert(
          _program_scores(scores, first), by_row, None
      )

    out = warp_emulator.Emulator().run(mosaic_gpu_warp, program).values(64)
    twin = mosaic_gpu_warp.invert(scores, beta, first, None, _SHIFT, True)
    difference = np.linalg.norm(out - np.float32(twin)) / np.linalg.norm(out)
    # Sums in another order: some roundings to bf16 fall the other way.
    self.assertLess(difference, 2.0**-12)
    lower = mosaic_gpu_warp._joined(jnp.asarray(scores), first, _SHIFT, 0)
    lower = np.float64(lower) * beta[:, None]
    exact = np.linalg.inv(np.eye(64) + lower) - np.eye(64)
    error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
    self.assertLess(error, 2.0**-9)  # of one rounding to bf16

  @parameterized.parameters(64, 128)
  def test_row_squares_are_of_all_rows(self, width):
    x = np.random.default_rng(2).normal(size=(64, width)).astype(jnp.bfloat16)
    emulator = warp_emulator.Emulator()
    emulator.put_tile(x)
    program = lambda: mosaic_gpu_warp._row_squares(None, width)
    out = emulator.run(mosaic_gpu_warp, program).values()
    exact = np.sum(np.float64(x) ** 2, axis=1)
    np.testing.assert_allclose(out, exact, rtol=1e-5)


if __name__ == "__main__":
  absltest.main()
