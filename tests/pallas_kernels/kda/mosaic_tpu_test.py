"""The TPU kernels in the interpreter, against the recurrence."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp

# The race detector's verdict has no public name.
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
import numpy as np

from pallas_kernels.kda import mosaic_tpu
from tests import testing
from tests.pallas_kernels.kda import cases

_TOKENS = 130  # two steps of two chunks; the last holds two tokens


@functools.cache
def _gradient(op):
  """As `cases.gradient`, of a TPU kernel in the interpreter.

  What a kernel reads before it writes is NaN.
  """
  options = {"lower_bound": -5.0} if op == "fused_kda" else {}

  def pull(inputs, cotangents, segment_ids):
    run = functools.partial(
        getattr(mosaic_tpu, op),
        scale=inputs["q"].shape[-1] ** -0.5,
        segment_ids=segment_ids,
        interpret=pltpu.InterpretParams(),
        **options,
    )
    outputs, vjp = jax.vjp(lambda x: run(**x), inputs)
    return outputs, vjp(cotangents)[0]

  return jax.jit(pull)


def _recurrence(op, inputs, cotangents, segment_ids):
  run = cases.gradient(op, "reference")
  return run(*_fp32((inputs, cotangents)), segment_ids)


def _fp32(x):
  return jax.tree.map(lambda y: y.astype(jnp.float32), x)


def _segments(tokens):
  """Padding, a boundary at (63, ...), padding inside, ids that return."""
  ids = np.ones((1, tokens), np.int32)
  ids[:, :2], ids[:, 20:63], ids[:, 70:73], ids[:, 90:] = 0, 2, 0, 2
  return jnp.asarray(ids)


class MosaicTpuTest(parameterized.TestCase):

  def check(self, op, inputs, kind, segment_ids=None):
    cotangents = cases.cotangents(inputs)
    actual = _gradient(op)(inputs, cotangents, segment_ids)
    expected = _recurrence(op, inputs, cotangents, segment_ids)
    for name, a, e in zip(("output", "state"), actual[0], expected[0]):
      testing.assert_close(a, e, kind, name)
    for name, e in expected[1].items():
      testing.assert_close(actual[1][name], e, f"{kind} gradient", f"d {name}")
    return actual

  def test_bf16_segments_tail_and_shared_heads_match_the_recurrence(self):
    inputs = cases.fused_inputs(_TOKENS, heads=1, value_heads=2)
    inputs = cases.cast(inputs, jnp.bfloat16, ("q", "k", "v", "z"))
    self.check("fused_kda", inputs, "bf16", _segments(_TOKENS))

  def test_saturated_gates_match_the_recurrence(self):
    inputs = cases.fused_inputs(_TOKENS, heads=1, value_heads=2)
    inputs["z"] += 8.0
    inputs = cases.cast(inputs, jnp.bfloat16, ("q", "k", "v", "z"))
    self.check("fused_kda", inputs, "bf16", _segments(_TOKENS))

  def test_fp32_and_full_widths_match_the_recurrence(self):
    inputs = cases.chunk_inputs(_TOKENS, value_heads=1, key=128, value=128)
    self.check("chunk_kda", inputs, "fp32")

  def test_identical_keys_that_hardly_decay_match_the_recurrence(self):
    inputs = cases.chunk_inputs(_TOKENS, value_heads=1, key=128, value=128)
    inputs["k"] = jnp.broadcast_to(inputs["k"][:, :1], inputs["k"].shape)
    inputs["g"] *= 1e-4
    inputs["beta"] = 1.0 - 1e-2 * inputs["beta"]
    self.check("chunk_kda", inputs, "fp32")

  def test_nothing_races(self):
    inputs = cases.chunk_inputs(_TOKENS, value_heads=1, key=128, value=128)
    params = pltpu.InterpretParams(detect_races=True)
    jax.block_until_ready(
        mosaic_tpu.chunk_kda(
            **inputs, scale=1.0, segment_ids=None, interpret=params
        )
    )
    self.assertFalse(interpret_pallas_call.races.races_found)

  def test_later_tokens_change_no_bit_of_earlier_outputs(self):
    inputs = cases.chunk_inputs(_TOKENS, value_heads=1, key=128, value=128)
    inputs["g"] = jnp.full_like(inputs["g"], -5.0)
    cotangents = cases.cotangents(inputs)
    run = _gradient("chunk_kda")
    (out, _), _ = run(inputs, cotangents, None)
    for first in (17, 40, 64, 110):
      changed = inputs | {
          name: inputs[name].at[:, first:].multiply(0.3)
          for name in ("q", "k", "v", "g", "beta")
      }
      (other, _), _ = run(changed, cotangents, None)
      testing.assert_same(out[:, :first], other[:, :first])
      self.assertFalse((out[:, first:] == other[:, first:]).all())

  def test_what_stands_in_padding_reaches_nothing(self):
    inputs = cases.fused_inputs(_TOKENS, heads=1, value_heads=2)
    inputs = cases.cast(inputs, jnp.bfloat16, ("q", "k", "v", "z"))
    cotangents = cases.cotangents(inputs)
    segment_ids = _segments(_TOKENS)
    padding = np.asarray(segment_ids) == 0
    poisoned = dict(inputs)
    for name in ("q", "k", "v", "z", "beta_logits"):
      poisoned[name] = inputs[name].at[padding].set(jnp.nan)
    run = _gradient("fused_kda")
    clean = run(inputs, cotangents, segment_ids)
    cotangents = cotangents[0].at[padding].set(jnp.nan), cotangents[1]
    dirty = run(poisoned, cotangents, segment_ids)
    jax.tree.map(testing.assert_same, dirty, clean)
    self.assertFalse(np.asarray(clean[0][0])[padding].any())

  @parameterized.parameters(
      (32, 32, 8, 8),
      (96, 96, 8, 8),
      (12, 12, 6, 6),
      (7, 7, 7, 7),
      (11, 11, 1, 1),
      (4, 16, 8, 2),
      (1, 16, 8, 1),
      (2, 6, 6, 2),
      (1, 1, 1, 1),
  )
  def test_a_program_takes_whole_groups_of_heads(
      self, heads, value_heads, per_program, queries
  ):
    self.assertEqual(
        mosaic_tpu.heads_per_program(heads, value_heads),
        (per_program, queries),
    )

  @parameterized.parameters(
      (dict(key=160), jnp.float32, "widths K 160"),
      (dict(value=256), jnp.float32, "V 256"),
      (dict(), jnp.float16, "q is float16"),
      (dict(tokens=0), jnp.float32, "no tokens"),
  )
  def test_what_is_not_served_is_refused_by_name(self, change, dtype, reason):
    inputs = cases.chunk_inputs(**(dict(tokens=3) | change))
    inputs = cases.cast(inputs, dtype, ("q",))
    with self.assertRaisesRegex(NotImplementedError, reason):
      mosaic_tpu.chunk_kda(
          **inputs, scale=1.0, segment_ids=None, interpret=True
      )

  def test_without_a_tpu_it_is_refused(self):
    inputs = cases.fused_inputs(3)
    with self.assertRaisesRegex(NotImplementedError, "TPU"):
      mosaic_tpu.fused_kda(
          **inputs, lower_bound=-5.0, scale=1.0, segment_ids=None
      )


if __name__ == "__main__":
  absltest.main()
