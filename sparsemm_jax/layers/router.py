"""The router: which experts a token visits, in fp32 throughout."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float

from sparsemm_jax import balancing
from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.layers import stats
from sparsemm_jax.parallel import expert


class Router(nn.Module):
  """Top-k of sigmoid(W_r x) + bias; the weights leave the bias out.

  Reads `bias` [E] of the collection router_state and never writes it. Sows
  router_stats: what the balancing rule of the config needs, and counts [S, E],
  each shard of the tokens by itself (see `expert.map_tokens`).

  Source: Kimi K3 report, eq. 13, arXiv:2607.24653.
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(
      self, x: Float[Array, "b t d"], layout: layout_lib.Layout
  ) -> balancing.Routing:
    """Routes [B, T, D] tokens; padding is routed but not counted."""
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
    counted = stats.wanted(self, "router_stats")
    routing, sums = expert.map_tokens(
        functools.partial(_route, moe, counted), (scores, layout.valid), bias
    )
    for name, value in sums.items():
      stats.sow(self, "router_stats", name, value)
    if counted and moe.balancing == "switch_loss":
      loss = balancing.switch_loss(
          scores.reshape(-1, moe.num_experts),
          routing.expert_indices.reshape(-1, moe.num_experts_per_token),
          weight=moe.switch_loss_weight,
          token_mask=layout.valid.reshape(-1),
      )
      stats.sow(self, "router_stats", "switch_loss", loss)
    return routing


def _route(moe, counted, tokens, bias):
  """Routes some tokens, and counts them if `counted`."""
  batch = tokens[0].shape[:2]
  scores, valid = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tokens)
  routing = balancing.route(scores, bias, moe.num_experts_per_token)
  sums = {}
  if counted:
    sums["counts"] = balancing.expert_counts(
        routing.expert_indices, moe.num_experts, valid
    )
    if moe.balancing == "quantile":
      sums["histogram"] = balancing.margin_histogram(
          scores, routing.cutoff, bias,
          num_bins=moe.histogram_bins, token_mask=valid,
      )  # fmt: skip
  routing = jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), routing)
  return routing, sums
