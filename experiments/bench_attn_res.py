"""Times attention residuals on one GPU beside plain XLA and fla; errors first.

  python -m experiments.bench_attn_res --fla --output=/tmp/attn_res.json

Checks output and gradients against float64 and past 2^31 elements, and stops
if they are wrong. Then times 9 sources x 16,384 tokens x 4,096, forward and
forward+backward (which returns the output too): ours and the reference in this
process, fla (optional; it tunes itself for a minute or two) in another; and the
norm of the mix, by the same kernels or by XLA after them. The floor is the
bytes that must move over the rate of a device copy.
"""

import concurrent.futures
import functools
import json
import os
import subprocess
import sys
import time

from absl import app
from absl import flags
import jax
from jax import numpy as jnp
import numpy as np

from experiments.kda_bench import timing
from pallas_kernels import attn_res

_SOURCES = flags.DEFINE_integer("sources", 9, "S of the timed call.")
_TOKENS = flags.DEFINE_integer("tokens", 16384, "Tokens of the timed call.")
_WIDTH = flags.DEFINE_integer("width", 4096, "D of the timed call.")
_CHECK = flags.DEFINE_bool("check", True, "Compare with float64 first.")
_FLA = flags.DEFINE_bool("fla", False, "Time fla's fused_attnres too.")
_REPEATS = flags.DEFINE_integer("repeats", 9, "Timed groups; medians count.")
_CALLS = flags.DEFINE_integer("calls", 20, "Calls of a group, back to back.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")
_IN_TORCH = flags.DEFINE_bool("in_torch", False, "Internal: fla's process.")

_CASES = (  # sources, width, dtype, what is computed, whether the last counts
    (1, 4096, "bfloat16", "mix", None),
    (2, 1000, "bfloat16", "mix", None),
    (9, 4096, "bfloat16", "mix", None),
    (9, 7168, "bfloat16", "mix", None),
    (32, 7168, "bfloat16", "mix", None),
    (1, 1000, "float32", "mix", None),
    (2, 7168, "float32", "mix", None),
    (9, 1000, "float32", "mix", None),
    (32, 4096, "float32", "mix", None),
    (3, 2048, "bfloat16", "norm of mix", False),
    (3, 2048, "float32", "norm of mix", True),
    (3, 4096, "float32", "norm of mix", None),
    (9, 7168, "bfloat16", "norm of mix", None),
    (4, 2048, "float32", "norm in two phases", None),
    (9, 7168, "bfloat16", "norm in two phases", None),
    (4, 2048, "float32", "norm in two phases", False),
)
_CHECK_TOKENS = 1601  # several for each block, and not a multiple of anything
_EPS = 1e-6
# Relative RMS error that stops the run: output, gradients.
_LIMITS = {"bfloat16": (5e-3, 1e-2), "float32": (1e-5, 1e-4)}


def _mix(implementation, form="mix", use_last=None):
  flag = None if use_last is None else jnp.bool(use_last)

  def mix(sources, query, scale, gain):
    options = dict(
        norm_scale=None if form == "mix" else gain,
        eps=_EPS,
        implementation=implementation,
    )
    if form != "norm in two phases":
      return attn_res.attn_res(sources, query, scale, use_last=flag, **options)
    *bank, prefix = sources
    partial, log_sum_exp = attn_res.attn_res_stats(
        bank, query[None], scale[None], eps=_EPS
    )
    return attn_res.attn_res_merge(
        partial[0], log_sum_exp[0], prefix, query, scale, use_prefix=flag,
        **options,
    )  # fmt: skip

  return mix


def _mix_then_norm(*arguments):
  return _rms_norm(_mix("mosaic_gpu")(*arguments), arguments[-1])


def _with_gradients(mix):

  def both(sources, query, scale, gain, cotangent):
    out, pull = jax.vjp(mix, sources, query, scale, gain)
    return out, *pull(cotangent)

  return both


