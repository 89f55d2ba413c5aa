"""Bounded-decay delta attention: the functions that models call."""

import importlib

import jax
from jax import numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from pallas_kernels import dispatch
from pallas_kernels.kda import checks
from pallas_kernels.kda import chunked
from pallas_kernels.kda import gate
from pallas_kernels.kda import reference
from pallas_kernels.kda import segments

_L2_EPSILON = 1e-6


def chunk_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: dispatch.Implementation = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """Attends with the gated delta rule, a log decay per channel.

    S' = diag(exp(g)) S;  S = S' + beta k (v - S'^T k)^T;  out = scale S^T q

  Args:
    q: [B, T, H, K] queries, L2-normalised by the caller as k is.
    k: [B, T, H, K] keys.
    v: [B, T, HV, V] values; value head j reads query head j // (HV / H).
    g: [B, T, HV, K] log decay, nats per token. The caller keeps it in
      (safe_lower_bound, 0], as `bounded_log_decay` does; it is not clamped.
    beta: [B, T, HV] write strength, 0 to 1.
    scale: factor on the output, K**-0.5 by default.
    initial_state: [B, HV, K, V] fp32, the state of the row's first segment;
      zero by default.
    segment_ids: [B, T] integers. 0 is padding: its output is 0 and it never
      touches the state. A change of id starts from a zero state.
    implementation: "reference", "chunked", "mosaic_gpu", "mosaic_tpu", a
      sequence of them tried in order, or None (the best for the device).

  Returns:
    out: [B, T, HV, V] in v's dtype.
    final_state: [B, HV, K, V] fp32, after the last token that is not padding.

  Raises:
    ValueError: a wrong shape or dtype, naming the argument.
    NotImplementedError: an explicit implementation cannot serve; says why.

  Source: Kimi Linear (arXiv 2510.26692), with the bounded gate of Kimi K3.
  """
  checks.check_tokens(q, k, v, beta, initial_state, segment_ids, g=g)
  given = (q, k, v, g, beta)
  runs = None
  if segment_ids is not None and segment_ids.size:
    valid, runs = segments.runs_of(segment_ids)
    q, k, v, g, beta = (
        segments.zero_padding(valid, x) for x in (q, k, v, g, beta)
    )
  state = checks.initial_state_or_zero(q, v, initial_state)
  scale = q.shape[-1] ** -0.5 if scale is None else scale

  def serve(kda):
    out, final_state = kda(q, k, v, g, beta, state, runs, scale=scale)
    if runs is not None:  # stops NaN gradients of padding rows
      out = segments.zero_padding(valid, out)
    return out, final_state

  def kernels(name):
    return _kernels(name).chunk_kda(
        *given,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
    )

  # Best first.
  candidates = {
      "mosaic_gpu": lambda: kernels("mosaic_gpu"),
      "mosaic_tpu": lambda: kernels("mosaic_tpu"),
      "chunked": lambda: serve(chunked.kda),
      "reference": lambda: serve(reference.kda),
  }
  return dispatch.run("chunk_kda", candidates, implementation)


def fused_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    z: Float[Array, "B T HV K"],
    beta_logits: Float[Array, "B T HV"],
    a_log: Float[Array, " HV"],
    dt_bias: Float[Array, "HV K"],
    *,
    lower_bound: float = -5.0,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: dispatch.Implementation = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """Runs `chunk_kda` on raw projections.

    q, k: x / sqrt(sum(x^2) + 1e-6);  beta = sigmoid(beta_logits)
    g = lower_bound sigmoid(exp(a_log) (z + dt_bias))

  Args:
    q: [B, T, H, K] queries before their L2 norm, as k.
    k: [B, T, H, K] keys.
    v: [B, T, HV, V] values.
    z: [B, T, HV, K] decay logits.
    beta_logits: [B, T, HV] write strength before its sigmoid.
    a_log: [HV] log slope of the gate.
    dt_bias: [HV, K] bias of the gate.
    lower_bound: the most negative log decay, nats per token, within
      `safe_lower_bound` of the operands' dtype.
    scale: as in `chunk_kda`, like the arguments below.
    initial_state: [B, HV, K, V] fp32 or None.
    segment_ids: [B, T] integers or None.
    implementation: a name, a sequence of names or None.

  Returns:
    out: [B, T, HV, V] in v's dtype.
    final_state: [B, HV, K, V] fp32.

  Raises:
    ValueError: a wrong shape, dtype or bound, naming the argument.
    NotImplementedError: an explicit implementation cannot serve; says why.
  """
  checks.check_tokens(q, k, v, beta_logits, initial_state, segment_ids, z=z)
  gate.check_gate(z, a_log, dt_bias)
  gate.check_lower_bound(lower_bound, gate.operand_dtype(q, k, v))
  options = dict(
      scale=q.shape[-1] ** -0.5 if scale is None else scale,
      initial_state=initial_state,
      segment_ids=segment_ids,
  )

  def unfused(name):
    """`chunk_kda` after norms, gate and sigmoid of their own."""
    x = (q, k, z, beta_logits)
    if segment_ids is not None and segment_ids.size:
      valid, _ = segments.runs_of(segment_ids)
      # Before the norms: the gradient of a NaN row would be 0 * NaN.
      x = (segments.zero_padding(valid, y) for y in x)
    q_, k_, z_, logits = x
    g = gate.bounded_log_decay(z_, a_log, dt_bias, lower_bound=lower_bound)
    beta = jax.nn.sigmoid(logits.astype(g.dtype))
    return chunk_kda(
        _l2_norm(q_), _l2_norm(k_), v, g, beta, implementation=name, **options
    )

  def kernels(name):
    return _kernels(name).fused_kda(
        q,
        k,
        v,
        z,
        beta_logits,
        a_log,
        dt_bias,
        lower_bound=lower_bound,
        **options,
    )

  candidates = {
      "mosaic_gpu": lambda: kernels("mosaic_gpu"),
      "mosaic_tpu": lambda: kernels("mosaic_tpu"),
      "chunked": lambda: unfused("chunked"),
      "reference": lambda: unfused("reference"),
  }
  return dispatch.run("fused_kda", candidates, implementation)


def _kernels(name):
  """A device's module, imported where it is used: it loads Pallas."""
  return importlib.import_module(f"pallas_kernels.kda.{name}")


@jax.jit
def _l2_norm(x: Array) -> Array:
  """Divides by sqrt(sum(x^2) + epsilon) over the last axis, in fp32."""
  x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  squares = jnp.sum(x32 * x32, axis=-1, keepdims=True)
  return (x32 * jax.lax.rsqrt(squares + _L2_EPSILON)).astype(x.dtype)
