"""The Hopper attention kernels as ptxas sees them: registers, spills, bytes."""

from absl.testing import absltest
import jax
from jax import numpy as jnp

from pallas_kernels import aot
from pallas_kernels.kda import api
from pallas_kernels.kda import arg_specs
from pallas_kernels.kda import mosaic_gpu_decode

# A kernel over 227 KiB of shared memory does not compile at all. Spills are in
# bytes per thread.
_FORWARD = {"kda_prep": 0, "kda_scan": 0}
_BACKWARD = _FORWARD | {"kda_states": 0, "kda_reverse": 0, "kda_gradient": 0}
_FEW_HEADS_FORWARD = {"kda_prep_and_scan": 32}
_FEW_HEADS_BACKWARD = _FEW_HEADS_FORWARD | {
    "kda_backward_scans": 0,
    "kda_gradient": 32,
}
_GIB = 2**30


def _packed(x, cotangent, segment_ids):
  """Forward and backward of documents in a row, or of none if given None."""
  run = lambda x: api.fused_kda(
      **x, segment_ids=segment_ids, implementation="mosaic_gpu"
  )[0]
  out, vjp = jax.vjp(run, x)
  return out, vjp(cotangent)


class KdaResourcesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    if reason := aot.unavailable("h200"):
      self.skipTest(reason)

  def check(self, kernels, budget):
    found = {k.name.removesuffix("_mosaic_gpu_kernel"): k for k in kernels}
    self.assertEqual(set(found), set(budget))
    for name, kernel in found.items():
      self.assertLessEqual(kernel.spill_bytes, budget[name], name)
      self.assertFalse(kernel.serialized, name)

  def test_raw_projections_forward_and_backward_stay_within_budget(self):

    def forward_and_backward(x, cotangent):
      run = lambda x: api.fused_kda(**x, implementation="mosaic_gpu")
      (out, _), vjp = jax.vjp(run, x)
      return out, vjp((cotangent, jnp.zeros((1, 96, 128, 128))))

    x = arg_specs.SPECS["b1_t8192_h96"].shapes()
    compiled, kernels = aot.kernel_resources(forward_and_backward, x, x["v"])
    self.check(kernels, _BACKWARD)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    # jax-linear-attention 0.1.0 takes 3.54 GiB here.
    self.assertLess(temporary, 2.0 * _GIB)

  def test_packed_documents_that_end_within_a_chunk_fit_too(self):
    x = arg_specs.ArgSpec(1, 1000, 96, 96).shapes()
    ids = jax.ShapeDtypeStruct((1, 1000), jnp.int32)
    _, kernels = aot.kernel_resources(_packed, x, x["v"], ids)
    self.check(kernels, _BACKWARD | {"kda_gradient": 36})

  def test_few_heads_take_three_kernels_forward_and_backward(self):
    x = arg_specs.ArgSpec(1, 1000, 32, 32).shapes()
    for ids in (None, jax.ShapeDtypeStruct((1, 1000), jnp.int32)):
      compiled, kernels = aot.kernel_resources(_packed, x, x["v"], ids)
      self.check(kernels, _FEW_HEADS_BACKWARD)
      # The backward pass has no tiles of its own: XLA sees equal calls.
      calls = compiled.as_text().count('custom_call_target="mosaic_gpu_v2"')
      self.assertEqual(calls, len(_FEW_HEADS_BACKWARD))

  def test_a_given_fp32_decay_and_segments_fit_backward_too(self):
    shape = (1, 1024, 96, 128)
    struct = jax.ShapeDtypeStruct

    def forward_and_backward(q, k, v, g, beta, segment_ids):
      run = lambda *x: api.chunk_kda(
          *x, segment_ids=segment_ids, implementation="mosaic_gpu"
      )[0]
      out, vjp = jax.vjp(run, q, k, v, g, beta)
      return out, vjp(out)

    bf16, fp32 = struct(shape, jnp.bfloat16), struct(shape, jnp.float32)
    _, kernels = aot.kernel_resources(
        forward_and_backward,
        bf16,
        bf16,
        bf16,
        fp32,
        struct(shape[:3], jnp.float32),
        struct(shape[:2], jnp.int32),
    )
    self.check(kernels, _BACKWARD)

  def test_segments_few_heads_and_narrow_values_stay_within_budget(self):
    shape = (1, 1024, 4, 64)
    struct = jax.ShapeDtypeStruct

    def forward(q, k, v, g, beta, segment_ids):
      return api.chunk_kda(
          q,
          k,
          v,
          g,
          beta,
          segment_ids=segment_ids,
          implementation="mosaic_gpu",
      )

    bf16 = struct(shape, jnp.bfloat16)
    _, kernels = aot.kernel_resources(
        forward,
        bf16,
        bf16,
        bf16,
        struct(shape, jnp.float32),
        struct(shape[:3], jnp.float32),
        struct(shape[:2], jnp.int32),
    )
    self.check(kernels, _FEW_HEADS_FORWARD)

  def test_one_token_updates_a_donated_state_in_place(self):
    struct = jax.ShapeDtypeStruct
    batch, heads, width = 64, 32, 128
    row = struct((batch, 1, heads, width), jnp.bfloat16)
    state = struct((batch, heads, width, width), jnp.float32)

    def step(state, *x):
      return mosaic_gpu_decode.recurrent_kda(*x, state, scale=width**-0.5)

    compiled, kernels = aot.kernel_resources(
        jax.jit(step, donate_argnums=0),
        state,
        row,
        row,
        row,
        struct(row.shape, jnp.float32),
        struct(row.shape[:3], jnp.float32),
    )
    self.check(kernels, {"kda_recurrent": 0})
    self.assertLessEqual(kernels[0].registers, 128)  # so that four blocks fit
    memory = compiled.memory_analysis()
    state_bytes = batch * heads * width * width * 4
    self.assertEqual(memory.alias_size_in_bytes, state_bytes)
    self.assertLess(memory.temp_size_in_bytes, 2**20)


if __name__ == "__main__":
  absltest.main()
