"""Gradients of what is local to a chunk, on Hopper: three warpgroups an item.

With the tiles k+, k-, q+ of `mosaic_gpu_prep`, the state S before the chunk,
the gradient dS after it, v' (in two bf16 parts), dr = m dv and do, three
warpgroups each make the gradient of one tile, left operands in registers:

  dA = tril(do v'^T)     dN = -tril(dr v'^T, -1)
  dq+ = 2^R (do S^T) + dA k-      dk+ = -2^R (dr S^T) + dN k-
  dk- = 2^(G_last - R) (v' dS^T) + dA^T q+ + dN^T k+

The lower left blocks take the other half's tile moved to this half's R. The
first two warpgroups also, a thread per channel, make the tiles and finish:
dq = 2^(G - R) dq+, dk = 2^(G - R) dk+ + 2^(R - G) dk-, and the decay's gradient
from

  dG = q+ dq+ + k+ dk+ - k- dk-,  plus sum_v S_out dS at the last row

summed backwards over rows, through the gate and the norms. While they make the
tiles the third takes its products that no decay enters, and while they finish
it moves this item out and the next one in.
"""

import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import mosaic_gpu_lanes as lanes_lib
from pallas_kernels.kda import mosaic_gpu_prep as prep_lib
from pallas_kernels.kda.mosaic_gpu_prep import BETA
from pallas_kernels.kda.mosaic_gpu_prep import CHUNK
from pallas_kernels.kda.mosaic_gpu_prep import HALF
from pallas_kernels.kda.mosaic_gpu_prep import K_NORM
from pallas_kernels.kda.mosaic_gpu_prep import LOG2_E
from pallas_kernels.kda.mosaic_gpu_prep import MANTISSA
from pallas_kernels.kda.mosaic_gpu_prep import Q_NORM
from pallas_kernels.kda.mosaic_gpu_prep import READS_STATE
from pallas_kernels.kda.mosaic_gpu_prep import ROW
from pallas_kernels.kda.mosaic_gpu_prep import VALID
from pallas_kernels.kda.mosaic_gpu_prep import WRITES_STATE
from pallas_kernels.kda.mosaic_gpu_prep import Plan

_LN2 = 1.0 / LOG2_E
_PITCH = 128 + 8  # fp32 words of a row: wgmma rows then start in other banks
# What the corner's operands are multiplied by, and its scores divided: a row
# moved to the other half's R would be too small for bf16 under strong decay.
_CORNER_SHIFT = 32
# Rows of the small [64] vectors.
_PAST_DOT, _DBETA = range(4, 6)  # after prep's
_BIAS, _GAM, _PASSED = range(3)
# Per thread of the first two warpgroups and of the third, which have 3 x 168.
# The norms and the flags together take more of the first two's.
_REGISTERS, _REGISTERS_RAW_MASKED = (152, 200), (160, 184)
# Barriers of two arrivals: two copies, or two warpgroups.
_OF_TWO = (
    "z_ready",
    "qk_ready",
    "flags_ready",
    "tiles_barrier",
    "gate_barrier",
)


