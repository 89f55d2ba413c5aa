"""The recurrence token by token on Hopper, the state updated in place.

A warpgroup holds 64 value columns of one head's state in registers from its
read to its write; a token costs two sums over the rows and no memory traffic
but its own few vectors:

  S <- diag(e^g) S;  S <- S + k (b (v - S^T k))^T;  o = scale S^T q

For one token the limit is the state's bytes, read and written once. Columns
are independent, so a head's state may be cut across blocks.
"""

import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array
from jaxtyping import Float

from pallas_kernels import dispatch
from pallas_kernels.kda import mosaic_gpu
from pallas_kernels.kda import reference
from pallas_kernels.kda.mosaic_gpu_prep import COLUMN
from pallas_kernels.kda.mosaic_gpu_prep import ROW

SLICE = 64  # value columns of a block


def recurrent_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    state: Float[Array, "B HV K V"],
    *,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """`decode.recurrent_kda`, its checks done; a donated state is updated.

  Raises:
    NotImplementedError: widths or dtypes that the kernel does not serve.
  """
  if interpret is None:
    dispatch.check_hopper()
  key_width, value_width = q.shape[-1], v.shape[-1]
  widths = mosaic_gpu.WIDTHS
  if key_width not in widths or value_width not in widths:
    raise NotImplementedError(
        f"widths K {key_width}, V {value_width} are not in {widths}"
    )
  served = (jnp.bfloat16, jnp.float32)
  for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
    if x.dtype not in served:
      raise NotImplementedError(f"{name} is {x.dtype}, not one of {served}")
  if not v.size:
    raise NotImplementedError("no tokens")
  return _recur(float(scale), interpret, q, k, v, g, beta, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
@functools.partial(jax.jit, static_argnums=(0, 1))
def _recur(scale, interpret, q, k, v, g, beta, state):
  batch, tokens, value_heads, value_width = v.shape
  kernel = pl.kernel(
      functools.partial(_body, scale, tokens, value_heads // q.shape[2]),
      out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
      mesh=plgpu.Mesh(
          grid=(value_width // SLICE, value_heads, batch),
          grid_names=("slice", "head", "batch"),
      ),
      compiler_params=plgpu.CompilerParams(
          approx_math=True,
          lowering_semantics=plgpu.LoweringSemantics.Lane,
      ),
      cost_estimate=pl.CostEstimate(
          flops=tokens * 7 * state.size,
          transcendentals=g.size,
          bytes_accessed=2 * state.nbytes
          + sum(x.nbytes for x in (q, k, v, v, g, beta)),
      ),
      interpret=interpret,
      name="kda_recurrent",
  )
  state = jax.new_ref(state)
  out = kernel(q, k, v, g, beta.astype(jnp.float32), state)
  return out, jax.freeze(state)


def _body(scale, tokens, group, q, k, v, g, beta, state, out):
  b, head, first = (lax.axis_index(n) for n in ("batch", "head", "slice"))
  columns = pl.ds(first * SLICE, SLICE)
  source = lax.div(head, group)

  def vector(ref, layout):
    x = plgpu.load(ref, layout=layout, optimized=False)
    return x.astype(jnp.float32)

  def token(t, state):
    rows = lambda x: lax.broadcast_in_dim(x, state.shape, (0,))
    key = rows(vector(k.at[b, t, source], ROW))
    query = rows(vector(q.at[b, t, source], ROW) * scale)
    decay = rows(jnp.exp(vector(g.at[b, t, head], ROW)))
    value = vector(v.at[b, t, head, columns], COLUMN)
    state = state * decay
    write = (value - jnp.sum(state * key, axis=0)) * beta[b, t, head]
    state = state + key * lax.broadcast_in_dim(write, state.shape, (1,))
    read = jnp.sum(state * query, axis=0)
    out.at[b, t, head, columns][...] = read.astype(out.dtype)
    return state

  tile = state.at[b, head, :, columns]
  start = plgpu.load(tile, layout=plgpu.Layout.WGMMA, optimized=False)
  tile[...] = lax.fori_loop(0, tokens, token, start)


def _recur_fwd(scale, interpret, *args):
  return _recur(scale, interpret, *args), args


def _recur_bwd(scale, interpret, args, cotangents):
  del interpret
  _, vjp = jax.vjp(functools.partial(reference.kda, scale=scale), *args)
  return vjp(cotangents)


_recur.defvjp(_recur_fwd, _recur_bwd)
