"""Times a training step with and without attention residuals.

  python -m experiments.ablations.depth.overhead --output=overhead.json

One model, MLA and a dense MLP in each of 24 blocks, random tokens, AdamW. The
whole step is timed: forward, backward with recomputation, update. Experts are
left out and the vocabulary is small, so that nothing slow hides the mixes; the
plain step's share of the matrix units' rate is printed for that reason. The
variants compile side by side, then take turns on the device for some rounds.

  --variants=12:mosaic_gpu,6:mosaic_gpu,6:mosaic_gpu:1,6:mosaic_gpu:2

names an implementation, and phases in place of those that move fewer bytes.
"""

import concurrent.futures
import contextlib
import re
import statistics
import time
from unittest import mock

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import command
from experiments.ablations import common
from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import attn_res
from sparsemm_jax.training import state as state_lib
from sparsemm_jax.training import step as step_lib

_LAYERS = flags.DEFINE_integer("layers", 24, "Transformer blocks.")
_WIDTH = flags.DEFINE_integer("width", 2048, "d_model.")
_VARIANTS = flags.DEFINE_list(
    "variants",
    ["12", "6"],
    "Transformer blocks per source[:implementation[:phases of every mix]].",
)
flags.register_validator(
    "variants",
    lambda values: all(
        re.fullmatch(r"\d+(:\w*(:[12]?)?)?", value) for value in values
    ),
    "each must be like 12, 12:mosaic_gpu or 12:mosaic_gpu:1",
)
_BATCH = flags.DEFINE_integer("batch_size", 8, "Rows per step.")
_SEQ_LEN = flags.DEFINE_integer("seq_len", 1024, "Tokens per row.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of each variant.")
_STEPS = flags.DEFINE_integer("steps", 8, "Timed steps of a turn.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")