@functools.partial(jax.jit, static_argnums=0)
def gradient(plan: Plan, q, k, z, beta, slope, bias, flags, saved):
  """Gradients of q, k, z, beta and sums for the gate's parameters.

  Args:
    plan: the static part.
    q: [B, T, H, K] bf16, as k.
    k: see q.
    z: [B, T, HV, K].
    beta: [B, HV, T64] fp32, 0 on padding rows and nowhere else.
    slope: [HV].
    bias: [HV, K].
    flags: [B, T64] or None.
    saved: states, ds [B, HV, N, V, K] bf16, v_new [B, HV, N, 2, 64, V] bf16, dv
      and do [B, T, HV, V] bf16.

  Returns:
    dq, dk [B, T, HV, K] bf16, one per value head; dz like z; dbeta [B, HV, T64]
    fp32; sums [B, HV, N, 2, 4, K] fp32, to be summed over chunks and warps:
    the gradient of bias, and per channel that of slope.
  """
  batch, tokens, _, width = q.shape
  value_heads = z.shape[2]
  chunks = beta.shape[2] // CHUNK
  values = saved[3].shape[-1]
  rows = jax.ShapeDtypeStruct((batch, tokens, value_heads, width), jnp.bfloat16)
  out_type = [
      rows,
      rows,
      jax.ShapeDtypeStruct(z.shape, z.dtype),
      jax.ShapeDtypeStruct(beta.shape, jnp.float32),
      jax.ShapeDtypeStruct(
          (batch, value_heads, chunks, 2, 4, width), jnp.float32
      ),
  ]
  tiled = lanes_lib.TILED

  def smem(shape, dtype=jnp.float32, transforms=()):
    return plgpu.SMEM((1, *shape), dtype, transforms=transforms)

  def bf16(*shape):
    return smem(shape, jnp.bfloat16, tiled)

  scratch = dict(
      q_tile=bf16(CHUNK, width),
      k_tile=bf16(CHUNK, width),
      k_minus=bf16(CHUNK, width),
      # Only the early products read dS, which comes last. What is written
      # after them and before the staging, `passed` and `norms`, lies in it or
      # where nothing else does.
      union=plgpu.RefUnion(
          [
              bf16(values, width),
              *(bf16(CHUNK, values) for _ in range(4)),
              bf16(values, width),
          ],
          [smem((3, CHUNK, _PITCH)), smem((4, width)), smem((CHUNK, 4))],
      ),
      totals=smem((4, width)),
      factors=smem((4, width)),
      channels=smem((3, width)),
      rows=smem((6, CHUNK)),
      # One array, hence one register for the phases of all.
      of_two=plgpu.Barrier(num_arrivals=2, num_barriers=len(_OF_TWO)),
      saved_ready=plgpu.Barrier(num_arrivals=7, num_barriers=(1,)),
      norms_barrier=plgpu.Barrier(num_arrivals=1, num_barriers=(1,)),
      barrier=plgpu.Barrier(num_arrivals=3, num_barriers=(1,)),
  )
  z_tile, cross = smem((CHUNK, width), z.dtype), bf16(3 * HALF, width)
  sums = smem((2, 4, width))
  if z.dtype == jnp.float32:
    # Too large to stay: fetched again at the end, and dz is written over it.
    scratch |= dict(z_or_cross=plgpu.RefUnion(z_tile, cross), sums=sums)
  else:
    # The cross tiles are dead when dz and the sums are made, and not needed
    # before these have left; the next item's z can come meanwhile.
    union = plgpu.RefUnion(cross, [z_tile, sums])
    scratch |= dict(z_tile=z_tile, cross_or_out=union)
  operands = [q, k, z, beta, slope, bias, *saved]
  if plan.masked:
    scratch["flags"] = smem((CHUNK,), jnp.int32)
    operands.append(flags)
  if plan.interpret is not None:
    scratch["stage"] = bf16(3, CHUNK, CHUNK)
  items = batch * value_heads * chunks
  walk = prep_lib.Walk(
      batch=batch,
      chunks=chunks,
      value_heads=value_heads,
      heads_per_query=value_heads // q.shape[2],
      pairs=1,
      blocks=min(prep_lib.num_blocks(plan), items),
  )
  kernel = plgpu.kernel(
      functools.partial(_body, plan, walk),
      out_type=out_type,
      scratch_types=scratch,
      grid=(walk.blocks,),
      grid_names=("block",),
      num_threads=3,
      thread_name="warpgroup",
      kernel_name="kda_gradient",
      compiler_params=plgpu.CompilerParams(
          approx_math=True,
          unsafe_no_auto_barriers=True,
          lowering_semantics=plgpu.LoweringSemantics.Lane,
          reduction_scratch_bytes=0,
      ),
      interpret=plan.interpret,
  )
  return kernel(*operands)


