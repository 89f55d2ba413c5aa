"""Errors of ours beside a peer's against float64; nothing is timed.

  python -m experiments.kda_bench.errors
  python -m experiments.kda_bench.errors "identical keys" "segments of"

Compares outputs and gradients at T = 512, H = 96 in the five gate regimes,
prints one table and, after it, the hard cases whose names hold one of the
arguments.
"""

from concurrent import futures
import os
import sys

from experiments.kda_bench import hard
from experiments.kda_bench import inputs as inputs_lib
from experiments.kda_bench import peers
from pallas_kernels.kda import api

_CASE_TIMEOUT = 120.0  # seconds after the table
_PEER = "jax-linear-attention"


def check(runs):
  """Errors against float64 of {name: (x, cotangent, regime) -> results}."""
  errors = {name: {} for name in runs}
  for regime in inputs_lib.REGIMES:
    x = inputs_lib.make_inputs(inputs_lib.CHECK, regime)
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
      errors[name][regime] = row
      print(
          f"{name:21} {regime:11}",
          " ".join(f"{k} {v:.1e}" for k, v in row.items()),
          flush=True,
      )
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


def main(parts):
  """Compares in the five regimes, then runs the cases named by `parts`."""
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  cases = hard.start(parts) if parts else []
  runs = {"ours": lambda x: api.fused_kda(**x)[0]} | peers.jax_peers([_PEER])
  x = inputs_lib.CHECK.shapes()
  with futures.ThreadPoolExecutor() as pool:
    compiled = {
        name: pool.submit(
            inputs_lib.with_gradient(run).lower(x, x["v"]).compile
        )
        for name, run in runs.items()
    }
  print_table(
      check({
          name: lambda x, cotangent, _, run=run: run.result()(x, cotangent)
          for name, run in compiled.items()
      })
  )
  for name, good, numbers in hard.results(cases, _CASE_TIMEOUT):
    print(f"hard: {name}: {'holds' if good else 'FAILS'} ({numbers})")


if __name__ == "__main__":
  main(sys.argv[1:])
