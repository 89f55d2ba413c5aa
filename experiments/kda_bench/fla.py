"""flash-linear-attention in a process of its own.

  python -m experiments.kda_bench.fla JOB.json

reads {"shapes": {name: [B, T, H, D]}, "repeats": n, "decode": [B, H, D] or
null, "inputs": {regime: path of an .npz} or {}} and adds "times" and "decode
ms" to the file; beside every .npz of inputs it writes one of results.
"""

import json
import sys

import numpy as np
import torch

_DTYPES = {"a_log": torch.float32, "dt_bias": torch.float32}


def main(path):
  with open(path) as file:
    job = json.load(file)
  job["times"] = {}
  if job["decode"]:
    job["decode ms"] = _time_decode(*job["decode"], job["repeats"])
    print("fla: decode ms", job["decode ms"], flush=True)
  for name, shape in job["shapes"].items():
    job["times"][name] = _time_shape(shape, job["repeats"])
    print(f"fla: {name}", job["times"][name], flush=True)
  for inputs in job["inputs"].values():
    _write_results(inputs)
  with open(path, "w") as file:
    json.dump(job, file)


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


def _tensor(name, array):
  dtype = _DTYPES.get(name, torch.bfloat16)
  return torch.tensor(array, device="cuda", dtype=dtype)


def _write_results(path):
  """Output and gradients on inputs that the parent wrote as fp32."""
  arrays = np.load(path)
  x = {name: _tensor(name, arrays[name]) for name in arrays.files}
  cotangent = x.pop("cotangent")
  for y in x.values():
    y.requires_grad_()
  out = _forward(x)
  grads = torch.autograd.grad(out, list(x.values()), cotangent)
  results = dict(zip(x, grads)) | {"output": out}
  np.savez(
      path.replace("inputs", "results"),
      **{k: y.detach().float().cpu().numpy() for k, y in results.items()},
  )


def _time_shape(shape, repeats):
  batch, tokens, heads, width = shape
  rows = (batch, tokens, heads)
  shapes = {name: (*rows, width) for name in "qkvz"}
  shapes |= {"beta_logits": rows, "a_log": (heads,), "dt_bias": (heads, width)}
  x = {
      name: _tensor(name, np.zeros(s)).normal_().requires_grad_()
      for name, s in shapes.items()
  }
  cotangent = torch.randn_like(x["v"])

  def forward():
    with torch.no_grad():
      return _forward(x)

  def both():
    out = _forward(x)
    return out, torch.autograd.grad(out, list(x.values()), cotangent)

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
  """One token for every row, replayed as a CUDA graph: no launch cost."""
  from fla.ops.kda import fused_recurrent_kda  # pylint: disable=g-import-not-at-top

  row = (batch, 1, heads)
  q, k, v, z = (
      torch.randn(*row, width, device="cuda", dtype=torch.bfloat16)
      for _ in range(4)
  )
  beta = torch.rand(row, device="cuda", dtype=torch.float32)
  state = torch.zeros(batch, heads, width, width, device="cuda")
  g = -5.0 * torch.sigmoid(z.float())

  @torch.no_grad()
  def call():
    return fused_recurrent_kda(
        q, k, v, g, beta, initial_state=state, output_final_state=True
    )

  stream = torch.cuda.Stream()
  with torch.cuda.stream(stream):
    for _ in range(3):
      call()
  torch.cuda.synchronize()
  graph = torch.cuda.CUDAGraph()
  with torch.cuda.graph(graph):
    for _ in range(20):
      call()
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
