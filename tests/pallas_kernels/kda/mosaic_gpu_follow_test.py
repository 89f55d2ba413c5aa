"""Prep and the scan in one Hopper kernel, in the interpreter."""

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


# What is above a score's diagonal may overflow; a select removes it.
@pytest.mark.filterwarnings("ignore:.* encountered in matmul:RuntimeWarning")
class MosaicGpuFollowTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("raw", True, jnp.bfloat16), ("given_decay", False, jnp.float32)
  )
  def test_the_scan_that_follows_prep_gives_the_same_bits(self, raw, dtype):
    batch, tokens, heads, keys, values = 2, 192, 2, 64, 128
    plan = mosaic_gpu_prep.Plan(
        raw=raw,
        scale=0.125,
        lower_bound=-5.0,
        masked=False,
        pairs=1,
        interpret=plgpu.InterpretGPUParams(),
    )
    random = [jax.random.key(i) for i in range(8)]

    def normal(i, *shape):
      return jax.random.normal(random[i], shape)

    q, k = (
        normal(i, batch, tokens, 1, keys).astype(jnp.bfloat16) for i in (0, 1)
    )
    z = normal(2, batch, tokens, heads, keys)
    z = (z if raw else -jnp.exp(z)).astype(dtype)
    beta = jax.nn.sigmoid(normal(3, batch, heads, tokens))
    slope, bias = jnp.ones((heads,)), normal(4, heads, keys)
    local = (q, k, z, beta, slope, bias, None)
    v = normal(5, batch, tokens, heads, values).astype(jnp.bfloat16)
    initial = normal(6, batch, heads, values, keys)
    tiles = mosaic_gpu_prep.prep(plan, *local)
    wanted = tiles, mosaic_gpu_scan.scan(plan, tiles, v, initial, output=True)
    got = mosaic_gpu_follow.prep_and_scan(plan, *local, v, initial)
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
      np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))


if __name__ == "__main__":
  absltest.main()
