"""The bounded decay gate, and the bounds a tile can represent."""

import functools
import math

import jax
from jax import numpy as jnp
from jaxtyping import Array
from jaxtyping import Float

TILE = 16


def safe_lower_bound(dtype, tile: int = TILE) -> float:
  """Returns the open end of the lower bounds that a tile keeps finite.

  A tile splits exp(G_i - G_j) as exp(G_i - G_0) exp(G_0 - G_j) around its
  first row, so the second factor reaches exp(-(tile - 1) lower_bound), which
  has to stay below the largest number of the operands' dtype:

    lower_bound > -log(max(dtype)) / (tile - 1)

  Args:
    dtype: the matrix operands' dtype.
    tile: tokens per tile, at least 2.

  Returns:
    A negative number, nats per token; legal bounds lie strictly between it
    and 0.
  """
  if tile < 2:
    raise ValueError(f"tile must be at least 2, got {tile}")
  return -math.log(float(jnp.finfo(dtype).max)) / (tile - 1)


def check_lower_bound(lower_bound: float, dtype, tile: int = TILE) -> float:
  """Returns lower_bound as a float, or raises ValueError with its range."""
  lowest = safe_lower_bound(dtype, tile)
  bound = float(lower_bound)
  if not lowest < bound < 0.0:  # NaN fails too
    raise ValueError(
        f"lower_bound must lie in ({lowest:.4f}, 0) for"
        f" {jnp.dtype(dtype).name} operands in tiles of {tile} tokens,"
        f" got {lower_bound}"
    )
  return bound


def operand_dtype(*arrays: Array) -> jnp.dtype:
  """Returns the dtype in which these arrays' decayed rows are multiplied.

  It is the arrays' common dtype, but float32 for float16, whose largest
  number (65504) cannot hold a tile's factors at a useful bound.
  """
  dtype = jnp.result_type(*arrays)
  return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def bounded_log_decay(
    z: Float[Array, "B T HV K"],
    a_log: Float[Array, " HV"],
    dt_bias: Float[Array, "HV K"],
    *,
    lower_bound: float = -5.0,
) -> Float[Array, "B T HV K"]:
  """Computes g = lower_bound * sigmoid(exp(a_log) * (z + dt_bias)).

  Args:
    z: [B, T, HV, K] decay logits.
    a_log: [HV] log of the logits' slope.
    dt_bias: [HV, K] bias of the logits.
    lower_bound: the most negative log decay, nats per token.

  Returns:
    g: [B, T, HV, K] fp32 (float64 for float64 z), in [lower_bound, 0].

  Raises:
    ValueError: wrong shapes, or a bound outside `safe_lower_bound(float32)`.

  Source: flash-linear-attention, fla/ops/kda/gate.py (Kimi K3's safe gate).
  dt_bias is summed from the fp32 gradient, before the cast to z's dtype.
  """
  check_gate(z, a_log, dt_bias)
  accumulator = jnp.promote_types(z.dtype, jnp.float32)
  bound = check_lower_bound(lower_bound, accumulator)
  return _gate(bound, z, a_log, dt_bias)


def check_gate(z: Array, a_log: Array, dt_bias: Array) -> None:
  """Raises ValueError unless the gate's arguments fit each other."""
  if z.ndim != 4 or not jnp.issubdtype(z.dtype, jnp.floating):
    raise ValueError(
        f"z must be floating [B, T, HV, K], got {z.dtype}{list(z.shape)}"
    )
  for name, x, shape in (
      ("a_log", a_log, z.shape[2:3]),
      ("dt_bias", dt_bias, z.shape[2:]),
  ):
    if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(
          f"{name} must be floating {list(shape)} for z {list(z.shape)}, got"
          f" {x.dtype}{list(x.shape)}"
      )


def _slope_and_input(z, a_log, dt_bias):
  dtype = jnp.promote_types(z.dtype, jnp.float32)
  slope = jnp.exp(a_log.astype(dtype))[None, None, :, None]
  return slope, z.astype(dtype) + dt_bias.astype(dtype)[None, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def _gate(lower_bound, z, a_log, dt_bias):
  slope, x = _slope_and_input(z, a_log, dt_bias)
  return lower_bound * jax.nn.sigmoid(slope * x)


def _gate_fwd(lower_bound, z, a_log, dt_bias):
  return _gate(lower_bound, z, a_log, dt_bias), (z, a_log, dt_bias)


@functools.partial(jax.jit, static_argnums=0)
def _gate_bwd(lower_bound, residuals, dg):
  z, a_log, dt_bias = residuals
  slope, x = _slope_and_input(z, a_log, dt_bias)
  # sigmoid(-y) keeps the digits that 1 - sigmoid(y) loses near 1.
  rise = jax.nn.sigmoid(slope * x) * jax.nn.sigmoid(-slope * x)
  dz = dg * (lower_bound * slope) * rise
  da_log = jnp.sum(dz * x, axis=(0, 1, 3))
  ddt_bias = jnp.sum(dz, axis=(0, 1))
  return (
      dz.astype(z.dtype),
      da_log.astype(a_log.dtype),
      ddt_bias.astype(dt_bias.dtype),
  )


_gate.defvjp(_gate_fwd, _gate_bwd)
