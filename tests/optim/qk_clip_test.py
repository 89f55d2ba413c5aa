"""Tests of QK-clip against logits computed by hand."""

import functools

from absl.testing import absltest
import jax
import numpy as np

from sparsemm_jax.optim import qk_clip
from tests import testing

RANK, HEADS, NOPE, SHARED, VALUE, TOKENS = 6, 3, 4, 2, 5, 7
TAU = 10.0


@functools.partial(jax.jit, static_argnums=2)
def _clip(params, stats, threshold):
  return qk_clip.qk_clip(params, stats, threshold)


def _module(rng, *stack):
  def normal(*shape):
    return rng.normal(size=(*stack, *shape)).astype(np.float32)

  return {
      "q_up": {"kernel": normal(RANK, HEADS, NOPE + SHARED)},
      "kv_up": {"kernel": normal(RANK, HEADS, NOPE + VALUE)},
      "kv_down": {"kernel": normal(8, RANK + SHARED)},
      "o_proj": {"kernel": normal(HEADS, VALUE, 8)},
  }


def _logits(module, inputs):
  """[H, T, T] of one layer, in float64."""
  query_latent, latent, k_shared = inputs
  q = np.einsum("tr,rhk->thk", query_latent, module["q_up"]["kernel"])
  kv = np.einsum("tr,rhk->thk", latent, module["kv_up"]["kernel"])
  content = np.einsum("thk,shk->hts", q[..., :NOPE], kv[..., :NOPE])
  return content + np.einsum("thk,sk->hts", q[..., NOPE:], k_shared)


class QkClipTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.rng = np.random.default_rng(0)
    self.inputs = [
        self.rng.normal(size=(TOKENS, width)) for width in (RANK, RANK, SHARED)
    ]

  def test_the_largest_logit_of_a_clipped_head_is_the_threshold(self):
    module = _module(self.rng)
    # Head 0 far above, head 1 far below, head 2 just above the threshold.
    peaks = np.max(_logits(module, self.inputs), axis=(1, 2))
    module["q_up"]["kernel"] *= (np.array([500.0, 1.0, 10.1]) / peaks)[:, None]
    before = _logits(module, self.inputs)
    peaks = np.max(before, axis=(1, 2)).astype(np.float32)
    clipped = _clip(
        {"block": {"attn": module}, "other": 1.0},
        {"block": {"attn": {"max_logit": peaks}}},
        TAU,
    )
    self.assertEqual(clipped["other"], 1.0)
    clipped = clipped["block"]["attn"]
    after = _logits(clipped, self.inputs)
    testing.assert_close(np.max(after, axis=(1, 2)), [TAU, 1.0, TAU], "fp32")
    testing.assert_close(
        after, before * np.array([0.02, 1.0, 10 / 10.1])[:, None, None], "fp32"
    )

  def test_it_moves_only_what_a_head_owns(self):
    module = _module(self.rng)
    peaks = np.array([40.0, 5.0, 10.0], np.float32)
    clipped = _clip({"attn": module}, {"attn": {"max_logit": peaks}}, TAU)[
        "attn"
    ]
    for name in ("kv_down", "o_proj"):
      testing.assert_same(clipped[name]["kernel"], module[name]["kernel"])
    old, new = module["kv_up"]["kernel"], clipped["kv_up"]["kernel"]
    testing.assert_same(new[..., NOPE:], old[..., NOPE:], "values")
    testing.assert_same(new[:, 1:], old[:, 1:], "heads within the threshold")
    testing.assert_close(new[:, 0, :NOPE], old[:, 0, :NOPE] / 2, "fp32")
    old, new = module["q_up"]["kernel"], clipped["q_up"]["kernel"]
    testing.assert_same(new[:, 1:], old[:, 1:], "heads within the threshold")
    testing.assert_close(new[:, 0, :NOPE], old[:, 0, :NOPE] / 2, "fp32")
    testing.assert_close(new[:, 0, NOPE:], old[:, 0, NOPE:] / 4, "fp32")

  def test_stacked_layers_are_clipped_each_by_its_own_logits(self):
    module = _module(self.rng, 2)
    peaks = np.array([[5.0, 40.0, 5.0], [90.0, 5.0, 5.0]], np.float32)
    together = _clip({"attn": module}, {"attn": {"max_logit": peaks}}, TAU)[
        "attn"
    ]
    for layer in range(2):
      one = {name: {"kernel": module[name]["kernel"][layer]} for name in module}
      alone = _clip({"attn": one}, {"attn": {"max_logit": peaks[layer]}}, TAU)[
          "attn"
      ]
      for name in ("q_up", "kv_up"):
        testing.assert_same(
            together[name]["kernel"][layer], alone[name]["kernel"], name
        )

  def test_logits_that_are_not_numbers_change_nothing(self):
    module = _module(self.rng)
    peaks = np.full(HEADS, np.nan, np.float32)
    clipped = _clip({"attn": module}, {"attn": {"max_logit": peaks}}, TAU)[
        "attn"
    ]
    testing.assert_same(clipped["q_up"]["kernel"], module["q_up"]["kernel"])


if __name__ == "__main__":
  absltest.main()
