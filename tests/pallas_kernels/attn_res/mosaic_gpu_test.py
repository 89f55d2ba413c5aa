"""The Hopper attention-residual kernels in the CPU interpreter."""

import contextlib
import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
import numpy as np

from pallas_kernels import attn_res
from pallas_kernels.attn_res import mosaic_gpu
from pallas_kernels.attn_res import mosaic_gpu_plan
from pallas_kernels.attn_res import reference
from tests import testing
from tests.pallas_kernels import races

_EPS = 1e-6
_INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def _inputs(num_sources, tokens, width, dtype):
  keys = jax.random.split(jax.random.key(num_sources), 3)
  sources = 3.0 * jax.random.normal(keys[0], (num_sources, tokens, width))
  query = jax.random.normal(keys[1], (width,)) / np.sqrt(width)
  cotangent = jax.random.normal(keys[2], (tokens, width))
  return sources.astype(dtype), query, cotangent.astype(dtype)


def _reference_with_gradients(sources, query, cotangent):
  out, pull = jax.vjp(lambda *x: reference.mix(_EPS, *x), sources, query)
  return out, *pull(cotangent)


class MosaicGpuTest(parameterized.TestCase):

  def run_without_races(
      self, sources, query, cotangent, use_last=None, norm_scale=None
  ):
    """Output and gradients; of norm_scale too if there is one."""
    vectors = (query,) if norm_scale is None else (query, norm_scale)
    with races.none_found():
      out, pull = jax.vjp(
          lambda v, u, *g: mosaic_gpu.mix(
              _EPS, v, u, use_last, *g, interpret=_INTERPRET
          ),
          sources,
          *vectors,
      )
      d_sources, *d_vectors = jax.block_until_ready(pull(cotangent))
    return out, jnp.stack(tuple(d_sources)), *d_vectors

  def check(self, num_sources, tokens, width, dtype, stacked=False):
    sources, query, cotangent = _inputs(num_sources, tokens, width, dtype)
    given = sources if stacked else tuple(sources)
    actual = self.run_without_races(given, query, cotangent)
    wide = (sources.astype(jnp.float32), query, cotangent.astype(jnp.float32))
    expected = _reference_with_gradients(*wide)
    kind = "fp32" if dtype == jnp.float32 else "bf16"
    self.assertEqual(actual[0].dtype, dtype)
    self.assertEqual(actual[1].dtype, dtype)
    testing.assert_close(actual[0], expected[0], kind, "mix")
    testing.assert_close(
        actual[1], expected[1], f"{kind} gradient", "d_sources"
    )
    testing.assert_close(actual[2], expected[2], f"{kind} gradient", "d_query")

  # A width that must be padded; a ring shorter than what passes through it.
  def test_equals_the_reference_without_races(self):
    self.check(3, 5, 200, jnp.float32)

  def test_one_array_of_bf16_sources_equals_the_reference(self):
    self.check(2, 3, 256, jnp.bfloat16, stacked=True)

  def test_two_warpgroups_on_a_token_equal_the_reference(self):
    with mock.patch.object(mosaic_gpu_plan, "_SPLIT_ABOVE", 256):
      self.check(2, 3, 512, jnp.float32)

  def test_sources_that_do_not_fit_the_ring_are_read_twice(self):
    rows = 4 * 128 * 4
    with mock.patch.object(
        mosaic_gpu_plan, "_SHARED_BYTES", 16 * 1024 + 2 * rows
    ):
      self.check(5, 3, 128, jnp.float32)

  def test_one_source_is_returned_and_gives_the_query_nothing(self):
    sources, query, cotangent = _inputs(1, 2, 128, jnp.float32)
    out, d_sources, d_query = self.run_without_races(
        tuple(sources), query, cotangent
    )
    testing.assert_same(out, sources[0])
    testing.assert_same(d_sources[0], cotangent)
    testing.assert_same(d_query, np.zeros(128, np.float32))

  def test_a_source_that_is_left_out_changes_nothing(self):
    sources, query, cotangent = _inputs(3, 3, 128, jnp.float32)
    out, d_sources, d_query = self.run_without_races(
        tuple(sources), query, cotangent, jnp.bool(False)
    )
    expected = _reference_with_gradients(sources[:2], query, cotangent)
    testing.assert_close(out, expected[0], "fp32")
    testing.assert_close(d_sources[:2], expected[1], "fp32 gradient")
    testing.assert_close(d_query, expected[2], "fp32 gradient")
    testing.assert_same(d_sources[2], np.zeros((3, 128), np.float32))

  # Padding and a ring of few rows; two warpgroups; XLA's norm after a ring that
  # is too small.
  @parameterized.parameters(
      (3, 5, 200, jnp.float32, {}),
      (2, 3, 512, jnp.bfloat16, {"_SPLIT_NORMED_ABOVE": 256}),
      (5, 3, 128, jnp.float32, {"_SHARED_BYTES": 17 * 1024 + 4 * 512}),
  )
  def test_a_norm_of_the_mix_equals_the_reference(
      self, num_sources, tokens, width, dtype, changes
  ):
    sources, query, cotangent = _inputs(num_sources, tokens, width, dtype)
    scale = 1.0 + 0.2 * jax.random.normal(jax.random.key(9), (width,))
    with mock.patch.multiple(mosaic_gpu_plan, **changes) if changes else (
        contextlib.nullcontext()
    ):
      *actual, d_scale = self.run_without_races(
          tuple(sources), query, cotangent, norm_scale=scale
      )
    wide = tuple(sources.astype(jnp.float32))
    out, pull = jax.vjp(
        lambda v, u, g: reference.normed_mix(_EPS, v, u, norm_scale=g),
        wide,
        query,
        scale,
    )
    d_sources, *d_vectors = pull(cotangent.astype(jnp.float32))
    kind = "fp32" if dtype == jnp.float32 else "bf16"
    testing.assert_close(actual[0], out, kind, "mix")
    expected = (jnp.stack(d_sources), *d_vectors)
    for a, b in zip((*actual[1:], d_scale), expected, strict=True):
      testing.assert_close(a, b, f"{kind} gradient")

  # An odd number of queries; two warpgroups on a token.
  @parameterized.parameters((3, 3, 128, jnp.float32), (2, 2, 512, jnp.bfloat16))
  def test_the_mixes_of_many_queries_equal_the_reference(
      self, num_queries, num_sources, width, dtype
  ):
    sources, *_ = _inputs(num_sources, 5, width, dtype)
    logits = jax.random.normal(jax.random.key(1), (num_queries, num_sources, 5))
    weights = jax.nn.softmax(logits, axis=1)
    split = mock.patch.object(mosaic_gpu_plan, "_SPLIT_ABOVE", 256)
    with split, races.none_found():
      actual = mosaic_gpu.combine(weights, tuple(sources), interpret=_INTERPRET)
      actual.block_until_ready()
    wide = tuple(sources.astype(jnp.float32))
    kind = "fp32" if dtype == jnp.float32 else "bf16"
    testing.assert_close(actual, reference.combine(weights, wide), kind)

  def test_a_merge_with_a_norm_equals_the_reference(self):
    sources, query, cotangent = _inputs(2, 5, 128, jnp.float32)
    scale = 1.0 + 0.2 * jax.random.normal(jax.random.key(9), (128,))
    arguments = (
        sources[0], jax.random.normal(jax.random.key(8), (5,)), sources[1],
        query,
    )  # fmt: skip

    def both(merge):
      out, pull = jax.vjp(
          lambda *x: merge(_EPS, *x[:4], norm_scale=x[4]), *arguments, scale
      )
      return out, *pull(cotangent)

    merge = functools.partial(mosaic_gpu.merge, interpret=_INTERPRET)
    with races.none_found():
      actual = jax.block_until_ready(both(merge))
    expected = both(reference.normed_merge)
    testing.assert_close(actual[0], expected[0], "fp32")
    for a, b in zip(actual[1:], expected[1:], strict=True):
      testing.assert_close(a, b, "fp32 gradient")

  @parameterized.parameters(
      (33, 128, jnp.float32, "33 sources"),
      (2, 8320, jnp.bfloat16, "width 8320"),
      (2, 128, jnp.float16, "float16"),
  )
  def test_refuses_with_the_reason(self, num_sources, width, dtype, reason):
    sources = (jnp.zeros((2, width), dtype),) * num_sources
    ones = jnp.ones((width,))
    with self.assertRaisesRegex(NotImplementedError, reason):
      attn_res.attn_res(sources, ones, ones, implementation="mosaic_gpu")


if __name__ == "__main__":
  absltest.main()
