"""The recurrence token by token on a TPU, the state updated in place.

A program holds the states of a few heads in VMEM from their read to their
write; a token costs vector work only, in fp32:

  S <- diag(e^g) S;  S <- S + k (b (v - S^T k))^T;  o = scale S^T q

For one token the limit is the state's bytes, read and written once. A state
stands as [K, V], so a token's q, k and e^g are columns, its v and o rows.
"""

import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array
from jaxtyping import Float

from pallas_kernels.kda import mosaic_tpu
from pallas_kernels.kda import reference

WIDTHS = (64, 128)
MOST_TOKENS = 64  # all of them stand in VMEM; more is work for `chunk_kda`


def recurrent_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    state: Float[Array, "B HV K V"],
    *,
    scale: float,
    interpret: mosaic_tpu.Interpret = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """`decode.recurrent_kda`, its checks done; a donated state is updated.

  Raises:
    NotImplementedError: widths, dtypes or a number of tokens that the kernel
      does not serve.
  """
  mosaic_tpu.check_device_and_dtypes(q, k, v, g, interpret)
  widths = q.shape[-1], v.shape[-1]
  if not set(widths) <= set(WIDTHS):
    raise NotImplementedError(
        f"widths K {widths[0]}, V {widths[1]} are not in {WIDTHS}"
    )
  if q.shape[1] > MOST_TOKENS:
    raise NotImplementedError(f"{q.shape[1]} tokens are above {MOST_TOKENS}")
  return _recur(float(scale), interpret, q, k, v, g, beta, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
@functools.partial(jax.jit, static_argnums=(0, 1))
def _recur(scale, interpret, q, k, v, g, beta, state):
  batch, tokens, heads, key_width = q.shape
  value_heads, value_width = v.shape[2:]
  n, queries = mosaic_tpu.heads_per_program(heads, value_heads)
  groups = value_heads // n
  shared = value_heads // heads

  def by_group(x):
    return x.reshape(batch, tokens, groups, n, -1)

  def block(width):
    return pl.BlockSpec(
        (None, tokens, None, n, width), lambda b, i: (b, 0, i, 0, 0)
    )

  query = pl.BlockSpec(
      (None, tokens, None, queries, key_width),
      lambda b, i: (b, 0, i * n // shared // queries, 0, 0),
  )
  states = pl.BlockSpec(
      (None, n, key_width, value_width), lambda b, i: (b, i, 0, 0)
  )
  q, k = (x.reshape(batch, tokens, -1, queries, key_width) for x in (q, k))
  inputs = (q, k, *map(by_group, (v, g, beta.astype(jnp.float32))), state)
  out, state = pl.pallas_call(
      functools.partial(_kernel, scale),
      grid=(batch, groups),
      in_specs=[
          query,
          query,
          block(value_width),
          block(key_width),
          block(1),
          states,
      ],
      out_specs=[block(value_width), states],
      out_shape=[
          jax.ShapeDtypeStruct(inputs[2].shape, v.dtype),
          jax.ShapeDtypeStruct(state.shape, state.dtype),
      ],
      input_output_aliases={5: 1},
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "parallel")
      ),
      cost_estimate=pl.CostEstimate(
          flops=tokens * 7 * state.size,
          transcendentals=g.size,
          bytes_accessed=state.nbytes
          + sum(x.nbytes for x in inputs)
          + v.nbytes,
      ),
      interpret=interpret or False,
      name="kda_recurrent",
  )(*inputs)
  return out.reshape(v.shape), state


def _kernel(
    scale, q_ref, k_ref, v_ref, g_ref, beta_ref, in_ref, out_ref, state_ref
):
  tokens, heads, _ = v_ref.shape
  queries = q_ref.shape[1]

  def token(t, state, i):
    query = slice(i * queries // heads, i * queries // heads + 1)
    own = slice(i, i + 1)
    rows = [x[t, query].astype(jnp.float32) for x in (q_ref, k_ref)]
    rows.append(jnp.exp(g_ref[t, own].astype(jnp.float32)))
    columns = jnp.concatenate(rows, axis=0).T  # [K, 3]
    q, k, decay = (columns[:, j : j + 1] for j in range(3))
    state = state * decay
    read = jnp.sum(state * k, axis=0, keepdims=True)
    value = v_ref[t, own].astype(jnp.float32)
    state = state + k * (beta_ref[t, own] * (value - read))
    out = scale * jnp.sum(state * q, axis=0, keepdims=True)
    out_ref[t, own] = out.astype(out_ref.dtype)
    return state

  for i in range(heads):
    state_ref[i] = lax.fori_loop(
        0, tokens, functools.partial(token, i=i), in_ref[i]
    )


def _recur_fwd(scale, interpret, *args):
  return _recur(scale, interpret, *args), args


def _recur_bwd(scale, interpret, args, cotangents):
  del interpret
  _, vjp = jax.vjp(functools.partial(reference.kda, scale=scale), *args)
  return vjp(cotangents)


_recur.defvjp(_recur_fwd, _recur_bwd)
