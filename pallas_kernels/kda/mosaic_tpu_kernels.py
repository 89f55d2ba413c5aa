"""The TPU kernels: two chunks of several heads a step, the state in VMEM.

One kernel each way. The grid is (batch, groups of heads, pairs of chunks); the
last axis runs in order, so the state (backward: its gradient) stays in VMEM
from the first token to the last. Heads are independent and fill each other's
waits. States are held as [V, K]: their decay is then a row, not a column.
"""

import dataclasses
import functools

import jax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import mosaic_tpu_chunk as chunk_lib

CHUNK = chunk_lib.CHUNK
PAIR = chunk_lib.PAIR
NN, NT, TN = chunk_lib.NN, chunk_lib.NT, chunk_lib.TN
_L2_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Plan:
  """Static choices of both kernels.

  Attributes:
    raw: q, k and the gate's logits come unnormalised (`fused_kda`).
    scale: factor on the output.
    lower_bound: of the gate, nats per token.
    masked: there are segments or padding.
    heads: value heads per program.
    query_heads: query heads per program.
    operand: dtype of the products' operands.
    interpret: None on a TPU, else pallas_call's argument.
  """

  raw: bool
  scale: float
  lower_bound: float
  masked: bool
  heads: int
  query_heads: int
  operand: jnp.dtype
  interpret: object = None


def forward(plan, q, k, v, z, beta, slope, bias, initial, rows, *, keep):
  """Returns out, the final state and, with `keep`, the state of every chunk.

  Args:
    plan: static choices.
    q: [B, T, H K], T a multiple of PAIR; k alike.
    k: see q.
    v: [B, T, HV V].
    z: [B, T, HV K] decay logits, or log decay if not plan.raw.
    beta: [B, HV / heads, heads, T] fp32.
    slope: [HV / heads, heads, K] fp32, of the gate's logits.
    bias: [HV / heads, heads, K] fp32, added to slope z.
    initial: [B, HV, V, K] fp32.
    rows: [B, ROW_FIELDS, T] int32, or None.
    keep: whether to return [B, HV, T / C, V, K] states in plan.operand.
  """
  specs = _Specs(plan, q, v, initial, reverse=False)
  inputs = (q, k, v, z, beta, slope, bias, initial)
  in_specs = specs.inputs + [specs.state]
  if plan.masked:
    inputs += (rows,)
    in_specs += [specs.rows]
  out_shape = [
      jax.ShapeDtypeStruct(v.shape, v.dtype),
      jax.ShapeDtypeStruct(initial.shape, initial.dtype),
  ]
  out_specs = [specs.values, specs.state]
  if keep:
    out_shape.append(specs.states_shape())
    out_specs.append(specs.states)
  return pl.pallas_call(
      functools.partial(_forward_kernel, plan),
      grid=specs.grid,
      in_specs=in_specs,
      out_specs=out_specs,
      out_shape=out_shape,
      **specs.options("kda_forward", inputs, out_shape, flops=2),
  )(*inputs)


def backward(plan, q, k, v, z, beta, slope, bias, rows, states, d_out, d_final):
  """Returns the gradients of q, k, v, z, beta, slope, bias and the state.

  Args:
    plan: static choices.
    q: as in `forward`, like the arguments below.
    k: see q.
    v: see q.
    z: see q.
    beta: see q.
    slope: see q.
    bias: see q.
    rows: see q.
    states: [B, HV, T / C, V, K], of `forward`.
    d_out: [B, T, HV V].
    d_final: [B, HV, V, K] fp32.

  Returns:
    As the arguments, but q's and k's [B, T, HV K], one per value head, and
    slope's and bias's [B, HV / heads, heads, K].
  """
  specs = _Specs(plan, q, v, d_final, reverse=True)
  inputs = (q, k, v, z, beta, slope, bias, states, d_out, d_final)
  in_specs = specs.inputs + [specs.states, specs.values, specs.state]
  if plan.masked:
    inputs += (rows,)
    in_specs += [specs.rows]
  struct = jax.ShapeDtypeStruct
  # Shared query heads are summed later: keep the addends unrounded.
  shared = z.shape[-1] != q.shape[-1]
  query = struct(z.shape, jnp.float32 if shared else q.dtype)
  gate = struct((q.shape[0], *slope.shape), jnp.float32)
  out_shape = [query, query]
  out_shape += [struct(x.shape, x.dtype) for x in (v, z, beta)]
  out_shape += [gate, gate, struct(d_final.shape, jnp.float32)]
  out_specs = [specs.keys, specs.keys, specs.values, specs.keys, specs.beta]
  out_specs += [specs.sums, specs.sums, specs.state]
  return pl.pallas_call(
      functools.partial(_backward_kernel, plan),
      grid=specs.grid,
      in_specs=in_specs,
      out_specs=out_specs,
      out_shape=out_shape,
      **specs.options("kda_backward", inputs, out_shape, flops=5),
  )(*inputs)


