"""Decode: one or a few tokens against a state that is kept between calls."""

import importlib

from jax import numpy as jnp
from jaxtyping import Array
from jaxtyping import Float

from pallas_kernels import dispatch
from pallas_kernels.kda import checks
from pallas_kernels.kda import reference


def recurrent_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    implementation: dispatch.Implementation = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """Runs the recurrence token by token in fp32, whatever T is.

  A row with fewer tokens than T ends in tokens of g = 0 and beta = 0, which
  pass its state on. Where the state is donated, a kernel updates it in place.

  Args:
    q: [B, T, H, K] queries, L2-normalised by the caller as k is.
    k: [B, T, H, K] keys.
    v: [B, T, HV, V] values; value head j reads query head j // (HV / H).
    g: [B, T, HV, K] log decay, nats per token, not positive.
    beta: [B, T, HV] write strength.
    scale: factor on the output, K**-0.5 by default.
    initial_state: [B, HV, K, V] fp32; zero by default.
    implementation: "reference", "mosaic_gpu", "mosaic_tpu", a sequence of
      names tried in order, or None (the best for the device).

  Returns:
    out: [B, T, HV, V] in v's dtype.
    final_state: [B, HV, K, V] fp32.

  Raises:
    ValueError: a wrong shape or dtype, naming the argument.
    NotImplementedError: an explicit implementation cannot serve; says why.
  """
  checks.check_tokens(q, k, v, beta, initial_state, None, g=g)
  state = checks.initial_state_or_zero(q, v, initial_state)
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  args = (q, k, v, g, beta, state)

  def kernel(name):  # Loads Pallas if used.
    module = importlib.import_module(f"pallas_kernels.kda.{name}_decode")
    return module.recurrent_kda(*args, scale=scale)

  candidates = {
      "mosaic_gpu": lambda: kernel("mosaic_gpu"),
      "mosaic_tpu": lambda: kernel("mosaic_tpu"),
      "reference": lambda: _reference(*args, scale=scale),
  }
  return dispatch.run("recurrent_kda", candidates, implementation)


def _reference(q, k, v, g, beta, state, *, scale):
  if q.shape[1] != 1:
    return reference.kda(q, k, v, g, beta, state, scale=scale)
  groups = v.shape[2] // q.shape[2]
  tokens = (
      jnp.repeat(q, groups, axis=2),
      jnp.repeat(k, groups, axis=2),
      v,
      g,
      beta,
  )
  tokens = (x[:, 0].astype(state.dtype) for x in tokens)
  state, out = reference.step(state, *tokens, scale=scale)
  return out[:, None].astype(v.dtype), state
