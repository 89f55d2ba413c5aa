"""Everything of bounded-decay attention that is local to a chunk, on Hopper.

One chunk of 64 rows of one value head is an item, two warpgroups work on it
(each owns half of K, a thread four channels of eight rows) and a block holds
several such pairs, each walking its own items. With G_i the inclusive sum of
log2 decays from the chunk's first row, and R an integer near the middle of a
32-row half (so every factor below fits bf16 and scaling by 2^R is exact):

  k+ = k 2^(G - R)   k- = k 2^(R - G)   q+ = q 2^(G - R)

Diagonal 32x32 blocks of the two score matrices are q+ k-^T and k+ k-^T; the
lower left block takes k- from the first half, moved to the second half's R. All
further tiles are k+, k-, q+ with whole columns scaled by powers of two. A later
token reaches an earlier row only through such integers, hence exactly not.

  nkgam = -k 2^G       qg = q 2^G       kg = k 2^(G_last - G)
  aqk = tril(q k^T 2^(G_i - G_j))      gam = 2^G_last
  solve = (I + tril(b k k^T 2^(G_i - G_j), -1))^-1 - I

The identity and b are left to the scan, which adds and multiplies them in fp32:
rounded to bf16 they would err by one factor for all of a row. For the states
of the backward pass kg comes in two bf16 parts: rounded to one it loses decays
below 2^-9, whose gradients are sums that nearly cancel.

k here is the key as it came times a power of two, both exact, so that keys
which are one and hardly decay stay one. What their norm lacks, a factor m in
[1/2, 1), is moved: the rule with keys m k, values v and b is the rule with keys
k, values v / m and b m^2.
"""

import dataclasses
import functools
import math

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import mosaic_gpu_lanes as lanes_lib
from pallas_kernels.kda import mosaic_gpu_warp as warp_lib

CHUNK = 64
HALF = 32
BLOCKS = 132  # one per multiprocessor
LOG2_E = math.log2(math.e)
NORM_EPSILON = 1e-6
# A multiple of 2^-14 up to 512 has 23 bits: sums and differences with integers
# are exact, so a factor is the same whatever integer it is taken relative to.
_TO_GRID = 1.5 * 2.0**9

# What the past rows are multiplied by when they move to the other half's R, and
# their scores divided: under strong decay bf16 has no such small numbers.
_MOVED_SHIFT = 32
ROW = plgpu.Layout.WGMMA.reduce(1)  # a value per row of a wgmma tile
COLUMN = plgpu.Layout.WGMMA.reduce(0)
# The first of a kernel's small [64] vectors.
K_NORM, Q_NORM, BETA, MANTISSA = range(4)

