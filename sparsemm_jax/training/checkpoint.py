"""Checkpoints of a run: its state, its place in the data, its config.

A checkpoint is a folder `<workdir>/checkpoints/<step>` with the items "state"
(the whole TrainState), "data" (the iterator of the stage that the step was in)
and "run" (the config, the step and the stage, as JSON). Orbax writes it beside
and renames it when complete. It may be restored on other devices than it was
saved from.
"""

from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Mapping
import contextlib
import signal
from typing import Any
from typing import NamedTuple

from absl import logging
from etils import epath
import grain
import grain.checkpoint
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from sparsemm_jax import config as config_lib
from sparsemm_jax.training import curriculum

FOLDER = "checkpoints"

# A checkpoint stays one of the same model when these fields change.
_FREE_FIELDS = frozenset((
    "model.dtype", "model.remat", "model.init_std", "model.pipeline",
    "model.attn_res_implementation", "model.kda.implementation",
    "model.moe.implementation", "model.moe.exchange", "model.moe.row_budget",
    "model.moe.drop_overflow", "model.moe.balancing", "model.moe.freeze_step",
    "model.moe.histogram_bins", "model.moe.pool_decay",
    "model.moe.sequence_weight", "model.moe.sequence_decay",
    "model.moe.sequence_bins", "model.moe.sign_step_size",
    "model.moe.switch_loss_weight", "model.vision.max_patches_per_image",
    "model.vision.max_patches_per_side",
))  # fmt: skip


class CheckpointError(ValueError):
  """A checkpoint that cannot be used; the message names it and says why."""


class Start(NamedTuple):
  """Where a run begins.

  Attributes:
    state: the TrainState.
    step: optimizer steps taken.
    source: the checkpoint's path; None: from scratch.
  """

  state: Any
  step: int
  source: epath.Path | None


class CheckpointManager:
  """Saves and restores one run."""

  def __init__(self, workdir: epath.PathLike, config: config_lib.RunConfig):
    """Opens the run's folder of checkpoints; `start` or `save` makes it."""
    self._config = config
    self._directory = epath.Path(workdir).absolute() / FOLDER
    train = config.train
    keep: list[checkpoint_managers.PreservationPolicy] = [
        checkpoint_managers.LatestN(train.keep_latest)
    ]
    if train.keep_every is not None:
      keep.append(checkpoint_managers.EveryNSteps(train.keep_every))
    self._manager = ocp.CheckpointManager(
        self._directory,
        item_handlers=_handlers(),
        options=ocp.CheckpointManagerOptions(
            save_decision_policy=checkpoint_managers.FixedIntervalPolicy(
                train.checkpoint_every
            ),
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(keep),
            cleanup_tmp_directories=True,
            create=False,
        ),
    )

  def latest_step(self) -> int | None:
    """Returns the step of the latest checkpoint, None where there is none."""
    return self._manager.latest_step()

  def save(
      self,
      step: int,
      state: Any,
      data_iterator: grain.DatasetIterator,
      force: bool = False,
  ) -> bool:
    """Saves in the background if the step is due, or in any case.

    Args:
      step: optimizer steps taken, at least 1.
      state: the TrainState after them; the caller may donate it afterwards.
      data_iterator: of the last step's stage, after its batch.
      force: save although the step is not due, and wait until it is written:
        at the end, and when told to stop.

    Returns:
      Whether it was saved; False too where this step was saved before.
    """
    saved = False
    if step != self.latest_step():
      run = {
          "config": config_lib.to_dict(self._config),
          "step": step,
          "stage": curriculum.stage_at(self._config.train, step - 1).stage,
      }
      saved = self._manager.save(
          step,
          args=ocp.args.Composite(
              state=ocp.args.PyTreeSave(state),
              data=grain.checkpoint.CheckpointSave(data_iterator),
              run=ocp.args.JsonSave(run),
          ),
          force=force,
      )
    if force:
      self._manager.wait_until_finished()
    return saved

  def close(self) -> None:
    """Waits until everything is written."""
    self._manager.close()

  def __enter__(self) -> "CheckpointManager":
    return self

  def __exit__(self, *unused_error) -> None:
    self.close()

  def start(self, abstract_state: Any, init: Callable[[], Any]) -> Start:
    """Begins from the run's own checkpoint, a named one, or scratch.

    Args:
      abstract_state: the TrainState as ShapeDtypeStructs with shardings.
      init: makes the state of a new run. `train.init_checkpoint` replaces its
        parameters and router state.

    Raises:
      CheckpointError: a checkpoint is damaged or of another model.
    """
    step = self.latest_step()
    if step is not None:
      path = self._directory / str(step)
      _check_config(path, self._config)
      return Start(_restore(path, abstract_state), step, path)
    if self._config.train.init_checkpoint is None:
      self._directory.mkdir(parents=True, exist_ok=True)
      return Start(init(), 0, None)
    path = find(self._config.train.init_checkpoint)
    try:
      _check_config(path, self._config)
    except CheckpointError as error:
      logging.warning("%s", error)  # What does not fit is refused below.
    variables = restore_variables(
        path, abstract_state.params, abstract_state.router_state
    )
    self._directory.mkdir(parents=True, exist_ok=True)
    return Start(init().replace(**variables), 0, path)

  def restore_data(
      self, step: int, data_iterator: grain.DatasetIterator
  ) -> None:
    """Moves the iterator to where the checkpoint left it.

    Args:
      step: of the checkpoint, below the number of steps of the run.
      data_iterator: new, of the stage that the step's batch belongs to. At the
        first step of a stage it is left alone.

    Raises:
      CheckpointError: the stages or the data are not those of the checkpoint,
        or its data item is damaged.
    """
    position = curriculum.stage_at(self._config.train, step)
    if position.step == 0:
      return
    path = self._directory / str(step)
    run = _read(path, "run", ocp.args.JsonRestore())
    here = _data_fields(config_lib.to_dict(self._config), position.stage)
    there = _data_fields(run["config"], run["stage"])
    differences = list(_differences(there, here))
    if run["stage"] != position.stage:
      differences.append(
          f"the stage is {run['stage']} there and {position.stage} here"
      )
    if differences:
      raise CheckpointError(
          f"{path} holds a place in other data: {'; '.join(differences[:3])}"
      )
    _read(path, "data", grain.checkpoint.CheckpointRestore(data_iterator))


