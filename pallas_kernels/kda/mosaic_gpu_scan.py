"""The serial half of bounded-decay attention on Hopper: chunk after chunk.

A block walks the chunks of one head, forward or backward, one warpgroup per
64 value channels and one more to fetch. The state lives in the registers of
its warpgroup as S^T [64, K] in fp32 from the first chunk to the last; every
product has its left operand in registers, rounded in place from an
accumulator, and its right operand in shared memory as TMA left it. So nothing
in the chain goes through shared memory, and the limit is the bytes of the
tiles that `mosaic_gpu_prep` made.

  forward   r^T = (v^T/m - S^T kgam^T) b;  v'^T = r^T + r^T solve^T
            o^T = S^T qg^T + v'^T aqk^T;    S^T <- S^T gam + v'^T kg
  reverse   dv'^T = do^T aqk + dS^T kg^T;    dr^T = (dv'^T + dv'^T solve) b
            dv = dr/m;  dS^T <- dS^T gam + do^T qg - dr^T kgam

with b standing for b m^2 of `mosaic_gpu_prep`, whose `scales` b and 1/m are.

Where keys are alike and hardly decay, v' and dr are differences of neighbouring
rows and o sums them up again, so the roundings of r, v' and dv' would add up
over a chunk: they enter their products as two bf16 parts. In the state's
products one part is enough, since the next chunk corrects what it reads.
"""

import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import mosaic_gpu_lanes as lanes_lib
from pallas_kernels.kda.mosaic_gpu_prep import CHUNK
from pallas_kernels.kda.mosaic_gpu_prep import COLUMN
from pallas_kernels.kda.mosaic_gpu_prep import Plan

SLICE = 64  # value channels of a warpgroup: the rows of a wgmma
STAGES = 2
# Up to half the chip's 132 multiprocessors, a block per slice is one wave.
_FEW_HEADS = 66
_COMPUTE_REGISTERS, _FETCH_REGISTERS = 240, 24


