"""Times the attention kernels beside every peer that imports, errors first.

  python -m experiments.bench_kernels --hard --output=/tmp/kda.json
  python -m experiments.bench_kernels --shapes=b1_t8192_h96 --peers=fla
  python -m experiments.bench_kernels --decode_only

On the device at hand: checks outputs and gradients against a float64
recurrence in five gate regimes (and stops if ours fail), then times ours and
the peers that run in JAX in this process and fla in another, which compiles
while ours are checked; forward+backward with the output returned. `--hard` adds
the inputs that broke public kernels. Prints one table; the JSON has every
number. A time is that of back-to-back calls, divided: the device's, since the
host runs ahead of it. Peers are optional; they are measured, never used.
"""

from concurrent import futures
import functools
import json
import os

from absl import app
from absl import flags
import jax
from jax import numpy as jnp
import numpy as np

from experiments.kda_bench import decode
from experiments.kda_bench import errors as errors_lib
from experiments.kda_bench import fla_process
from experiments.kda_bench import hard
from experiments.kda_bench import inputs as inputs_lib
from experiments.kda_bench import peers
from experiments.kda_bench import table
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
flags.register_validator(
    "shapes",
    lambda names: set(names) <= set(arg_specs.SPECS),
    f"each must be one of {', '.join(arg_specs.SPECS)}",
)
flags.register_validator(
    "peers",
    lambda names: set(names) <= {"jax-linear-attention", "tokamax", "fla"},
    "each must be jax-linear-attention, tokamax or fla",
)
_FLA_TUNED = flags.DEFINE_string(
    "fla_tuned", None, "Folder that keeps, and may have, what fla tuned."
)
_IMPLEMENTATION = flags.DEFINE_string(
    "implementation", None, "Of fused_kda; the device's best by default."
)
_CHECK = flags.DEFINE_bool("check", True, "Compare with float64 first.")
_SEEDS = flags.DEFINE_list(
    "seeds", ["0"], "Of that check's inputs; root mean square of the errors."
)
flags.register_validator(
    "seeds",
    lambda seeds: seeds and all(map(str.isdigit, seeds)),
    "must be numbers",
)
_HARD = flags.DEFINE_bool("hard", False, "Also run the hard cases.")
_DECODE = flags.DEFINE_list(
    "decode",
    ["64", "32", "128"],
    "B, H and width of the one-token call, or nothing.",
)
flags.register_validator(
    "decode",
    lambda numbers: len(numbers) in (0, 3) and all(map(str.isdigit, numbers)),
    "must be three numbers, or empty to leave it out",
)
_DECODE_ONLY = flags.DEFINE_bool(
    "decode_only", False, "Check and time the one-token call, nothing else."
)
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed groups; medians count.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")

KINDS = ("forward", "forward+backward")
_CHUNK = 64  # of the FLOP floor
_HARD_TIMEOUT = 120.0  # seconds after the checks, before anything is timed
_FLOPS = 790e9  # per millisecond: bf16 products of one H200, measured


def _ours(x):
  return api.fused_kda(**x, implementation=_IMPLEMENTATION.value)[0]


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


def compile_all(shapes, runs):
  """{(shape, implementation, kind): future of a compiled call}."""
  compiled = {}
  with futures.ThreadPoolExecutor() as pool:
    for name in shapes:
      x = arg_specs.SPECS[name].shapes()
      for label, run in runs.items():
        for kind, fn, args in zip(
            KINDS,
            (jax.jit(run), inputs_lib.with_gradient(run)),
            ((x,), (x, x["v"])),
        ):
          try:
            compiling = pool.submit(fn.lower(*args).compile)
          except Exception as error:  # pylint: disable=broad-exception-caught
            compiling = futures.Future()
            compiling.set_exception(error)
          compiled[name, label, kind] = compiling
  print(f"compiled {len(compiled)} calls", flush=True)
  return compiled


