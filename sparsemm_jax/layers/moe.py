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
from sparsemm_jax.layers import stats
from sparsemm_jax.parallel import expert


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
  """The weights of E independent SiTU-GLU networks in the latent width."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self) -> expert.Weights:
    """Returns the three stacks of EXPERT_AXES in the compute dtype."""
    moe = self.config.moe
    sizes = {
        "expert": moe.num_experts,
        "latent": moe.latent_dim,
        "expert_mlp": moe.expert_hidden_dim,
    }

    def stack(name, axes):
      shape = tuple(sizes[axis] for axis in axes)
      kernel = linear.Kernel(self.config, shape, axes, name=name)()
      return kernel.astype(jnp.dtype(self.config.dtype))

    return {name: stack(name, axes) for name, axes in EXPERT_AXES.items()}


EXPERT_AXES = {
    "gate_proj": ("expert", "latent", "expert_mlp"),
    "up_proj": ("expert", "latent", "expert_mlp"),
    "down_proj": ("expert", "expert_mlp", "latent"),
}


def run_sorted(
    config: config_lib.ModelConfig,
    weights: expert.Weights,
    rows: Float[Array, "m l"],
    group_sizes: Int[Array, " e"],
) -> Float[Array, "m l"]:
  """Gives each row to its expert.

  Args:
    config: the model's.
    weights: of E experts, as Experts returns them.
    rows: [M, L] sorted by expert; 0 comes out past the groups.
    group_sizes: [E] int32.
  """
  multiply = functools.partial(
      grouped_matmul.grouped_matmul,
      group_sizes=group_sizes,
      implementation=config.moe.implementation,
  )
  gate_up = multiply(rows, (weights["gate_proj"], weights["up_proj"]))
  gate, up = jnp.split(gate_up, 2, axis=-1)
  hidden = activations.situ_glu(
      gate, up, gate_cap=config.gate_cap, up_cap=config.up_cap
  )
  return multiply(hidden, weights["down_proj"])


class LatentMoE(nn.Module):
  """y = Shared(x) + W_up RMSNorm(sum_j p_j E_j(W_down x)).

  p_j multiplies what expert j returns, in fp32; the sum runs over a token's
  experts in the router's order, so it is deterministic. Padding visits no
  expert. Sows router_stats: dropped visits (see MoeConfig.drop_overflow).

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

    routing = router.Router(config, name="router")(x, layout)
    z = project(outer, latent, ("embed", "latent"), name="latent_down")(x)
    u, dropped = expert.run_experts(
        functools.partial(run_sorted, config),
        Experts(config, name="experts")(), EXPERT_AXES,
        z, routing, layout.valid, moe,
    )  # fmt: skip
    stats.sow(self, "router_stats", "dropped", dropped)
    u = norms.RMSNorm(config, moe.latent_dim, "latent", name="latent_norm")(
        u, config.dtype
    )
    y = project(latent, outer, ("latent", "embed"), name="latent_up")(u)
    if moe.num_shared_experts:
      hidden_dim = moe.num_shared_experts * moe.expert_hidden_dim
      y = y + DenseMLP(config, hidden_dim, name="shared")(x)
    return y
