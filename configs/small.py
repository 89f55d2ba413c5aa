"""238M parameters, 52M active, 64 experts, in bf16, on one H200.

  python -m experiments.train --config=configs/small.py --workdir=runs/small

The data are those of configs/tiny.py: embedded, real, and soon repeated at
this size; the run shows the machinery and its speed.
"""

from sparsemm_jax import config as config_lib
from sparsemm_jax.models import presets


def get_config():
  """Returns the run's config, every field of which a flag can change."""

  def stage(seq_len, batch_size, steps):
    return config_lib.StageConfig(
        seq_len=seq_len,
        batch_size=batch_size,
        steps=steps,
        max_patches=seq_len // 2,
        mixture={"digits": 1.0, "python": 3.0},
    )

  return config_lib.to_config_dict(
      config_lib.RunConfig(
          model=presets.get_preset("small"),
          optim=config_lib.OptimConfig(
              learning_rate=1e-3, warmup_fraction=0.05
          ),
          train=config_lib.TrainConfig(
              stages=(stage(1024, 16, 200),),
              checkpoint_every=100,
          ),
      )
  )
