"""The TPU attention-residual kernels compile for every generation.

A kernel over its VMEM does not compile.
"""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp

from pallas_kernels import aot
from pallas_kernels import attn_res

_TOKENS = 1000  # no whole number of tiles


def _forward_and_backward(sources, query, scale, cotangent, use_last):
  """The best implementation for the device, whatever it is."""
  mix = functools.partial(attn_res.attn_res, use_last=use_last)
  out, pull = jax.vjp(mix, sources, query, scale)
  return out, pull(cotangent)


class AttnResTpuTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    if reason := aot.unavailable("v6e"):
      self.skipTest(reason)

  @parameterized.parameters(
      ("v5e", 9, 4096, jnp.bfloat16),
      ("v5p", 32, 7168, jnp.float32),  # the most rows in the least VMEM
      ("v6e", 9, 1000, jnp.bfloat16),
      ("tpu7x", 9, 7168, jnp.bfloat16),
  )
  def test_both_passes_compile(self, target, num_sources, width, dtype):
    rows = jax.ShapeDtypeStruct((_TOKENS, width), dtype)
    vector = jax.ShapeDtypeStruct((width,), jnp.float32)
    compiled = aot.compile_for(
        _forward_and_backward,
        (rows,) * num_sources,
        vector,
        vector,
        rows,
        jax.ShapeDtypeStruct((), jnp.bool),
        target=target,
    )
    text = compiled.as_text()
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 2)
    if width % 128 == 0:
      # A row of scalars per token, sums per tile: no copy of any source.
      temporary = compiled.memory_analysis().temp_size_in_bytes
      self.assertLess(temporary, 2 * rows.size * rows.dtype.itemsize)


if __name__ == "__main__":
  absltest.main()
