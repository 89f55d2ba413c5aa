"""The Hopper kernels: forward, phase one, backward; see mosaic_gpu."""

import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attn_res import call as call_lib
from pallas_kernels.attn_res import mosaic_gpu_plan as plan_lib
from pallas_kernels.attn_res import mosaic_gpu_ring as ring_lib
from pallas_kernels.attn_res import reference


@functools.partial(jax.jit, static_argnums=0)
def run_forward(call, sources, query, flag, gain, given):
  """Returns h or y [N, D] and s_i and r_i, the scalars [N, 2, 32]."""
  plan = plan_lib.forward(call)
  num_refs = len(sources)
  has_flag = flag is not None
  gains = (ring_lib.parts(plan, gain),) if call.normed else ()
  optional = (*((flag,) if has_flag else ()), *gains)
  if call.given:
    optional = (*optional, given)

  def body(*refs, ring, loaded, staged, kept, sums, meeting=None, **of_norm):
    sources, refs = refs[:num_refs], refs[num_refs:]
    query, *optional, out, scalars = refs
    flag = optional.pop(0) if has_flag else None
    gain = optional.pop(0) if call.normed else None
    given = optional.pop(0) if call.given else None

    def copies(i, k, token, part, target, barrier):
      del k
      ring_lib.copy_source_in(call, sources, i, token, part, target, barrier)

    rows = ring_lib.Ring(plan, copies, ring, loaded)
    rows.start()
    group, part = rows.group, rows.part
    u = plgpu.load(query.at[part], layout=plan.layout, optimized=False)
    use_last = flag[0] if has_flag else None
    norm = ring_lib.Norm(plan, rows, gain, **of_norm) if call.normed else None
    staged, kept, sums = staged.at[rows.thread], kept.at[group], sums.at[group]

    @pl.loop(0, rows.count)
    def _(k):
      kept_here = kept.at[lax.rem(k, 2)]
      given_here = given[rows.token(k)] if call.given else None

      def one(i, carry):
        top, total, mixed = carry
        q = k * plan.items + i
        v = rows.load(q).astype(jnp.float32)
        here = sums.at[lax.rem(q, 2)]
        here.at[0, part][...] = jnp.sum(v * u, axis=1)
        here.at[1, part][...] = jnp.sum(v * v, axis=1)
        ring_lib.meet(plan, meeting, group)
        rows.fetch(q + plan.slots)
        square = ring_lib.add_up(here.at[1], plan.split) / call.width
        inverse_rms = lax.rsqrt(square + call.eps)
        logit = ring_lib.add_up(here.at[0], plan.split) * inverse_rms
        if call.given:
          logit = jnp.where(i == 0, given_here, logit)
          inverse_rms = jnp.where(i == 0, 0.0, inverse_rms)
        if has_flag:
          left_out = (i == call.num_sources - 1) & (use_last == 0)
          logit = jnp.where(left_out, reference.EXCLUDED, logit)

        @pl.when(part == 0)
        def _():
          kept_here[0, i] = logit
          kept_here[1, i] = inverse_rms

        new_top = jnp.maximum(top, logit)
        fade, weight = jnp.exp(top - new_top), jnp.exp(logit - new_top)
        return new_top, total * fade + weight, mixed * fade + v * weight

      start = jnp.float32(-jnp.inf), jnp.float32(0.0), ring_lib.zeros(plan)
      _, total, mixed = lax.fori_loop(0, call.num_sources, one, start)
      mixed = mixed * (1.0 / total)
      if call.normed:
        squares = norm.squares.at[group]
        squares.at[part][...] = jnp.sum(mixed * mixed, axis=1)
        ring_lib.meet(plan, meeting, group)
        square = ring_lib.add_up(squares, plan.split) / call.width
        mixed = mixed * lax.rsqrt(square + call.eps) * norm.gain()
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      plgpu.commit_smem()  # the wait was one thread's
      staged[...] = mixed.astype(call.dtype)
      plgpu.commit_smem()
      token = rows.token(k)
      plgpu.copy_smem_to_gmem(staged, out.at[token, part], commit_group=False)

      @pl.when(part == 0)
      def _():
        plgpu.copy_smem_to_gmem(
            kept_here, scalars.at[token], commit_group=False
        )

      plgpu.commit_smem_to_gmem_group()

    plgpu.wait_smem_to_gmem(0)

  scratch = dict(
      staged=plgpu.SMEM((plan.threads, *plan.row), call.dtype),
      kept=plgpu.SMEM((plan.groups, 2, 2, call_lib.MAX_SOURCES), jnp.float32),
      sums=plgpu.SMEM(
          (plan.groups, 2, 2, plan.split, plan_lib.WARPS), jnp.float32
      ),
      **ring_lib.Norm.scratch(plan),
  )
  tokens = call.tokens
  out_type = [
      jax.ShapeDtypeStruct((tokens, plan.split, *plan.row), call.dtype),
      jax.ShapeDtypeStruct((tokens, 2, call_lib.MAX_SOURCES), jnp.float32),
  ]
  parts = functools.partial(ring_lib.parts, plan)
  mixed, scalars = ring_lib.launch(
      plan,
      body,
      out_type,
      scratch,
      "attn_res_forward",
      (*map(parts, sources), parts(query), *optional),
  )
  # Without it XLA writes fp32 copies for a norm that follows (jax 0.11.2).
  return lax.optimization_barrier(ring_lib.whole(plan, mixed)), scalars


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_combine(call, num_queries, sources, weights):
  """Returns the mixes [Q, N, D] of sources [N, D] by weights [Q, S, ...]."""
  plan = plan_lib.combine(call, num_queries)
  num_refs, num_sources = len(sources), call.num_sources
  length = plan_lib.weights_length(call, num_queries)
  weights = weights.reshape(num_queries * num_sources, call.tokens)
  weights = jnp.pad(weights.T, ((0, 0), (0, length - weights.shape[0])))
  ahead = plan.slots // num_sources + 2  # tokens with weights on the way

  def body(*refs, ring, loaded, kept, kept_loaded, staged, meeting=None):
    del meeting
    sources, (weights, out) = refs[:num_refs], refs[num_refs:]
    thread = lax.axis_index("warpgroup")
    staged = staged.at[thread]

    def weights_of(k):
      at = lax.rem(k, ahead)
      return kept.at[thread, at], kept_loaded.at[thread * ahead + at]

    def copies(i, k, token, part, target, barrier):
      @pl.when(i == 0)
      def _():
        ring_lib.copy_in(weights.at[token], *weights_of(k))

      ring_lib.copy_source_in(call, sources, i, token, part, target, barrier)

    rows = ring_lib.Ring(plan, copies, ring, loaded)
    rows.start()

    @pl.loop(0, rows.count)
    def _(k):
      first, token = k * num_sources, rows.token(k)
      here, ready = weights_of(k)
      plgpu.barrier_wait(ready)

      @pl.loop(0, num_sources)
      def _(i):
        plgpu.barrier_wait(rows.barrier(first + i))

      @pl.loop(0, num_queries)
      def _(query):
        def add(i, mixed):
          slot = rows.slot(first + i)
          v = plgpu.load(slot, layout=plan.layout, optimized=False)
          return mixed + v.astype(jnp.float32) * here[query * num_sources + i]

        mixed = lax.fori_loop(0, num_sources, add, ring_lib.zeros(plan))
        target = staged.at[lax.rem(query, 2)]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        plgpu.commit_smem()  # the wait was one thread's
        target[...] = mixed.astype(call.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(target, out.at[query, token, rows.part])

      plgpu.commit_smem()

      @pl.loop(0, num_sources)
      def _(i):
        rows.fetch(first + i + plan.slots)

      # An odd number of queries would write twice to one place in turn.
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    plgpu.wait_smem_to_gmem(0)

  scratch = dict(
      kept=plgpu.SMEM((plan.threads, ahead, length), jnp.float32),
      kept_loaded=plgpu.Barrier(
          num_arrivals=1, num_barriers=plan.threads * ahead
      ),
      staged=plgpu.SMEM((plan.threads, 2, *plan.row), call.dtype),
  )
  shape = (num_queries, call.tokens, plan.split, *plan.row)
  out = ring_lib.launch(
      plan,
      body,
      jax.ShapeDtypeStruct(shape, call.dtype),
      scratch,
      "attn_res_combine",
      (*(ring_lib.parts(plan, v) for v in sources), weights),
  )
  return ring_lib.whole(plan, out)


@functools.partial(jax.jit, static_argnums=0)
def run_backward(call, sources, query, scalars, gain, d_mixed):
  """Returns dv_i, like the sources, du, dg or None [D] and ds_0 or None [N]."""
  plan = plan_lib.backward(call)
  num_refs, num_sources = len(sources), call.num_sources
  twice = plan.items > num_sources + 1
  ahead = plan.slots // plan.items + 2  # tokens whose scalars are on the way

  gains = (ring_lib.parts(plan, gain),) if call.normed else ()

  def body(
      *refs, ring, loaded, kept, kept_loaded, sums, shares, meeting=None,
      **of_norm,
  ):  # fmt: skip
    sources, refs = refs[:num_refs], refs[num_refs:]
    query, scalars, d_mixed, *refs = refs
    gains, refs = refs[: call.normed], refs[call.normed :]
    d_sources, refs = refs[:num_refs], refs[num_refs:]
    d_vectors, d_given = refs[: 1 + call.normed], refs[1 + call.normed :]

    def copies(item, k, token, part, target, barrier):
      @pl.when(item == 0)
      def _():
        ring_lib.copy_in(d_mixed.at[token, part], target, barrier)
        kept_here, kept_ready = scalars_of(k)
        ring_lib.copy_in(scalars.at[token], kept_here, kept_ready)

      @pl.when(item > 0)
      def _():
        ring_lib.copy_source_in(
            call,
            sources,
            lax.rem(item - 1, num_sources),
            token,
            part,
            target,
            barrier,
        )

    thread = lax.axis_index("warpgroup")

    def scalars_of(k):
      at = lax.rem(k, ahead)
      return kept.at[thread, at], kept_loaded.at[thread * ahead + at]

    rows = ring_lib.Ring(plan, copies, ring, loaded)
    rows.start()
    group, part = rows.group, rows.part
    shares, sums = shares.at[thread], sums.at[group]
    u = plgpu.load(query.at[part], layout=plan.layout, optimized=False)
    norm = ring_lib.Norm(plan, rows, *gains, **of_norm) if call.normed else None

    def one(k, totals):
      first = k * plan.items
      second = first + 1 + (num_sources if twice else 0)
      here = sums.at[lax.rem(k, 2)]
      cotangent = rows.load(first)
      # The last row of the token before is free once it has been copied out.
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      plgpu.commit_smem()

      @pl.when(k > 0)
      def _():
        rows.fetch(first - 1 + plan.slots)

      rows.fetch(first + plan.slots)
      kept_here, kept_ready = scalars_of(k)
      plgpu.barrier_wait(kept_ready)
      warps = pl.ds(part * plan_lib.WARPS, plan_lib.WARPS)
      gradient = cotangent.astype(jnp.float32)
      if call.normed:
        shares.at[0][...] = _softmax(plan, kept_here)[0]
        plgpu.commit_smem()
        gradient = gradient * norm.gain()

      def dot(i, mixed):
        v = rows.load(first + 1 + i).astype(jnp.float32)
        here.at[0, i, warps][...] = jnp.sum(v * gradient, axis=1)
        if twice:
          plgpu.commit_smem()
          rows.fetch(first + 1 + i + plan.slots)
        return mixed + v * shares[0, i] if call.normed else mixed

      mixed = ring_lib.zeros(plan) if call.normed else 0
      mixed = lax.fori_loop(0, num_sources, dot, mixed)
      if call.normed:

        @pl.loop(0, num_sources)
        def _(i):
          slot = rows.slot(first + 1 + i)
          v = plgpu.load(slot, layout=plan.layout, optimized=False)
          along = jnp.sum(v.astype(jnp.float32) * mixed, axis=1)
          here.at[1, i, warps][...] = along

      ring_lib.meet(plan, meeting, group)
      scale, bend = _depth_gradient(plan, here, kept_here, shares)
      plgpu.commit_smem()
      if call.given:

        @pl.when(part == 0)
        def _():
          d_given[0][rows.token(k)] = shares[3, 0]

      if call.normed:
        d_gain = cotangent.astype(jnp.float32) * mixed * scale
        totals = totals[0], totals[1] + d_gain
        gradient = gradient * scale - mixed * bend

      def give(i, d_query):
        q = second + i
        if twice:
          plgpu.barrier_wait(rows.barrier(q))
        slot = rows.slot(q)
        v = plgpu.load(slot, layout=plan.layout, optimized=False)
        v = v.astype(jnp.float32)
        weight, scaled, back = (shares[j, i] for j in range(3))
        d_source = gradient * weight + u * scaled
        slot[...] = (d_source - v * back).astype(call.dtype)
        plgpu.commit_smem()
        token = rows.token(k)
        ring_lib.for_source(
            call,
            d_sources,
            i,
            lambda ref: plgpu.copy_smem_to_gmem(slot, ref.at[token, part]),
        )
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(i > 0)
        def _():
          rows.fetch(q - 1 + plan.slots)

        return d_query + v * scaled

      d_query = lax.fori_loop(0, num_sources, give, totals[0])
      return d_query, *totals[1:]

    totals = tuple(ring_lib.zeros(plan) for _ in d_vectors)
    totals = lax.fori_loop(0, rows.count, one, totals)
    for d_vector, total in zip(d_vectors, totals, strict=True):
      d_vector.at[rows.first, part][...] = total
    plgpu.wait_smem_to_gmem(0)

  warps = plan_lib.WARPS * plan.split
  scratch = dict(
      kept=plgpu.SMEM(
          (plan.threads, ahead, 2, call_lib.MAX_SOURCES), jnp.float32
      ),
      kept_loaded=plgpu.Barrier(
          num_arrivals=1, num_barriers=plan.threads * ahead
      ),
      sums=plgpu.SMEM(
          (plan.groups, 2, 1 + call.normed, call_lib.MAX_SOURCES, warps),
          jnp.float32,
      ),
      shares=plgpu.SMEM((plan.threads, 4, call_lib.MAX_SOURCES), jnp.float32),
      **ring_lib.Norm.scratch(plan),
  )
  parts = functools.partial(ring_lib.parts, plan)
  sources = tuple(map(parts, sources))
  out_type = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in sources]
  by_group = (plan.blocks * plan.groups, plan.split, *plan.row)
  d_vector = jax.ShapeDtypeStruct(by_group, jnp.float32)
  d_given = [jax.ShapeDtypeStruct((call.tokens,), jnp.float32)] * call.given
  results = ring_lib.launch(
      plan,
      body,
      [*out_type, *(d_vector,) * (1 + call.normed), *d_given],
      scratch,
      "attn_res_backward",
      (*sources, parts(query), scalars, parts(d_mixed), *gains),
  )
  d_given = results.pop() if call.given else None
  results = [ring_lib.whole(plan, x) for x in results]
  d_query, *d_gain = (jnp.sum(x, axis=0) for x in results[num_refs:])
  d_gain = d_gain[0] if call.normed else None
  return tuple(results[:num_refs]), d_query, d_gain, d_given


