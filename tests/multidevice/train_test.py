"""Tests that eight devices compute the step that one device would."""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import flax.linen as nn
import jax
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax import training
from sparsemm_jax.data import pipeline
from sparsemm_jax.parallel import mesh as mesh_lib
from sparsemm_jax.parallel import rules
from sparsemm_jax.training import checkpoint
from sparsemm_jax.training import loop
from sparsemm_jax.training import router
from sparsemm_jax.training import state as state_lib
from sparsemm_jax.training import step as step_lib
from tests import testing
from tests import tiny_run


def _mesh(devices=8, **sizes):
  config = config_lib.MeshConfig(**sizes)
  return mesh_lib.make_mesh(config, jax.devices()[:devices])


class TrainTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = tiny_run.config()
    cls.state = jax.jit(lambda: training.init_state(cls.config))()
    cls.batches = tiny_run.batches(cls.config, 4)
    gradient_step = jax.jit(step_lib.make_gradient_step(cls.config))
    cls.sums = [gradient_step(cls.state, batch) for batch in cls.batches]

  def _bias(self, sums):
    router_state = router.update(
        jax.device_get(self.state.router_state),
        jax.device_get(sums["stats"]["router_stats"]),
        self.config.model.moe,
        step=0,
    )
    (bias,) = jax.tree.leaves(router_state)
    return np.asarray(bias)

  @parameterized.named_parameters(
      ("rows", dict(data=8)),
      ("rows_parameters_and_experts", dict(data=2, fsdp=2, expert=2)),
      ("rows_and_heads", dict(data=4, tensor=2)),
      ("rows_parameters_and_stages", dict(data=2, fsdp=2, stage=2)),
  )
  def test_gradients_and_bias_are_those_of_one_device(self, sizes):
    mesh = _mesh(**sizes)
    state = jax.device_put(
        self.state, state_lib.state_shardings(self.config, mesh)
    )
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules.LOGICAL_RULES):
      gradient_step = jax.jit(step_lib.make_gradient_step(self.config))
      actual = [
          gradient_step(state, loop.put_batch(batch, mesh))
          for batch in self.batches
      ]
    for index, (sums, expected) in enumerate(
        zip(actual, self.sums, strict=True)
    ):
      for name, (nats, count) in expected["by_modality"].items():
        testing.assert_close(
            sums["by_modality"][name][0], nats, "sharded fp32", name
        )
        testing.assert_same(sums["by_modality"][name][1], count)
      jax.tree_util.tree_map_with_path(
          lambda path, a, b: testing.assert_close(
              a, b, "sharded fp32", jax.tree_util.keystr(path)
          ),
          sums["grads"],
          expected["grads"],
      )
      self.assertGreater(np.abs(self._bias(expected)).max(), 0)
      testing.assert_same(
          self._bias(sums), self._bias(expected), f"batch {index}"
      )

  def test_stages_share_out_the_parameters_and_their_update(self):
    mesh = _mesh(data=2, fsdp=2, stage=2)
    shardings = state_lib.state_shardings(self.config, mesh)
    state = jax.device_put(self.state, shardings)
    update_step = step_lib.make_update_step(self.config)
    expected, _ = jax.jit(update_step)(self.state, self.sums[0])
    with jax.set_mesh(mesh):
      update_step = jax.jit(update_step, out_shardings=(shardings, None))
      actual, _ = update_step(state, self.sums[0])
    jax.tree.map(
        lambda a, b: testing.assert_close(a, b, "sharded fp32"),
        actual.params,
        expected.params,
    )
    matrices = [
        leaf
        for leaf in jax.tree.leaves((actual.params, actual.opt_state))
        if leaf.ndim > 1 and self.config.model.d_model in leaf.shape
    ]
    self.assertNotEmpty(matrices)
    for leaf in matrices:
      self.assertEqual(4 * leaf.addressable_shards[0].data.size, leaf.size)


class RestoreTest(absltest.TestCase):

  def test_a_state_saved_by_eight_devices_is_restored_by_one(self):
    workdir = pathlib.Path(self.create_tempdir().full_path)
    config = tiny_run.text_config()
    abstract = jax.eval_shape(lambda: training.init_state(config))
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), abstract
    )
    eight, one = (
        state_lib.state_shardings(config, mesh)
        for mesh in (_mesh(data=2, fsdp=2, tensor=2), _mesh(1))
    )
    with checkpoint.CheckpointManager(workdir, config) as manager:
      manager.save(
          1,
          jax.device_put(state, eight),
          pipeline.make_train_iterator(config, 0),
          force=True,
      )
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        abstract,
        one,
    )
    with checkpoint.CheckpointManager(workdir, config) as manager:
      restored = manager.start(abstract, self.fail).state
    for leaf in jax.tree.leaves(restored):
      self.assertLen(leaf.devices(), 1)
    jax.tree.map(testing.assert_same, restored, state)


if __name__ == "__main__":
  absltest.main()
