"""What the Hopper kernels share: rows by the bulk copy engine, the norm."""

import functools

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attn_res import mosaic_gpu_plan as plan_lib


class Ring:
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


class Norm:
  """The norm's gain, in shared memory for all token groups of a block."""

  def __init__(self, plan, rows, source, *, gain, gain_loaded, squares=None):
    self.squares = squares
    self._plan, self._gain = plan, gain.at[rows.part]
    barrier = gain_loaded.at[rows.part]

    @pl.when(rows.group == 0)
    def _():
      copy_in(source.at[rows.part], self._gain, barrier)

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
        squares=plgpu.SMEM(
            (plan.groups, plan.split, plan_lib.WARPS), jnp.float32
        ),
    )


def copy_in(source, target, barrier):
  plgpu.copy_gmem_to_smem(
      source,
      target,
      barrier,
      oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # plain bytes, no tiles
  )


def for_source(call, refs, i, action):
  """action(the ref of source i), i traced."""
  if call.stacked:
    action(refs[0].at[i])
  else:
    lax.switch(i, [functools.partial(action, ref) for ref in refs])


def copy_source_in(call, refs, i, token, part, target, barrier):
  """Fetches a part of a token's row of source i, i traced."""
  for_source(
      call, refs, i, lambda ref: copy_in(ref.at[token, part], target, barrier)
  )


def zeros(plan):
  return plgpu.layout_cast(jnp.zeros(plan.row, jnp.float32), plan.layout)


def meet(plan, meeting, group):
  """All warps of a token have written before any of them reads."""
  plgpu.commit_smem()
  if plan.split > 1:
    plgpu.barrier_arrive(meeting.at[group])
    plgpu.barrier_wait(meeting.at[group])


def add_up(ref, split):
  """Sum of the [split, 4] partial sums of a token's warps, one order."""
  parts = [ref[w, i] for w in range(split) for i in range(plan_lib.WARPS)]
  return functools.reduce(jnp.add, parts)


def launch(plan, body, out_type, scratch, name, operands):
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


def parts(plan, x):
  """[..., D] with the columns of warpgroups and warps apart."""
  return x.reshape(*x.shape[:-1], plan.split, *plan.row)


def whole(plan, x):
  return x.reshape(*x.shape[:-3], plan.call.padded)
