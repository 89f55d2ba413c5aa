"""Which implementation a call gets."""

from absl.testing import absltest
import jax
from jax.sharding import AxisType

from pallas_kernels import aot
from pallas_kernels import dispatch


def _kernel():
  return "kernel"


_CANDIDATES = {
    "mosaic_tpu": _kernel,
    "mosaic_gpu": _kernel,
    "xla": lambda: "xla",
}


class DispatchTest(absltest.TestCase):

  def test_the_best_made_for_the_device_comes_first(self):
    self.assertEqual(dispatch.run("op", _CANDIDATES), "xla")
    with aot.abstract_device("h200"):
      self.assertEqual(dispatch.run("op", _CANDIDATES), "kernel")
      dispatch.check_hopper()
      with self.assertRaisesRegex(NotImplementedError, "no TPU"):
        dispatch.check_tpu()

  def test_no_kernel_serves_where_xla_would_have_to_cut_it(self):
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, platform="gpu")
    for kind, expected in ((AxisType.Auto, "xla"), (AxisType.Manual, "kernel")):
      mesh = jax.sharding.AbstractMesh(
          (2, 1), ("data", "expert"), (kind, AxisType.Auto),
          abstract_device=device,
      )  # fmt: skip
      with jax.sharding.use_abstract_mesh(mesh):
        self.assertEqual(dispatch.run("op", _CANDIDATES), expected)
        if kind == AxisType.Auto:
          with self.assertRaisesRegex(NotImplementedError, r"\['data'\]"):
            dispatch.run("op", _CANDIDATES, "mosaic_gpu")

  def test_unknown_and_missing_names_are_told_apart(self):
    with self.assertRaisesRegex(ValueError, "'pallas' is not one of"):
      dispatch.run("op", _CANDIDATES, "pallas")
    with self.assertRaisesRegex(NotImplementedError, "no such implementation"):
      dispatch.run("op", _CANDIDATES, "chunked")


if __name__ == "__main__":
  absltest.main()
