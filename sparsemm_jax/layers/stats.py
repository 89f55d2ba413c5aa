"""Diagnostics that layers leave in collections of their own."""

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
