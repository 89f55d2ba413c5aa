"""Balances an endless stream of random tokens over 896 experts, on CPU.

  python -m experiments.ablations.balancing.stream

Each step draws new tokens (simulation.py), routes them with each rule's bias
and updates the bias from what was counted: exactly what a training step does,
without a gradient. That leaves out switch_loss, which moves nothing else.
"""

import time

from absl import flags
import numpy as np

from experiments import command
from experiments.ablations import common
from experiments.ablations.balancing import measures
from experiments.ablations.balancing import simulation

_EXPERTS = flags.DEFINE_integer("experts", 896, "Routed experts, E.")
_PER_TOKEN = flags.DEFINE_integer("per_token", 16, "Experts per token, A.")
_TOKENS = flags.DEFINE_integer("tokens", 32768, "Tokens per step.")
_STEPS = flags.DEFINE_integer("steps", 20, "Steps of the first seed.")
_SEEDS = flags.DEFINE_integer(
    "seeds", 6, "Seeds; the others run quantile alone."
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")

_SHORT = 9  # steps of the other seeds


def main(argv) -> None:
  """Simulates; see the module's docstring."""
  del argv
  start = time.monotonic()
  shape = dict(
      num_experts=_EXPERTS.value,
      num_experts_per_token=_PER_TOKEN.value,
      tokens=_TOKENS.value,
  )
  load = _TOKENS.value * _PER_TOKEN.value / _EXPERTS.value
  floor = measures.sampling_floor(_EXPERTS.value, load)
  series = simulation.simulate(simulation.RULES, 0, steps=_STEPS.value, **shape)
  for seed in range(1, _SEEDS.value):
    counts = simulation.simulate(("quantile",), seed, steps=_SHORT, **shape)
    series[f"quantile, seed {seed}"] = counts["quantile"]
  violation = {name: measures.max_violations(c) for name, c in series.items()}
  dead = {name: np.sum(c == 0, axis=-1) for name, c in series.items()}
  print(f"mean load {load:.0f}, sampling floor {floor:.3f}; max violation:")
  steps = [s for s in (0, 1, 2, 3, 4, 5, 7) if s < _STEPS.value]
  print(f"{'rule':18}", *(f"{f'step {s}':8}" for s in steps), "last     dead")
  for name, values in violation.items():
    cells = [f"{values[s]:<8.3f}" for s in steps]
    print(f"{name:18}", *cells, f"{values[-1]:<8.3f} {dead[name][-1]}")
  if _STEPS.value > 4:
    at_4 = [v[4] for n, v in violation.items() if n.startswith("quantile")]
    print(
        f"quantile at step 4, {len(at_4)} seeds: mean"
        f" {np.mean(at_4) / floor:.2f} x floor, most"
        f" {np.max(at_4) / floor:.2f} x"
    )
  print(f"{time.monotonic() - start:.0f} s on {common.hardware()}")
  if _OUTPUT.value:
    common.write_json(
        _OUTPUT.value,
        {
            "hardware": common.hardware(),
            **shape,
            "sampling_floor": floor,
            "max_violation": violation,
            "dead": dead,
        },
    )


if __name__ == "__main__":
  command.run(main)
