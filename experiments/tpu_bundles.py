"""Counts the instructions of the attention kernels on a TPU that is not here.

  python -m experiments.tpu_bundles --target=v6e --tokens=8192 --heads=32
  python -m experiments.tpu_bundles --backward

Compiles ahead of time and reads the final schedule that libtpu writes down:
per kernel the instruction bundles of a grid step, the steps, their product in
millions, and how much of each unit's slots is filled. A bundle is a cycle
that waits for nothing, so the product stands in for time: it sees stalls
between dependent instructions, not those of memory, and counts the body of a
loop inside a kernel once.
"""

import glob
import math
import os
import re
import tempfile

from absl import app
from absl import flags
import jax
from jax.extend import core as jax_core

from pallas_kernels import aot
from pallas_kernels import kda
from pallas_kernels.kda import arg_specs

_TARGET = flags.DEFINE_enum(
    "target", "v6e", ["v4", "v5e", "v5p", "v6e", "tpu7x"], "Kind of TPU."
)
_TOKENS = flags.DEFINE_integer("tokens", 8192, "Tokens of one sequence.")
_HEADS = flags.DEFINE_integer("heads", 32, "Heads, 128 wide.")
_BACKWARD = flags.DEFINE_bool("backward", False, "Gradients of all inputs too.")

_UNITS = ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE")


def forward():
  """Returns fused_kda's output as a function of arrays, and their shapes."""
  spec = arg_specs.ArgSpec(1, _TOKENS.value, _HEADS.value, _HEADS.value)
  shapes = spec.shapes()

  def run(*args):
    return kda.fused_kda(*args, implementation="mosaic_tpu")[0]

  return run, tuple(shapes.values())


def with_gradients(run, shapes):
  """Returns (output, gradients) as a function of the output's, and shapes."""

  def both(cotangent, *args):
    out, vjp = jax.vjp(run, *args)
    return out, vjp(cotangent)

  return both, (shapes[2], *shapes)


def grids(jaxpr) -> dict[str, int]:
  """Returns the grid steps of every kernel in a jaxpr, by name."""
  found = {}
  for equation in jaxpr.eqns:
    if equation.primitive.name == "pallas_call":
      name = equation.params["name"]
      found[name] = math.prod(equation.params["grid_mapping"].grid)
      continue
    for inner in jax_core.jaxprs_in_params(equation.params):
      found |= grids(inner)
  return found


def schedule(folder: str, name: str) -> tuple[int, dict[str, float]]:
  """Returns a kernel's bundles per step and the filled share of each unit."""
  pattern = rf"{folder}/*{name}*-schedule-analysis_final_bundles.txt"
  with open(sorted(glob.glob(pattern))[-1]) as file:
    bundles = int(
        re.search(r"total scheduled bundles:\s*(\d+)", file.read())[1]
    )
  pattern = rf"{folder}/*{name}*-final_hlo-static-per-bundle-utilization.txt"
  with open(sorted(glob.glob(pattern))[-1]) as file:
    lines = file.read().splitlines()
  units = lines[1].split(", ")
  capacity, *rows = [
      [int(x) for x in line.split()]
      for line in lines[2:]
      if line.strip()[:1].isdigit()
  ]
  used = [sum(column) for column in zip(*rows, strict=True)]
  shares = {
      unit: u / (c * bundles)
      for unit, u, c in zip(units, used, capacity, strict=True)
  }
  return bundles, shares


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments {argv[1:]}")
  run, shapes = forward()
  if _BACKWARD.value:
    run, shapes = with_gradients(run, shapes)
  with tempfile.TemporaryDirectory() as folder:
    # libtpu reads it when it loads, at the first compilation.
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    )
    with aot.abstract_device(_TARGET.value):
      steps = grids(jax.make_jaxpr(run)(*shapes).jaxpr)
    compiled = aot.compile_for(run, *shapes, target=_TARGET.value)
    total = 0
    for name, count in steps.items():
      bundles, shares = schedule(folder, name)
      total += bundles * count
      used = "  ".join(f"{unit} {shares[unit]:.0%}" for unit in _UNITS)
      print(
          f"{name}: {bundles} x {count} = {bundles * count / 1e6:.2f}M  {used}"
      )
  temporary = compiled.memory_analysis().temp_size_in_bytes
  print(
      f"total {total / 1e6:.2f}M bundles, {temporary / 2**20:.0f} MiB temporary"
  )


if __name__ == "__main__":
  app.run(main)
