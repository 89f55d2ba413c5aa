"""The recurrence token by token on Hopper, the state updated in place.

A warpgroup holds value columns of one head's state in registers from its
read to its write; a token costs two sums over the rows and no memory traffic
but its own few vectors:

  S <- diag(e^g) S;  S <- S + k (b (v - S^T k))^T;  o = scale S^T q

For one token the limit is the state's bytes, read and written once. A warp
owns rows, so that it reads whole lines and few vectors; the sums cross warps
through shared memory. Four blocks per multiprocessor hide each other's waits.
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

_COLUMNS = 64  # of a head's state, in one block
# A warp reads two rows at once, 16 bytes a lane.
_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, _COLUMNS), (2, 4))),
    warp_dims=(-4,),
    lane_dims=(-2, -3),
    vector_dim=-1,
)


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
  slices = value_width // _COLUMNS
  kernel = pl.kernel(
      functools.partial(_body, scale, value_heads // q.shape[2]),
      out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
      mesh=plgpu.Mesh(
          grid=(batch * value_heads * slices,), grid_names=("block",)
      ),
      compiler_params=plgpu.CompilerParams(
          approx_math=True,
          # No thread reads what another one wrote, sums apart.
          unsafe_no_auto_barriers=True,
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


def _body(scale, group, q, k, v, g, beta, state, out):
  _, heads, _, values = state.shape
  slices = values // _COLUMNS
  block = lax.axis_index("block")
  columns = pl.ds(lax.rem(block, slices) * _COLUMNS, _COLUMNS)
  block = lax.div(block, slices)
  b, head = lax.div(block, heads), lax.rem(block, heads)
  source = lax.div(head, group)
  rows, cols = _LAYOUT.reduce(1), _LAYOUT.reduce(0)

  def load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)

  def update(t, state):
    vectors = (
        load(q.at[b, t, source], rows),
        load(k.at[b, t, source], rows),
        load(v.at[b, t, head, columns], cols),
        load(g.at[b, t, head], rows),
    )
    query, key, value, decay = (x.astype(jnp.float32) for x in vectors)

    def spread(x, axis):
      x = lax.broadcast_in_dim(x, state.shape, (axis,))
      return plgpu.layout_cast(x, _LAYOUT)

    key = spread(key, 0)
    state = state * spread(jnp.exp(decay), 0)
    write = (value - jnp.sum(state * key, axis=0)) * beta[b, t, head]
    state = state + key * spread(write, 1)
    read = jnp.sum(state * spread(query, 0), axis=0) * scale
    out.at[b, t, head, columns][...] = read.astype(out.dtype)
    return state

  place = state.at[b, head, :, columns]
  # The first token stands outside the loop: its vectors are asked for together
  # with the state.
  held = update(0, load(place, _LAYOUT))
  place[...] = lax.fori_loop(1, q.shape[1], update, held)


def _recur_fwd(scale, interpret, *args):
  return _recur(scale, interpret, *args), args


def _recur_bwd(scale, interpret, args, cotangents):
  del interpret
  _, vjp = jax.vjp(functools.partial(reference.kda, scale=scale), *args)
  return vjp(cotangents)


_recur.defvjp(_recur_fwd, _recur_bwd)
