"""The chunk form: dense products inside 64 tokens, a scan over the chunks."""

import functools
from typing import NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from pallas_kernels import dispatch
from pallas_kernels.kda import block_sizes
from pallas_kernels.kda import gate
from pallas_kernels.kda import intra_chunk as intra

_CHUNK = intra.CHUNK


def kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    initial_state: Float[Array, "B HV K V"],
    runs: Int[Array, "B T"] | None = None,
    *,
    scale: float,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """Computes the recurrence of `reference.kda` by chunks of 64 tokens.

    v' = (I + stril(b A))^-1 (b (v - (k e^G) S));  A_ij = k_i e^(G_i-G_j) k_j
    out = s (q e^G) S + s tril(P) v';              P_ij = q_i e^(G_i-G_j) k_j
    S <- e^G_end S + (k e^(G_end-G))^T v'

  Decay, inverse and state are fp32; products take operands of the inputs'
  dtype and accumulate in fp32. The gradient is written out: it keeps the
  inputs and one state per chunk and computes the rest again.

  Args:
    q: [B, T, H, K] queries; zero on padding, as are k, v, g and beta.
    k: [B, T, H, K] keys.
    v: [B, T, HV, V] values.
    g: [B, T, HV, K] log decay, nats per token, in the range of
      `gate.safe_lower_bound`.
    beta: [B, T, HV] write strength.
    initial_state: [B, HV, K, V] fp32, the state of run 0.
    runs: [B, T] int32, see `segments.runs_of`; None is one run.
    scale: factor on the output.

  Returns:
    out: [B, T, HV, V] in v's dtype.
    final_state: [B, HV, K, V] fp32.
  """
  if not q.shape[1]:
    return jnp.zeros_like(v), initial_state
  tokens = q.shape[1]
  chunks = _chunks_per_group(q, v)
  padding = -tokens % (_CHUNK * chunks)
  q, k, v, g, beta = (_pad_tokens(x, padding) for x in (q, k, v, g, beta))
  if runs is not None:
    runs = _pad_tokens(runs, padding, mode="edge")
  static = (float(scale), chunks)
  out, final_state = _kda(static, q, k, v, g, beta, initial_state, runs)
  return out[:, :tokens], final_state


def _pad_tokens(x, padding, mode="constant"):
  """Appends tokens; zeros neither decay nor write nor read."""
  return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), mode)


