"""One training step and one evaluation step, as pure functions.

The loss of a step is the mean over all its targets, however they are split
into micro-batches or over devices; the router statistics of a step are
integer sums over all its tokens, so the balancing biases are too.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsemm_jax import config as config_lib
from sparsemm_jax import models
from sparsemm_jax.models import vision
from sparsemm_jax.optim import qk_clip
from sparsemm_jax.optim import schedules
from sparsemm_jax.training import losses
from sparsemm_jax.training import router
from sparsemm_jax.training import state as state_lib

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Sums = dict[str, Any]  # of one step: gradients, losses, statistics
_TRAIN_STATS = ("router_stats", "attention_stats")
_EVAL_STATS = ("router_stats", "depth_stats")


def make_train_step(
    config: config_lib.RunConfig, *, micro_batches: int = 1
) -> Callable[
    [state_lib.TrainState, Batch], tuple[state_lib.TrainState, Metrics]
]:
  """Returns train_step(state, batch) -> (state, metrics), to be jitted.

  A step whose loss or gradient is not finite changes nothing but the step and
  the counts of skipped steps.

  Args:
    config: of the run.
    micro_batches: gradient accumulation; divides the batch's rows.
  """
  gradient_step = make_gradient_step(config, micro_batches=micro_batches)
  update_step = make_update_step(config)

  def train_step(state, batch):
    return update_step(state, gradient_step(state, batch))

  return train_step


def make_gradient_step(
    config: config_lib.RunConfig, *, micro_batches: int = 1
) -> Callable[[state_lib.TrainState, Batch], Sums]:
  """Returns the first half of a step: the sums of gradients and statistics.

  Only this half depends on the shape of the batch, so that the stages of a
  run compile the other half once.
  """

  def gradient_step(state, batch):
    sums = _accumulate(config, state, batch, micro_batches)
    sums["stats"]["router_stats"] = router.total(
        sums["stats"].get("router_stats", {})
    )
    tokens = jnp.sum(batch["segment_ids"] > 0, dtype=jnp.int32)
    return {**sums, "tokens": tokens}

  return gradient_step


def make_update_step(
    config: config_lib.RunConfig,
) -> Callable[
    [state_lib.TrainState, Sums], tuple[state_lib.TrainState, Metrics]
]:
  """Returns the second half of a step: update_step(state, sums)."""
  optimizer = state_lib.make_optimizer(config)
  schedule = schedules.learning_rate(config.optim, config.train.num_steps)

  def update_step(state, sums):
    targets = sum(count for _, count in sums["by_modality"].values())
    targets = jnp.maximum(targets, 1)
    grads = jax.tree.map(lambda g: g / targets, sums["grads"])
    grad_norm = optax.global_norm(grads)
    finite = jnp.isfinite(sums["objective"]) & jnp.isfinite(grad_norm)

    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    if config.optim.qk_clip_threshold is not None:
      params = qk_clip.qk_clip(
          params,
          sums["stats"].get("attention_stats", {}),
          config.optim.qk_clip_threshold,
      )
    router_stats = sums["stats"]["router_stats"]
    router_state = router.update(
        state.router_state, router_stats, config.model.moe, step=state.step
    )
    skipped = jnp.where(finite, 0, 1)
    new = state_lib.TrainState(
        step=state.step + 1,
        params=params,
        router_state=router_state,
        opt_state=opt_state,
        skipped=state.skipped + skipped,
        skipped_in_a_row=(state.skipped_in_a_row + 1) * skipped,
    )
    kept = new.replace(
        params=state.params,
        router_state=state.router_state,
        opt_state=state.opt_state,
    )
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, kept)
    metrics = {
        **_loss_metrics(sums["by_modality"], "train"),
        **router.metrics(router_stats),
        "train/grad_norm": grad_norm,
        "train/learning_rate": schedule(state.step - state.skipped),
        "train/skipped_steps": new.skipped,
        "train/skipped_in_a_row": new.skipped_in_a_row,
        "train/tokens": sums["tokens"],
    }
    return new, metrics

  return update_step


def make_eval_step(
    config: config_lib.RunConfig,
) -> Callable[[state_lib.TrainState, Batch], dict[str, Any]]:
  """Returns eval_step(variables, batch) -> sums that add up over batches.

  `variables` is a TrainState, or {"params", "router_state"} of one; nothing
  in it changes, the router biases included.

  The sums are `by_modality` (nats and targets, see `losses`), `counts` (tokens
  per expert of every MoE layer, [layers, E]) and `depth_weights` (the
  attention residuals' softmax, a mean over the batch's tokens).
  """

  def eval_step(variables, batch):
    if isinstance(variables, state_lib.TrainState):
      variables = {
          "params": variables.params,
          "router_state": variables.router_state,
      }
    _, sums = _forward(
        config,
        variables["params"],
        variables["router_state"],
        batch,
        _EVAL_STATS,
    )
    return {
        "by_modality": sums["by_modality"],
        "counts": router.counts_by_layer(
            router.total(sums["stats"].get("router_stats", {}))
        ),
        "depth_weights": sums["stats"].get("depth_stats", {}),
    }

  return eval_step


def _forward(config, params, router_state, batch, collections=_TRAIN_STATS):
  """Returns the summed loss to differentiate, and sums that come with it."""
  output, stats = models.SparseMultimodalModel(config.model).apply(
      {"params": params, "router_state": router_state},
      batch["tokens"],
      segment_ids=batch["segment_ids"],
      images=vision.Images.from_batch(batch),
      mutable=list(collections),
  )
  nats, square = losses.next_token_losses(output.logits, batch["targets"])
  mask = batch["loss_mask"]
  token_losses = nats + config.train.z_loss_weight * square
  objective = jnp.sum(jnp.where(mask, token_losses, 0.0))
  # An auxiliary loss is a mean: weighted by its share of the step's targets.
  auxiliary = router.auxiliary_loss(stats.get("router_stats", {}))
  objective += auxiliary * jnp.sum(mask)
  by_modality = losses.sums_by_modality(nats, mask, batch["modality"])
  return objective, {"by_modality": by_modality, "stats": stats}


def _accumulate(config, state, batch, micro_batches):
  """Sums gradients and statistics over the micro-batches of a step."""

  def micro_step(micro_batch):
    gradient = jax.value_and_grad(_forward, argnums=1, has_aux=True)
    (objective, sums), grads = gradient(
        config, state.params, state.router_state, micro_batch
    )
    return {"objective": objective, "grads": grads, **sums}

  if micro_batches == 1:
    return micro_step(batch)
  # Row r goes to micro-batch r mod M, so that rows stay on their device.
  split = jax.tree.map(
      lambda x: x.reshape(
          x.shape[0] // micro_batches, micro_batches, *x.shape[1:]
      ).swapaxes(0, 1),
      batch,
  )

  def body(total, micro_batch):
    return _add(total, micro_step(micro_batch)), None

  first = jax.tree.map(lambda x: x[0], split)
  shapes = jax.eval_shape(micro_step, first)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.scan(body, zeros, split)[0]


def _add(total, more):
  """Adds two trees of sums; the largest logits combine by maximum."""

  def combine(path, a, b):
    is_maximum = jax.tree_util.keystr(path[-1:]).count("max_logit")
    return jnp.maximum(a, b) if is_maximum else a + b

  return jax.tree_util.tree_map_with_path(combine, total, more)


def _loss_metrics(by_modality, prefix) -> Metrics:
  total = sum(nats for nats, _ in by_modality.values())
  targets = sum(count for _, count in by_modality.values())
  result = {f"{prefix}/loss": total / jnp.maximum(targets, 1)}
  for name, (nats, count) in by_modality.items():
    result[f"{prefix}/loss_{name}"] = nats / jnp.maximum(count, 1)
  return result
