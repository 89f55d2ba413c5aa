"""Runs so small that a step compiles in seconds, on the embedded data."""

import dataclasses
import itertools
from typing import Any

from sparsemm_jax import config as config_lib
from sparsemm_jax.data import pipeline

# Two blocks: KDA and dense MLP, MLA and experts.
MODEL = config_lib.ModelConfig(
    d_model=32,
    num_layers=2,
    mla_every=2,
    dense_hidden_dim=32,
    attn_res_block_size=1,
    scan_layers=False,
    kda=config_lib.KdaConfig(
        num_heads=2, head_dim=8, implementation="reference"
    ),
    mla=config_lib.MlaConfig(
        num_heads=2, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8,
    ),
    moe=config_lib.MoeConfig(
        num_experts=8, num_experts_per_token=2, latent_dim=16,
        expert_hidden_dim=16, histogram_bins=100,
    ),
    vision=config_lib.VisionConfig(
        patch_size=4, d_model=16, num_layers=1, num_heads=2, head_dim=8,
        mlp_hidden_dim=16, position_table_size=4,
    ),
)  # fmt: skip
# One block of MLA and experts, on text alone.
TEXT_MODEL = dataclasses.replace(
    MODEL, num_layers=1, num_dense_layers=0, attn_res_block_size=None,
    vision=None,
)  # fmt: skip
TEXT = {"python": 1.0}
TEXT_AND_IMAGES = {"python": 1.0, "digits": 1.0}


def stage(**changes: Any) -> config_lib.StageConfig:
  """A stage of text, with the changes."""
  values = {"seq_len": 32, "batch_size": 8, "mixture": TEXT, **changes}
  return config_lib.StageConfig(**values)


def config(**train: Any) -> config_lib.RunConfig:
  """A run of MODEL on text and images, in one stage unless `train` says so."""
  train.setdefault(
      "stages", (stage(steps=30, max_patches=8, mixture=TEXT_AND_IMAGES),)
  )
  return config_lib.RunConfig(
      model=MODEL, train=config_lib.TrainConfig(**train)
  )


def text_config(
    moe: dict[str, Any] | None = None, **train: Any
) -> config_lib.RunConfig:
  """A run of TEXT_MODEL on text, fields of its MoeConfig changed."""
  train.setdefault("stages", (stage(steps=30),))
  model = dataclasses.replace(
      TEXT_MODEL, moe=dataclasses.replace(MODEL.moe, **moe or {})
  )
  return config_lib.RunConfig(
      model=model, train=config_lib.TrainConfig(**train)
  )


def batches(run: config_lib.RunConfig, count: int) -> list[pipeline.Batch]:
  """The first batches of the run."""
  return list(itertools.islice(pipeline.make_train_iterator(run, 0), count))
