"""Times the attention kernels beside every peer that imports, errors first.

  python -m experiments.bench_kernels --hard --output=/tmp/kda.json
  python -m experiments.bench_kernels --shapes=b1_t8192_h96 --peers=fla
  python -m experiments.bench_kernels --decode_only

On the device at hand: checks outputs and gradients against a float64
recurrence in five gate regimes (and stops if ours fail), then times ours and
the peers that run in JAX in this process and fla in another, forward+backward
with the output returned. `--hard` adds the inputs that broke public kernels.
Prints one table; the JSON has every number. A time is that of back-to-back
calls, divided: the device's, since the host runs ahead of it. Peers are
optional; they are measured, never used.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile

from absl import app
from absl import flags
import jax
from jax import numpy as jnp
import numpy as np

from experiments.kda_bench import decode
from experiments.kda_bench import hard
from experiments.kda_bench import inputs as inputs_lib
from experiments.kda_bench import peers
from experiments.kda_bench import timing
from pallas_kernels.kda import api
from pallas_kernels.kda import arg_specs

_SHAPES = flags.DEFINE_list(
    "shapes",
    ["b1_t8192_h96", "b1_t65536_h32", "b8_t2048_h32"],
    "Names in pallas_kernels.kda.arg_specs.SPECS.",
)
_PEERS = flags.DEFINE_list(
    "peers",
    ["jax-linear-attention", "fla"],
    "Of jax-linear-attention, tokamax and fla.",
)
_FLA_SHAPES = flags.DEFINE_list(
    "fla_shapes",
    ["b1_t8192_h96"],
    "Shapes fla runs too; it tunes each number of heads for two minutes.",
)
_IMPLEMENTATION = flags.DEFINE_string(
    "implementation", None, "Of fused_kda; the device's best by default."
)
_CHECK = flags.DEFINE_bool("check", True, "Compare with float64 first.")
_HARD = flags.DEFINE_bool("hard", False, "Also run the hard cases.")
_DECODE = flags.DEFINE_list(
    "decode", ["64", "32", "128"], "B, H and width of the one-token call."
)
_DECODE_ONLY = flags.DEFINE_bool(
    "decode_only", False, "Check and time the one-token call, nothing else."
)
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed groups; medians count.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")

KINDS = ("forward", "forward+backward")
# Ours must stay under these relative RMS errors, or nothing is timed.
# Identical keys at beta near 1 cancel in the output itself.
_OUTPUT_LIMIT = dict.fromkeys(inputs_lib.REGIMES, 1e-2) | {"identical": 3e-2}
_CHUNK = 64  # of the FLOP floor
_HARD_TIMEOUT = 120.0  # seconds after the checks, before anything is timed
_FLOPS = 790e9  # per millisecond: bf16 products of one H200, measured


def _ours(x):
  return api.fused_kda(**x, implementation=_IMPLEMENTATION.value)[0]


def check(runs):
  """Errors against float64 of {name: (x, cotangent, regime) -> results}."""
  errors = {name: {} for name in runs}
  for regime in inputs_lib.REGIMES:
    x = inputs_lib.make_inputs(inputs_lib.CHECK, regime)
    cotangent = inputs_lib.cotangent(x)
    expected = inputs_lib.exact(x, cotangent)
    for name, run in runs.items():
      row = inputs_lib.errors(run(x, cotangent, regime), expected)
      errors[name][regime] = row
      print(
          f"{name:21} {regime:11}",
          " ".join(f"{k} {v:.1e}" for k, v in row.items()),
          flush=True,
      )
  return errors


def _floors(spec, rate):
  """Milliseconds for the bytes and for the products, {kind: (bytes, FLOPs)}.

  Bytes: each input read and each output written once. Products: those of the
  chunk form at 64 tokens, the backward computing the forward's again.
  """
  size = {
      name: np.prod(s.shape) * jnp.dtype(s.dtype).itemsize
      for name, s in spec.shapes().items()
  }
  forward = sum(size.values()) + size["v"]
  backward = 2 * sum(size.values()) + size["v"]
  k, v, c = spec.key_width, spec.value_width, _CHUNK
  rows = spec.batch * spec.tokens * spec.value_heads
  flops = rows * (2 * c * (3 * k + 2 * v) + 6 * k * v + 2 / 3 * c * c)
  both = flops + rows * (2 * c * (7 * k + 5 * v) + 16 * k * v + 4 * c * c)
  return {
      "forward": (float(forward / rate), flops / _FLOPS),
      "forward+backward": (float((forward + backward) / rate), both / _FLOPS),
  }


def time_shape(name, runs, rate):
  """Times forward and forward+backward of every implementation."""
  spec = arg_specs.SPECS[name]
  x = inputs_lib.make_inputs(spec)
  cotangent = inputs_lib.cotangent(x)
  rows = {}
  for label, run in runs.items():
    row = rows[label] = {}
    for kind, fn, args in zip(
        KINDS,
        (jax.jit(run), inputs_lib.with_gradient(run)),
        ((x,), (x, cotangent)),
    ):
      try:
        compiled = fn.lower(*args).compile()
        row[kind] = timing.timed(compiled, *args, repeats=_REPEATS.value)
        memory = compiled.memory_analysis()
        row[f"{kind} temp GiB"] = memory.temp_size_in_bytes / 2**30
      except Exception as error:  # pylint: disable=broad-exception-caught
        row[f"{kind} failed"] = str(error)[:200]  # a peer's, reported as such
        if label == "ours":
          raise
    print(name, label, row, flush=True)
  parts = _parts(x)
  print(name, "kernels", parts, flush=True)
  return {"rows": rows, "floors": _floors(spec, rate), "parts": parts}


def _parts(x):
  """Milliseconds of each Hopper kernel of `fused_kda` by itself."""
  # pylint: disable=g-import-not-at-top
  from pallas_kernels.kda import mosaic_gpu_gradient as gradient_lib
  from pallas_kernels.kda import mosaic_gpu_prep as prep_lib
  from pallas_kernels.kda import mosaic_gpu_scan as scan_lib

  if jax.default_backend() != "gpu" or _IMPLEMENTATION.value is not None:
    return {}
  width, tokens = x["q"].shape[-1], x["q"].shape[1]
  plan = prep_lib.Plan(
      raw=True, scale=width**-0.5, lower_bound=-5.0, masked=tokens % 64 != 0
  )
  if plan.masked:
    return {}  # flags are made by the caller of the kernels
  slope = jnp.exp(x["a_log"]) * prep_lib.LOG2_E
  beta = jax.nn.sigmoid(x["beta_logits"].astype(jnp.float32))
  beta = beta.transpose(0, 2, 1)
  bias = slope[:, None] * x["dt_bias"]
  local = (x["q"], x["k"], x["z"], beta, slope, bias, None)
  v, v_shape = x["v"], x["v"].shape
  state = jnp.zeros((v_shape[0], v_shape[2], v_shape[3], width))
  kernels = {
      "prep": functools.partial(prep_lib.prep, plan),
      "scan": functools.partial(scan_lib.scan, plan, output=True),
      "states": functools.partial(scan_lib.scan, plan, output=False),
      "reverse": functools.partial(scan_lib.reverse_scan, plan),
      "gradient": functools.partial(gradient_lib.gradient, plan),
  }
  tiles = kernels["prep"](*local)
  walk = (tiles, beta, v, state)
  states, v_new = kernels["states"](*walk)
  dv, ds, _ = kernels["reverse"](*walk)
  arguments = dict.fromkeys(kernels, walk)
  arguments |= {"prep": local, "gradient": (*local, (states, ds, v_new, dv, v))}
  return {
      name: timing.timed(fn, *arguments[name], repeats=_REPEATS.value)
      for name, fn in kernels.items()
  }


class _Fla:
  """fla's process: it runs once, for errors, shapes and the decode step."""

  def __init__(self, shapes, decode_shape, check_errors):
    self._folder = tempfile.TemporaryDirectory()
    self._job = os.path.join(self._folder.name, "job.json")
    inputs = {}
    if check_errors:
      for regime in inputs_lib.REGIMES:
        x = inputs_lib.make_inputs(inputs_lib.CHECK, regime)
        x["cotangent"] = inputs_lib.cotangent(x)
        inputs[regime] = os.path.join(self._folder.name, f"inputs_{regime}.npz")
        np.savez(
            inputs[regime],
            **{k: np.asarray(y, np.float32) for k, y in x.items()},
        )
    specs = {name: arg_specs.SPECS[name] for name in shapes}
    job = {
        "inputs": inputs,
        "repeats": _REPEATS.value,
        "decode": decode_shape,
        "shapes": {
            name: [s.batch, s.tokens, s.heads, s.key_width]
            for name, s in specs.items()
        },
    }
    with open(self._job, "w") as file:
      json.dump(job, file)
    subprocess.run(
        [sys.executable, "-m", "experiments.kda_bench.fla", self._job],
        check=True,
    )
    with open(self._job) as file:
      self.job = json.load(file)

  def results(self, unused_x, unused_cotangent, regime):
    """Output and gradients on a regime's inputs."""
    path = os.path.join(self._folder.name, f"results_{regime}.npz")
    with np.load(path) as arrays:
      loaded = {name: arrays[name] for name in arrays.files}
    return loaded.pop("output"), loaded


