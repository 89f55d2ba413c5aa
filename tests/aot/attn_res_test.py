"""The Hopper attention-residual kernels as ptxas sees them."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp

from pallas_kernels import aot
from pallas_kernels import attn_res

_TOKENS = 1024


class AttnResResourcesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    if reason := aot.unavailable("h200"):
      self.skipTest(reason)

  # The last two read the sources twice in the backward pass, and pad.
  @parameterized.parameters(
      (9, 4096, jnp.bfloat16),
      (9, 7168, jnp.bfloat16),
      (32, 7168, jnp.float32),
      (2, 1000, jnp.bfloat16),
  )
  def test_forward_and_backward_do_not_spill(self, num_sources, width, dtype):

    def forward_and_backward(sources, query, scale, cotangent):
      mix = functools.partial(attn_res.attn_res, implementation="mosaic_gpu")
      out, pull = jax.vjp(mix, sources, query, scale)
      return out, pull(cotangent)

    rows = jax.ShapeDtypeStruct((_TOKENS, width), dtype)
    vector = jax.ShapeDtypeStruct((width,), jnp.float32)
    compiled, kernels = aot.kernel_resources(
        forward_and_backward, (rows,) * num_sources, vector, vector, rows
    )
    self.assertLen(kernels, 2)
    for kernel in kernels:
      self.assertEqual(kernel.spill_bytes, 0, kernel.name)
    if width % 128 == 0:
      # A few scalars per token and sums per block: no copy of any source.
      temporary = compiled.memory_analysis().temp_size_in_bytes
      self.assertLess(temporary, rows.size * rows.dtype.itemsize)


if __name__ == "__main__":
  absltest.main()
