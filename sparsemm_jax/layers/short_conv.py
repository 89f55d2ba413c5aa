"""Short causal depthwise convolution over the tokens of one document."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import layout as layout_lib


def short_conv(
    x: Float[Array, "b t h k"],
    kernel: Float[Array, "w h k"],
    segments: Int[Array, "b t"],
) -> Float[Array, "b t h k"]:
  """y_t = sum_j kernel_j x_{t-W+1+j} over the tokens of t's document, in fp32.

  Args:
    x: [B, T, H, K].
    kernel: [W, H, K], the last row meets the token itself.
    segments: [B, T] document numbers, 0 at padding. Other documents and
      padding count as zeros, whatever they hold.

  Returns:
    [B, T, H, K] fp32.
  """
  width, length = kernel.shape[0], x.shape[1]
  x = jnp.where((segments != 0)[:, :, None, None], x, 0).astype(jnp.float32)
  kernel = kernel.astype(jnp.float32)[:, None, None]
  out = x * kernel[-1]
  for shift in range(1, min(width, length)):
    past = jnp.pad(x[:, :-shift], ((0, 0), (shift, 0), (0, 0), (0, 0)))
    past_segments = jnp.pad(segments[:, :-shift], ((0, 0), (shift, 0)))
    same = (past_segments == segments)[:, :, None, None]
    out += jnp.where(same, past, 0.0) * kernel[-1 - shift]
  return out


class ShortConvolution(nn.Module):
  """SiLU of short_conv; its decode state is the last W - 1 inputs.

  Attributes:
    config: the model's; kda.conv_kernel_size is W.
    num_heads: H.
    head_dim: K.
  """

  config: config_lib.ModelConfig
  num_heads: int
  head_dim: int

  @nn.compact
  def __call__(
      self,
      x: Float[Array, "b t h k"],
      layout: layout_lib.Layout,
      tail: Float[Array, "b w h k"] | None = None,
  ) -> tuple[Float[Array, "b t h k"], Float[Array, "b w h k"] | None]:
    """Returns the output and, if a tail [B, W-1, H, K] came in, the next."""
    width = self.config.kda.conv_kernel_size
    kernel = self.param(
        "kernel",
        nn.with_logical_partitioning(
            _uniform(width**-0.5), ("conv", "heads", "head_dim")
        ),
        (width, self.num_heads, self.head_dim),
        jnp.dtype(self.config.param_dtype),
    )
    if tail is None:
      out = short_conv(x, kernel, layout.segments)
      return jax.nn.silu(out).astype(x.dtype), None
    joined = jnp.concatenate([tail, x.astype(tail.dtype)], axis=1)
    segments = jnp.pad(
        layout.segments, ((0, 0), (width - 1, 0)), constant_values=1
    )
    out = short_conv(joined, kernel, segments)[:, width - 1 :]
    added = jnp.sum(layout.valid, axis=1, dtype=jnp.int32)
    window = added[:, None] + jnp.arange(width - 1, dtype=jnp.int32)[None]
    tail = jnp.take_along_axis(joined, window[:, :, None, None], axis=1)
    return jax.nn.silu(out).astype(x.dtype), tail


def _uniform(bound: float):
  """An initializer on [-bound, bound]."""

  def init(key, shape, dtype):
    return jax.random.uniform(key, shape, dtype, -bound, bound)

  return init
