"""Trains a small mixture of experts under each balancing rule.

  python -m experiments.ablations.balancing.run --output=train.json

Every rule sees the same batches of real text and, for each seed, starts from
the same parameters; all seeds, and all rules whose gradient is the same, train
as one program. The step is the library's: its gradient, its
AdamW and its routers' update, the rule picked per member.
"""

from collections.abc import Callable
import concurrent.futures
import dataclasses
import functools
import time
from typing import Any
from typing import NamedTuple

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import command
from experiments.ablations import common
from experiments.ablations.balancing import measures
from experiments.ablations.balancing import rules as rules_lib
from sparsemm_jax import config as config_lib
from sparsemm_jax.training import state as state_lib
from sparsemm_jax.training import step as step_lib

_STEPS = flags.DEFINE_integer("steps", 300, "Optimizer steps.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of the parameters.")
_EXPERTS = flags.DEFINE_integer("experts", 64, "Routed experts, E.")
_LAYERS = flags.DEFINE_integer("layers", 4, "Blocks; the first is dense.")
_BATCH = flags.DEFINE_integer("batch_size", 64, "Rows per step.")
_SEQ_LEN = flags.DEFINE_integer("seq_len", 128, "Tokens per row.")
_WIDTH = flags.DEFINE_integer("width", 256, "d_model.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", config_lib.DTYPES, "Of the computation."
)
_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Peak.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")

_EVAL_BATCHES = 8
_LEVELS = (4.0, 2.0, 1.0, 0.5)  # of the max violation
_WINDOW = 10  # steps whose mean has to reach a level


