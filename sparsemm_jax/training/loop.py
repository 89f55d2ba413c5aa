"""The training loop: stages, checkpoints, metrics, and how a run stops."""

from collections.abc import Mapping
import json
from typing import Any

from absl import logging
from etils import epath
from flax import linen as nn
import jax
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax.data import pipeline
from sparsemm_jax.parallel import mesh as mesh_lib
from sparsemm_jax.parallel import rules
from sparsemm_jax.training import checkpoint
from sparsemm_jax.training import curriculum
from sparsemm_jax.training import evaluation
from sparsemm_jax.training import metrics as metrics_lib
from sparsemm_jax.training import progress as progress_lib
from sparsemm_jax.training import state as state_lib
from sparsemm_jax.training import step as step_lib


class TrainingError(RuntimeError):
  """A run that cannot go on; its last checkpoint is intact."""


class Stopped(Exception):  # noqa: N818  (not an error: the run can go on)
  """The process was told to stop, and saved its state first."""


def train(
    config: config_lib.RunConfig, workdir: epath.PathLike
) -> state_lib.TrainState:
  """Trains through all stages, from the run's latest checkpoint if any.

  Args:
    config: of the run.
    workdir: holds the config, checkpoints, metrics and the TensorBoard log.

  Returns:
    The state after the last step.

  Raises:
    ConfigError, DataError, CheckpointError: nothing was trained.
    TrainingError: too many steps in a row were not finite.
    Stopped: SIGTERM came; the state is saved.
  """
  mesh = mesh_lib.make_mesh(config.mesh)
  mesh_lib.check_rows(mesh, config.train.stages)
  iterators = _make_iterators(config)
  with (
      jax.set_mesh(mesh),
      nn.logical_axis_rules(rules.LOGICAL_RULES),
      checkpoint.CheckpointManager(workdir, config) as manager,
      checkpoint.stop_on_sigterm() as stop,
  ):
    start = manager.start(*_state_maker(config, mesh))
    _write_config(config, workdir)
    if start.source is not None:
      logging.info("starting at step %d from %s", start.step, start.source)
    resumed_at = start.step or None
    with (
        metrics_lib.MetricWriter(workdir, resumed_at=resumed_at) as writer,
        progress_lib.Progress(
            config.train.num_steps, start=start.step
        ) as progress,
    ):
      run = _Run(config, mesh, iterators, manager, writer, progress, stop)
      return run.through_stages(start.state, start.step)


def _make_iterators(config):
  """Opens the data of all stages: the last stage fails as early as the first."""
  return [
      pipeline.make_train_iterator(
          config,
          index,
          process_index=jax.process_index(),
          process_count=jax.process_count(),
      )
      for index in range(len(config.train.stages))
  ]


def _write_config(config, workdir):
  """Writes <workdir>/config.json."""
  if jax.process_index() == 0:
    text = json.dumps(config_lib.to_dict(config), indent=2) + "\n"
    (epath.Path(workdir) / "config.json").write_text(text)


def _state_maker(config, mesh):
  """Returns the abstract state with shardings, and how to make it."""
  shardings = state_lib.state_shardings(config, mesh)
  abstract = jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(
          leaf.shape, leaf.dtype, sharding=sharding
      ),
      jax.eval_shape(lambda: state_lib.init_state(config)),
      shardings,
  )
  init = jax.jit(
      lambda: state_lib.init_state(config),
      out_shardings=shardings,
      # It runs once: compiling it well would take longer than running it.
      compiler_options={"xla_backend_optimization_level": 0},
  )
  return abstract, init


