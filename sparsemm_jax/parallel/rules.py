"""Which mesh axes each logical axis of an array is spread over."""

import functools
from typing import Any

from absl import logging
import flax.linen as nn
import jax
from jax import sharding
import optax

from sparsemm_jax.parallel import mesh as mesh_lib

# Axes of parameters, then of activations. None: every device has all of it.
# At rest the stages of a pipeline share out what fsdp does, whichever stage
# uses it: its blocks' weights come to it when a step starts.
LOGICAL_RULES = (
    ("layers", None),
    ("expert", "expert"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("expert_mlp", "tensor"),
    ("vision_mlp", "tensor"),
    ("embed", ("fsdp", "stage")),
    ("latent", ("fsdp", "stage")),
    ("vision_embed", ("fsdp", "stage")),
    ("rank", None),
    ("head_dim", None),
    ("conv", None),
    ("router", None),
    ("patch", None),
    ("position_y", None),
    ("position_x", None),
    ("act_batch", mesh_lib.ROW_AXES),
    ("act_length", "context"),
    ("act_embed", None),
)
_RULES = dict(LOGICAL_RULES)


def logical_names(tree: Any) -> Any:
  """Returns the tree, unboxed, with a tuple of logical names for each leaf.

  Args:
    tree: variables boxed by `nn.with_logical_partitioning`.

  Raises:
    ValueError: a leaf without names, or a name without a rule; it says which.
  """

  def names_of(path, leaf):
    where = jax.tree_util.keystr(path)
    if not isinstance(leaf, nn.LogicallyPartitioned):
      raise ValueError(f"{where} has no logical names")
    if len(leaf.names) != leaf.value.ndim:
      raise ValueError(
          f"{where}: logical names {leaf.names} for shape {leaf.value.shape}"
      )
    for name in leaf.names:
      if name not in _RULES:
        raise ValueError(f"{where}: no rule for the logical name {name!r}")
    return tuple(leaf.names)

  return jax.tree_util.tree_map_with_path(names_of, tree, is_leaf=_is_boxed)


def shardings(mesh: sharding.Mesh, tree: Any) -> Any:
  """Returns a NamedSharding for each leaf of a tree of boxed variables.

  An axis is not spread along a mesh axis over which its size does not divide
  (which is logged once), or which an earlier axis took.

  Args:
    mesh: the run's.
    tree: boxed arrays or ShapeDtypeStructs.

  Raises:
    ValueError: as `logical_names`.
  """

  def sharding_of(path, leaf, names):
    spec = _spec(mesh, names, leaf.value.shape, jax.tree_util.keystr(path))
    return sharding.NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(
      sharding_of, tree, logical_names(tree), is_leaf=_is_boxed
  )


def optimizer_shardings(
    mesh: sharding.Mesh,
    optimizer: optax.GradientTransformation,
    opt_state: Any,
    params: Any,
) -> Any:
  """Returns a NamedSharding for each leaf of an optimizer's state.

  Args:
    mesh: the run's.
    optimizer: whose state it is.
    opt_state: `jax.eval_shape` of its init.
    params: shardings of the parameters; a moment is spread like its parameter,
      everything else is replicated.
  """
  replicated = sharding.NamedSharding(mesh, sharding.PartitionSpec())
  return optax.tree_map_params(
      optimizer.init,
      lambda leaf, like: leaf if _is_masked(leaf) else like,
      opt_state,
      params,
      transform_non_params=lambda _: replicated,
      is_leaf=_is_masked,
  )


def batch_sharding(mesh: sharding.Mesh) -> sharding.NamedSharding:
  """Spreads the rows of a batch; their tokens stay together."""
  return sharding.NamedSharding(mesh, sharding.PartitionSpec(mesh_lib.ROW_AXES))


def _is_boxed(leaf: Any) -> bool:
  return isinstance(leaf, nn.LogicallyPartitioned)


def _is_masked(leaf: Any) -> bool:
  return isinstance(leaf, optax.MaskedNode)


def _spec(mesh, names, shape, where) -> sharding.PartitionSpec:
  spec, taken = [], set()
  for name, size in zip(names, shape, strict=True):
    wanted = _RULES[name] or ()
    wanted = (wanted,) if isinstance(wanted, str) else wanted
    axes, devices = [], 1
    for axis in wanted:
      if axis in taken or mesh.shape[axis] == 1:
        continue
      if size % (devices * mesh.shape[axis]):
        _log_whole(name, size, axis, devices * mesh.shape[axis], where)
      else:
        axes.append(axis)
        devices *= mesh.shape[axis]
    taken.update(axes)
    spec.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
  return sharding.PartitionSpec(*spec)


@functools.cache
def _log_whole(name, size, axis, devices, where) -> None:
  logging.info(
      "%s: its axis %s of size %d does not divide over %d devices; not spread"
      " along %s", where, name, size, devices, axis,
  )  # fmt: skip
