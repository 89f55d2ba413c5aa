"""Attention residuals on Hopper: every source crosses the memory bus once.

Blocks stay for the whole call and walk over tokens. Rows of D elements come
one after another, by the bulk copy engine, into a ring in shared memory, up to
the ring's length ahead of their use; `split` warpgroups share a row's columns
and `groups` tokens of a block are under way at once.

  forward    an online softmax over depth, in registers:
             m' = max(m, s_i);  h <- e^(m - m') h + e^(s_i - m') v_i
  backward   sweep 1: G . v_i of all sources; then ds_i, the few scalars;
             sweep 2: dv_i, written over v_i in the ring and copied out from
             there. Where S rows do not fit the ring they are read twice, the
             second time mostly from the L2 cache.

With a norm of the mix, y = g rho h, rho = 1 / rms(h), the mix itself is never
in memory. With A = g G, G the cotangent of y, backward has

  sweep 1: A . v_i and h = sum_i p_i v_i;  sweep 1b: h . v_i;  thus A . h, h . h
  H = rho A - rho^3 (A . h / D) h,  dg = rho h G,  and then as above with H
  for G, where H . v_i = rho (A . v_i) - rho^3 (A . h / D) (h . v_i)

A merge is a mix of two sources: the partial mix, whose logit s_0 (the
log-sum-exp of what it mixes) is given and gets a gradient of its own, ds_0, and
the prefix. r_0 = 0 then keeps the query out of the partial's gradient.

Kept for the backward pass: the sources and, per token, [2, 32] fp32: s_i and
r_i, in the letters of `reference`. The vectors' gradients are summed in
registers over a block's tokens, then over blocks by XLA, always in the same
order.
"""

import dataclasses
import functools
import math

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float

from pallas_kernels import dispatch
from pallas_kernels.attn_res import call as call_lib
from pallas_kernels.attn_res import reference

_WARPS, _LANES = 4, 32
_MULTIPROCESSORS = 132
_SHARED_BYTES = 227 * 1024
_BARRIERS = 32  # of a kind
_GROUPS_FORWARD, _GROUPS_BACKWARD = 4, 2
_SPLIT_ABOVE = 4096  # columns; more than 32 a thread would spill
_SPLIT_NORMED_ABOVE = 2048  # backward through the norm has twice the vectors


def mix(
    eps: float,
    sources: tuple[Float[Array, "... D"], ...] | Float[Array, "S ... D"],
    query: Float[Array, " D"],
    use_last: Bool[Array, ""] | None = None,
    norm_scale: Float[Array, " D"] | None = None,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "... D"]:
  """`reference.mix` on Hopper, with its gradients.

  Widths that are no multiple of 128 (256 above 4096, with a norm above 2048)
  are padded first, at the cost of a copy. Where the sources do not fit the ring
  XLA does the norm.

  Raises:
    NotImplementedError: a dtype, width, number of sources, device or mesh that
      the kernels do not serve.
  """
  call_lib.check_served(sources)
  if interpret is None:
    dispatch.check_hopper()
  return _serve(eps, sources, query, use_last, norm_scale, None, interpret)


def merge(
    eps: float,
    partial: Float[Array, "... D"],
    log_sum_exp: Float[Array, "..."],
    prefix: Float[Array, "... D"],
    query: Float[Array, " D"],
    use_prefix: Bool[Array, ""] | None = None,
    norm_scale: Float[Array, " D"] | None = None,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "... D"]:
  """`reference.merge` on Hopper, with its gradients; see `mix`."""
  sources = partial, prefix
  call_lib.check_served(sources)
  if interpret is None:
    dispatch.check_hopper()
  return _serve(
      eps, sources, query, use_prefix, norm_scale, log_sum_exp, interpret
  )


def combine(
    weights: Float[Array, "Q S ..."],
    bank: tuple[Float[Array, "... D"], ...] | Float[Array, "S ... D"],
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "Q ... D"]:
  """`reference.combine` on Hopper: every source crosses the memory bus once.

  XLA's where rows would have to be padded or a token's do not fit the ring.

  Raises:
    NotImplementedError: see `mix`.
  """
  call_lib.check_served(bank)
  if interpret is None:
    dispatch.check_hopper()
  first = bank[0]
  num_sources, width = len(bank), first.shape[-1]
  if width % _unit(width, False):
    return reference.combine(weights, bank)
  stacked = not isinstance(bank, tuple)
  call = call_lib.Call(
      num_sources=num_sources,
      stacked=stacked,
      tokens=math.prod(first.shape[:-1]),
      width=width,
      padded=width,
      dtype=jnp.dtype(first.dtype),
      normed=False,
      given=False,
      eps=0.0,
      interpret=interpret,
  )
  if _plan_combine(call, len(weights)).slots < num_sources:
    return reference.combine(weights, bank)
  rows = lambda x: x.reshape(*x.shape[: int(stacked)], -1, width)
  operands = (rows(bank),) if stacked else tuple(map(rows, bank))
  out = _run_combine(call, len(weights), operands, weights)
  return out.reshape(len(weights), *first.shape)


