"""The TPU attention kernels compile for every generation, within memory.

A kernel over its VMEM does not compile. Bundle counts, the stand-in for time,
take a dump of the schedule: `python -m experiments.tpu_bundles`.
"""

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp

from pallas_kernels import aot
from pallas_kernels import kda
from pallas_kernels.kda import arg_specs

_MIB = 2**20


def _forward_and_backward(x, state, segment_ids):
  """The best implementation for the device, whatever it is."""

  def run(x, state):
    return kda.fused_kda(**x, initial_state=state, segment_ids=segment_ids)

  (out, final), vjp = jax.vjp(run, x, state)
  return out, vjp((out, final))


def _compile(spec, target, *, state=False, segments=False):
  struct = jax.ShapeDtypeStruct
  shape = (spec.batch, spec.value_heads, spec.key_width, spec.value_width)
  return aot.compile_for(
      _forward_and_backward,
      spec.shapes(),
      struct(shape, jnp.float32) if state else None,
      struct((spec.batch, spec.tokens), jnp.int32) if segments else None,
      target=target,
  )


class KdaTpuTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    if reason := aot.unavailable("v6e"):
      self.skipTest(reason)

  def check_kernels(self, compiled):
    text = compiled.as_text()
    self.assertIn("kda_forward", text)
    self.assertIn("kda_backward", text)
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 2)

  @parameterized.parameters("v5e", "v5p", "v6e", "tpu7x")
  def test_both_passes_compile_with_segments_and_states(self, target):
    # Shared query heads, a tail, narrow widths: everything that can be asked.
    spec = arg_specs.ArgSpec(2, 130, 1, 2, 64, 64)
    self.check_kernels(_compile(spec, target, state=True, segments=True))

  def test_fp32_blocks_of_all_heads_fit_the_smallest_memory(self):
    spec = arg_specs.ArgSpec(1, 256, 8, 8, dtype=jnp.float32)
    self.check_kernels(_compile(spec, "tpu7x"))

  def test_temporary_memory_is_the_states_and_the_layouts(self):
    spec = arg_specs.ArgSpec(1, 8192, 32, 32)
    compiled = _compile(spec, "v6e")
    self.check_kernels(compiled)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    # 128 MiB of states, and every argument and gradient once more: heads
    # stand beside each other for the kernels, below each other for callers.
    self.assertLess(temporary, 700 * _MIB)

  @parameterized.parameters("v5e", "v5p", "v6e", "tpu7x")
  def test_a_decode_step_updates_a_donated_state_in_place(self, target):
    struct = jax.ShapeDtypeStruct
    batch, heads, width = 64, 32, 128
    token = struct((batch, 1, heads, width), jnp.bfloat16)
    state = struct((batch, heads, width, width), jnp.float32)

    def step(state, q, k, v, g, beta):
      return kda.recurrent_kda(q, k, v, g, beta, initial_state=state)

    compiled = aot.compile_for(
        jax.jit(step, donate_argnums=0),
        state,
        token,
        token,
        token,
        struct(token.shape, jnp.float32),
        struct(token.shape[:3], jnp.bfloat16),
        target=target,
    )
    self.assertIn("kda_recurrent", compiled.as_text())
    memory = compiled.memory_analysis()
    state_bytes = 4 * state.size
    self.assertEqual(memory.alias_size_in_bytes, state_bytes)
    self.assertLess(memory.temp_size_in_bytes, state_bytes // 8)


if __name__ == "__main__":
  absltest.main()
