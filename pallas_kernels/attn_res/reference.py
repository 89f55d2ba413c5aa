"""Attention residuals in plain XLA, with closed-form gradients.

Notation: v_i [..., D] source, u [D] = key_scale * pseudo_query,
r_i = 1 / sqrt(mean(v_i^2) + eps), s_i = r_i (u . v_i), p = softmax(s),
h = sum_i p_i v_i, G the cotangent of h. Then

  ds_i = p_i (G . v_i - G . h)
  dv_i = p_i G + ds_i r_i (u - (s_i r_i / D) v_i)
  du   = sum over tokens and i of ds_i r_i v_i

Normalised keys are never formed; the backward passes keep the inputs and a few
scalars per source and token. A source that is left out has the logit EXCLUDED,
which is finite: its weight and gradient come out as zero, not as NaN.
"""

import functools

import jax
import jax.numpy as jnp

_einsum = functools.partial(
    jnp.einsum,
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
)
EXCLUDED = float(jnp.finfo(jnp.float32).min)


def normed_mix(eps, sources, query, use_last=None, norm_scale=None):
  """`mix`, then `rms_norm` if there is a scale."""
  mixed = mix(eps, sources, query, use_last)
  return mixed if norm_scale is None else rms_norm(eps, mixed, norm_scale)


def rms_norm(eps, x, scale):
  """scale * x / rms(x) over the last axis, in fp32 and cast once."""
  wide = x.astype(jnp.float32)
  gain = jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))
  return (wide * _inverse_rms(x, eps)[..., None] * gain).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mix(eps, sources, query, use_last=None):
  """Mixes the sources by one query.

  Args:
    eps: added to the mean square.
    sources: tuple of S arrays [..., D], or one array [S, ..., D].
    query: [D] fp32, key scale included.
    use_last: bool scalar, whether the last source counts; None: it does.

  Returns:
    [..., D] in the sources' dtype.
  """
  return _mix_forward(eps, sources, query, use_last)[0]


def _mix_forward(eps, sources, query, use_last):
  if isinstance(sources, tuple):
    # With the layer's own query a barrier keeps the sources, of a scan over
    # layers the same in each, from being cast to fp32 in memory before it.
    *bank, last = sources
    bank, query = jax.lax.optimization_barrier((bank, query))
    sources = (*bank, last)
  inverse_rms = _each(lambda v: _inverse_rms(v, eps), sources)
  logits = _each(lambda v: _dot(v, query), sources) * inverse_rms
  if use_last is not None:
    last = jnp.where(use_last, logits[-1], EXCLUDED)
    logits = logits.at[-1].set(last)
  weights = jax.nn.softmax(logits, axis=0)
  if isinstance(sources, tuple):  # added up one by one, never stacked
    mixed = functools.reduce(jnp.add, map(_scale, weights, sources))
    mixed = mixed.astype(sources[0].dtype)
  else:
    mixed = jnp.sum(_scale(weights, sources), axis=0).astype(sources.dtype)
  return mixed, (sources, query, inverse_rms, logits, weights)


def _mix_backward(eps, residuals, d_mixed):
  del eps
  sources, query, inverse_rms, logits, weights = residuals
  # It is read several times: XLA would keep the fp32 in which it was computed.
  d_mixed = jax.lax.optimization_barrier(d_mixed)
  along = _each(lambda v: _dot(v, d_mixed), sources)  # G . v_i
  d_logits = weights * (along - jnp.sum(weights * along, axis=0)[None])
  scaled = d_logits * inverse_rms
  back = scaled * logits * inverse_rms / query.shape[0]

  def d_source(v, weight, scaled, back):
    gradient = _scale(weight, d_mixed) + _scale(scaled, query)
    return (gradient - _scale(back, v)).astype(v.dtype)

  if isinstance(sources, tuple):
    d_query = sum(map(_weigh_tokens, scaled, sources))
    return tuple(map(d_source, sources, weights, scaled, back)), d_query, None
  d_sources = d_source(sources, weights, scaled, back)
  return d_sources, _weigh_tokens(scaled, sources), None


mix.defvjp(_mix_forward, _mix_backward)


