"""Diagnostics that layers leave in collections of their own."""

from typing import Any

from flax import traverse_util
import flax.linen as nn
from jaxtyping import Array

COLLECTIONS = ("router_stats", "attention_stats", "depth_stats")


def wanted(module: nn.Module, collection: str) -> bool:
  """Whether the caller asked for this collection."""
  return module.is_mutable_collection(collection) and (
      not module.is_initializing()
  )


def sow(module: nn.Module, collection: str, name: str, value: Array) -> None:
  """Leaves a plain array, the latest one, if the caller asked for it."""
  if wanted(module, collection):
    module.sow(
        collection,
        name,
        value,
        init_fn=lambda: None,
        reduce_fn=lambda old, new: new,
    )


def by_depth(tree: Any) -> list[tuple[int, tuple[str, ...], Array]]:
  """Lists one collection's arrays by Transformer block, scanned ones apart.

  Args:
    tree: of a model's collection, as `apply` returns it.

  Returns:
    (block from 0, path inside the block, array), in order of depth; what
    belongs to no block comes last, as block -1.
  """
  flat = traverse_util.flatten_dict(tree)
  periods: dict[str, int] = {}  # blocks in the pattern of a scanned group
  for _, group, *rest in flat:
    if group.startswith("layers_"):
      place = _number(rest[0])
      periods[group] = max(periods.get(group, 0), place + 1)
  found = []
  for (_, group, *rest), value in flat.items():
    if group in periods:
      place, *inner = rest
      first = _number(group) + _number(place)
      for repeat, part in enumerate(value):
        found.append((first + repeat * periods[group], tuple(inner), part))
    elif group.startswith("layer_"):
      found.append((_number(group), tuple(rest), value))
    else:
      found.append((-1, (group, *rest), value))
  return sorted(found, key=lambda item: (item[0] < 0, item[0], item[1]))


def _number(name: str) -> int:
  return int(name.rsplit("_", 1)[1])
