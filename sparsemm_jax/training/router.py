"""What a step does with the router statistics that the model sows.

`router_state` holds a `bias` per MoE layer and `router_stats` the counts of
the same layer at the same path, those of each shard of the tokens apart;
layers that the model scans are stacked on a leading axis.
"""

import functools
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int
import numpy as np

from sparsemm_jax import balancing
from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import router as router_layer
from sparsemm_jax.layers import stats


def total(router_stats: Any) -> Any:
  """Adds up the shards of the tokens: one all-reduce for all layers' counts.

  Args:
    router_stats: as the model sows them, or sums of such over micro-batches;
      integers have an axis of shards, after that of scanned layers.

  Returns:
    The same tree without that axis.
  """
  flat = traverse_util.flatten_dict(router_stats)
  parts = {
      path: jnp.moveaxis(value, -1 - _RANKS[path[-1]], 0)
      for path, value in flat.items()
      if path[-1] in _RANKS
  }
  if not parts:
    return router_stats
  shards = next(iter(parts.values())).shape[0]
  sums = jnp.sum(
      jnp.concatenate(
          [part.reshape(shards, -1) for part in parts.values()], axis=1
      ),
      axis=0,
  )
  sizes = [part[0].size for part in parts.values()]
  pieces = jnp.split(sums, np.cumsum(sizes)[:-1])
  for (path, part), piece in zip(parts.items(), pieces, strict=True):
    flat[path] = piece.reshape(part.shape[1:])
  return traverse_util.unflatten_dict(flat)


# Axes of one layer's integers, without that of shards.
_RANKS = {"counts": 1, "histogram": 2, "dropped": 0}


def update(
    router_state: Any,
    router_stats: Any,
    config: config_lib.MoeConfig,
    *,
    step: Int[Array, ""] | int,
) -> Any:
  """Returns the state to use from the next step on.

  Args:
    router_state: tree with a `bias` fp32 [..., E] per MoE layer and, for
      quantile_pooled, a `pool` fp32 [..., E, bins] beside it.
    router_stats: the `total` of one whole step: `counts` [..., E] and, for the
      quantile rules, `histogram` [..., E, bins].
    config: says which rule, and from which step on nothing changes.
    step: optimizer steps taken before this one.
  """
  if config.balancing not in _RULES:
    return router_state
  state = traverse_util.flatten_dict(router_state)
  sums = traverse_util.flatten_dict(router_stats)
  result = dict(state)
  for path, bias in state.items():
    *layer, name = path
    if name != "bias":
      continue
    rule = functools.partial(_RULES[config.balancing], config)
    for _ in range(bias.ndim - 1):
      rule = jax.vmap(rule)
    new = rule(_of_layer(state, layer), _of_layer(sums, layer))
    for name, value in new.items():
      result[(*layer, name)] = value
  if config.freeze_step is not None:
    moves = step < config.freeze_step
    result = jax.tree.map(lambda a, b: jnp.where(moves, a, b), result, state)
  return traverse_util.unflatten_dict(result)


def _of_layer(flat, layer):
  """What stands at one layer's path, by name."""
  return {path[-1]: v for path, v in flat.items() if list(path[:-1]) == layer}


def _quantile(config, state, sums):
  bias = balancing.quantile_bias(
      sums["histogram"], state["bias"],
      num_experts_per_token=config.num_experts_per_token,
      margin_range=router_layer.margin_range(config, state["bias"]),
  )  # fmt: skip
  return {"bias": bias}


def _quantile_pooled(config, state, sums):
  pool, bias = balancing.pooled_quantile_bias(
      state["pool"], sums["histogram"], state["bias"],
      num_experts_per_token=config.num_experts_per_token,
      decay=config.pool_decay,
  )  # fmt: skip
  return {"pool": pool, "bias": bias}


def _sign(config, state, sums):
  bias = balancing.sign_bias(
      sums["counts"], state["bias"], step_size=config.sign_step_size
  )
  return {"bias": bias}


# (config, a layer's state, its sums) -> what changes of its state.
_RULES = {
    "quantile": _quantile,
    "sequence_quantile": _quantile,
    "quantile_pooled": _quantile_pooled,
    "sign": _sign,
}


def auxiliary_loss(router_stats: Any) -> Float[Array, ""]:
  """Sums the layers' switch losses; zero for the other rules."""
  sums = traverse_util.flatten_dict(router_stats)
  terms = [v for path, v in sums.items() if path[-1] == "switch_loss"]
  return sum((jnp.sum(term) for term in terms), jnp.zeros((), jnp.float32))


def counts_by_layer(router_stats: Any) -> Int[Array, "layers experts"]:
  """Stacks the tokens per expert of all MoE layers, in order of depth.

  Args:
    router_stats: the `total` of a step.
  """
  counts = [
      value
      for _, path, value in stats.by_depth(router_stats)
      if path[-1] == "counts"
  ]
  return jnp.stack(counts) if counts else jnp.zeros((0, 0), jnp.int32)


def metrics(router_stats: Any) -> dict[str, Array]:
  """Returns the load of every MoE layer.

  Args:
    router_stats: the `total` of one whole step.

  Returns:
    `router/max_violation` [layers] fp32; `router/dropped` int32, visits of all
    layers that were left out; and on a mesh with several expert ranks
    `router/rank_violation` [layers] fp32, the fullest rank's rows over the
    mean, less 1: what MoeConfig.row_budget has to leave room for.
  """
  counts = counts_by_layer(router_stats)
  if not counts.size:
    return {}
  sums = traverse_util.flatten_dict(router_stats)
  dropped = [v for path, v in sums.items() if path[-1] == "dropped"]
  violation = jax.vmap(balancing.max_violation)
  result = {
      "router/max_violation": violation(counts),
      "router/dropped": sum(jnp.sum(value) for value in dropped),
  }
  ranks = jax.sharding.get_abstract_mesh().shape.get("expert", 1)
  if ranks > 1 and counts.shape[1] % ranks == 0:
    by_rank = counts.reshape(counts.shape[0], ranks, -1).sum(axis=2)
    result["router/rank_violation"] = violation(by_rank)
  return result
