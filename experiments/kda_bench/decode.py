"""Errors and times of the call that decodes one token for every row."""

import functools

import jax
from jax import numpy as jnp
import numpy as np

from experiments.kda_bench import inputs as inputs_lib
from experiments.kda_bench import timing
from pallas_kernels.kda import decode

_OUTPUT_LIMIT = 5e-3  # bf16
_STATE_LIMIT = 1e-4  # fp32, a few tokens
_STEPS = 20  # in one program, each on the state of the one before


def _inputs(batch, tokens, heads, width):
  """(q, k, v, g, beta) of a few tokens and a state."""
  keys = jax.random.split(jax.random.key(5), 6)
  row = (batch, tokens, heads)
  normal = jax.random.normal
  q, k, v, g = (normal(key, (*row, width), jnp.bfloat16) for key in keys[:4])
  unit = (
      lambda y: y / jnp.linalg.norm(y.astype(jnp.float32), axis=-1)[..., None]
  )
  q, k = (unit(y).astype(jnp.bfloat16) for y in (q, k))
  g = -5.0 * jax.nn.sigmoid(g.astype(jnp.float32))
  x = (q, k, v, g, jax.nn.sigmoid(normal(keys[4], row)))
  return x, normal(keys[5], (batch, heads, width, width))


def _runs():
  """{name: (x, state) -> (out, state)}; the recurrence first."""

  def run(name, x, state):
    return decode.recurrent_kda(*x, initial_state=state, implementation=name)

  return {
      "reference": functools.partial(run, "reference"),
      "ours": functools.partial(run, None),
  }


def _check(runs, x, state):
  """Relative errors of output and state against the recurrence, by name."""
  expected = jax.jit(runs["reference"])(x, state)
  expected = [np.asarray(e, np.float64) for e in expected]
  errors = {}
  for name, run in runs.items():
    actual = jax.jit(run)(x, state)
    errors[name] = [inputs_lib.error(*pair) for pair in zip(actual, expected)]
    output, final = errors[name]
    if not (output <= _OUTPUT_LIMIT and final <= _STATE_LIMIT):
      raise SystemExit(f"decode is not timed: {name}, errors {errors[name]}")
  return errors


def measure(batch, heads, width, rate, repeats):
  """One token for every row: errors against the recurrence, time, floor.

  Args:
    batch: rows, each with its own state.
    heads: heads of a row.
    width: K = V.
    rate: bytes a millisecond of the floor.
    repeats: groups of calls.

  Returns:
    {name: {"ms": (median, spread), "output error", "state error"}} and
    {"byte floor ms": milliseconds}.

  Raises:
    SystemExit: an output or a state differs from the recurrence's; nothing is
      timed.
  """
  runs = _runs()
  # Rows that no number of blocks divides, several tokens, the narrow width.
  few = _check(runs, *_inputs(37, 3, 5, 64))
  print("decode of 3 tokens, errors:", few, flush=True)
  x, state = _inputs(batch, 1, heads, width)
  errors = _check(runs, x, state)
  floor = 2 * state.nbytes + sum(y.nbytes for y in x) + x[2].nbytes
  result = {"byte floor ms": float(floor / rate)}
  for name, run in runs.items():

    @functools.partial(jax.jit, donate_argnums=0)
    def steps(state, x, run=run):
      for _ in range(_STEPS):
        out, state = run(x, state)
        # Or XLA fuses its form's steps with each other, as no server could.
        out, state = jax.lax.optimization_barrier((out, state))
      return state, out

    held = [state + 0.0]

    def call(held=held, steps=steps):
      held[0], out = steps(held[0], x)
      return out

    median, spread = timing.timed(call, repeats=repeats)
    result[name] = {
        "ms": (median / _STEPS, spread / _STEPS),
        "output error": errors[name][0],
        "state error": errors[name][1],
    }
    print(f"decode {name:14}", result[name], flush=True)
  return result
