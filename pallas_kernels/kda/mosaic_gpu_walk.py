"""A block of the serial Hopper kernels: who does what, chunk after chunk.

One warpgroup per 64 value channels takes the `Steps` of each chunk. The last
warpgroup moves: it loads the tiles of chunk n + STAGES where those of chunk n
were as soon as these are read, part by part, and stores what the others wrote
to shared memory. A kernel can hold several walks, a block takes one of them.

The interpreter has no accumulators with a start value and no left operands in
registers; `Accumulator` stands in for both.
"""

from collections.abc import Callable
import dataclasses
import functools
import math

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import mosaic_gpu_lanes as lanes_lib
from pallas_kernels.kda.mosaic_gpu_prep import CHUNK
from pallas_kernels.kda.mosaic_gpu_prep import COLUMN

SLICE = 64  # value channels of a warpgroup: the rows of a wgmma
STAGES = 2
_PARTS = ("enter", "solve", "leave")  # of a chunk, each loaded as one
# Up to half the chip's 132 multiprocessors, a block per slice is one wave.
_FEW_HEADS = 66
_STEPS_REGISTERS, _MOVE_REGISTERS = 240, 24


@dataclasses.dataclass(frozen=True)
class Walk:
  """A way through the chunks of every head.

  Attributes:
    kind: the class of steps.
    inputs: the tiles by name, [B, HV, N, ...].
    x: [B, T, HV, V] bf16.
    initial: [B, HV, V, K] fp32, the state's start.
    out_type: the outputs' shapes.
    reverse: whether to start at the last chunk.
  """

  kind: type
  inputs: dict
  x: jax.Array
  initial: jax.Array
  out_type: list
  reverse: bool = False

  @property
  def operands(self):
    """What the kernel reads, by name."""
    return self.inputs | dict(x=self.x, initial=self.initial)

  @property
  def parts(self):
    """{part: names} of what is loaded as one."""
    return {
        part: tuple(key for key in keys if key == "x" or key in self.inputs)
        for part, keys in self.kind.loads.items()
    }

  def memory(self, groups, interpret):
    """A block's shared memory by name."""
    tiled = lanes_lib.TILED
    width = self.initial.shape[-1]

    def staged(shape, dtype):
      transforms = tiled if dtype == jnp.bfloat16 else ()
      return plgpu.SMEM((STAGES, *shape), dtype, transforms=transforms)

    def leaving(*shape):
      return plgpu.SMEM((groups, *shape), jnp.bfloat16, transforms=tiled)

    memory = {
        f"{key}_in": staged(array.shape[3:], array.dtype)
        for key, array in self.inputs.items()
    }
    memory["x_in"] = staged((groups, CHUNK, SLICE), jnp.bfloat16)
    memory["rows_out"] = leaving(self.kind.row_tiles, CHUNK, SLICE)
    if self.kind.states_output is not None:
      memory["state_out"] = leaving(SLICE, width)
    memory["pin"] = plgpu.SMEM((groups, CHUNK), jnp.float32)
    if interpret:
      memory["stage"] = leaving(SLICE, width)
    return memory