def find(path: epath.PathLike) -> epath.Path:
  """Returns the folder of a checkpoint.

  Args:
    path: a run's workdir, for its latest checkpoint, or
      `<workdir>/checkpoints/<step>`.

  Raises:
    CheckpointError: there is none.
  """
  path = epath.Path(path).absolute()
  if path.parent.name == FOLDER and path.exists():
    return path
  steps = []
  if (path / FOLDER).exists():
    steps = ocp.utils.checkpoint_steps(path / FOLDER)
  if not steps:
    raise CheckpointError(f"{path} has no checkpoint")
  return path / FOLDER / str(max(steps))


def load_config(path: epath.Path) -> config_lib.RunConfig:
  """Reads the config that the checkpoint's run had; see `find` for path."""
  run = _read(path, "run", ocp.args.JsonRestore())
  try:
    return config_lib.from_config_dict(run["config"])
  except config_lib.ConfigError as error:
    raise CheckpointError(f"{path}: {error}") from None


def load_step(path: epath.Path) -> int:
  """Reads the optimizer steps that the checkpoint's run had taken."""
  return _read(path, "run", ocp.args.JsonRestore())["step"]


def restore_variables(
    path: epath.Path, params: Any, router_state: Any
) -> Mapping[str, Any]:
  """Restores what the model needs, and not the optimizer's state.

  Args:
    path: of the checkpoint, see `find`.
    params: as ShapeDtypeStructs; without shardings, for the first device.
    router_state: likewise.

  Returns:
    {"params": ..., "router_state": ...}.

  Raises:
    CheckpointError: it is damaged or of another model.
  """
  return _restore(path, {"params": params, "router_state": router_state})


class StopSignal:
  """Whether this process was told to stop."""

  requested = False


@contextlib.contextmanager
def stop_on_sigterm() -> Generator[StopSignal]:
  """Turns the first SIGTERM into a request; a second one ends the process."""
  stop = StopSignal()

  def handle(unused_number, unused_frame):
    stop.requested = True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

  before = signal.signal(signal.SIGTERM, handle)
  try:
    yield stop
  finally:
    signal.signal(signal.SIGTERM, before)


def _handlers() -> dict[str, Any]:
  return {
      "state": ocp.PyTreeCheckpointHandler(),
      "data": grain.checkpoint.CheckpointHandler(),
      "run": ocp.JsonCheckpointHandler(),
  }


@contextlib.contextmanager
def _one_clear_error(path, item):
  try:
    yield
  except (ValueError, TypeError, KeyError, OSError) as error:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise CheckpointError(
        f"{path} is damaged: item {item!r}: {reason[:200]}"
    ) from error


def _read(path, item, args):
  with _one_clear_error(path, item):
    return _handlers()[item].restore(path / item, args=args)


def _restore(path, abstract):
  """Restores a tree, or a part of the state, after comparing its shapes."""
  abstract = jax.tree.map(_with_sharding, abstract)
  _check_shapes(path, abstract)
  restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
  return _read(
      path,
      "state",
      ocp.args.PyTreeRestore(
          abstract, restore_args=restore_args, partial_restore=True
      ),
  )


def _with_sharding(leaf):
  sharding = leaf.sharding
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_shapes(path, abstract):
  with _one_clear_error(path, "state"):
    metadata = _handlers()["state"].metadata(path / "state")
  here = _shapes(abstract)
  roots = {name.split(".")[0] for name in here}
  there = {
      name: shape
      for name, shape in _shapes(metadata.tree).items()
      if name.split(".")[0] in roots
  }
  for name in sorted(here.keys() | there.keys()):
    if here.get(name) != there.get(name):
      raise CheckpointError(
          f"{path} is of another model: {name} has shape"
          f" {there.get(name, 'none')} there and {here.get(name, 'none')} here"
      )


def _shapes(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
      jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
      for path, leaf in leaves
  }


def _check_config(path, config):
  """Refuses a checkpoint whose model, tokenizer or optimizer differs."""
  there = config_lib.to_dict(load_config(path))
  here = config_lib.to_dict(config)
  differences = list(_differences(_model_fields(there), _model_fields(here)))
  if differences:
    raise CheckpointError(
        f"{path} is of another model: {'; '.join(differences[:3])}"
    )


def _model_fields(config):
  return {
      "model": config["model"],
      "data": {"tokenizer": config["data"]["tokenizer"]},
      "optim": {"muon": config["optim"]["muon"]},
  }


def _data_fields(config, stage):
  sized = ("steps", "tokens", "micro_batches")  # which move no document
  fields = config["train"]["stages"][stage]
  return {
      "data": config["data"],
      f"train.stages[{stage}]": {
          name: value for name, value in fields.items() if name not in sized
      },
  }


def _differences(there, here, path=""):
  """Yields a sentence for each field that differs and may not."""
  for name in sorted(there.keys() | here.keys()):
    a, b = there.get(name), here.get(name)
    where = f"{path}.{name}" if path else name
    if where in _FREE_FIELDS:
      continue
    if isinstance(a, dict) and isinstance(b, dict):
      yield from _differences(a, b, where)
    elif a != b:
      yield f"{where} is {a!r} there and {b!r} here"
