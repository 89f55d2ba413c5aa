"""Attention residuals on TPUs: every source crosses the memory bus once.

A program brings a tile of tokens with all its sources to VMEM, while the next
tile is on its way, and goes over them twice there: for u . v_i and v_i . v_i,
then, once the softmax over depth is known, for the mix. Backward likewise: for
G . v_i, then for dv_i and the tile's share of du.

Kept for the backward pass: the sources and, per token, one row of 128 fp32
that holds s_i and r_i, in the letters of `reference`.
"""

import functools
import math

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float

from pallas_kernels import dispatch
from pallas_kernels.attn_res import call as call_lib
from pallas_kernels.attn_res import reference

_LANES = 128
_VMEM_LIMIT = 48 * 2**20  # bytes; the smallest of the targets has 64 MiB
_TILES = 30 * 2**20  # of that, for what is copied in and out, twice
_MOST_TOKENS = 256  # of a tile
_SUBLANES = {2: 16, 4: 8}  # rows of a register by bytes of an element
Interpret = bool | pltpu.InterpretParams | None


def mix(
    eps: float,
    sources: tuple[Float[Array, "... D"], ...] | Float[Array, "S ... D"],
    query: Float[Array, " D"],
    use_last: Bool[Array, ""] | None = None,
    norm_scale: Float[Array, " D"] | None = None,
    *,
    interpret: Interpret = None,
) -> Float[Array, "... D"]:
  """`reference.mix` on a TPU, with its gradients.

  Widths that are no multiple of 128 are padded first, at the cost of a copy.
  A norm is XLA's.

  Raises:
    NotImplementedError: a dtype, width, number of sources, device or mesh that
      the kernels do not serve.
  """
  call_lib.check_served(sources)
  if interpret is None:
    dispatch.check_tpu()
  mixed = call_lib.by_rows(
      _mix,
      _Call,
      sources,
      query,
      use_last,
      unit=_LANES,
      eps=float(eps),
      interpret=interpret,
  )
  if norm_scale is None:
    return mixed
  return reference.rms_norm(eps, mixed, norm_scale)


def stats(eps, bank, queries):
  """`reference.stats`, on a TPU.

  Raises:
    NotImplementedError: the device is no TPU.
  """
  dispatch.check_tpu()
  return reference.stats(eps, reference.combine, bank, queries)


def merge(*arguments) -> Float[Array, "... D"]:
  """`reference.normed_merge`: XLA fuses two sources well enough.

  Raises:
    NotImplementedError: the device is no TPU.
  """
  dispatch.check_tpu()
  return reference.normed_merge(*arguments)


