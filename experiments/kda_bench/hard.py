"""Inputs that broke public kernels; each case says what must hold.

The float64 recurrence is the judge wherever a case compares numbers. Cases
compile for longer than they run, so `start` shares them among processes.
Sources of the cases: FlashKDA issue 34 (identical keys), sglang-jax 1587
(lengths 63 and 65 in one tile), flash-linear-attention 1240 (a later token
changing earlier outputs), attention-gym 337 (saturated gates).
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import json
import subprocess
import sys

import jax
from jax import numpy as jnp
import numpy as np

from experiments.kda_bench import inputs as inputs_lib
from pallas_kernels.kda import api
from pallas_kernels.kda import arg_specs

# Relative RMS errors of bf16 inputs. Where keys are one, the output itself is
# a difference, and the gradients of a_log and dt_bias sum differences over all
# tokens.
_LIMIT = 1e-2
_CANCELLING_LIMIT = 3e-2
_CANCELLING_PARAMETER_LIMIT = 2e-1
# The gradient of a_log is one number a head, a sum over all tokens: of two
# heads it can be 50 times smaller than usual, and its error not.
_HEADS = 8
_SMALL = arg_specs.ArgSpec(1, 128, _HEADS, _HEADS)


_PROCESSES = 8


def start(
    parts: Sequence[str] = ("",)
) -> list[tuple[list[str], subprocess.Popen]]:
  """Starts the cases whose names hold one of `parts`, for `results`.

  Returns:
    For each process the names of its cases, and the process.
  """
  command = [sys.executable, "-m", "experiments.kda_bench.hard"]
  return [
      (
          list(_chosen(parts, i)),
          subprocess.Popen(
              [*command, str(i), *parts],
              stdout=subprocess.PIPE,
              encoding="utf-8",
          ),
      )
      for i in range(_PROCESSES)
  ]


def results(started, timeout: float) -> Iterator[tuple[str, bool, str]]:
  """Yields (case, whether it holds, numbers) of every case started.

  Args:
    started: from `start`.
    timeout: seconds after which a process is killed; its cases then fail.
  """
  for names, process in started:
    try:
      text, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
      process.kill()
      text, _ = process.communicate()
    lines = [json.loads(x) for x in text.splitlines() if x.startswith("[")]
    yield from map(tuple, lines)
    done = {name for name, *_ in lines}
    yield from ((n, False, "no result") for n in names if n not in done)


def _chosen(parts, share):
  """The cases of one process of those whose names hold one of `parts`."""
  chosen = [
      (name, case)
      for name, case in cases().items()
      if any(part in name for part in parts)
  ]
  return dict(chosen[share::_PROCESSES])


def main(share: int, parts: Sequence[str]) -> None:
  """Runs every `_PROCESSES`-th case from `share` on, a line of JSON each."""
  for name, case in _chosen(parts, share).items():
    try:
      good, numbers = case()
    except Exception as error:  # pylint: disable=broad-exception-caught
      good, numbers = False, f"{type(error).__name__}: {error}"[:300]
    print(json.dumps([name, bool(good), numbers]), flush=True)


def cases() -> dict[str, Callable[[], tuple[bool, str]]]:
  """{name: call() -> (whether it holds, numbers)}."""
  return {
      "saturated gate, T = 65536": _saturated_long,
      "identical keys, no decay, T = 1024": lambda: _against_exact(
          arg_specs.ArgSpec(1, 1024, _HEADS, _HEADS),
          "identical",
      ),
      "segments of 63 and 65": lambda: _packed([63, 65]),
      "tails of 1 to 63, by padding": _tails,
      "real lengths 1, 63, 65, 127": _lengths,
      "HV = 4 H": lambda: _against_exact(
          arg_specs.ArgSpec(1, 192, _HEADS // 4, _HEADS)
      ),
      "K = V = 64": lambda: _against_exact(
          arg_specs.ArgSpec(2, 192, _HEADS, _HEADS, 64, 64)
      ),
      "later tokens change no bit": _prefix,
      "T = 1048576 in two halves": _two_halves,
  }


def _run(x, **options):
  return api.fused_kda(**x, **options)


def _output(x, **options):
  return _run(x, **options)[0]


def verdict(rows, regime="random"):
  """Judges [{name: error}] by its worst errors; NaN fails."""
  worst = {}
  for row in rows:
    for name, value in row.items():
      if not value <= worst.get(name, -1.0):  # NaN stays
        worst[name] = value
  cancels = regime == "identical"

  def limit(name):
    if not cancels:
      return _LIMIT
    parameter = name in ("d a_log", "d dt_bias")
    return _CANCELLING_PARAMETER_LIMIT if parameter else _CANCELLING_LIMIT

  good = all(value <= limit(name) for name, value in worst.items())
  return good, " ".join(f"{k} {v:.1e}" for k, v in worst.items())


def _against_exact(spec, regime="random", segment_ids=None):
  x = inputs_lib.make_inputs(spec, regime)
  cotangent = inputs_lib.cotangent(x)
  run = lambda x: _output(x, segment_ids=segment_ids)
  actual = inputs_lib.with_gradient(run)(x, cotangent)
  expected = inputs_lib.exact(x, cotangent, segment_ids)
  return verdict([inputs_lib.errors(actual, expected)], regime)


def _saturated_long():
  """Forward against float64; gradients finite (they are compared at 512)."""
  x = inputs_lib.make_inputs(arg_specs.ArgSpec(1, 65536, 2, 2), "saturated")
  cotangent = inputs_lib.cotangent(x)
  out, gradients = inputs_lib.with_gradient(_output)(x, cotangent)
  expected, _ = inputs_lib.exact(x, cotangent, gradients=False)
  finite = all(_finite(y) for y in gradients.values())
  value = inputs_lib.error(out, expected)
  return value <= _LIMIT and finite, f"output {value:.1e}, finite {finite}"


def _packed(lengths):
  ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[None]
  return _against_exact(
      _SMALL, "saturated", segment_ids=jnp.asarray(ids, jnp.int32)
  )


def _tails():
  """One program for every length: the rest of the chunk is padding."""
  spec = arg_specs.ArgSpec(1, 64, _HEADS, _HEADS)
  x = inputs_lib.make_inputs(spec)
  cotangent = inputs_lib.cotangent(x)

  @jax.jit
  def both(x, cotangent, ids):
    out, vjp = jax.vjp(lambda x: _output(x, segment_ids=ids), x)
    return out, vjp(cotangent)[0]

  rows = []
  for length in range(1, 64):
    ids = jnp.asarray(np.arange(64) < length, jnp.int32)[None]
    masked = jnp.where(ids[..., None, None] > 0, cotangent, 0)
    actual = both(x, masked, ids)
    rows.append(inputs_lib.errors(actual, inputs_lib.exact(x, masked, ids)))
  return verdict(rows)


def _lengths():
  rows = []
  for tokens in (1, 63, 65, 127):
    x = inputs_lib.make_inputs(arg_specs.ArgSpec(2, tokens, 2, 2))
    out = jax.jit(_output)(x)
    expected, _ = inputs_lib.exact(x, inputs_lib.cotangent(x), gradients=False)
    rows.append({"output": inputs_lib.error(out, expected)})
  return verdict(rows)


def _prefix():
  """Changes everything from token 100 on; earlier bits must not change."""
  x = inputs_lib.make_inputs(arg_specs.ArgSpec(1, 256, 4, 4), "saturated")
  other = inputs_lib.make_inputs(arg_specs.ArgSpec(1, 256, 4, 4), seed=1)
  cut = 100
  changed = {
      name: (
          y
          if name in ("a_log", "dt_bias")
          else jnp.concatenate([y[:, :cut], other[name][:, cut:]], 1)
      )
      for name, y in x.items()
  }
  run = jax.jit(_output)
  a, b = (np.asarray(run(y)[:, :cut], np.float32) for y in (x, changed))
  different = int(np.sum(a != b))
  return different == 0, f"{different} of {a.size} outputs changed"


def _two_halves():
  """One call of a million tokens against two calls through the state."""
  spec = arg_specs.ArgSpec(1, 2**20, 16, 16)
  keys = jax.random.split(jax.random.key(3), 5)
  x = {
      name: jax.random.normal(keys[i], spec.shapes()[name].shape, jnp.bfloat16)
      for i, name in enumerate(("q", "k", "v", "z", "beta_logits"))
  }
  x |= {"a_log": jnp.zeros((16,)), "dt_bias": jnp.full((16, 128), -3.0)}
  whole, final = jax.jit(_run)(x)
  half = spec.tokens // 2
  state, same = None, 0.0
  for part in (slice(0, half), slice(half, None)):
    piece = {
        name: y if name in ("a_log", "dt_bias") else y[:, part]
        for name, y in x.items()
    }
    out, state = jax.jit(_run)(piece, initial_state=state)
    same += float(jnp.mean(out == whole[:, part])) / 2
  close = inputs_lib.error(state, np.asarray(final, np.float64))
  finite = _finite(whole[:, -4096:])
  return (
      same == 1.0 and close == 0.0 and finite,
      f"{same:.4%} of outputs equal bit for bit, state differs by {close:.1e}",
  )


def _finite(x):
  return bool(np.isfinite(np.asarray(x, np.float32)).all())


if __name__ == "__main__":
  main(int(sys.argv[1]), sys.argv[2:])
