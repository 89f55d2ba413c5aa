"""The chunk form against the recurrence, and the properties it promises."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda
from tests import testing
from tests.pallas_kernels.kda import cases


def _assert_same_as_reference(
    op, inputs, kinds=("fp32", "fp32 gradient"), segment_ids=None
):
  args = (inputs, cases.cotangents(inputs), segment_ids)
  actual = cases.gradient(op, "chunked")(*args)
  expected = cases.gradient(op, "reference")(*args)
  _assert_close(actual, expected, kinds)


def _assert_close(actual, expected, kinds=("fp32", "fp32 gradient")):
  """Compares (outputs, gradients) in value and in dtype."""
  (outputs, grads), (expected, expected_grads) = actual, expected
  for name, a, e in zip(("out", "final_state"), outputs, expected, strict=True):
    testing.assert_close(a, e, kinds[0], name)
    assert a.dtype == e.dtype, name
  assert grads.keys() == expected_grads.keys()
  for name, e in expected_grads.items():
    testing.assert_close(grads[name], e, kinds[1], name)
    assert grads[name].dtype == e.dtype, name


def _resized(tree, tokens):
  """Cuts or zero-pads every array with tokens, which v, say, has."""
  old = tree["v"].shape[1]

  def resize(x):
    if x.ndim < 3 or x.shape[1] != old:
      return x
    return jnp.pad(
        x[:, :tokens],
        [(0, 0), (0, max(0, tokens - old))] + [(0, 0)] * (x.ndim - 2),
    )

  return {name: resize(x) for name, x in tree.items()}


class ChunkedIsTheRecurrenceTest(parameterized.TestCase):

  @parameterized.parameters(0, 1, 15, 16, 63, 64)
  def test_in_a_part_of_one_chunk(self, tokens):
    inputs = cases.fused_inputs(tokens, heads=2, value_heads=4, key=60)
    d_out, d_state = cases.cotangents(inputs)
    # Not compiled as a whole: all these T share the programs inside.
    outputs, vjp = jax.vjp(
        lambda x: kda.fused_kda(**x, implementation="chunked"), inputs
    )
    # One program for every T: tokens appended as padding change nothing.
    ids = (np.arange(64) < tokens).astype(np.int32)[None]
    (out, state), grads = cases.gradient("fused_kda", "reference")(
        _resized(inputs, 64),
        (_resized({"v": d_out}, 64)["v"], d_state),
        ids,
    )
    expected = ((out[:, :tokens], state), _resized(grads, tokens))
    _assert_close((outputs, vjp((d_out, d_state))[0]), expected)

  @parameterized.parameters((65, 1, 128, 48), (1000, 2, 64, 32))
  @pytest.mark.exact
  def test_over_chunks(self, tokens, value_heads, key, value):
    inputs = cases.fused_inputs(
        tokens, value_heads=value_heads, key=key, value=value
    )
    _assert_same_as_reference("fused_kda", inputs)

  def test_from_log_decay(self):
    _assert_same_as_reference("chunk_kda", cases.chunk_inputs(130))

  @pytest.mark.exact
  def test_with_the_gate_saturated(self):
    inputs = cases.fused_inputs(1000)
    inputs["z"] += 200.0  # sigmoid is 1 in fp32: every log decay is -5
    _assert_same_as_reference("fused_kda", inputs)

  @parameterized.parameters(0.0, 0.3)
  def test_with_alike_keys_that_never_decay(self, noise):
    inputs = cases.chunk_inputs(130)
    k = cases.unit(inputs["k"][:, :1] + noise * inputs["k"])
    beta = jnp.full_like(inputs["beta"], 0.999)
    g = jnp.full_like(inputs["g"], -1e-4)
    inputs |= {"k": k, "beta": beta, "g": g}
    _assert_same_as_reference("chunk_kda", inputs)

  def test_in_bf16(self):
    inputs = cases.cast(cases.fused_inputs(130), jnp.bfloat16)
    _assert_same_as_reference("fused_kda", inputs, ("bf16", "bf16 gradient"))

  def test_at_the_end_of_the_legal_range(self):
    inputs = cases.chunk_inputs(130)
    lowest = kda.safe_lower_bound(jnp.float32) + 1e-3
    inputs["g"] = jnp.full_like(inputs["g"], lowest)
    _assert_same_as_reference("chunk_kda", inputs)

  def test_in_two_halves(self):
    inputs = cases.chunk_inputs(130)
    (whole, whole_state), _ = cases.gradient("chunk_kda", "chunked")(
        inputs, cases.cotangents(inputs)
    )
    state, rows = inputs.pop("initial_state"), []
    for half in (slice(0, 65), slice(65, 130)):
      part = {name: x[:, half] for name, x in inputs.items()}
      out, state = kda.chunk_kda(**part, initial_state=state)
      rows.append(out)
    testing.assert_close(np.concatenate(rows, axis=1), whole, "fp32")
    testing.assert_close(state, whole_state, "fp32")


@pytest.mark.exact
class CausalTest(parameterized.TestCase):

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_later_tokens_change_no_bit_of_an_earlier_output(self, dtype):
    tokens = 130
    names = ("q", "k", "v", "z", "beta_logits")
    inputs = cases.cast(cases.fused_inputs(tokens), dtype, names)
    other = cases.cast(cases.fused_inputs(tokens, seed=5), dtype, names)
    other["z"] = jnp.where(other["z"] > -3, 40.0, -40.0).astype(dtype)
    run = cases.forward("fused_kda", "chunked")
    ones = np.ones((1, tokens), np.int32)
    expected = run(inputs, ones)[0]
    for cut in (1, 4, 9, 15, 16, 17, 40, 63, 64, 65, 100, 129):
      later = np.arange(tokens)[None] >= cut
      changed = {
          name: np.where(
              later.reshape(1, tokens, *[1] * (inputs[name].ndim - 2)),
              other[name],
              inputs[name],
          )
          for name in names
      }
      # Other tokens later on, and no tokens yet: appending brings them.
      for variant, ids in ((changed, ones), ({}, np.where(later, 0, 1))):
        out = run(inputs | variant, ids.astype(np.int32))[0]
        testing.assert_same(out[:, :cut], expected[:, :cut], f"{cut=}")

  def test_later_tokens_change_no_bit_of_an_earlier_gradient(self):
    inputs, other = cases.chunk_inputs(130), cases.chunk_inputs(130, seed=5)
    d_out, d_state = cases.cotangents(inputs)
    run = cases.gradient("chunk_kda", "chunked")
    for cut in (9, 65, 100):
      cotangents = (d_out.at[:, cut:].set(0.0), 0.0 * d_state)
      _, expected = run(inputs, cotangents)
      changed = {
          name: jnp.concatenate([x[:, :cut], other[name][:, cut:]], axis=1)
          for name, x in inputs.items()
          if name != "initial_state"
      }
      _, actual = run(inputs | changed, cotangents)
      for name, x in actual.items():
        if name != "initial_state":
          x, e = x[:, :cut], expected[name][:, :cut]
        else:
          e = expected[name]
        testing.assert_same(x, e, f"{name} {cut=}")


class MemoryTest(absltest.TestCase):

  def test_forward_and_backward_hold_no_tokens_times_chunk_times_key(self):
    tokens, heads, key = 8192, 4, 128
    inputs = cases.chunk_inputs(
        tokens, heads=heads, value_heads=heads, key=key, value=key
    )
    lowered = cases.gradient("chunk_kda", "chunked").lower(
        inputs, (inputs["v"], inputs["initial_state"])
    )
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    per_token = temporary / (tokens * heads * 4)  # fp32 numbers
    # Copies of q, k, v, g, of d_out and of four gradients in the order of the
    # scan, and K V / 64 of state; one such array would be 64 K.
    self.assertLess(per_token, 9 * key + key * key / 64)


if __name__ == "__main__":
  absltest.main()
