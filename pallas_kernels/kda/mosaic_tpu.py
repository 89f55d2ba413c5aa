"""Bounded-decay attention on TPUs: what its kernels serve, and their arrays.

One kernel forward and one backward (`mosaic_tpu_kernels`); between them only
the arguments and one state per chunk are kept. The L2 norm, the gate and its
cumulative sum never leave VMEM. README.md says how.
"""

import functools

import jax
from jax import numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from pallas_kernels import dispatch
from pallas_kernels.kda import gate
from pallas_kernels.kda import mosaic_tpu_chunk as chunk_lib
from pallas_kernels.kda import mosaic_tpu_kernels as kernels
from pallas_kernels.kda import segments

CHUNK = chunk_lib.CHUNK
PAIR = chunk_lib.PAIR
LANES = 128
# Heads are computed together: they fill the waits of each other's chains. More
# spill more registers: NOTES.md has the counts.
_MOST_HEADS = 8
Interpret = bool | pltpu.InterpretParams | None


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
    interpret: Interpret = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """`api.fused_kda`, its checks done.

  Raises:
    NotImplementedError: widths or dtypes that the kernels do not serve.
  """
  _check_served(q, k, v, z, interpret)
  # sigmoid(x) = 1 / (1 + 2^(-x log2(e)))
  slope = -chunk_lib.LOG2_E * jnp.exp(a_log.astype(jnp.float32))[:, None]
  bias = slope * dt_bias.astype(jnp.float32)
  if segment_ids is not None:
    # Before the sigmoid: the gradient of a NaN row would be 0 * NaN.
    beta_logits = segments.zero_padding(segment_ids != 0, beta_logits)
  return _run(
      q,
      k,
      v,
      z,
      jax.nn.sigmoid(beta_logits.astype(jnp.float32)),
      jnp.broadcast_to(slope, bias.shape),
      bias,
      initial_state,
      segment_ids,
      raw=True,
      scale=float(scale),
      lower_bound=float(lower_bound),
      interpret=interpret,
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
    interpret: Interpret = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """`api.chunk_kda`, its checks done.

  Raises:
    NotImplementedError: widths or dtypes that the kernels do not serve.
  """
  _check_served(q, k, v, g, interpret)
  unused = jnp.zeros(g.shape[2:], jnp.float32)
  return _run(
      q,
      k,
      v,
      g,
      beta.astype(jnp.float32),
      unused,
      unused,
      initial_state,
      segment_ids,
      raw=False,
      scale=float(scale),
      lower_bound=0.0,
      interpret=interpret,
  )


def _check_served(q, k, v, z, interpret):
  check_device_and_dtypes(q, k, v, z, interpret)
  if max(q.shape[-1], v.shape[-1]) > LANES:
    raise NotImplementedError(
        f"widths K {q.shape[-1]}, V {v.shape[-1]} are above {LANES}"
    )


def check_device_and_dtypes(q, k, v, z, interpret):
  """Raises NotImplementedError where no kernel of this folder serves."""
  if interpret is None and dispatch.device_platform() != "tpu":
    raise NotImplementedError("the kernels need a TPU")
  for name, x in (("q", q), ("k", k), ("v", v), ("the gate", z)):
    if x.dtype not in (jnp.bfloat16, jnp.float32):
      raise NotImplementedError(f"{name} is {x.dtype}, not bfloat16 or float32")
  if not v.size:
    raise NotImplementedError("no tokens")


def _run(q, k, v, z, beta, slope, bias, initial_state, segment_ids, **static):
  batch, tokens, heads, width = q.shape
  value_heads, values = v.shape[2:]
  per_program, queries = heads_per_program(heads, value_heads)
  padded = -(-tokens // PAIR) * PAIR
  masked = segment_ids is not None or padded != tokens
  plan = kernels.Plan(
      masked=masked,
      heads=per_program,
      query_heads=queries,
      operand=gate.operand_dtype(q, k, v),
      **static,
  )
  if initial_state is None:
    state = jnp.zeros((batch, value_heads, LANES, LANES), jnp.float32)
  else:
    state = _pad(_pad(initial_state, 2, LANES), 3, LANES).swapaxes(2, 3)
  q, k, v, z = (
      _pad(_pad(x, 3, LANES), 1, PAIR).reshape(batch, padded, -1)
      for x in (q, k, v, z)
  )
  beta = _pad(beta, 1, PAIR).swapaxes(1, 2)
  groups = (value_heads // per_program, per_program)
  out, final = _attend(
      plan,
      q,
      k,
      v,
      z,
      beta.reshape(batch, *groups, padded),
      *(_pad(x, 1, LANES).reshape(*groups, -1) for x in (slope, bias)),
      state,
      _rows_of(segment_ids, batch, tokens, padded) if masked else None,
  )
  out = out.reshape(batch, padded, value_heads, -1)[:, :tokens, :, :values]
  return out, final.swapaxes(2, 3)[:, :, :width, :values]


def heads_per_program(heads, value_heads):
  """Value heads and query heads of a program: most that divide evenly."""
  shared = value_heads // heads
  for n in range(min(_MOST_HEADS, value_heads), 0, -1):
    if value_heads % n == 0 and (n % shared == 0 or shared % n == 0):
      return n, max(n // shared, 1)
  raise AssertionError("one head divides evenly")


def _pad(x, axis, multiple):
  amount = -x.shape[axis] % multiple
  if not amount:
    return x
  return jnp.pad(x, [(0, amount if i == axis else 0) for i in range(x.ndim)])


def _rows_of(segment_ids, batch, tokens, padded):
  """Each row's `chunk_lib.Rows` fields, [B, ROW_FIELDS, T] int32."""
  if segment_ids is None:
    segment_ids = jnp.ones((batch, tokens), jnp.int32)
  valid, runs = segments.runs_of(_pad(segment_ids, 1, PAIR))
  by_chunk = runs.reshape(batch, -1, CHUNK)
  last = by_chunk[:, :, -1:]
  before = jnp.pad(last, ((0, 0), (1, 0), (0, 0)))[:, :-1]
  conditions = (by_chunk == before, by_chunk == last, before == last)
  fields = [runs, valid]
  for condition in conditions:
    condition = jnp.broadcast_to(condition, by_chunk.shape)
    fields.append(condition.reshape(runs.shape))
  fields = jnp.stack([x.astype(jnp.int32) for x in fields], axis=1)
  return _pad(fields, 1, chunk_lib.ROW_FIELDS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, *args):
  return tuple(kernels.forward(plan, *args, keep=False))


def _attend_fwd(plan, *args):
  out, final, states = kernels.forward(plan, *args, keep=True)
  return (out, final), (args, states)


def _attend_bwd(plan, residuals, cotangents):
  (*inputs, _, rows), states = residuals
  gradients = kernels.backward(plan, *inputs, rows, states, *cotangents)
  dq, dk, dv, dz, d_beta, d_slope, d_bias, d_initial = gradients
  q, k = inputs[:2]
  width = dz.shape[-1] // (plan.heads * d_slope.shape[1])
  return (
      _sum_shared(dq, q, width),
      _sum_shared(dk, k, width),
      dv,
      dz,
      d_beta,
      jnp.sum(d_slope, axis=0),
      jnp.sum(d_bias, axis=0),
      d_initial,
      None,
  )


def _sum_shared(gradient, like, width):
  """Sums [B, T, HV K] over the value heads that share a query head."""
  if gradient.shape == like.shape:
    return gradient
  batch, tokens, query = like.shape
  gradient = gradient.reshape(batch, tokens, query // width, -1, width)
  return jnp.sum(gradient, axis=3).reshape(like.shape).astype(like.dtype)


_attend.defvjp(_attend_fwd, _attend_bwd)
