"""Grouped matrix product on one GPU, beside what other libraries have.

  python -m experiments.bench_grouped_matmul --check
  python -m experiments.bench_grouped_matmul --shapes=2048x1024x896 --torch
  python -m experiments.bench_grouped_matmul --torch --peers --parts

One line per measurement: shape, load, what, milliseconds (median of 7 rounds of
2 to 10 launches back to back, and the spread of the 7), TFLOP/s of the useful
products. All that is timed for a shape and a load takes turns in random order,
for the card slows down when it is warm. "fwd+bwd" returns the output and both
gradients. Everything is compiled before anything is timed. A peer that refuses
says why. A wrong result ends it.
"""

import ast
import concurrent.futures
import functools
import importlib
import time

from absl import app
from absl import flags
import jax
from jax import numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import mosaic_gpu
from pallas_kernels.grouped_matmul import mosaic_gpu_rows
from pallas_kernels.grouped_matmul import mosaic_gpu_schedule
from pallas_kernels.grouped_matmul import mosaic_gpu_weights
from pallas_kernels.grouped_matmul import xla

_SHAPES = flags.DEFINE_list(
    "shapes",
    ["2048x1024x112", "2048x1024x896", "3584x6144x112", "3584x6144x56"],
    "Widths in and out, and experts.",
)
_ROWS = flags.DEFINE_integer("rows", 131072, "Rows of all groups together.")
_PLANS = flags.DEFINE_multi_string(
    "plan", ["{}"], "Fields of mosaic_gpu.Plan as a Python dict."
)
_LOADS = flags.DEFINE_list("loads", ["uniform", "settled", "zipf"], "")
_PARTS = flags.DEFINE_bool(
    "parts", False, "Time each kernel too, and print the forward's floors."
)
_CHECK = flags.DEFINE_bool("check", False, "Compare with float64 and exit.")
_XLA = flags.DEFINE_bool("xla", False, "Time the XLA implementation too.")
_PEERS = flags.DEFINE_bool(
    "peers", False, "Time jax-linear-attention and tokamax too."
)
_REST = flags.DEFINE_float(
    "rest",
    0.0,
    "Seconds of rest before each turn, for a cool card.",
    lower_bound=0.0,
)
_TORCH = flags.DEFINE_bool("torch", False, "Time torch._grouped_mm too.")

_BF16 = jnp.bfloat16
_ROUNDS = 7
# Of an H200: an 8192^3 product, a copy (read and written).
_PEAK_FLOPS, _PEAK_BYTES = 687e12, 4.3e12


def group_sizes(load: str, num_rows: int, num_groups: int) -> np.ndarray:
  """[E] int32: uniform, settled (6 % around the mean) or Zipf (1 / rank)."""
  rng = np.random.default_rng(0)
  share = np.ones(num_groups)
  if load == "settled":
    share = np.clip(1 + 0.06 * rng.normal(size=num_groups), 0.5, 2)
  elif load == "zipf":
    share = rng.permutation(1 / np.arange(1, num_groups + 1))
  edges = np.round(np.cumsum(share) / share.sum() * num_rows)
  return np.diff(edges, prepend=0).astype(np.int32)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments {argv[1:]}")
  device = jax.devices()[0]
  print(f"# {device.device_kind}, jax {jax.__version__}", flush=True)
  plans = [mosaic_gpu.Plan(**ast.literal_eval(text)) for text in _PLANS.value]
  if _CHECK.value:
    for text, plan in zip(_PLANS.value, plans):
      print(f"# plan {text}", flush=True)
      check(plan)
    return
  compiled = compile_all(dict(zip(_PLANS.value, plans)))
  for shape in _SHAPES.value:
    measure(shape, {k: f for k, f in compiled.items() if k[0] == shape})


def _widths(shape):
  return [int(n) for n in shape.split("x")]


def _forward(plan):
  return lambda lhs, rhs, sizes, _: mosaic_gpu.grouped_matmul(
      lhs, rhs, sizes, plan=plan
  )


def _both(plan):
  return _with_gradients(_forward(plan))


def _xla(lhs, rhs, sizes, _):
  return xla.grouped_matmul(lhs, rhs, sizes)


def _with_gradients(forward):
  def both(lhs, rhs, sizes, d_out):
    product = lambda lhs, rhs: forward(lhs, rhs, sizes, None)
    out, pull = jax.vjp(product, lhs, rhs)
    return out, *pull(d_out)

  return both