def combine(weights, bank):
  """Sums weights [Q, S, ...] times the bank over S: [Q, ..., D], bank's dtype."""
  terms = (_scale(weights[:, i], v[None]) for i, v in enumerate(bank))
  return functools.reduce(jnp.add, terms).astype(bank[0].dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def stats(eps, combine, bank, queries):
  """Mixes the bank once per query.

  Args:
    eps: added to the mean square.
    combine: as above; the gradients are not taken through it.
    bank: tuple of S arrays [..., D], or one array [S, ..., D].
    queries: [Q, D] fp32, key scale included.

  Returns:
    partial: [Q, ..., D] sum_i p_i v_i in bank's dtype.
    log_sum_exp: [Q, ...] fp32 log sum_i exp(s_i).
  """
  return _stats_forward(eps, combine, bank, queries)[0]


def _stats_forward(eps, combine, bank, queries):
  inverse_rms = _each(lambda v: _inverse_rms(v, eps), bank)
  agree = lambda v: _einsum("...d,qd->q...", v.astype(jnp.float32), queries)
  logits = jnp.stack([agree(v) for v in bank], 1)  # [Q, S, ...]
  logits *= inverse_rms[None]
  log_sum_exp = jax.nn.logsumexp(logits, axis=1)
  weights = jnp.exp(logits - log_sum_exp[:, None])
  partial = combine(weights, bank)
  residuals = bank, queries, inverse_rms, logits, weights
  return (partial, log_sum_exp), residuals


def _stats_backward(eps, combine, residuals, cotangents):
  del eps, combine
  bank, queries, inverse_rms, logits, weights = residuals
  d_partial, d_log_sum_exp = cotangents
  along = [_dot(v[None], d_partial) for v in bank]  # G . v_i, [Q, ...] each
  along = jnp.stack(along, 1)
  mean = jnp.sum(weights * along, axis=1)
  d_logits = weights * (along + (d_log_sum_exp - mean)[:, None])
  scaled = d_logits * inverse_rms[None]
  back = jnp.sum(scaled * logits, axis=0) * inverse_rms / queries.shape[-1]

  def d_source(i, v):
    gradient = jnp.sum(_scale(weights[:, i], d_partial), axis=0)
    gradient += _einsum("q...,qd->...d", scaled[:, i], queries)
    return (gradient - _scale(back[i], v)).astype(v.dtype)

  d_bank = tuple(d_source(i, v) for i, v in enumerate(bank))
  if not isinstance(bank, tuple):
    d_bank = jnp.stack(d_bank)
  weigh = lambda s, v: _einsum("q...,...d->qd", s, v.astype(jnp.float32))
  d_queries = sum(weigh(scaled[:, i], v) for i, v in enumerate(bank))
  return d_bank, d_queries


stats.defvjp(_stats_forward, _stats_backward)


def normed_merge(
    eps, partial, log_sum_exp, prefix, query, use_prefix=None, norm_scale=None
):
  """`merge`, then `rms_norm` if there is a scale."""
  mixed = merge(eps, partial, log_sum_exp, prefix, query, use_prefix)
  return mixed if norm_scale is None else rms_norm(eps, mixed, norm_scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def merge(eps, partial, log_sum_exp, prefix, query, use_prefix=None):
  """Adds one source to a mix: a softmax over the two of them.

  Args:
    eps: added to the mean square.
    partial: [..., D] mix of the earlier sources.
    log_sum_exp: [...] fp32 of their logits.
    prefix: [..., D] the source to add.
    query: [D] fp32, key scale included.
    use_prefix: bool scalar, whether it counts; None: it does.

  Returns:
    [..., D] in prefix's dtype.
  """
  return _merge_forward(eps, partial, log_sum_exp, prefix, query, use_prefix)[0]


def _merge_forward(eps, partial, log_sum_exp, prefix, query, use_prefix):
  inverse_rms = _inverse_rms(prefix, eps)
  logit = _dot(prefix, query) * inverse_rms
  if use_prefix is not None:
    logit = jnp.where(use_prefix, logit, EXCLUDED)
  gap = logit - log_sum_exp
  mixed = _scale(jax.nn.sigmoid(gap), prefix)
  mixed += _scale(jax.nn.sigmoid(-gap), partial)
  residuals = partial, prefix, query, inverse_rms, logit, gap
  return mixed.astype(prefix.dtype), residuals


def _merge_backward(eps, residuals, d_mixed):
  del eps
  partial, prefix, query, inverse_rms, logit, gap = residuals
  weight, rest = jax.nn.sigmoid(gap), jax.nn.sigmoid(-gap)
  along = _dot(prefix, d_mixed) - _dot(partial, d_mixed)
  d_logit = weight * rest * along
  scaled = d_logit * inverse_rms
  back = scaled * logit * inverse_rms / query.shape[0]
  d_prefix = _scale(weight, d_mixed) + _scale(scaled, query)
  d_prefix -= _scale(back, prefix)
  return (
      _scale(rest, d_mixed).astype(partial.dtype),
      -d_logit,
      d_prefix.astype(prefix.dtype),
      _weigh_tokens(scaled, prefix),
      None,
  )


merge.defvjp(_merge_forward, _merge_backward)


def _each(function, sources):
  """[S, ...]: the function of every source."""
  if isinstance(sources, tuple):
    return jnp.stack([function(source) for source in sources])
  return function(sources)


def _inverse_rms(v, eps):
  square = jnp.square(v.astype(jnp.float32))
  return jax.lax.rsqrt(jnp.mean(square, axis=-1) + eps)


def _dot(v, other):
  """fp32 sum over D, as a reduction: XLA reads v once for it and the RMS."""
  other = jnp.expand_dims(other, range(v.ndim - other.ndim))
  return jnp.sum(v.astype(jnp.float32) * other.astype(jnp.float32), axis=-1)


def _scale(scalars, v):
  """Scalars [..., 1] * v, v [..., D] with leading axes of scalars or fewer."""
  v = jnp.expand_dims(v, range(scalars.ndim + 1 - v.ndim))
  return scalars[..., None] * v.astype(jnp.float32)


def _weigh_tokens(scalars, v):
  """[D]: the sum of scalars * v over all but the last axis."""
  return _einsum("...,...d->d", scalars, v.astype(jnp.float32))
