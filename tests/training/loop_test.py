"""Tests that a run goes through its stages, stops, and goes on."""

import dataclasses
import json
import os
import pathlib
import signal
import tempfile
from unittest import mock

from absl.testing import absltest
import jax
from jax.experimental.compilation_cache import compilation_cache
import numpy as np
import optax
import pytest

from sparsemm_jax import config as config_lib
from sparsemm_jax.training import checkpoint
from sparsemm_jax.training import loop
from sparsemm_jax.training import metrics
from tests import testing
from tests import tiny_run

STEPS = (3, 4)  # of the two stages
STOP_AT = 5  # inside the second


def _notes(folder):
  """A second source, short documents in a JSONL file."""
  path = pathlib.Path(folder, "notes.jsonl")
  lines = [json.dumps({"text": f"note {i}: {i * i}"}) for i in range(200)]
  path.write_text("\n".join(lines))
  return str(path)


class LoopTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls._share_compiled_programs()
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    stages = (
        tiny_run.stage(steps=STEPS[0]),
        tiny_run.stage(steps=STEPS[1], mixture={"python": 1.0, "notes": 2.0}),
    )
    sources = {
        "python": config_lib.SourceConfig(kind="python_text"),
        "notes": config_lib.SourceConfig(kind="jsonl", path=_notes(cls.folder)),
    }
    cls.config = dataclasses.replace(
        tiny_run.text_config(),
        data=config_lib.DataConfig(sources=sources),
        train=config_lib.TrainConfig(
            stages=stages, log_every=1, eval_every=sum(STEPS), eval_batches=1
        ),
    )
    cls.batches = []
    cls.state = cls._train(cls.config, "whole", cls.batches)

  @classmethod
  def _share_compiled_programs(cls):
    """Lets stages, runs and resumed runs of one shape compile once."""
    if jax.config.jax_compilation_cache_dir is None:
      folder = cls.enterClassContext(tempfile.TemporaryDirectory())
      cls.addClassCleanup(compilation_cache.reset_cache)
      cls.addClassCleanup(jax.config.update, "jax_compilation_cache_dir", None)
      jax.config.update("jax_compilation_cache_dir", folder)
      compilation_cache.reset_cache()

  @classmethod
  def _train(cls, config, name, batches=None, stop_at=None):
    """Trains, and notes the batches; SIGTERM comes during step stop_at."""
    batches = [] if batches is None else batches
    put_batch = loop.put_batch

    def put(batch, mesh):
      batches.append(batch["tokens"])
      if len(batches) == stop_at:
        os.kill(os.getpid(), signal.SIGTERM)
      return put_batch(batch, mesh)

    with mock.patch.object(loop, "put_batch", put):
      return loop.train(config, cls.folder / name)

  def _metrics(self, name):
    return metrics.read(self.folder / name)

  @pytest.mark.exact
  def test_a_run_resumed_after_sigterm_is_the_uninterrupted_one(self):
    first, rest = [], []
    with self.assertRaisesRegex(loop.Stopped, f"saved step {STOP_AT}"):
      self._train(self.config, "stopped", first, stop_at=STOP_AT)
    path = checkpoint.find(self.folder / "stopped")
    self.assertEqual(checkpoint.load_step(path), STOP_AT)
    state = self._train(self.config, "stopped", rest)
    jax.tree_util.tree_map_with_path(
        lambda path, a, b: testing.assert_same(
            a, b, jax.tree_util.keystr(path)
        ),
        state,
        self.state,
    )
    self.assertEqual(int(state.step), sum(STEPS))
    # The batches of the steps, then those of the evaluation at the end.
    self.assertLen(first, STOP_AT)
    testing.assert_same(np.stack(first + rest), np.stack(self.batches))
    resumed, whole = self._metrics("stopped"), self._metrics("whole")
    self.assertEqual(resumed.keys(), whole.keys())
    for name in whole:
      if name != "throughput/tokens_per_second":
        testing.assert_same(resumed[name][0], whole[name][0], name)
        testing.assert_same(resumed[name][1], whole[name][1], name)

  def test_every_step_is_logged(self):
    series = self._metrics("whole")
    steps = np.arange(1, sum(STEPS) + 1)
    for name in (
        "train/loss", "train/loss_text", "train/grad_norm",
        "train/learning_rate", "router/max_violation", "router/dropped",
    ):  # fmt: skip
      testing.assert_same(series[name][0], steps, name)
      self.assertTrue(np.isfinite(series[name][1]).all(), name)
    # A step that compiles, the first of its stage, is no measure of speed.
    testing.assert_same(
        series["throughput/tokens_per_second"][0],
        np.delete(steps, [0, STEPS[0]]),
    )
    testing.assert_same(series["train/stage"][1], np.repeat([0, 1], STEPS))
    self.assertEqual(series["train/tokens"][1][0], 256)  # a row is 32 tokens
    self.assertEqual(series["router/max_violation"][1].shape, (sum(STEPS), 1))
    testing.assert_same(series["router/dropped"][1], np.zeros(sum(STEPS)))
    for source in ("python", "notes"):
      steps, values = series[f"eval/{source}/bits_per_byte"]
      self.assertEqual(list(steps), [sum(STEPS)])
      self.assertBetween(values[0], 1.0, 12.0)

  def test_the_config_is_kept(self):
    text = (self.folder / "whole" / "config.json").read_text()
    config = config_lib.from_config_dict(json.loads(text))
    self.assertEqual(config, self.config)

  def test_a_finished_run_takes_no_further_step(self):
    batches = []
    state = self._train(self.config, "whole", batches)
    self.assertEmpty(batches)
    self.assertEqual(int(state.step), sum(STEPS))

  def test_a_run_may_start_from_the_parameters_of_another(self):
    train = dataclasses.replace(
        self.config.train, init_checkpoint=str(self.folder / "whole")
    )
    config = dataclasses.replace(self.config, train=train)
    with mock.patch.object(
        loop._Run, "through_stages", lambda self, state, step: (state, step)
    ):
      state, step = loop.train(config, self.folder / "second")
    self.assertEqual(step, 0)
    jax.tree.map(testing.assert_same, state.params, self.state.params)
    jax.tree.map(
        testing.assert_same, state.router_state, self.state.router_state
    )
    self.assertEqual(int(state.step), 0)
    moments = dict(optax.tree.get_all_with_path(state.opt_state, "mu"))
    self.assertLen(moments, 2)  # of Muon and of Adam
    for leaf in jax.tree.leaves(list(moments.values())):
      testing.assert_same(leaf, np.zeros_like(leaf))

  def test_steps_that_stay_non_finite_stop_the_run(self):
    config = dataclasses.replace(
        self.config,
        optim=config_lib.OptimConfig(learning_rate=1e38, clip_norm=1.0),
        train=dataclasses.replace(
            self.config.train, max_nonfinite_in_a_row=3, log_every=100
        ),
    )
    with self.assertRaisesRegex(
        loop.TrainingError,
        r"^3 steps in a row .* \(train.max_nonfinite_in_a_row\).* at step 4$",
    ):
      self._train(config, "diverged")
    # They are written although no line is due.
    series = self._metrics("diverged")
    testing.assert_same(series["train/skipped_steps"][0], [2, 3, 4])
    testing.assert_same(series["train/skipped_steps"][1], [1, 2, 3])
    self.assertTrue(np.isnan(series["train/loss"][1]).all())


if __name__ == "__main__":
  absltest.main()
