"""What the ablations share: rows of real text in random order, and JSON."""

from collections.abc import Callable
from collections.abc import Sequence
import json
import math
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax.data import pipeline
from sparsemm_jax.training import state as state_lib

Batches = list[pipeline.Batch]


def shuffled_batches(
    config: config_lib.RunConfig, num_batches: int, *, seed: int = 0
) -> Batches:
  """Returns the first batches of the run, their rows in random order.

  Neighbouring rows of the pipeline come from the same documents; here a batch
  is a sample of all of them, so that batches differ by chance alone.

  Args:
    config: of the run; its first stage is read.
    num_batches: how many.
    seed: of the order.
  """
  iterator = pipeline.make_train_iterator(config, 0)
  batches = [next(iterator) for _ in range(num_batches)]
  rows = {
      name: np.concatenate([batch[name] for batch in batches])
      for name in batches[0]
  }
  order = np.random.default_rng(seed).permutation(len(rows["tokens"]))
  shuffled = np.split(order, num_batches)
  return [{k: v[indices] for k, v in rows.items()} for indices in shuffled]


def held_out_batches(config: config_lib.RunConfig, num_batches: int) -> Batches:
  """Returns held-out batches of the first stage's first source."""
  stage = config.train.stages[0]
  return list(
      pipeline.eval_batches(
          config,
          next(iter(stage.mixture)),
          seq_len=stage.seq_len,
          batch_size=stage.batch_size,
          num_batches=num_batches,
      )
  )


def initial_states(
    config: config_lib.RunConfig, seeds: int
) -> list[state_lib.TrainState]:
  """Returns the state before the first step for seeds 0, 1, ..."""
  init = jax.jit(
      lambda key: state_lib.init_state(config, key),
      # As in training.loop: it runs a few times, so compiling well costs more.
      compiler_options={"xla_backend_optimization_level": 0},
  )
  return [init(jax.random.key(seed)) for seed in range(seeds)]


def stack(trees: Sequence[Any]) -> Any:
  """Stacks like trees on a new leading axis: one entry per member."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def over_members(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns f(members, batch): function(member, batch) of each member.

  An accelerator runs them as one vmapped program. A CPU gains nothing from
  wider operations, and batching turns slices updated in place into scatters:
  there the members take turns.

  Args:
    function: of one member, a tree without the leading axis, and the batch.
  """
  if jax.default_backend() != "cpu":
    return jax.vmap(function, in_axes=(0, None))
  return lambda members, batch: jax.lax.map(
      lambda member: function(member, batch), members
  )


def rounded(value: Any, digits: int = 4) -> Any:
  """Makes arrays plain lists of few significant digits, for JSON."""
  if isinstance(value, dict):
    return {key: rounded(item, digits) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [rounded(item, digits) for item in value]
  if isinstance(value, np.ndarray | jax.Array):
    return rounded(np.asarray(value).tolist(), digits)
  if isinstance(value, float | np.floating):
    value = float(f"{value:.{digits}g}")
    return value if math.isfinite(value) else None
  return value


def write_json(path: epath.PathLike, value: Any) -> None:
  """Writes a results file, its numbers rounded."""
  path = epath.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(rounded(value)) + "\n")


def hardware() -> str:
  """Names the device and the version of jax."""
  return f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
