"""The public grouped matrix product: checks, then the best implementation."""

from collections.abc import Sequence
import functools

import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import mosaic_gpu
from pallas_kernels.grouped_matmul import ragged
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul import xla


def _joined(product):
  """Of a product that takes one stack: of several, joined by a copy."""

  def run(lhs, stacks, group_sizes):
    rhs = stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks, axis=-1)
    return product(lhs, rhs, group_sizes)

  return run


# Best first; each raises NotImplementedError where it cannot serve.
_IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu.grouped_matmul,
    "ragged_dot": _joined(ragged.grouped_matmul),
    "xla": _joined(xla.grouped_matmul),
    "reference": _joined(reference.grouped_matmul),
}


def grouped_matmul(
    lhs: Float[Array, "m i"],
    rhs: Float[Array, "e i n"] | Sequence[Float[Array, "e i n"]],
    group_sizes: Int[Array, " e"],
    *,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "m sn"]:
  """Multiplies each group of consecutive rows by that group's matrix.

  out[r] = lhs[r] @ rhs[e] for the rows r of group e; group e holds the
  group_sizes[e] rows after those of the groups before it. Rows past the last
  group give 0 and get gradient 0 whatever they hold; an empty group's weight
  gradient is exactly 0. No row is ever dropped.

  Args:
    lhs: [M, I] rows, sorted by group.
    rhs: [E, I, N] one matrix per group, in lhs's dtype; or S such arrays, whose
      matrices count as joined along N, which costs "mosaic_gpu" no copy where
      N is a multiple of 256.
    group_sizes: [E] int32 rows per group, with a sum of at most M.
    implementation: "mosaic_gpu" (Hopper, bf16), "ragged_dot" (TPU), "xla",
      "reference", a sequence of names tried in order, or None for the best on
      this device.

  Returns:
    [M, N], or [M, S N], in lhs's dtype, accumulated in fp32.

  Raises:
    ValueError: shapes or dtypes that do not fit together.
    NotImplementedError: nothing that was asked for serves these arguments.
  """
  stacks = tuple(rhs) if isinstance(rhs, Sequence) else (rhs,)
  for stack in stacks:
    _check(lhs, stack, group_sizes)
  if len({stack.shape for stack in stacks}) != 1:
    raise ValueError(
        f"rhs needs one shape, got {[stack.shape for stack in stacks]}"
    )
  candidates = {
      name: functools.partial(function, lhs, stacks, group_sizes)
      for name, function in _IMPLEMENTATIONS.items()
  }
  return dispatch.run("grouped_matmul", candidates, implementation)


def _check(lhs, rhs, group_sizes):
  if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
    raise ValueError(
        f"lhs [M, I] and rhs [E, I, N] needed, got {lhs.shape}, {rhs.shape}"
    )
  if lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating):
    raise ValueError(
        f"lhs and rhs need one float dtype, got {lhs.dtype}, {rhs.dtype}"
    )
  if group_sizes.shape != rhs.shape[:1] or group_sizes.dtype != jnp.int32:
    raise ValueError(
        f"group_sizes must be int32[{rhs.shape[0]}], got"
        f" {group_sizes.dtype}{list(group_sizes.shape)}"
    )
