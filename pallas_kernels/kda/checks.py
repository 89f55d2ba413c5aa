"""Argument checks: every refusal names the argument and its shape."""

from jax import numpy as jnp
from jaxtyping import Array


def check_tokens(q, k, v, beta, initial_state, segment_ids, **per_channel):
  """Raises ValueError unless shapes and dtypes fit q and v.

  Args:
    q: [B, T, H, K] floating, as k.
    k: see q.
    v: [B, T, HV, V] floating, HV a multiple of H.
    beta: [B, T, HV] floating (beta or its logits).
    initial_state: [B, HV, K, V] fp32, or None.
    segment_ids: [B, T] integer, or None.
    **per_channel: name -> [B, T, HV, K] floating (g or z).
  """
  if q.ndim != 4:
    raise ValueError(f"q must be [B, T, H, K], got {describe(q)}")
  if v.ndim != 4:
    raise ValueError(f"v must be [B, T, HV, V], got {describe(v)}")
  batch, tokens, heads, key_width = q.shape
  value_heads, value_width = v.shape[2:]
  if heads == 0 or value_heads % heads or value_heads == 0:
    raise ValueError(
        f"v must have a multiple of q's {heads} heads, got {describe(v)}"
    )
  expected = {
      "q": (q, q.shape),
      "k": (k, q.shape),
      "v": (v, (batch, tokens, value_heads, value_width)),
      "beta": (beta, (batch, tokens, value_heads)),
  }
  for name, x in per_channel.items():
    expected[name] = (x, (batch, tokens, value_heads, key_width))
  for name, (x, shape) in expected.items():
    if x.shape != shape:
      raise ValueError(f"{name} must be {list(shape)}, got {describe(x)}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f"{name} must be floating, got {describe(x)}")
  _check_state(initial_state, q, (batch, value_heads, key_width, value_width))
  _check_segments(segment_ids, (batch, tokens))


def _check_state(state, q, shape):
  if state is None:
    return
  dtype = state_dtype(q)
  if state.shape != shape or state.dtype != dtype:
    raise ValueError(
        f"initial_state must be {dtype.name}{list(shape)}, got"
        f" {describe(state)}"
    )


def _check_segments(segment_ids, shape):
  if segment_ids is None:
    return
  integer = jnp.issubdtype(segment_ids.dtype, jnp.integer)
  if segment_ids.shape != shape or not integer:
    raise ValueError(
        f"segment_ids must be integer {list(shape)}, got"
        f" {describe(segment_ids)}"
    )


def state_dtype(q: Array) -> jnp.dtype:
  """Returns float32, or float64 for float64 queries."""
  return jnp.promote_types(q.dtype, jnp.float32)


def initial_state_or_zero(q: Array, v: Array, initial_state) -> Array:
  """Returns initial_state, or [B, HV, K, V] zeros where it is None."""
  if initial_state is not None:
    return initial_state
  batch, _, _, key_width = q.shape
  shape = (batch, v.shape[2], key_width, v.shape[3])
  return jnp.zeros(shape, state_dtype(q))


def describe(x: Array) -> str:
  """Returns dtype[shape] for a message."""
  return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"
