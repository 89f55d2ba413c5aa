"""Times the attention kernels beside every peer that imports, errors first.

  python -m experiments.bench_kernels --output=/tmp/kda.json

On the device at hand: checks outputs and gradients against a float64
recurrence in five gate regimes (and stops if ours fail), then times ours and
jax-linear-attention in this process and fla in another, each with
forward+backward returning the output too. Prints one table; the JSON has
every number. Peers are optional; they are measured, never used.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags
import jax
from jax import numpy as jnp
import numpy as np

from pallas_kernels.kda import api
from pallas_kernels.kda import arg_specs
from pallas_kernels.kda import gate
from pallas_kernels.kda import reference

_SHAPES = flags.DEFINE_list(
    "shapes",
    ["b1_t8192_h96", "b1_t65536_h32", "b8_t2048_h32"],
    "Names in pallas_kernels.kda.arg_specs.SPECS.",
)
_IMPLEMENTATION = flags.DEFINE_string(
    "implementation", None, "Of fused_kda; the device's best by default."
)
_FLA_SHAPES = flags.DEFINE_list(
    "fla_shapes", [], "Shapes fla runs too (it tunes each for two minutes)."
)
_REPEATS = flags.DEFINE_integer("repeats", 9, "Timed groups; medians count.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")
_TORCH_JOB = flags.DEFINE_string("torch_job", None, "Internal: fla's process.")

REGIMES = ("random", "mild", "saturated", "correlated", "identical")
GRADIENTS = ("q", "k", "v", "z", "beta_logits", "a_log", "dt_bias")
_CHECK = arg_specs.ArgSpec(1, 1024, 4, 4)
# Ours must stay under these relative RMS errors, or nothing is timed.
# Identical keys at beta near 1 cancel in the output itself.
_OUTPUT_LIMIT = {regime: 1e-2 for regime in REGIMES} | {"identical": 3e-2}


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


def _ours(x):
  return api.fused_kda(**x, implementation=_IMPLEMENTATION.value)[0]


def _peer_jla():
  """jax-linear-attention with the gate, the bound and beta made by XLA."""
  if importlib.util.find_spec("jla") is None:
    return None
  from jla.ops.mosaic_gpu import kda as peer  # pylint: disable=g-import-not-at-top

  def run(x):
    g = gate.bounded_log_decay(x["z"], x["a_log"], x["dt_bias"])
    beta = jax.nn.sigmoid(x["beta_logits"].astype(jnp.float32))
    out = peer.kda(x["q"], x["k"], x["v"], g, beta, use_qk_l2norm=True)
    return out[0] if isinstance(out, tuple) else out

  return run


def _recurrence(x):
  """The token recurrence on raw inputs, in the inputs' precision."""
  norm = lambda y: y / jnp.sqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-6)
  g = gate.bounded_log_decay(x["z"], x["a_log"], x["dt_bias"])
  shape = x["q"].shape[:1] + x["v"].shape[2:3] + x["q"].shape[3:]
  state = jnp.zeros((*shape, x["v"].shape[3]), x["q"].dtype)
  return reference.kda(
      norm(x["q"]),
      norm(x["k"]),
      x["v"],
      g,
      jax.nn.sigmoid(x["beta_logits"]),
      state,
      scale=x["q"].shape[-1] ** -0.5,
  )[0]


def _with_gradient(run):
  """(inputs, cotangent) -> output and gradients; nothing is eliminated."""

  @jax.jit
  def both(x, cotangent):
    out, vjp = jax.vjp(run, x)
    return out, vjp(cotangent)[0]

  return both


def _error(actual, expected):
  actual = np.asarray(actual.astype(jnp.float32), np.float64)
  difference = np.sqrt(np.mean((actual - expected) ** 2))
  return float(difference / np.sqrt(np.mean(expected**2)))


