"""Tests that eight devices hold, and compute, what one device would."""

from absl.testing import absltest
import flax.linen as nn
import jax
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax.optim import build
from sparsemm_jax.parallel import mesh as mesh_lib
from sparsemm_jax.parallel import rules
from tests import testing

PARAMETERS = {
    "q_proj": ((2, 16, 4, 4), ("layers", "embed", "heads", "head_dim")),
    "gate": ((4, 8, 6), ("expert", "latent", "expert_mlp")),
    "norm": ((16,), ("embed",)),
    "odd": ((15, 4), ("embed", "rank")),
}


def _values(seed):
  rng = np.random.default_rng(seed)
  return {
      name: rng.normal(size=shape).astype(np.float32)
      for name, (shape, _) in PARAMETERS.items()
  }


class ShardedTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.mesh = mesh_lib.make_mesh(
        config_lib.MeshConfig(data=-1, fsdp=2, expert=2, tensor=2)
    )
    self.boxed = {
        name: nn.LogicallyPartitioned(
            jax.ShapeDtypeStruct(shape, "float32"), names
        )
        for name, (shape, names) in PARAMETERS.items()
    }
    self.shardings = rules.shardings(self.mesh, self.boxed)

  def test_each_device_holds_its_share(self):
    self.assertEqual(self.mesh.shape["data"], 1)
    params = jax.device_put(_values(0), self.shardings)
    shares = {
        name: x.addressable_shards[0].data.shape for name, x in params.items()
    }
    self.assertEqual(
        shares,
        {
            "q_proj": (2, 8, 2, 4),
            "gate": (2, 4, 3),
            "norm": (8,),
            "odd": (15, 4),
        },
    )

  def test_rows_of_a_batch_are_spread_over_data_fsdp_and_expert(self):
    batch = jax.device_put(
        np.zeros((8, 5), np.int32), rules.batch_sharding(self.mesh)
    )
    rows = {shard.index[0].start or 0 for shard in batch.addressable_shards}
    self.assertEqual(rows, {0, 2, 4, 6})

  def test_a_sharded_update_equals_the_unsharded_one(self):
    optimizer = build.make_optimizer(
        config_lib.OptimConfig(), rules.logical_names(self.boxed), 10
    )
    params, grads = _values(0), _values(1)
    state = jax.jit(optimizer.init)(params)
    expected, _ = jax.jit(optimizer.update)(grads, state, params)

    state_shardings = rules.optimizer_shardings(
        self.mesh, optimizer, state, self.shardings
    )
    update = jax.jit(
        optimizer.update,
        in_shardings=(self.shardings, state_shardings, self.shardings),
        out_shardings=(self.shardings, state_shardings),
    )
    updates, state = update(grads, state, params)
    for name in PARAMETERS:
      testing.assert_close(updates[name], expected[name], "sharded fp32", name)
      self.assertEqual(updates[name].sharding, self.shardings[name])


if __name__ == "__main__":
  absltest.main()