# A row's flags when segments or a tail are there: bits, and in two bytes the
# chunk's rows [first, stop) that belong to the row's run.
VALID, READS_STATE, WRITES_STATE, KEEPS_STATE = 1, 2, 4, 8
FIRST_SHIFT, STOP_SHIFT = 8, 16


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is static about one call.

  Attributes:
    raw: q, k need their L2 norm and z is a logit; otherwise z is the natural
      log decay and q, k are used as they come.
    scale: factor on q.
    lower_bound: of the gate (raw), or the floor under a given decay.
    masked: rows carry flags.
    pairs: warpgroup pairs per block.
    interpret: InterpretGPUParams, or None on the device.
  """

  raw: bool
  scale: float
  lower_bound: float
  masked: bool
  pairs: int = 2
  interpret: plgpu.InterpretGPUParams | None = None


@functools.partial(jax.jit, static_argnums=0, static_argnames="with_low")
def prep(plan: Plan, q, k, z, beta, slope, bias, flags, *, with_low: bool):
  """Computes the tiles of the module's docstring.

  Args:
    plan: the static part.
    q: [B, T, H, K] bf16, as k.
    k: see q.
    z: [B, T, HV, K] bf16 or fp32.
    beta: [B, HV, T64] fp32, T64 being T rounded up to 64.
    slope: [HV] fp32, exp(a_log) log2(e).
    bias: [HV, K] fp32, slope * dt_bias.
    flags: [B, T64] int32, see VALID and FIRST_SHIFT (masked only).
    with_low: whether to make kg_low.

  Returns:
    nkgam, qg, kg [B, HV, N, 64, K] bf16; aqk, solve [B, HV, N, 64, 64] bf16;
    gam [B, HV, N, K] fp32; scales [B, HV, N, 2, 64] fp32, b m^2 and 1 / m;
    kg_low, what kg lacks as bf16, like kg, or None.
  """
  local = (q, k, z, beta, slope, bias, flags)
  work = Work.of(plan, local, with_low, num_blocks(plan))
  kernel = plgpu.kernel(
      work.run,
      out_type=work.out_type,
      grid=(work.walk.blocks,),
      grid_names=("block",),
      num_threads=2 * plan.pairs,
      thread_name="warpgroup",
      kernel_name="kda_prep",
      compiler_params=plgpu.CompilerParams(
          approx_math=True,
          unsafe_no_auto_barriers=True,
          lowering_semantics=plgpu.LoweringSemantics.Lane,
      ),
      interpret=plan.interpret,
  )
  return work.tiles(kernel(*work.operands))


@dataclasses.dataclass(frozen=True)
class Work:
  """What prep reads, makes and needs on the chip.

  Attributes:
    plan: the static part.
    walk: which block works on what.
    operands: arrays.
    out_type: the tiles' shapes.
    scratch: a block's shared memory and barriers.
    over_z: names of the tiles that take z's place when it has been read.
  """

  plan: Plan
  walk: "Walk"
  operands: list
  out_type: list
  scratch: dict
  over_z: tuple[str, ...]

  @classmethod
  def of(cls, plan, local, with_low, blocks) -> "Work":
    """For `prep`'s arguments, on so many blocks."""
    q, k, z, beta, slope, bias, flags = local
    batch, _, heads, width = q.shape
    value_heads = z.shape[2]
    chunks = beta.shape[2] // CHUNK
    lead = (batch, value_heads, chunks)
    tile = jax.ShapeDtypeStruct((*lead, CHUNK, width), jnp.bfloat16)
    square = jax.ShapeDtypeStruct((*lead, CHUNK, CHUNK), jnp.bfloat16)
    vector = jax.ShapeDtypeStruct((*lead, width), jnp.float32)
    scales = jax.ShapeDtypeStruct((*lead, 2, CHUNK), jnp.float32)
    walk = Walk(
        batch,
        chunks,
        value_heads,
        value_heads // heads,
        plan.pairs,
        min(blocks, pl.cdiv(math.prod(lead), plan.pairs)),
    )
    operands = [q, k, z, beta, slope, bias]
    if plan.masked:
      operands.append(flags)
    out_type = [tile, tile, tile, square, square, vector, scales]
    out_type += [tile] * with_low
    scratch, over_z = _scratch(plan, width, z.dtype, with_low)
    return cls(plan, walk, operands, out_type, scratch, over_z)

  @staticmethod
  def tiles(outputs):
    """The outputs, or refs of them, as `prep` returns them."""
    return (*outputs, None)[:8]

  def run(self, *refs, announce=None):
    """Works; all warpgroups of the block come here.

    Args:
      *refs: of the operands and outputs.
      announce: called with (batch, head, chunk) by one warpgroup of a pair when
        what both stored of that chunk can be read.
    """
    body = functools.partial(
        _prep_body, self.plan, self.walk, self.over_z, announce, *refs
    )
    pl.run_scoped(body, collective_axes="warpgroup", **self.scratch)


