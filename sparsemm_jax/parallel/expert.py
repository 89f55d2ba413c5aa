"""Experts spread over the mesh: rows of latent width travel, weights stay.

Each rank along the axis `expert` holds E / R consecutive experts. Its tokens
reach the experts in one of two forms:

  gather      every rank gathers the tokens of all R ranks, computes the visits
              to its own experts, and a reduce-scatter sums what they return;
              each token travels R - 1 times, so best where R < A.
  all_to_all  each visit travels to its expert's rank and back: A (R - 1) / R
              times a token, however many ranks there are.

Either way a token's sum over its experts is complete, in fp32, before the norm
that follows. Rows per rank are static: see MoeConfig.row_budget.
"""

from collections.abc import Callable
import math
from typing import Any
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

from sparsemm_jax import balancing
from sparsemm_jax import config as config_lib
from sparsemm_jax.parallel import mesh as mesh_lib
from sparsemm_jax.parallel import ragged
from sparsemm_jax.parallel import rows as rows_lib
from sparsemm_jax.parallel import rules

_WHOLE = P()
Weights = dict[str, Array]
Compute = Callable[[Weights, Array, Array], Array]


def map_tokens(
    function: Callable[..., tuple[Any, Any]],
    tokens: Any,
    others: Any = (),
    other_specs: Any = _WHOLE,
    *,
    check_vma: bool = True,
) -> tuple[Any, Any]:
  """Calls function(tokens, others) on each shard of the tokens.

  Args:
    function: returns a tree of arrays [B, T, ...] and one of sums over the
      tokens it was given.
    tokens: tree of arrays [B, T, ...].
    others: tree of arrays without tokens.
    other_specs: how those are spread; by default not at all.
    check_vma: see `jax.shard_map`.

  Returns:
    The first tree, and the second with an axis of shards in front: adding up
    is left to the caller, who may have more than one step and layer to add.
  """

  def shard(tokens, others):
    per_token, sums = function(tokens, others)
    return per_token, jax.tree.map(lambda x: x[None], sums)

  mesh = _mesh()
  if mesh is None:
    return shard(tokens, others)
  spec = _token_spec(mesh, jax.tree.leaves(tokens)[0].shape)
  axes = tuple(a for part in spec for a in _axes(part))
  return jax.shard_map(
      shard,
      in_specs=(spec, other_specs),
      out_specs=(spec, P(axes)),
      axis_names=set(mesh.auto_axes),
      check_vma=check_vma,
  )(tokens, others)


def run_experts(
    compute: Compute,
    weights: Weights,
    names: dict[str, tuple[str, ...]],
    z: Float[Array, "b t l"],
    routing: balancing.Routing,
    valid: Bool[Array, "b t"],
    config: config_lib.MoeConfig,
) -> tuple[Float[Array, "b t l"], Int[Array, " shards"]]:
  """Sends each token to its experts, and sums what they return.

  u = sum_a combine_weights[a] E_{expert_indices[a]}(z); 0 at padding, which
  visits no expert.

  Args:
    compute: (weights of some experts, rows [M, L] sorted by expert, their
      group sizes) -> [M, L].
    weights: arrays of E experts each.
    names: their logical axes, which say how they are spread.
    z: [B, T, L] in the compute dtype.
    routing: [B, T, A] each.
    valid: [B, T] False at padding.
    config: number of experts, exchange, row budget.

  Returns:
    u [B, T, L] fp32; and the visits that found no row, counted at the shard
    of their token: 0 unless config.row_budget was too small.
  """
  mesh = _mesh()
  specs = {} if mesh is None else _weight_specs(mesh, weights, names)
  spread = {axis for spec in specs.values() for p in spec for axis in _axes(p)}
  ranks = mesh.shape["expert"] if "expert" in spread else 1

  def shard(tokens, weights):
    z, indices, combine_weights, valid = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:]), tokens
    )
    batch = tokens[0].shape[:2]
    weights = {
        name: _whole_matrices(weight, specs.get(name, ()))
        for name, weight in weights.items()
    }
    indices = jnp.where(valid[:, None], indices, config.num_experts)
    plan = _Plan(config, ranks, *indices.shape)
    indices, dropped = _within_budget(indices, plan)
    if ranks == 1:
      exchange = _stay
    elif plan.form == "gather":
      exchange = _gather
    else:
      exchange = _all_to_all
    u = exchange(compute, weights, z, indices, combine_weights, plan)
    if "tensor" in spread:  # each rank had a part of the experts' hidden width
      u = jax.lax.psum(u, "tensor")
    return u.reshape(*batch, -1), dropped

  tokens = (z, routing.expert_indices, routing.combine_weights, valid)
  # The scans inside some grouped products start from unvarying zeros.
  return map_tokens(shard, tokens, weights, specs, check_vma=False)


class _Plan(NamedTuple):
  """The static sizes of one exchange."""

  config: config_lib.MoeConfig
  ranks: int  # R
  tokens: int  # g of one rank
  per_token: int  # A

  @property
  def form(self) -> str:
    default = "gather" if self.ranks < self.per_token else "all_to_all"
    return self.config.exchange or default

  @property
  def local_experts(self) -> int:
    return self.config.num_experts // self.ranks

  @property
  def most_rows(self) -> int:
    """Rows that one rank can send to one other."""
    return self.tokens * min(self.per_token, self.local_experts)

  @property
  def budget(self) -> int | None:
    """Rows that one rank computes at most; None: whatever comes."""
    if self.config.row_budget is None or self.ranks == 1:
      return None
    rows = math.ceil(self.config.row_budget * self.tokens * self.per_token)
    return rows if rows < self.ranks * self.most_rows else None

  @property
  def rows(self) -> int:
    """Rows in a rank's buffer."""
    return self.budget or self.ranks * self.most_rows


