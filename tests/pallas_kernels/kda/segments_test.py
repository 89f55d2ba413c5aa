"""Packed documents, padding, and the state that crosses them."""

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from tests import testing
from tests.pallas_kernels.kda import cases

_TOKENS = 130
_TOKEN_INPUTS = ("q", "k", "v", "z", "beta_logits")


def _ids(*runs):
  """[1, 130] from (id, length) pairs, the rest padding."""
  ids = np.concatenate([np.full(length, i) for i, length in runs])
  return np.pad(ids, (0, _TOKENS - len(ids))).astype(np.int32)[None]


# 63 and 65; boundaries inside a chunk, a tile and at a chunk's edge; an id
# that comes back; padding before, inside and after a segment.
_LAYOUTS = {
    "one": _ids((5, 130)),
    "63 and 65": _ids((1, 63), (2, 65)),
    "short": _ids((7, 1), (2, 20), (7, 43), (3, 3), (1, 63)),
    "padding": _ids((0, 5), (4, 30), (0, 40), (4, 9), (0, 1), (2, 20)),
    "only padding": _ids((0, 130)),
}


def _run(inputs, cotangents, ids, implementation="chunked"):
  return cases.gradient("fused_kda", implementation)(inputs, cotangents, ids)


class SegmentsTest(parameterized.TestCase):

  @parameterized.parameters(*_LAYOUTS)
  def test_chunked_is_the_recurrence(self, layout):
    ids = _LAYOUTS[layout]
    inputs = cases.fused_inputs(_TOKENS)
    cotangents = cases.cotangents(inputs)
    outputs, grads = _run(inputs, cotangents, ids)
    expected, expected_grads = _run(inputs, cotangents, ids, "reference")
    for a, e in zip(outputs, expected, strict=True):
      testing.assert_close(a, e, "fp32")
    for name, e in expected_grads.items():
      testing.assert_close(grads[name], e, "fp32 gradient", name)

  @parameterized.parameters("chunked", "reference")
  def test_packed_documents_are_separate_documents(self, implementation):
    ids = _LAYOUTS["63 and 65"]
    inputs = cases.fused_inputs(_TOKENS)
    cotangents = cases.cotangents(inputs)
    (out, state), _ = _run(inputs, cotangents, ids, implementation)
    alone = np.where(np.arange(_TOKENS) < 63, 1, 0).astype(np.int32)[None]
    (first, _), _ = _run(inputs, cotangents, alone, implementation)
    testing.assert_close(out[:, :63], first[:, :63], "fp32")
    moved = {
        name: jnp.roll(x, -63, axis=1) if name in _TOKEN_INPUTS else x
        for name, x in inputs.items()
    }
    moved["initial_state"] = jnp.zeros_like(inputs["initial_state"])
    alone = np.roll(np.where(ids == 2, 2, 0), -63).astype(np.int32)
    (second, last), _ = _run(moved, cotangents, alone, implementation)
    testing.assert_close(out[:, 63:128], second[:, :65], "fp32")
    testing.assert_close(state, last, "fp32")

  @parameterized.parameters("chunked", "reference")
  def test_padding_inside_a_segment_is_skipped(self, implementation):
    inputs = cases.fused_inputs(_TOKENS)
    cotangents = cases.cotangents(inputs)
    gap = _ids((3, 50), (0, 30), (3, 50))
    (out, state), _ = _run(inputs, cotangents, gap, implementation)
    keep = np.r_[0:50, 80:130, 50:80]
    closed = {
        name: x[:, keep] if name in _TOKEN_INPUTS else x
        for name, x in inputs.items()
    }
    (expected, expected_state), _ = _run(
        closed, cotangents, gap[:, keep], implementation
    )
    testing.assert_close(out[:, keep], expected, "fp32")
    testing.assert_close(state, expected_state, "fp32")

  @parameterized.parameters("chunked", "reference")
  def test_nan_in_padding_changes_nothing(self, implementation):
    ids = _LAYOUTS["padding"]
    inputs = cases.fused_inputs(_TOKENS)
    cotangents = cases.cotangents(inputs)
    expected, expected_grads = _run(inputs, cotangents, ids, implementation)
    self.assertFalse(np.any(np.asarray(expected[0])[ids == 0]))

    def poison(x):
      mask = (ids == 0).reshape(1, _TOKENS, *[1] * (x.ndim - 2))
      return jnp.where(mask, jnp.nan, x)

    bad = {
        name: poison(x) if name in _TOKEN_INPUTS else x
        for name, x in inputs.items()
    }
    outputs, grads = _run(
        bad, (poison(cotangents[0]), cotangents[1]), ids, implementation
    )
    for a, e in zip(outputs, expected, strict=True):
      testing.assert_same(a, e)
    for name, e in expected_grads.items():
      testing.assert_same(grads[name], e, name)

  def test_only_padding_hands_the_state_through(self):
    ids = _LAYOUTS["only padding"]
    inputs = cases.fused_inputs(_TOKENS)
    cotangents = cases.cotangents(inputs)
    (out, state), grads = _run(inputs, cotangents, ids)
    self.assertFalse(np.any(out))
    testing.assert_same(state, inputs["initial_state"])
    testing.assert_same(grads["initial_state"], cotangents[1])


if __name__ == "__main__":
  absltest.main()
