"""The recurrence token by token on Hopper, the state updated in place.

A warpgroup holds value columns of one head's state in registers from its
read to its write; a token costs two sums over the rows and no memory traffic
but its own few vectors:

  S <- diag(e^g) S;  S <- S + k (b (v - S^T k))^T;  o = scale S^T q

For one token the limit is the state's bytes, read and written once. So blocks
that live through the call walk over the states: the next ones arrive in shared
memory, and the next token's vectors in registers, while one is updated and the
last one leaves. A warp owns columns, not rows: its sums never leave it.
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

_COLUMNS = 64  # of a head's state, in one item
_BLOCKS = 2 * 132  # two per multiprocessor: one waits while one computes
_SLOTS = 3  # of a ring: one state arrives, one is updated, one leaves


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
  group = value_heads // q.shape[2]
  items = batch * value_heads * (value_width // _COLUMNS)
  kernel = pl.kernel(
      functools.partial(_body, _Tokens(scale, tokens, group)),
      out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
      mesh=plgpu.Mesh(grid=(min(_BLOCKS, items),), grid_names=("block",)),
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


def _body(tokens, *refs):
  state = refs[5]
  batch, heads, width, values = state.shape
  slices = values // _COLUMNS
  blocks, block = lax.axis_size("block"), lax.axis_index("block")
  count = lax.div(batch * heads * slices - block + blocks - 1, blocks)

  def home(n):
    item = block + n * blocks
    head = lax.div(item, slices)
    columns = pl.ds(lax.rem(item, slices) * _COLUMNS, _COLUMNS)
    return lax.div(head, heads), lax.rem(head, heads), columns

  def walk(tiles, arrived):
    def fetch(n):
      slot = lax.rem(n, _SLOTS)

      @pl.when(n < count)
      def _():
        b, head, columns = home(n)
        plgpu.copy_gmem_to_smem(
            state.at[b, head, :, columns], tiles.at[slot], arrived.at[slot]
        )

    for n in range(_SLOTS - 1):
      fetch(jnp.int32(n))

    def item(n, first):
      here, slot = home(n), lax.rem(n, _SLOTS)
      tile = tiles.at[slot]
      following = tokens.load(refs, home(lax.min(n + 1, count - 1)), 0)
      plgpu.barrier_wait(arrived.at[slot])
      held = plgpu.load(tile, layout=tokens.layout, optimized=False)
      held = tokens.run(refs, here, held, first)
      # The state before this one has left its slot, which the next one takes.
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      fetch(n + _SLOTS - 1)
      tile[...] = held
      plgpu.commit_smem()
      b, head, columns = here
      plgpu.copy_smem_to_gmem(tile, state.at[b, head, :, columns])
      return following

    lax.fori_loop(0, count, item, tokens.load(refs, home(0), 0))
    plgpu.wait_smem_to_gmem(0)

  pl.run_scoped(
      walk,
      tiles=plgpu.SMEM((_SLOTS, width, _COLUMNS), state.dtype),
      arrived=plgpu.Barrier(num_barriers=_SLOTS),
  )


class _Tokens:
  """A head's tokens, one after the other, on value columns in registers."""

  def __init__(self, scale, tokens, group):
    self.scale, self.tokens, self.group = scale, tokens, group
    # A warp owns a quarter of the columns, a lane four of them in every
    # 512 / columns-th row.
    self.layout = plgpu.Layout.TILED(
        plgpu.Tiling(((512 // _COLUMNS, _COLUMNS), (_COLUMNS // 4,), (4,))),
        warp_dims=(-3,),
        lane_dims=(-4, -2),
        vector_dim=-1,
    )

  def load(self, refs, here, t):
    """A token's (q, k, v, g, beta) for some columns of a head."""
    q, k, v, g, beta, *_ = refs
    b, head, columns = here
    source = lax.div(head, self.group)
    rows, cols = self.layout.reduce(1), self.layout.reduce(0)
    load = functools.partial(plgpu.load, optimized=False)
    return (
        load(q.at[b, t, source], layout=rows),
        load(k.at[b, t, source], layout=rows),
        load(v.at[b, t, head, columns], layout=cols),
        load(g.at[b, t, head], layout=rows),
        beta[b, t, head],
    )

  def run(self, refs, here, state, first):
    """The state after the tokens, whose outputs are written; first: loaded."""
    state = self._update(refs, here, state, 0, first)
    return lax.fori_loop(
        1,
        self.tokens,
        lambda t, state: self._update(
            refs, here, state, t, self.load(refs, here, t)
        ),
        state,
    )

  def _update(self, refs, here, state, t, vectors):
    b, head, columns = here
    out = refs[-1]
    *vectors, beta = vectors
    query, key, value, g = (x.astype(jnp.float32) for x in vectors)

    def spread(x, axis):
      x = lax.broadcast_in_dim(x, state.shape, (axis,))
      return plgpu.layout_cast(x, self.layout)

    key = spread(key, 0)
    state = state * spread(jnp.exp(g), 0)
    write = (value - jnp.sum(state * key, axis=0)) * beta
    state = state + key * spread(write, 1)
    read = jnp.sum(state * spread(query, 0), axis=0) * self.scale
    out.at[b, t, head, columns][...] = read.astype(out.dtype)
    return state


def _recur_fwd(scale, interpret, *args):
  return _recur(scale, interpret, *args), args


def _recur_bwd(scale, interpret, args, cotangents):
  del interpret
  _, vjp = jax.vjp(functools.partial(reference.kda, scale=scale), *args)
  return vjp(cotangents)


_recur.defvjp(_recur_fwd, _recur_bwd)
