"""Tests of what `evaluate` writes, and when."""

import dataclasses
import json
from unittest import mock

from absl.testing import absltest
from absl.testing import flagsaver
from etils import epath
from flax import linen as nn
import jax
import numpy as np

from experiments import command
from experiments import evaluate
from sparsemm_jax import config as config_lib
from sparsemm_jax.training import evaluation
from sparsemm_jax.training import state
from tests import tiny_run

_HELD_OUT = evaluation.HeldOut(
    bits_per_byte=2.0,
    bigram_bits_per_byte=None,
    loss=1.0,
    targets=10,
    counts=np.ones((1, 8)),
    depth_weights={},
)


def _run(workdir, balancing):
  """A run on digits that was not trained."""
  moe = dataclasses.replace(tiny_run.MODEL.moe, balancing=balancing)
  stage = tiny_run.stage(steps=1, max_patches=8, mixture={"digits": 1.0})
  config = config_lib.RunConfig(
      model=dataclasses.replace(tiny_run.MODEL, moe=moe),
      train=config_lib.TrainConfig(stages=(stage,)),
  )
  variables = jax.tree.map(
      lambda leaf: np.zeros(leaf.shape, leaf.dtype),
      nn.unbox(state.abstract_variables(config.model)),
  )
  return command.Run(workdir / "checkpoints" / "1", config, 1, variables)


class EvaluateTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = epath.Path(self.create_tempdir().full_path)
    self.path = self.workdir / command.EVALUATION
    run = _run(self.workdir, "sequence_quantile")
    self.enter_context(mock.patch.object(command, "load_run", return_value=run))
    self.held_out = self.enter_context(
        mock.patch.object(evaluation, "held_out", return_value=_HELD_OUT)
    )
    self.enter_context(flagsaver.flagsaver(workdir=str(self.workdir)))

  def test_a_model_that_cannot_decode_is_evaluated_without_captions(self):
    evaluate.main(["evaluate"])
    results = json.loads(self.path.read_text())
    self.assertEqual(results["digits"]["bits_per_byte"], 2.0)
    self.assertNotIn("captions", results)

  def test_a_file_that_cannot_be_written_is_found_before_the_work(self):
    self.path.mkdir()
    with self.assertRaises(IsADirectoryError):
      evaluate.main(["evaluate"])
    self.held_out.assert_not_called()


if __name__ == "__main__":
  absltest.main()
