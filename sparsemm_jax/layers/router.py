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

  Reads `bias` [E] of the collection router_state and never writes it; `pool`
  [E, bins] beside it is for quantile_pooled alone. Sows router_stats: counts
  [S, E] and what the balancing rule of the config needs, each shard of the
  tokens by itself (see `expert.map_tokens`).

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
    bias = self._balancing_state("bias", moe.num_experts)
    if moe.balancing == "quantile_pooled":
      self._balancing_state("pool", moe.num_experts, moe.histogram_bins)
    logits = jnp.matmul(
        x.astype(jnp.float32),
        kernel.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    scores = jax.nn.sigmoid(logits)
    price = _price(moe, scores, layout)
    counted = stats.wanted(self, "router_stats")
    routing, sums = expert.map_tokens(
        functools.partial(_route, moe, counted),
        (scores, layout.valid, price),
        bias,
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

  def _balancing_state(self, name, *shape):
    names = ("router",) + (None,) * (len(shape) - 1)
    init = nn.with_logical_partitioning(jnp.zeros, names)
    return self.variable("router_state", name, init, shape, jnp.float32).value


def margin_range(
    moe: config_lib.MoeConfig, bias: Float[Array, " e"]
) -> balancing.Range:
  """Returns what the bins of the rule's margin histogram cover."""
  if moe.balancing == "quantile_pooled":
    return balancing.POOLED_RANGE
  priced = moe.balancing == "sequence_quantile"
  spread = 1.0 + (moe.sequence_weight if priced else 0.0)
  return balancing.adaptive_range(bias, spread)


def _price(moe, scores, layout):
  """What is taken off the scores before selection, or None."""
  if moe.balancing != "sequence_quantile":
    return None
  if layout.lengths is not None:
    raise config_lib.ConfigError(
        "MoeConfig.balancing='sequence_quantile' selects by all tokens of a"
        " document so far, which the cache of decode does not hold"
    )
  return moe.sequence_weight * balancing.sequence_price(
      scores,
      layout.segments,
      layout.positions,
      num_experts_per_token=moe.num_experts_per_token,
      num_bins=moe.sequence_bins,
      decay=moe.sequence_decay,
  )


def _route(moe, counted, tokens, bias):
  """Routes some tokens, and counts them if `counted`."""
  batch = tokens[0].shape[:2]
  scores, valid, price = jax.tree.map(
      lambda x: x.reshape(-1, *x.shape[2:]), tokens
  )
  routing = balancing.route(scores, bias, moe.num_experts_per_token, price)
  sums = {}
  if counted:
    sums["counts"] = balancing.expert_counts(
        routing.expert_indices, moe.num_experts, valid
    )
  if counted and "quantile" in moe.balancing:
    sums["histogram"] = balancing.margin_histogram(
        scores if price is None else scores - price, routing.cutoff, bias,
        num_bins=moe.histogram_bins, token_mask=valid,
        margin_range=margin_range(moe, bias),
    )  # fmt: skip
  routing = jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), routing)
  return routing, sums
