"""The rules that are compared, and a training step that can follow any."""

import dataclasses

import jax
import jax.numpy as jnp

from sparsemm_jax import config as config_lib
from sparsemm_jax.training import router
from sparsemm_jax.training import step as step_lib

RULES = {
    "quantile": {"balancing": "quantile"},
    "sign 1e-3": {"balancing": "sign", "sign_step_size": 1e-3},
    "sign 1e-2": {"balancing": "sign", "sign_step_size": 1e-2},
    "none": {"balancing": "none"},
    "switch_loss 1e-2": {
        "balancing": "switch_loss",
        "switch_loss_weight": 1e-2,
    },
}
# Rules with one gradient; the first one's router counts all the others need.
GROUPS = (
    ("quantile", "sign 1e-3", "sign 1e-2", "none"),
    ("switch_loss 1e-2",),
)


def make_train_step(configs: list[config_lib.RunConfig]):
  """Returns train_step(state, batch, rule) -> (state, metrics).

  Args:
    configs: that differ in the balancing rule alone. The gradient is the first
      one's; `rule` is the index of the config that updates the biases.
  """
  gradient_step = step_lib.make_gradient_step(configs[0])
  moe = dataclasses.replace(configs[0].model.moe, balancing="none")
  update_step = step_lib.make_update_step(
      dataclasses.replace(
          configs[0], model=dataclasses.replace(configs[0].model, moe=moe)
      )
  )

  def train_step(state, batch, rule):
    sums = gradient_step(state, batch)
    stats = sums["stats"]["router_stats"]
    new, metrics = update_step(state, sums)
    updated = [
        router.update(
            state.router_state, stats, config.model.moe, step=state.step
        )
        for config in configs
    ]
    skipped = new.skipped_in_a_row > 0
    router_state = jax.tree.map(
        lambda old, *biases: jnp.where(skipped, old, jnp.stack(biases)[rule]),
        state.router_state,
        *updated,
    )
    counts = router.counts_by_layer(stats)
    return new.replace(router_state=router_state), {
        "loss": metrics["train/loss"],
        "counts": counts,
    }

  return train_step
