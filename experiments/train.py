"""Trains a model through all stages of its config.

  python -m experiments.train --config=configs/tiny.py --workdir=runs/demo

Running the same command again goes on where the run stopped; SIGTERM saves
before it stops. `<workdir>/config.json` keeps the config, `metrics.jsonl` and
`tensorboard/` the metrics, `checkpoints/` the states.
"""

import sys

from experiments import command
from sparsemm_jax import planning
from sparsemm_jax import training
from sparsemm_jax.training import loop

_WORKDIR = command.define_workdir("Folder of the run; made if missing.")
_config = command.define_config()


def main(argv) -> None:
  """Trains; see the module's docstring."""
  del argv
  config = _config()
  count = planning.count_parameters(config.model)
  print(
      f"{count.total:.4g} parameters, {count.active:.4g} active;"
      f" {config.train.num_steps} steps in {len(config.train.stages)} stages"
  )
  try:
    training.train(config, _WORKDIR.value)
  except loop.Stopped as stopped:
    print(stopped)
    sys.exit(143)  # 128 + SIGTERM


if __name__ == "__main__":
  command.run(main)