def check(runs):
  """Errors of output and gradients against float64, {name: {regime: ...}}."""
  both = {name: _with_gradient(run) for name, run in runs.items()}
  exact = _with_gradient(_recurrence)
  errors = {name: {} for name in runs}
  for regime in REGIMES:
    x = make_inputs(_CHECK, regime)
    shape = x["v"].shape
    cotangent = jax.random.normal(jax.random.key(9), shape).astype(jnp.bfloat16)
    with jax.enable_x64(True):
      wide = jax.tree.map(
          lambda y: jnp.asarray(np.asarray(y, np.float64)),
          jax.tree.map(_to_fp32, (x, cotangent)),
      )
      out, grads = jax.tree.map(np.asarray, exact(*wide))
    for name, run in both.items():
      mine, gradients = run(x, cotangent)
      row = {"output": _error(mine, out)}
      for key in GRADIENTS:
        row[f"d {key}"] = _error(gradients[key], grads[key])
      errors[name][regime] = row
      print(
          f"{name:24} {regime:11}",
          " ".join(f"{k} {v:.1e}" for k, v in row.items()),
          flush=True,
      )
  return errors


def _to_fp32(x):
  return np.asarray(x.astype(jnp.float32))


def timed(fn, *args):
  """Median milliseconds of a call, and the spread over groups of calls."""
  jax.block_until_ready(fn(*args))
  start = time.perf_counter()
  jax.block_until_ready(fn(*args))
  calls = max(2, min(20, int(0.05 / (time.perf_counter() - start))))
  times = []
  for _ in range(_REPEATS.value):
    start = time.perf_counter()
    for _ in range(calls):
      out = fn(*args)
    jax.block_until_ready(out)
    times.append((time.perf_counter() - start) / calls * 1e3)
  return float(np.median(times)), float(max(times) - min(times))


def _copy_rate():
  """Bytes read and written per millisecond by a device copy."""
  x = jnp.ones((2**30,), jnp.bfloat16)
  milliseconds, _ = timed(jax.jit(lambda x: -x), x)
  return 2 * x.nbytes / milliseconds


def _floor_bytes(spec):
  """Each input read once and each output written once."""
  forward = sum(
      np.prod(s.shape) * jnp.dtype(s.dtype).itemsize
      for s in spec.shapes().values()
  )
  out = spec.batch * spec.tokens * spec.value_heads * spec.value_width * 2
  return forward + out, 3 * forward + 2 * out


def time_shape(name, runs, rate):
  """Times forward and forward+backward of every implementation."""
  spec = arg_specs.SPECS[name]
  x = make_inputs(spec)
  cotangent = jax.random.normal(jax.random.key(9), x["v"].shape, jnp.bfloat16)
  rows = {}
  for label, run in runs.items():
    row = {}
    for kind, fn, args in (
        ("forward", jax.jit(run), (x,)),
        ("forward+backward", _with_gradient(run), (x, cotangent)),
    ):
      try:
        compiled = fn.lower(*args).compile()
        row[kind] = timed(compiled, *args)
        memory = compiled.memory_analysis()
        row[f"{kind} temp GiB"] = memory.temp_size_in_bytes / 2**30
      except Exception as error:  # pylint: disable=broad-exception-caught
        row[f"{kind} failed"] = str(error)[:200]  # a peer's, reported as such
        if label == "ours":
          raise
    rows[label] = row
    print(name, label, row, flush=True)
  floors = [float(b / rate) for b in _floor_bytes(spec)]
  return {"rows": rows, "floor ms": floors}