def _softmax(plan, kept):
  """p_i, s_i and r_i, a lane per source; p_i is 0 where there is none."""
  scalar = plan.by_source.reduce((1,))
  logit, inverse_rms = (
      plgpu.load(kept.at[j], layout=scalar, optimized=False) for j in range(2)
  )
  index = plgpu.broadcasted_iota(
      jnp.int32, (call_lib.MAX_SOURCES,), 0, layout=scalar
  )
  real = index < plan.call.num_sources
  logit = jnp.where(real, logit, -jnp.inf)
  weight = jnp.exp(logit - jnp.max(logit, axis=0))
  return weight / jnp.sum(weight, axis=0), logit, inverse_rms, real


def _depth_gradient(plan, dots, kept, shares):
  """Writes [p_i, ds_i r_i, ds_i s_i r_i^2 / D, ds_i], a lane per source.

  Args:
    plan: of the backward pass.
    dots: [1 or 2, 32, warps] A . v_i and, with a norm, h . v_i.
    kept: [2, 32] s_i and r_i.
    shares: [4, 32] where to write.

  Returns:
    rho and rho^3 (A . h) / D, or None twice without a norm.
  """
  call = plan.call
  weight, logit, inverse_rms, real = _softmax(plan, kept)

  def along(ref):
    parts = plgpu.load(ref, layout=plan.by_source, optimized=False)
    # Lanes without a source read memory that nobody wrote.
    return jnp.where(real, jnp.sum(parts, axis=1), 0.0)

  towards, scale, bend = along(dots.at[0]), None, None
  if call.normed:
    by_mix = along(dots.at[1])
    square = jnp.sum(weight * by_mix, axis=0) / call.width
    scale = lax.rsqrt(square + call.eps)
    bend = jnp.sum(weight * towards, axis=0) / call.width
    bend = bend * scale * scale * scale
    towards = towards * scale - by_mix * bend
  mean = jnp.sum(weight * towards, axis=0)
  d_logit = weight * (towards - mean)
  scaled = d_logit * inverse_rms
  shares.at[0][...] = weight
  shares.at[1][...] = scaled
  shares.at[2][...] = scaled * logit * inverse_rms * (1.0 / call.width)
  if call.given:
    shares.at[3][...] = d_logit
  return scale, bend
