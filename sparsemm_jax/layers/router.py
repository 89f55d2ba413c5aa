"""The router: which experts a token visits, in fp32 throughout."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float

from sparsemm_jax import balancing
from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import stats


class Router(nn.Module):
  """Top-k of sigmoid(W_r x) + bias; the weights leave the bias out.

  Reads `bias` [E] of the collection router_state and never writes it. Sows
  router_stats: counts, and what the balancing rule of the config needs.

  Source: Kimi K3 report, eq. 13, arXiv:2607.24653.
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(
      self, x: Float[Array, "g d"], token_mask: Bool[Array, " g"]
  ) -> balancing.Routing:
    """Routes [G, D] tokens; those masked out are routed but not counted."""
    config, moe = self.config, self.config.moe
    kernel = self.param(
        "kernel",
        nn.with_logical_partitioning(
            nn.initializers.normal(config.init_std), ("embed", "router")
        ),
        (config.d_model, moe.num_experts),
        jnp.dtype(config.param_dtype),
    )
    bias = self.variable(
        "router_state",
        "bias",
        nn.with_logical_partitioning(jnp.zeros, ("router",)),
        (moe.num_experts,),
        jnp.float32,
    ).value
    logits = jnp.matmul(
        x.astype(jnp.float32),
        kernel.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    scores = jax.nn.sigmoid(logits)
    routing = balancing.route(scores, bias, moe.num_experts_per_token)
    if stats.wanted(self, "router_stats"):
      self._sow(scores, bias, routing, token_mask)
    return routing

  def _sow(self, scores, bias, routing, token_mask):
    moe = self.config.moe
    counts = balancing.expert_counts(
        routing.expert_indices, moe.num_experts, token_mask
    )
    stats.sow(self, "router_stats", "counts", counts)
    if moe.balancing == "quantile":
      histogram = balancing.margin_histogram(
          scores, routing.cutoff, bias,
          num_bins=moe.histogram_bins, token_mask=token_mask,
      )  # fmt: skip
      stats.sow(self, "router_stats", "histogram", histogram)
    if moe.balancing == "switch_loss":
      loss = balancing.switch_loss(
          scores, routing.expert_indices,
          weight=moe.switch_loss_weight, token_mask=token_mask,
      )  # fmt: skip
      stats.sow(self, "router_stats", "switch_loss", loss)