def _scratch(plan, width, z_dtype, with_low):
  pairs = plan.pairs

  def smem(shape, dtype, transforms=()):
    return plgpu.SMEM((pairs, *shape), dtype, transforms=transforms)

  def barriers(arrivals):
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=(pairs,))

  def tile_of(rows, columns):
    return smem((rows, columns), jnp.bfloat16, lanes_lib.TILED)

  z_tile = smem((CHUNK, width), z_dtype)
  # k-, and below it its first half as the second half's rows see it.
  later = dict(kg_tile=tile_of(CHUNK, width), past=tile_of(CHUNK + HALF, width))
  low = dict(kg_low=tile_of(CHUNK, width)) if with_low else {}
  # What is made after z's end and takes its place, where there is no other.
  over_z = later if z_dtype == jnp.float32 else low
  scratch = {n: x for n, x in (later | low).items() if n not in over_z}
  if over_z:
    scratch["z_union"] = plgpu.RefUnion(z_tile, list(over_z.values()))
  else:
    scratch["z_tile"] = z_tile
  scratch |= dict(
      q_tile=tile_of(CHUNK, width),
      k_tile=tile_of(CHUNK, width),
      aqk_tile=tile_of(CHUNK, CHUNK),
      solve_union=plgpu.RefUnion(
          tile_of(CHUNK, CHUNK), smem(warp_lib.BLOCKS, jnp.bfloat16)
      ),
      totals=smem((4, width), jnp.float32),
      powers=smem((4, width), jnp.bfloat16),
      rows=smem((4, CHUNK), jnp.float32),
      channels=smem((2, width), jnp.float32),
      z_ready=barriers(2),
      qk_ready=barriers(3 if plan.masked else 2),
      beta_ready=barriers(1),
      pair_barrier=barriers(2),
      tiles_read=barriers(1),
  )
  if plan.masked:
    scratch["flags"] = smem((CHUNK,), jnp.int32)
  return scratch, tuple(over_z)


def num_blocks(plan: Plan) -> int:
  """Blocks of a persistent kernel; few in the interpreter, so that they loop."""
  return 2 if plan.interpret is not None else BLOCKS


@dataclasses.dataclass(frozen=True)
class Walk:
  """Which chunk of which head a pair works on, heads fastest, chunks last."""

  batch: int
  chunks: int
  value_heads: int
  heads_per_query: int
  pairs: int
  blocks: int

  def count(self, first):
    items = self.batch * self.chunks * self.value_heads
    stride = self.pairs * self.blocks
    return (items - first + stride - 1) // stride

  def item(self, first, i):
    index = first + i * (self.pairs * self.blocks)
    head = lax.rem(index, self.value_heads)
    index = lax.div(index, self.value_heads)
    return lax.rem(index, self.batch), lax.div(index, self.batch), head


