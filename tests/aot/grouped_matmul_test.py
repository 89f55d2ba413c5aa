"""The grouped matrix product as ptxas and the TPU compiler see it."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp

from pallas_kernels import aot
from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import mosaic_gpu

_ROWS, _GROUPS, _IN, _OUT = 4096, 16, 512, 1024
_KERNELS = ("grouped_matmul", "grouped_matmul_d_lhs", "grouped_matmul_d_rhs")


def _with_gradients(product):
  def run(lhs, rhs, group_sizes, d_out):
    out, pull = jax.vjp(lambda a, b: product(a, b, group_sizes), lhs, rhs)
    return out, pull(d_out)

  return run


def _arguments(dtype=jnp.bfloat16):
  struct = jax.ShapeDtypeStruct
  return (
      struct((_ROWS, _IN), dtype),
      struct((_GROUPS, _IN, _OUT), dtype),
      struct((_GROUPS,), jnp.int32),
      struct((_ROWS, _OUT), dtype),
  )


class GroupedMatmulResourcesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    if reason := aot.unavailable("h200"):
      self.skipTest(reason)

  def test_kernels_fit_and_keep_their_accumulators_in_registers(self):
    compiled, kernels = aot.kernel_resources(
        _with_gradients(mosaic_gpu.grouped_matmul), *_arguments()
    )
    self.assertLen(kernels, len(_KERNELS))
    for kernel in kernels:
      self.assertEqual(kernel.spill_bytes, 0, kernel.name)
      self.assertFalse(kernel.serialized, kernel.name)
    # Tables of tiles; no copy of a matrix or of the rows.
    temporary = compiled.memory_analysis().temp_size_in_bytes
    self.assertLess(temporary, 1 << 20)

  def test_stacks_are_not_copied_to_join_them(self):
    lhs, rhs, sizes, _ = _arguments()
    d_out = jax.ShapeDtypeStruct((_ROWS, 2 * _OUT), jnp.bfloat16)
    compiled, kernels = aot.kernel_resources(
        _with_gradients(mosaic_gpu.grouped_matmul),
        lhs, (rhs, rhs), sizes, d_out,
    )  # fmt: skip
    self.assertLen(kernels, len(_KERNELS))
    for kernel in kernels:
      # A few words around the loops are no accumulator of 64 KB.
      self.assertLessEqual(kernel.spill_bytes, 32, kernel.name)
      self.assertFalse(kernel.serialized, kernel.name)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    self.assertLess(temporary, 1 << 20)

  def test_none_chooses_the_kernels_for_bf16_alone(self):
    run = _with_gradients(grouped_matmul.grouped_matmul)
    for dtype, chosen in ((jnp.bfloat16, True), (jnp.float32, False)):
      with aot.abstract_device("h200"):
        traced = jax.jit(run).trace(*_arguments(dtype))
      for name in _KERNELS:
        found = f"name={name}\n" in str(traced.jaxpr)
        self.assertEqual(found, chosen, f"{name} in {dtype}")

  def test_layers_may_be_scanned_and_rematerialised(self):
    lhs, _, sizes, _ = _arguments()
    stack = jax.ShapeDtypeStruct((3, _GROUPS, _IN, _IN), jnp.bfloat16)

    @jax.checkpoint
    def layer(x, rhs, sizes):
      return grouped_matmul.grouped_matmul(x, rhs, sizes)

    def loss(stack, x, sizes):
      x, _ = jax.lax.scan(lambda x, r: (layer(x, r, sizes), None), x, stack)
      return jnp.sum(x.astype(jnp.float32))

    with aot.abstract_device("h200"):
      traced = jax.jit(jax.grad(loss)).trace(stack, lhs, sizes)
    text = str(traced.jaxpr)
    for name in _KERNELS:
      self.assertIn(f"name={name}\n", text)


class GroupedMatmulTpuTest(parameterized.TestCase):

  @parameterized.parameters("v5e", "v5p", "v6e", "tpu7x")
  def test_none_chooses_the_compilers_kernel(self, target):
    if reason := aot.unavailable(target):
      self.skipTest(reason)
    compiled = aot.compile_for(
        _with_gradients(grouped_matmul.grouped_matmul),
        *_arguments(),
        target=target,
    )
    # One table of tiles and one kernel for each product.
    self.assertGreaterEqual(
        compiled.as_text().count('custom_call_target="tpu_custom_call"'), 4
    )
    # The matrices once more, transposed for d_lhs, and no expansion by group.
    temporary = compiled.memory_analysis().temp_size_in_bytes
    self.assertLess(temporary, 2 * 2 * _GROUPS * _IN * _OUT)


if __name__ == "__main__":
  absltest.main()
