"""Tests of the command that plans."""

import contextlib
import io
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import flagsaver

from experiments import plan
from sparsemm_jax import config as config_lib

ROOT = pathlib.Path(__file__).parents[2]


class PlanTest(absltest.TestCase):

  @flagsaver.flagsaver(total=2.78e12, active=1.04e11, devices=1024)
  def test_it_prints_each_choice_and_a_reason_under_it(self):
    with contextlib.redirect_stdout(io.StringIO()) as out:
      plan.main(["plan", "experts"])
    lines = out.getvalue().splitlines()
    where = lines.index(f"{'experts':21}896")
    self.assertRegex(lines[where + 1], "^    what the total budget holds")
    self.assertLess(max(map(len, lines)), 81)

  @flagsaver.flagsaver(total=2.78e12)
  def test_what_is_missing_is_named(self):
    with self.assertRaisesRegex(
        config_lib.ConfigError, "one of: experts; got x"
    ):
      plan.main(["plan", "x"])
    with self.assertRaisesRegex(config_lib.ConfigError, "--active is not set"):
      plan.main(["plan", "experts"])

  def test_a_refusal_is_one_line_and_a_status(self):
    result = subprocess.run(
        [sys.executable, "-m", "experiments.plan", "experts", "--total=1e9",
         "--active=1e10"],
        cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    self.assertEqual(result.returncode, 2)
    self.assertEqual(result.stdout, "")
    self.assertRegex(result.stderr, "^error: total=1e[+]09 is not above.*\n$")


if __name__ == "__main__":
  absltest.main()