def _body(
    plan,
    walk,
    q_gm,
    k_gm,
    z_gm,
    beta_gm,
    slope_gm,
    bias_gm,
    states_gm,
    ds_gm,
    v_new_gm,
    dv_gm,
    do_gm,
    *rest,
    **scratch,
):
  flags_gm, outputs = rest[:-5], rest[-5:]
  dq_gm, dk_gm, dz_gm, dbeta_gm, sums_gm = outputs
  role = lax.axis_index("warpgroup")
  saved, (staging, passed, norms) = scratch.pop("union")
  names = ("state", "v_new", "v_low", "dr", "do", "ds")
  of_two = scratch.pop("of_two")
  refs = scratch | dict(zip(names, saved, strict=True))
  refs |= dict(staging=staging, passed=passed, norms=norms)
  again = "z_or_cross" in refs
  if again:
    refs["z_tile"], refs["cross"] = prep_lib.members(refs.pop("z_or_cross"))
    refs["dz_tile"] = refs["z_tile"]
  else:
    refs["cross"], (refs["dz_tile"], refs["sums"]) = refs.pop("cross_or_out")
  first = lax.axis_index("block")
  count = walk.count(first)
  copy = plgpu.copy_gmem_to_smem
  interpret = plan.interpret is not None
  width = q_gm.shape[-1]

  def views():
    # As in `mosaic_gpu_prep`: addresses that are not known before the loop. And
    # not before the next call: each phase, and some products, make their own.
    this = 0 if interpret else lanes_lib.opaque_zero()
    s = {name: ref.at[this] for name, ref in refs.items()}
    return s | {name: of_two.at[this + i] for i, name in enumerate(_OF_TWO)}

  def place(i):
    b, chunk, head = walk.item(first, i)
    return b, head, chunk, pl.ds(chunk * CHUNK, CHUNK)

  def load_saved(i, s):
    b, head, chunk, rows = place(i)
    at = (b, head, chunk)
    copy(states_gm.at[at], s["state"], s["saved_ready"])
    copy(ds_gm.at[at], s["ds"], s["saved_ready"])
    for part, name in enumerate(("v_new", "v_low")):
      copy(v_new_gm.at[*at, part], s[name], s["saved_ready"])
    copy(dv_gm.at[b, rows, head], s["dr"], s["saved_ready"])
    copy(do_gm.at[b, rows, head], s["do"], s["saved_ready"])

  def load_z(i, s):
    b, head, _, rows = place(i)
    copy(z_gm.at[b, rows, head], s["z_tile"], s["z_ready"])
    copy(bias_gm.at[head], s["channels"].at[_BIAS], s["z_ready"])

  def load_rows(i, s):
    b, head, _, rows = place(i)
    source = lax.div(head, walk.heads_per_query)
    copy(k_gm.at[b, rows, source], s["k_tile"], s["qk_ready"])
    copy(q_gm.at[b, rows, source], s["q_tile"], s["qk_ready"])

  def load_vectors(i, s):
    b, head, _, rows = place(i)
    for gm in flags_gm:
      for half in (0, HALF):
        some = pl.ds(rows.start + half, HALF)
        window = s["flags"].at[pl.ds(half, HALF)]
        copy(gm.at[b, some], window, s["flags_ready"])
    copy(beta_gm.at[b, head, rows], s["rows"].at[BETA], s["saved_ready"])

  def arrive(barrier):
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)

  def sync(barrier):
    arrive(barrier)
    plgpu.barrier_wait(barrier)

  def stage(i, side, tile):
    s = views()
    sync(s["barrier"])  # Everyone is done with what the staging overwrites.
    if again and side == 2:
      load_z(i, s)
    s["staging"].at[side, :, pl.ds(0, width)][...] = tile
    sync(s["barrier"])

  def later_sides(i, _):
    """An item of the first two warpgroups."""
    s, slope = views(), slope_gm[place(i)[1]]
    lanes = lanes_lib.Lanes.create(width, role, interpret)
    if plan.masked:
      plgpu.barrier_wait(s["flags_ready"])
    plgpu.barrier_wait(s["z_ready"])
    sums = prep_lib.gate_sums(plan, lanes, slope, s)
    plgpu.commit_smem()
    plgpu.barrier_wait(s["qk_ready"])
    _decayed_tiles(plan, lanes, sums, s)
    plgpu.barrier_wait(s["saved_ready"])
    sync(s["barrier"])
    for side, name in enumerate(("do", "dr")):

      @pl.when(role == side)
      def _(side=side, name=name):
        stage(i, side, _later_side(plan, views(), side, name))

    s = views()
    lanes = lanes_lib.Lanes.create(width, role, interpret)
    if again:
      plgpu.barrier_wait(s["z_ready"])
    of_gate = _finish(plan, lanes, slope, s)
    arrive(s["tiles_barrier"])
    _gate_gradient(plan, lanes, slope, *of_gate, s)
    arrive(s["gate_barrier"])

  def past_side(i, _):
    """An item of the third; it also moves everything in and out."""
    s = views()
    if plan.masked:
      plgpu.barrier_wait(s["flags_ready"])
    if plan.raw:
      plgpu.barrier_wait(s["qk_ready"])
      for of_query in (0, 1):
        prep_lib.row_norms(plan, of_query, s)
    arrive(s["norms_barrier"])  # and what was in the cross tiles has left
    plgpu.barrier_wait(s["saved_ready"])
    early = _early_products(plan, views)
    sync(s["barrier"])
    stage(i, 2, _past_side(plan, early, views))
    s = views()
    _beta_gradient(plan, s)
    plgpu.commit_smem()
    b, head, chunk, rows = place(i)
    store, wait = plgpu.copy_smem_to_gmem, plgpu.wait_smem_to_gmem
    more = i + 1 < count
    plgpu.barrier_wait(s["tiles_barrier"])
    if not again:
      pl.when(more)(lambda: load_z(i + 1, s))
    store(s["q_tile"], dq_gm.at[b, rows, head])
    store(s["k_tile"], dk_gm.at[b, rows, head])
    store(s["rows"].at[_DBETA], dbeta_gm.at[b, head, rows])
    wait(0, wait_read_only=True)

    @pl.when(more)
    def _():  # In the order in which they are waited for.
      load_rows(i + 1, s)
      load_vectors(i + 1, s)
      load_saved(i + 1, s)

    plgpu.barrier_wait(s["gate_barrier"])
    store(s["dz_tile"], dz_gm.at[b, rows, head])
    store(s["sums"], sums_gm.at[b, head, chunk])
    wait(0, wait_read_only=True)
    if again:
      pl.when(more)(lambda: load_z(i + 1, s))

  both = plan.raw and plan.masked
  registers = _REGISTERS_RAW_MASKED if both else _REGISTERS

  @pl.when(role < 2)
  def _():
    plgpu.set_max_registers(registers[0], action="decrease")
    lax.fori_loop(0, count, later_sides, None)

  @pl.when(role == 2)
  def _():
    plgpu.set_max_registers(registers[1], action="increase")
    s = views()
    load_z(0, s)
    load_rows(0, s)
    load_vectors(0, s)
    load_saved(0, s)
    lax.fori_loop(0, count, past_side, None)
    plgpu.wait_smem_to_gmem(0)


