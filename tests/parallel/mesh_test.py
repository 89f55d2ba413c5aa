"""Tests of the mesh's sizes and of its refusals, on one device."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import sharding

from sparsemm_jax import config as config_lib
from sparsemm_jax.parallel import mesh as mesh_lib


class MeshTest(parameterized.TestCase):

  def test_the_default_takes_every_device_as_data(self):
    mesh = mesh_lib.make_mesh(config_lib.MeshConfig())
    self.assertEqual(
        tuple(mesh.shape.items()),
        (
            ("data", jax.device_count()), ("fsdp", 1), ("expert", 1),
            ("context", 1), ("tensor", 1), ("stage", 1),
        ),
    )  # fmt: skip
    self.assertEqual(set(mesh.axis_types), {sharding.AxisType.Auto})

  @parameterized.parameters(dict(tensor=3), dict(data=1, fsdp=5))
  def test_sizes_that_do_not_fit_the_devices_are_named(self, **sizes):
    config = config_lib.MeshConfig(**sizes)
    axis, size = list(sizes.items())[-1]
    with self.assertRaisesRegex(
        config_lib.ConfigError, rf"{axis}={size}.* does not fit 1 devices"
    ):
      mesh_lib.make_mesh(config, jax.devices()[:1])

  def test_rows_that_do_not_divide_are_named(self):
    mesh = sharding.AbstractMesh((2, 2, 1), mesh_lib.ROW_AXES)
    good = config_lib.StageConfig(steps=1, batch_size=8, micro_batches=2)
    bad = config_lib.StageConfig(steps=1, batch_size=8, micro_batches=4)
    mesh_lib.check_rows(mesh, (good,))
    with self.assertRaisesRegex(
        config_lib.ConfigError, r"stages\[1\]: 2 rows .* 4 devices"
    ):
      mesh_lib.check_rows(mesh, (good, bad))


if __name__ == "__main__":
  absltest.main()