def _start_fla(shapes, decode_shape, check_errors):
  if "fla" not in _PEERS.value or importlib.util.find_spec("fla") is None:
    return None
  try:
    return _Fla(shapes, decode_shape, check_errors)
  except subprocess.CalledProcessError as error:
    print(f"fla is left out: {error}")
    return None


def print_table(results):
  """Prints times, spreads, ratios to ours, floors and temporary memory."""
  for name, result in results["shapes"].items():
    print(
        f"\n{name}: floors (bytes, FLOPs) "
        + "; ".join(
            f"{kind} {b:.2f}, {f:.2f} ms"
            for kind, (b, f) in result["floors"].items()
        )
    )
    parts = result["parts"].items()
    print("  " + " ".join(f"{part} {ms:.3f}" for part, (ms, _) in parts))
    ours = result["rows"]["ours"]
    for label, row in result["rows"].items():
      cells = []
      for kind, floors in result["floors"].items():
        if kind not in row:
          cells.append(f"{kind}: {row.get(f'{kind} failed', 'not run')[:60]}")
          continue
        ms, spread = row[kind]
        cells.append(
            f"{kind} {ms:8.3f} +-{spread:5.3f} ms"
            f" ({ms / ours[kind][0]:5.2f}x ours,"
            f" {ms / max(floors):5.2f}x floor,"
            f" {row.get(f'{kind} temp GiB', float('nan')):5.2f} GiB)"
        )
      print(f"  {label:21}" + "  ".join(cells))
  step = results.get("decode", {})
  for label, row in step.items():
    ms = row["ms"] if isinstance(row, dict) else row
    print(f"decode {label:15} {ms}")


