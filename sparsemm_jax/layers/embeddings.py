"""The token table and rotary embeddings."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from sparsemm_jax import config as config_lib


class TokenEmbedding(nn.Module):
  """One learned row per token id."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    """[B, T] ids -> [B, T, D]."""
    config = self.config
    table = self.param(
        "embedding",
        nn.with_logical_partitioning(
            nn.initializers.normal(config.init_std), ("vocab", "embed")
        ),
        (config.vocab_size, config.d_model),
        jnp.dtype(config.param_dtype),
    )
    return jnp.take(table, tokens, axis=0).astype(config.dtype)


def rope_frequencies(dim: int, theta: float) -> Float[Array, " f"]:
  """theta^(-2 i / dim) for i < dim / 2: radians per position."""
  return theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)


def rotate(
    x: Float[Array, "b t h d"], angles: Float[Array, "b t f"]
) -> Float[Array, "b t h d"]:
  """Turns each adjacent pair (x_2i, x_2i+1) by angle i, in fp32.

  Args:
    x: [B, T, H, 2 F].
    angles: [B, T, F] radians, the same for every head.

  Returns:
    [B, T, H, 2 F] in x.dtype.
  """
  pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
  cos = jnp.cos(angles)[:, :, None]
  sin = jnp.sin(angles)[:, :, None]
  even, odd = pairs[..., 0], pairs[..., 1]
  turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
  return turned.reshape(x.shape).astype(x.dtype)
