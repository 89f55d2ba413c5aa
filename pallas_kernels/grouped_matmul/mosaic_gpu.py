"""Grouped matrix product on Hopper: what its kernels serve, and gradients.

`mosaic_gpu_rows` makes the product and its gradient by the rows,
`mosaic_gpu_weights` the gradient by the matrices; `mosaic_gpu_schedule` says
which tiles there are. README.md has the picture and the numbers, NOTES.md
what each version cost.
"""

from collections.abc import Sequence
import functools

import jax
from jax import numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import mosaic_gpu_rows as rows_lib
from pallas_kernels.grouped_matmul import mosaic_gpu_schedule as schedule
from pallas_kernels.grouped_matmul import mosaic_gpu_weights as weights_lib

Plan = schedule.Plan


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array | Sequence[jax.Array],
    group_sizes: jax.Array,
    *,
    plan: Plan = Plan(),  # noqa: B008  (frozen)
) -> jax.Array:
  """`api.grouped_matmul`, its checks done; lhs and rhs in bf16.

  Raises:
    NotImplementedError: a dtype, device or mesh that the kernels do not serve,
      or nothing to compute.
  """
  stacks = tuple(rhs) if isinstance(rhs, Sequence) else (rhs,)
  if lhs.dtype != jnp.bfloat16:
    raise NotImplementedError(f"lhs is {lhs.dtype}, not bfloat16")
  if not lhs.size or not stacks[0].size:
    raise NotImplementedError(f"no elements: {lhs.shape}, {stacks[0].shape}")
  if plan.interpret is None:
    dispatch.check_hopper()
  num_groups, width_in, share = stacks[0].shape
  num_rows, columns = lhs.shape[0], share * len(stacks)
  # Whole tiles of 8 x 64, and no array smaller than what is fetched at once.
  padded_rows = max(_up(num_rows, 8), plan.heights[-1], schedule.CHUNK)
  if plan.interpret is not None:  # it refuses to read past the end
    padded_rows += max(plan.heights[-1], schedule.CHUNK)
  inner, outer = (_padded_width(n, plan) for n in (width_in, columns))
  lhs = _pad(lhs, (padded_rows, inner))
  straddling = share % max(plan.slice, plan.weight_columns)
  if len(stacks) > 1 and (straddling or outer != columns):
    stacks = (jnp.concatenate(stacks, axis=-1),)
  shape = (num_groups, inner, outer // len(stacks))
  stacks = tuple(_pad(stack, shape) for stack in stacks)
  out = _product(plan, lhs, stacks, group_sizes)
  return out[:num_rows, :columns]


def _up(n, unit):
  return -(-n // unit) * unit


def _padded_width(width, plan):
  if plan.interpret is not None:
    largest = max(plan.slice, plan.weight_rows, plan.weight_columns // 2)
    return _up(width, 2 * plan.cluster * largest)
  return max(_up(width, 64), plan.slice, plan.weight_columns)


def _pad(x, shape):
  if x.shape == shape:
    return x
  return jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, shape)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(plan, lhs, stacks, group_sizes):
  return rows_lib.rows_times_matrices(
      plan, lhs, stacks, group_sizes, transpose=False
  )


def _forward(plan, lhs, stacks, group_sizes):
  out = _product(plan, lhs, stacks, group_sizes)
  return out, (lhs, stacks, group_sizes)


def _backward(plan, residuals, d_out):
  lhs, stacks, group_sizes = residuals
  d_lhs = rows_lib.rows_times_matrices(
      plan, d_out, stacks, group_sizes, transpose=True
  )
  d_stacks = weights_lib.outer_products(
      plan, lhs, d_out, group_sizes, len(stacks)
  )
  return d_lhs, d_stacks, None


_product.defvjp(_forward, _backward)