def _write(results):
  if _OUTPUT.value:
    with open(_OUTPUT.value, "w") as file:
      json.dump(results, file, indent=2)


def _add_fla(results, fla):
  """Adds what fla's process measured."""
  if fla.job["inputs"]:
    results["errors"] |= check({"fla": fla.results})
  if "decode ms" in fla.job:
    results["decode"]["fla"] = {"ms": fla.job["decode ms"]}
  for name, row in fla.job["times"].items():
    if name in results["shapes"]:
      results["shapes"][name]["rows"]["fla"] = row


def main(argv):
  del argv
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  decode_shape = [int(n) for n in _DECODE.value]
  shapes, fla_shapes = _SHAPES.value, _FLA_SHAPES.value
  check_errors = _CHECK.value
  if _DECODE_ONLY.value:
    shapes, fla_shapes, check_errors = [], [], False
  runs = {"ours": _ours} | peers.jax_peers(_PEERS.value)
  cases = hard.start() if _HARD.value else []
  results = {"device": jax.devices()[0].device_kind, "shapes": {}}
  if check_errors:
    both = {name: inputs_lib.with_gradient(run) for name, run in runs.items()}
    errors = results["errors"] = check({
        name: lambda x, cotangent, _, run=run: run(x, cotangent)
        for name, run in both.items()
    })
    for regime, row in errors["ours"].items():
      if not row["output"] <= _OUTPUT_LIMIT[regime]:
        raise SystemExit(f"not timed: output error {row['output']} ({regime})")
  results["hard"] = list(hard.results(cases, _HARD_TIMEOUT))
  for name, good, numbers in results["hard"]:
    print(f"hard: {name}: {'holds' if good else 'FAILS'} ({numbers})")
  rate = timing.copy_rate(_REPEATS.value)
  results["copy TB/s"] = rate / 1e9
  print(f"{results['device']}: copy {rate / 1e9:.2f} TB/s", flush=True)
  if decode_shape:
    results["decode"] = decode.measure(*decode_shape, rate, _REPEATS.value)
  for name in shapes:
    results["shapes"][name] = time_shape(name, runs, rate)
    _write(results)
  if fla := _start_fla(fla_shapes, decode_shape, check_errors):
    _add_fla(results, fla)
  print_table(results)
  _write(results)


if __name__ == "__main__":
  app.run(main)
