"""Inputs of the attention in five gate regimes, and its exact gradients."""

import functools

import jax
from jax import numpy as jnp
import numpy as np

from pallas_kernels.kda import arg_specs
from pallas_kernels.kda import gate
from pallas_kernels.kda import reference
from pallas_kernels.kda import segments

REGIMES = ("random", "mild", "saturated", "correlated", "identical")
GRADIENTS = ("q", "k", "v", "z", "beta_logits", "a_log", "dt_bias")
# 96 heads: fla tunes for the number of heads, and the timed shape has 96.
CHECK = arg_specs.ArgSpec(1, 512, 96, 96)
_HEADS_AT_ONCE = 32  # of the float64 recurrence, whose backward keeps states


def make_inputs(spec, regime="random", seed=0):
  """Returns fused_kda's array arguments by name, with gates of a regime."""
  keys = jax.random.split(jax.random.key(seed), 7)
  x = {
      name: jax.random.normal(key, s.shape, jnp.float32)
      for key, (name, s) in zip(keys, spec.shapes().items())
  }
  x["a_log"] = jnp.log(
      jax.random.uniform(keys[5], x["a_log"].shape, minval=1.0, maxval=16.0)
  )
  x["dt_bias"] *= 0.5
  if regime == "mild":
    x["a_log"] *= 0.0
    x["dt_bias"] -= 4.0
  elif regime == "saturated":
    x["z"] += 12.0
    x["a_log"] = jnp.ones_like(x["a_log"])
  elif regime in ("correlated", "identical"):
    common = x["k"][:, :1]
    noise = 0.3 if regime == "correlated" else 0.0
    x["k"] = common + noise * x["k"]
    x["a_log"] *= 0.0
    x["z"] = 0.1 * x["z"] - 12.0
    x["beta_logits"] += 5.0
  return {
      name: value.astype(spec.shapes()[name].dtype) for name, value in x.items()
  }


def cotangent(x):
  """A random gradient of the output, in v's dtype."""
  return jax.random.normal(jax.random.key(9), x["v"].shape, x["v"].dtype)


def with_gradient(run):
  """(inputs, cotangent) -> output and gradients; nothing is eliminated."""

  @jax.jit
  def both(x, cotangent):
    out, vjp = jax.vjp(run, x)
    return out, vjp(cotangent)[0]

  return both


def _recurrence(x, segment_ids):
  """The token recurrence on raw inputs, in the inputs' precision."""
  runs = None
  if segment_ids is not None:
    valid, runs = segments.runs_of(segment_ids)
  norm = lambda y: y / jnp.sqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-6)
  g = gate.bounded_log_decay(x["z"], x["a_log"], x["dt_bias"])
  args = (
      norm(x["q"]),
      norm(x["k"]),
      x["v"],
      g,
      jax.nn.sigmoid(x["beta_logits"]),
  )
  if segment_ids is not None:
    args = tuple(segments.zero_padding(valid, y) for y in args)
  shape = x["q"].shape[:1] + x["v"].shape[2:3] + x["q"].shape[3:]
  state = jnp.zeros((*shape, x["v"].shape[3]), x["q"].dtype)
  return reference.kda(*args, state, runs, scale=x["q"].shape[-1] ** -0.5)[0]


@functools.partial(jax.jit, static_argnames="gradients")
def _exact(x, cotangent, segment_ids, *, gradients):
  run = lambda x: _recurrence(x, segment_ids)
  if not gradients:
    return run(x), {}
  out, vjp = jax.vjp(run, x)
  return out, vjp(cotangent)[0]


def exact(x, cotangent, segment_ids=None, *, gradients=True):
  """Output and gradients of the float64 recurrence, as numpy float64."""
  group = x["v"].shape[2] // x["q"].shape[2]
  outs, grads = [], []
  for first in range(0, x["q"].shape[2], _HEADS_AT_ONCE):
    query = slice(first, first + _HEADS_AT_ONCE)
    value = slice(first * group, (first + _HEADS_AT_ONCE) * group)
    part = {
        name: _heads(name, _float64(y), query if name in "qk" else value)
        for name, y in x.items()
    }
    with jax.enable_x64(True):
      out, gradient = _exact(
          jax.tree.map(jnp.asarray, part),
          jnp.asarray(_float64(cotangent)[:, :, value]),
          segment_ids,
          gradients=gradients,
      )
      outs.append(np.asarray(out))
      grads.append({name: np.asarray(y) for name, y in gradient.items()})
  joined = {
      name: np.concatenate([g[name] for g in grads], _head_axis(name))
      for name in (GRADIENTS if gradients else ())
  }
  return np.concatenate(outs, 2), joined


def _head_axis(name):
  return 0 if name in ("a_log", "dt_bias") else 2


def _heads(name, y, which):
  return y[which] if _head_axis(name) == 0 else y[:, :, which]


def _float64(x):
  return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def error(actual, expected):
  """Relative RMS error; NaN stays NaN."""
  difference = np.sqrt(np.mean((_float64(actual) - expected) ** 2))
  return float(difference / max(np.sqrt(np.mean(expected**2)), 1e-30))


def errors(actual, expected):
  """Errors of (output, gradients) against `exact`'s, by name."""
  row = {"output": error(actual[0], expected[0])}
  for name, wanted in expected[1].items():
    row[f"d {name}"] = error(actual[1][name], wanted)
  return row
