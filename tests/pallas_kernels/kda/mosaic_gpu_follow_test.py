"""Prep and the scan in one Hopper kernel, in the interpreter.

It runs blocks one after another and knows no counters, so it cannot find a race
between prep and the scan; those within either are looked for in their own tests.
"""

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
import numpy as np
import pytest

from pallas_kernels.kda import mosaic_gpu_follow
from pallas_kernels.kda import mosaic_gpu_prep
from pallas_kernels.kda import mosaic_gpu_scan

RAW = dict(raw=True, with_low=False, batch=2, heads=2, chunks=2, values=64)
GIVEN = dict(raw=False, with_low=True, batch=1, heads=1, chunks=3, values=128)


# What is above a score's diagonal may overflow; a select removes it.
@pytest.mark.filterwarnings("ignore:.* encountered in matmul:RuntimeWarning")
class MosaicGpuFollowTest(parameterized.TestCase):

  @parameterized.named_parameters(("raw", RAW), ("given_decay", GIVEN))
  def test_the_scan_that_follows_prep_gives_the_same_bits(self, case):
    raw, with_low, batch, heads, chunks, values = case.values()
    keys, tokens = 64, 64 * chunks
    plan = mosaic_gpu_prep.Plan(
        raw=raw,
        scale=0.125,
        lower_bound=-5.0,
        masked=False,
        pairs=1,
        interpret=plgpu.InterpretGPUParams(),
    )

    def normal(i, *shape):
      return jax.random.normal(jax.random.key(i), shape)

    q, k = (
        normal(i, batch, tokens, 1, keys).astype(jnp.bfloat16) for i in (0, 1)
    )
    z = normal(2, batch, tokens, heads, keys)
    z = z.astype(jnp.bfloat16) if raw else -jnp.exp(z)
    beta = jax.nn.sigmoid(normal(3, batch, heads, tokens))
    slope, bias = jnp.ones((heads,)), normal(4, heads, keys)
    local = (q, k, z, beta, slope, bias, None)
    v = normal(5, batch, tokens, heads, values).astype(jnp.bfloat16)
    initial = normal(6, batch, heads, values, keys)
    tiles = mosaic_gpu_prep.prep(plan, *local, with_low=with_low)
    wanted = tiles, mosaic_gpu_scan.scan(plan, tiles, v, initial, output=True)
    got = mosaic_gpu_follow.prep_and_scan(
        plan, *local, v, initial, with_low=with_low
    )
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
      a, b = (np.asarray(x, np.float32) for x in (a, b))
      np.testing.assert_array_equal(a, b)


if __name__ == "__main__":
  absltest.main()
