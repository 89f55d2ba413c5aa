"""Sequences spread over devices: the same functions inside a shard_map.

Over one shard's tokens the state is an affine function of the state that comes
in, and so is every output,

  S_out = M S_in + A        out_t = a_t + r_t S_in

A shard computes A and a_t from its values and a zero state, M and r_t from
zero values and the state I, without waiting for anyone. One all-gather of
(M, A) later each shard folds the pairs of the shards before it into its own
S_in, and adds r_t S_in to what it has: no second pass over the tokens. The
gradient is that of these lines: the all-gather's is one reduce-scatter.

Source: flash-linear-attention, fla/ops/cp (its scheme folds the same pairs and
then runs the tokens again).
"""

from collections.abc import Callable
import functools

import jax
from jax import numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from pallas_kernels import dispatch
from pallas_kernels.kda import api
from pallas_kernels.kda import checks
from pallas_kernels.kda import gate
from pallas_kernels.kda import intra_chunk


def chunk_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    axis_name: str = "context",
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: dispatch.Implementation = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """Computes `api.chunk_kda` of a sequence whose tokens axis_name spreads.

  Call it inside `jax.shard_map(..., check_vma=False)`. Arguments with a T are
  this device's tokens; shard i holds those before shard i + 1's. A segment
  goes on in the next shard if the next token that is not padding has its id.

  Args:
    q: [B, T, H, K], as in `api.chunk_kda`, like the arguments below.
    k: see q.
    v: see q.
    g: see q.
    beta: see q.
    axis_name: the mesh axis that spreads the tokens.
    scale: see q.
    initial_state: [B, HV, K, V] fp32 before the first shard's first token, the
      same on every shard; zero by default.
    segment_ids: [B, T] integers of at most 32 bits.
    implementation: see q.

  Returns:
    out: [B, T, HV, V] of this shard, in v's dtype.
    final_state: [B, HV, K, V] fp32 after the last shard's last token, the same
      on every shard.
  """
  checks.check_tokens(q, k, v, beta, initial_state, segment_ids, g=g)

  def local(values, state):
    return api.chunk_kda(
        q, k, values, g, beta,
        scale=scale,
        initial_state=state,
        segment_ids=segment_ids,
        implementation=implementation,
    )  # fmt: skip

  return _join_shards(local, q, v, initial_state, segment_ids, axis_name)


def fused_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    z: Float[Array, "B T HV K"],
    beta_logits: Float[Array, "B T HV"],
    a_log: Float[Array, " HV"],
    dt_bias: Float[Array, "HV K"],
    *,
    axis_name: str = "context",
    lower_bound: float = -5.0,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: dispatch.Implementation = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """Computes `api.fused_kda` of a sequence whose tokens axis_name spreads.

  Args:
    q: [B, T, H, K], as in `api.fused_kda`, like the arguments below.
    k: see q.
    v: see q.
    z: see q.
    beta_logits: see q.
    a_log: see q; the same on every shard.
    dt_bias: see q; the same on every shard.
    axis_name: as in `chunk_kda`, like the arguments below.
    lower_bound: as in `api.fused_kda`.
    scale: see axis_name.
    initial_state: see axis_name.
    segment_ids: see axis_name.
    implementation: see axis_name.

  Returns:
    out: [B, T, HV, V] of this shard, in v's dtype.
    final_state: [B, HV, K, V] fp32 after the last shard, on every shard.
  """
  checks.check_tokens(q, k, v, beta_logits, initial_state, segment_ids, z=z)

  def local(values, state):
    return api.fused_kda(
        q, k, values, z, beta_logits, a_log, dt_bias,
        lower_bound=lower_bound,
        scale=scale,
        initial_state=state,
        segment_ids=segment_ids,
        implementation=implementation,
    )  # fmt: skip

  return _join_shards(local, q, v, initial_state, segment_ids, axis_name)