class _Specs:
  """Blocks of one step: all tokens of two chunks, `heads` heads."""

  def __init__(self, plan, q, v, state, *, reverse):
    batch, tokens, _ = q.shape
    value_heads, values, width = state.shape[1:]
    heads, query_heads = plan.heads, plan.query_heads
    steps = tokens // PAIR
    shared = value_heads * width // q.shape[-1]
    self.grid = (batch, value_heads // heads, steps)
    self._plan, self._state = plan, state.shape
    self._tokens = tokens

    def at(t):
      return steps - 1 - t if reverse else t

    def by_token(width, heads=heads, per_query=False):
      def index(b, n, t):
        return b, at(t), n * plan.heads // shared // heads if per_query else n

      return pl.BlockSpec((None, PAIR, heads * width), index)

    def by_head(*block):
      return pl.BlockSpec((None, *block), lambda b, n, t: (n, 0, 0))

    query = by_token(width, query_heads, per_query=True)
    self.keys = by_token(width)
    self.values = by_token(values)
    self.beta = pl.BlockSpec(
        (None, None, heads, PAIR), lambda b, n, t: (b, n, 0, at(t))
    )
    gate = by_head(heads, width)
    self.inputs = [
        query,
        query,
        self.values,
        self.keys,
        self.beta,
        gate,
        gate,
    ]
    self.state = pl.BlockSpec(
        (None, heads, values, width), lambda b, n, t: (b, n, 0, 0)
    )
    self.states = pl.BlockSpec(
        (None, heads, 2, values, width), lambda b, n, t: (b, n, at(t), 0, 0)
    )
    self.sums = pl.BlockSpec(
        (None, None, heads, width), lambda b, n, t: (b, n, 0, 0)
    )
    self.rows = pl.BlockSpec(
        (None, chunk_lib.ROW_FIELDS, PAIR), lambda b, n, t: (b, 0, at(t))
    )

  def states_shape(self):
    batch, heads, values, width = self._state
    shape = (batch, heads, self._tokens // CHUNK, values, width)
    return jax.ShapeDtypeStruct(shape, self._plan.operand)

  def options(self, name, inputs, outputs, *, flops):
    """Everything else of the call; flops in units of the chunk form's."""
    batch, heads, values, width = self._state
    elements = batch * heads * self._tokens
    work = 2 * CHUNK * (3 * width + 2 * values) + 6 * width * values
    arrays = [*inputs, *outputs]
    return dict(
        name=name,
        interpret=self._plan.interpret or False,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops * elements * work // 2,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
            transcendentals=5 * elements * width,
        ),
    )


class _Head:
  """One head's part of a step, read from the blocks; fp32."""

  def __init__(self, plan, i, q_ref, k_ref, v_ref, z_ref, gate, beta, rows):
    query = i * plan.query_heads // plan.heads
    self.raw_q, self.raw_k = (
        _load(x, query, plan.query_heads, rows) for x in (q_ref, k_ref)
    )
    self.v = _load(v_ref, i, plan.heads, rows)
    self.z = _load(z_ref, i, plan.heads, rows)
    self.beta = beta[:, i : i + 1]
    self.slope, self.bias = (x[i : i + 1] for x in gate)
    self.q, self.k, self.g = self.raw_q, self.raw_k, self.z
    if not plan.raw:
      return
    self.rstd_q, self.rstd_k = (_rstd(x) for x in (self.raw_q, self.raw_k))
    self.q, self.k = self.raw_q * self.rstd_q, self.raw_k * self.rstd_k
    self.logit = self.slope * self.z + self.bias
    self.g = plan.lower_bound * jax.nn.sigmoid(self.logit)
    if rows is not None:
      self.g = chunk_lib.select(rows.valid, self.g)


def _load(ref, i, heads, rows):
  width = ref.shape[-1] // heads
  x = ref[:, i * width : (i + 1) * width].astype(jnp.float32)
  return x if rows is None else chunk_lib.select(rows.valid, x)


def _rstd(x):
  squares = jnp.sum(x * x, axis=1, keepdims=True)
  return jax.lax.rsqrt(squares + _L2_EPSILON)


def _columns(beta_ref, rows):
  beta = beta_ref[...].T  # [2C, heads]
  return beta if rows is None else chunk_lib.select(rows.valid, beta)


def _halves(x):
  return x[:CHUNK], x[CHUNK:]


def _forward_kernel(
    plan,
    q_ref,
    k_ref,
    v_ref,
    z_ref,
    beta_ref,
    slope_ref,
    bias_ref,
    initial_ref,
    *refs,
):
  rows, refs = _take_rows(plan, refs)
  out_ref, state_ref, *states_ref = refs

  @pl.when(pl.program_id(2) == 0)
  def _():
    state_ref[...] = initial_ref[...]

  beta = _columns(beta_ref, rows)
  gate = slope_ref[...], bias_ref[...]
  for i in range(plan.heads):
    head = _Head(plan, i, q_ref, k_ref, v_ref, z_ref, gate, beta, rows)
    x = chunk_lib.local(head.q, head.k, head.g, head.beta, rows, plan.operand)
    out, state, states = _scan(plan, x, head.v, state_ref[i])
    state_ref[i] = state
    width = out.shape[1]
    out_ref[:, i * width : (i + 1) * width] = out.astype(out_ref.dtype)
    if states_ref:
      for c, before in enumerate(states):
        states_ref[0][i, c] = before.astype(plan.operand)


def _take_rows(plan, refs):
  if not plan.masked:
    return None, refs
  return chunk_lib.read_rows(refs[0][...]), refs[1:]


def _scan(plan, x, v, state):
  """Takes a head's state [V, K] through two chunks.

  Returns:
    out [2C, V], the state after, and the states before each chunk.
  """
  dot = functools.partial(chunk_lib.dot, operand=plan.operand)
  q_entry = _halves(x.q * x.factors.entry)
  k_entry = _halves(x.k * x.factors.entry)
  k_exit = _halves(x.k * x.factors.exit)
  v, beta = _halves(v), _halves(x.beta)
  states, reads, writes = [], [], []
  for c in (0, 1):
    states.append(state)
    lanes = slice(c * CHUNK, (c + 1) * CHUNK)
    entry = jnp.concatenate([k_entry[c], q_entry[c]], axis=0)
    recalled, read = _halves(dot(entry, state, NT))
    error = beta[c] * (v[c] - recalled)
    write = dot(x.inverse[:, lanes], error, NN)
    state = x.factors.end[c] * state + dot(write, k_exit[c], TN)
    reads.append(read)
    writes.append(write)
  reads, writes = (jnp.concatenate(y, axis=0) for y in (reads, writes))
  local = dot(chunk_lib.on_diagonal(x.qk), writes, NN)
  return plan.scale * (reads + local), state, states


def _backward_kernel(
    plan,
    q_ref,
    k_ref,
    v_ref,
    z_ref,
    beta_ref,
    slope_ref,
    bias_ref,
    states_ref,
    d_out_ref,
    d_final_ref,
    *refs,
):
  rows, refs = _take_rows(plan, refs)
  dq_ref, dk_ref, dv_ref, dz_ref, d_beta_ref, *sums_refs, d_state_ref = refs

  @pl.when(pl.program_id(2) == 0)
  def _():
    d_state_ref[...] = d_final_ref[...]
    for ref in sums_refs:
      ref[...] = jnp.zeros_like(ref)

  beta = _columns(beta_ref, rows)
  gate = slope_ref[...], bias_ref[...]
  d_betas = []
  for i in range(plan.heads):
    head = _Head(plan, i, q_ref, k_ref, v_ref, z_ref, gate, beta, rows)
    x = chunk_lib.local(head.q, head.k, head.g, head.beta, rows, plan.operand)
    d_out = plan.scale * _load(d_out_ref, i, plan.heads, rows)
    states = [states_ref[i, c] for c in (0, 1)]
    d_state, (dq, dk, dv, dg, d_beta) = _gradient(
        plan, x, head.v, states, d_out, d_state_ref[i]
    )
    d_state_ref[i] = d_state
    if rows is not None:
      dg = chunk_lib.select(rows.valid, dg)
      d_beta = chunk_lib.select(rows.valid, d_beta)
    if plan.raw:
      dq = _norm_gradient(dq, head.q, head.rstd_q)
      dk = _norm_gradient(dk, head.k, head.rstd_k)
      # sigmoid(-x) keeps the digits that 1 - sigmoid(x) loses near 1.
      rise = jax.nn.sigmoid(head.logit) * jax.nn.sigmoid(-head.logit)
      d_logit = dg * (plan.lower_bound * rise)
      dg = d_logit * head.slope
      for ref, y in zip(sums_refs, (d_logit * head.z, d_logit), strict=True):
        ref[i : i + 1] += jnp.sum(y, axis=0, keepdims=True)
    for ref, y in ((dq_ref, dq), (dk_ref, dk), (dv_ref, dv), (dz_ref, dg)):
      width = y.shape[1]
      ref[:, i * width : (i + 1) * width] = y.astype(ref.dtype)
    d_betas.append(d_beta)
  d_beta_ref[...] = jnp.concatenate(d_betas, axis=1).T


def _norm_gradient(d, x, rstd):
  """Of x = raw rstd: rstd (d - x <x, d>)."""
  return rstd * (d - x * jnp.sum(x * d, axis=1, keepdims=True))


def _gradient(plan, x, v, states, d_out, d_state):
  """Takes the gradient of a head's state back through two chunks.

  Args:
    plan: static choices.
    x: chunk_lib.Local.
    v: [2C, V].
    states: [V, K] before each chunk.
    d_out: [2C, V], times scale.
    d_state: [V, K], of the state after both chunks.

  Returns:
    d_state [V, K], and the gradients of q, k, v, g, beta.
  """
  dot = functools.partial(chunk_lib.dot, operand=plan.operand)
  factors, beta = x.factors, x.beta
  join = functools.partial(jnp.concatenate, axis=0)
  q_entry, k_entry = x.q * factors.entry, x.k * factors.entry
  k_exit = x.k * factors.exit
  recalled = [
      dot(k, s, NT) for k, s in zip(_halves(k_entry), states, strict=True)
  ]
  error = v - join(recalled)
  inverse = chunk_lib.on_diagonal(x.inverse)
  write = dot(inverse, beta * error, NN)
  d_write = _halves(dot(chunk_lib.on_diagonal(x.qk), d_out, TN))

  d_errors, d_ends = [None, None], [None, None]
  halves = [_halves(y) for y in (q_entry, k_entry, k_exit, beta, d_out)]
  for c in (1, 0):
    q_in, k_in, k_out, b, d_o = (y[c] for y in halves)
    lanes = slice(c * CHUNK, (c + 1) * CHUNK)
    d_w = d_write[c] + dot(k_out, d_state, NT)
    d_errors[c] = dot(x.inverse[:, lanes], d_w, TN)
    d_ends[c] = d_state
    d_state = factors.end[c] * d_state
    d_state += dot(join([d_o, -b * d_errors[c]]), join([q_in, k_in]), TN)
  d_error = join(d_errors)
  dv = beta * d_error

  d_qk = jnp.where(x.causal, _beside_rows(dot(d_out, write, NT)), 0.0)
  d_lower = jnp.where(x.strict, _beside_rows(dot(-d_error, write, NT)), 0.0)
  d_beta = jnp.sum(d_error * error, axis=1, keepdims=True)
  d_beta += _row_sums(d_lower * x.kk)
  d_kk = chunk_lib.beside(*_halves(beta)) * d_lower
  dq, dk, d_decay = chunk_lib.scores_gradient(d_qk, d_kk, x, plan.operand)

  d_reads = join([d_out[:CHUNK], -dv[:CHUNK]]), join(
      [d_out[CHUNK:], -dv[CHUNK:]]
  )
  d_entry = [dot(d, s, NN) for d, s in zip(d_reads, states, strict=True)]
  dq_entry = factors.entry * join([d[:CHUNK] for d in d_entry])
  dk_entry = factors.entry * join([d[CHUNK:] for d in d_entry])
  dk_exit = [dot(w, d, NN) for w, d in zip(_halves(write), d_ends, strict=True)]
  dk_exit = factors.exit * join(dk_exit)
  d_decay += x.q * dq_entry + x.k * (dk_entry - dk_exit)
  d_last = []
  for c, y in enumerate(_halves(x.k * dk_exit)):
    last = states[c].astype(jnp.float32) * d_ends[c]
    last = factors.end[c] * jnp.sum(last, axis=0, keepdims=True)
    last += jnp.sum(y, axis=0, keepdims=True)
    d_last.append(jnp.broadcast_to(last, y.shape))
  dg = chunk_lib.sum_from_here(d_decay) + join(d_last)
  return d_state, (dq + dq_entry, dk + dk_entry + dk_exit, dv, dg, d_beta)


def _beside_rows(x):
  """[2C, 2C] -> [C, 2C]: the two blocks on the diagonal, side by side."""
  return chunk_lib.beside(*_halves(x))


def _row_sums(x):
  """[C, 2C] side by side -> [2C, 1]."""
  return jnp.sum(chunk_lib.on_diagonal(x), axis=1, keepdims=True)
