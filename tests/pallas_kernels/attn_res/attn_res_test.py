"""Attention residuals: against float64, two phases, and what must not change."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attn_res
from tests import testing

_EPS = 1e-6


def _inputs(num_sources, width, dtype=jnp.float32, tokens=(2, 7)):
  keys = jax.random.split(jax.random.key(num_sources), 4)
  sources = 3.0 * jax.random.normal(keys[0], (num_sources, *tokens, width))
  pseudo_query = jax.random.normal(keys[1], (width,)) / np.sqrt(width)
  key_scale = 1.0 + 0.2 * jax.random.normal(keys[2], (width,))
  cotangent = jax.random.normal(keys[3], (*tokens, width))
  return (
      sources.astype(dtype),
      pseudo_query,
      key_scale,
      cotangent.astype(dtype),
  )


def _definition(sources, pseudo_query, key_scale):
  """Keys normalised, multiplied by their gain, softmax over the sources."""
  mean_square = jnp.mean(sources**2, axis=-1, keepdims=True)
  keys = sources / jnp.sqrt(mean_square + _EPS)
  logits = jnp.einsum("s...d,d->s...", keys, key_scale * pseudo_query)
  weights = jax.nn.softmax(logits, axis=0)
  return jnp.einsum("s...,s...d->...d", weights, sources)


def _oracle(sources, pseudo_query, key_scale, cotangent):
  """Value and three gradients in float64, by automatic differentiation."""
  arrays = [
      np.asarray(a, np.float64)
      for a in (sources, pseudo_query, key_scale, cotangent)
  ]
  with jax.enable_x64(True):
    values = jax.tree.map(np.asarray, _oracle_program(*arrays))
  assert values[0].dtype == np.float64
  return values


@jax.jit
def _oracle_program(sources, pseudo_query, key_scale, cotangent):
  out, pull = jax.vjp(_definition, sources, pseudo_query, key_scale)
  return out, *pull(cotangent)


_mix = jax.jit(attn_res.attn_res)


@jax.jit
def _actual(sources, pseudo_query, key_scale, cotangent):
  out, pull = jax.vjp(attn_res.attn_res, sources, pseudo_query, key_scale)
  return out, *pull(cotangent)


@jax.jit
def _two_phase(sources, pseudo_query, key_scale, cotangent):
  def mix(sources, pseudo_query, key_scale):
    partial, log_sum_exp = attn_res.attn_res_stats(
        sources[:-1], pseudo_query[None], key_scale[None]
    )
    return attn_res.attn_res_merge(
        partial[0], log_sum_exp[0], sources[-1], pseudo_query, key_scale
    )

  out, pull = jax.vjp(mix, sources, pseudo_query, key_scale)
  return out, *pull(cotangent)


class AttnResTest(parameterized.TestCase):

  @parameterized.product(num_sources=(1, 2, 9), width=(64, 1000))
  def test_equals_float64(self, num_sources, width):
    sources, *rest = _inputs(num_sources, width)
    expected = _oracle(sources, *rest)
    actual = _actual(tuple(np.asarray(sources)), *rest)
    self._check(actual, expected, "fp32", "fp32 gradient")
    if (num_sources, width) in ((2, 1000), (9, 64)):
      actual = _actual(sources, *rest)
      self._check(actual, expected, "fp32", "fp32 gradient")

  def _check(self, actual, expected, value_kind, gradient_kind):
    actual = list(actual)
    if isinstance(actual[1], tuple):
      actual[1] = np.stack(actual[1])
    testing.assert_close(actual[0], expected[0], value_kind, "mix")
    names = ("d_sources", "d_pseudo_query", "d_key_scale")
    for name, a, e in zip(names, actual[1:], expected[1:], strict=True):
      if np.sqrt(np.mean(e**2)) < 1e-12:  # one source: its weight is 1
        np.testing.assert_allclose(a, 0.0, atol=1e-5, err_msg=name)
      else:
        testing.assert_close(a, e, gradient_kind, name)

  def test_bf16_equals_float64(self):
    inputs = _inputs(9, 64, jnp.bfloat16)
    actual = _actual(*inputs)
    self.assertEqual(actual[0].dtype, jnp.bfloat16)
    self.assertEqual(actual[1].dtype, jnp.bfloat16)
    self.assertEqual(actual[2].dtype, jnp.float32)
    self._check(actual, _oracle(*inputs), "bf16", "bf16 gradient")

  @parameterized.parameters((2, 1000), (9, 64))
  def test_two_phases_equal_float64(self, num_sources, width):
    inputs = _inputs(num_sources, width)
    actual = _two_phase(*inputs)
    self._check(actual, _oracle(*inputs), "fp32", "fp32 gradient")

  def test_two_phases_equal_float64_in_bf16(self):
    inputs = _inputs(9, 64, jnp.bfloat16)
    out = _two_phase(*inputs)[0]
    testing.assert_close(out, _oracle(*inputs)[0], "bf16")

  def test_stats_of_many_queries_equal_one_by_one(self):
    keys = jax.random.split(jax.random.key(0), 5)
    bank = jax.random.normal(keys[0], (4, 2, 7, 64))
    queries = jax.random.normal(keys[1], (3, 64)) / 8.0
    scales = 1.0 + 0.2 * jax.random.normal(keys[2], (3, 64))
    weights = jax.random.normal(keys[3], (3, 2, 7, 64))
    scalars = jax.random.normal(keys[4], (3, 2, 7))

    def together(bank, queries, scales):
      partial, log_sum_exp = attn_res.attn_res_stats(bank, queries, scales)
      return jnp.vdot(weights, partial) + jnp.vdot(scalars, log_sum_exp)

    def one_by_one(bank, queries, scales):
      total = 0.0
      for i in range(3):
        partial = _definition(bank, queries[i], scales[i])
        norm = jnp.sqrt(jnp.mean(bank**2, axis=-1) + _EPS)
        logits = jnp.einsum("s...d,d->s...", bank, queries[i] * scales[i])
        log_sum_exp = jax.nn.logsumexp(logits / norm, axis=0)
        total += jnp.vdot(weights[i], partial)
        total += jnp.vdot(scalars[i], log_sum_exp)
      return total

    arguments = (bank, queries, scales)
    actual = jax.jit(jax.grad(together, (0, 1, 2)))(*arguments)
    expected = jax.jit(jax.grad(one_by_one, (0, 1, 2)))(*arguments)
    for a, e in zip(actual, expected, strict=True):
      testing.assert_close(a, e, "fp32 gradient")

  @parameterized.parameters(1, 2, 9)
  def test_zero_query_gives_the_mean(self, num_sources):
    sources, pseudo_query, key_scale, cotangent = _inputs(num_sources, 64)
    pseudo_query = jnp.zeros_like(pseudo_query)
    out, d_sources, d_query, d_scale = _actual(
        sources, pseudo_query, key_scale, cotangent
    )
    testing.assert_close(
        out, np.mean(np.asarray(sources, np.float64), axis=0), "fp32"
    )
    # The keys get nothing yet; training starts from the query's gradient.
    share = np.broadcast_to(cotangent / num_sources, sources.shape)
    testing.assert_close(d_sources, share, "fp32")
    testing.assert_same(d_scale, np.zeros(64, np.float32))
    if num_sources > 1:
      self.assertGreater(float(jnp.linalg.norm(d_query)), 0.1)

  def test_equal_sources_are_reproduced(self):
    sources, pseudo_query, key_scale, _ = map(np.asarray, _inputs(9, 64))
    same = np.broadcast_to(sources[:1], sources.shape)
    mixed = _mix(same, 9.0 * pseudo_query, key_scale)
    testing.assert_close(mixed, sources[0], "fp32")

  def test_mix_stays_between_the_sources(self):
    sources, pseudo_query, key_scale, _ = map(np.asarray, _inputs(9, 64))
    mixed = _mix(sources, 9.0 * pseudo_query, key_scale)
    self.assertTrue(np.all(mixed <= np.max(sources, axis=0) + 1e-5))
    self.assertTrue(np.all(mixed >= np.min(sources, axis=0) - 1e-5))

  def test_order_of_sources_does_not_matter(self):
    sources, pseudo_query, key_scale, _ = map(np.asarray, _inputs(9, 64))
    testing.assert_close(
        _mix(sources[::-1], pseudo_query, key_scale),
        _mix(sources, pseudo_query, key_scale),
        "fp32",
    )

  @parameterized.parameters(False, True)
  def test_the_last_source_can_be_left_out(self, use_last):
    sources, query, scale, cotangent = _inputs(3, 16)
    expected = _actual(sources[: 2 + use_last], query, scale, cotangent)

    @jax.jit
    def actual(use_last):
      mix = functools.partial(attn_res.attn_res, use_last=use_last)
      out, pull = jax.vjp(mix, tuple(sources), query, scale)
      return out, *pull(cotangent)

    out, d_sources, *d_vectors = actual(jnp.bool(use_last))
    testing.assert_close(out, expected[0], "fp32")
    kept = jnp.stack(d_sources[: 2 + use_last])
    for got, want in zip((kept, *d_vectors), expected[1:], strict=True):
      testing.assert_close(got, want, "fp32 gradient")
    if not use_last:
      testing.assert_same(d_sources[2], np.zeros_like(sources[2]))

  def test_scaling_every_source_scales_the_mix(self):
    # Keys are normalised, values are not.
    sources, pseudo_query, key_scale, _ = map(np.asarray, _inputs(9, 64))
    one = _mix(sources, pseudo_query, key_scale)
    two = _mix(2.0 * sources, pseudo_query, key_scale)
    testing.assert_close(two, 2.0 * one, "fp32")

  def test_huge_logits_stay_finite(self):
    sources, pseudo_query, key_scale, cotangent = _inputs(9, 64)
    for values in (
        _actual(sources, 1e4 * pseudo_query, key_scale, cotangent),
        _two_phase(sources, 1e4 * pseudo_query, key_scale, cotangent),
    ):
      for value in values:
        self.assertTrue(np.all(np.isfinite(value)))

  def test_saves_no_more_than_the_sources_and_scalars(self):
    sources, pseudo_query, key_scale, _ = _inputs(9, 64)
    pull = jax.eval_shape(
        lambda *arrays: jax.vjp(attn_res.attn_res, *arrays)[1],
        tuple(np.asarray(sources)),
        pseudo_query,
        key_scale,
    )
    saved = sum(x.size for x in jax.tree.leaves(pull))
    self.assertGreaterEqual(saved, sources.size)
    scalars = 4 * 9 * 2 * 7
    self.assertLessEqual(saved, sources.size + scalars + 4 * 64)

  def test_bad_arguments_are_named(self):
    sources, pseudo_query, key_scale, _ = map(np.asarray, _inputs(9, 64))
    with self.assertRaisesRegex(ValueError, "at least one source"):
      attn_res.attn_res([], pseudo_query, key_scale)
    with self.assertRaisesRegex(ValueError, "shape or dtype"):
      attn_res.attn_res(
          [sources[0], sources[1].astype(jnp.bfloat16)],
          pseudo_query,
          key_scale,
      )
    with self.assertRaisesRegex(ValueError, "pseudo-query"):
      attn_res.attn_res(sources, pseudo_query[:32], key_scale[:32])
    with self.assertRaisesRegex(ValueError, "key_scale"):
      attn_res.attn_res(sources, pseudo_query, key_scale[:32])
    with self.assertRaisesRegex(ValueError, "log_sum_exp"):
      attn_res.attn_res_merge(
          sources[0],
          jnp.zeros((7, 2)),
          sources[1],
          pseudo_query,
          key_scale,
      )


if __name__ == "__main__":
  absltest.main()
