"""Grouped matrix product by XLA's ragged dot, which is a kernel on TPUs.

The compiler's kernel (seen in its dump, libtpu 0.0.48) takes tiles of 256 rows,
sums in fp32, selects a group's rows in both operands and visits empty groups
for the weights' gradient. Rows past the groups it does not write at all.
Elsewhere XLA expands the ragged dot densely, so only TPUs get it.
"""

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import dispatch

# Contracted axes; rows are ragged; the matrices have an axis of groups.
_ROWS_BY_MATRICES = lax.RaggedDotDimensionNumbers(
    (((1,), (1,)), ((), ())), [0], [0]
)
_ROWS_BY_TRANSPOSES = lax.RaggedDotDimensionNumbers(
    (((1,), (2,)), ((), ())), [0], [0]
)
_OUTER_PRODUCTS = lax.RaggedDotDimensionNumbers(
    (((0,), (0,)), ((), ())), [0], []
)


def grouped_matmul(lhs, rhs, group_sizes):
  """`product` on a TPU; see the api.

  Raises:
    NotImplementedError: another device, or nothing to compute.
  """
  dispatch.check_tpu()
  if not lhs.size or not rhs.size:
    raise NotImplementedError(f"no elements: {lhs.shape}, {rhs.shape}")
  return product(lhs, rhs, group_sizes)


@jax.custom_vjp
def product(lhs, rhs, group_sizes):
  """Multiplies each group of rows by its matrix, on any device."""
  out = _ragged(lhs, rhs, group_sizes, _ROWS_BY_MATRICES)
  return _zero_past(out, group_sizes)


def _forward(lhs, rhs, group_sizes):
  return product(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _backward(residuals, d_out):
  lhs, rhs, group_sizes = residuals
  d_lhs = _ragged(d_out, rhs, group_sizes, _ROWS_BY_TRANSPOSES)
  d_rhs = _ragged(lhs, d_out, group_sizes, _OUTER_PRODUCTS)
  return _zero_past(d_lhs, group_sizes), d_rhs, None


product.defvjp(_forward, _backward)


def _ragged(a, b, group_sizes, dimensions):
  return lax.ragged_dot_general(
      a, b, group_sizes, dimensions, preferred_element_type=a.dtype
  )


def _zero_past(rows, group_sizes):
  inside = jnp.arange(rows.shape[0]) < jnp.sum(group_sizes)
  return jnp.where(inside[:, None], rows, 0)
