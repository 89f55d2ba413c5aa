"""Feed-forward layers: the dense one, and experts in a latent width."""

import functools

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from pallas_kernels import grouped_matmul
from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import activations
from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.layers import linear
from sparsemm_jax.layers import norms
from sparsemm_jax.layers import router


class DenseMLP(nn.Module):
  """y = W_down SiTU-GLU(W_gate x, W_up x).

  Attributes:
    config: the model's.
    hidden_dim: width between.
  """

  config: config_lib.ModelConfig
  hidden_dim: int

  @nn.compact
  def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """[..., D] -> [..., D]."""
    config = self.config
    project = functools.partial(linear.Linear, config)
    outer, inner = (config.d_model,), (self.hidden_dim,)
    gate = project(outer, inner, ("embed", "mlp"), name="gate_proj")(x)
    up = project(outer, inner, ("embed", "mlp"), name="up_proj")(x)
    hidden = activations.situ_glu(
        gate, up, gate_cap=config.gate_cap, up_cap=config.up_cap
    )
    return project(inner, outer, ("mlp", "embed"), name="down_proj")(hidden)


class Experts(nn.Module):
  """E independent SiTU-GLU networks in the latent width."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(
      self, rows: Float[Array, "m l"], group_sizes: Int[Array, " e"]
  ) -> Float[Array, "m l"]:
    """[M, L] rows sorted by expert -> [M, L]."""
    config, moe = self.config, self.config.moe
    outer, inner = moe.latent_dim, moe.expert_hidden_dim
    multiply = functools.partial(
        grouped_matmul.grouped_matmul,
        group_sizes=group_sizes,
        implementation=moe.implementation,
    )

    def kernel(name, shape, names):
      stack = linear.Kernel(config, (moe.num_experts, *shape), names, name=name)
      return stack().astype(rows.dtype)

    wide = ("expert", "latent", "expert_mlp")
    # One product for both; joining them costs nothing beside the cast.
    gate_up = jnp.concatenate(
        [
            kernel("gate_proj", (outer, inner), wide),
            kernel("up_proj", (outer, inner), wide),
        ],
        axis=-1,
    )
    gate, up = jnp.split(multiply(rows, gate_up), 2, axis=-1)
    hidden = activations.situ_glu(
        gate, up, gate_cap=config.gate_cap, up_cap=config.up_cap
    )
    down = kernel(
        "down_proj", (inner, outer), ("expert", "expert_mlp", "latent")
    )
    return multiply(hidden, down)


class LatentMoE(nn.Module):
  """y = Shared(x) + W_up RMSNorm(sum_j p_j E_j(W_down x)).

  No token is dropped. p_j multiplies what expert j returns, in fp32; the sum
  runs over a token's experts in the router's order, so it is deterministic.

  Source: Kimi K3 report, section 2.3, arXiv:2607.24653.
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(
      self, x: Float[Array, "b t d"], layout: layout_lib.Layout
  ) -> Float[Array, "b t d"]:
    """[B, T, D] -> [B, T, D]."""
    config, moe = self.config, self.config.moe
    outer, latent = (config.d_model,), (moe.latent_dim,)
    project = functools.partial(linear.Linear, config)
    tokens = x.reshape(-1, config.d_model)

    routing = router.Router(config, name="router")(
        tokens, layout.valid.reshape(-1)
    )
    z = project(outer, latent, ("embed", "latent"), name="latent_down")(tokens)
    order, group_sizes = sort_by_expert(routing.expert_indices, moe.num_experts)
    rows = jnp.take(z, order // moe.num_experts_per_token, axis=0)
    rows = Experts(config, name="experts")(rows, group_sizes)
    # Back to [G, A, L]: row i of the sorted rows is visit order[i].
    visits = jnp.take(rows, jnp.argsort(order), axis=0)
    visits = visits.reshape(*routing.expert_indices.shape, moe.latent_dim)
    u = jnp.sum(
        visits.astype(jnp.float32) * routing.combine_weights[:, :, None], axis=1
    )
    u = norms.RMSNorm(config, moe.latent_dim, "latent", name="latent_norm")(
        u, config.dtype
    )
    y = project(latent, outer, ("latent", "embed"), name="latent_up")(u)
    y = y.reshape(x.shape)
    if moe.num_shared_experts:
      hidden_dim = moe.num_shared_experts * moe.expert_hidden_dim
      y = y + DenseMLP(config, hidden_dim, name="shared")(x)
    return y


def sort_by_expert(
    expert_indices: Int[Array, "g a"], num_experts: int
) -> tuple[Int[Array, " m"], Int[Array, " e"]]:
  """Sorts the M = G A visits by expert, visits of one expert by token.

  Args:
    expert_indices: [G, A] int32.
    num_experts: E.

  Returns:
    order: [M] the visit g * A + a that stands at each sorted place.
    group_sizes: [E] int32 visits per expert, padding tokens included.
  """
  visits = expert_indices.reshape(-1)
  order = jnp.argsort(visits, stable=True)
  group_sizes = jnp.bincount(visits, length=num_experts).astype(jnp.int32)
  return order, group_sizes
