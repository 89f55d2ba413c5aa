"""The optimizer of a run: one rule per parameter, one schedule for all."""

import functools
from typing import Any

import jax
import optax
from optax import contrib

from sparsemm_jax import config as config_lib
from sparsemm_jax.optim import muon
from sparsemm_jax.optim import schedules


def is_names(value: Any) -> bool:
  """Whether a node of a tree of logical names is a leaf: a plain tuple."""
  return type(value) is tuple


def make_optimizer(
    config: config_lib.OptimConfig, names: Any, num_steps: int
) -> optax.GradientTransformation:
  """Builds clipping, Muon and Adam, decoupled decay and the learning rate.

  With u the direction of Muon or Adam for the clipped gradient, a parameter w
  becomes w - lr(step) (u + weight_decay w); `decays` says which decay.

  Args:
    config: of the optimizer.
    names: a tree like the parameters, a tuple of logical names per leaf.
    num_steps: optimizer steps of all stages.

  Raises:
    ValueError: a parameter whose logical names fit no rule; it is named.
  """
  rules = jax.tree_util.tree_map_with_path(
      functools.partial(_rule, config.muon), names, is_leaf=is_names
  )
  labels = jax.tree.map(
      lambda rule: "adam" if _is_masked(rule) else "muon",
      rules,
      is_leaf=_is_rule,
  )
  return optax.chain(
      optax.clip_by_global_norm(config.clip_norm),
      optax.partition(
          {
              "muon": muon.scale_by_muon(config.muon_momentum, rules),
              "adam": optax.scale_by_adam(
                  config.adam_b1, config.adam_b2, config.adam_eps
              ),
          },
          labels,
      ),
      optax.add_decayed_weights(
          config.weight_decay,
          jax.tree.map(decays, names, is_leaf=is_names),
      ),
      optax.scale_by_learning_rate(schedules.learning_rate(config, num_steps)),
  )


def decays(names: muon.LogicalNames) -> bool:
  """Whether weight decay applies to a parameter with these logical names.

  It applies to Muon's matrices and to the output head, whose size sets that of
  the logits. It does not to norms, biases, decay rates and pseudo-queries,
  which are not scale-free, to the few taps of convolutions, and to tables of
  tokens and positions: it would shrink the rows that no gradient visits.
  """
  is_head = names[-1:] == ("vocab",)
  return is_head or muon.dimension_numbers(names) is not None


def _rule(use_muon, path, names):
  """The matrices of a parameter, or MaskedNode() if Adam updates it."""
  try:
    dimensions = muon.dimension_numbers(names)
  except ValueError as error:
    raise ValueError(f"{jax.tree_util.keystr(path)}: {error}") from None
  if dimensions is None or not use_muon:
    return optax.MaskedNode()
  return dimensions


def _is_masked(rule):
  return isinstance(rule, optax.MaskedNode)


def _is_rule(rule):
  return isinstance(rule, optax.MaskedNode | contrib.MuonDimensionNumbers)
