"""Everything a training step changes, as one pytree."""

from typing import Any

import flax
from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Int
import optax

from sparsemm_jax import config as config_lib
from sparsemm_jax import models
from sparsemm_jax.optim import build
from sparsemm_jax.parallel import rules


@flax.struct.dataclass
class TrainState:
  """The whole state of a run, apart from its data iterator.

  Attributes:
    step: optimizer steps taken, skipped ones included.
    params: trained by the gradient.
    router_state: balancing biases, fp32 [E] per MoE layer; no gradient.
    opt_state: of the optax transformation.
    skipped: steps that were skipped for a non-finite loss or gradient.
    skipped_in_a_row: how many of them were the latest steps.
  """

  step: Int[Array, ""]
  params: Any
  router_state: Any
  opt_state: optax.OptState
  skipped: Int[Array, ""]
  skipped_in_a_row: Int[Array, ""]


def init_variables(config: config_lib.ModelConfig, key: jax.Array) -> Any:
  """Initialises the model's variables, boxed with their logical names.

  Args:
    config: of the model.
    key: a random key.

  Returns:
    {"params": ..., "router_state": ...} as `nn.with_logical_partitioning`
    leaves them.
  """
  tokens = jnp.zeros((1, 1), jnp.int32)  # shapes do not depend on the length
  variables = models.SparseMultimodalModel(config).init(key, tokens)
  return {
      "params": variables["params"],
      "router_state": variables.get("router_state", {}),
  }


def abstract_variables(config: config_lib.ModelConfig) -> Any:
  """Shapes, dtypes and logical names of `init_variables`, without arrays."""
  return jax.eval_shape(lambda: init_variables(config, jax.random.key(0)))


def make_optimizer(
    config: config_lib.RunConfig,
) -> optax.GradientTransformation:
  """Builds the run's optimizer for the run's parameters."""
  names = rules.logical_names(abstract_variables(config.model)["params"])
  return build.make_optimizer(config.optim, names, config.train.num_steps)


def init_state(
    config: config_lib.RunConfig, key: jax.Array | None = None
) -> TrainState:
  """Returns the state before the first step.

  Args:
    config: of the run.
    key: a random key; None: from `config.train.seed`.

  Returns:
    A TrainState; trace it under `jax.jit` with `state_shardings` as
    out_shardings to create it sharded.
  """
  key = jax.random.key(config.train.seed) if key is None else key
  variables = nn.unbox(init_variables(config.model, key))
  zero = jnp.zeros((), jnp.int32)
  return TrainState(
      step=zero,
      params=variables["params"],
      router_state=variables["router_state"],
      opt_state=make_optimizer(config).init(variables["params"]),
      skipped=zero,
      skipped_in_a_row=zero,
  )


def state_shardings(
    config: config_lib.RunConfig, mesh: jax.sharding.Mesh
) -> TrainState:
  """Returns a NamedSharding for each leaf of the run's TrainState."""
  boxed = abstract_variables(config.model)
  params = rules.shardings(mesh, boxed["params"])
  replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  abstract = jax.eval_shape(lambda: init_state(config))
  return TrainState(
      step=replicated,
      params=params,
      router_state=jax.tree.map(lambda _: replicated, abstract.router_state),
      opt_state=rules.optimizer_shardings(
          mesh, make_optimizer(config), abstract.opt_state, params
      ),
      skipped=replicated,
      skipped_in_a_row=replicated,
  )
