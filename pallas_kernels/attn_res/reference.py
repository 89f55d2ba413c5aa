"""Attention residuals in plain XLA, with closed-form gradients.

Notation: v_i [..., D] source, u [D] = key_scale * pseudo_query,
r_i = 1 / sqrt(mean(v_i^2) + eps), s_i = r_i (u . v_i), p = softmax(s),
h = sum_i p_i v_i. Normalised keys are never formed; the backward pass keeps
the sources and one or two scalars per source and token.
"""

import functools

import jax
import jax.numpy as jnp

_einsum = functools.partial(
    jnp.einsum,
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stats(eps, sources, queries):
  """Mixes the sources once per query.

  Args:
    eps: added to the mean square.
    sources: tuple of S arrays [..., D], or one array [S, ..., D].
    queries: [Q, D] fp32, key scale included.

  Returns:
    partial: [Q, ..., D] sum_i p_i v_i in the sources' dtype.
    log_sum_exp: [Q, ...] fp32 log sum_i exp(s_i).
  """
  return _stats_forward(eps, sources, queries)[0]


def _stats_forward(eps, sources, queries):
  inverse_rms = [_inverse_rms(source, eps) for source in sources]
  logits = jnp.stack([
      _dot(source, queries) * scale[None]
      for source, scale in zip(sources, inverse_rms, strict=True)
  ])  # [S, Q, ...]
  log_sum_exp = jax.nn.logsumexp(logits, axis=0)
  weights = jnp.exp(logits - log_sum_exp[None])
  partial = sum(
      weight[..., None] * source.astype(jnp.float32)[None]
      for weight, source in zip(weights, sources, strict=True)
  ).astype(sources[0].dtype)
  residuals = sources, queries, logits, log_sum_exp, inverse_rms
  return (partial, log_sum_exp), residuals


def _stats_backward(eps, residuals, cotangents):
  """ds_i = p_i (G . v_i - G . h + d_lse), then through s_i to v_i and u."""
  del eps
  sources, queries, logits, log_sum_exp, inverse_rms = residuals
  d_partial, d_log_sum_exp = cotangents
  d_partial = d_partial.astype(jnp.float32)
  weights = jnp.exp(logits - log_sum_exp[None])
  along = jnp.stack([
      jnp.sum(d_partial * source.astype(jnp.float32)[None], axis=-1)
      for source in sources
  ])  # [S, Q, ...], G . v_i
  mean = jnp.sum(weights * along, axis=0)  # G . h
  d_logits = weights * (along + (d_log_sum_exp - mean)[None])
  d_sources, d_queries = [], 0.0
  for i, source in enumerate(sources):
    direct = jnp.sum(weights[i][..., None] * d_partial, axis=0)
    through_key, d_query = _logit_backward(
        source, queries, inverse_rms[i], logits[i], d_logits[i]
    )
    d_sources.append((direct + through_key).astype(source.dtype))
    d_queries += d_query
  if not isinstance(sources, tuple):
    return jnp.stack(d_sources), d_queries
  return tuple(d_sources), d_queries


stats.defvjp(_stats_forward, _stats_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def merge(eps, partial, log_sum_exp, prefix, query):
  """Adds one source to a mix: a softmax over the two of them.

  Args:
    eps: added to the mean square.
    partial: [..., D] mix of the earlier sources.
    log_sum_exp: [...] fp32 of their logits.
    prefix: [..., D] the source to add.
    query: [D] fp32, key scale included.

  Returns:
    [..., D] in prefix's dtype.
  """
  return _merge_forward(eps, partial, log_sum_exp, prefix, query)[0]


def _merge_forward(eps, partial, log_sum_exp, prefix, query):
  inverse_rms = _inverse_rms(prefix, eps)
  logit = _dot(prefix, query[None])[0] * inverse_rms
  gap = logit - log_sum_exp
  mixed = _share(-gap) * partial.astype(jnp.float32)
  mixed += _share(gap) * prefix.astype(jnp.float32)
  residuals = partial, prefix, query, inverse_rms, logit, gap
  return mixed.astype(prefix.dtype), residuals


def _merge_backward(eps, residuals, d_mixed):
  del eps
  partial, prefix, query, inverse_rms, logit, gap = residuals
  d_mixed = d_mixed.astype(jnp.float32)
  difference = prefix.astype(jnp.float32) - partial.astype(jnp.float32)
  d_logit = jax.nn.sigmoid(gap) * jax.nn.sigmoid(-gap)
  d_logit *= jnp.sum(d_mixed * difference, axis=-1)
  through_key, d_query = _logit_backward(
      prefix, query[None], inverse_rms, logit[None], d_logit[None]
  )
  d_prefix = _share(gap) * d_mixed + through_key
  return (
      (_share(-gap) * d_mixed).astype(partial.dtype),
      -d_logit,
      d_prefix.astype(prefix.dtype),
      d_query[0],
  )


merge.defvjp(_merge_forward, _merge_backward)


def _inverse_rms(source, eps):
  """[...] fp32."""
  square = jnp.square(source.astype(jnp.float32))
  return jax.lax.rsqrt(jnp.mean(square, axis=-1) + eps)


def _dot(source, queries):
  """u . v for each query: [Q, ...] fp32."""
  return _einsum("...d,qd->q...", source.astype(jnp.float32), queries)


def _share(gap):
  return jax.nn.sigmoid(gap)[..., None]


def _logit_backward(source, queries, inverse_rms, logits, d_logits):
  """Gradient of s = r (u . v): r (u - (s r / D) v) to v, r v to u."""
  source = source.astype(jnp.float32)
  scaled = d_logits * inverse_rms[None]  # [Q, ...]
  back = jnp.sum(scaled * logits, axis=0) * inverse_rms / source.shape[-1]
  d_source = _einsum("q...,qd->...d", scaled, queries)
  d_source -= back[..., None] * source
  return d_source, _einsum("q...,...d->qd", scaled, source)