def are_one_wave(*walks):
  """Whether all blocks of these walks fit on the chip, one per slice."""
  slices = sum(math.prod(w.initial.shape[:3]) // SLICE for w in walks)
  return slices <= 2 * _FEW_HEADS


def walk(plan, *walks, name):
  """Walks the chunks of every head.

  Args:
    plan: the static part.
    *walks: `Walk`s of the same heads and chunks, none of which needs what
      another makes; a block takes one of them.
    name: of the kernel.

  Returns:
    The outputs of each walk.
  """
  batch, value_heads, values, _ = walks[0].initial.shape
  slices = values // SLICE
  groups = 1 if batch * value_heads <= _FEW_HEADS else slices
  # What several of them read is passed once.
  operands = {id(a): a for w in walks for a in w.operands.values()}

  def body(*refs):
    place = [lax.axis_index(name) for name in ("batch", "head", "slice")]
    inputs, outputs = dict(zip(operands, refs)), iter(refs[len(operands) :])
    for i, one in enumerate(walks):
      block = Block(
          plan=plan,
          walk=one,
          operands={key: inputs[id(a)] for key, a in one.operands.items()},
          outputs=[next(outputs) for _ in one.out_type],
          place=place,
          groups=groups,
      )
      mine = lax.axis_index("walk") == i if len(walks) > 1 else True
      pl.when(mine)(block.run)

  kernel = plgpu.kernel(
      body,
      out_type=[shape for one in walks for shape in one.out_type],
      grid=(batch, value_heads, slices // groups, len(walks)),
      grid_names=("batch", "head", "slice", "walk"),
      num_threads=groups + 1,
      thread_name="warpgroup",
      kernel_name=name,
      compiler_params=plgpu.CompilerParams(
          approx_math=True,
          unsafe_no_auto_barriers=True,
          lowering_semantics=plgpu.LoweringSemantics.Lane,
      ),
      interpret=plan.interpret,
  )
  outputs = iter(kernel(*operands.values()))
  return [[next(outputs) for _ in one.out_type] for one in walks]


@dataclasses.dataclass(frozen=True)
class Block:
  """One block's way through the chunks of a head.

  Attributes:
    plan: the static part.
    walk: the way.
    operands: the kernel's refs by the names of `walk.operands`.
    outputs: those of `walk.out_type`.
    place: batch, head and the first slice, in units of `groups`.
    groups: slices of the block, a warpgroup each.
    idle: warpgroups of the kernel that have nothing to do here.
    await_chunk: called with (batch, head, chunk) before a chunk is loaded.
    smem: shared memory and barriers by name, while it runs.
  """

  plan: object
  walk: Walk
  operands: dict
  outputs: list
  place: list
  groups: int
  idle: int = 0
  await_chunk: Callable | None = None
  smem: dict = dataclasses.field(default_factory=dict)

  def run(self):
    """Walks; all warpgroups of the block come here."""
    parts = functools.partial(plgpu.Barrier, num_barriers=STAGES * len(_PARTS))
    scratch = self.walk.memory(self.groups, self.plan.interpret is not None)
    scratch |= dict(
        loaded=parts(num_arrivals=max(self.copies.values())),
        consumed=parts(num_arrivals=self.groups),
        written=plgpu.Barrier(num_arrivals=self.groups),
        stored=plgpu.Barrier(),
    )
    pl.run_scoped(self._run, collective_axes="warpgroup", **scratch)

  def _run(self, **smem):
    block = dataclasses.replace(self, smem=smem)
    role = lax.axis_index("warpgroup")

    @pl.when(role < self.groups)
    def _():
      plgpu.set_max_registers(_STEPS_REGISTERS, action="increase")
      squares = range(self.walk.kind.squares)
      squares = [plgpu.ACC((SLICE, CHUNK)) for _ in squares]
      state = plgpu.ACC((SLICE, self.walk.initial.shape[-1]))
      pl.run_scoped(
          functools.partial(_take_steps, block, role), state, *squares
      )

    @pl.when(role == self.groups)
    def _():
      plgpu.set_max_registers(_MOVE_REGISTERS, action="decrease")
      _move(block)

    if self.idle:
      # Their registers are what the state's warpgroup takes.
      @pl.when(role > self.groups)
      def _():
        plgpu.set_max_registers(_MOVE_REGISTERS, action="decrease")

  @property
  def copies(self):
    """{part: how many copies load it}."""
    return {
        part: len(keys) + (self.groups - 1) * ("x" in keys)
        for part, keys in self.walk.parts.items()
    }

  @property
  def chunks(self):
    return self.operands["gam"].shape[2]

  def at(self, n):
    """Indices of the n-th chunk on the way."""
    n = jnp.asarray(n, jnp.int32)  # the last rows may not fill their chunk
    chunk = self.chunks - 1 - n if self.walk.reverse else n
    return *self.place[:2], chunk

  def rows(self, n, ref, group=0):
    """A slice of the chunk's rows in a [B, T, HV, V] array."""
    b, head, chunk = self.at(n)
    rows = pl.ds(chunk * CHUNK, CHUNK)
    return ref.at[b, rows, head, self.columns(group)]

  def columns(self, group):
    first = self.place[2] * self.groups
    return pl.ds((first + group) * SLICE, SLICE)

  def here(self, n, group=0):
    return _Here(self.plan, self.smem, lax.rem(n, STAGES), group)

  def accumulator(self, ref, group=0):
    stage = self.smem["stage"].at[group] if "stage" in self.smem else None
    return Accumulator(ref, stage)


def _take_steps(block, group, *refs):
  """The chain: the state's warpgroup, from the first chunk to the last."""
  kind, chunks = block.walk.kind, block.chunks
  steps = kind(*(block.accumulator(ref, group) for ref in refs))
  at = (*block.at(0)[:2], block.columns(group))
  state = plgpu.load(
      block.operands["initial"].at[at],
      layout=plgpu.Layout.WGMMA,
      optimized=False,
  )
  first = block.here(0, group)
  first.wait("enter")
  steps.arrive(first)
  steps.enter(first, state)
  if kind.states_output is not None:
    first.write((), steps.rounded)
  kept = steps.solve(first)

  def one(n, carry):
    kept, steps.values = carry
    this, following = block.here(n, group), block.here(n + 1, group)
    steps.leave(this, kept)
    # The wait is also what keeps the assembler from finishing this chunk before
    # it issues the product that the next one waits for.
    following.wait("enter")
    steps.finish(this, kept)
    steps.arrive(following)
    steps.enter(following, steps.next_state())
    plgpu.barrier_wait(block.smem["stored"])
    following.write(steps.rows(steps.entered), steps.rounded)
    this.free("leave")
    return steps.solve(following), steps.values

  carry = lax.fori_loop(0, chunks - 1, one, (kept, steps.values))
  kept, steps.values = carry
  last = block.here(chunks - 1, group)
  steps.leave(last, kept)
  steps.finish(last, kept)
  plgpu.barrier_wait(block.smem["stored"])
  last.write(steps.rows(0), None)
  last.free("leave")
  state = steps.state.read()
  if kind.final_output is not None:
    block.outputs[kind.final_output].at[at][...] = state


def _move(block):
  """Loads what the chain needs and stores what it wrote."""
  kind, smem, chunks = block.walk.kind, block.smem, block.chunks
  parts, most = block.walk.parts, max(block.copies.values())
  has_states = kind.states_output is not None

  def load(part, n):
    slot = block.here(n).slot
    ready = smem["loaded"].at[block.here(n).barrier(part)]
    if block.await_chunk is not None and part == _PARTS[0]:
      block.await_chunk(*block.at(n))
    for key in parts[part]:
      if key == "x":
        for i in range(block.groups):
          source = block.rows(n, block.operands["x"], i)
          plgpu.copy_gmem_to_smem(source, smem["x_in"].at[slot, i], ready)
      else:
        source = block.operands[key].at[block.at(n)]
        plgpu.copy_gmem_to_smem(source, smem[f"{key}_in"].at[slot], ready)
    for _ in range(most - block.copies[part]):
      plgpu.barrier_arrive(ready)

  def store(rows_of, state_of):
    """Rows of one chunk and the state before another, if given."""
    plgpu.barrier_wait(smem["written"])
    plgpu.commit_smem()
    for i in range(block.groups):
      if rows_of is not None:
        for j in range(kind.row_tiles):
          place = kind.rows_at(block, rows_of, j, i)
          plgpu.copy_smem_to_gmem(smem["rows_out"].at[i, j], place)
      if state_of is not None and has_states:
        place = block.outputs[kind.states_output].at[block.at(state_of)]
        tile = smem["state_out"].at[i]
        plgpu.copy_smem_to_gmem(tile, place.at[block.columns(i)])

  def turn(old, new, following):
    """What chunk `old` leaves is stored, what it read is loaded over."""
    for part in parts:
      if part == "leave":
        store(old, following)
      block.here(old).wait_consumed(part)
      plgpu.commit_smem()  # Reads of shared memory come before copies over it.
      if new is not None:
        load(part, new)
      if part == "enter":
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(smem["stored"])

  ahead = min(STAGES, chunks)
  for n in range(ahead):
    for part in parts:
      load(part, n)
  if has_states:
    store(None, 0)

  def one(n, _):
    turn(n - ahead, n, n - ahead + 1)

  lax.fori_loop(ahead, chunks, one, None)
  for n in range(chunks - ahead, chunks):
    turn(n, None, n + 1 if n + 1 < chunks else None)
  plgpu.wait_smem_to_gmem(0)


class _Here:
  """One chunk's view of shared memory."""

  def __init__(self, plan, smem, slot, group):
    self.plan, self.smem, self.slot, self.group = plan, smem, slot, group
    self.interpret = plan.interpret is not None

  def barrier(self, part):
    return _PARTS.index(part) * STAGES + self.slot

  def wait(self, part):
    """Until that part of the kernel's `loads` is there."""
    plgpu.barrier_wait(self.smem["loaded"].at[self.barrier(part)])

  def free(self, part):
    """Lets the next but one chunk's part come."""
    plgpu.barrier_arrive(self.smem["consumed"].at[self.barrier(part)])

  def wait_consumed(self, part):
    plgpu.barrier_wait(self.smem["consumed"].at[self.barrier(part)])

  def tile(self, key, transposed=False):
    ref = self.smem[f"{key}_in"].at[self.slot]
    return ref.transpose((1, 0)) if transposed else ref

  def x(self):
    """This slice of x^T, [64 channels, 64 rows]."""
    ref = self.smem["x_in"].at[self.slot, self.group].transpose((1, 0))
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA)

  def where_valid(self, x, key="scales"):
    """x^T, zero on padding rows."""
    if not self.plan.masked:
      return x
    valid = across(self.column(key, 0), x) != 0.0
    return jnp.where(valid, x, jnp.zeros((), x.dtype))

  def column(self, key, *row):
    """A value per column of a score or state."""
    return plgpu.load(self.smem[f"{key}_in"].at[self.slot, *row], layout=COLUMN)

  def decayed(self, state):
    """state * gam, and exactly zero where the state does not pass."""
    gam = across(self.column("gam"), state)
    if self.plan.masked:
      return jnp.where(gam > 0.0, state * gam, 0.0)
    return state * gam

  def low(self, x, high):
    """What x lacks as the bf16 `high`, in bf16."""
    return lanes_lib.remainder(x, high, self.interpret)

  def make_now(self, x):
    """Makes a [64, 64] bf16 array here, while a product runs."""
    pin = self.smem["pin"].at[self.group]
    lanes_lib.make_now([x], pin, self.interpret)
    return x

  def write(self, rows, state):
    """Writes x^T [64 channels, 64 rows] as rows, and a state, to be stored.

    Args:
      rows: x^T for each row tile.
      state: rounded; None, or not wanted.
    """
    for i, xt in enumerate(rows):
      self.smem["rows_out"].at[self.group, i].transpose((1, 0))[...] = xt
    if state is not None and "state_out" in self.smem:
      self.smem["state_out"].at[self.group][...] = state
    plgpu.barrier_arrive(self.smem["written"])


def across(column, like):
  """A value per column as an array like another."""
  return lax.broadcast_in_dim(column, like.shape, (1,))


class Accumulator:
  """A wgmma accumulator with a start value and register left operands.

  The interpreter has neither: it multiplies at once, through shared memory, and
  `value` is what it has so far.
  """

  def __init__(self, ref, stage):
    self._ref, self._stage = ref, stage
    self.value = None if stage is None else jnp.zeros(ref.shape, jnp.float32)

  def set(self, value):
    if self._stage is None:
      self._ref[...] = value
    else:
      self.value = value

  def clear(self):
    zero = jnp.zeros(self._ref.shape, jnp.float32)
    if self._stage is None:
      zero = plgpu.layout_cast(zero, plgpu.Layout.WGMMA)
    self.set(zero)

  def add(self, a, b):
    if self._stage is None:
      plgpu.wgmma(self._ref, a, b)
      return
    staged = self._stage.at[:, pl.ds(0, a.shape[1])]
    staged[...] = a

    def multiply(acc):
      plgpu.wgmma(acc, staged, b)
      return plgpu.wgmma_accumulator_load(acc)

    self.value += pl.run_scoped(multiply, plgpu.ACC(self._ref.shape))

  def read(self, in_flight=0):
    """The sum, when at most that many later products are unfinished."""
    if self._stage is None:
      return plgpu.wgmma_accumulator_load(self._ref, wait_n=in_flight)
    return self.value


class Steps:
  """What a warpgroup does per chunk; its ends are the neighbours' business.

  The order of a chunk is `arrive`, for what does not wait for the state,
  `enter`, which takes it, `solve`, then `leave`, which issues its next products,
  and `finish`; the next chunk's `enter` comes before this one's `rows` are
  written. Between `solve` and `leave` no product is in flight.

  Attributes:
    loads: {part: names} for the parts "enter", "solve" and "leave", each awaited
      and freed as one; "x" and the inputs that there are.
    row_tiles: how many [64, 64] tiles `rows` gives.
    squares: accumulators beside the state's.
    entered: products that `enter` leaves in flight.
    states_output: which output is each chunk's rounded state, or None.
    final_output: which is the last state, or None.
    rounded: the state that `enter` took, in bf16.
    values: what the interpreter has accumulated.
  """

  row_tiles = squares = entered = 1
  states_output = final_output = None

  def __init__(self, state, square, *others):
    self.state, self.square = state, square
    self._all = (state, square, *others)

  @staticmethod
  def rows_at(block, n, tile, group):
    """Where a row tile of the n-th chunk goes, unless said otherwise."""
    del tile
    return block.rows(n, block.outputs[0], group)

  @property
  def values(self):
    return tuple(a.value for a in self._all)

  @values.setter
  def values(self, values):
    for accumulator, value in zip(self._all, values, strict=True):
      accumulator.value = value
