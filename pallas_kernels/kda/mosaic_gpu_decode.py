"""The recurrence token by token on Hopper, the state updated in place.

A warpgroup holds value columns of one head's state in registers from its
read to its write. A token costs two sums over the rows of the same state,

  w = b (v - S^T (e^g k));  o = scale (S^T (e^g q) + (q . k) w)
  S <- diag(e^g) S + k w^T

so that nothing waits between them, and no memory traffic but its own few
vectors. For one token the limit is the state's bytes, read and written once.
A warp owns rows, so that it reads whole lines; the sums cross warps through
shared memory. Four blocks per multiprocessor hide each other's waits, and each
asks L2 for what a block some way behind it will read.
"""

import functools
import math

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import gpu
from jaxlib.mlir.dialects import llvm
from jaxtyping import Array
from jaxtyping import Float

from pallas_kernels import dispatch
from pallas_kernels.kda import mosaic_gpu
from pallas_kernels.kda import reference

_COLUMNS = 64  # of a head's state, in one block
_AHEAD = 64  # blocks for whose state a block asks


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
      functools.partial(
          _body, scale, value_heads // q.shape[2], interpret is not None
      ),
      out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
      mesh=plgpu.Mesh(
          grid=(batch * value_heads * slices,), grid_names=("block",)
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


def _body(scale, group, interpret, *refs):
  rows = refs[0].shape[-1]
  pl.run_scoped(
      functools.partial(_block, scale, group, interpret, *refs),
      plgpu.SMEM((4, rows), jnp.float32),
  )


def _block(scale, group, interpret, q, k, v, g, beta, state, out, vectors):
  batch, heads, num_rows, values = state.shape
  slices = values // _COLUMNS
  layout, line = _state_layout(num_rows), _line_layout(num_rows)
  block = lax.axis_index("block")
  item, part = lax.div(block, slices), lax.rem(block, slices)
  b, head = lax.div(item, heads), lax.rem(item, heads)
  source = lax.div(head, group)
  columns = pl.ds(part * _COLUMNS, _COLUMNS)

  def load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)

  def spread(x, axis):
    x = lax.broadcast_in_dim(x, (num_rows, _COLUMNS), (axis,))
    return plgpu.layout_cast(x, layout)

  def by_row(i):
    return spread(load(vectors.at[i], layout.reduce(1)), 0)

  def update(t, state):
    rate = beta[b, t, head]
    query = load(q.at[b, t, source], line).astype(jnp.float32)
    key = load(k.at[b, t, source], line).astype(jnp.float32)
    decay = jnp.exp(load(g.at[b, t, head], line).astype(jnp.float32))
    value = load(v.at[b, t, head, columns], layout.reduce(0))
    for i, x in enumerate((decay * key, decay * query, decay, key)):
      vectors.at[i][...] = x
    overlap = jnp.sum(query * key)
    seen = jnp.sum(state * by_row(0), axis=0)
    read = jnp.sum(state * by_row(1), axis=0)
    write = (value.astype(jnp.float32) - seen) * rate
    read = (read + overlap * write) * scale
    out.at[b, t, head, columns][...] = read.astype(out.dtype)
    return state * by_row(2) + by_row(3) * spread(write, 1)

  place = state.at[b, head, :, columns]
  if not interpret:
    behind = lax.div(block + _AHEAD, slices)
    rows = pl.ds(part * (num_rows // slices), num_rows // slices)

    @pl.when(behind < batch * heads)
    def _():
      ahead = state.at[lax.div(behind, heads), lax.rem(behind, heads), rows]
      _ask_l2_for(ahead)

  # The first token stands outside the loop: its vectors are asked for together
  # with the state.
  held = update(0, load(place, layout))
  place[...] = lax.fori_loop(1, q.shape[1], update, held)


def _state_layout(num_rows):
  """Of [K, columns] a warp has a quarter of the rows, a lane 4 columns."""
  lanes = _COLUMNS // 4
  rows = num_rows // 4  # of a warp
  own = rows * lanes // 32  # neighbouring rows of a lane
  return plgpu.Layout.TILED(
      plgpu.Tiling(((num_rows, _COLUMNS), (rows, 4), (own, 4))),
      warp_dims=(-6,),
      lane_dims=(-4, -5),
      vector_dim=-1,
  )


def _line_layout(num_rows):
  """Of [K] a lane has one element, lanes past a warp's quarter the same."""
  rows = num_rows // 4
  same = () if rows == 32 else (plgpu.Replicated(32 // rows),)
  return plgpu.Layout.TILED(
      plgpu.Tiling(((num_rows,), (rows,), (1,))),
      warp_dims=(-3,),
      lane_dims=(-2, *same),
      vector_dim=-1,
  )


def _ask_l2_for(ref):
  """Fetches what a contiguous ref names from memory to L2, no further."""
  size = math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def ask(_, ref):
    thread = arith.index_cast(
        ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x)
    )
    llvm.inline_asm(
        None,
        [mgpu.utils.memref_ptr(ref), thread],
        "{ .reg .pred first; setp.eq.u32 first, $1, 0;"
        f" @first cp.async.bulk.prefetch.L2.global [$0], {size}; }}",
        "l,r",
        has_side_effects=True,
    )

  ask(ref)


def _recur_fwd(scale, interpret, *args):
  return _recur(scale, interpret, *args), args


def _recur_bwd(scale, interpret, args, cotangents):
  del interpret
  _, vjp = jax.vjp(functools.partial(reference.kda, scale=scale), *args)
  return vjp(cotangents)


_recur.defvjp(_recur_fwd, _recur_bwd)