def _decayed_tiles(plan, lanes, sums, s):
  """Writes k+, q+ in place, k-, what the other half sees, and the powers."""
  at = prep_lib.references(lanes, s)
  to_edge = jnp.exp2(at.to_edge + _CORNER_SHIFT).astype(jnp.bfloat16)
  from_edge = jnp.exp2(at.from_edge).astype(jnp.bfloat16)
  gam = jnp.exp2(at.whole)
  if plan.masked:
    keeps = (s["flags"][0] & prep_lib.KEEPS_STATE) != 0
    gam = jnp.where(keeps, gam, 0.0)
  # By rows: 2^R and 2^(G_last - R) of the first half, then of the second.
  tail = at.whole - at.middle
  factors = lanes.where_warp_from(1, tail, at.middle)
  factors = lanes.where_warp_from(2, at.middle, factors)
  factors = lanes.where_warp_from(3, tail, factors)
  lanes.store_group(s["factors"], jnp.exp2(factors))
  lanes.store_channels(s["channels"].at[_GAM], gam)
  plgpu.barrier_wait(s["norms_barrier"])
  for r in lanes.rows:
    decay = at.relative(sums[r])
    plus, minus = jnp.exp2(decay), jnp.exp2(0.0 - decay)
    k = lanes.widen(lanes.load_tile(s["k_tile"], r))
    q = lanes.widen(lanes.load_tile(s["q_tile"], r))
    if plan.raw:
      k *= lanes.load_row_value(s["rows"].at[K_NORM], r)
      q *= lanes.load_row_value(s["rows"].at[Q_NORM], r)
    else:
      q *= plan.scale
    if plan.masked:
      flags = lanes.load_row_value(s["flags"], r)
      valid = (flags & VALID) != 0
      k, q = jnp.where(valid, k, 0.0), jnp.where(valid, q, 0.0)
    k_plus = (k * plus).astype(jnp.bfloat16)
    k_past = (k * minus).astype(jnp.bfloat16)
    q_plus = (q * plus).astype(jnp.bfloat16)
    lanes.store_tile(s["k_tile"], r, k_plus)
    lanes.store_tile(s["q_tile"], r, q_plus)
    lanes.store_tile(s["k_minus"], r, k_past)
    # Two steps: their product can be too small for a number that matters.
    k_other = lanes.where_warp_from(2, k_plus, k_past) * to_edge * from_edge
    lanes.store_tile(s["cross"], r, k_other)
    q_other = q_plus * to_edge * from_edge
    q_other = lanes.where_warp_from(2, q_other, k_other)
    lanes.store_tile(s["cross"], r, q_other, upper_offset=HALF)


