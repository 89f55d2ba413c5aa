"""What an installed copy has is what the code imports."""

import ast
import importlib.metadata
import pathlib
import re
import sys

from absl.testing import absltest
from packaging import requirements

_ROOT = pathlib.Path(__file__).parent.parent
_OWN = ("sparsemm_jax", "pallas_kernels", "experiments", "configs")
# Imported where they are used: our kernels do without it, the bench_ commands
# time it.
_PEERS = ("fla", "jla", "tokamax", "torch", "triton")


def _imported(path):
  """Yields the top-level names of modules that a file imports."""
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      yield from (alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield node.module.split(".")[0]


def _required():
  """Returns the distributions that `pip install .` brings, names normal."""
  lines = importlib.metadata.requires("sparsemm-jax")
  needs = [requirements.Requirement(line) for line in lines]
  return {
      re.sub("[-_.]+", "-", need.name).lower()
      for need in needs
      if need.marker is None or need.marker.evaluate({"extra": ""})
  }


class RequirementsTest(absltest.TestCase):

  def test_every_import_is_required_without_extras(self):
    distributions = importlib.metadata.packages_distributions()
    required = _required() | {"jaxlib"}
    missing = set()
    for package in _OWN:
      for path in sorted((_ROOT / package).rglob("*.py")):
        for name in set(_imported(path)) - set(sys.stdlib_module_names):
          if name in _OWN + _PEERS:
            continue
          providers = {
              re.sub("[-_.]+", "-", d).lower()
              for d in distributions.get(name, [name])
          }
          if not providers & required:
            missing.add(f"{path.relative_to(_ROOT)}: {name}")
    self.assertEmpty(missing)


if __name__ == "__main__":
  absltest.main()