def _parts(plan):
  """Each kernel by itself, and the schedule."""
  block = mosaic_gpu_rows.WARPGROUPS * plan.slice * plan.cluster
  rows = mosaic_gpu_rows.rows_times_matrices
  return {
      "d_lhs": lambda lhs, rhs, sizes, d_out: rows(
          plan, d_out, (rhs,), sizes, transpose=True
      ),
      "d_rhs": lambda lhs, rhs, sizes, d_out: (
          mosaic_gpu_weights.outer_products(plan, lhs, d_out, sizes, 1)
      ),
      "schedule": lambda lhs, rhs, sizes, d_out: mosaic_gpu_schedule.row_items(
          sizes, lhs.shape[0], -(-rhs.shape[2] // block), plan
      ),
  }


def _peers():
  """{name: product(lhs, rhs, sizes, _)} of those that import."""

  def jla():
    peer = importlib.import_module("jla.ops.mosaic_gpu.ragged_dot")
    return lambda lhs, rhs, sizes, _: peer.ragged_dot(
        lhs, rhs, sizes, full_groups=True  # no rows past them here
    )

  def tokamax():
    peer = importlib.import_module("tokamax._src.ops.ragged_dot.api")
    return lambda lhs, rhs, sizes, _: peer.ragged_dot(
        lhs, rhs, sizes, implementation="mosaic"
    )

  products = {}
  for name, make in {"jla": jla, "tokamax": tokamax}.items():
    try:
      products[name] = make()
    except ImportError as error:
      print(f"# {name} is left out: {error}", flush=True)
  return products


def compile_all(plans):
  """{(shape, plan or peer, what): function} for every shape, side by side."""
  forwards = {text: _forward(plan) for text, plan in plans.items()}
  if _XLA.value:
    forwards["xla"] = _xla
  if _PEERS.value:
    forwards |= _peers()
  # The kernels by themselves; what is made of them finds them compiled.
  first = {(name, "fwd"): forward for name, forward in forwards.items()}
  for text, plan in plans.items():
    first |= {(text, part): f for part, f in _parts(plan).items()}
  then = {(name, "fwd+bwd"): _with_gradients(f) for name, f in forwards.items()}

  def compile_one(job):
    shape, name, what, function = job
    structs = jax.eval_shape(lambda: _inputs(*_widths(shape)))
    sizes = jax.ShapeDtypeStruct((structs[1].shape[0],), jnp.int32)
    lhs, rhs, d_out = structs
    try:
      return jax.jit(function).lower(lhs, rhs, sizes, d_out).compile()
    except Exception as error:  # pylint: disable=broad-exception-caught
      if name in plans:
        raise
      return _refusal(shape, name, what, error)

  began, compiled = time.perf_counter(), {}
  with concurrent.futures.ThreadPoolExecutor() as pool:
    for functions in (first, then):
      jobs = [(s, *k, f) for s in _SHAPES.value for k, f in functions.items()]
      keys = [job[:3] for job in jobs]
      compiled |= dict(zip(keys, pool.map(compile_one, jobs)))
  print(f"# compiled in {time.perf_counter() - began:.1f} s", flush=True)
  timed = ("fwd", "fwd+bwd")
  return {
      key: function
      for key, function in compiled.items()
      if function and (_PARTS.value or key[2] in timed)
  }


def _refusal(shape, name, what, error):
  reason = (str(error).splitlines() or [""])[0][:300]
  print(
      f"# {shape} {name} {what}: {type(error).__name__}: {reason}", flush=True
  )


def measure(shape, compiled):
  """Prints the times of one shape under every load."""
  lhs, rhs, d_out = jax.jit(lambda: _inputs(*_widths(shape)))()
  for load in _LOADS.value:
    sizes = group_sizes(load, lhs.shape[0], rhs.shape[0])
    if _PARTS.value:
      print(_floors(mosaic_gpu.Plan(), sizes, *rhs.shape[1:]), flush=True)
    calls = {}
    for (_, name, what), function in compiled.items():
      run = functools.partial(function, lhs, rhs, jnp.asarray(sizes), d_out)
      if name in _PLANS.value and what == "fwd+bwd":
        _check_all(run, lhs, rhs, jnp.asarray(sizes), d_out)
      try:
        jax.block_until_ready(run())
      except jax.errors.JaxRuntimeError as error:  # out of memory, mostly
        _refusal(shape, name, what, error)
        continue
      calls[name, what] = run, jax.block_until_ready
    if _TORCH.value:
      calls |= _torch_calls(sizes, *_widths(shape)[:2])
    for (name, what), times in time_by_turns(calls).items():
      flops = 2.0 * lhs.shape[0] * rhs.shape[1] * rhs.shape[2]
      products = 3 if "bwd" in what else 1 - (what == "schedule")
      _report(f"{shape} {name}", load, what, times, flops * products)


def _floors(plan, sizes, width_in, width_out):
  """What a forward product takes if products, or bytes, were all of it."""
  table = mosaic_gpu_schedule.row_items(
      jnp.asarray(sizes), _ROWS.value, 1, plan
  )
  count, *tiles = np.asarray(table)
  heights = np.array(tiles[: count[0]])[:, mosaic_gpu_schedule.HEIGHT]
  rows = np.sum(np.take(plan.heights, heights))
  matrices = np.count_nonzero(sizes) * width_in * width_out
  moved = 2 * (_ROWS.value * (width_in + width_out) + matrices)
  flops = 2 * rows * width_in * width_out
  return (
      f"# floors: {rows / _ROWS.value:.3f} rows computed per row,"
      f" {flops / _PEAK_FLOPS * 1e3:.3f} ms; {moved / 1e9:.2f} GB,"
      f" {moved / _PEAK_BYTES * 1e3:.3f} ms"
  )


def _inputs(width_in, width_out, num_groups):
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (
      (_ROWS.value, width_in),
      (num_groups, width_in, width_out),
      (_ROWS.value, width_out),
  )
  return [jax.random.normal(k, s, _BF16) for k, s in zip(keys, shapes)]


@jax.jit
def _probes(lhs, rhs, sizes, d_out, out, d_lhs, d_rhs):
  """Each result times a random vector, and what that has to be."""
  wide = lambda x: x.astype(jnp.float32)
  rows = jnp.arange(lhs.shape[0])
  owner = jnp.searchsorted(jnp.cumsum(sizes), rows, side="right")
  keys = jax.random.split(jax.random.key(1))
  u, v = (jax.random.normal(k, n) for k, n in zip(keys, rhs.shape[1:]))
  rhs_v = jnp.sum(wide(rhs) * v, axis=2)
  rhs_u = jnp.sum(wide(rhs) * u[:, None], axis=1)
  along = jnp.sum(wide(d_out) * v, axis=1, keepdims=True)
  expected_d_rhs = jax.ops.segment_sum(
      wide(lhs) * along, owner, rhs.shape[0], indices_are_sorted=True
  )
  return {
      "out": (wide(out) @ v, jnp.sum(wide(lhs) * rhs_v[owner], axis=1)),
      "d_lhs": (wide(d_lhs) @ u, jnp.sum(wide(d_out) * rhs_u[owner], axis=1)),
      "d_rhs": (jnp.sum(wide(d_rhs) * v, axis=2), expected_d_rhs),
  }


def _check_all(run, lhs, rhs, sizes, d_out):
  """Compares every row and group, each projected on one random vector."""
  with jax.default_matmul_precision("float32"):
    pairs = _probes(lhs, rhs, sizes, d_out, *run())
  for name, (actual, expected) in pairs.items():
    error = _error(actual, expected)
    worst = np.abs(np.asarray(actual) - np.asarray(expected))
    worst = np.max(worst) / np.sqrt(np.mean(np.square(np.asarray(expected))))
    if not (error < 5e-3 and worst < 0.1):
      raise SystemExit(f"not timed: {name} {error:.3e}, worst {worst:.3e}")


def _error(actual, expected):
  actual = np.asarray(actual.astype(jnp.float32), np.float64)
  expected = np.asarray(expected, np.float64)
  scale = np.sqrt(np.mean(expected**2)) if expected.size else 0.0
  difference = actual - expected
  error = np.sqrt(np.mean(difference**2)) if expected.size else 0.0
  return error / scale if scale else error


def time_by_turns(calls):
  """Milliseconds of every call, none of which always follows the same one.

  A card that just ran a hungry kernel is slower than one that did not.

  Args:
    calls: {label: (run, wait)}; wait(run()) returns when the device is done.

  Returns:
    {label: (median, spread)} over rounds, each in another random order, in
    which each call has its turn of a few launches back to back.
  """
  launches = {}
  for label, (run, wait) in calls.items():
    wait(run())
    began = time.perf_counter()
    wait(run())
    once = time.perf_counter() - began
    launches[label] = int(np.clip(0.05 / once, 2, 10))
  labels, times = list(calls), {label: [] for label in calls}
  rng = np.random.default_rng(0)
  for _ in range(_ROUNDS):
    for i in rng.permutation(len(labels)):
      label = labels[i]
      run, wait = calls[label]
      time.sleep(_REST.value)
      began = time.perf_counter()
      for _ in range(launches[label]):
        result = run()
      wait(result)
      taken = (time.perf_counter() - began) / launches[label]
      times[label].append(taken * 1e3)
      del result
  return {k: (np.median(t), max(t) - min(t)) for k, t in times.items()}


def _report(label, load, name, times, flops):
  median, spread = times
  print(
      f"{label:32s} {load:8s} {name:14s} {median:8.3f} ms +- {spread:.3f}"
      f" {flops / median / 1e9:7.1f} TFLOP/s",
      flush=True,
  )


def _torch_calls(sizes, width_in, width_out):
  """torch._grouped_mm on rows and groups as ours, as `time_by_turns` takes."""
  import torch  # pylint: disable=g-import-not-at-top

  make = lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device="cuda")
  lhs = make(_ROWS.value, width_in).requires_grad_()
  rhs = make(len(sizes), width_in, width_out).requires_grad_()
  d_out = make(_ROWS.value, width_out)
  ends = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")

  def both():
    out = torch._grouped_mm(lhs, rhs, offs=ends)
    return out, *torch.autograd.grad(out, (lhs, rhs), d_out)

  def forward():
    with torch.no_grad():
      return torch._grouped_mm(lhs, rhs, offs=ends)

  wait = lambda _: torch.cuda.synchronize()
  return {("torch", "fwd"): (forward, wait), ("torch", "fwd+bwd"): (both, wait)}