def _product(preset, terms, stage):
  """preset + sum of a @ b, left operands in registers or shared memory."""
  shape = preset if isinstance(preset, tuple) else preset.shape

  def multiply(acc):
    if not isinstance(preset, tuple) and stage is None:
      acc[...] = preset
    for a, b in terms:
      if stage is not None and isinstance(a, jax.Array):
        stage[...] = a
        a = stage
      plgpu.wgmma(acc, a, b)
    return acc[...]

  product = pl.run_scoped(multiply, plgpu.ACC(shape))
  if not isinstance(preset, tuple) and stage is not None:
    product = product + preset
  return product


def _stage(s, side):
  return s["stage"].at[side] if "stage" in s else None


def _score_parts(plan, x, s, *, later, of_query):
  """`lanes_lib.score_parts` with the rows' segments."""
  flags = plgpu.load(s["flags"], layout=ROW) if plan.masked else None
  inner, corner, *low = lanes_lib.score_parts(
      x,
      later=later,
      diagonal=of_query,
      with_low=of_query,
      flags=flags,
      interpret=plan.interpret is not None,
  )
  return inner, corner * jnp.asarray(2.0**-_CORNER_SHIFT, jnp.bfloat16), *low


def _terms(parts, tile, cross):
  """Products of `_score_parts` with a tile and with what crosses its middle."""
  return list(zip(parts, (tile, cross, tile)))


def _by_half(plan, s, first, width):
  interpret = plan.interpret is not None
  return lanes_lib.half_factors(s["factors"], first, width, interpret)


def _where_flag(plan, s, bit, x):
  if not plan.masked:
    return x
  flags = plgpu.load(s["flags"], layout=ROW)
  keep = lax.broadcast_in_dim((flags & bit) != 0, x.shape, (0,))
  return jnp.where(keep, x, 0.0)


def _row_dot(plan, x, tile):
  """Row sums of x * tile, [64]."""
  total = 0.0
  for first in range(0, x.shape[1], 64):
    piece = tile.at[:, pl.ds(first, 64)]
    y = lanes_lib.load_wide(piece, plan.interpret is not None)
    total += jnp.sum(x[:, first : first + 64] * y, axis=1)
  return total


def _mantissa(s, axis=0):
  """m of `mosaic_gpu_prep`, [64] along an axis of a score."""
  layout = (ROW, prep_lib.COLUMN)[axis]
  return plgpu.load(s["rows"].at[MANTISSA], layout=layout)


def _minus_mantissa(plan, s, shape, axis=0):
  """What dv is multiplied by to give -dr."""
  if not plan.raw:
    return -1.0
  return lax.broadcast_in_dim(-_mantissa(s, axis), shape, (axis,))


def _key_dot(s, dot):
  """A key's <k, dk>, both as without its norm."""
  return dot * _mantissa(s) * _mantissa(s)


def _later_side(plan, s, side, rows_name):
  """dq+ or dk+: gradients of a tile on the later side of a score."""
  width = s["q_tile"].shape[1]
  rows, tile_name = s[rows_name], ("q_tile", "k_tile")[side]

  def products(d_score, tile):
    for name in ("v_new", "v_low"):
      plgpu.wgmma(d_score, rows, s[name].transpose((1, 0)))
    plgpu.wgmma(tile, rows, s["state"])
    d_score = plgpu.wgmma_accumulator_load(d_score, wait_n=1)
    if side == 1:
      d_score *= _minus_mantissa(plan, s, d_score.shape)
    parts = _score_parts(plan, d_score, s, later=True, of_query=side == 0)
    return *parts, plgpu.wgmma_accumulator_load(tile)

  *parts, tile = pl.run_scoped(
      products, plgpu.ACC((CHUNK, CHUNK)), plgpu.ACC((CHUNK, width))
  )
  tile = tile * _by_half(plan, s, 0, width)
  if side == 1:
    tile = tile * _minus_mantissa(plan, s, tile.shape)
  tile = _where_flag(plan, s, READS_STATE, tile)
  terms = _terms(parts, s["k_minus"], s["cross"].at[pl.ds(0, CHUNK)])
  tile = _product(tile, terms, _stage(s, side))
  if plan.raw:
    dot = _row_dot(plan, tile, s[tile_name])
    if side == 0:
      # The tile holds scale q / |q|, its norm's row scale / |q|.
      dot *= 1.0 / plan.scale**2
    else:
      dot = _key_dot(s, dot)
    norm = plgpu.load(s["rows"].at[(Q_NORM, K_NORM)[side]], layout=ROW)
    for column, x in enumerate((norm, dot)):
      s["norms"].at[:, 2 * side + column][...] = x
  return tile


