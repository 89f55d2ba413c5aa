"""Tests of saving, restoring, refusing, and of the signal to stop."""

import dataclasses
import functools
import os
import pathlib
import signal

from absl.testing import absltest
from absl.testing import parameterized
import flax
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsemm_jax import config as config_lib
from sparsemm_jax.training import checkpoint
from sparsemm_jax.training import state as state_lib
from tests import testing
from tests import tiny_run


@flax.struct.dataclass
class State:
  step: jax.Array
  params: dict
  router_state: dict
  opt_state: optax.OptState


def _optimizer():
  return optax.partition(
      {"a": optax.trace(0.9), "b": optax.scale_by_adam()},
      {"layer": {"kernel": "a", "scale": "b"}},
  )


def _state(seed, width=3):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
  params = {"layer": {"kernel": normal(4, width), "scale": normal(width)}}
  return State(
      step=jnp.int32(seed),
      params=params,
      router_state={"layer": {"bias": normal(5)}},
      opt_state=_optimizer().init(jax.tree.map(jnp.sin, params)),
  )


def _config(model=None, data=None, **train):
  train.setdefault("stages", (config_lib.StageConfig(steps=100),))
  return config_lib.RunConfig(
      model=model or config_lib.ModelConfig(vision=config_lib.VisionConfig()),
      data=data or config_lib.DataConfig(),
      train=config_lib.TrainConfig(**train),
  )


def _iterator(read=0):
  iterator = iter(
      grain.MapDataset.range(1000).shuffle(seed=1).to_iter_dataset()
  )
  for _ in range(read):
    next(iterator)
  return iterator


def _refuse():
  raise AssertionError("started from scratch")


class CheckpointTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)

  def _save(self, step, state, config=None, name="run", **kwargs):
    with checkpoint.CheckpointManager(
        self.workdir / name, config or _config()
    ) as manager:
      return manager.save(step, state, _iterator(step), force=True, **kwargs)

  def _start(self, config=None, init=_refuse, name="run", width=3):
    abstract = jax.eval_shape(lambda: _state(0, width))
    with checkpoint.CheckpointManager(
        self.workdir / name, config or _config()
    ) as manager:
      return manager.start(abstract, init)

  def test_a_restored_state_is_the_saved_one_bit_for_bit(self):
    state = _state(7)
    self._save(7, state)
    start = self._start()
    self.assertEqual(start.step, 7)
    self.assertEqual(jax.tree.structure(start.state), jax.tree.structure(state))
    jax.tree.map(testing.assert_same, start.state, state)

  def test_the_state_may_be_donated_while_it_is_being_written(self):
    step = jax.jit(
        functools.partial(jax.tree.map, lambda x: x * 0), donate_argnums=0
    )
    state = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
    state = _state(7).replace(params=state)
    with checkpoint.CheckpointManager(
        self.workdir / "run", _config(checkpoint_every=1)
    ) as manager:
      manager.save(7, state, _iterator(7))
      jax.block_until_ready(step(state))
    path = checkpoint.find(self.workdir / "run")
    params = {"w": jax.ShapeDtypeStruct((1 << 20,), jnp.float32)}
    router_state = jax.eval_shape(lambda: _state(0).router_state)
    restored = checkpoint.restore_variables(path, params, router_state)
    testing.assert_same(restored["params"]["w"], np.arange(1 << 20))

  def test_the_iterator_goes_on_where_the_checkpoint_left_it(self):
    self._save(7, _state(7))
    iterator = _iterator()
    with checkpoint.CheckpointManager(
        self.workdir / "run", _config()
    ) as manager:
      manager.restore_data(7, iterator)
    self.assertEqual(
        [next(iterator) for _ in range(5)],
        [next(i) for i in [_iterator(7)] for _ in range(5)],
    )

  def test_the_first_step_of_a_stage_reads_new_data(self):
    stage = config_lib.StageConfig(steps=7)
    config = _config(stages=(stage, stage))
    self._save(7, _state(7), config)
    iterator = _iterator()
    with checkpoint.CheckpointManager(self.workdir / "run", config) as manager:
      manager.restore_data(7, iterator)
    self.assertEqual(next(iterator), next(_iterator()))

  @parameterized.parameters(
      (
          dict(stages=(config_lib.StageConfig(steps=100, seq_len=512),)),
          r"stages\[0\].seq_len is 256 there and 512 here",
      ),
      (
          dict(data=config_lib.DataConfig(seed=3)),
          "data.seed is 0 there and 3 here",
      ),
      (  # A name that is free elsewhere.
          dict(
              data=config_lib.DataConfig(
                  sources={
                      **config_lib.DataConfig().sources,
                      "dtype": config_lib.SourceConfig(kind="digits"),
                  }
              )
          ),
          "data.sources.dtype is None there",
      ),
      (
          dict(
              stages=(
                  config_lib.StageConfig(steps=5),
                  config_lib.StageConfig(steps=95),
              )
          ),
          "the stage is 0 there and 1 here",
      ),
  )
  def test_a_place_in_other_data_is_refused(self, changes, message):
    self._save(7, _state(7))
    with (
        checkpoint.CheckpointManager(
            self.workdir / "run", _config(**changes)
        ) as manager,
        self.assertRaisesRegex(checkpoint.CheckpointError, message),
    ):
      manager.restore_data(7, _iterator())

  def test_due_steps_are_saved_and_the_policies_keep_some(self):
    config = _config(checkpoint_every=2, keep_latest=2, keep_every=6)
    with checkpoint.CheckpointManager(self.workdir / "run", config) as manager:
      saved = [manager.save(n, _state(n), _iterator(n)) for n in range(1, 13)]
      self.assertEqual(saved, [n % 2 == 0 for n in range(1, 13)])
      self.assertFalse(manager.save(12, _state(12), _iterator(12), force=True))
      self.assertTrue(manager.save(13, _state(13), _iterator(13), force=True))
    kept = os.listdir(self.workdir / "run" / checkpoint.FOLDER)
    self.assertCountEqual(kept, ["6", "12", "13"])

  def test_own_run_comes_before_named_checkpoint_before_scratch(self):
    scratch, named, own = _state(1), _state(2), _state(3)
    start = self._start(init=lambda: scratch)
    self.assertEqual((start.step, start.source), (0, None))
    self.assertIs(start.state, scratch)

    self._save(50, named, name="other")
    config = _config(init_checkpoint=str(self.workdir / "other"))
    start = self._start(config, init=lambda: scratch)
    self.assertEqual(start.step, 0)
    self.assertEqual(start.source.name, "50")
    jax.tree.map(testing.assert_same, start.state.params, named.params)
    jax.tree.map(
        testing.assert_same, start.state.router_state, named.router_state
    )
    jax.tree.map(testing.assert_same, start.state.opt_state, scratch.opt_state)
    testing.assert_same(start.state.step, scratch.step)

    self._save(3, own, config)
    start = self._start(config)
    self.assertEqual(start.step, 3)
    jax.tree.map(testing.assert_same, start.state, own)

  def test_one_step_of_a_run_may_be_named(self):
    for step in (3, 4):
      self._save(step, _state(step))
    path = self.workdir / "run" / checkpoint.FOLDER / "3"
    self.assertEqual(checkpoint.load_step(checkpoint.find(path)), 3)
    self.assertEqual(
        checkpoint.load_step(checkpoint.find(self.workdir / "run")), 4
    )
    with self.assertRaisesRegex(checkpoint.CheckpointError, "no checkpoint"):
      checkpoint.find(self.workdir / "nowhere")

  def test_a_checkpoint_of_another_model_names_the_field(self):
    config = _config()
    self._save(7, _state(7), config)
    mla = dataclasses.replace(config.model.mla, rope_theta=1e4)
    model = dataclasses.replace(config.model, mla=mla)
    with self.assertRaisesRegex(
        checkpoint.CheckpointError,
        "run/checkpoints/7 is of another model: model.mla.rope_theta is None"
        " there and 10000.0 here",
    ):
      self._start(_config(model=model))

  def test_a_tree_of_another_shape_names_the_parameter(self):
    self._save(7, _state(7))
    config = _config(init_checkpoint=str(self.workdir / "run"))
    with self.assertRaisesRegex(
        checkpoint.CheckpointError,
        r"params.layer.kernel has shape \(4, 3\) there and \(4, 6\) here",
    ):
      self._start(config, init=_refuse, name="new", width=6)

  def test_what_does_not_make_another_model_may_change(self):
    config = _config(tiny_run.MODEL)
    self._save(7, _state(7), config)
    replace = dataclasses.replace
    model = replace(
        config.model, dtype="bfloat16", remat="full", init_std=0.1,
        attn_res_implementation="reference",
        pipeline=config_lib.PipelineConfig(virtual_stages=2, micro_batches=4),
        kda=replace(config.model.kda, implementation="chunked"),
        moe=replace(
            config.model.moe, implementation="xla", exchange="all_to_all",
            row_budget=None, drop_overflow=True, freeze_step=9,
            balancing="sequence_quantile", histogram_bins=50, pool_decay=0.5,
            sequence_weight=0.1, sequence_decay=0.9, sequence_bins=50,
            sign_step_size=1e-2, switch_loss_weight=1e-3,
        ),
        vision=replace(
            config.model.vision, max_patches_per_image=8, max_patches_per_side=4
        ),
    )  # fmt: skip
    changed = _config(model)
    self.assertEqual(self._start(changed).step, 7)
    shapes = [
        jax.eval_shape(functools.partial(state_lib.init_state, c))
        for c in (config, changed)
    ]
    self.assertEqual(*shapes)

  def test_a_damaged_checkpoint_is_one_clear_error(self):
    self._save(7, _state(7))
    files = [
        path
        for path in (self.workdir / "run" / checkpoint.FOLDER).rglob("*")
        if path.is_file() and "/d/" in str(path)
    ]
    self.assertNotEmpty(files)
    for path in files:
      path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with self.assertRaisesRegex(
        checkpoint.CheckpointError, "checkpoints/7 is damaged: item 'state'"
    ):
      self._start()

  def test_a_missing_item_is_one_clear_error(self):
    self._save(7, _state(7))
    folder = self.workdir / "run" / checkpoint.FOLDER / "7"
    (folder / "run" / "metadata").unlink()
    with self.assertRaisesRegex(
        checkpoint.CheckpointError, "checkpoints/7 is damaged: item 'run'"
    ):
      self._start()

  def test_a_save_that_fails_leaves_the_one_before(self):
    class BrokenIterator(grain.DatasetIterator):

      def __next__(self):
        raise StopIteration

      def get_state(self):
        raise OSError("disk full")

      def set_state(self, state):
        del state

    with checkpoint.CheckpointManager(
        self.workdir / "run", _config()
    ) as manager:
      manager.save(3, _state(3), _iterator(3), force=True)
      with self.assertRaisesRegex(OSError, "disk full"):
        manager.save(4, _state(4), BrokenIterator(), force=True)
    start = self._start()
    self.assertEqual(start.step, 3)
    jax.tree.map(testing.assert_same, start.state, _state(3))
    kept = os.listdir(self.workdir / "run" / checkpoint.FOLDER)
    self.assertEqual(kept, ["3"])

  def test_the_config_comes_back_as_it_was(self):
    config = _config(keep_every=5)
    self._save(7, _state(7), config)
    path = checkpoint.find(self.workdir / "run")
    self.assertEqual(checkpoint.load_config(path), config)

  def test_the_first_sigterm_asks_and_the_second_one_kills(self):
    before = signal.getsignal(signal.SIGTERM)
    with checkpoint.stop_on_sigterm() as stop:
      self.assertFalse(stop.requested)
      os.kill(os.getpid(), signal.SIGTERM)
      self.assertTrue(stop.requested)
      self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)
    self.assertEqual(signal.getsignal(signal.SIGTERM), before)


if __name__ == "__main__":
  absltest.main()
