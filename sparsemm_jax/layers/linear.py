"""Bias-free linear maps between tuples of axes."""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float

from sparsemm_jax import config as config_lib


class Kernel(nn.Module):
  """A weight array alone.

  Attributes:
    config: the model's; gives the parameter dtype and init std.
    shape: of the array.
    names: its logical axes.
  """

  config: config_lib.ModelConfig
  shape: tuple[int, ...]
  names: tuple[str, ...]

  @nn.compact
  def __call__(self) -> Float[Array, "..."]:
    """Returns the array in the parameter dtype."""
    return self.param(
        "kernel",
        nn.with_logical_partitioning(
            nn.initializers.normal(self.config.init_std), self.names
        ),
        self.shape,
        jnp.dtype(self.config.param_dtype),
    )


class Linear(nn.Module):
  """y = x W, contracting the trailing axes of x.

  Attributes:
    config: the model's; gives the compute and parameter dtypes and init std.
    in_shape: the trailing axes of x.
    out_shape: the axes that replace them.
    names: logical names of in_shape + out_shape.
    kernel_init: None for normal(config.init_std).
  """

  config: config_lib.ModelConfig
  in_shape: tuple[int, ...]
  out_shape: tuple[int, ...]
  names: tuple[str, ...]
  kernel_init: Callable[..., Array] | None = None

  def setup(self):
    init = self.kernel_init or nn.initializers.normal(self.config.init_std)
    self.kernel = self.param(
        "kernel",
        nn.with_logical_partitioning(init, self.names),
        self.in_shape + self.out_shape,
        jnp.dtype(self.config.param_dtype),
    )

  def __call__(
      self, x: Float[Array, "..."], dtype: str | None = None
  ) -> Float[Array, "..."]:
    """[..., *in_shape] -> [..., *out_shape] in dtype, None: config.dtype."""
    compute = jnp.dtype(self.config.dtype)
    return jnp.tensordot(
        x.astype(compute),
        self.kernel.astype(compute),
        axes=len(self.in_shape),
        preferred_element_type=jnp.dtype(dtype or compute),
    )
