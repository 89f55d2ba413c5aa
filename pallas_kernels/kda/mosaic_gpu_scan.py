"""The serial half of bounded-decay attention on Hopper: chunk after chunk.

A block (`mosaic_gpu_walk`) walks the chunks of one head, forward or backward,
one warpgroup per 64 value channels and one more to load and store. The state
lives in the registers of its warpgroup as S^T [64, K] in fp32 from the first
chunk to the last; every product has its left operand in registers, rounded in
place from an accumulator, and its right operand in shared memory as TMA left
it. The limit is the bytes of the tiles that `mosaic_gpu_prep` made or, with few
heads, what one warpgroup executes per chunk; so the order below is that of what
the next chunk waits for, and the rest runs beside its first product.

  forward   r^T = (v^T/m - S^T kgam^T) b;  v'^T = r^T + r^T solve^T
            o^T = S^T qg^T + v'^T aqk^T;    S^T <- S^T gam + v'^T kg
  reverse   dv'^T = do^T aqk + dS^T kg^T;    dr^T = (dv'^T + dv'^T solve) b
            dv = dr/m;  dS^T <- dS^T gam + do^T qg - dr^T kgam

with b standing for b m^2 of `mosaic_gpu_prep`, whose `scales` b and 1/m are.

Where keys are alike and hardly decay, v' and dr are differences of neighbouring
rows and o sums them up again, so the roundings of r, v' and dv' would add up
over a chunk: they enter their products as two bf16 parts. In the state's
products one part is enough, since the next chunk corrects what it reads; only
the backward pass's states take kg in two.
"""

import functools

import jax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import mosaic_gpu_lanes as lanes_lib
from pallas_kernels.kda import mosaic_gpu_walk as walk_lib
from pallas_kernels.kda.mosaic_gpu_prep import CHUNK
from pallas_kernels.kda.mosaic_gpu_prep import Plan

# Of `prep`, where kg_low may be None.
TILES = ("nkgam", "qg", "kg", "aqk", "solve", "gam", "scales", "kg_low")


@functools.partial(jax.jit, static_argnums=0, static_argnames="output")
def scan(plan: Plan, tiles, v, initial, *, output: bool):
  """Runs the recurrence over chunks.

  Args:
    plan: the static part.
    tiles: what `mosaic_gpu_prep.prep` returned; without `output`, with kg_low.
    v: [B, T, HV, V] bf16.
    initial: [B, HV, V, K] fp32, the transposed state before the first chunk.
    output: whether to make o, or what the backward pass needs.

  Returns:
    output: (o [B, T, HV, V] bf16, final [B, HV, V, K] fp32); otherwise
    (states [B, HV, N, V, K] bf16 before each chunk, v' in two parts
    [B, HV, N, 2, 64, V] bf16).
  """
  if output:
    return walk_lib.walk(plan, output_walk(tiles, v, initial), name="kda_scan")[
        0
    ]
  return walk_lib.walk(plan, _states(tiles, v, initial), name="kda_states")[0]


@functools.partial(jax.jit, static_argnums=0)
def reverse_scan(plan: Plan, tiles, do, final):
  """Runs the adjoint of the recurrence, from the last chunk to the first.

  Args:
    plan: the static part.
    tiles: what `mosaic_gpu_prep.prep` returned.
    do: [B, T, HV, V] bf16.
    final: [B, HV, V, K] fp32, the transposed gradient of the final state.

  Returns:
    dv [B, T, HV, V] bf16, ds [B, HV, N, V, K] bf16 after each chunk, and
    the initial state's [B, HV, V, K] fp32.
  """
  walk = _reverse(plan, tiles, do, final)
  return walk_lib.walk(plan, walk, name="kda_reverse")[0]


@functools.partial(jax.jit, static_argnums=0)
def backward_scans(plan: Plan, tiles, v, initial, do, final):
  """`scan` without output and `reverse_scan`, bit for bit.

  Few heads leave half of the chip idle in either, so they run side by side.

  Args:
    plan: the static part.
    tiles: what `mosaic_gpu_prep.prep` returned.
    v: see `scan`.
    initial: see `scan`.
    do: see `reverse_scan`.
    final: see `reverse_scan`.

  Returns:
    (states, v'), (dv, ds, the gradient of the initial state).
  """
  walks = _states(tiles, v, initial), _reverse(plan, tiles, do, final)
  if walk_lib.are_one_wave(*walks):
    return walk_lib.walk(plan, *walks, name="kda_backward_scans")
  return (
      scan(plan, tiles, v, initial, output=False),
      reverse_scan(plan, tiles, do, final),
  )


def output_walk(tiles, v, initial):
  """The walk of `scan` with output."""
  keys = ("nkgam", "kg", "solve", "gam", "scales", "qg", "aqk")
  return walk_lib.Walk(
      _Output,
      named(tiles, keys),
      v,
      initial,
      [
          jax.ShapeDtypeStruct(v.shape, jnp.bfloat16),
          jax.ShapeDtypeStruct(initial.shape, jnp.float32),
      ],
  )


def _states(tiles, v, initial):
  *lead, _, width = tiles[0].shape
  values = v.shape[-1]
  return walk_lib.Walk(
      _States,
      named(tiles, ("nkgam", "kg", "solve", "gam", "scales", "kg_low")),
      v,
      initial,
      [
          jax.ShapeDtypeStruct((*lead, values, width), jnp.bfloat16),
          jax.ShapeDtypeStruct((*lead, 2, CHUNK, values), jnp.bfloat16),
      ],
  )


