"""Tests that bad input to a command is one line, and damages nothing."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import grain
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax.training import checkpoint

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = f"--config={ROOT}/configs/tiny.py"

# Importing jax takes seconds: one process does, and runs each case in a fork.
_DRIVER = """
import importlib, json, os, sys
from experiments import command
for number, argv in enumerate(json.loads(sys.stdin.read())):
  child = os.fork()
  if not child:
    for stream, name in ((1, "out"), (2, "err")):
      os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
    sys.argv = argv
    command.run(importlib.import_module(f"experiments.{argv[0]}").main)
    sys.exit(0)
  _, status = os.waitpid(child, 0)
  with open(f"{number}.rc", "w") as file:
    file.write(str(os.waitstatus_to_exitcode(status)))
"""


def _run_all(folder, cases):
  """Runs each list of a command and its flags; {name: (rc, out, err)}."""
  environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  subprocess.run(
      [sys.executable, "-c", _DRIVER],
      input=json.dumps(list(cases.values())),
      text=True,
      check=True,
      cwd=folder,
      env=environment,
      capture_output=True,
  )
  read = lambda number, what: (folder / f"{number}.{what}").read_text()  # noqa: E731
  return {
      name: (int(read(i, "rc")), read(i, "out"), read(i, "err"))
      for i, name in enumerate(cases)
  }


def _write_configs(folder):
  """A config file for each state that a second stage's JSONL file is in."""
  (folder / "good.jsonl").write_text('{"text": "a"}\n' * 50)
  (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
  line = {"text": "a <image> b", "images": ["corrupt.png"]}
  (folder / "image.jsonl").write_text('{"text": "a"}\n' + json.dumps(line))
  (folder / "corrupt.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
  for name in ("good", "broken", "missing", "image"):
    (folder / f"{name}.py").write_text(f"""
from sparsemm_jax import config as config_lib

def get_config():
  stage = lambda name: config_lib.StageConfig(
      steps=2, max_patches=64, mixture={{name: 1.0}})
  source = lambda name: config_lib.SourceConfig(kind="jsonl", path=name)
  return config_lib.to_config_dict(config_lib.RunConfig(
      model=config_lib.ModelConfig(
          num_layers=1, vision=config_lib.VisionConfig()),
      data=config_lib.DataConfig(sources={{
          "first": source("good.jsonl"), "second": source("{name}.jsonl")}}),
      train=config_lib.TrainConfig(stages=(stage("first"), stage("second"))),
  ))
""")


def _save_another_model(workdir):
  """A run's checkpoint, of a model that is wider than the configs'."""
  config = config_lib.RunConfig(
      model=config_lib.ModelConfig(num_layers=1, d_model=256)
  )
  with checkpoint.CheckpointManager(workdir, config) as manager:
    iterator = iter(grain.MapDataset.range(9).to_iter_dataset())
    manager.save(1, {"params": np.ones(3)}, iterator, force=True)
  (workdir / "config.json").write_text("kept")


def _files(folder):
  return {
      str(path.relative_to(folder)): path.read_bytes()
      for path in sorted(folder.rglob("*"))
      if path.is_file()
  }


class CommandTest(parameterized.TestCase):

  CASES = {
      "unknown field": ["train", CONFIG, "--workdir=new", "--config.optim.learning_rat=1"],
      "unknown flag": ["train", CONFIG, "--workdir=new", "--learning_rate=1"],
      "wrong type": ["train", CONFIG, "--workdir=new", "--config.model.d_model=wide"],
      "wrong shape": ["train", CONFIG, "--workdir=new", "--config.model.kda.num_value_heads=3"],
      "no value": ["train", CONFIG, "--workdir=new", "--config.train.seed=None"],
      "rows": ["train", CONFIG, "--workdir=new", "--config.mesh.data=3"],
      "no config": ["train", "--workdir=new"],
      "no workdir": ["train", CONFIG],
      "missing config": ["train", "--config=nowhere.py", "--workdir=new"],
      "missing config, override": ["train", "--config=nowhere.py", "--workdir=new", "--config.train.seed=1"],
      "missing data": ["train", "--config=missing.py", "--workdir=new"],
      "broken line": ["train", "--config=broken.py", "--workdir=new"],
      "another model": ["train", "--config=good.py", "--workdir=other"],
      "init checkpoint": ["train", "--config=good.py", "--workdir=new", "--config.train.init_checkpoint=nowhere"],
      "corrupt image": ["train", "--config=image.py", "--workdir=image"],
      "evaluate nothing": ["evaluate", "--workdir=nowhere"],
      "report nothing": ["report", "--workdir=nowhere"],
      "generate from nothing": ["generate", "--workdir=nowhere"],
      "generate otherwise": ["generate", "--workdir=nowhere", "--top_p=2"],
  }  # fmt: skip

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    _write_configs(cls.folder)
    _save_another_model(cls.folder / "other")
    cls.before = _files(cls.folder / "other")
    cls.results = _run_all(cls.folder, cls.CASES)

  @parameterized.named_parameters(
      (name.replace(" ", "_").replace(",", ""), name, message)
      for name, message in (
          ("unknown field", "--config.optim.learning_rat: there is no field 'learning_rat'; did you mean 'learning_rate'?"),
          ("unknown flag", "Unknown command line flag 'learning_rate'"),
          ("wrong type", "--config.model.d_model=wide"),
          ("wrong shape", "config.model.kda: KdaConfig.num_value_heads=3 is not a multiple of num_heads=4"),
          ("no value", "config.train.seed: expected int, got None"),
          ("rows", "MeshConfig: data=3"),
          ("no config", "--config is not set"),
          ("no workdir", "--workdir"),
          ("missing config", "--config: "),
          ("missing config, override", "--config: "),
          ("missing data", "data.sources.second: no file matches missing.jsonl"),
          ("broken line", "broken.jsonl:2: not JSON"),
          ("another model", "other/checkpoints/1 is of another model: model.d_model is 256 there and 128 here"),
          ("init checkpoint", "nowhere has no checkpoint"),
          ("corrupt image", "image.jsonl:2: cannot read image corrupt.png"),
          ("evaluate nothing", "nowhere has no checkpoint"),
          ("report nothing", "nowhere/config.json is missing: train first"),
          ("generate from nothing", "nowhere has no checkpoint"),
          ("generate otherwise", "--top_p=2.0 must be in (0, 1]"),
      )
  )  # fmt: skip
  def test_one_line_names_what_is_wrong(self, name, message):
    code, _, error = self.results[name]
    self.assertEqual(code, 2, error)
    lines = error.splitlines()
    self.assertLen(lines, 1, error)
    self.assertStartsWith(lines[0], "error: ")
    self.assertIn(message, lines[0])

  def test_a_missing_config_is_named(self):
    for name in ("missing config", "missing config, override"):
      self.assertIn("nowhere.py", self.results[name][2])

  def test_no_checkpoint_is_left_of_a_run_that_did_not_start(self):
    for path in (self.folder / "new").rglob("*"):
      self.assertIn(path.name, ("checkpoints",), path)

  def test_the_run_of_another_model_is_left_as_it_was(self):
    self.assertEqual(_files(self.folder / "other"), self.before)


class HelpTest(absltest.TestCase):

  def test_help_shows_the_flags_and_how_to_override_fields(self):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", "--help"],
        cwd=ROOT, text=True, capture_output=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    text = " ".join(done.stdout.split())
    self.assertIn("python -m experiments.train --config=configs/tiny.py", text)
    self.assertIn("--workdir: Folder of the run", text)
    self.assertIn("--config: A python file with get_config()", text)
    self.assertIn("--config.<section>.<field>=<value>", text)
    self.assertEqual(done.stderr, "")


if __name__ == "__main__":
  absltest.main()