def _prep_body(
    plan,
    walk,
    over_z,
    announce,
    q_gm,
    k_gm,
    z_gm,
    beta_gm,
    slope_gm,
    bias_gm,
    *rest,
    **scratch
):
  flags_gm, outputs = rest[: int(plan.masked)], rest[int(plan.masked) :]
  nkgam_gm, qg_gm, kg_gm, aqk_gm, solve_gm, gam_gm, scales_gm, *low_gm = outputs
  warpgroup = lax.axis_index("warpgroup")
  pair, role = lax.div(warpgroup, 2), lax.rem(warpgroup, 2)
  solve_tile, blocks = members(scratch.pop("solve_union"))
  refs = scratch | dict(solve_tile=solve_tile, blocks=blocks)
  if over_z:
    refs["z_tile"], others = refs.pop("z_union")
    refs |= zip(over_z, others, strict=True)
  refs["k_minus"] = refs["past"].at[:, pl.ds(0, CHUNK)]
  refs["moved"] = refs["past"].at[:, pl.ds(CHUNK, HALF)]

  def views(i=0):
    # Adds a zero that the compiler cannot know: else it computes the address of
    # every matrix operand before the loop and spills them all.
    this = pair + lax.shift_right_logical(jnp.int32(i), 30)
    return {name: ref.at[this] for name, ref in refs.items()}

  first = lax.axis_index("block") * walk.pairs + pair
  count = walk.count(first)
  width = q_gm.shape[-1]
  interpret = plan.interpret is not None

  def lanes_of(half):
    return lanes_lib.Quads.create(width, half, interpret)

  def rows_of(i):
    b, chunk, head = walk.item(first, i)
    return b, chunk, head, pl.ds(chunk * CHUNK, CHUNK)

  def load_z(i, s):
    b, _, head, rows = rows_of(i)
    plgpu.copy_gmem_to_smem(z_gm.at[b, rows, head], s["z_tile"], s["z_ready"])
    plgpu.copy_gmem_to_smem(bias_gm.at[head], s["channels"].at[0], s["z_ready"])

  def load_qk(i, s):
    b, _, head, rows = rows_of(i)
    source = lax.div(head, walk.heads_per_query)
    for gm, tile in ((q_gm, s["q_tile"]), (k_gm, s["k_tile"])):
      plgpu.copy_gmem_to_smem(gm.at[b, rows, source], tile, s["qk_ready"])
    for gm in flags_gm:
      plgpu.copy_gmem_to_smem(gm.at[b, rows], s["flags"], s["qk_ready"])

  def load_beta(i, s):
    b, _, head, rows = rows_of(i)
    plgpu.copy_gmem_to_smem(
        beta_gm.at[b, head, rows], s["rows"].at[BETA], s["beta_ready"]
    )

  def sync(s):
    plgpu.commit_smem()
    plgpu.barrier_arrive(s["pair_barrier"])
    plgpu.barrier_wait(s["pair_barrier"])

  def of_next(i, load, s):
    pl.when(i + 1 < count)(lambda: load(i + 1, s))

  def announce_item(i):
    b, chunk, head = walk.item(first, i)
    announce(b, head, chunk)

  def slope_of(i):
    return slope_gm[walk.item(first, i)[2]]

  @pl.when((count > 0) & (role == 1))
  def _():
    load_z(0, views())
    load_qk(0, views())

  def one_item(i, slope):
    b, chunk, head = walk.item(first, i)
    out = (b, head, chunk)
    s = views(i)
    if plan.masked:
      plgpu.barrier_wait(s["qk_ready"])
    plgpu.barrier_wait(s["z_ready"])
    lanes = lanes_of(role)
    sums, earlier, total = lanes.sums_by_group(
        gate_decays(plan, lanes, slope, s)
    )
    lanes.store_group(s["totals"], total)
    slope = slope_of(jnp.minimum(i + 1, count - 1))
    # The last item has left what is written from here on.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    pl.when(role == 0)(lambda: load_beta(i, s))
    if not plan.masked:
      plgpu.barrier_wait(s["qk_ready"])
    if plan.raw:
      row_norms(plan, role, s)
    sync(s)
    if not over_z:
      pl.when(role == 1)(lambda: of_next(i, load_z, s))
    _decayed_tiles(plan, lanes_of(role), sums, earlier, s)
    if announce is not None:
      # The last item has arrived by now, and nothing of this one has left.
      plgpu.wait_smem_to_gmem(0)
    sync(s)

    @pl.when(role == 0)
    def _():
      scores = _scores("k_tile", s)
      plgpu.barrier_wait(s["beta_ready"])
      beta, seen = _scales(plan, s), _first_of_run(plan, s)
      plgpu.commit_smem()
      plgpu.barrier_arrive(s["tiles_read"])
      s["solve_tile"][...] = warp_lib.invert(
          scores, beta, seen, s["blocks"], _MOVED_SHIFT, interpret
      )
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(s["solve_tile"], solve_gm.at[out])
      plgpu.copy_smem_to_gmem(s["rows"].at[pl.ds(BETA, 2)], scales_gm.at[out])

    @pl.when(role == 1)
    def _():
      plgpu.copy_smem_to_gmem(s["kg_tile"], kg_gm.at[out])
      for gm in low_gm:
        plgpu.copy_smem_to_gmem(s["kg_low"], gm.at[out])
      plgpu.copy_smem_to_gmem(s["channels"].at[1], gam_gm.at[out])
      scores, seen = _scores("q_tile", s), _first_of_run(plan, s)
      s["aqk_tile"][...] = warp_lib.causal(
          scores, seen, _MOVED_SHIFT, interpret
      )
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(s["aqk_tile"], aqk_gm.at[out])
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)
      if over_z == ("kg_low",):
        of_next(i, load_z, s)
      plgpu.barrier_wait(s["tiles_read"])
      # -k 2^G and q 2^G take the places of kg and k-, so that the next item's
      # q and k can come while these leave.
      keep = (s["flags"], READS_STATE) if plan.masked else ()
      lanes_lib.scale_columns(
          [s["k_tile"], s["q_tile"]],
          [s["kg_tile"], s["k_minus"]],
          [-1, 1],
          s["powers"],
          keep,
          interpret,
      )
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(s["kg_tile"], nkgam_gm.at[out])
      plgpu.copy_smem_to_gmem(s["k_minus"], qg_gm.at[out])
      of_next(i, load_qk, s)
      if "kg_tile" in over_z:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        of_next(i, load_z, s)
      if announce is not None:
        # Here, since this warpgroup waits for the other one next.
        pl.when(i > 0)(lambda: announce_item(i - 1))

    return slope

  @pl.when(count > 0)
  def _():
    lax.fori_loop(0, count, one_item, slope_of(0))
    if announce is not None:
      plgpu.wait_smem_to_gmem(0)
      sync(views())
      pl.when(role == 1)(lambda: announce_item(count - 1))

  plgpu.wait_smem_to_gmem(0)