def print_table(results):
  """Prints times, spreads, ratios to ours, floors and temporary memory."""
  print(
      f"\n{'shape':15}{'who':22}{'forward ms':>16}{'x':>6}"
      f"{'fwd+bwd ms':>16}{'x':>6}{'temp GiB':>15}{'floor ms':>13}"
  )
  for name, result in results["shapes"].items():
    ours = result["rows"]["ours"]
    for label, row in result["rows"].items():
      cells = []
      for kind in ("forward", "forward+backward"):
        if kind in row:
          time_ms, spread = row[kind]
          cells.append(
              f"{time_ms:9.3f} +-{spread:4.2f}{time_ms / ours[kind][0]:6.2f}"
          )
        else:
          cells.append(f"{'failed':>16}{'':6}")
      temps = [
          row.get(f"{k} temp GiB", float("nan"))
          for k in ("forward", "forward+backward")
      ]
      floors = "{:.2f} / {:.2f}".format(*result["floor ms"])
      print(
          f"{name:15}{label:22}{''.join(cells)}"
          f"{temps[0]:7.2f} /{temps[1]:6.2f}{floors:>13}"
      )


def _run_fla(job):
  """Inside fla's process: times the shapes of a job file, errors too."""
  from fla.ops.kda import chunk_kda  # pylint: disable=g-import-not-at-top
  import torch  # pylint: disable=g-import-not-at-top

  with open(job) as file:
    names = json.load(file)
  rows = {}
  for name in names:
    spec = arg_specs.SPECS[name]
    x = {
        key: (
            torch.randn(
                s.shape,
                device="cuda",
                dtype=torch.bfloat16
                if s.dtype == jnp.bfloat16
                else torch.float32,
            ).requires_grad_()
        )
        for key, s in spec.shapes().items()
    }

    def forward(x=x):
      return chunk_kda(
          x["q"],
          x["k"],
          x["v"],
          x["z"],
          x["beta_logits"],
          A_log=x["a_log"],
          dt_bias=x["dt_bias"].reshape(-1),
          use_qk_l2norm_in_kernel=True,
          use_gate_in_kernel=True,
          use_beta_sigmoid_in_kernel=True,
          safe_gate=True,
          lower_bound=-5.0,
      )[0]

    cotangent = torch.randn_like(x["v"])

    def both(x=x, cotangent=cotangent):
      out = forward()
      return out, torch.autograd.grad(out, list(x.values()), cotangent)

    def no_gradient():
      with torch.no_grad():
        return forward()

    rows[name] = {}
    for kind, fn in (("forward", no_gradient), ("forward+backward", both)):
      for _ in range(3):
        fn()
      times = []
      for _ in range(_REPEATS.value):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
          fn()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 5)
      rows[name][kind] = [float(np.median(times)), max(times) - min(times)]
  with open(job, "w") as file:
    json.dump(rows, file)


def _time_fla(names):
  """Runs fla in its own process; {} where it is not installed."""
  if not names or importlib.util.find_spec("fla") is None:
    return {}
  with tempfile.NamedTemporaryFile("w+", suffix=".json") as file:
    json.dump(names, file)
    file.flush()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.bench_kernels",
            f"--torch_job={file.name}",
        ],
        check=True,
    )
    with open(file.name) as done:
      return json.load(done)


def main(argv):
  del argv
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  if _TORCH_JOB.value:
    _run_fla(_TORCH_JOB.value)
    return
  runs = {"ours": _ours}
  if peer := _peer_jla():
    runs["jax-linear-attention"] = peer
  errors = check(runs)
  for regime, row in errors["ours"].items():
    if not row["output"] <= _OUTPUT_LIMIT[regime]:
      raise SystemExit(f"not timed: output error {row['output']} ({regime})")
  rate = _copy_rate()
  device = jax.devices()[0].device_kind
  print(f"{device}: copy {rate / 1e9:.2f} TB/s")
  results = {
      "device": device,
      "copy TB/s": rate / 1e9,
      "errors": errors,
      "shapes": {},
  }
  for name in _SHAPES.value:
    results["shapes"][name] = time_shape(name, runs, rate)
  for name, row in _time_fla(_FLA_SHAPES.value).items():
    results["shapes"][name]["rows"]["fla"] = row
  print_table(results)
  if _OUTPUT.value:
    with open(_OUTPUT.value, "w") as file:
      json.dump(results, file, indent=2)


if __name__ == "__main__":
  app.run(main)