def make_config(rule: str, **changes: Any) -> config_lib.RunConfig:
  """Returns the run's config under a rule, fields of the model changed."""
  width, head_dim = _WIDTH.value, max(_WIDTH.value // 4, 8)
  model = config_lib.ModelConfig(
      d_model=width,
      num_layers=_LAYERS.value,
      num_dense_layers=1,
      dense_hidden_dim=2 * width,
      attn_res_block_size=None,
      dtype=_DTYPE.value,
      # MLA alone, and the sparse blocks scanned: it compiles fast.
      mla_every=1,
      mla=config_lib.MlaConfig(
          num_heads=4, q_lora_rank=width // 2, kv_lora_rank=width // 4,
          qk_nope_head_dim=head_dim, qk_rope_head_dim=head_dim // 2,
          v_head_dim=head_dim, rope_theta=1e4,
      ),
      moe=config_lib.MoeConfig(
          num_experts=_EXPERTS.value, num_experts_per_token=4,
          latent_dim=width // 2, expert_hidden_dim=width // 2,
          num_shared_experts=1,
          # Plain XLA: it can be vmapped, whatever the device.
          implementation="xla", **rules_lib.RULES[rule],
      ),
  )  # fmt: skip
  stage = config_lib.StageConfig(
      seq_len=_SEQ_LEN.value, batch_size=_BATCH.value, steps=_STEPS.value
  )
  return config_lib.RunConfig(
      model=dataclasses.replace(model, **changes),
      optim=config_lib.OptimConfig(
          learning_rate=_RATE.value, warmup_fraction=0.05, muon=False
      ),
      train=config_lib.TrainConfig(stages=(stage,)),
  )


class Group(NamedTuple):
  """Rules and seeds that train as one program; members are rule-major."""

  rules: tuple[str, ...]
  states: state_lib.TrainState  # of all members
  train_step: Callable[..., Any]  # compiled
  eval_step: Callable[..., Any]  # compiled


def prepare(rules: tuple[str, ...], seeds: int, batch: Any) -> Group:
  """Makes the initial states and compiles the steps."""
  configs = [make_config(rule) for rule in rules]
  states = common.stack(common.initial_states(configs[0], seeds) * len(rules))
  indices = jnp.repeat(jnp.arange(len(rules)), seeds)
  step = rules_lib.make_train_step(configs)
  train_step = jax.jit(
      lambda states, batch: common.over_members(
          lambda member, batch: step(member[0], batch, member[1])
      )((states, indices), batch),
      donate_argnums=0,
  )
  eval_step = jax.jit(common.over_members(step_lib.make_eval_step(configs[0])))
  return Group(
      rules,
      states,
      train_step.lower(states, batch).compile(),
      eval_step.lower(_variables(states), batch).compile(),
  )


def _variables(states):
  return {"params": states.params, "router_state": states.router_state}


def train(group: Group, batches: common.Batches, held_out: common.Batches):
  """Trains the group's members on the batches, and evaluates them.

  Returns:
    train_loss: [steps, rules, seeds] nats per token.
    counts: [steps, rules, seeds, layers, E] tokens per expert.
    held_out_loss: [rules, seeds] nats per token.
  """
  metrics, states = [], group.states
  start = time.monotonic()
  for number, batch in enumerate(batches, 1):
    states, step_metrics = group.train_step(states, batch)
    metrics.append(step_metrics)
    if number in (1, 10) or number % 50 == 0:
      loss = np.mean(step_metrics["loss"])
      seconds = time.monotonic() - start
      print(f"  step {number}: loss {loss:.3f}, {seconds:.0f} s", flush=True)
  metrics = jax.device_get(metrics)
  nats = targets = 0.0
  for batch in held_out:
    sums = jax.device_get(
        group.eval_step(_variables(states), batch)["by_modality"]
    )
    nats += sum(total for total, _ in sums.values())
    targets += sum(count for _, count in sums.values())

  def by_rule(values, axis):
    shape = values.shape
    split = (len(group.rules), shape[axis] // len(group.rules))
    return values.reshape(*shape[:axis], *split, *shape[axis + 1 :])

  loss, counts = (
      by_rule(np.stack([m[name] for m in metrics]), 1)
      for name in ("loss", "counts")
  )
  return loss, counts, by_rule(nats / targets, 0)


def summarize(loss, counts, held_out, floor: float) -> dict[str, Any]:
  """Boils one rule's run down to what the table and the figure need.

  Args:
    loss: [steps, seeds].
    counts: [steps, seeds, layers, E].
    held_out: [seeds].
    floor: of the max violation.
  """
  violation = measures.max_violations(counts)  # [steps, seeds, layers]
  mean, worst = violation.mean((1, 2)), violation.max(2).mean(1)
  last = slice(-max(len(violation) // 4, 1), None)
  first_below = functools.partial(measures.first_below, mean, window=_WINDOW)
  return {
      "train_loss": loss.mean(1),
      "held_out_loss": held_out,
      "max_violation": mean,
      "max_violation_worst_layer": worst,
      "max_violation_by_layer": violation[last].mean((0, 1)),
      "max_violation_last_quarter": violation[last].mean(),
      "peak_after_step_10": mean[10:].max() if len(mean) > 10 else None,
      "steps_to_floor": first_below(1.5 * floor),
      "steps_to": {str(level): first_below(level) for level in _LEVELS},
      "dead_experts": measures.dead_experts(counts).mean(0),  # by layer
  }


def print_table(results: dict[str, Any]) -> None:
  """Prints one line per rule."""
  levels = "".join(f"{level:>6}" for level in _LEVELS)
  print(
      f"{'steps to':17}{levels}{'1.5 floor':>11}{'last quarter':>14}{'dead':>7}"
      f"{'held-out loss':>16}{'beside quantile':>20}"
  )
  base = np.asarray(results["rules"]["quantile"]["held_out_loss"])
  for rule, values in results["rules"].items():
    losses = np.asarray(values["held_out_loss"])
    steps = "".join(f"{step!s:>6}" for step in values["steps_to"].values())
    print(
        f"{rule:17}{steps}{values['steps_to_floor']!s:>11}"
        f"{values['max_violation_last_quarter']:>14.3f}"
        f"{np.sum(values['dead_experts']):>7.1f}"
        f"{losses.mean():>16.4f}"
        # Seed by seed: they share data and initial parameters.
        f"{(losses - base).mean():>+11.4f} +- {_spread(losses - base):.4f}"
    )


def _spread(values):
  """The sample's standard deviation; NaN for one value."""
  return values.std(ddof=1) if len(values) > 1 else float("nan")


def main(argv) -> None:
  """Trains; see the module's docstring."""
  del argv
  start = time.monotonic()
  config = make_config("quantile")
  batches = common.shuffled_batches(config, _STEPS.value)
  held_out = common.held_out_batches(config, _EVAL_BATCHES)
  load = _BATCH.value * _SEQ_LEN.value * 4 / _EXPERTS.value
  floor = measures.sampling_floor(_EXPERTS.value, load)
  print(f"data: {time.monotonic() - start:.0f} s", flush=True)
  results = {
      "hardware": common.hardware(),
      "steps": _STEPS.value,
      "seeds": _SEEDS.value,
      "num_experts": _EXPERTS.value,
      "tokens_per_step": _BATCH.value * _SEQ_LEN.value,
      "sampling_floor": floor,
      "rules": {},
  }
  with concurrent.futures.ThreadPoolExecutor(len(rules_lib.GROUPS)) as pool:
    groups = list(
        pool.map(
            lambda rules: prepare(rules, _SEEDS.value, batches[0]),
            rules_lib.GROUPS,
        )
    )
  print(f"compiled: {time.monotonic() - start:.0f} s", flush=True)
  for group in groups:
    loss, counts, held_out_loss = train(group, batches, held_out)
    for index, rule in enumerate(group.rules):
      results["rules"][rule] = summarize(
          loss[:, index], counts[:, index], held_out_loss[index], floor
      )
    print(f"{group.rules}: {time.monotonic() - start:.0f} s", flush=True)
    if _OUTPUT.value:
      common.write_json(_OUTPUT.value, results)
  print(f"sampling floor {floor:.3f}, on {results['hardware']}")
  print_table(results)


if __name__ == "__main__":
  command.run(main)
