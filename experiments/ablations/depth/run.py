"""Trains narrow, deep models with and without attention residuals.

  python -m experiments.ablations.depth.run --layers=12 --output=results_12.json

Every model of one depth sees the same batches of real text and, seed by seed,
starts from the same parameters (a mix's pseudo-query starts at zero). Block
size 0 stands for ordinary residuals, 1 for a source per Transformer block, the
finest that ModelConfig.attn_res_block_size knows. All block sizes, seeds and
learning rates of one depth train as one program (see model.py).

The models are MLA and a dense MLP in every block: no experts and one kind of
attention, so that depth is all that differs. The optimizer is AdamW.
"""

from collections.abc import Callable
from collections.abc import Sequence
import concurrent.futures
import time
from typing import Any
from typing import NamedTuple

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import command
from experiments.ablations import common
from experiments.ablations.depth import model
from sparsemm_jax import config as config_lib
from sparsemm_jax.training import state as state_lib

_LAYERS = flags.DEFINE_list("layers", ["12", "48"], "Transformer blocks.")
_SIZES = flags.DEFINE_list(
    "block_sizes", ["0", "1", "2", "4", "8"], "Transformer blocks per source."
)
_RATES = flags.DEFINE_list("learning_rates", ["2e-3"], "Peaks.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of the parameters.")
_STEPS = flags.DEFINE_integer("steps", 300, "Optimizer steps.")
_BATCH = flags.DEFINE_integer("batch_size", 16, "Rows per step.")
_SEQ_LEN = flags.DEFINE_integer("seq_len", 256, "Tokens per row.")
_WIDTH = flags.DEFINE_integer("width", 128, "d_model.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", config_lib.DTYPES, "Of the computation."
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")

_EVAL_BATCHES = 16
_LONG = 16  # rows of a bank


def make_config(layers: int) -> config_lib.RunConfig:
  """Returns the config of one depth, all its layers in one residual block."""
  width, heads = _WIDTH.value, 4
  head_dim = width // heads
  decoder = config_lib.ModelConfig(
      d_model=width,
      num_layers=layers,
      num_dense_layers=layers,
      mla_every=1,
      dense_hidden_dim=3 * width,
      attn_res_block_size=layers,
      # Small beside the mean of many sources: all models start as one.
      norm_eps=1e-10,
      dtype=_DTYPE.value,
      mla=config_lib.MlaConfig(
          num_heads=heads, q_lora_rank=width // 2, kv_lora_rank=width // 2,
          qk_nope_head_dim=head_dim, qk_rope_head_dim=head_dim // 2,
          v_head_dim=head_dim, rope_theta=1e4,
      ),
  )  # fmt: skip
  stage = config_lib.StageConfig(
      seq_len=_SEQ_LEN.value, batch_size=_BATCH.value, steps=_STEPS.value
  )
  return config_lib.RunConfig(
      model=decoder,
      optim=config_lib.OptimConfig(
          # Peak 1: a member's own peak multiplies the update.
          learning_rate=1.0, warmup_fraction=0.1, muon=False,
          qk_clip_threshold=None,
      ),
      train=config_lib.TrainConfig(stages=(stage,)),
  )  # fmt: skip


class Member(NamedTuple):
  """One model of a program; arrays with a leading axis of members."""

  is_start: Any  # [L], see model.starts
  peak: Any  # of the learning rate


def make_train_step(config: config_lib.RunConfig, rows: int):
  """Returns train_step(state, batch, member) -> (state, metrics)."""
  gradient = jax.value_and_grad(
      model.make_loss(config.model, rows), has_aux=True
  )
  optimizer = state_lib.make_optimizer(config)

  def train_step(state, batch, member):
    (loss, _), grads = gradient(state.params, batch, member.is_start)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    updates = jax.tree.map(lambda u: member.peak * u, updates)
    params = optax.apply_updates(state.params, updates)
    layers = jax.tree.leaves(grads["decoder"]["layers_0"])
    squares = sum(
        jnp.sum(jnp.square(leaf), axis=range(1, leaf.ndim)) for leaf in layers
    )
    new = state.replace(params=params, opt_state=opt_state)
    return new, {"loss": loss, "gradient_norm": jnp.sqrt(squares)}

  return train_step


def make_eval_step(config: config_lib.ModelConfig, rows: int):
  """Returns eval_step(params, batch, is_start) -> what the pictures show."""
  loss_and_depth = model.make_loss(config, rows)

  def eval_step(params, batch, is_start):
    loss, depth = loss_and_depth(params, batch, is_start)
    return {
        "held_out_loss": loss,
        "output_rms": depth.output_rms,
        "weights": depth.weights,
        "similarity": similarity(depth.inputs),
    }

  return eval_step


def similarity(features: Any) -> jax.Array:
  """[L, B, T, D] -> [L, L] cosines between layers, means over tokens."""
  features = features.astype(jnp.float32)
  features /= jnp.linalg.norm(features, axis=-1, keepdims=True)
  tokens = features.shape[1] * features.shape[2]
  return jnp.einsum("lbtd,mbtd->lm", features, features) / tokens


class Program(NamedTuple):
  """Models that train together; members are by size, then seed, then rate."""

  layers: int
  sizes: list[int]
  states: state_lib.TrainState
  train_step: Callable[..., Any]  # compiled
  eval_step: Callable[..., Any]  # compiled
  batches: common.Batches
  held_out: common.Batches


def prepare(layers: int, sizes: list[int], rates: list[float]) -> Program:
  """Makes data and initial states, and compiles."""
  config = make_config(layers)
  batches = common.shuffled_batches(config, _STEPS.value)
  held_out = common.held_out_batches(config, _EVAL_BATCHES)
  rows = max(1, *(model.bank_rows(layers, size) for size in sizes))
  seeds = common.initial_states(config, _SEEDS.value)
  states = [state for _ in sizes for state in seeds for _ in rates]
  states = common.stack(states)
  starts = np.stack([model.starts(layers, size) for size in sizes])
  members = Member(
      np.repeat(starts, len(seeds) * len(rates), axis=0),
      np.tile(np.array(rates, np.float32), len(sizes) * len(seeds)),
  )
  step, measure = (
      make_train_step(config, rows),
      make_eval_step(config.model, rows),
  )
  train_step = jax.jit(
      lambda states, batch: common.over_members(
          lambda member, batch: step(member[0], batch, member[1])
      )((states, members), batch),
      donate_argnums=0,
  )
  eval_step = jax.jit(
      lambda params, batch: common.over_members(
          lambda member, batch: measure(member[0], batch, member[1])
      )((params, members.is_start), batch)
  )
  return Program(
      layers,
      sizes,
      states,
      train_step.lower(states, batches[0]).compile(),
      eval_step.lower(states.params, batches[0]).compile(),
      batches,
      held_out,
  )


def train(program: Program, rates: list[float]) -> list[dict[str, Any]]:
  """Trains and evaluates a program's models.

  Returns:
    What the results file holds of each block size. held_out_loss is [seeds,
    rates]; everything else is of the best rate: first_loss [seeds], train_loss
    [steps], output_rms and gradient_norm (mean of the last 10 steps) [seeds,
    L], weights and similarity as means over the seeds.
  """
  metrics, states = [], program.states
  start = time.monotonic()
  for number, batch in enumerate(program.batches, 1):
    states, step_metrics = program.train_step(states, batch)
    metrics.append(step_metrics)
    if number in (1, 10) or number % 50 == 0:
      loss = np.mean(step_metrics["loss"])
      seconds = time.monotonic() - start
      print(f"  step {number}: loss {loss:.3f}, {seconds:.0f} s", flush=True)
  metrics = jax.device_get(metrics)
  measured = [
      jax.device_get(program.eval_step(states.params, batch))
      for batch in program.held_out
  ]
  measured = jax.tree.map(lambda *x: np.mean(x, axis=0), *measured)
  measured["gradient_norm"] = np.mean(
      [m["gradient_norm"] for m in metrics[-10:]], axis=0
  )
  measured["train_loss"] = np.stack([m["loss"] for m in metrics], axis=1)

  results = []
  shape = (len(program.sizes), _SEEDS.value, len(rates))
  measured = {k: v.reshape(*shape, *v.shape[1:]) for k, v in measured.items()}
  for index, size in enumerate(program.sizes):
    held_out = measured["held_out_loss"][index]
    rate = int(np.argmin(held_out.mean(0)))
    best = {k: v[index, :, rate] for k, v in measured.items()}
    used = model.bank_rows(program.layers, size)
    weights = best["weights"].mean(0)
    results.append({
        "layers": program.layers,
        "block_size": size,
        "learning_rates": rates,
        "best_rate": rates[rate],
        "held_out_loss": held_out,
        "first_loss": best["train_loss"][:, 0],
        "train_loss": best["train_loss"].mean(0),
        "output_rms": best["output_rms"],
        "gradient_norm": best["gradient_norm"],
        "similarity": best["similarity"].mean(0),
        "weights": np.concatenate([weights[:, :used], weights[:, -1:]], 1),
    })
  return results


def print_table(results: Sequence[dict[str, Any]]) -> None:
  """Prints a line per model, beside the ordinary one of its depth."""
  print("blocks size  first loss  rate     held-out loss      beside ordinary")
  for result in results:
    own = best_losses(result)
    line = (
        f"{result['layers']:6}{result['block_size']:5}"
        f"{np.mean(result['first_loss']):12.5f}  {result['best_rate']:<8g}"
        f"{own.mean():.4f} +- {spread(own):.4f}"
    )
    ordinary = [
        r
        for r in results
        if r["layers"] == result["layers"] and not r["block_size"]
    ]
    if ordinary and result["block_size"]:
      # Seed by seed: they share data and initial parameters.
      gap = own - best_losses(ordinary[0])
      line += f"  {gap.mean():+.4f} +- {spread(gap):.4f}"
    print(line)


def best_losses(result: dict[str, Any]) -> np.ndarray:
  """The held-out losses [seeds] at the model's best learning rate."""
  held_out = np.asarray(result["held_out_loss"])
  return held_out[:, result["learning_rates"].index(result["best_rate"])]


def spread(values: np.ndarray) -> float:
  """The sample's standard deviation; NaN for one value."""
  return float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def main(argv) -> None:
  """Trains; see the module's docstring."""
  del argv
  start = time.monotonic()
  rates = [float(rate) for rate in _RATES.value]
  sizes = [int(size) for size in _SIZES.value]
  groups = [
      (layers, group)
      for layers in map(int, _LAYERS.value)
      for group in _programs(layers, sizes)
  ]
  results = []
  with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
    for program in pool.map(lambda group: prepare(*group, rates), groups):
      name = f"{program.layers} blocks, sizes {program.sizes}"
      print(f"{name} compiled: {time.monotonic() - start:.0f} s", flush=True)
      results += train(program, rates)
      print(f"{name} trained: {time.monotonic() - start:.0f} s", flush=True)
      results.sort(key=lambda r: (r["layers"], r["block_size"]))
      if _OUTPUT.value:
        _write(results)
  print(
      f"{_STEPS.value} steps of {_BATCH.value} x {_SEQ_LEN.value} tokens, width"
      f" {_WIDTH.value}, on {common.hardware()}"
  )
  print_table(results)


def _programs(layers: int, sizes: list[int]) -> list[list[int]]:
  """Groups the block sizes: long banks alone, as all of a program are equal."""
  long = [s for s in sizes if model.bank_rows(layers, s) > _LONG]
  short = [s for s in sizes if s not in long]
  return [group for group in (short, *([s] for s in long)) if group]


def _write(results):
  common.write_json(
      _OUTPUT.value,
      {
          "hardware": common.hardware(),
          "steps": _STEPS.value,
          "tokens_per_step": _BATCH.value * _SEQ_LEN.value,
          "width": _WIDTH.value,
          "models": results,
      },
  )


if __name__ == "__main__":
  command.run(main)
