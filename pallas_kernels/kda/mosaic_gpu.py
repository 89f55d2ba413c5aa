"""Bounded-decay attention on Hopper: what its kernels serve, and their order.

Forward: `mosaic_gpu_prep` (everything local to a chunk, chunks in parallel),
then `mosaic_gpu_scan` (the state from chunk to chunk). Backward: prep again,
the scan again for the states, the reverse scan, then `mosaic_gpu_gradient`
(chunks in parallel); nothing but the arguments is kept in between. A scan of
few heads leaves half of the chip idle, so prep and the scan then share a
launch (`mosaic_gpu_follow`), and so do the two scans of the backward pass. The
L2 norm, the gate, its sigmoid and its cumulative sum never leave the chip.
README.md has the picture, NOTES.md what each version cost.
"""

import functools

import jax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from pallas_kernels import dispatch
from pallas_kernels.kda import mosaic_gpu_follow as follow_lib
from pallas_kernels.kda import mosaic_gpu_gradient as gradient_lib
from pallas_kernels.kda import mosaic_gpu_prep as prep_lib
from pallas_kernels.kda import mosaic_gpu_scan as scan_lib
from pallas_kernels.kda import segments

CHUNK = prep_lib.CHUNK
WIDTHS = (64, 128)
# In a 32-row half the smallest factor, 2^(16 lower_bound log2(e)), keeps 9
# bits in bf16 (subnormals included) down to here.
LOWEST_BOUND = -5.2
_SMALLEST_BETA = 1e-15


def fused_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    z: Float[Array, "B T HV K"],
    beta_logits: Float[Array, "B T HV"],
    a_log: Float[Array, " HV"],
    dt_bias: Float[Array, "HV K"],
    *,
    lower_bound: float,
    scale: float,
    initial_state: Float[Array, "B HV K V"] | None,
    segment_ids: Int[Array, "B T"] | None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """`api.fused_kda`, its checks done; q, k and v in bf16.

  Raises:
    NotImplementedError: widths, dtypes or a bound that the kernels do not
      serve.
  """
  _check_served(q, k, v, z, interpret)
  if not LOWEST_BOUND <= lower_bound < 0.0:
    raise NotImplementedError(
        f"lower_bound {lower_bound} is not in [{LOWEST_BOUND}, 0)"
    )
  slope = jnp.exp(a_log.astype(jnp.float32)) * prep_lib.LOG2_E
  bias = slope[:, None] * dt_bias.astype(jnp.float32)
  beta = jax.nn.sigmoid(beta_logits.astype(jnp.float32))
  return _run(
      True,
      scale,
      lower_bound,
      interpret,
      q,
      k,
      v,
      z,
      beta,
      slope,
      bias,
      initial_state,
      segment_ids,
  )


def chunk_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float,
    initial_state: Float[Array, "B HV K V"] | None,
    segment_ids: Int[Array, "B T"] | None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """`api.chunk_kda`, its checks done; q, k and v in bf16.

  A decay below LOWEST_BOUND nats per token acts as LOWEST_BOUND: at most
  exp(LOWEST_BOUND) = 0.0055 of the state is kept where less was asked for.

  Raises:
    NotImplementedError: widths or dtypes that the kernels do not serve.
  """
  _check_served(q, k, v, g, interpret)
  value_heads, width = g.shape[2:]
  unused = jnp.zeros((value_heads,)), jnp.zeros((value_heads, width))
  return _run(
      False,
      scale,
      LOWEST_BOUND,
      interpret,
      q,
      k,
      v,
      g,
      beta.astype(jnp.float32),
      *unused,
      initial_state,
      segment_ids,
  )


def _check_served(q, k, v, z, interpret):
  if interpret is None:
    dispatch.check_hopper()
  key_width, value_width = q.shape[-1], v.shape[-1]
  if key_width not in WIDTHS or value_width not in WIDTHS:
    raise NotImplementedError(
        f"widths K {key_width}, V {value_width} are not in {WIDTHS}"
    )
  for name, x in (("q", q), ("k", k), ("v", v)):
    if x.dtype != jnp.bfloat16:
      raise NotImplementedError(f"{name} is {x.dtype}, not bfloat16")
  if z.dtype not in (jnp.bfloat16, jnp.float32):
    raise NotImplementedError(f"the gate is {z.dtype}, not bfloat16 or float32")
  if not v.size:
    raise NotImplementedError("no tokens")


