"""Named models."""

import dataclasses

from sparsemm_jax import config as config_lib


def _tiny() -> config_lib.ModelConfig:
  """Trains on two CPU cores in minutes; images of 8 x 8 to 16 x 16 pixels."""
  return config_lib.ModelConfig(
      d_model=128,
      num_layers=4,
      num_dense_layers=1,
      dense_hidden_dim=256,
      attn_res_block_size=2,
      # Two layers per residual block: nothing repeats enough to pay for a scan.
      scan_layers=False,
      kda=config_lib.KdaConfig(num_heads=4, head_dim=32),
      mla=config_lib.MlaConfig(
          num_heads=4, q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=32,
          qk_rope_head_dim=16, v_head_dim=32,
      ),
      moe=config_lib.MoeConfig(
          num_experts=16, num_experts_per_token=2, latent_dim=64,
          expert_hidden_dim=64, num_shared_experts=1,
      ),
      vision=config_lib.VisionConfig(
          patch_size=4, d_model=64, num_layers=2, num_heads=2, head_dim=32,
          mlp_hidden_dim=128, position_table_size=8,
          max_patches_per_image=256, max_patches_per_side=32,
      ),
  )  # fmt: skip


def _small() -> config_lib.ModelConfig:
  """Fills one H200 comfortably, in bf16."""
  return config_lib.ModelConfig(
      d_model=768,
      num_layers=8,
      num_dense_layers=1,
      dense_hidden_dim=2048,
      attn_res_block_size=4,
      dtype="bfloat16",
      remat="dots",
      kda=config_lib.KdaConfig(num_heads=6, head_dim=128),
      mla=config_lib.MlaConfig(
          num_heads=6, q_lora_rank=384, kv_lora_rank=256, qk_nope_head_dim=128,
          qk_rope_head_dim=64, v_head_dim=128,
      ),
      moe=config_lib.MoeConfig(
          num_experts=64, num_experts_per_token=4, latent_dim=384,
          expert_hidden_dim=384, num_shared_experts=1,
      ),
      vision=config_lib.VisionConfig(
          patch_size=2, d_model=256, num_layers=4, num_heads=4, head_dim=64,
          mlp_hidden_dim=1024, position_table_size=16,
          max_patches_per_image=4096, max_patches_per_side=128,
      ),
  )  # fmt: skip


def _k3_text() -> config_lib.ModelConfig:
  """The published Kimi K3 without vision; for arithmetic on shapes."""
  return config_lib.ModelConfig(
      vocab_size=163840,
      d_model=7168,
      num_layers=93,
      num_dense_layers=1,
      dense_hidden_dim=33792,
      attn_res_block_size=12,
      dtype="bfloat16",
      remat="full",
      kda=config_lib.KdaConfig(num_heads=96, head_dim=128),
      mla=config_lib.MlaConfig(
          num_heads=96, q_lora_rank=1536, kv_lora_rank=512,
          qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
      ),
      moe=config_lib.MoeConfig(
          num_experts=896, num_experts_per_token=16, latent_dim=3584,
          expert_hidden_dim=3072, num_shared_experts=2,
      ),
  )  # fmt: skip


def _k3() -> config_lib.ModelConfig:
  """The published Kimi K3 with its vision tower."""
  return dataclasses.replace(
      _k3_text(),
      vision=config_lib.VisionConfig(
          patch_size=14, d_model=1024, num_layers=27, num_heads=12,
          head_dim=128, mlp_hidden_dim=4096, position_table_size=64,
          media_pad_id=163605,
      ),
  )  # fmt: skip


_PRESETS = {"tiny": _tiny, "small": _small, "k3": _k3, "k3_text": _k3_text}


def get_preset(name: str) -> config_lib.ModelConfig:
  """Returns a named model: "tiny", "small", "k3" or "k3_text".

  Raises:
    ValueError: an unknown name.
  """
  if name not in _PRESETS:
    raise ValueError(f"unknown preset {name!r}; known: {', '.join(_PRESETS)}")
  return _PRESETS[name]()