def make_config(
    block_size: int | None, implementation: str | None = None
) -> config_lib.RunConfig:
  """Returns the config of a variant; block size None: ordinary residuals."""
  width = _WIDTH.value
  heads = max(width // 128, 1)
  model = config_lib.ModelConfig(
      d_model=width,
      num_layers=_LAYERS.value,
      num_dense_layers=_LAYERS.value,
      mla_every=1,
      dense_hidden_dim=3 * width,
      attn_res_block_size=block_size,
      attn_res_implementation=implementation,
      dtype="bfloat16",
      remat="full",
      mla=config_lib.MlaConfig(
          num_heads=heads, q_lora_rank=width // 2, kv_lora_rank=width // 4,
          qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
      ),
  )  # fmt: skip
  stage = config_lib.StageConfig(
      seq_len=_SEQ_LEN.value, batch_size=_BATCH.value, steps=1000
  )
  return config_lib.RunConfig(
      model=model,
      optim=config_lib.OptimConfig(muon=False, learning_rate=1e-4),
      train=config_lib.TrainConfig(stages=(stage,)),
  )


def random_batch(config: config_lib.RunConfig) -> dict[str, jax.Array]:
  """Returns one batch of full rows of one document each."""
  stage = config.train.stages[0]
  shape = (stage.batch_size, stage.seq_len)
  tokens = jax.random.randint(
      jax.random.key(0), shape, 0, config.model.vocab_size
  )
  return {
      "tokens": tokens,
      "targets": jnp.roll(tokens, -1, axis=1),
      "segment_ids": jnp.ones(shape, jnp.int32),
      "modality": jnp.zeros(shape, jnp.int32),
      "loss_mask": jnp.ones(shape, bool),
  }


def parse_variant(
    variant: str | None,
) -> tuple[config_lib.RunConfig, int | None]:
  """Returns the config and the phases of an item of --variants."""
  size, implementation, phases, *_ = [*(variant or "").split(":"), "", ""]
  config = make_config(int(size) if size else None, implementation or None)
  return config, int(phases) if phases else None


def forced_phases(phases: int | None):
  """A context in which every scanned mix is traced in so many phases."""
  if phases is None:
    return contextlib.nullcontext()
  return mock.patch.object(attn_res, "use_two_phases", return_value=phases == 2)


def lower(config: config_lib.RunConfig, batch, phases: int | None = None):
  """Lowers init() -> state and train_step(state, batch) of a variant."""
  init = jax.jit(
      lambda: state_lib.init_state(config),
      compiler_options={"xla_backend_optimization_level": 0},
  )
  with forced_phases(phases):
    state = jax.eval_shape(init)
    train_step = jax.jit(step_lib.make_train_step(config), donate_argnums=0)
    return init.lower(), train_step.lower(state, batch)


def milliseconds_per_step(init, train_step, batch, steps: int) -> float:
  """Trains from a fresh state: some steps to warm up, then the timed ones."""
  state = init()
  for _ in range(2):
    state, metrics = train_step(state, batch)
  jax.block_until_ready(metrics)
  start = time.perf_counter()
  for _ in range(steps):
    state, metrics = train_step(state, batch)
  jax.block_until_ready(metrics)
  elapsed = time.perf_counter() - start
  assert np.isfinite(metrics["train/loss"])
  return 1e3 * elapsed / steps


def matmul_flops(config: config_lib.RunConfig) -> float:
  """Counts the operations of a step's products, recomputation left out."""
  params = state_lib.abstract_variables(config.model)["params"]
  weights = (
      sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
      - config.model.vocab_size * config.model.d_model
  )  # the embedding
  mla = config.model.mla
  width = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
  seq_len = config.train.stages[0].seq_len
  attention = config.model.num_layers * mla.num_heads * width * seq_len
  tokens = config.train.stages[0].batch_size * seq_len
  return 6.0 * tokens * (weights + attention)


def main(argv) -> None:
  """Times; see the module's docstring."""
  del argv
  start = time.monotonic()
  ordinary = make_config(None)
  batch = random_batch(ordinary)
  lowered = {"ordinary": lower(ordinary, batch)}
  for variant in _VARIANTS.value:
    config, phases = parse_variant(variant)
    lowered[f"block size {variant}"] = lower(config, batch, phases)
  print(f"lowered: {time.monotonic() - start:.0f} s", flush=True)
  with concurrent.futures.ThreadPoolExecutor(len(lowered)) as pool:
    futures = {
        name: pool.submit(lambda pair: [x.compile() for x in pair], pair)
        for name, pair in lowered.items()
    }
  compiled = {}
  for name, future in futures.items():
    if error := future.exception():
      print(f"{name} does not compile: {error!s:.1000}")
    else:
      compiled[name] = future.result()
  print(f"compiled: {time.monotonic() - start:.0f} s", flush=True)
  times = {name: [] for name in compiled}
  for _ in range(_ROUNDS.value):
    for name, (init, train_step) in compiled.items():
      times[name].append(
          milliseconds_per_step(init, train_step, batch, _STEPS.value)
      )
  plain = times["ordinary"]
  flops = matmul_flops(ordinary)
  rate = flops / statistics.median(plain) / 1e9
  print(
      f"{_LAYERS.value} blocks, width {_WIDTH.value}, {_BATCH.value} x"
      f" {_SEQ_LEN.value} tokens on {common.hardware()}; the ordinary step"
      f" reaches {rate:.0f} TFLOP/s"
  )
  results = {
      "hardware": common.hardware(),
      "layers": _LAYERS.value,
      "width": _WIDTH.value,
      "tokens": _BATCH.value * _SEQ_LEN.value,
      "ordinary_tflops": rate,
      "milliseconds": times,
      "overhead_percent": {},
  }
  for name, values in times.items():
    # Against the same round's ordinary step: clocks drift.
    percents = [100 * (t / p - 1) for t, p in zip(values, plain, strict=True)]
    results["overhead_percent"][name] = percents
    print(
        f"{name:24} {statistics.median(values):8.2f} ms/step"
        f" {statistics.median(percents):+6.2f}% (rounds:"
        f" {', '.join(f'{p:+.2f}' for p in percents)})"
    )
  if _OUTPUT.value:
    common.write_json(_OUTPUT.value, results)


if __name__ == "__main__":
  command.run(main)