class _Call(call_lib.Call):
  """How a call is cut into programs."""

  def tile(self, rows: int) -> int:
    """Tokens of a program that copies so many rows of each in and out."""
    unit = _SUBLANES[self.dtype.itemsize]
    row_bytes = 2 * rows * self.padded * self.dtype.itemsize
    tokens = min(_TILES // row_bytes, _MOST_TOKENS, self.tokens + unit - 1)
    return max(tokens // unit, 1) * unit

  @property
  def columns(self) -> int:
    """Columns that are worked on at a time."""
    return math.gcd(self.padded, 512)

  def each_columns(self, body, start):
    """body(slice of columns, carry), over all of them."""

    def step(c, carry):
      first = pl.multiple_of(c * self.columns, self.columns)
      return body(pl.ds(first, self.columns), carry)

    return lax.fori_loop(0, self.padded // self.columns, step, start)

  def source(self, refs, i, at):
    """Some columns of source i."""
    ref = refs[0].at[i] if self.stacked else refs[i]
    return ref[:, at].astype(jnp.float32)

  def blocks(self, tile: int) -> list[pl.BlockSpec]:
    """How the sources are cut."""
    if self.stacked:
      shape = (self.num_sources, tile, self.padded)
      return [pl.BlockSpec(shape, lambda t: (0, t, 0))]
    return [_by_token(tile, self.padded)] * self.num_sources


def _by_token(tile, width):
  return pl.BlockSpec((tile, width), lambda t: (t, 0))


def _whole(width):
  return pl.BlockSpec((1, width), lambda t: (0, 0))


def _options(call, name, *, rows, flops):
  """Arguments of pallas_call; rows and operations per token and column."""
  size = call.tokens * call.padded
  return dict(
      name=name,
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM_LIMIT
      ),
      cost_estimate=pl.CostEstimate(
          flops=flops * size,
          bytes_accessed=rows * size * call.dtype.itemsize,
          transcendentals=call.num_sources * call.tokens,
      ),
      interpret=call.interpret or False,
  )


def _run_forward(call, sources, query, flag):
  """Returns h [N, D], and s_i and r_i in the scalars [N, 128]."""
  rows = call.num_sources + 1
  tile = call.tile(rows)
  flags = () if flag is None else (flag,)
  in_scalar_memory = pl.BlockSpec(memory_space=pltpu.SMEM)
  return pl.pallas_call(
      functools.partial(_forward_kernel, call),
      grid=(pl.cdiv(call.tokens, tile),),
      in_specs=[
          *call.blocks(tile),
          _whole(call.padded),
          *(in_scalar_memory for _ in flags),
      ],
      out_specs=[_by_token(tile, call.padded), _by_token(tile, _LANES)],
      out_shape=[
          jax.ShapeDtypeStruct((call.tokens, call.padded), call.dtype),
          jax.ShapeDtypeStruct((call.tokens, _LANES), jnp.float32),
      ],
      **_options(
          call, "attn_res_forward", rows=rows, flops=6 * call.num_sources
      ),
  )(*sources, query[None], *flags)


def _forward_kernel(call, *refs):
  num_refs = 1 if call.stacked else call.num_sources
  sources, (query, *flags, out, scalars) = refs[:num_refs], refs[num_refs:]
  zeros = jnp.zeros((out.shape[0], _LANES), jnp.float32)
  logits, inverse_rms = [], []
  for i in range(call.num_sources):

    def add(at, carry, i=i):
      v = call.source(sources, i, at)
      return carry[0] + _fold(v * query[:, at]), carry[1] + _fold(v * v)

    dot, square = map(_over_lanes, call.each_columns(add, (zeros, zeros)))
    inverse_rms.append(lax.rsqrt(square / call.width + call.eps))
    logits.append(dot * inverse_rms[i])
  if flags:
    logits[-1] = jnp.where(flags[0][0] > 0, logits[-1], reference.EXCLUDED)
  weights = _softmax(logits)
  scalars[...] = _in_lanes(zeros, logits, inverse_rms)

  def give(at, carry):
    terms = (w * call.source(sources, i, at) for i, w in enumerate(weights))
    out[:, at] = functools.reduce(jnp.add, terms).astype(call.dtype)
    return carry

  call.each_columns(give, 0)


def _run_backward(call, sources, query, scalars, d_mixed):
  """Returns dv_i, like the sources, and du [D] fp32."""
  rows = 2 * call.num_sources + 1
  tile = call.tile(rows)
  tiles = pl.cdiv(call.tokens, tile)
  *d_sources, d_query = pl.pallas_call(
      functools.partial(_backward_kernel, call),
      grid=(tiles,),
      in_specs=[
          *call.blocks(tile),
          _whole(call.padded),
          _by_token(tile, _LANES),
          _by_token(tile, call.padded),
      ],
      out_specs=[
          *call.blocks(tile),
          pl.BlockSpec((None, 1, call.padded), lambda t: (t, 0, 0)),
      ],
      out_shape=[
          *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in sources),
          jax.ShapeDtypeStruct((tiles, 1, call.padded), jnp.float32),
      ],
      **_options(
          call, "attn_res_backward", rows=rows, flops=10 * call.num_sources
      ),
  )(*sources, query[None], scalars, d_mixed)
  return tuple(d_sources), jnp.sum(d_query, axis=(0, 1))


def _backward_kernel(call, *refs):
  num_refs, num_sources = (
      1 if call.stacked else call.num_sources,
      call.num_sources,
  )
  sources, refs = refs[:num_refs], refs[num_refs:]
  query, scalars, d_mixed, *d_sources, d_query = refs
  tile = d_mixed.shape[0]
  zeros = jnp.zeros((tile, _LANES), jnp.float32)
  logits = [scalars[:, i : i + 1] for i in range(num_sources)]
  inverse_rms = [
      scalars[:, call_lib.MAX_SOURCES + i : call_lib.MAX_SOURCES + i + 1]
      for i in range(num_sources)
  ]
  along = []  # G . v_i
  for i in range(num_sources):

    def add(at, carry, i=i):
      g = d_mixed[:, at].astype(jnp.float32)
      return carry + _fold(call.source(sources, i, at) * g)

    along.append(_over_lanes(call.each_columns(add, zeros)))
  weights = _softmax(logits)
  mean = functools.reduce(jnp.add, map(jnp.multiply, weights, along))
  scaled = [w * (a - mean) * r for w, a, r in zip(weights, along, inverse_rms)]
  back = [
      x * s * r / call.width for x, s, r in zip(scaled, logits, inverse_rms)
  ]
  token = pl.program_id(0) * tile + lax.broadcasted_iota(
      jnp.int32, (tile, 1), 0
  )
  real = token < call.tokens

  def give(at, carry):
    g, u = d_mixed[:, at].astype(jnp.float32), query[:, at]
    share = jnp.zeros(g.shape, jnp.float32)
    for i in range(num_sources):
      v = call.source(sources, i, at)
      d_source = weights[i] * g + scaled[i] * u - back[i] * v
      ref = d_sources[0].at[i] if call.stacked else d_sources[i]
      ref[:, at] = d_source.astype(call.dtype)
      share += scaled[i] * v
    share = jnp.where(real, share, 0.0)
    d_query[:, at] = jnp.sum(share, axis=0, keepdims=True)
    return carry

  call.each_columns(give, 0)


def _fold(x):
  """[N, C] to [N, 128], whose sum over lanes is that of x."""
  parts = [x[:, c : c + _LANES] for c in range(0, x.shape[1], _LANES)]
  return functools.reduce(jnp.add, parts)


def _over_lanes(x):
  return jnp.sum(x, axis=1, keepdims=True)


def _softmax(logits):
  """Over a list, element by element."""
  top = functools.reduce(jnp.maximum, logits)
  exponentials = [jnp.exp(logit - top) for logit in logits]
  total = functools.reduce(jnp.add, exponentials)
  return [x / total for x in exponentials]


def _in_lanes(zeros, logits, inverse_rms):
  """s_i in lane i, r_i in lane 32 + i."""
  lane = lax.broadcasted_iota(jnp.int32, zeros.shape, 1)
  result = zeros
  for i, (logit, scale) in enumerate(zip(logits, inverse_rms)):
    result = jnp.where(lane == i, logit, result)
    result = jnp.where(lane == call_lib.MAX_SOURCES + i, scale, result)
  return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(call, sources, query, flag, gain, given):
  del gain, given  # XLA norms and merges
  return _run_forward(call, sources, query, flag)[0]


def _mix_forward(call, sources, query, flag, gain, given):
  del gain, given
  mixed, scalars = _run_forward(call, sources, query, flag)
  return mixed, (sources, query, scalars)


def _mix_backward(call, residuals, d_mixed):
  sources, query, scalars = residuals
  d_sources, d_query = _run_backward(call, sources, query, scalars, d_mixed)
  return d_sources, d_query, None, None, None


_mix.defvjp(_mix_forward, _mix_backward)
