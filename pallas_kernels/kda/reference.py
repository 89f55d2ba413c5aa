"""The recurrence itself, token by token: the ground truth of this folder."""

import jax
from jax import numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int


def kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    initial_state: Float[Array, "B HV K V"],
    runs: Int[Array, "B T"] | None = None,
    *,
    scale: float,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """Scans S_t = (I - b k k') diag(exp(g)) S_{t-1} + b k v', o = s S_t' q.

  Everything is computed in the state's dtype with full-precision products and
  natural exponentials, and differentiated by JAX.

  Args:
    q: [B, T, H, K] queries; zero on padding, as are k, v, g and beta.
    k: [B, T, H, K] keys.
    v: [B, T, HV, V] values.
    g: [B, T, HV, K] log decay, nats per token, not positive.
    beta: [B, T, HV] write strength.
    initial_state: [B, HV, K, V] fp32, the state of run 0.
    runs: [B, T] int32, see `segments.runs_of`; None is one run.
    scale: factor on the output.

  Returns:
    out: [B, T, HV, V] in v's dtype.
    final_state: [B, HV, K, V] in initial_state's dtype.
  """
  dtype = initial_state.dtype
  groups = v.shape[2] // q.shape[2]
  q = jnp.repeat(q.astype(dtype), groups, axis=2)
  k = jnp.repeat(k.astype(dtype), groups, axis=2)
  tokens = (q, k, v.astype(dtype), g.astype(dtype), beta.astype(dtype))
  xs = tuple(jnp.moveaxis(x, 1, 0) for x in tokens)
  if runs is None:
    runs = jnp.zeros(q.shape[:2], jnp.int32)

  def body(carry, x):
    state, previous = carry
    *token, run = x
    same = (run == previous)[:, None, None, None]
    state, out = step(jnp.where(same, state, 0.0), *token, scale=scale)
    return (state, run), out

  start = (initial_state, jnp.zeros(q.shape[:1], jnp.int32))
  (state, _), out = jax.lax.scan(body, start, (*xs, jnp.moveaxis(runs, 1, 0)))
  return jnp.moveaxis(out, 0, 1).astype(v.dtype), state


def step(state, q, k, v, g, beta, *, scale):
  """Takes one token: decays, then reads, corrects and writes the state.

  Args:
    state: [B, HV, K, V].
    q: [B, HV, K], as k and g.
    k: key.
    v: [B, HV, V].
    g: log decay.
    beta: [B, HV].
    scale: factor on the output.

  Returns:
    (state, out): [B, HV, K, V] and [B, HV, V].
  """
  highest = jax.lax.Precision.HIGHEST
  state = state * jnp.exp(g)[..., None]
  read = jnp.einsum("bhkv,bhk->bhv", state, k, precision=highest)
  write = beta[..., None] * (v - read)
  state = state + k[..., None] * write[..., None, :]
  out = jnp.einsum("bhkv,bhk->bhv", state, q, precision=highest)
  return state, scale * out