def members(union):
  """The two members of a RefUnion scratch."""
  return [m[0] if isinstance(m, (tuple, list)) else m for m in union]


def gate_sums(plan, lanes, slope, s):
  """Running sums of the log2 decay over a warp's rows; writes their totals."""
  sums, total = lanes.running_sums(gate_decays(plan, lanes, slope, s))
  lanes.store_group(s["totals"], total)
  return sums


def gate_decays(plan, lanes, slope, s):
  """Log2 decays of this thread's rows."""
  if plan.raw:
    bias = lanes.load_channels(s["channels"].at[0])
  if plan.masked:
    flags = lanes.load_row_vectors(s["flags"])
  decays = {}
  for r in lanes.rows:
    z = lanes.widen(lanes.load_plain(s["z_tile"], r))
    if plan.raw:
      e = jnp.exp2(z * -slope - bias)
      g = lanes.reciprocal(1.0 + e) * (plan.lower_bound * LOG2_E)
    else:
      g = jnp.maximum(z, plan.lower_bound) * LOG2_E
    if plan.masked:
      g = jnp.where((flags[r] & VALID) != 0, g, 0.0)
    decays[r] = g
  return decays


def row_norms(plan, role, s):
  """Of each row 1 / |k| = 2^e m, as rows 2^e and m, and scale / |q|."""
  for r, (name, scale) in enumerate((("k_tile", 1.0), ("q_tile", plan.scale))):

    @pl.when(role == r)
    def _(r=r, name=name, scale=scale):
      squares = warp_lib.row_squares(s[name], plan.interpret is not None)
      norm = lax.rsqrt(squares + NORM_EPSILON) * scale
      if r == Q_NORM:
        s["rows"][r] = norm
        return
      bits = lax.bitcast_convert_type(norm, jnp.int32)
      mantissa = lax.bitcast_convert_type(
          (bits & 0x7FFFFF) | 0x3F000000, jnp.float32
      )
      if plan.masked:  # A padding row's key may be anything.
        flags = plgpu.load(s["flags"], layout=ROW)
        mantissa = jnp.where((flags & VALID) != 0, mantissa, 1.0)
      s["rows"][K_NORM] = lax.bitcast_convert_type(
          (bits & 0x7F800000) + 0x800000, jnp.float32
      )
      s["rows"][MANTISSA] = mantissa


def _scales(plan, s):
  """Makes rows BETA and MANTISSA b m^2 and 1 / m; returns b m^2 by rows."""
  beta = plgpu.load(s["rows"].at[BETA], layout=ROW)
  if plan.raw:
    mantissa = plgpu.load(s["rows"].at[MANTISSA], layout=ROW)
    beta = beta * mantissa * mantissa
    s["rows"][BETA] = beta
    s["rows"][MANTISSA] = 1.0 / mantissa
  else:
    s["rows"][MANTISSA] = plgpu.layout_cast(jnp.ones_like(beta), ROW)
  return beta


