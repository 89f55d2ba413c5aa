"""Inputs and compiled programs that the tests of this folder share."""

import functools

import jax
from jax import numpy as jnp
import numpy as np

from pallas_kernels import kda

CHUNK_INPUTS = ("q", "k", "v", "g", "beta", "initial_state")
FUSED_INPUTS = (
    "q",
    "k",
    "v",
    "z",
    "beta_logits",
    "a_log",
    "dt_bias",
    "initial_state",
)


def fused_inputs(
    tokens, *, batch=1, heads=1, value_heads=2, key=64, value=32, seed=0
):
  """Random inputs of fused_kda, fp32, gates from hardly to fully decaying."""
  shapes = {
      "q": (batch, tokens, heads, key),
      "k": (batch, tokens, heads, key),
      "v": (batch, tokens, value_heads, value),
      "z": (batch, tokens, value_heads, key),
      "beta_logits": (batch, tokens, value_heads),
      "a_log": (value_heads,),
      "dt_bias": (value_heads, key),
      "initial_state": (batch, value_heads, key, value),
  }
  rng = np.random.default_rng(seed)
  inputs = {name: rng.standard_normal(shapes[name]) for name in FUSED_INPUTS}
  inputs["z"] = 2.0 * inputs["z"] - 3.0
  inputs["a_log"] = 0.3 * inputs["a_log"]
  return _fp32(inputs)


def chunk_inputs(tokens, **kwargs):
  """Random inputs of chunk_kda, fp32: the fused ones after their norms."""
  raw = {n: np.asarray(x) for n, x in fused_inputs(tokens, **kwargs).items()}
  slope = np.exp(raw["a_log"])[:, None]
  return _fp32({
      "q": unit(raw["q"]),
      "k": unit(raw["k"]),
      "v": raw["v"],
      "g": -5.0 / (1.0 + np.exp(-slope * (raw["z"] + raw["dt_bias"]))),
      "beta": 1.0 / (1.0 + np.exp(-raw["beta_logits"])),
      "initial_state": raw["initial_state"],
  })


def _fp32(inputs):
  return {name: jnp.asarray(x, jnp.float32) for name, x in inputs.items()}


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def cast(inputs, dtype, names=("q", "k", "v")):
  return inputs | {name: inputs[name].astype(dtype) for name in names}


def cotangents(inputs, seed=1):
  """Random gradients of the output and of the final state."""
  rng = np.random.default_rng(seed)
  v, state = inputs["v"], inputs["initial_state"]
  return tuple(
      jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in (v, state)
  )


@functools.cache
def forward(op, implementation):
  """A compiled (inputs, segment_ids) -> (out, final_state)."""
  function = getattr(kda, op)

  def run(inputs, segment_ids=None):
    return function(
        **inputs, segment_ids=segment_ids, implementation=implementation
    )

  return jax.jit(run)


@functools.cache
def gradient(op, implementation):
  """A compiled (inputs, cotangents, segment_ids) -> (outputs, gradients)."""
  run = forward(op, implementation)

  def pull(inputs, cotangents, segment_ids=None):
    outputs, vjp = jax.vjp(lambda x: run(x, segment_ids), inputs)
    return outputs, vjp(cotangents)[0]

  return jax.jit(pull)
