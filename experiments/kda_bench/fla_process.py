"""Starts fla's process early, so that it compiles while others are checked."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

from experiments.kda_bench import inputs as inputs_lib
from pallas_kernels.kda import arg_specs

_COMPILE_TIMEOUT = 200.0  # seconds
_TIMEOUT = 400.0  # seconds, from the start of its measurements


def _dimensions(spec):
  return [spec.batch, spec.tokens, spec.heads, spec.key_width]


class Fla:
  """fla, compiling from the start; `measure` runs it on the device."""

  def __init__(self, shapes, decode_shape, repeats, tuned, check_errors):
    self._temporary = tempfile.TemporaryDirectory()
    self._folder = pathlib.Path(self._temporary.name)
    regimes = inputs_lib.REGIMES if check_errors else ()
    self.job = {
        "shapes": {name: _dimensions(arg_specs.SPECS[name]) for name in shapes},
        "decode": decode_shape,
        "repeats": repeats,
        "tuned": tuned or str(self._folder / "tuned"),
        "ready": str(self._folder / "ready"),
        "check": _dimensions(inputs_lib.CHECK),
        "inputs": {r: str(self._folder / f"{r}_in.npz") for r in regimes},
        "results": {r: str(self._folder / f"{r}_out.npz") for r in regimes},
    }
    self._file = self._folder / "job.json"
    self._file.write_text(json.dumps(self.job))
    self._process = subprocess.Popen(
        [sys.executable, "-m", "experiments.kda_bench.fla", str(self._file)],
        stdin=subprocess.PIPE,
        encoding="utf-8",
    )

  def wait_until_compiled(self):
    """Returns once fla no longer needs the processor."""
    end = time.monotonic() + _COMPILE_TIMEOUT
    while not os.path.exists(self.job["ready"]) and time.monotonic() < end:
      if self._process.poll() is not None:
        return
      time.sleep(0.2)

  def measure(self) -> bool:
    """Runs fla on the device; `job` then has its times. False if it failed."""
    for regime, path in self.job["inputs"].items():
      x = inputs_lib.make_inputs(inputs_lib.CHECK, regime)
      x["cotangent"] = inputs_lib.cotangent(x)
      np.savez(path, **{k: np.asarray(y, np.float32) for k, y in x.items()})
    try:
      self._process.communicate("go\n", timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
      self._process.kill()
    except BrokenPipeError:
      pass
    if self._process.wait():
      print(f"fla is left out: its process ended with {self._process.poll()}")
      return False
    self.job = json.loads(self._file.read_text())
    return True

  def results(self, unused_x, unused_cotangent, regime):
    """Output and gradients on a regime's inputs."""
    with np.load(self.job["results"][regime]) as arrays:
      loaded = {name: arrays[name] for name in arrays.files}
    return loaded.pop("output"), loaded


def start(*args, **kwargs) -> Fla | None:
  """`Fla`, or None where it is not installed."""
  for name in ("fla", "torch", "triton"):
    if importlib.util.find_spec(name) is None:
      print(f"fla is left out: {name} is not installed")
      return None
  return Fla(*args, **kwargs)