@functools.partial(jax.jit, static_argnums=0, static_argnames="output")
def scan(plan: Plan, tiles, v, initial, *, output: bool):
  """Runs the recurrence over chunks.

  Args:
    plan: the static part.
    tiles: what `mosaic_gpu_prep.prep` returned.
    v: [B, T, HV, V] bf16.
    initial: [B, HV, V, K] fp32, the transposed state before the first chunk.
    output: whether to make o, or what the backward pass needs.

  Returns:
    output: (o [B, T, HV, V] bf16, final [B, HV, V, K] fp32); otherwise
    (states [B, HV, N, V, K] bf16 before each chunk, v' in two parts
    [B, HV, N, 2, 64, V] bf16).
  """
  nkgam, qg, kg, aqk, solve, gam, scales = tiles
  batch, value_heads, chunks, _, width = nkgam.shape
  values = v.shape[-1]
  inputs = dict(nkgam=nkgam, kg=kg, solve=solve, gam=gam, scales=scales)
  if output:
    inputs |= dict(qg=qg, aqk=aqk)
    out_type = [
        jax.ShapeDtypeStruct(v.shape, jnp.bfloat16),
        jax.ShapeDtypeStruct(initial.shape, jnp.float32),
    ]
  else:
    lead = (batch, value_heads, chunks)
    out_type = [
        jax.ShapeDtypeStruct((*lead, values, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((*lead, 2, CHUNK, values), jnp.bfloat16),
    ]
  step = _output_step if output else _state_step
  return _walk(
      plan,
      inputs,
      v,
      initial,
      out_type,
      step,
      reverse=False,
      name="kda_scan" if output else "kda_states",
  )


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
  nkgam, qg, kg, aqk, solve, gam, scales = tiles
  batch, value_heads, chunks, _, width = nkgam.shape
  values = do.shape[-1]
  inputs = dict(
      nkgam=nkgam, qg=qg, kg=kg, aqk=aqk, solve=solve, gam=gam, scales=scales
  )
  out_type = [
      jax.ShapeDtypeStruct(do.shape, jnp.bfloat16),
      jax.ShapeDtypeStruct(
          (batch, value_heads, chunks, values, width), jnp.bfloat16
      ),
      jax.ShapeDtypeStruct(final.shape, jnp.float32),
  ]
  return _walk(
      plan,
      inputs,
      do,
      final,
      out_type,
      _reverse_step,
      reverse=True,
      name="kda_reverse",
  )


def _walk(plan, inputs, x, initial, out_type, step, *, reverse, name):
  """Walks the chunks of every head with `step`; see the callers."""
  batch, value_heads, values, width = initial.shape
  chunks = inputs["gam"].shape[2]
  slices = values // SLICE
  split = batch * value_heads <= _FEW_HEADS
  groups = 1 if split else slices
  interpret = plan.interpret is not None
  tiled = lanes_lib.TILED

  def staged(shape, dtype, transforms=()):
    return plgpu.SMEM((STAGES, *shape), dtype, transforms=transforms)

  shapes = {key: array.shape[3:] for key, array in inputs.items()}
  scratch = {
      f"{key}_in": (
          staged(shapes[key], array.dtype, tiled)
          if array.dtype == jnp.bfloat16
          else staged(shapes[key], array.dtype)
      )
      for key, array in inputs.items()
  }
  scratch["x_in"] = staged((groups, CHUNK, SLICE), jnp.bfloat16, tiled)
  copies = len(inputs) + groups
  scratch["rows_out"] = plgpu.SMEM(
      (2, groups, CHUNK, SLICE), jnp.bfloat16, transforms=tiled
  )
  if step is not _output_step:
    scratch["state_out"] = plgpu.SMEM(
        (groups, SLICE, width), jnp.bfloat16, transforms=tiled
    )
  if interpret:
    scratch["stage"] = plgpu.SMEM(
        (groups, SLICE, width), jnp.bfloat16, transforms=tiled
    )
  scratch["loaded"] = plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES)
  scratch["consumed"] = plgpu.Barrier(num_arrivals=groups, num_barriers=STAGES)

  def body(*refs, **smem):
    operands = dict(zip([*inputs, "x", "initial"], refs))
    outputs = refs[len(operands) :]
    group = lax.axis_index("warpgroup")
    b, head = lax.axis_index("batch"), lax.axis_index("head")
    first_slice = lax.axis_index("slice") * groups

    def chunk_of(n):
      return chunks - 1 - n if reverse else n

    @pl.when(group == groups)
    def _fetch():
      plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

      def fetch(n, _):
        slot, chunk = lax.rem(n, STAGES), chunk_of(n)
        ready = smem["loaded"].at[slot]

        @pl.when(n >= STAGES)
        def _():
          plgpu.barrier_wait(smem["consumed"].at[slot])

        for key in inputs:
          plgpu.copy_gmem_to_smem(
              operands[key].at[b, head, chunk],
              smem[f"{key}_in"].at[slot],
              ready,
          )
        rows = pl.ds(chunk * CHUNK, CHUNK)
        for i in range(groups):
          columns = pl.ds((first_slice + i) * SLICE, SLICE)
          plgpu.copy_gmem_to_smem(
              operands["x"].at[b, rows, head, columns],
              smem["x_in"].at[slot, i],
              ready,
          )
        return None

      lax.fori_loop(0, chunks, fetch, None)

    @pl.when(group < groups)
    def _compute():
      plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
      columns = pl.ds((first_slice + group) * SLICE, SLICE)
      state = plgpu.load(
          operands["initial"].at[b, head, columns],
          layout=plgpu.Layout.WGMMA,
          optimized=False,
      )

      def one(n, state):
        slot, chunk = lax.rem(n, STAGES), chunk_of(n)
        plgpu.barrier_wait(smem["loaded"].at[slot])
        here = _Here(
            plan,
            smem,
            slot,
            lax.rem(n, 2),
            group,
            interpret,
            b,
            head,
            chunk,
            columns,
            outputs,
        )
        state = step(here, state)
        plgpu.barrier_arrive(smem["consumed"].at[slot])
        return state

      state = lax.fori_loop(0, chunks, one, state)
      if step is not _state_step:
        outputs[-1].at[b, head, columns][...] = state
      plgpu.wait_smem_to_gmem(0)

  kernel = plgpu.kernel(
      body,
      out_type=out_type,
      scratch_types=scratch,
      grid=(batch, value_heads, slices // groups),
      grid_names=("batch", "head", "slice"),
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
  return kernel(*inputs.values(), x, initial)


class _Here:
  """One step's view of shared memory and of the outputs."""

  def __init__(
      self,
      plan,
      smem,
      slot,
      parity,
      group,
      interpret,
      b,
      head,
      chunk,
      columns,
      outputs,
  ):
    self.plan, self.smem, self.slot, self.parity = plan, smem, slot, parity
    self.group, self.interpret, self.outputs = group, interpret, outputs
    self.b, self.head, self.chunk, self.columns = b, head, chunk, columns

  def tile(self, key, transposed=False):
    ref = self.smem[f"{key}_in"].at[self.slot]
    return ref.transpose((1, 0)) if transposed else ref

  def x(self):
    """This slice of x^T, [64 channels, 64 rows], zero on padding rows."""
    ref = self.smem["x_in"].at[self.slot, self.group].transpose((1, 0))
    x = plgpu.load(ref, layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
    x = plgpu.layout_cast(x, plgpu.Layout.WGMMA)
    return self._where_valid(x)

  def _where_valid(self, x):
    if not self.plan.masked:
      return x
    valid = self.beta(x.shape) != 0.0
    return jnp.where(valid, x, jnp.zeros((), x.dtype))

  def _by_column(self, ref, shape):
    values = plgpu.load(ref.at[self.slot], layout=COLUMN)
    return lax.broadcast_in_dim(values, shape, (1,))

  def beta(self, shape):
    """b m^2, 0 on padding rows and nowhere else."""
    return self._by_column(self.smem["scales_in"].at[:, 0], shape)

  def scaled(self, xt):
    """x / m by rows of x."""
    return xt * self._by_column(self.smem["scales_in"].at[:, 1], xt.shape)

  def decayed(self, state):
    """state * gam, and exactly zero where the state does not pass."""
    gam = self._by_column(self.smem["gam_in"], state.shape)
    if self.plan.masked:
      return jnp.where(gam > 0.0, state * gam, 0.0)
    return state * gam

  def accumulator(self, ref, preset=None):
    stage = self.smem["stage"].at[self.group] if self.interpret else None
    return _Accumulator(ref, stage, preset)

  def store_rows(self, xt, target, buffer=None):
    """Writes x^T [64 channels, 64 rows] as rows of the chunk."""
    buffer = self.parity if buffer is None else buffer
    buffer = self.smem["rows_out"].at[buffer, self.group]
    buffer.transpose((1, 0))[...] = plgpu.layout_cast(
        xt, plgpu.Layout.WGMMA_TRANSPOSED
    )
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target)

  def token_rows(self, ref):
    rows = pl.ds(self.chunk * CHUNK, CHUNK)
    return ref.at[self.b, rows, self.head, self.columns]


class _Accumulator:
  """A wgmma accumulator with a start value and register left operands.

  The interpreter has neither: it takes the operand through shared memory and
  adds the start value at the end.
  """

  def __init__(self, ref, stage, preset):
    self._ref, self._stage, self._preset = ref, stage, preset
    if preset is not None and stage is None:
      ref[...] = preset

  def add(self, a, b):
    if self._stage is not None:
      staged = self._stage.at[:, pl.ds(0, a.shape[1])]
      staged[...] = a
      a = staged
    plgpu.wgmma(self._ref, a, b)

  def read(self, wait_n=0):
    value = plgpu.wgmma_accumulator_load(self._ref, wait_n=wait_n)
    if self._stage is not None and self._preset is not None:
      value = value + self._preset
    return value


def _square():
  return plgpu.ACC((SLICE, CHUNK))


def _solved(here, new, rest):
  """Issues v'^T = r^T + r^T solve^T from r^T / b; returns its accumulator."""
  rest = rest * here.beta(rest.shape)
  new = here.accumulator(new, rest)
  for part in lanes_lib.split(rest):
    new.add(part, here.tile("solve", True))
  return new


def _output_step(here, state):
  rounded = state.astype(jnp.bfloat16)
  decayed = here.decayed(state)
  vt = here.scaled(here.x().astype(jnp.float32))

  def products(rest, new, out, after):
    rest = here.accumulator(rest, vt)
    out, after = here.accumulator(out), here.accumulator(after, decayed)
    rest.add(rounded, here.tile("nkgam", True))
    new = _solved(here, new, rest.read())
    # Late, so that `out` takes no registers during the solve.
    out.add(rounded, here.tile("qg", True))
    v_new, v_low = lanes_lib.split(new.read(wait_n=1))
    out.add(v_new, here.tile("aqk", True))
    out.add(v_low, here.tile("aqk", True))
    after.add(v_new, here.tile("kg"))
    return out.read(wait_n=1).astype(jnp.bfloat16), after.read()

  out, state = pl.run_scoped(
      products, _square(), _square(), _square(), plgpu.ACC(state.shape)
  )
  plgpu.wait_smem_to_gmem(1, wait_read_only=True)
  here.store_rows(out, here.token_rows(here.outputs[0]))
  return state


def _state_step(here, state):
  states_gm, v_new_gm = here.outputs
  rounded = state.astype(jnp.bfloat16)
  decayed = here.decayed(state)
  vt = here.scaled(here.x().astype(jnp.float32))

  def products(rest, new, after):
    rest = here.accumulator(rest, vt)
    after = here.accumulator(after, decayed)
    rest.add(rounded, here.tile("nkgam", True))
    v_new = lanes_lib.split(_solved(here, new, rest.read()).read())
    after.add(v_new[0], here.tile("kg"))
    return *v_new, after.read()

  at = (here.b, here.head, here.chunk)
  _store_state(here, rounded, states_gm.at[at], in_flight=2)
  *v_new, state = pl.run_scoped(
      products, _square(), _square(), plgpu.ACC(state.shape)
  )
  for i, part in enumerate(v_new):
    plgpu.wait_smem_to_gmem(2, wait_read_only=True)
    target = v_new_gm.at[(*at, i, slice(None), here.columns)]
    here.store_rows(part, target, buffer=i)
  return state


def _store_state(here, rounded, target, in_flight):
  # The one state buffer: every copy before the last `in_flight` is done.
  plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
  buffer = here.smem["state_out"].at[here.group]
  buffer[...] = rounded
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(buffer, target.at[here.columns])


def _reverse_step(here, state):
  dv_gm, ds_gm, _ = here.outputs
  rounded = state.astype(jnp.bfloat16)
  decayed = here.decayed(state)
  dot = here.x()
  target = ds_gm.at[here.b, here.head, here.chunk]
  _store_state(here, rounded, target, in_flight=1)

  def products(new, before):
    new, before = here.accumulator(new), here.accumulator(before, decayed)
    new.add(rounded, here.tile("kg", True))
    new.add(dot, here.tile("aqk"))
    before.add(dot, here.tile("qg"))
    for part in lanes_lib.split(new.read(wait_n=1)):
      new.add(part, here.tile("solve"))
    dr = new.read()
    dr = dr * here.beta(dr.shape)
    dv = here.scaled(dr).astype(jnp.bfloat16)
    before.add(dr.astype(jnp.bfloat16), here.tile("nkgam"))
    return dv, before.read()

  dv, state = pl.run_scoped(products, _square(), plgpu.ACC(state.shape))
  here.store_rows(here._where_valid(dv), here.token_rows(dv_gm))
  return state