def _within_budget(indices, plan):
  """Takes out the visits that no rank has a row for, and counts them.

  Every source may send each rank the same share of what it would; within its
  share a token's best experts go first.
  """
  if plan.budget is None:
    return indices, jnp.zeros((), jnp.int32)
  owner = (indices // plan.local_experts).T.reshape(-1)  # best experts first
  to_rank = owner[:, None] == jnp.arange(plan.ranks)[None]
  place = jnp.cumsum(to_rank, axis=0, dtype=jnp.int32)  # from 1
  wanted = jax.lax.all_gather(place[-1], "expert")  # [source, owner]
  upto = jnp.cumsum(wanted, axis=0)
  share = plan.budget / jnp.maximum(upto[-1:], plan.budget)
  granted = jnp.minimum(jnp.floor(upto * share), plan.budget).astype(jnp.int32)
  granted = jnp.where(upto[-1:] > plan.budget, granted, upto)  # exact past 2^24
  granted = jnp.diff(granted, axis=0, prepend=0)[jax.lax.axis_index("expert")]
  # A visit to no expert has the owner R, at least, and takes no place.
  kept = jnp.any(to_rank & (place <= granted[None]), axis=1)
  dropped = jnp.sum(place[-1]) - jnp.sum(kept, dtype=jnp.int32)
  kept = kept.reshape(indices.shape[::-1]).T
  return jnp.where(kept, indices, plan.config.num_experts), dropped


def _stay(compute, weights, z, indices, combine_weights, plan):
  """u of these tokens, from all experts or from those that are here."""
  visits = rows_lib.sort_by_expert(indices, plan.local_experts, plan.rows)
  out = compute(weights, rows_lib.to_experts(z, visits), visits.group_sizes)
  return rows_lib.to_tokens(out, combine_weights, visits)


def _gather(compute, weights, z, indices, combine_weights, plan):
  """Tokens go to every rank, which adds its experts' part of u."""
  z, indices, combine_weights = (
      jax.lax.all_gather(x, "expert", tiled=True)
      for x in (z, indices, combine_weights)
  )
  indices -= jax.lax.axis_index("expert") * plan.local_experts
  u = _stay(compute, weights, z, indices, combine_weights, plan)
  return jax.lax.psum_scatter(u, "expert", tiled=True)


def _all_to_all(compute, weights, z, indices, combine_weights, plan):
  """Visits go to their expert's rank, and what it returns comes back."""
  visits = rows_lib.sort_by_expert(indices, plan.config.num_experts)
  counts = jax.lax.all_gather(visits.group_sizes, "expert")
  counts = counts.reshape(plan.ranks, plan.ranks, -1)  # source, owner, expert
  there = ragged.route(jnp.sum(counts, axis=2), "expert")
  at_most = min(plan.rows, plan.most_rows)

  rows = rows_lib.to_experts(z, visits)
  received = ragged.exchange(rows, there, "expert", plan.rows, at_most)
  # They stand by source, those of one source by expert.
  mine = counts[:, jax.lax.axis_index("expert")].reshape(-1)
  segment = jnp.searchsorted(
      jnp.cumsum(mine), jnp.arange(plan.rows), side="right"
  )
  local = jnp.where(
      segment < mine.size, segment % plan.local_experts, plan.local_experts
  )
  regroup = rows_lib.sort_by_expert(local[:, None], plan.local_experts)
  out = compute(
      weights, rows_lib.to_experts(received, regroup), regroup.group_sizes
  )
  out = rows_lib.to_experts(out, regroup.inverse)
  out = ragged.exchange(out, there.back, "expert", rows.shape[0], at_most)
  return rows_lib.to_tokens(out, combine_weights, visits)


def _mesh():
  """The current mesh if there are several devices to spread anything over."""
  mesh = jax.sharding.get_abstract_mesh()
  return None if all(mesh.shape[a] == 1 for a in mesh.auto_axes) else mesh


def _token_spec(mesh, shape):
  """How [B, T, ...] is spread: over as many of its axes as divide it."""
  rows, left = [], shape[0]
  for axis in mesh_lib.ROW_AXES:
    if axis in mesh.auto_axes and left % mesh.shape[axis] == 0:
      rows.append(axis)
      left //= mesh.shape[axis]
  length = None if shape[1] % mesh.shape["context"] else "context"
  return P(tuple(rows), length)


def _weight_specs(mesh, weights, names):
  """How the rules of the parameters spread the experts' weights."""
  boxed = {
      name: nn.LogicallyPartitioned(weight, names[name])
      for name, weight in weights.items()
  }
  shardings = rules.shardings(mesh, boxed)
  return {name: sharding.spec for name, sharding in shardings.items()}


def _whole_matrices(weight, spec):
  """Gathers what fsdp has spread: these experts' matrices, no others'."""
  for axis, part in enumerate(spec):
    if "fsdp" in _axes(part):
      weight = jax.lax.all_gather(weight, "fsdp", axis=axis, tiled=True)
  return weight


def _axes(part):
  """The mesh axes in one entry of a PartitionSpec."""
  return () if part is None else part if isinstance(part, tuple) else (part,)
