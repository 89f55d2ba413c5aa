"""Compiling for devices that are not here."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp

from pallas_kernels import aot
from pallas_kernels import dispatch


class CompileForTest(parameterized.TestCase):

  @parameterized.parameters("h200", "v5e", "v5p", "v6e", "tpu7x")
  def test_a_target_is_what_traced_code_sees_and_compiles(self, target):
    if reason := aot.unavailable(target):
      self.skipTest(reason)
    seen = []

    def square(x):
      seen.append(dispatch.device_platform())
      return x @ x

    struct = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    compiled = aot.compile_for(square, struct, target=target)
    self.assertEqual(seen, ["gpu" if target == "h200" else "tpu"])
    self.assertEqual(
        compiled.memory_analysis().argument_size_in_bytes, 128 * 128 * 2
    )

  def test_a_slice_has_its_chips(self):
    if reason := aot.unavailable("v5p"):
      self.skipTest(reason)
    self.assertLen(aot.devices("v5p:4x4x4"), 64)

  @parameterized.parameters("h300", "v7x", "v5p-4")
  def test_an_unknown_target_is_refused(self, target):
    with self.assertRaisesRegex(ValueError, target):
      aot.compile_for(lambda x: x, target=target)


class ResourcesTest(absltest.TestCase):

  def test_a_report_is_read_kernel_by_kernel(self):
    text = (
        "ptxas info : (C7512) Potential Performance Loss: serialized in the"
        " function 'one'\n"
        "ptxas info : Compiling entry function 'one' for 'sm_90a'\n"
        "  8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n"
        "ptxas info : Used 255 registers, used 1 barriers\n"
        "ptxas info : (C7519) Potential Performance Loss: something else in"
        " function 'two'\n"
        "ptxas info : Compiling entry function 'two' for 'sm_90a'\n"
        "  0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info : Used 40 registers, used 1 barriers\n"
    )
    self.assertEqual(
        aot._parse_ptxas(text),
        [
            aot.KernelResources("one", 255, 16, True),
            aot.KernelResources("two", 40, 0, False),
        ],
    )


if __name__ == "__main__":
  absltest.main()
