"""Attention over tokens that the mesh axis `context` spreads."""

import math

import jax
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from pallas_kernels import kda
from pallas_kernels.kda import context
from sparsemm_jax.parallel import mesh as mesh_lib


def fused_kda(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t h k"],
    v: Float[Array, "b t hv v"],
    z: Float[Array, "b t hv k"],
    beta_logits: Float[Array, "b t hv"],
    a_log: Float[Array, " hv"],
    dt_bias: Float[Array, "hv k"],
    *,
    lower_bound: float,
    segment_ids: Int[Array, "b t"],
    implementation: str | None,
) -> Float[Array, "b t hv v"]:
  """Runs `kda.fused_kda` from a zero state, spread as the mesh in use says.

  With several devices along `context`, each computes its own tokens and one
  all-gather passes the states on. A sequence that does not divide over them
  is computed whole. The rest of a layer needs nothing like it: XLA exchanges
  the short convolution's last tokens and gathers MLA's keys and values itself.

  Args:
    q: [B, T, H, K], as in `kda.fused_kda`, like the arguments below.
    k: see q.
    v: see q.
    z: see q.
    beta_logits: see q.
    a_log: see q.
    dt_bias: see q.
    lower_bound: see q.
    segment_ids: see q.
    implementation: see q.

  Returns:
    [B, T, HV, V] in v's dtype.
  """
  options = dict(lower_bound=lower_bound, implementation=implementation)
  arrays = (q, k, v, z, beta_logits, a_log, dt_bias)
  mesh = jax.sharding.get_abstract_mesh()
  shards = mesh.shape.get("context", 1)
  if shards == 1 or q.shape[1] % shards:
    return kda.fused_kda(*arrays, segment_ids=segment_ids, **options)[0]

  def local(*arrays):
    *arrays, ids = arrays
    return context.fused_kda(*arrays, segment_ids=ids, **options)[0]

  def divides(size, axes):
    return size % math.prod(mesh.shape[axis] for axis in axes) == 0

  rows = mesh_lib.ROW_AXES if divides(q.shape[0], mesh_lib.ROW_AXES) else None
  heads = "tensor" if divides(q.shape[2], ("tensor",)) else None
  tokens = jax.P(rows, "context")
  by_head = jax.P(rows, "context", heads)
  return jax.shard_map(
      local,
      in_specs=(by_head,) * 5 + (jax.P(heads),) * 2 + (tokens,),
      out_specs=by_head,
      axis_names=set(mesh.auto_axes),
      check_vma=False,  # Pallas kernels cannot say how they vary.
  )(*arrays, segment_ids)
