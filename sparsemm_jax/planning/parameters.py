"""How many parameters a model has, from its configuration alone."""

import dataclasses

from sparsemm_jax import config as config_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterCount:
  """Numbers of parameters; total = embedding + head + decoder."""

  total: int  # of the language model
  active: int  # used by one token, apart from the embedding table
  embedding: int  # token table
  experts: int  # routed experts, within total
  vision: int  # tower, without the projector; not within total
  projector: int  # from the tower to the decoder; not within total


def count_parameters(config: config_lib.ModelConfig) -> ParameterCount:
  """Counts a model's parameters; the router biases are state, not counted.

  Args:
    config: of the model.

  Returns:
    The counts; total + vision + projector is everything that is trained.
  """
  width, moe = config.d_model, config.moe
  num_mla = sum(config.is_mla(layer) for layer in range(config.num_layers))
  num_moe = config.num_layers - config.num_dense_layers
  table = config.vocab_size * width
  expert = 3 * moe.latent_dim * moe.expert_hidden_dim
  experts = num_moe * moe.num_experts * expert
  vectors = (2 * config.num_layers + 1) * width  # norms
  if config.attn_res_block_size is not None:
    vectors += (2 * config.num_layers + 1) * 2 * width  # queries, key scales
  rest = (
      2 * table
      + (config.num_layers - num_mla) * _kda(config)
      + num_mla * _mla(config)
      + config.num_dense_layers * 3 * width * config.dense_hidden_dim
      + num_moe * _moe_without_experts(config)
      + vectors
  )
  active_experts = num_moe * moe.num_experts_per_token * expert
  return ParameterCount(
      total=rest + experts,
      active=rest + active_experts - table,
      embedding=table,
      experts=experts,
      vision=_vision(config.vision),
      projector=_projector(config),
  )


def _kda(config):
  kda, width = config.kda, config.d_model
  keys = kda.num_heads * kda.head_dim
  decay = kda.value_heads * kda.head_dim
  values = kda.value_heads * kda.value_dim
  return (
      width * (2 * keys + 3 * values)  # q, k, v, gate, output
      + kda.conv_kernel_size * (2 * keys + values)
      + kda.rank * (width + decay)
      + width * kda.value_heads  # beta
      + kda.value_heads + decay  # a_log, dt_bias
      + kda.value_dim  # norm
  )  # fmt: skip


def _mla(config):
  mla, width = config.mla, config.d_model
  q_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
  return (
      width * mla.q_lora_rank
      + mla.q_lora_rank * (mla.num_heads * q_dim + 1)
      + width * (mla.kv_lora_rank + mla.qk_rope_head_dim)
      + mla.kv_lora_rank
      * (mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) + 1)
      + 2 * width * mla.num_heads * mla.v_head_dim  # gate, output
  )


def _moe_without_experts(config):
  moe, width = config.moe, config.d_model
  shared = 3 * width * moe.num_shared_experts * moe.expert_hidden_dim
  latent = (2 * width + 1) * moe.latent_dim
  return width * moe.num_experts + shared + latent


def _vision(vision):
  if vision is None:
    return 0
  width = vision.d_model
  attention = 4 * width * vision.num_heads * vision.head_dim
  block = attention + 2 * width * vision.mlp_hidden_dim + 2 * width
  table = width * vision.position_table_size**2
  return vision.patch_dim * width + table + vision.num_layers * block + width


def _projector(config):
  if config.vision is None:
    return 0
  merged = config.vision.patches_per_token * config.vision.d_model
  return merged * (merged + config.d_model) + config.d_model
