"""Trains a model through all stages of its config.

  python -m experiments.train --config=configs/tiny.py --workdir=runs/demo

Running the same command again goes on where the run stopped; SIGTERM saves
before it stops. `<workdir>/config.json` keeps the config, `metrics.jsonl` and
`tensorboard/` the metrics, `checkpoints/` the states.
"""

import json
import sys

from absl import flags
from etils import epath

from experiments import command
from sparsemm_jax import config as config_lib
from sparsemm_jax import planning
from sparsemm_jax import training
from sparsemm_jax.training import loop

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run; made if missing.", required=True
)
_config = command.define_config()


def main(argv) -> None:
  """Trains; see the module's docstring."""
  del argv
  config = _config()
  workdir = epath.Path(_WORKDIR.value)
  count = planning.count_parameters(config.model)
  print(
      f"{count.total:.4g} parameters, {count.active:.4g} active;"
      f" {config.train.num_steps} steps in {len(config.train.stages)} stages"
  )
  workdir.mkdir(parents=True, exist_ok=True)
  (workdir / "config.json").write_text(
      json.dumps(config_lib.to_dict(config), indent=2) + "\n"
  )
  try:
    training.train(config, workdir)
  except loop.Stopped as stopped:
    print(stopped)
    sys.exit(143)  # 128 + SIGTERM


if __name__ == "__main__":
  command.run(main)
