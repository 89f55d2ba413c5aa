"""How a call of the Hopper kernels is laid out over blocks and memory."""

import dataclasses
import math

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attn_res import call as call_lib

WARPS, LANES = 4, 32
_MULTIPROCESSORS = 132
_SHARED_BYTES = 227 * 1024
_BARRIERS = 32  # of a kind
_GROUPS_FORWARD, _GROUPS_BACKWARD = 4, 2
_SPLIT_ABOVE = 4096  # columns; more than 32 a thread would spill
_SPLIT_NORMED_ABOVE = 2048  # backward through the norm has twice the vectors


@dataclasses.dataclass(frozen=True)
class Plan:
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
    return self.call.padded // (self.split * WARPS)

  @property
  def vector(self) -> int:
    """Elements that a thread reads at once, 16 bytes where it can."""
    return math.gcd(self.columns // LANES, 16 // self.call.dtype.itemsize)

  @property
  def row(self) -> tuple[int, int]:
    """A warpgroup's part of a row: a line of columns for each warp."""
    return WARPS, self.columns

  @property
  def layout(self):
    vector = self.vector
    return plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS, LANES * vector), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )

  @property
  def by_source(self):
    """[32 sources, warps of a token]: a lane per source, in every warp."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((LANES, WARPS * self.split),)),
        warp_dims=(plgpu.Replicated(WARPS),),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def _split(width: int, normed_backward: bool = False) -> int:
  """Warpgroups per token."""
  above = _SPLIT_NORMED_ABOVE if normed_backward else _SPLIT_ABOVE
  return 1 if width <= above else 2


def row_unit(width: int, normed: bool) -> int:
  """What a padded width is a multiple of: a column for each thread."""
  return WARPS * LANES * _split(width, normed)


def norm_fits(sources) -> bool:
  """Whether the backward pass can keep all rows of a token in its ring."""
  unit = row_unit(sources[0].shape[-1], True)
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


def forward(call: call_lib.Call) -> Plan:
  """Plans the mix, or a merge."""
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
  return Plan(call, groups, split, slots, call.num_sources)


def backward(call: call_lib.Call) -> Plan:
  """Plans their gradient; rows that do not fit the ring are fetched twice."""
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
  return Plan(call, groups, split, slots, items)


def combine(call: call_lib.Call, num_queries: int) -> Plan:
  """Plans phase one for so many queries."""
  row_bytes = call.padded * call.dtype.itemsize
  split = _split(call.padded)
  left = _SHARED_BYTES - 16 * 1024
  for groups in (_GROUPS_FORWARD // split, 2, 1):
    weights = 4 * weights_length(call, num_queries) * split
    # Two rows of results are on the way, and weights of four tokens.
    slots = (left // groups - 4 * weights) // row_bytes - 2
    slots = min(slots, _BARRIERS // (groups * split), 2 * call.num_sources)
    if slots > call.num_sources:
      break
  return Plan(call, groups, split, slots, call.num_sources)


def weights_length(call, num_queries):
  """Of a token's weights; bulk copies are of whole 128 bytes."""
  return -(-num_queries * call.num_sources // 32) * 32
