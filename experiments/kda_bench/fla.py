"""flash-linear-attention in a process of its own; `fla_process` starts it.

  python -m experiments.kda_bench.fla JOB.json

compiles every configuration that fla's kernels may be tuned to, on all cores,
touches the file job["ready"] and waits for a line of input. Then it times
job["shapes"] {name: [B, T, H, D]} and job["decode"] ([B, H, D] or null), adds
"times" and "decode ms" to the file, and writes results of job["inputs"]
{regime: .npz}, of shape job["check"], to job["results"] {regime: .npz}.

fla tunes once for a number of heads; here it tunes for each shape, with
Triton's own warm-up and repeats. job["tuned"], a folder, keeps what it chose.
"""

from concurrent import futures
import contextlib
import gc
import json
import os
import pathlib
import sys
from unittest import mock

import numpy as np
import torch
import triton
from triton.runtime import autotuner

_DEVICE = "cuda"
_DTYPES = {"a_log": torch.float32, "dt_bias": torch.float32}
_CONFIG = ("kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg")


def main(path):
  job_file = pathlib.Path(path)
  job = json.loads(job_file.read_text())
  os.environ["FLA_CACHE_RESULTS"] = "0"  # a shape of its own number of heads
  tuned = pathlib.Path(job["tuned"])
  tuned.mkdir(parents=True, exist_ok=True)
  shapes = job["shapes"] | ({"check": job["check"]} if job["inputs"] else {})
  new = [
      s for name, s in shapes.items() if not (tuned / f"{name}.json").exists()
  ]
  if new:
    print(f"fla: {_compile_ahead(new)}", flush=True)
  pathlib.Path(job["ready"]).touch()
  if not sys.stdin.readline():
    return  # the parent gave up
  job["times"] = {}
  if job["decode"]:
    job["decode ms"] = _time_decode(*job["decode"], job["repeats"])
    print("fla: decode ms", job["decode ms"], flush=True)
  for name, shape in job["shapes"].items():
    with _tuning(tuned / f"{name}.json"):
      job["times"][name] = _time_shape(shape, job["repeats"])
    print(f"fla: {name}", job["times"][name], flush=True)
    torch.cuda.empty_cache()
  with _tuning(tuned / "check.json"):
    for regime, inputs in job["inputs"].items():
      _write_results(inputs, job["results"][regime])
  job_file.write_text(json.dumps(job))


def _compile_ahead(shapes):
  """Compiles all configurations of all kernels of `shapes`; says how many.

  A forward and backward pass in which a tuned kernel is compiled, not run.
  """
  seen, pending = set(), []
  pool = futures.ThreadPoolExecutor(os.cpu_count())

  def compile_only(tuner, *args, warmup=None, **kwargs):
    del warmup
    tuner.nargs = dict(zip(tuner.arg_names, args))
    named = tuner.nargs | kwargs
    dtypes = [str(getattr(y, "dtype", None)) for y in named.values()]
    key = (id(tuner), *(str(named.get(name)) for name in tuner.keys), *dtypes)
    if key in seen:
      return
    seen.add(key)
    for config in tuner.prune_configs(kwargs):
      pending.append(
          pool.submit(tuner.fn.warmup, *args, **kwargs, **config.all_kwargs())
      )

  with mock.patch.object(autotuner.Autotuner, "run", compile_only):
    for shape in shapes:
      _both(*_random_inputs(shape))
  failed = sum(job.exception() is not None for job in pending)
  pool.shutdown()
  torch.cuda.empty_cache()
  return f"compiled {len(pending) - failed} of {len(pending)} configurations"


@contextlib.contextmanager
def _tuning(file):
  """Tunes anew, or takes the configurations in `file`; keeps them there."""
  from fla.ops.kda import chunk_kda  # pylint: disable=g-import-not-at-top

  del chunk_kda  # It made the tuners.
  tuners = {
      f"{y.base_fn.__module__}.{y.base_fn.__qualname__}": y
      for y in gc.get_objects()
      if issubclass(type(y), autotuner.Autotuner)  # isinstance asks proxies
  }
  saved = json.loads(file.read_text()) if file.exists() else {}
  for name, tuner in tuners.items():
    tuner.cache.clear()
    for key, config in saved.get(name, []):
      tuner.cache[tuple(key)] = triton.Config(**config)
  yield
  chosen = {
      name: [
          (key, {field: getattr(config, field) for field in _CONFIG})
          for key, config in tuner.cache.items()
      ]
      for name, tuner in tuners.items()
      if tuner.cache
  }
  file.write_text(json.dumps(chosen, indent=1))