def _early_products(plan, views):
  """What `_past_side` needs and no decay enters; S dS and beta's gradient.

  Args:
    plan: the static part.
    views: makes views of shared memory.

  Returns:
    v' dS^T, and the earlier side's `_score_parts`: of q, then of k.
  """
  interpret = plan.interpret is not None
  width = views()["q_tile"].shape[1]
  columns = [pl.ds(first, CHUNK) for first in range(0, width, CHUNK)]

  def multiply(acc, name, transposed):
    s = views()
    rows = s[name].transpose((1, 0)) if transposed else s[name]
    for part in ("v_new", "v_low"):
      plgpu.wgmma(acc, s[part], rows)

  def products(tile, d_query, d_key, *dots):
    s, in_flight = views(), len(dots) + 4
    for acc, window in zip(dots, columns, strict=True):
      state, ds = (s[name].at[:, window] for name in ("state", "ds"))
      plgpu.wgmma(acc, state.transpose((1, 0)), ds)
    multiply(d_query, "do", True)
    multiply(d_key, "dr", True)
    for acc, window in zip(dots, columns, strict=True):
      in_flight -= 1
      dot = plgpu.wgmma_accumulator_load(acc, wait_n=in_flight)
      passed = s["channels"].at[_PASSED, window]
      lanes_lib.store_diagonal(dot, passed, interpret)
    multiply(tile, "ds", False)
    score = plgpu.wgmma_accumulator_load(d_query, wait_n=4)
    of_query = _score_parts(plan, score, s, later=False, of_query=True)
    score = plgpu.wgmma_accumulator_load(d_key, wait_n=2)
    lanes_lib.store_diagonal(score, s["rows"].at[_DBETA], interpret)
    score *= _minus_mantissa(plan, s, score.shape, axis=1)
    of_key = _score_parts(plan, score, s, later=False, of_query=False)
    free = s["rows"].at[_PAST_DOT]  # written for good after the next barrier
    lanes_lib.make_now([*of_query, *of_key], free, interpret)
    return plgpu.wgmma_accumulator_load(tile), of_query, of_key

  squares = [plgpu.ACC((CHUNK, CHUNK)) for _ in range(2 + len(columns))]
  return pl.run_scoped(products, plgpu.ACC((CHUNK, width)), *squares)


def _beta_gradient(plan, s):
  """Of the error v' / beta and its solve's adjoint m dv / beta, by rows."""
  beta, dots = (plgpu.load(s["rows"].at[i], layout=ROW) for i in (BETA, _DBETA))
  dots = jnp.where(beta != 0.0, dots / beta / beta, 0.0)
  s["rows"][_DBETA] = dots / _mantissa(s) if plan.raw else dots


def _past_side(plan, early, views):
  """dk-: the gradient of the earlier side of both scores and of the state."""
  s = views()
  width = s["q_tile"].shape[1]
  tile, *scores = early
  tile = tile * _by_half(plan, s, 1, width)
  tile = _where_flag(plan, s, WRITES_STATE, tile)
  _passed_by_values(plan, tile, s)
  terms = []
  for score, name, window in zip(scores, ("q_tile", "k_tile"), (HALF, 0)):
    cross = s["cross"].at[pl.ds(window, CHUNK)]
    terms += _terms(score, s[name], cross)
  tile = _product(tile, terms, _stage(s, 2))
  if plan.raw:
    s["rows"][_PAST_DOT] = _key_dot(s, _row_dot(plan, tile, s["k_minus"]))
  return tile


def _passed_by_values(plan, from_state, s):
  """By warps, sum over rows of k- times its gradient through the state."""
  interpret = plan.interpret is not None
  for first in range(0, from_state.shape[1], 64):
    columns = pl.ds(first, 64)
    past = lanes_lib.load_wide(s["k_minus"].at[:, columns], interpret)
    products = from_state[:, first : first + 64] * past
    lanes_lib.store_warp_sums(products, s["passed"].at[:, columns], interpret)