def time_shape(name, compiled, rate):
  """Times forward and forward+backward of every implementation."""
  spec = arg_specs.SPECS[name]
  x = inputs_lib.make_inputs(spec)
  cotangent = inputs_lib.cotangent(x)
  rows = {}
  for (shape, label, kind), future in compiled.items():
    if shape != name:
      continue
    row = rows.setdefault(label, {})
    args = (x,) if kind == "forward" else (x, cotangent)
    try:
      call = future.result()
      row[kind] = timing.timed(call, *args, repeats=_REPEATS.value)
      memory = call.memory_analysis()
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
      "prep": functools.partial(prep_lib.prep, plan, with_low=False),
      "prep for gradients": functools.partial(
          prep_lib.prep, plan, with_low=True
      ),
      "scan": functools.partial(scan_lib.scan, plan, output=True),
      "states": functools.partial(scan_lib.scan, plan, output=False),
      "reverse": functools.partial(scan_lib.reverse_scan, plan),
      "both": functools.partial(scan_lib.backward_scans, plan),
      "gradient": functools.partial(gradient_lib.gradient, plan),
  }
  tiles = kernels["prep for gradients"](*local)
  walk = (tiles, v, state)
  states, v_new = kernels["states"](*walk)
  dv, ds, _ = kernels["reverse"](*walk)
  arguments = dict.fromkeys(kernels, walk)
  arguments |= {
      "prep": local,
      "prep for gradients": local,
      "both": (*walk, v, state),
      "gradient": (*local, (states, ds, v_new, dv, v)),
  }
  return {
      name: timing.timed(fn, *arguments[name], repeats=_REPEATS.value)
      for name, fn in kernels.items()
  }


def _write(results):
  if _OUTPUT.value:
    with open(_OUTPUT.value, "w") as file:
      json.dump(results, file, indent=2)


def _add_fla(results, fla):
  """Adds what fla's process measured."""
  if fla.job["inputs"]:
    results["errors"] |= errors_lib.check({"fla": fla.results})
  if fla.job["decode"]:
    results["decode"]["fla"] = {"ms": fla.job["decode ms"]}
  for name, row in fla.job["times"].items():
    results["shapes"][name]["rows"]["fla"] = row


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments {argv[1:]}")
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  decode_shape = [int(n) for n in _DECODE.value]
  shapes, check_errors = _SHAPES.value, _CHECK.value
  if _DECODE_ONLY.value:
    shapes, check_errors = [], False
  fla = None
  if "fla" in _PEERS.value:
    fla = fla_process.start(
        shapes, decode_shape, _REPEATS.value, _FLA_TUNED.value, check_errors
    )
  runs = {"ours": _ours} | peers.jax_peers(_PEERS.value)
  cases = hard.start() if _HARD.value else []
  results = {"device": jax.devices()[0].device_kind, "shapes": {}}
  compiled = compile_all(shapes, runs)
  if check_errors:
    both = {name: inputs_lib.with_gradient(run) for name, run in runs.items()}
    checked = {
        name: lambda x, cotangent, _, run=run: run(x, cotangent)
        for name, run in both.items()
    }
    errors = results["errors"] = errors_lib.check(
        checked, seeds=[int(seed) for seed in _SEEDS.value]
    )
    for regime, row in errors["ours"].items():
      good, numbers = hard.verdict([row], regime)
      if not good:
        raise SystemExit(f"not timed: {regime}: {numbers}")
  results["hard"] = list(hard.results(cases, _HARD_TIMEOUT))
  for name, good, numbers in results["hard"]:
    print(f"hard: {name}: {'holds' if good else 'FAILS'} ({numbers})")
  if fla:
    fla.wait_until_compiled()
  rate = timing.copy_rate(_REPEATS.value)
  results["copy TB/s"] = rate / 1e9
  print(f"{results['device']}: copy {rate / 1e9:.2f} TB/s", flush=True)
  if decode_shape:
    results["decode"] = decode.measure(*decode_shape, rate, _REPEATS.value)
  for name in shapes:
    results["shapes"][name] = time_shape(name, compiled, rate)
    _write(results)
  if fla and fla.measure():
    _add_fla(results, fla)
  if "errors" in results:
    errors_lib.print_table(results["errors"])
  for name, result in results["shapes"].items():
    table.print_shape(name, result)
  table.print_decode(results.get("decode", {}))
  _write(results)
  if failed := [name for name, good, _ in results["hard"] if not good]:
    raise SystemExit(f"hard cases that fail: {failed}")


if __name__ == "__main__":
  app.run(main)
