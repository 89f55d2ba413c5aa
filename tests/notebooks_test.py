"""Every notebook runs from top to bottom."""

import os
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import nbclient
import nbformat

_FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"


class NotebooksTest(parameterized.TestCase):

  @parameterized.parameters(
      *[(path.name,) for path in sorted(_FOLDER.glob("*.ipynb"))]
  )
  def test_runs(self, name):
    notebook = nbformat.read(_FOLDER / name, as_version=4)
    with mock.patch.dict(os.environ, FAST="1"):
      client = nbclient.NotebookClient(
          notebook, timeout=600, resources={"metadata": {"path": str(_FOLDER)}}
      )
      client.execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    text = "".join(o.get("text", "") for o in outputs)
    self.assertRegex(text, r"\d+ of \d+ right")


if __name__ == "__main__":
  absltest.main()
