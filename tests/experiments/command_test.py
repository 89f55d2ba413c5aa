"""Tests that bad input to a command is one line, and damages nothing."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
from etils import epath
import grain
import numpy as np

from experiments import command
from sparsemm_jax import config as config_lib
from sparsemm_jax.training import checkpoint

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = f"--config={ROOT}/configs/tiny.py"

# Imports take seconds: one process does them, and runs each case in a fork.
_DRIVER = """
import importlib, json, os, sys
from matplotlib import figure
from experiments import command
from sparsemm_jax import planning
from sparsemm_jax.training import evaluation
for number, argv in enumerate(json.loads(sys.stdin.read())):
  child = os.fork()
  if not child:
    for stream, name in ((1, "out"), (2, "err")):
      os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
    sys.argv = argv
    try:
      command.run(importlib.import_module(f"experiments.{argv[0]}").main)
    except SystemExit as end:
      for stream in (sys.stdout, sys.stderr):
        stream.flush()
      os._exit(end.code or 0)  # without the interpreter's slow goodbye
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


def _write_broken_configs(folder):
  """A config file for each way in which it cannot be loaded."""
  for name, text in (
      ("syntax", "# get_config\ndef get_config(:\n"),
      ("import", "import not_installed\n"),
      ("dict", "def get_config():\n  return {'model': 1}\n"),
      ("value", "def get_config():\n  return int('two\\nlines')\n"),
  ):
    (folder / f"{name}_error.py").write_text(text)
  (folder / "README.md").write_text("A run of *ours*.\n")


def _write_runs(folder):
  """A run for each file that `report` cannot use."""
  config = json.dumps(config_lib.to_dict(config_lib.RunConfig()))
  losses = '{"step": 1, "train/loss_text": 1, "train/loss_image_text": 1}\n'
  good = {
      "config.json": config,
      "metrics.jsonl": losses,
      "evaluation.json": "{}",
  }
  for name, file, text in (
      ("config", "config.json", '{"model": '),
      ("list", "config.json", "[1]"),
      ("field", "config.json", '{"model": {"d_modle": 1}}'),
      ("metrics", "metrics.jsonl", losses + '{"step": \n'),
      ("short", "metrics.jsonl", ""),
      ("unseen", "evaluation.json", None),
      ("evaluation", "evaluation.json", "{"),
      ("picture", "evaluation.json", "{}"),
  ):
    run = folder / f"{name}_run"
    run.mkdir()
    for other, content in {**good, file: text}.items():
      if content is not None:
        (run / other).write_text(content)
  (folder / "picture_run" / "report.png").mkdir()


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
      "argument": ["train", CONFIG, "--workdir=new", "config.optim.learning_rate=1e-3"],
      "empty workdir": ["train", CONFIG, "--workdir="],
      "file in the way": ["train", "--config=good.py", "--workdir=good.jsonl/new"],
      "kda": ["train", CONFIG, "--workdir=new", "--config.model.kda.implementation=foo"],
      "kda bound": ["train", CONFIG, "--workdir=new", "--config.model.kda.lower_bound=-9"],
      "kda kernel": ["train", "--config=good.py", "--workdir=new", "--config.model.kda.implementation=mosaic_gpu", "--config.model.last_is_mla=False"],
      "residuals kernel": ["train", "--config=good.py", "--workdir=new", "--config.model.attn_res_implementation=mosaic_tpu"],
      "experts kernel": ["train", "--config=good.py", "--workdir=new", "--config.model.moe.implementation=mosaic_gpu", "--config.model.num_dense_layers=0"],
      "syntax error": ["train", "--config=syntax_error.py", "--workdir=new"],
      "import error": ["train", "--config=import_error.py", "--workdir=new"],
      "value error": ["train", "--config=value_error.py", "--workdir=new"],
      "no python": ["train", "--config=README.md", "--workdir=new"],
      "dict": ["train", "--config=dict_error.py", "--workdir=new", "--config.model=2"],
      "batches": ["evaluate", "--workdir=nowhere", "--batches=0"],
      "captions": ["evaluate", "--workdir=nowhere", "--captions=-3"],
      "report batches": ["report", "--workdir=nowhere", "--batches=1"],
      **{f"report {name}": ["report", f"--workdir={name}_run"] for name in (
          "config", "list", "field", "metrics", "short", "unseen", "evaluation",
          "picture")},
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
    _write_broken_configs(cls.folder)
    _write_runs(cls.folder)
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
          ("argument", "unexpected argument 'config.optim.learning_rate=1e-3'"),
          ("empty workdir", "flag --workdir=: must name a folder"),
          ("file in the way", "Not a directory: '"),
          ("kda", "config.model.kda: KdaConfig.implementation must be one of None, mosaic_gpu, "),
          ("kda bound", "config.model.kda: KdaConfig.lower_bound=-9.0 is not in (-5.91"),
          ("kda kernel", "config.model.kda.implementation: fused_kda: mosaic_gpu: "),
          ("residuals kernel", "config.model.attn_res_implementation: attn_res"),
          ("experts kernel", "config.model.moe.implementation: grouped_matmul: mosaic_gpu: "),
          ("syntax error", "--config: syntax_error.py: SyntaxError: invalid syntax (syntax_error.py, line 2)"),
          ("import error", "--config: import_error.py: ModuleNotFoundError: No module named 'not_installed'"),
          ("value error", "--config: value_error.py: ValueError: invalid literal"),
          ("no python", "--config: README.md: SyntaxError: invalid syntax (README.md, line 1)"),
          ("dict", "--config: dict_error.py: get_config() must return to_config_dict(RunConfig(...)), got dict"),
          ("batches", "--batches=0: 0 is not a positive integer"),
          ("captions", "--captions=-3: -3 is not a non-negative integer"),
          ("report batches", "Unknown command line flag 'batches'"),
          ("report config", "config_run/config.json is damaged: Expecting value: line 1"),
          ("report list", "list_run/config.json is damaged: "),
          ("report field", "field_run/config.json: config.model.d_modle: unknown field"),
          ("report metrics", "metrics_run/metrics.jsonl:2: Expecting value"),
          ("report short", "short_run/metrics.jsonl has no training loss yet: it gets one every train.log_every=10 steps"),
          ("report unseen", "unseen_run/evaluation.json is missing: evaluate first"),
          ("report evaluation", "evaluation_run/evaluation.json is damaged: "),
          ("report picture", "Is a directory: 'picture_run/report.png'"),
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

  def test_nothing_is_left_of_a_run_that_did_not_start(self):
    self.assertFalse((self.folder / "new").exists())
    self.assertFalse((self.folder / "checkpoints").exists())

  def test_the_run_of_another_model_is_left_as_it_was(self):
    self.assertEqual(_files(self.folder / "other"), self.before)


class OutputTest(absltest.TestCase):

  def test_a_file_is_replaced_when_it_is_whole(self):
    path = epath.Path(self.create_tempdir().full_path) / "result.json"
    path.write_text("old")
    with self.assertRaises(KeyError), command.output(path) as part:
      part.write_text("half")
      raise KeyError
    self.assertEqual(path.read_text(), "old")
    with command.output(path) as part:
      part.write_text("new")
    self.assertEqual(path.read_text(), "new")
    self.assertEqual(list(path.parent.iterdir()), [path])


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
