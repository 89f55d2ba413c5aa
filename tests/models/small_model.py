"""A small model for tests: the token-by-token KDA compiles in no time."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax import models
from sparsemm_jax.layers import stats

BASE = config_lib.ModelConfig(
    vocab_size=61,
    d_model=32,
    num_layers=4,  # KDA and MLA in turn
    mla_every=2,
    dense_hidden_dim=48,
    attn_res_block_size=2,
    scan_layers=False,
    kda=config_lib.KdaConfig(
        num_heads=2, num_value_heads=4, head_dim=8, value_head_dim=12,
        implementation="reference",
    ),
    mla=config_lib.MlaConfig(
        num_heads=2, q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=10,
    ),
    moe=config_lib.MoeConfig(
        num_experts=6, num_experts_per_token=2, latent_dim=16,
        expert_hidden_dim=24, histogram_bins=50,
    ),
)  # fmt: skip
VISION = config_lib.VisionConfig(
    patch_size=2, d_model=16, num_layers=2, num_heads=2, head_dim=8,
    mlp_hidden_dim=24, position_table_size=4, media_pad_id=60,
)  # fmt: skip


def config(**changes: Any) -> config_lib.ModelConfig:
  return dataclasses.replace(BASE, **changes)


@functools.cache
def variables(model_config: config_lib.ModelConfig) -> Any:
  """Unboxed variables with every parameter away from its first value."""
  model = models.SparseMultimodalModel(model_config)
  tokens = jnp.zeros((1, 4), jnp.int32)
  boxed = jax.eval_shape(model.init, jax.random.key(0), tokens)
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    mean, std = _DISTRIBUTIONS[path[-1].key]
    return jnp.float32(rng.normal(mean, std, leaf.shape))

  return jax.tree_util.tree_map_with_path(draw, nn.unbox(boxed))


# Last name of the parameter -> mean and standard deviation.
_DISTRIBUTIONS = {
    "kernel": (0.0, 0.2),
    "embedding": (0.0, 1.0),
    "scale": (1.0, 0.1),
    "a_log": (0.0, 0.1),
    "dt_bias": (-3.0, 1.0),
    "pseudo_query": (0.0, 0.3),
    "key_scale": (1.0, 0.1),
    "bias": (0.0, 0.05),
}


@functools.cache
def _apply(model_config, with_stats):
  model = models.SparseMultimodalModel(model_config)
  mutable = list(stats.COLLECTIONS) if with_stats else False
  return jax.jit(functools.partial(model.apply, mutable=mutable))


def apply(model_config: config_lib.ModelConfig, *args: Any, **kwargs: Any):
  return _apply(model_config, False)(variables(model_config), *args, **kwargs)


def apply_with_stats(model_config: config_lib.ModelConfig, *args: Any):
  return _apply(model_config, True)(variables(model_config), *args)


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
  """Random text tokens."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, 60, (rows, length), dtype=np.int32)
