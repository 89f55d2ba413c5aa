"""The recurrence token by token on Hopper, the state updated in place.

A warpgroup holds value columns of one head's state in registers from its
read to its write; a token costs two sums over the rows and no memory traffic
but its own few vectors:

  S <- diag(e^g) S;  S <- S + k (b (v - S^T k))^T;  o = scale S^T q

For one token the limit is the state's bytes, read and written once. So a warp
owns columns, not rows: it reads and writes whole sectors, sixteen bytes a
lane, and the sums never leave the warp.
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

# How a head's state, or 64 columns of it, gets into registers: a block for each
# reads global memory; or one or two blocks per multiprocessor walk them, the
# next ones arrive in shared memory while this one is updated and the last one
# leaves. The card has yet to choose.
VARIANTS = ("halves", "heads", "ring_halves", "ring_heads")
_MULTIPROCESSORS = 132
_SLOTS = 3  # of a ring: one arrives, one is updated, one leaves


def recurrent_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    state: Float[Array, "B HV K V"],
    *,
    scale: float,
    variant: str = "halves",
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
  return _recur(variant, float(scale), interpret, q, k, v, g, beta, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _recur(variant, scale, interpret, q, k, v, g, beta, state):
  batch, tokens, value_heads, value_width = v.shape
  group = value_heads // q.shape[2]
  columns = 64 if variant.endswith("halves") else value_width
  slices = value_width // columns
  if variant.startswith("ring"):
    blocks = _MULTIPROCESSORS * (2 if variant == "ring_halves" else 1)
    grid = {"block": min(blocks, batch * value_heads * slices)}
    body = _ring_body
  else:
    grid = {"slice": slices, "head": value_heads, "batch": batch}
    body = _block_body
  kernel = pl.kernel(
      functools.partial(body, _Tokens(scale, tokens, group, columns)),
      out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
      mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid)),
      compiler_params=plgpu.CompilerParams(
          approx_math=True,
          # No thread reads what another one wrote but through the ring's
          # barriers and `commit_smem`.
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


def _block_body(tokens, q, k, v, g, beta, state, out):
  b, head, first = (lax.axis_index(n) for n in ("batch", "head", "slice"))
  columns = pl.ds(first * tokens.columns, tokens.columns)
  tile = state.at[b, head, :, columns]
  held = plgpu.load(tile, layout=tokens.layout, optimized=False)
  tile[...] = tokens.run((q, k, v, g, beta), out, b, head, columns, held)


def _ring_body(tokens, q, k, v, g, beta, state, out):
  batch, heads, width, values = state.shape
  slices = values // tokens.columns
  blocks, block = lax.axis_size("block"), lax.axis_index("block")
  count = lax.div(batch * heads * slices - block + blocks - 1, blocks)

  def home(n):
    item = block + n * blocks
    head = lax.div(item, slices)
    columns = pl.ds(lax.rem(item, slices) * tokens.columns, tokens.columns)
    return lax.div(head, heads), lax.rem(head, heads), columns

  def tile_of(b, head, columns):
    return state.at[b, head, :, columns]

  def walk(tiles, arrived):
    def fetch(n):
      slot = lax.rem(n, _SLOTS)

      @pl.when(n < count)
      def _():
        plgpu.copy_gmem_to_smem(
            tile_of(*home(n)), tiles.at[slot], arrived.at[slot]
        )

    for n in range(_SLOTS - 1):
      fetch(jnp.int32(n))

    @pl.loop(0, count)
    def _(n):
      here, slot = home(n), lax.rem(n, _SLOTS)
      tile = tiles.at[slot]
      plgpu.barrier_wait(arrived.at[slot])
      held = plgpu.load(tile, layout=tokens.layout, optimized=False)
      held = tokens.run((q, k, v, g, beta), out, *here, held)
      # The state before this one has left its slot, which the next one takes.
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      fetch(n + _SLOTS - 1)
      tile[...] = held
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(tile, tile_of(*here))

    plgpu.wait_smem_to_gmem(0)

  pl.run_scoped(
      walk,
      tiles=plgpu.SMEM((_SLOTS, width, tokens.columns), state.dtype),
      arrived=plgpu.Barrier(num_barriers=_SLOTS),
  )


class _Tokens:
  """A head's tokens, one after the other, on value columns in registers."""

  def __init__(self, scale, tokens, group, columns):
    self.scale, self.tokens, self.group = scale, tokens, group
    self.columns = columns
    # A warp owns a quarter of the columns, a lane four of them in every
    # 512 / columns-th row.
    self.layout = plgpu.Layout.TILED(
        plgpu.Tiling(((512 // columns, columns), (columns // 4,), (4,))),
        warp_dims=(-3,),
        lane_dims=(-4, -2),
        vector_dim=-1,
    )

  def run(self, vectors, out, b, head, columns, state):
    q, k, v, g, beta = vectors
    source = lax.div(head, self.group)

    def load(ref, axis):
      layout = self.layout.reduce(axis)
      return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def spread(x, axis):
      x = lax.broadcast_in_dim(x, state.shape, (axis,))
      return plgpu.layout_cast(x, self.layout)

    def token(t, state):
      key = spread(load(k.at[b, t, source], 1), 0)
      query = spread(load(q.at[b, t, source], 1), 0)
      decay = spread(jnp.exp(load(g.at[b, t, head], 1)), 0)
      value = load(v.at[b, t, head, columns], 0)
      state = state * decay
      write = (value - jnp.sum(state * key, axis=0)) * beta[b, t, head]
      state = state + key * spread(write, 1)
      read = jnp.sum(state * query, axis=0) * self.scale
      out.at[b, t, head, columns][...] = read.astype(out.dtype)
      return state

    return lax.fori_loop(0, self.tokens, token, state)


def _recur_fwd(variant, scale, interpret, *args):
  return _recur(variant, scale, interpret, *args), args


def _recur_bwd(variant, scale, interpret, args, cotangents):
  del variant, interpret
  _, vjp = jax.vjp(functools.partial(reference.kda, scale=scale), *args)
  return vjp(cotangents)


_recur.defvjp(_recur_fwd, _recur_bwd)
