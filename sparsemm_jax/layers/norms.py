"""Root-mean-square and L2 normalisation, in fp32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float

from sparsemm_jax import config as config_lib


def rms_norm(
    x: Float[Array, "... d"], scale: Float[Array, " d"], *, eps: float
) -> Float[Array, "... d"]:
  """Computes scale * x / sqrt(mean(x^2) + eps) over the last axis, in fp32."""
  x = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  scale = jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))
  return x * jax.lax.rsqrt(mean_square + eps) * scale


def l2_normalize(
    x: Float[Array, "... d"], *, eps: float = 1e-6
) -> Float[Array, "... d"]:
  """Computes x / sqrt(sum(x^2) + eps) over the last axis, in fp32."""
  x = x.astype(jnp.float32)
  square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(square + eps)


class RMSNorm(nn.Module):
  """rms_norm with a learned scale that starts at 1.

  Attributes:
    config: the model's; gives eps and the parameter dtype.
    dim: width of the last axis.
    name_of_axis: its logical name.
  """

  config: config_lib.ModelConfig
  dim: int
  name_of_axis: str

  def setup(self):
    self.scale = self.param(
        "scale",
        nn.with_logical_partitioning(
            nn.initializers.ones, (self.name_of_axis,)
        ),
        (self.dim,),
        jnp.dtype(self.config.param_dtype),
    )

  def __call__(
      self, x: Float[Array, "... d"], dtype: str | None = None
  ) -> Float[Array, "... d"]:
    """[..., dim] -> [..., dim] in dtype, None: x.dtype."""
    out = rms_norm(x, self.scale, eps=self.config.norm_eps)
    return out.astype(dtype or x.dtype)
