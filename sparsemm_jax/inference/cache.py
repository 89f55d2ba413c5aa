"""What decode keeps of a row between calls."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Int

from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import kda
from sparsemm_jax.layers import mla
from sparsemm_jax.models import block


class Cache(NamedTuple):
  """The rows of a batch, each one document that grows.

  KDA layers keep a state of constant size, MLA layers one latent per token;
  attention residuals keep nothing.
  """

  layers: dict[str, Any]  # group name -> KdaCache or MlaCache, as the model's
  lengths: Int[Array, " b"]  # tokens so far
  image_tokens: Int[Array, " b"]  # media pads among them


def init_cache(
    config: config_lib.ModelConfig, batch_size: int, max_len: int
) -> Cache:
  """Returns the cache of empty rows.

  Args:
    config: the model's.
    batch_size: B.
    max_len: tokens a row may hold; the latents of later ones are dropped.
  """
  layers = {}
  for group in (g for groups in block.block_groups(config) for g in groups):
    if group.repeats == 1:
      layers[group.name] = _layer(config, group.pattern[0], batch_size, max_len)
      continue
    pattern = {
        f"layer_{index}": _layer(config, spec, batch_size, max_len)
        for index, spec in enumerate(group.pattern)
    }
    layers[group.name] = jax.tree.map(
        lambda x, n=group.repeats: jnp.zeros((n, *x.shape), x.dtype), pattern
    )
  zeros = jnp.zeros((batch_size,), jnp.int32)
  return Cache(layers, lengths=zeros, image_tokens=zeros)


def _layer(config, spec, batch, max_len):
  dtype = jnp.dtype(config.dtype)
  if spec.is_mla:
    width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    return mla.MlaCache(jnp.zeros((batch, max_len, width), dtype))
  heads, value_heads = config.kda.num_heads, config.kda.value_heads
  key_dim, value_dim = config.kda.head_dim, config.kda.value_dim
  tail = config.kda.conv_kernel_size - 1
  return kda.KdaCache(
      state=jnp.zeros((batch, value_heads, key_dim, value_dim), jnp.float32),
      q_tail=jnp.zeros((batch, tail, heads, key_dim), dtype),
      k_tail=jnp.zeros((batch, tail, heads, key_dim), dtype),
      v_tail=jnp.zeros((batch, tail, value_heads, value_dim), dtype),
  )