def _reverse(plan, tiles, do, final):
  *lead, _, width = tiles[0].shape
  inputs = named(tiles, TILES[:-1])
  if plan.masked:
    inputs["again"] = inputs["scales"]  # which rows are padding, with do
  return walk_lib.Walk(
      _Reverse,
      inputs,
      do,
      final,
      [
          jax.ShapeDtypeStruct(do.shape, jnp.bfloat16),
          jax.ShapeDtypeStruct((*lead, do.shape[-1], width), jnp.bfloat16),
          jax.ShapeDtypeStruct(final.shape, jnp.float32),
      ],
      reverse=True,
  )


def named(tiles, keys):
  """{key: tile} of those that `prep` returned."""
  tiles = dict(zip(TILES, tiles, strict=True))
  return {key: tiles[key] for key in keys}


class _Forward(walk_lib.Steps):

  def arrive(self, here):
    del here

  def enter(self, here, state):
    """Issues S^T kgam^T."""
    self.rounded = state.astype(jnp.bfloat16)
    self.square.clear()
    self.square.add(self.rounded, here.tile("nkgam", True))
    self.before = state

  def solved(self, here, in_flight):
    """v'^T = r^T + r^T solve^T."""
    x = lanes_lib.widen(here.x(), here.interpret)
    beta = here.column("scales", 0)
    x *= walk_lib.across(beta * here.column("scales", 1), x)
    x = here.where_valid(x)
    rest = self.square.read(in_flight)
    rest = rest * walk_lib.across(beta, rest) + x
    high = rest.astype(jnp.bfloat16)
    parts = high, here.low(rest, high)
    self.square.set(rest)
    for part in parts:
      self.square.add(part, here.tile("solve", True))
    here.free("enter")
    # While they run, and when the rounded state's registers are free.
    plgpu.wgmma_wait(2)
    self.state.set(here.decayed(self.before))
    here.wait("leave")
    return self.square.read()

  def leave(self, here, v_new):
    self.high = v_new.astype(jnp.bfloat16)
    self.state.add(self.high, here.tile("kg"))
    here.free("solve")


class _Output(_Forward):
  """The state and o."""

  loads = dict(
      enter=("nkgam", "x", "scales"),
      solve=("qg", "solve", "gam"),
      leave=("kg", "aqk"),
  )
  squares = 2
  final_output = 1

  def __init__(self, state, square, out):
    super().__init__(state, square, out)
    self.out = out

  def solve(self, here):
    here.wait("solve")
    self.out.clear()
    # It runs while r is made.
    self.out.add(self.rounded, here.tile("qg", True))
    return self.solved(here, in_flight=1)

  def finish(self, here, v_new):
    self.out.add(self.high, here.tile("aqk", True))
    self.out.add(here.low(v_new, self.high), here.tile("aqk", True))

  def next_state(self):
    return self.state.read(in_flight=2)

  def rows(self, in_flight):
    return [self.out.read(in_flight).astype(jnp.bfloat16)]


class _States(_Forward):
  """The state, written before each chunk, and v' in two parts."""

  loads = dict(
      enter=("nkgam", "x", "scales"),
      solve=("solve", "gam"),
      leave=("kg", "kg_low"),
  )
  row_tiles = 2
  states_output = 0

  def solve(self, here):
    here.wait("solve")
    return self.solved(here, in_flight=0)

  def leave(self, here, v_new):
    super().leave(here, v_new)
    self.state.add(self.high, here.tile("kg_low"))

  def finish(self, here, v_new):
    self.low = here.make_now(here.low(v_new, self.high))

  def next_state(self):
    return self.state.read()

  @staticmethod
  def rows_at(block, n, tile, group):
    at = (*block.at(n), tile, slice(None), block.columns(group))
    return block.outputs[1].at[at]

  def rows(self, in_flight):
    del in_flight
    return [self.high, self.low]


class _Reverse(walk_lib.Steps):
  """The state's gradient, written after each chunk, and dv."""

  loads = dict(
      enter=("x", "again", "aqk", "gam", "kg"),
      solve=("qg", "solve"),
      leave=("scales", "nkgam"),
  )
  states_output, final_output, entered = 1, 2, 2

  def arrive(self, here):
    self.dot = here.where_valid(here.x(), "again")
    self.square.clear()
    self.square.add(self.dot, here.tile("aqk"))

  def enter(self, here, state):
    self.rounded = state.astype(jnp.bfloat16)
    self.square.add(self.rounded, here.tile("kg", True))
    here.wait("solve")
    self.state.set(here.decayed(state))
    self.state.add(self.dot, here.tile("qg"))

  def solve(self, here):
    v_new = self.square.read(in_flight=1)
    high = v_new.astype(jnp.bfloat16)
    parts = high, here.low(v_new, high)
    self.square.set(v_new)
    for part in parts:
      self.square.add(part, here.tile("solve"))
    here.free("enter")
    here.wait("leave")
    dr = self.square.read()
    return dr * walk_lib.across(here.column("scales", 0), dr)

  def leave(self, here, dr):
    self.state.add(dr.astype(jnp.bfloat16), here.tile("nkgam"))
    here.free("solve")

  def finish(self, here, dr):
    dv = dr * walk_lib.across(here.column("scales", 1), dr)
    self.dv = here.make_now(here.where_valid(dv.astype(jnp.bfloat16)))

  def next_state(self):
    return self.state.read(in_flight=1)

  def rows(self, in_flight):
    del in_flight
    return [self.dv]
