"""Tests that a checkpoint may be restored on other devices."""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import flax.linen as nn
import grain
import jax
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax.parallel import mesh as mesh_lib
from sparsemm_jax.parallel import rules
from sparsemm_jax.training import checkpoint
from tests import testing

NAMES = {"kernel": ("embed", "mlp"), "experts": ("expert", "latent", "rank")}
SHAPES = {"kernel": (16, 8), "experts": (4, 8, 3)}


def _shardings(devices, **sizes):
  mesh = mesh_lib.make_mesh(config_lib.MeshConfig(**sizes), devices)
  boxed = {
      name: nn.LogicallyPartitioned(
          jax.ShapeDtypeStruct(SHAPES[name], "float32"), NAMES[name]
      )
      for name in NAMES
  }
  return rules.shardings(mesh, boxed)


class CheckpointTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("eight_to_one", 8, dict(fsdp=4, tensor=2), 1, dict()),
      ("one_to_eight", 1, dict(), 8, dict(fsdp=2, expert=4)),
      ("another_mesh", 8, dict(fsdp=8), 8, dict(tensor=2, expert=2)),
  )
  def test_values_survive_a_change_of_devices(self, before, a, after, b):
    workdir = pathlib.Path(self.create_tempdir().full_path)
    rng = np.random.default_rng(0)
    values = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    state = jax.device_put(values, _shardings(jax.devices()[:before], **a))
    iterator = iter(grain.MapDataset.range(9).to_iter_dataset())
    config = config_lib.RunConfig(
        model=config_lib.ModelConfig(vision=config_lib.VisionConfig())
    )
    with checkpoint.CheckpointManager(workdir, config) as manager:
      manager.save(1, state, iterator, force=True)

    shardings = _shardings(jax.devices()[:after], **b)
    abstract = {
        name: jax.ShapeDtypeStruct(
            SHAPES[name], "float32", sharding=shardings[name]
        )
        for name in NAMES
    }
    with checkpoint.CheckpointManager(workdir, config) as manager:
      restored = manager.start(abstract, dict).state
    for name in NAMES:
      self.assertEqual(restored[name].sharding, shardings[name])
      testing.assert_same(restored[name], values[name], name)


if __name__ == "__main__":
  absltest.main()
