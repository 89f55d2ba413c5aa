"""The Hopper attention-residual kernels as ptxas sees them."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp

from pallas_kernels import aot
from pallas_kernels import attn_res
from pallas_kernels.attn_res import mosaic_gpu

_TOKENS = 4096


class AttnResResourcesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    if reason := aot.unavailable("h200"):
      self.skipTest(reason)

  # The last two read the sources twice in the backward pass, and pad.
  @parameterized.parameters(
      (9, 4096, jnp.bfloat16, False),
      (9, 7168, jnp.bfloat16, True),
      (3, 2048, jnp.bfloat16, True),
      (3, 4096, jnp.bfloat16, True),
      (32, 7168, jnp.float32, False),
      (2, 1000, jnp.bfloat16, False),
  )
  def test_forward_and_backward_do_not_spill(
      self, num_sources, width, dtype, normed
  ):

    def forward_and_backward(sources, query, scale, cotangent, use_last):
      mix = functools.partial(
          attn_res.attn_res, use_last=use_last, implementation="mosaic_gpu"
      )
      if not normed:
        out, pull = jax.vjp(mix, sources, query, scale)
        return out, pull(cotangent)
      out, pull = jax.vjp(
          lambda v, w, k, g: mix(v, w, k, norm_scale=g),
          sources, query, scale, scale,
      )  # fmt: skip
      return out, pull(cotangent)

    rows = jax.ShapeDtypeStruct((_TOKENS, width), dtype)
    vector = jax.ShapeDtypeStruct((width,), jnp.float32)
    flag = jax.ShapeDtypeStruct((), jnp.bool)
    compiled, kernels = aot.kernel_resources(
        forward_and_backward, (rows,) * num_sources, vector, vector, rows, flag
    )
    self.assertLen(kernels, 2)
    for kernel in kernels:
      self.assertEqual(kernel.spill_bytes, 0, kernel.name)
    if width % 128 == 0:
      # A few scalars per token and sums per block: no copy of any source.
      temporary = compiled.memory_analysis().temp_size_in_bytes
      self.assertLess(temporary, rows.size * rows.dtype.itemsize)

  @parameterized.parameters((4, 2048, 12), (8, 7168, 24))
  def test_the_mixes_of_many_queries_do_not_spill(
      self, num_sources, width, num_queries
  ):
    bank = (jax.ShapeDtypeStruct((_TOKENS, width), jnp.bfloat16),) * num_sources
    weights = jax.ShapeDtypeStruct(
        (num_queries, num_sources, _TOKENS), jnp.float32
    )
    compiled, (kernel,) = aot.kernel_resources(
        mosaic_gpu.combine, weights, bank
    )
    self.assertEqual(kernel.spill_bytes, 0)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    self.assertLess(temporary, bank[0].size)  # half a source

  def test_none_chooses_the_kernels_also_in_rematerialised_scans(self):
    rows = jax.ShapeDtypeStruct((_TOKENS, 256), jnp.bfloat16)
    queries = jax.ShapeDtypeStruct((3, 256), jnp.float32)

    @jax.checkpoint
    def layer(prefix, query, bank):
      mixed = attn_res.attn_res((bank, prefix), query, jnp.ones(256))
      return prefix + mixed

    def loss(queries, bank):
      add = lambda x, query: (layer(x, query, bank), None)
      return jnp.sum(jax.lax.scan(add, bank, queries)[0].astype(jnp.float32))

    with aot.abstract_device("h200"):
      traced = jax.jit(jax.grad(loss)).trace(queries, rows)
    text = str(traced.jaxpr)
    self.assertIn("name=attn_res_forward\n", text)
    self.assertIn("name=attn_res_backward\n", text)


if __name__ == "__main__":
  absltest.main()