def _definition(form, use_last, sources, query, scale, gain):
  v = jnp.stack(sources)
  keys = v / jnp.sqrt(jnp.mean(v * v, axis=-1, keepdims=True) + _EPS)
  logits = keys @ (scale * query)
  if use_last is False:
    logits = logits.at[-1].set(-jnp.inf)
  weights = jax.nn.softmax(logits, axis=0)
  mixed = jnp.sum(weights[..., None] * v, axis=0)
  return mixed if form == "mix" else _rms_norm(mixed, gain)


def _rms_norm(x, gain):
  wide = x.astype(gain.dtype)
  square = jnp.mean(wide * wide, axis=-1, keepdims=True)
  return (gain * wide * jax.lax.rsqrt(square + _EPS)).astype(x.dtype)


def _inputs(num_sources, tokens, width, dtype):
  keys = jax.random.split(jax.random.key(num_sources), 4)
  draw = jax.jit(
      lambda key, size: (size * jax.random.normal(key, (tokens, width))).astype(
          dtype
      )
  )
  sources = tuple(draw(k, 3.0) for k in jax.random.split(keys[0], num_sources))
  query = jax.random.normal(keys[1], (width,)) / np.sqrt(width)
  scale, gain = 1.0 + 0.2 * jax.random.normal(keys[2], (2, width))
  return sources, query, scale, gain, draw(keys[3], 1.0)


def _error(actual, expected):
  actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
  size = np.sqrt(np.mean(expected**2))
  return float(np.sqrt(np.mean((actual - expected) ** 2)) / (size or 1.0))


def _check_case(case):
  """Relative RMS errors: output, d_sources, and of the three vectors."""
  num_sources, width, dtype, form, use_last = case
  arrays = _inputs(num_sources, _CHECK_TOKENS, width, dtype)
  mix = _mix("mosaic_gpu", form, use_last)
  out, d_sources, *d_vectors = jax.jit(_with_gradients(mix))(*arrays)
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
    definition = functools.partial(_definition, form, use_last)
    expected = jax.jit(_with_gradients(definition))(*wide)
    expected = jax.tree.map(np.asarray, expected)
  # What is exactly zero has an absolute error.
  return [
      _error(out, expected[0]),
      max(map(_error, d_sources, expected[1])),
      *map(_error, d_vectors, expected[2:]),
  ]


def check():
  """Prints every case's errors; raises SystemExit above the limits."""
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    results = list(pool.map(_check_case, _CASES))
  wrong = []
  for case, errors in zip(_CASES, results, strict=True):
    print(f"{case}: " + " ".join(f"{e:.1e}" for e in errors), flush=True)
    output, gradient = _LIMITS[case[2]]
    good = errors[0] <= output and all(e <= gradient for e in errors[1:])
    wrong += [] if good else [case]
  tail = _check_far()
  print(f"last rows past 2^31 elements: {tail:.1e}", flush=True)
  if wrong or not tail <= _LIMITS["bfloat16"][1]:
    raise SystemExit(f"not timed: wrong {wrong}, far rows {tail}")
  return {
      str(case): errors for case, errors in zip(_CASES, results, strict=True)
  }


def _check_far():
  """Largest error of the last rows of two sources of 2^31 + elements each."""
  width, last = 4096, 64
  tokens = 2**31 // width + last
  arrays = _inputs(2, tokens, width, "bfloat16")
  ends = jax.tree.map(lambda x: x[-last:] if x.ndim > 1 else x, arrays)
  errors = []
  for form in ("mix", "norm of mix"):
    both = jax.jit(_with_gradients(_mix("mosaic_gpu", form)))
    out, d_sources, *_ = both(*arrays)
    expected = jax.jit(_with_gradients(_mix("reference", form)))(*ends)
    pairs = zip((out, *d_sources), (expected[0], *expected[1]), strict=True)
    errors += [_error(a[-last:], e) for a, e in pairs]
  return max(errors)


def timed(call):
  """Median milliseconds of a call, and the spread over groups of calls."""
  jax.block_until_ready(call())
  times = []
  for _ in range(_REPEATS.value):
    start = time.perf_counter()
    for _ in range(_CALLS.value):
      out = call()
    jax.block_until_ready(out)
    times.append((time.perf_counter() - start) / _CALLS.value * 1e3)
  return float(np.median(times)), float(max(times) - min(times))