class _Run:
  """What the steps of one process share."""

  def __init__(self, config, mesh, iterators, manager, writer, progress, stop):
    self._config, self._mesh, self._iterators = config, mesh, iterators
    self._manager, self._writer = manager, writer
    self._progress, self._stop = progress, stop
    self._throughput = metrics_lib.Throughput()
    self._compiling_step = 0  # its time is not that of a step
    self._update = jax.jit(step_lib.make_update_step(config), donate_argnums=0)
    self._evaluate = jax.jit(step_lib.make_eval_step(config))

  def through_stages(self, state, step):
    """Trains from `step` to the end; returns the last state."""
    total = self._config.train.num_steps
    resumed = step > 0
    while step < total:
      position = curriculum.stage_at(self._config.train, step)
      iterator = self._iterators[position.stage]
      if resumed:
        self._manager.restore_data(step, iterator)
        resumed = False
      state, step = self._stage(state, step, position.stage, iterator)
    return state

  def _stage(self, state, step, index, iterator):
    """Trains to the end of one stage."""
    train = self._config.train
    stage = train.stages[index]
    end = curriculum.boundaries(train)[index + 1]
    self._progress.message(
        f"stage {index + 1}/{len(train.stages)}: steps {step + 1}-{end},"
        f" {stage.batch_size} rows of {stage.seq_len} tokens"
    )
    gradient_step = jax.jit(
        step_lib.make_gradient_step(
            self._config, micro_batches=stage.micro_batches
        )
    )
    pending = None  # metrics are fetched one step late
    self._throughput.restart()
    for number in range(step + 1, end + 1):
      batch = put_batch(next(iterator), self._mesh)
      state, metrics = self._update(state, gradient_step(state, batch))
      if pending is not None:
        self._report(number - 1, pending)
      pending = {**metrics, "train/stage": index}
      if number == step + 1:
        jax.block_until_ready(state)
        self._compiling_step = number
        self._throughput.restart()
      self._progress.advance(number)
      last = number == train.num_steps
      if self._stop.requested or last:
        self._report(number, pending)
        self._manager.save(number, state, iterator, force=True)
        if not last:
          raise Stopped(f"stopped by SIGTERM; saved step {number}")
        pending = None
      else:
        self._manager.save(number, state, iterator)
      if train.eval_every and number % train.eval_every == 0:
        self._report_held_out(state, number, stage)
    if pending is not None:
      self._report(end, pending)
    return state, end

  def _report(self, number, metrics):
    """Writes a step's metrics if due, and stops a run gone wrong."""
    if number != self._compiling_step:
      self._throughput.add(int(metrics["train/tokens"]))
    in_a_row = int(metrics["train/skipped_in_a_row"])
    if in_a_row:
      self._progress.message(
          f"step {number}: loss or gradient not finite; skipped"
      )
    if number % self._config.train.log_every == 0 or in_a_row:
      values = jax.device_get(metrics)
      if number != self._compiling_step:
        values["throughput/tokens_per_second"] = self._throughput.read()
      memory = jax.local_devices()[0].memory_stats()  # None on CPU
      if memory:
        peak = memory["peak_bytes_in_use"] / 2**30
        values["throughput/peak_memory_gib"] = peak
      self._writer.write(number, values)
      self._progress.log(_short(values))
    if in_a_row >= self._config.train.max_nonfinite_in_a_row:
      raise TrainingError(
          f"{in_a_row} steps in a row had a loss or gradient that is not"
          f" finite (train.max_nonfinite_in_a_row); stopped at step {number}"
      )

  def _report_held_out(self, state, number, stage):
    """Evaluates the held-out documents of the stage's sources."""
    for source in stage.mixture:
      result = evaluation.held_out(
          self._config,
          source,
          lambda batch: self._evaluate(state, put_batch(batch, self._mesh)),
          seq_len=stage.seq_len,
          batch_size=stage.batch_size,
          max_patches=stage.max_patches,
          num_batches=self._config.train.eval_batches,
      )
      self._writer.write(
          number, {f"eval/{source}/bits_per_byte": result.bits_per_byte}
      )
      self._progress.message(
          f"step {number}: held-out {source}"
          f" {result.bits_per_byte:.3f} bits per byte"
      )
    self._throughput.restart()


def put_batch(
    batch: Mapping[str, np.ndarray], mesh: jax.sharding.Mesh
) -> dict[str, jax.Array]:
  """Puts this process's rows of a batch onto its devices."""
  sharding = rules.batch_sharding(mesh)
  return {
      name: jax.make_array_from_process_local_data(sharding, value)
      for name, value in batch.items()
  }


def _short(values: Mapping[str, Any]) -> dict[str, float]:
  """The few numbers that a person watches."""
  short = {
      "loss": values["train/loss"],
      "text": values["train/loss_text"],
      "caption": values["train/loss_image_text"],
      "grad": values["train/grad_norm"],
  }
  for name, label in (
      ("throughput/tokens_per_second", "tok/s"),
      ("throughput/peak_memory_gib", "peak GiB"),
  ):
    if name in values:
      short[label] = values[name]
  if "router/max_violation" in values:
    short["max violation"] = values["router/max_violation"].max()
  return short
