"""Attention residuals on Hopper: every source crosses the memory bus once.

Blocks stay for the whole call and walk over tokens. Rows of D elements come
one after another, by the bulk copy engine, into a ring in shared memory, up to
the ring's length ahead of their use; `split` warpgroups share a row's columns
and `groups` tokens of a block are under way at once.

  forward    an online softmax over depth, in registers:
             m' = max(m, s_i);  h <- e^(m - m') h + e^(s_i - m') v_i
  backward   sweep 1: G . v_i of all sources; then ds_i, the few scalars;
             sweep 2: dv_i, written over v_i in the ring and copied out from
             there. Where S rows do not fit the ring they are read twice, the
             second time mostly from the L2 cache.

With a norm of the mix, y = g rho h, rho = 1 / rms(h), the mix itself is never
in memory. With A = g G, G the cotangent of y, backward has

  sweep 1: A . v_i and h = sum_i p_i v_i;  sweep 1b: h . v_i;  thus A . h, h . h
  H = rho A - rho^3 (A . h / D) h,  dg = rho h G,  and then as above with H
  for G, where H . v_i = rho (A . v_i) - rho^3 (A . h / D) (h . v_i)

A merge is a mix of two sources: the partial mix, whose logit s_0 (the
log-sum-exp of what it mixes) is given and gets a gradient of its own, ds_0, and
the prefix. r_0 = 0 then keeps the query out of the partial's gradient.

Kept for the backward pass: the sources and, per token, [2, 32] fp32: s_i and
r_i, in the letters of `reference`. The vectors' gradients are summed in
registers over a block's tokens, then over blocks by XLA, always in the same
order.
"""

import functools
import math

import jax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float

from pallas_kernels import dispatch
from pallas_kernels.attn_res import call as call_lib
from pallas_kernels.attn_res import mosaic_gpu_kernels as kernels
from pallas_kernels.attn_res import mosaic_gpu_plan as plan_lib
from pallas_kernels.attn_res import reference


def mix(
    eps: float,
    sources: tuple[Float[Array, "... D"], ...] | Float[Array, "S ... D"],
    query: Float[Array, " D"],
    use_last: Bool[Array, ""] | None = None,
    norm_scale: Float[Array, " D"] | None = None,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "... D"]:
  """`reference.mix` on Hopper, with its gradients.

  Widths that are no multiple of 128 (256 above 4096, with a norm above 2048)
  are padded first, at the cost of a copy. Where the sources do not fit the ring
  XLA does the norm.

  Raises:
    NotImplementedError: a dtype, width, number of sources, device or mesh that
      the kernels do not serve.
  """
  call_lib.check_served(sources)
  if interpret is None:
    dispatch.check_hopper()
  return _serve(eps, sources, query, use_last, norm_scale, None, interpret)


def merge(
    eps: float,
    partial: Float[Array, "... D"],
    log_sum_exp: Float[Array, "..."],
    prefix: Float[Array, "... D"],
    query: Float[Array, " D"],
    use_prefix: Bool[Array, ""] | None = None,
    norm_scale: Float[Array, " D"] | None = None,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "... D"]:
  """`reference.merge` on Hopper, with its gradients; see `mix`."""
  sources = partial, prefix
  call_lib.check_served(sources)
  if interpret is None:
    dispatch.check_hopper()
  return _serve(
      eps, sources, query, use_prefix, norm_scale, log_sum_exp, interpret
  )


def combine(
    weights: Float[Array, "Q S ..."],
    bank: tuple[Float[Array, "... D"], ...] | Float[Array, "S ... D"],
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "Q ... D"]:
  """`reference.combine` on Hopper: every source crosses the memory bus once.

  XLA's where rows would have to be padded or a token's do not fit the ring.

  Raises:
    NotImplementedError: see `mix`.
  """
  call_lib.check_served(bank)
  if interpret is None:
    dispatch.check_hopper()
  first = bank[0]
  num_sources, width = len(bank), first.shape[-1]
  if width % plan_lib.row_unit(width, False):
    return reference.combine(weights, bank)
  stacked = not isinstance(bank, tuple)
  call = call_lib.Call(
      num_sources=num_sources,
      stacked=stacked,
      tokens=math.prod(first.shape[:-1]),
      width=width,
      padded=width,
      dtype=jnp.dtype(first.dtype),
      normed=False,
      given=False,
      eps=0.0,
      interpret=interpret,
  )
  if plan_lib.combine(call, len(weights)).slots < num_sources:
    return reference.combine(weights, bank)
  rows = lambda x: x.reshape(*x.shape[: int(stacked)], -1, width)
  operands = (rows(bank),) if stacked else tuple(map(rows, bank))
  out = kernels.run_combine(call, len(weights), operands, weights)
  return out.reshape(len(weights), *first.shape)


def _serve(eps, sources, query, use_last, norm_scale, given, interpret):
  normed = norm_scale is not None and plan_lib.norm_fits(sources)
  mixed = call_lib.by_rows(
      _mix,
      call_lib.Call,
      sources,
      query,
      use_last,
      norm_scale if normed else None,
      given,
      unit=plan_lib.row_unit(sources[0].shape[-1], normed),
      eps=float(eps),
      interpret=interpret,
  )
  if norm_scale is None or normed:
    return mixed
  return reference.rms_norm(eps, mixed, norm_scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(call, sources, query, flag, gain, given):
  return kernels.run_forward(call, sources, query, flag, gain, given)[0]


def _mix_forward(call, sources, query, flag, gain, given):
  mixed, scalars = kernels.run_forward(call, sources, query, flag, gain, given)
  return mixed, (sources, query, scalars, gain)


def _mix_backward(call, residuals, d_mixed):
  d_sources, d_query, d_gain, d_given = kernels.run_backward(
      call, *residuals, d_mixed
  )
  return d_sources, d_query, None, d_gain, d_given


_mix.defvjp(_mix_forward, _mix_backward)