def _forward(x):
  from fla.ops.kda import chunk_kda  # pylint: disable=g-import-not-at-top

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


def _both(x, cotangent):
  out = _forward(x)
  return out, torch.autograd.grad(out, list(x.values()), cotangent)


def _tensor(name, array):
  dtype = _DTYPES.get(name, torch.bfloat16)
  return torch.tensor(array, device=_DEVICE, dtype=dtype)


def _random_inputs(shape):
  batch, tokens, heads, width = shape
  rows = (batch, tokens, heads)
  shapes = {name: (*rows, width) for name in "qkvz"}
  shapes |= {"beta_logits": rows, "a_log": (heads,), "dt_bias": (heads, width)}
  x = {
      name: (
          torch.randn(
              s, device=_DEVICE, dtype=_DTYPES.get(name, torch.bfloat16)
          ).requires_grad_()
      )
      for name, s in shapes.items()
  }
  return x, torch.randn_like(x["v"])


def _write_results(inputs, results):
  """Output and gradients on inputs that the parent wrote as fp32."""
  arrays = np.load(inputs)
  x = {name: _tensor(name, arrays[name]) for name in arrays.files}
  cotangent = x.pop("cotangent")
  for y in x.values():
    y.requires_grad_()
  out, grads = _both(x, cotangent)
  arrays = dict(zip(x, grads)) | {"output": out}
  np.savez(
      results,
      **{k: y.detach().float().cpu().numpy() for k, y in arrays.items()},
  )


def _time_shape(shape, repeats):
  x, cotangent = _random_inputs(shape)

  def forward():
    with torch.no_grad():
      return _forward(x)

  both = lambda: _both(x, cotangent)
  times = {}
  for kind, call in (("forward", forward), ("forward+backward", both)):
    for _ in range(3):
      call()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    temporary = torch.cuda.max_memory_allocated() - base
    times[kind] = _timed(call, 5, repeats)
    print(f"fla: {kind}", times[kind], flush=True)
    times[f"{kind} temp GiB"] = temporary / 2**30  # the results included
  return times


def _time_decode(batch, heads, width, repeats):
  """One token for every row, replayed as a CUDA graph: no launch cost.

  As for ours, each call takes the state that the one before returned.
  """
  from fla.ops.kda import fused_recurrent_kda  # pylint: disable=g-import-not-at-top

  row = (batch, 1, heads)
  q, k, v, z = (
      torch.randn(*row, width, device=_DEVICE, dtype=torch.bfloat16)
      for _ in range(4)
  )
  q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
  beta = torch.rand(row, device=_DEVICE, dtype=torch.float32)
  state = torch.randn(batch, heads, width, width, device=_DEVICE)
  g = -5.0 * torch.sigmoid(z.float())

  @torch.no_grad()
  def steps(state, number):
    for _ in range(number):
      _, state = fused_recurrent_kda(
          q, k, v, g, beta, initial_state=state, output_final_state=True
      )

  stream = torch.cuda.Stream()
  with torch.cuda.stream(stream):
    steps(state, 3)
  torch.cuda.synchronize()
  graph = torch.cuda.CUDAGraph()
  with torch.cuda.graph(graph):
    steps(state, 20)
  median, spread = _timed(graph.replay, 5, repeats)
  return median / 20, spread / 20


def _timed(call, calls, repeats):
  times = []
  for _ in range(repeats):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
      call()
    end.record()
    torch.cuda.synchronize()
    times.append(start.elapsed_time(end) / calls)
  return float(np.median(times)), max(times) - min(times)


if __name__ == "__main__":
  main(sys.argv[1])
