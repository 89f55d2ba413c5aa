"""Inputs and compiled programs that the tests of this folder share."""

import functools

import jax
from jax import numpy as jnp

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
  keys = jax.random.split(jax.random.key(seed), len(FUSED_INPUTS))
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
  inputs = {
      name: jax.random.normal(key, shapes[name])
      for key, name in zip(keys, FUSED_INPUTS, strict=True)
  }
  inputs["z"] = 2.0 * inputs["z"] - 3.0
  inputs["a_log"] = 0.3 * inputs["a_log"]
  return inputs


def chunk_inputs(tokens, **kwargs):
  """Random inputs of chunk_kda, fp32: the fused ones after their norms."""
  raw = fused_inputs(tokens, **kwargs)
  g = kda.bounded_log_decay(raw["z"], raw["a_log"], raw["dt_bias"])
  return {
      "q": unit(raw["q"]),
      "k": unit(raw["k"]),
      "v": raw["v"],
      "g": g,
      "beta": jax.nn.sigmoid(raw["beta_logits"]),
      "initial_state": raw["initial_state"],
  }


def unit(x):
  return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def cast(inputs, dtype, names=("q", "k", "v")):
  return inputs | {name: inputs[name].astype(dtype) for name in names}


def cotangents(inputs, seed=1):
  """Random gradients of the output and of the final state."""
  keys = jax.random.split(jax.random.key(seed))
  v, state = inputs["v"], inputs["initial_state"]
  return (
      jax.random.normal(keys[0], v.shape, v.dtype),
      jax.random.normal(keys[1], state.shape, state.dtype),
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
