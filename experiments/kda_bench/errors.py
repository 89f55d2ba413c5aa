"""Errors of ours beside a peer's against float64; nothing is timed.

  python -m experiments.kda_bench.errors
  python -m experiments.kda_bench.errors --regimes=identical --seeds=0,1,2,3
  python -m experiments.kda_bench.errors --hard="identical keys,segments of"

Compares outputs and gradients at T = 512, H = 96 in five gate regimes and
prints one table; over several seeds the root mean square of their errors.
After it, the hard cases whose names hold one of `--hard`.
"""

from concurrent import futures
import os

from absl import app
from absl import flags
import numpy as np

from experiments.kda_bench import hard
from experiments.kda_bench import inputs as inputs_lib
from experiments.kda_bench import peers
from pallas_kernels.kda import api

_CASE_TIMEOUT = 120.0  # seconds after the table
_PEER = "jax-linear-attention"


def check(runs, regimes=inputs_lib.REGIMES, seeds=(0,)):
  """Errors against float64, by regime, of several implementations.

  Args:
    runs: {name: (x, cotangent, regime) -> (output, gradients)}.
    regimes: of `inputs.make_inputs`.
    seeds: of the inputs; the errors are their root mean square.

  Returns:
    {name: {regime: {"output": error, "d q": error, ...}}}; without the regimes
    that a peer refuses.
  """
  errors = {name: {} for name in runs}
  for regime in regimes:
    rows = {name: [] for name in runs}
    for seed in seeds:
      x = inputs_lib.make_inputs(inputs_lib.CHECK, regime, seed)
      cotangent = inputs_lib.cotangent(x)
      expected = inputs_lib.exact(x, cotangent)
      for name, run in runs.items():
        try:
          row = inputs_lib.errors(run(x, cotangent, regime), expected)
        except Exception as error:  # pylint: disable=broad-exception-caught
          if name == "ours":
            raise
          print(f"{name:21} {regime:11} {str(error)[:200]}")
          continue
        rows[name].append(row)
    for name, several in rows.items():
      if not several:
        continue
      row = errors[name][regime] = {
          k: float(np.sqrt(np.mean([r[k] ** 2 for r in several])))
          for k in several[0]
      }
      numbers = " ".join(f"{k} {v:.1e}" for k, v in row.items())
      print(f"{name:21} {regime:11} {numbers}", flush=True)
  return errors


def print_table(errors, peer=_PEER):
  """Prints ours / the peer's times 1000; a star where ours is the larger."""
  ours, theirs = errors["ours"], errors.get(peer, {})
  names = next(iter(ours.values())).keys()
  print(f"\nerrors x 1000, ours / {peer}; * where ours is larger")
  print(" " * 11 + "".join(f"{name.removeprefix('d '):>16}" for name in names))
  for regime, row in ours.items():
    cells = []
    for name, value in row.items():
      other = theirs.get(regime, {}).get(name, float("nan"))
      star = "*" if value > other else " "
      cells.append(f"{value * 1e3:8.2f}/{other * 1e3:6.2f}{star}")
    print(f"{regime:11}" + "".join(cells), flush=True)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments {argv[1:]}")
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  cases = hard.start(_HARD.value) if _HARD.value else []
  runs = {"ours": lambda x: api.fused_kda(**x)[0]} | peers.jax_peers([_PEER])
  x = inputs_lib.CHECK.shapes()
  compile_one = lambda run: (
      inputs_lib.with_gradient(run).lower(x, x["v"]).compile()
  )
  with futures.ThreadPoolExecutor() as pool:
    compiled = {
        name: pool.submit(compile_one, run) for name, run in runs.items()
    }
  print_table(
      check(
          {
              name: lambda x, cotangent, _, run=run: run.result()(x, cotangent)
              for name, run in compiled.items()
          },
          _REGIMES.value,
          [int(seed) for seed in _SEEDS.value],
      )
  )
  failed = []
  for name, good, numbers in hard.results(cases, _CASE_TIMEOUT):
    print(f"hard: {name}: {'holds' if good else 'FAILS'} ({numbers})")
    failed += [] if good else [name]
  if failed:
    raise SystemExit(f"hard cases that fail: {failed}")


if __name__ == "__main__":
  # Not on import: bench_kernels imports this and has a flag --hard of its own.
  _REGIMES = flags.DEFINE_list("regimes", list(inputs_lib.REGIMES), "Of gates.")
  flags.register_validator(
      "regimes",
      lambda names: set(names) <= set(inputs_lib.REGIMES),
      f"each must be one of {inputs_lib.REGIMES}",
  )
  _SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds of the inputs.")
  _HARD = flags.DEFINE_list("hard", [], "Parts of names of hard cases.")
  app.run(main)