def _run(
    raw,
    scale,
    lower_bound,
    interpret,
    q,
    k,
    v,
    z,
    beta,
    slope,
    bias,
    initial_state,
    segment_ids,
):
  batch, tokens, _, width = q.shape
  value_heads, values = v.shape[2:]
  padded = -(-tokens // CHUNK) * CHUNK
  masked = segment_ids is not None or padded != tokens
  plan = prep_lib.Plan(
      raw=raw,
      scale=float(scale),
      lower_bound=float(lower_bound),
      masked=masked,
      interpret=interpret,
      pairs=1 if interpret is not None else 2,
  )
  flags = None
  if masked:
    flags = _flags_of(segment_ids, batch, tokens, padded)
  beta = _pad_tokens(beta, padded).transpose(0, 2, 1)
  if initial_state is None:
    initial_state = jnp.zeros((batch, value_heads, width, values))
  # TMA fills rows past the end with zeros, if whole tiles of 8 rows are there
  # and the array is no smaller than a chunk.
  whole = interpret is not None or tokens < CHUNK
  rows = padded if whole else -(-tokens // 8) * 8
  if rows != tokens:
    q, k, v, z = (_pad_tokens(x, rows) for x in (q, k, v, z))
  out, final = _attend(
      plan, q, k, v, z, beta, slope, bias, initial_state, flags
  )
  return out[:, :tokens], final


def _pad_tokens(x, padded):
  amount = padded - x.shape[1]
  return jnp.pad(x, ((0, 0), (0, amount)) + ((0, 0),) * (x.ndim - 2))


def _flags_of(segment_ids, batch, tokens, padded):
  """What the kernels know of each row's segment, [B, T64] int32."""
  if segment_ids is None:
    segment_ids = jnp.ones((batch, tokens), jnp.int32)
  valid, runs = segments.runs_of(_pad_tokens(segment_ids, padded))
  by_chunk = runs.reshape(batch, -1, CHUNK)
  last = by_chunk[:, :, -1:]
  before = jnp.pad(last, ((0, 0), (1, 0), (0, 0)))[:, :-1]
  row, other = by_chunk[..., None], by_chunk[:, :, None]
  valid = valid.reshape(by_chunk.shape)
  flags = [
      (valid, prep_lib.VALID),
      (valid & (by_chunk == before), prep_lib.READS_STATE),
      (valid & (by_chunk == last), prep_lib.WRITES_STATE),
      (before == last, prep_lib.KEEPS_STATE),
  ]
  flags = sum(jnp.where(condition, bit, 0) for condition, bit in flags)
  # Runs never decrease, so a run's rows are next to each other.
  flags += jnp.sum(other < row, -1) << prep_lib.FIRST_SHIFT
  flags += jnp.sum(other <= row, -1) << prep_lib.STOP_SHIFT
  return flags.reshape(batch, padded).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, q, k, v, z, beta, slope, bias, initial, flags):
  """o [B, T, HV, V] and the final state, from per-chunk tiles and a scan."""
  args = q, k, v, z, beta, slope, bias, initial, flags
  return _forward(plan, *args, with_low=False)


def _forward(plan, q, k, v, z, beta, slope, bias, initial, flags, *, with_low):
  beta = _not_zero(beta, flags)
  local = (q, k, z, beta, slope, bias, flags)
  _, (out, final) = _prep_and_scan(
      plan, local, v, initial.swapaxes(2, 3), with_low=with_low
  )
  return out, final.swapaxes(2, 3)


def _prep_and_scan(plan, local, v, initial, *, with_low):
  """The tiles, and (o, the transposed final state)."""
  if follow_lib.leaves_room(*initial.shape[:3]):
    return follow_lib.prep_and_scan(plan, *local, v, initial, with_low=with_low)
  tiles = prep_lib.prep(plan, *local, with_low=with_low)
  return tiles, scan_lib.scan(plan, tiles, v, initial, output=True)


def _not_zero(beta, flags):
  """beta [B, HV, T64], 0 on padding rows and nowhere else."""
  # The backward pass divides v' and its adjoint, both multiples of beta, by it.
  beta = jnp.where(jnp.abs(beta) < _SMALLEST_BETA, _SMALLEST_BETA, beta)
  if flags is None:
    return beta
  return jnp.where((flags[:, None] & prep_lib.VALID) != 0, beta, 0.0)


def _attend_fwd(plan, *args):
  # The same tiles as the backward pass's: where both are in one program they are
  # made once.
  return _forward(plan, *args, with_low=True), args


def _attend_bwd(plan, args, cotangents):
  q, k, v, z, beta, slope, bias, initial, flags = args
  d_out, d_final = cotangents
  beta = _not_zero(beta, flags)
  local = (q, k, z, beta, slope, bias, flags)
  initial = initial.swapaxes(2, 3)
  # The forward pass's call, output and all: where both are one program, XLA
  # sees equal calls and makes one.
  tiles, _ = _prep_and_scan(plan, local, v, initial, with_low=True)
  (states, v_new), (dv, ds, d_initial) = scan_lib.backward_scans(
      plan,
      tiles,
      v,
      initial,
      d_out,
      d_final.swapaxes(2, 3),
  )
  dq, dk, dz, d_beta, sums = gradient_lib.gradient(
      plan, *local, (states, ds, v_new, dv, d_out)
  )
  d_bias, d_slope = jnp.sum(sums, axis=(0, 2, 4)).swapaxes(0, 1)
  return (
      _sum_groups(dq, q),
      _sum_groups(dk, k),
      dv,
      dz,
      d_beta,
      jnp.sum(d_slope, axis=-1),
      d_bias,
      d_initial.swapaxes(2, 3),
      None,
  )


def _sum_groups(gradient, like):
  """Sums [B, T, HV, K] over the value heads that share a query head."""
  if gradient.shape == like.shape:
    return gradient
  batch, tokens, heads, width = like.shape
  grouped = gradient.reshape(batch, tokens, heads, -1, width)
  return jnp.sum(grouped.astype(jnp.float32), axis=3).astype(like.dtype)


_attend.defvjp(_attend_fwd, _attend_bwd)