def _floors():
  """Milliseconds that a copy of the same number of bytes takes."""
  row = _TOKENS.value * _WIDTH.value * 2
  rate = timing.copy_rate(_REPEATS.value)
  print(f"copy: {rate / 1e9:.2f} TB/s")
  forward = (_SOURCES.value + 1) * row
  backward = (2 * _SOURCES.value + 1) * row
  return forward / rate, (forward + backward) / rate


def _time_ours():
  arrays = _inputs(_SOURCES.value, _TOKENS.value, _WIDTH.value, "bfloat16")
  rows = {}
  for name, mix in (
      ("mosaic_gpu", _mix("mosaic_gpu")),
      ("reference", _mix("reference")),
      ("normed", _mix("mosaic_gpu", "norm of mix")),
      ("XLA's norm", _mix_then_norm),
  ):
    rows[name] = {}
    for kind, fn, given in (
        ("forward", mix, arrays[:-1]),
        ("forward+backward", _with_gradients(mix), arrays),
    ):
      compiled = jax.jit(fn).lower(*given).compile()
      rows[name][kind] = timed(functools.partial(compiled, *given))
      memory = compiled.memory_analysis().temp_size_in_bytes
      rows[name][f"{kind} temp MiB"] = memory / 2**20
  return rows


def _time_fla():
  """Inside fla's process: prints the two times as JSON."""
  from fla.ops import attnres
  import torch

  def tensor(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

  size = _TOKENS.value, _WIDTH.value
  sources = [tensor(*size).requires_grad_() for _ in range(_SOURCES.value)]
  query, scale = (tensor(_WIDTH.value).requires_grad_() for _ in range(2))
  cotangent = tensor(*size)

  def forward():
    with torch.no_grad():
      return attnres.fused_attnres(query, sources, scale)

  def both():
    out = attnres.fused_attnres(query, sources, scale)
    return torch.autograd.grad(out, [*sources, query, scale], cotangent)

  row = {}
  for kind, fn in (("forward", forward), ("forward+backward", both)):
    fn()
    times = []
    for _ in range(_REPEATS.value):
      start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
      start.record()
      for _ in range(_CALLS.value):
        fn()
      end.record()
      torch.cuda.synchronize()
      times.append(start.elapsed_time(end) / _CALLS.value)
    row[kind] = float(np.median(times)), max(times) - min(times)
  print(json.dumps(row))


def main(argv):
  if _IN_TORCH.value:
    _time_fla()
    return
  errors = check() if _CHECK.value else {}
  floors = _floors()
  rows = _time_ours()
  if _FLA.value:
    command = [sys.executable, "-m", "experiments.bench_attn_res", *argv[1:]]
    for flag in (_SOURCES, _TOKENS, _WIDTH, _REPEATS, _CALLS):
      command.append(f"--{flag.name}={flag.value}")
    done = subprocess.run(
        [*command, "--in_torch"], check=True, stdout=subprocess.PIPE
    )
    rows["fla"] = json.loads(done.stdout.splitlines()[-1])
  device = jax.devices()[0].device_kind
  print(
      f"{device}, {_SOURCES.value} sources x {_TOKENS.value} tokens x"
      f" {_WIDTH.value}, bf16"
  )
  for name, row in rows.items():
    for kind, floor in zip(
        ("forward", "forward+backward"), floors, strict=True
    ):
      milliseconds, spread = row[kind]
      print(
          f"{name:12}{kind:18}{milliseconds:8.3f} +-{spread:5.3f} ms, "
          f"{milliseconds / floor:5.2f} x the floor {floor:.3f}"
      )
  if _OUTPUT.value:
    with open(_OUTPUT.value, "w") as file:
      json.dump(
          {"device": device, "floors": floors, "rows": rows, "errors": errors},
          file,
          indent=1,
      )


if __name__ == "__main__":
  # fla needs memory of its own on the same card.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  app.run(main)