def _serve(eps, sources, query, use_last, norm_scale, given, interpret):
  normed = norm_scale is not None and _norm_fits(sources)
  mixed = call_lib.by_rows(
      _mix,
      call_lib.Call,
      sources,
      query,
      use_last,
      norm_scale if normed else None,
      given,
      unit=_unit(sources[0].shape[-1], normed),
      eps=float(eps),
      interpret=interpret,
  )
  if norm_scale is None or normed:
    return mixed
  return reference.rms_norm(eps, mixed, norm_scale)


@dataclasses.dataclass(frozen=True)
class _Plan:
  """How one kernel divides the work.

  Attributes:
    call: the static part.
    groups: tokens under way in a block.
    split: warpgroups that share a token, each with its columns.
    slots: rows in the ring of a token group.
    items: rows fetched per token.
  """

  call: call_lib.Call
  groups: int
  split: int
  slots: int
  items: int

  @property
  def threads(self) -> int:
    return self.groups * self.split

  @property
  def blocks(self) -> int:
    most = 1 if self.call.interpret is not None else _MULTIPROCESSORS
    return min(most, -(-self.call.tokens // self.groups))

  @property
  def columns(self) -> int:
    """Columns of one warp."""
    return self.call.padded // (self.split * _WARPS)

  @property
  def vector(self) -> int:
    """Elements that a thread reads at once, 16 bytes where it can."""
    return math.gcd(self.columns // _LANES, 16 // self.call.dtype.itemsize)

  @property
  def row(self) -> tuple[int, int]:
    """A warpgroup's part of a row: a line of columns for each warp."""
    return _WARPS, self.columns

  @property
  def layout(self):
    vector = self.vector
    return plgpu.Layout.TILED(
        plgpu.Tiling(((_WARPS, _LANES * vector), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )

  @property
  def by_source(self):
    """[32 sources, warps of a token]: a lane per source, in every warp."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((_LANES, _WARPS * self.split),)),
        warp_dims=(plgpu.Replicated(_WARPS),),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def _split(width: int, normed_backward: bool = False) -> int:
  """Warpgroups per token."""
  above = _SPLIT_NORMED_ABOVE if normed_backward else _SPLIT_ABOVE
  return 1 if width <= above else 2


def _unit(width: int, normed: bool) -> int:
  """What a padded width is a multiple of: a column for each thread."""
  return _WARPS * _LANES * _split(width, normed)


def _norm_fits(sources) -> bool:
  """Whether the backward pass can keep all rows of a token in its ring."""
  unit = _unit(sources[0].shape[-1], True)
  padded = -(-sources[0].shape[-1] // unit) * unit
  row_bytes = padded * sources[0].dtype.itemsize
  slots = _slots_backward(padded, row_bytes, True)
  return slots(1) > len(sources) + 1


def _slots_backward(padded, row_bytes, normed):
  """A function: groups -> rows of each group's ring that there is space for."""
  left = _SHARED_BYTES - 16 * 1024 - 4 * padded * normed
  split = _split(padded, normed)
  return lambda groups: min(
      left // row_bytes // groups, _BARRIERS // (groups * split)
  )


def _plan_forward(call: call_lib.Call) -> _Plan:
  row_bytes = call.padded * call.dtype.itemsize
  split = _split(call.padded)
  groups = _GROUPS_FORWARD // split
  if call.interpret is not None:  # threads are slow there
    groups = min(groups, 2)
  gain_bytes = 4 * call.padded * call.normed
  left = (_SHARED_BYTES - 4096 - gain_bytes) // groups
  slots = min(left // row_bytes - 1, 2 * call.num_sources + 2)
  slots = min(slots, _BARRIERS // (groups * split))
  if call.interpret is not None:
    slots = min(slots, 3)
  return _Plan(call, groups, split, slots, call.num_sources)


def _plan_backward(call: call_lib.Call) -> _Plan:
  row_bytes = call.padded * call.dtype.itemsize
  split = _split(call.padded, call.normed)
  groups = _GROUPS_BACKWARD // split
  items = call.num_sources + 1
  most = _slots_backward(call.padded, row_bytes, call.normed)
  if most(groups) < items + 2:
    groups = 1
  slots = most(groups)
  if slots < items + 1:
    items += call.num_sources
  slots = min(slots, 3 * items)
  if call.interpret is not None:
    slots = min(slots, items + 1)
  return _Plan(call, groups, split, slots, items)


def _plan_combine(call: call_lib.Call, num_queries: int) -> _Plan:
  row_bytes = call.padded * call.dtype.itemsize
  split = _split(call.padded)
  left = _SHARED_BYTES - 16 * 1024
  for groups in (_GROUPS_FORWARD // split, 2, 1):
    weights = 4 * _weights_length(call, num_queries) * split
    # Two rows of results are on the way, and weights of four tokens.
    slots = (left // groups - 4 * weights) // row_bytes - 2
    slots = min(slots, _BARRIERS // (groups * split), 2 * call.num_sources)
    if slots > call.num_sources:
      break
  return _Plan(call, groups, split, slots, call.num_sources)


def _weights_length(call, num_queries):
  """Of a token's weights; bulk copies are of whole 128 bytes."""
  return -(-num_queries * call.num_sources // 32) * 32


class _Ring:
  """Rows of a token group on their way through shared memory.

  Row q of the group is row q % items of its token q / items; slot q % slots.
  """

  def __init__(self, plan, copies, ring, loaded):
    self.plan, self.copies = plan, copies
    self.ring, self.loaded = ring, loaded
    thread = lax.axis_index("warpgroup")
    self.group, self.part = thread // plan.split, lax.rem(thread, plan.split)
    self.thread = thread
    self.first = lax.axis_index("block") * plan.groups + self.group
    self.stride = plan.blocks * plan.groups

  @property
  def count(self):
    """Tokens of this group."""
    tokens = self.plan.call.tokens
    return (tokens - self.first + self.stride - 1) // self.stride

  def token(self, k):
    return self.first + k * self.stride

  def slot(self, q):
    return self.ring.at[self.thread, lax.rem(q, self.plan.slots)]

  def barrier(self, q):
    at = self.thread * self.plan.slots + lax.rem(q, self.plan.slots)
    return self.loaded.at[at]

  def fetch(self, q):
    """Starts the copy of row q into its slot, if there is such a row."""
    k = lax.div(q, self.plan.items)
    token = self.token(k)

    @pl.when(token < self.plan.call.tokens)
    def _():
      self.copies(
          lax.rem(q, self.plan.items),
          k,
          token,
          self.part,
          self.slot(q),
          self.barrier(q),
      )

  def start(self):
    @pl.loop(0, self.plan.slots)
    def _(q):
      self.fetch(q)

  def load(self, q):
    plgpu.barrier_wait(self.barrier(q))
    return plgpu.load(self.slot(q), layout=self.plan.layout, optimized=False)


class _Norm:
  """The norm's gain, in shared memory for all token groups of a block."""

  def __init__(self, plan, rows, source, *, gain, gain_loaded, squares=None):
    self.squares = squares
    self._plan, self._gain = plan, gain.at[rows.part]
    barrier = gain_loaded.at[rows.part]

    @pl.when(rows.group == 0)
    def _():
      _copy_in(source.at[rows.part], self._gain, barrier)

    plgpu.barrier_wait(barrier)

  def gain(self):
    return plgpu.load(self._gain, layout=self._plan.layout, optimized=False)

  @staticmethod
  def scratch(plan):
    if not plan.call.normed:
      return {}
    return dict(
        gain=plgpu.SMEM((plan.split, *plan.row), jnp.float32),
        gain_loaded=plgpu.Barrier(num_arrivals=1, num_barriers=plan.split),
        squares=plgpu.SMEM((plan.groups, plan.split, _WARPS), jnp.float32),
    )


def _copy_in(source, target, barrier):
  plgpu.copy_gmem_to_smem(
      source,
      target,
      barrier,
      oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # plain bytes, no tiles
  )


def _for_source(call, refs, i, action):
  """action(the ref of source i), i traced."""
  if call.stacked:
    action(refs[0].at[i])
  else:
    lax.switch(i, [functools.partial(action, ref) for ref in refs])


def _zeros(plan):
  return plgpu.layout_cast(jnp.zeros(plan.row, jnp.float32), plan.layout)


def _meet(plan, meeting, group):
  """All warps of a token have written before any of them reads."""
  plgpu.commit_smem()
  if plan.split > 1:
    plgpu.barrier_arrive(meeting.at[group])
    plgpu.barrier_wait(meeting.at[group])


def _add_up(ref, split):
  """Sum of the [split, 4] partial sums of a token's warps, one order."""
  parts = [ref[w, i] for w in range(split) for i in range(_WARPS)]
  return functools.reduce(jnp.add, parts)


def _launch(plan, body, out_type, scratch, name, operands):
  scratch = dict(
      scratch,
      ring=plgpu.SMEM((plan.threads, plan.slots, *plan.row), plan.call.dtype),
      loaded=plgpu.Barrier(
          num_arrivals=1, num_barriers=plan.threads * plan.slots
      ),
  )
  if plan.split > 1:
    scratch["meeting"] = plgpu.Barrier(
        num_arrivals=plan.split, num_barriers=plan.groups
    )
  kernel = plgpu.kernel(
      body,
      out_type=out_type,
      scratch_types=scratch,
      grid=(plan.blocks,),
      grid_names=("block",),
      num_threads=plan.threads,
      thread_name="warpgroup",
      kernel_name=name,
      compiler_params=plgpu.CompilerParams(
          approx_math=True,
          unsafe_no_auto_barriers=True,
          lowering_semantics=plgpu.LoweringSemantics.Lane,
      ),
      interpret=plan.call.interpret,
  )
  return kernel(*operands)


def _parts(plan, x):
  """[..., D] with the columns of warpgroups and warps apart."""
  return x.reshape(*x.shape[:-1], plan.split, *plan.row)


def _whole(plan, x):
  return x.reshape(*x.shape[:-3], plan.call.padded)


@functools.partial(jax.jit, static_argnums=0)
def _run_forward(call, sources, query, flag, gain, given):
  """Returns h or y [N, D] and s_i and r_i, the scalars [N, 2, 32]."""
  plan = _plan_forward(call)
  num_refs = len(sources)
  has_flag = flag is not None
  gains = (_parts(plan, gain),) if call.normed else ()
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
      _for_source(
          call,
          sources,
          i,
          lambda ref: _copy_in(ref.at[token, part], target, barrier),
      )

    rows = _Ring(plan, copies, ring, loaded)
    rows.start()
    group, part = rows.group, rows.part
    u = plgpu.load(query.at[part], layout=plan.layout, optimized=False)
    use_last = flag[0] if has_flag else None
    norm = _Norm(plan, rows, gain, **of_norm) if call.normed else None
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
        _meet(plan, meeting, group)
        rows.fetch(q + plan.slots)
        square = _add_up(here.at[1], plan.split) / call.width
        inverse_rms = lax.rsqrt(square + call.eps)
        logit = _add_up(here.at[0], plan.split) * inverse_rms
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

      start = jnp.float32(-jnp.inf), jnp.float32(0.0), _zeros(plan)
      _, total, mixed = lax.fori_loop(0, call.num_sources, one, start)
      mixed = mixed * (1.0 / total)
      if call.normed:
        squares = norm.squares.at[group]
        squares.at[part][...] = jnp.sum(mixed * mixed, axis=1)
        _meet(plan, meeting, group)
        square = _add_up(squares, plan.split) / call.width
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
      sums=plgpu.SMEM((plan.groups, 2, 2, plan.split, _WARPS), jnp.float32),
      **_Norm.scratch(plan),
  )
  tokens = call.tokens
  out_type = [
      jax.ShapeDtypeStruct((tokens, plan.split, *plan.row), call.dtype),
      jax.ShapeDtypeStruct((tokens, 2, call_lib.MAX_SOURCES), jnp.float32),
  ]
  parts = functools.partial(_parts, plan)
  mixed, scalars = _launch(
      plan,
      body,
      out_type,
      scratch,
      "attn_res_forward",
      (*map(parts, sources), parts(query), *optional),
  )
  # Without it XLA writes fp32 copies for a norm that follows (jax 0.11.2).
  return lax.optimization_barrier(_whole(plan, mixed)), scalars


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_combine(call, num_queries, sources, weights):
  """Returns the mixes [Q, N, D] of sources [N, D] by weights [Q, S, ...]."""
  plan = _plan_combine(call, num_queries)
  num_refs, num_sources = len(sources), call.num_sources
  length = _weights_length(call, num_queries)
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
        _copy_in(weights.at[token], *weights_of(k))

      _for_source(
          call,
          sources,
          i,
          lambda ref: _copy_in(ref.at[token, part], target, barrier),
      )

    rows = _Ring(plan, copies, ring, loaded)
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

        mixed = lax.fori_loop(0, num_sources, add, _zeros(plan))
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
  out = _launch(
      plan,
      body,
      jax.ShapeDtypeStruct(shape, call.dtype),
      scratch,
      "attn_res_combine",
      (*(_parts(plan, v) for v in sources), weights),
  )
  return _whole(plan, out)


@functools.partial(jax.jit, static_argnums=0)
def _run_backward(call, sources, query, scalars, gain, d_mixed):
  """Returns dv_i, like the sources, du, dg or None [D] and ds_0 or None [N]."""
  plan = _plan_backward(call)
  num_refs, num_sources = len(sources), call.num_sources
  twice = plan.items > num_sources + 1
  ahead = plan.slots // plan.items + 2  # tokens whose scalars are on the way

  gains = (_parts(plan, gain),) if call.normed else ()

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
        _copy_in(d_mixed.at[token, part], target, barrier)
        kept_here, kept_ready = scalars_of(k)
        _copy_in(scalars.at[token], kept_here, kept_ready)

      @pl.when(item > 0)
      def _():
        _for_source(
            call,
            sources,
            lax.rem(item - 1, num_sources),
            lambda ref: _copy_in(ref.at[token, part], target, barrier),
        )

    thread = lax.axis_index("warpgroup")

    def scalars_of(k):
      at = lax.rem(k, ahead)
      return kept.at[thread, at], kept_loaded.at[thread * ahead + at]

    rows = _Ring(plan, copies, ring, loaded)
    rows.start()
    group, part = rows.group, rows.part
    shares, sums = shares.at[thread], sums.at[group]
    u = plgpu.load(query.at[part], layout=plan.layout, optimized=False)
    norm = _Norm(plan, rows, *gains, **of_norm) if call.normed else None

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
      warps = pl.ds(part * _WARPS, _WARPS)
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

      mixed = _zeros(plan) if call.normed else 0
      mixed = lax.fori_loop(0, num_sources, dot, mixed)
      if call.normed:

        @pl.loop(0, num_sources)
        def _(i):
          slot = rows.slot(first + 1 + i)
          v = plgpu.load(slot, layout=plan.layout, optimized=False)
          along = jnp.sum(v.astype(jnp.float32) * mixed, axis=1)
          here.at[1, i, warps][...] = along

      _meet(plan, meeting, group)
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
        _for_source(
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

    totals = tuple(_zeros(plan) for _ in d_vectors)
    totals = lax.fori_loop(0, rows.count, one, totals)
    for d_vector, total in zip(d_vectors, totals, strict=True):
      d_vector.at[rows.first, part][...] = total
    plgpu.wait_smem_to_gmem(0)

  warps = _WARPS * plan.split
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
      **_Norm.scratch(plan),
  )
  parts = functools.partial(_parts, plan)
  sources = tuple(map(parts, sources))
  out_type = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in sources]
  by_group = (plan.blocks * plan.groups, plan.split, *plan.row)
  d_vector = jax.ShapeDtypeStruct(by_group, jnp.float32)
  d_given = [jax.ShapeDtypeStruct((call.tokens,), jnp.float32)] * call.given
  results = _launch(
      plan,
      body,
      [*out_type, *(d_vector,) * (1 + call.normed), *d_given],
      scratch,
      "attn_res_backward",
      (*sources, parts(query), scalars, parts(d_mixed), *gains),
  )
  d_given = results.pop() if call.given else None
  results = [_whole(plan, x) for x in results]
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(call, sources, query, flag, gain, given):
  return _run_forward(call, sources, query, flag, gain, given)[0]


def _mix_forward(call, sources, query, flag, gain, given):
  mixed, scalars = _run_forward(call, sources, query, flag, gain, given)
  return mixed, (sources, query, scalars, gain)


def _mix_backward(call, residuals, d_mixed):
  d_sources, d_query, d_gain, d_given = _run_backward(call, *residuals, d_mixed)
  return d_sources, d_query, None, d_gain, d_given


_mix.defvjp(_mix_forward, _mix_backward)