def _decayed_tiles(plan, lanes, sums, earlier, s):
  """Writes k+, q+ in place, k-, k- as moved, kg, its rest and the powers."""
  at = references(lanes, s)
  at = dataclasses.replace(at, base=at.base + earlier)
  to_state = jnp.exp2(at.whole - at.middle)
  # Two steps, by way of the boundary: at once it can be too small a factor for
  # a number that matters.
  steps = at.to_edge + _MOVED_SHIFT, at.from_edge
  steps = [jnp.exp2(x).astype(jnp.bfloat16) for x in steps]
  gam = jnp.exp2(at.whole)
  if plan.masked:
    # The state passes only if the chunk ends in the segment it began in.
    keeps = (s["flags"][0] & KEEPS_STATE) != 0
    gam = jnp.where(keeps, gam, 0.0)
    flags = lanes.load_row_vectors(s["flags"])
  lanes.store_group(s["powers"], jnp.exp2(at.middle).astype(jnp.bfloat16))
  lanes.store_channels(s["channels"].at[1], gam)
  if plan.raw:
    k_norms, q_norms = (
        lanes.load_row_vectors(s["rows"].at[row]) for row in (K_NORM, Q_NORM)
    )
  for r in lanes.rows:
    decay = at.relative(sums[r])
    plus = jnp.exp2(decay)
    minus = lanes.reciprocal(plus)
    k = lanes.widen(lanes.load_tile(s["k_tile"], r))
    q = lanes.widen(lanes.load_tile(s["q_tile"], r))
    if plan.raw:
      k *= k_norms[r]
      q *= q_norms[r]
    else:
      q *= plan.scale
    if plan.masked:
      valid = (flags[r] & VALID) != 0
      k, q = jnp.where(valid, k, 0.0), jnp.where(valid, q, 0.0)
    k_past = k * minus
    kg = k_past * to_state
    if plan.masked:
      kg = jnp.where((flags[r] & WRITES_STATE) != 0, kg, 0.0)
    k_past = k_past.astype(jnp.bfloat16)
    kg_high = kg.astype(jnp.bfloat16)
    lanes.store_tile(s["k_tile"], r, (k * plus).astype(jnp.bfloat16))
    lanes.store_tile(s["q_tile"], r, (q * plus).astype(jnp.bfloat16))
    lanes.store_tile(s["k_minus"], r, k_past)
    lanes.store_tile(s["kg_tile"], r, kg_high)
    if "kg_low" in s:
      low = kg - lanes.widen(kg_high)
      lanes.store_tile(s["kg_low"], r, low.astype(jnp.bfloat16))
    moved = k_past * steps[0] * steps[1]
    lanes.store_tile_of_first_half(s["moved"], r, moved)


@dataclasses.dataclass(frozen=True)
class References:
  """What log2 decays are taken relative to, per thread (channel, 16 rows).

  Attributes:
    base: sum over the earlier warps' rows.
    whole: sum over the chunk.
    middle: the integer R of this warp's half.
    to_edge: from R to the integer R_b at the boundary, on this half's side.
    from_edge: from R_b to the other half's R, on the other half's side.
  """

  base: jax.Array
  whole: jax.Array
  middle: jax.Array
  to_edge: jax.Array
  from_edge: jax.Array

  def relative(self, running):
    """G - R exactly, G being rounded to the grid."""
    # A sum on the grid less a multiple of it: exact.
    return ((self.base + _TO_GRID) + running) - (_TO_GRID + self.middle)


def references(lanes, s) -> References:
  """Reads the warps' totals of the log2 decay."""
  total = [lanes.load_channels(s["totals"].at[w]) for w in range(4)]
  boundary = total[0] + total[1]
  whole = boundary + (total[2] + total[3])
  base = lanes.where_warp_from(1, total[0], jnp.zeros_like(whole))
  base = lanes.where_warp_from(2, boundary, base)
  base = lanes.where_warp_from(3, boundary + total[2], base)
  edge = _truncate(boundary)
  first, second = _truncate(total[0]), _truncate(boundary + total[2])
  middle = lanes.where_warp_from(2, second, first)
  down, up = second - edge, edge - first
  return References(
      base,
      whole,
      middle,
      lanes.where_warp_from(2, down, up),
      lanes.where_warp_from(2, up, down),
  )


def _truncate(x):
  return x.astype(jnp.int32).astype(jnp.float32)


def _scores(plus, s):
  """plus k-^T, and behind it plus moved^T: [64, 64 + 32]."""

  def multiply(acc):
    plgpu.wgmma(acc, s[plus], s["past"].transpose((1, 0)))
    return acc[...]

  return pl.run_scoped(multiply, plgpu.ACC((CHUNK, CHUNK + HALF)))


def _first_of_run(plan, s):
  """By rows, the first row of the chunk that is in a row's run."""
  if not plan.masked:
    return None
  flags = plgpu.load(s["flags"], layout=ROW)
  return lax.shift_right_logical(flags, FIRST_SHIFT) & 0xFF