def _chunks_per_group(q, v):
  batch, tokens, _, key_width = q.shape
  value_heads, value_width = v.shape[2:]
  return block_sizes.chunks_per_group(
      -(-tokens // _CHUNK),
      batch * value_heads * _CHUNK * max(key_width, value_width),
      dispatch.device_platform(),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(static, *args):
  out, final_state, _ = _forward(static, *args, keep_states=False)
  return out, final_state


def _kda_fwd(static, *args):
  out, final_state, states = _forward(static, *args, keep_states=True)
  return (out, final_state), (args, states)


def _split(x, chunks):
  """[B, T, h, ...] -> [groups, chunks, B * h, C, ...], to be scanned."""
  batch, tokens, heads, *width = x.shape
  groups = tokens // (chunks * _CHUNK)
  x = x.reshape(batch, groups, chunks, _CHUNK, heads, *width)
  x = jnp.moveaxis(x, (1, 2, 0, 4, 3), (0, 1, 2, 3, 4))
  return x.reshape(groups, chunks, batch * heads, _CHUNK, *width)


def _join(x, batch):
  """[groups, chunks, B * h, C, ...] -> [B, T, h, ...]."""
  x = x.reshape(*x.shape[:2], batch, -1, *x.shape[3:])
  x = jnp.moveaxis(x, (0, 1, 2, 3, 4), (1, 2, 0, 4, 3))
  return x.reshape(batch, -1, *x.shape[4:])


def _split_runs(runs, value_heads, chunks):
  """[B, T] -> split runs, and the split runs of the tokens before."""
  if runs is None:
    return None, None
  before = jnp.pad(runs, ((0, 0), (1, 0)))[:, :-1]
  return tuple(
      _split(jnp.repeat(x[:, :, None], value_heads, axis=2), chunks)
      for x in (runs, before)
  )


class _Local(NamedTuple):
  """What a group of chunks needs that does not depend on the state."""

  q: Array  # [n, Z, C, K], as k, v: accumulator dtype, one head per value head
  k: Array
  v: Array
  beta: Array  # [n, Z, C]
  masks: tuple  # see intra_chunk.scores
  factors: intra.Decays
  left: list  # see intra_chunk.tile_rows
  right: list
  qk: Array  # [n, Z, C, C] P, masked
  kk: Array  # [n, Z, C, C] A, masked
  inverse: Array  # [n, Z, C, C] (I + b A)^-1


def _local(ratio, q, k, v, g, beta, runs, previous) -> _Local:
  """Computes decays, scores and inverse of [n, Z, C, ...] chunks at once."""
  operand = gate.operand_dtype(q, k, v)
  dtype = jnp.promote_types(operand, jnp.float32)
  q, k = (jnp.repeat(x.astype(dtype), ratio, axis=1) for x in (q, k))
  v, g, beta = (x.astype(dtype) for x in (v, g, beta))
  factors = intra.decays(g, runs, previous)
  masks = intra.pair_masks(runs)
  left, right = intra.tile_rows(q, k, factors)
  qk, kk = intra.scores(left, right, masks, operand)
  inverse = intra.unit_lower_inverse(beta[..., None] * kk)
  return _Local(q, k, v, beta, masks, factors, left, right, qk, kk, inverse)


@functools.partial(jax.jit, static_argnames=("static", "keep_states"))
def _forward(static, q, k, v, g, beta, initial_state, runs, *, keep_states):
  """Returns out, final_state and, if asked, the state before each chunk.

  Args:
    static: (scale, chunks per group); the groups divide T.
    q: as in `kda`, like the arguments below.
    k: see q.
    v: see q.
    g: see q.
    beta: see q.
    initial_state: see q.
    runs: see q.
    keep_states: whether to return the states [groups, chunks, Z, K, V].
  """
  scale, chunks = static
  operand = gate.operand_dtype(q, k, v)
  dot = functools.partial(intra.dot, operand=operand)
  ratio = v.shape[2] // q.shape[2]

  def group(state, xs):
    local = _local(ratio, *xs)
    k_entry = local.k * local.factors.entry
    k_exit = local.k * local.factors.exit

    def chunk(state, x):
      v, beta, k_entry, k_exit, inverse, end = x
      error = beta[..., None] * (v - dot("zck,zkv->zcv", k_entry, state))
      write = dot("zij,zjv->ziv", inverse, error)
      after = end[..., None] * state + dot("zck,zcv->zkv", k_exit, write)
      return after, (state, write)

    xs = (local.v, local.beta, k_entry, k_exit, local.inverse)
    state, (states, write) = jax.lax.scan(
        chunk, state, (*xs, local.factors.end)
    )
    out = dot("nzck,nzkv->nzcv", local.q * local.factors.entry, states)
    out = scale * (out + dot("nzij,nzjv->nziv", local.qk, write))
    return state, (out.astype(v.dtype), states if keep_states else None)

  xs = [_split(x, chunks) for x in (q, k, v, g, beta)]
  xs += _split_runs(runs, v.shape[2], chunks)
  state = initial_state.reshape(-1, *initial_state.shape[2:])
  state, (out, states) = jax.lax.scan(group, state, tuple(xs))
  return _join(out, q.shape[0]), state.reshape(initial_state.shape), states


@functools.partial(jax.jit, static_argnames="static")
def _kda_bwd(static, residuals, cotangents):
  (q, k, v, g, beta, initial_state, runs), states = residuals
  d_out, d_final = cotangents
  scale, chunks = static
  operand = gate.operand_dtype(q, k, v)
  ratio = v.shape[2] // q.shape[2]

  def group(d_state, xs):
    *xs, states, d_out = xs
    d_out = scale * d_out.astype(states.dtype)
    local = _local(ratio, *xs)
    d_state, grads = _group_gradient(local, states, d_out, d_state, operand)
    dq, dk, *rest = grads
    dq, dk = (_sum_groups(x, ratio) for x in (dq, dk))
    grads = (dq, dk, *rest)
    return d_state, tuple(
        d.astype(x.dtype) for d, x in zip(grads, xs[:5], strict=True)
    )

  xs = [_split(x, chunks) for x in (q, k, v, g, beta)]
  xs += _split_runs(runs, v.shape[2], chunks)
  xs += [states, _split(d_out, chunks)]
  d_state = d_final.reshape(-1, *d_final.shape[2:])
  d_state, grads = jax.lax.scan(group, d_state, tuple(xs), reverse=True)
  grads = tuple(_join(x, q.shape[0]) for x in grads)
  return (*grads, d_state.reshape(initial_state.shape), None)


_kda.defvjp(_kda_fwd, _kda_bwd)


def _sum_groups(x, ratio):
  """Adds the gradients of the value heads that share a query head."""
  if ratio == 1:
    return x
  return x.reshape(x.shape[0], -1, ratio, *x.shape[2:]).sum(axis=2)


def _group_gradient(local, states, d_out, d_state, operand):
  """Returns the gradient of a group's start state and of its inputs.

  Args:
    local: of the group's chunks.
    states: [n, Z, K, V] before each chunk.
    d_out: [n, Z, C, V], times scale.
    d_state: [Z, K, V], of the state after the group.
    operand: dtype of the products' operands.

  Returns:
    d_state: [Z, K, V], of the state before the group.
    grads: of q, k [n, Z, C, K], v [n, Z, C, V], g [n, Z, C, K], beta [n, Z, C].
  """
  dot = functools.partial(intra.dot, operand=operand)
  factors, beta = local.factors, local.beta[..., None]
  q_entry = local.q * factors.entry
  k_entry = local.k * factors.entry
  k_exit = local.k * factors.exit
  error = local.v - dot("nzck,nzkv->nzcv", k_entry, states)
  write = dot("nzij,nzjv->nziv", local.inverse, beta * error)
  d_write = dot("nzij,nziv->nzjv", local.qk, d_out)
  d_start = dot("nzck,nzcv->nzkv", q_entry, d_out)

  def chunk(d_end, x):
    d_write, d_start, k_entry, k_exit, inverse, beta, end = x
    d_write += dot("zck,zkv->zcv", k_exit, d_end)
    d_error = dot("zij,ziv->zjv", inverse, d_write)
    d_start += end[..., None] * d_end
    d_start -= dot("zck,zcv->zkv", k_entry, beta * d_error)
    return d_start, (d_end, d_error)

  xs = (d_write, d_start, k_entry, k_exit, local.inverse, beta, factors.end)
  d_state, (d_ends, d_error) = jax.lax.scan(chunk, d_state, xs, reverse=True)

  d_qk = dot("nziv,nzjv->nzij", d_out, write)
  d_qk = jnp.where(local.masks[0], d_qk, 0.0)
  d_lower = dot("nziv,nzjv->nzij", -d_error, write)
  d_lower = jnp.where(local.masks[1], d_lower, 0.0)
  d_beta = jnp.sum(d_error * error, axis=-1)
  d_beta += jnp.sum(d_lower * local.kk, axis=-1)
  dv = beta * d_error
  dq_entry = factors.entry * dot("nzcv,nzkv->nzck", d_out, states)
  dk_entry = factors.entry * dot("nzcv,nzkv->nzck", -dv, states)
  dk_exit = factors.exit * dot("nzcv,nzkv->nzck", write, d_ends)
  dq, dk, d_decay = intra.scores_gradient(
      d_qk, beta * d_lower, local.left, local.right, factors, operand
  )
  d_decay += local.q * dq_entry + local.k * (dk_entry - dk_exit)
  d_last = jnp.sum(local.k * dk_exit, axis=2)
  d_last += factors.end * jnp.sum(states * d_ends, axis=-1)
  dg = intra.sum_from_here(d_decay) + d_last[:, :, None]
  dk += dk_entry + dk_exit
  return d_state, (dq + dq_entry, dk, dv, dg, d_beta)
