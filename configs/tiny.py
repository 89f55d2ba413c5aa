"""The demo: a tiny model on real digits and real text, on two CPU cores.

  make demo
  python -m experiments.train --config=configs/tiny.py --workdir=runs/demo

Four stages of 256 to 2048 tokens stand for 8K, 64K, 256K and 1M; nothing in
the model changes from one to the next.
"""

from sparsemm_jax import config as config_lib
from sparsemm_jax.models import presets


def get_config():
  """Returns the run's config, every field of which a flag can change."""
  # One row in five is text, in every batch: a bias fitted to one mixture would
  # not balance another.
  mixture = {"digits": 4.0, "python": 1.0}

  def stage(seq_len, batch_size, steps):
    return config_lib.StageConfig(
        seq_len=seq_len,
        batch_size=batch_size,
        steps=steps,
        max_patches=seq_len // 8,
        mixture=mixture,
    )

  return config_lib.to_config_dict(
      config_lib.RunConfig(
          model=presets.get_preset("tiny"),
          optim=config_lib.OptimConfig(
              learning_rate=1e-2, warmup_fraction=0.03
          ),
          train=config_lib.TrainConfig(
              stages=(
                  stage(256, 10, 240),
                  stage(512, 5, 24),
                  stage(1024, 5, 8),
                  stage(2048, 5, 4),
              ),
              log_every=10,
              checkpoint_every=100,
          ),
      )
  )
