"""Experts spread over the mesh: rows of latent width travel, weights stay.

Each rank along the axis `expert` holds E / R consecutive experts. Its tokens
reach the experts in one of two forms:

  gather      every rank gathers the tokens of all R ranks, computes the visits
              to its own experts, and a reduce-scatter sums what they return;
              each token travels R - 1 times, so best where R < A.
  all_to_all  each visit travels to its expert's rank and back: A (R - 1) / R
              times a token, however many ranks there are.

Either way a token's sum over its experts is complete, in fp32, before the norm
that follows. A rank computes a static number of rows at a time, the budget;
visits beyond it wait for a further pass, which only then takes place.
"""

from collections.abc import Callable
import functools
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
    u [B, T, L] fp32; and the visits left out, counted at the shard of their
    token: 0 unless config.drop_overflow is set.
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
    exchange = _EXCHANGES[plan.form]
    serve = functools.partial(exchange, compute, plan)
    kept, left = _within_budget(plan, indices)
    u = serve(weights, z, combine_weights, kept)
    dropped = jnp.zeros((), jnp.int32)
    if plan.budget is not None and config.drop_overflow:
      dropped = _visits(plan, left)
    elif plan.budget is not None:
      u += _further_passes(serve, plan, (weights, z, combine_weights), left)
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
    if self.ranks == 1:
      return "stay"
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
    """Rows that one rank computes at a time; None: whatever comes."""
    if self.config.row_budget is None or self.ranks == 1:
      return None
    rows = math.ceil(self.config.row_budget * self.tokens * self.per_token)
    return rows if rows < self.ranks * self.most_rows else None

  @property
  def rows(self) -> int:
    """Rows in a rank's buffer."""
    return self.budget or self.ranks * self.most_rows


def _visits(plan, indices):
  """How many visits these are; one to no expert is none."""
  return jnp.sum(indices < plan.config.num_experts, dtype=jnp.int32)


def _within_budget(plan, indices):
  """Splits visits into those that the ranks have rows for, and the others.

  Every source may send each rank the same share of what it would; within its
  share a token's best experts go first.
  """
  none = plan.config.num_experts
  if plan.budget is None:
    return indices, jnp.full_like(indices, none)
  owner = (indices // plan.local_experts).T.reshape(-1)  # best experts first
  to_rank = owner[:, None] == jnp.arange(plan.ranks)[None]
  place = jnp.cumsum(to_rank, axis=0, dtype=jnp.int32)  # from 1
  wanted = jax.lax.all_gather(place[-1], "expert")  # [source, owner]
  upto = jnp.cumsum(wanted, axis=0)
  total = upto[-1:]
  granted = jnp.floor(upto * (plan.budget / jnp.maximum(total, 1)))
  granted = jnp.minimum(granted.astype(jnp.int32), plan.budget)
  granted = jnp.where(upto == total, plan.budget, granted)  # whatever rounding
  granted = jnp.where(total > plan.budget, granted, upto)
  granted = jnp.diff(granted, axis=0, prepend=0)[jax.lax.axis_index("expert")]
  # A visit to no expert has the owner R, at least, and takes no place.
  kept = jnp.any(to_rank & (place <= granted[None]), axis=1)
  kept = kept.reshape(indices.shape[::-1]).T
  return jnp.where(kept, indices, none), jnp.where(kept, none, indices)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _further_passes(serve, plan, args, left):
  """Sums serve(*args, visits) over the visits left, a budget at a time.

  Nothing runs if nothing is left, and nothing is kept for the gradient, which
  goes through the same passes once more.
  """
  add = lambda u, kept: u + serve(*args, kept)
  zeros = jnp.zeros(args[1].shape, jnp.float32)
  return _while_visits_are_left(plan, add, zeros, left)


def _while_visits_are_left(plan, add, total, left):
  """total = add(total, visits) until every rank of the exchange is done."""

  def serve_some(state):
    total, left, _ = state
    kept, left = _within_budget(plan, left)
    return add(total, kept), left, number(left)

  number = lambda left: jax.lax.psum(_visits(plan, left), "expert")
  state = (total, left, number(left))
  return jax.lax.while_loop(lambda state: state[2] > 0, serve_some, state)[0]


def _further_passes_fwd(serve, plan, args, left):
  return _further_passes(serve, plan, args, left), (args, left)


def _further_passes_bwd(serve, plan, residuals, d_u):
  args, left = residuals

  def add(grads, kept):
    _, backward = jax.vjp(lambda *args: serve(*args, kept), *args)
    return jax.tree.map(jnp.add, grads, backward(d_u))

  zeros = jax.tree.map(jnp.zeros_like, args)
  return _while_visits_are_left(plan, add, zeros, left), None


_further_passes.defvjp(_further_passes_fwd, _further_passes_bwd)


def _stay(compute, plan, weights, z, combine_weights, indices):
  """u of these tokens, from all experts or from those that are here."""
  visits = rows_lib.sort_by_expert(indices, plan.local_experts, plan.rows)
  out = compute(weights, rows_lib.to_experts(z, visits), visits.group_sizes)
  return rows_lib.to_tokens(out, combine_weights, visits)


def _gather(compute, plan, weights, z, combine_weights, indices):
  """Tokens go to every rank, which adds its experts' part of u."""
  z, indices, combine_weights = (
      jax.lax.all_gather(x, "expert", tiled=True)
      for x in (z, indices, combine_weights)
  )
  indices -= jax.lax.axis_index("expert") * plan.local_experts
  u = _stay(compute, plan, weights, z, combine_weights, indices)
  return jax.lax.psum_scatter(u, "expert", tiled=True)


def _all_to_all(compute, plan, weights, z, combine_weights, indices):
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


_EXCHANGES = {"stay": _stay, "gather": _gather, "all_to_all": _all_to_all}


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
  """How the rules of the parameters spread the experts' weights.

  Not over stages: what one stage computes, it has whole.
  """
  boxed = {
      name: nn.LogicallyPartitioned(weight, names[name])
      for name, weight in weights.items()
  }
  shardings = rules.shardings(mesh, boxed)
  keep = lambda part: tuple(a for a in _axes(part) if a != "stage") or None
  return {name: P(*map(keep, s.spec)) for name, s in shardings.items()}


def _whole_matrices(weight, spec):
  """Gathers what fsdp has spread: these experts' matrices, no others'."""
  for axis, part in enumerate(spec):
    if "fsdp" in _axes(part):
      weight = jax.lax.all_gather(weight, "fsdp", axis=axis, tiled=True)
  return weight


def _axes(part):
  """The mesh axes in one entry of a PartitionSpec."""
  return () if part is None else part if isinstance(part, tuple) else (part,)