def check(plan):
  """Compares small cases with float64, NaN past the groups included."""
  rng = np.random.default_rng(0)
  cases = {
      "empty": ([0, 300, 0, 513, 1, 2, 0, 7], 823, 320, 448),
      "all to one": ([0, 0, 1000, 0], 1000, 512, 1024),
      "tail": ([5, 0, 130, 250], 700, 512, 1024),
      "nothing": ([0, 0, 0], 250, 128, 128),
      "zipf": (group_sizes("zipf", 3000, 40).tolist(), 3000, 1088, 576),
      "widths": ([90, 11, 400], 501, 200, 160),
      "1024 experts": (
          rng.multinomial(2048, np.ones(1024) / 1024).tolist(),
          2048,
          128,
          256,
      ),
  }
  with concurrent.futures.ThreadPoolExecutor() as pool:  # they compile
    lines = []
    for line in pool.map(functools.partial(_check_case, plan), cases.items()):
      print(line, flush=True)
      lines.append(line)
  if wrong := [line for line in lines if not line.startswith("ok")]:
    raise SystemExit(f"{len(wrong)} of {len(lines)} cases are wrong")


def _check_case(plan, case):
  """One line: "ok" or "WRONG", the errors, and what must be exactly zero."""
  name, (sizes, num_rows, width_in, width_out) = case
  total = sum(sizes)
  rng = np.random.default_rng(total)
  x = rng.normal(size=(num_rows, width_in))
  w = rng.normal(size=(len(sizes), width_in, width_out))
  d = rng.normal(size=(num_rows, width_out))
  x[total:], d[total:] = np.nan, np.nan
  x, w, d = (jnp.asarray(a, _BF16) for a in (x, w, d))
  actual = jax.jit(_both(plan))(x, w, jnp.asarray(sizes, jnp.int32), d)
  expected = _oracle(
      *(np.asarray(a.astype(jnp.float32), np.float64) for a in (x, w, d)),
      sizes,
  )
  errors = [_error(a, b) for a, b in zip(actual, expected)]
  zeros = [
      bool((a == 0).all())
      for a in (
          actual[0][total:],
          actual[1][total:],
          actual[2][np.array(sizes) == 0],
      )
  ]
  good = all(e < 5e-3 for e in errors) and all(zeros)
  return (
      f"{'ok   ' if good else 'WRONG'} {name}: relative RMS error"
      f" {errors[0]:.2e} {errors[1]:.2e} {errors[2]:.2e}; zeros {zeros}"
  )


def _oracle(lhs, rhs, d_out, sizes):
  out, d_lhs = np.zeros_like(d_out), np.zeros_like(lhs)
  d_rhs = np.zeros_like(rhs)
  start = 0
  for group, size in enumerate(sizes):
    rows = slice(start, start + size)
    out[rows] = lhs[rows] @ rhs[group]
    d_lhs[rows] = d_out[rows] @ rhs[group].T
    d_rhs[group] = lhs[rows].T @ d_out[rows]
    start += size
  return out, d_lhs, d_rhs


if __name__ == "__main__":
  app.run(main)
