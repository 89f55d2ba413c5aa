"""What the kernels of every device serve, and how they get it."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

from jax import numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float

MAX_SOURCES = 32  # on Hopper a lane of a warp each
MAX_WIDTH = 8192  # on Hopper 64 columns a thread, in registers


@dataclasses.dataclass(frozen=True)
class Call:
  """What is static in one call.

  Attributes:
    num_sources: S.
    stacked: whether the sources are one array.
    tokens: rows of each source.
    width: D as the caller knows it.
    padded: D in memory, a multiple of 128.
    dtype: of sources and output.
    normed: whether the mix is normed.
    given: whether the first source's logits are.
    eps: added to the mean square.
    interpret: how the kernel is interpreted, or None on the device.
  """

  num_sources: int
  stacked: bool
  tokens: int
  width: int
  padded: int
  dtype: jnp.dtype
  normed: bool
  given: bool
  eps: float
  interpret: Any


def check_served(sources: tuple[Array, ...] | Array) -> None:
  """Raises NotImplementedError, saying why, where no kernel serves."""
  first = sources[0]
  if first.dtype not in (jnp.bfloat16, jnp.float32):
    raise NotImplementedError(f"sources are {first.dtype}, not bf16 or fp32")
  if len(sources) > MAX_SOURCES:
    raise NotImplementedError(f"{len(sources)} sources, above {MAX_SOURCES}")
  if first.shape[-1] > MAX_WIDTH:
    raise NotImplementedError(f"width {first.shape[-1]} is above {MAX_WIDTH}")
  if not first.size:
    raise NotImplementedError("no tokens")


def by_rows(
    mix: Callable[..., Array],
    make: Callable[..., Call],
    sources: tuple[Float[Array, "... D"], ...] | Float[Array, "S ... D"],
    query: Float[Array, " D"],
    use_last: Bool[Array, ""] | None,
    norm_scale: Float[Array, " D"] | None = None,
    first_logits: Float[Array, "..."] | None = None,
    *,
    unit: int,
    **options: Any,
) -> Float[Array, "... D"]:
  """Calls a kernel on rows of whole multiples of `unit` columns.

  Args:
    mix: the kernel, of (call, operands, query, flag, gain, given): S arrays
      [N, D] or one [S, N, D], fp32 [D], and int32 [1], fp32 [D], fp32 [N] or
      None each.
    make: Call, or a class of the device's that extends it.
    sources: of `reference.mix`.
    query: likewise.
    use_last: likewise.
    norm_scale: of `reference.normed_mix`.
    first_logits: fp32, of the first source where they are known; None: like the
      others'.
    unit: columns; other widths are padded, at the cost of a copy.
    **options: further fields of the call.
  """
  first = sources[0]
  width = first.shape[-1]
  stacked = not isinstance(sources, tuple)
  padding = -width % unit

  def pad(x):
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, padding),))

  def rows(x):
    return pad(x.reshape(*x.shape[: int(stacked)], -1, width))

  call = make(
      num_sources=len(sources),
      stacked=stacked,
      tokens=math.prod(first.shape[:-1]),
      width=width,
      padded=width + padding,
      dtype=jnp.dtype(first.dtype),
      normed=norm_scale is not None,
      given=first_logits is not None,
      **options,
  )
  operands = (rows(sources),) if stacked else tuple(map(rows, sources))
  flag = gain = None
  if use_last is not None:
    flag = jnp.reshape(use_last, 1).astype(jnp.int32)
  if norm_scale is not None:
    gain = pad(norm_scale.astype(jnp.float32))
  given = None if first_logits is None else first_logits.reshape(-1)
  mixed = mix(call, operands, pad(query), flag, gain, given)
  return mixed[:, :width].reshape(first.shape)