def _join_shards(
    local: Callable[..., tuple[Array, Array]],
    q: Array,
    v: Array,
    initial_state: Array | None,
    segment_ids: Array | None,
    axis_name: str,
) -> tuple[Array, Array]:
  """Adds what the earlier shards contribute to a shard's own output.

  Args:
    local: (values [B, T, HV, *], state [B, HV, K, *] or None) -> (out, final
      state) over this shard's tokens.
    q: [B, T, H, K].
    v: [B, T, HV, V].
    initial_state: [B, HV, K, V] or None.
    segment_ids: [B, T] or None.
    axis_name: the mesh axis.
  """
  key_width = q.shape[-1]
  state = checks.initial_state_or_zero(q, v, initial_state)
  out, added = local(v, None)
  identity = jnp.eye(key_width, dtype=state.dtype)
  transition_shape = (*state.shape[:3], key_width)
  reads, transition = local(
      jnp.zeros((*v.shape[:3], key_width), v.dtype),
      jnp.broadcast_to(identity, transition_shape),
  )
  parts = [transition, added, _segment_ends(segment_ids, v.shape, state.dtype)]
  transitions, added, ends = _gather(parts, axis_name)
  before, final_state = _fold(transitions, added, ends, state)
  mine = jax.lax.dynamic_index_in_dim(
      before, jax.lax.axis_index(axis_name), keepdims=False
  )
  operand = gate.operand_dtype(q, v)
  carried = intra_chunk.dot("bthk,bhkv->bthv", reads, mine, operand)
  return (out + carried).astype(v.dtype), final_state


def _segment_ends(segment_ids, shape, dtype):
  """Returns [B, 5]: whether a token is valid, its first and its last id.

  Each id is two halves of 16 bits, which are exact in floating point, so that
  they travel with the states. Without segments: one segment everywhere.
  """
  if segment_ids is None or not segment_ids.size:
    valid = segment_ids is None
    return jnp.full((shape[0], 5), valid, dtype)
  valid = segment_ids != 0
  first = jnp.argmax(valid, axis=1)
  last = valid.shape[1] - 1 - jnp.argmax(valid[:, ::-1], axis=1)
  columns = [jnp.any(valid, axis=1)]
  for place in (first, last):
    ids = jnp.take_along_axis(segment_ids, place[:, None], axis=1)[:, 0]
    ids = ids.astype(jnp.int32)
    columns += [ids >> 16, ids & 0xFFFF]
  return jnp.stack([column.astype(dtype) for column in columns], axis=1)


def _gather(parts, axis_name):
  """All-gathers arrays [B, ...] of one dtype at once, as [shards, B, ...]."""
  flat = [x.reshape(x.shape[0], -1) for x in parts]
  everyone = jax.lax.all_gather(jnp.concatenate(flat, axis=1), axis_name)
  starts = [0]
  for x in flat:
    starts.append(starts[-1] + x.shape[1])
  return [
      everyone[..., start:end].reshape(-1, *x.shape)
      for x, start, end in zip(parts, starts[:-1], starts[1:], strict=True)
  ]


def _fold(transitions, added, ends, initial_state):
  """Runs the state through all shards.

  Args:
    transitions: [N, B, HV, K, K] M of each shard.
    added: [N, B, HV, K, V] A of each shard.
    ends: [N, B, 5], see _segment_ends.
    initial_state: [B, HV, K, V].

  Returns:
    The states [N, B, HV, K, V] that each shard's first segment starts from,
    and the state [B, HV, K, V] after the last shard.
  """
  dot = functools.partial(
      jnp.einsum, "bhij,bhjv->bhiv", precision=jax.lax.Precision.HIGHEST
  )

  def shard(carry, x):
    state, seen, last = carry
    transition, added, ends = x
    valid, first = ends[:, 0] > 0, ends[:, 1:3]
    # A shard of padding has the transition I: it passes the state on.
    goes_on = ~valid | ~seen | jnp.all(first == last, axis=1)
    state = jnp.where(goes_on[:, None, None, None], state, 0.0)
    after = dot(transition, state) + added
    last = jnp.where(valid[:, None], ends[:, 3:], last)
    return (after, seen | valid, last), state

  batch = initial_state.shape[0]
  start = (
      initial_state,
      jnp.zeros(batch, bool),
      jnp.zeros((batch, 2), ends.dtype),
  )
  (state, _, _), before = jax.lax.scan(shard, start, (transitions, added, ends))
  return before, state
