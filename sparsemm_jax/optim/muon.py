"""Which parameters are matrices for Muon, and along which axes."""

import math
from typing import Any

import jax
import optax
from optax import contrib

LogicalNames = tuple[str | None, ...]

# Independent matrices are stacked along these axes.
_STACKED = ("layers", "expert")
# One-hot or positional inputs, logits and per-channel filters: a gradient
# touches their rows one by one, so that orthogonalising mixes nothing useful.
_NOT_MATRICES = ("vocab", "position_y", "conv")

# Of a X + b (X X^T) X + c (X X^T)^2 X, for each of five steps. Written out per
# step, they make optax loop over the steps rather than unroll them: 46
# parameters then compile in 11 CPU seconds instead of 17, and run as fast.
_COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5


def dimension_numbers(
    names: LogicalNames,
) -> contrib.MuonDimensionNumbers | None:
  """Reads the axes of a parameter's matrices off its logical names.

  A projection into heads, (input, "heads", "head_dim"), is one matrix
  [input, head_dim] per head; one out of heads, ("heads", "head_dim",
  output), is one matrix [heads * head_dim, output]. A router's kernel is a
  matrix like any other: its inputs are dense and its rows are not independent
  of each other, as those of an embedding are.

  Args:
    names: one logical name per axis.

  Returns:
    The input (reduction) and output axes, all others being batch axes; None
    for a parameter that is no matrix: AdamW updates it.

  Source: Kimi K3 report, section 2.5 (per head); Moonlight, arXiv 2502.16982.
  """
  axes = tuple(i for i, name in enumerate(names) if name not in _STACKED)
  core = tuple(names[i] for i in axes)
  if any(name in _NOT_MATRICES for name in core):
    return None
  if len(core) < 2 or core == ("heads", "head_dim"):
    return None  # norms, biases, decay rates, pseudo-queries
  if len(core) == 2:
    return contrib.MuonDimensionNumbers(axes[:1], axes[1:])
  if core[1:] == ("heads", "head_dim"):
    return contrib.MuonDimensionNumbers(axes[:1], axes[2:])
  if core[:2] == ("heads", "head_dim") and len(core) == 3:
    return contrib.MuonDimensionNumbers(axes[:2], axes[2:])
  raise ValueError(f"no rule for a parameter with logical names {names}")


def scale_by_muon(
    momentum: float, dimensions: Any
) -> optax.GradientTransformation:
  """Returns 0.2 sqrt(max(n, m)) times the orthogonalised momentum.

  [n, m] is the shape of a matrix. Five Newton-Schulz steps run in the dtype of
  the gradient, fp32: on two CPU cores bfloat16 is no faster, and a GPU takes
  TF32 for them.

  Args:
    momentum: decay of the average of gradients, Nesterov form.
    dimensions: a tree like the parameters with MuonDimensionNumbers, or
      optax.MaskedNode() for what Muon leaves out.

  Source: Moonlight, arXiv 2502.16982, section 2.2: the factor gives Muon the
  update RMS of AdamW, so that both share one learning rate.
  """

  def scale(update, numbers):
    rows, columns = (
        math.prod(update.shape[axis] for axis in axes) for axes in numbers
    )
    return 0.2 * math.sqrt(max(rows, columns)) * update

  return optax.chain(
      contrib.scale_by_muon(
          _COEFFICIENTS, beta=momentum, weight_dimension_numbers=dimensions
      ),
      optax.stateless(
          lambda updates, _: jax.tree.map(scale, updates, dimensions)
      ),
  )