def _finish(plan, lanes, slope, s):
  """From the tiles' gradients to those of q, k and z, in place."""
  at = prep_lib.references(lanes, s)
  if plan.raw:
    minus_bias = -lanes.load_channels(s["channels"].at[_BIAS])
  decays, slopes, logits = {}, {}, {}
  for r in lanes.rows:
    logits[r] = lanes.load_plain(s["z_tile"], r)
    z = lanes.widen(logits[r])
    if plan.raw:
      # Bounded, so that 0 * infinity cannot arise below.
      e = jnp.minimum(jnp.exp2(z * -slope + minus_bias), 2.0**60)
      sigmoid = lanes.reciprocal(1.0 + e)
      g = sigmoid * (plan.lower_bound * LOG2_E)
      slopes[r] = sigmoid * sigmoid * e  # times the factor below
    else:
      g = jnp.maximum(z, plan.lower_bound) * LOG2_E
      slopes[r] = jnp.where(z >= plan.lower_bound, 1.0, 0.0)
    if plan.masked:
      flags = lanes.load_row_value(s["flags"], r)
      valid = (flags & VALID) != 0
      g = jnp.where(valid, g, 0.0)
      slopes[r] = jnp.where(valid, slopes[r], 0.0)
      logits[r] = jnp.where(valid, logits[r], 0.0)
    decays[r] = g
  sums, _ = lanes.running_sums(decays)
  d_sums = {}
  for r in lanes.rows:
    decay = at.relative(sums[r])
    plus, minus = jnp.exp2(decay), jnp.exp2(0.0 - decay)
    dq, dk, dk_past = (
        lanes.load_plain(s["staging"].at[side], r) for side in range(3)
    )
    q = lanes.widen(lanes.load_tile(s["q_tile"], r))
    k = lanes.widen(lanes.load_tile(s["k_tile"], r))
    k_past = lanes.widen(lanes.load_tile(s["k_minus"], r))
    d_sums[r] = q * dq + k * dk - k_past * dk_past
    if plan.raw:
      q_norm, q_dot, k_norm, k_dot = lanes.load_row_values(s["norms"], r)
      k_dot += lanes.load_row_value(s["rows"].at[_PAST_DOT], r)
      dq = q_norm * (plus * dq - minus * (q * q_dot))
      dk = k_norm * (plus * dk + minus * (dk_past - k * k_dot))
    else:
      dq = plus * dq * plan.scale
      dk = plus * dk + minus * dk_past
    if plan.masked:
      flags = lanes.load_row_value(s["flags"], r)
      valid = (flags & VALID) != 0
      dq, dk = jnp.where(valid, dq, 0.0), jnp.where(valid, dk, 0.0)
    lanes.store_tile(s["q_tile"], r, dq.astype(jnp.bfloat16))
    lanes.store_tile(s["k_tile"], r, dk.astype(jnp.bfloat16))
  # Through the state after the chunk.
  gam, after = (
      lanes.load_channels(s["channels"].at[row]) for row in (_GAM, _PASSED)
  )
  after *= gam
  for w in range(4):
    after += lanes.load_channels(s["passed"].at[w])
  return d_sums, slopes, logits, after


def _gate_gradient(plan, lanes, slope, d_sums, slopes, logits, after, s):
  """Sums dG backwards over rows and goes through the gate."""
  factor = plan.lower_bound * _LN2 if plan.raw else 1.0
  lanes.store_group(s["factors"], lanes.running_sums(d_sums)[1])
  plgpu.commit_smem()
  # What the later warps' rows sum to.
  for w in (3, 2, 1):
    later = after + lanes.load_channels(s["factors"].at[w])
    after = lanes.where_warp_from(w, after, later)
  d_sums = lanes.sums_from_end(d_sums, after)
  d_bias, d_slope = {}, {}
  to_dz = slope * factor if plan.raw else 1.0
  for r in lanes.rows:
    dx = d_sums[r] * slopes[r]
    d_bias[r] = dx
    d_slope[r] = dx * lanes.widen(logits[r])
    dz = (dx * to_dz).astype(s["dz_tile"].dtype)
    lanes.store_plain(s["dz_tile"], r, dz)
  for i, values in enumerate((d_bias, d_slope)):
    total = lanes.running_sums(values)[1]
    lanes.store_group(s["sums"].at[i], total * factor)
