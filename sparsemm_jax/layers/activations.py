"""SiTU-GLU: a gated unit whose gate and up branches are capped by tanh."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float


def situ_glu(
    gate: Float[Array, "..."],
    up: Float[Array, "..."],
    *,
    gate_cap: float = 4.0,
    up_cap: float | None = 25.0,
) -> Float[Array, "..."]:
  """Applies the sigmoid-tanh unit.

  out = gate_cap tanh(gate / gate_cap) sigmoid(gate) * up_cap tanh(up / up_cap)

  To first order around 0 this is SwiGLU; |out| <= gate_cap * up_cap for any
  input. The backward pass saves gate and up alone and recomputes the rest.

  Args:
    gate: [...] gate branch.
    up: [...] up branch, of gate's shape and dtype.
    gate_cap: the gate branch's bound.
    up_cap: the up branch's bound; None leaves up as it is.

  Returns:
    [...] in gate's dtype; computed in fp32 and cast once.

  Raises:
    ValueError: the shapes or dtypes differ, or a cap is not positive.

  Source: Kimi K3 report, eq. 12 and appendix B, arXiv:2607.24653.
  """
  if gate.shape != up.shape or gate.dtype != up.dtype:
    raise ValueError(
        f"gate is {gate.dtype}{list(gate.shape)} but up is"
        f" {up.dtype}{list(up.shape)}"
    )
  if gate_cap <= 0 or (up_cap is not None and up_cap <= 0):
    raise ValueError(f"caps must be positive: {gate_cap=}, {up_cap=}")
  return _situ_glu(gate_cap, up_cap, gate, up)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _situ_glu(gate_cap, up_cap, gate, up):
  gate32, up32 = gate.astype(jnp.float32), up.astype(jnp.float32)
  out = _gate_branch(gate32, gate_cap) * _up_branch(up32, up_cap)
  return out.astype(gate.dtype)


def _forward(gate_cap, up_cap, gate, up):
  return _situ_glu(gate_cap, up_cap, gate, up), (gate, up)


def _backward(gate_cap, up_cap, residuals, d_out):
  gate, up = residuals
  gate32, up32 = gate.astype(jnp.float32), up.astype(jnp.float32)
  d_out = d_out.astype(jnp.float32)
  sigmoid = jax.nn.sigmoid(gate32)
  # sigmoid(-gate) and not 1 - sigmoid: no cancellation at large gates.
  gate_slope = sigmoid * (
      _sech_squared(gate32 / gate_cap)
      + gate_cap * jnp.tanh(gate32 / gate_cap) * jax.nn.sigmoid(-gate32)
  )
  up_slope = 1.0 if up_cap is None else _sech_squared(up32 / up_cap)
  d_gate = d_out * _up_branch(up32, up_cap) * gate_slope
  d_up = d_out * _gate_branch(gate32, gate_cap) * up_slope
  return d_gate.astype(gate.dtype), d_up.astype(up.dtype)


_situ_glu.defvjp(_forward, _backward)


def _gate_branch(gate, cap):
  return cap * jnp.tanh(gate / cap) * jax.nn.sigmoid(gate)


def _up_branch(up, cap):
  return up if cap is None else cap * jnp.tanh(up / cap)


def _sech_squared(x):
  """1 - tanh(x)^2 with full relative accuracy: 4 e / (1 + e)^2, e = e^-2|x|."""
  decay = jnp.exp(-2.0 * jnp.abs(x))
  return 4.0 * decay / (1.0 + decay) ** 2
