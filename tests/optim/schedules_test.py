"""Tests of the learning rate's values."""

import math

from absl.testing import absltest
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax.optim import schedules
from tests import testing


class SchedulesTest(absltest.TestCase):

  def test_values_are_those_of_the_formula(self):
    config = config_lib.OptimConfig(
        learning_rate=2.0,
        final_learning_rate_fraction=0.25,
        warmup_fraction=0.1,
    )
    schedule = schedules.learning_rate(config, 50)
    values = [float(schedule(step)) for step in range(51)]
    expected = [2.0 * (step + 1) / 6 for step in range(5)] + [
        0.5 + 1.5 * (1 + math.cos(math.pi * (step - 5) / 45)) / 2
        for step in range(5, 51)
    ]
    testing.assert_close(values, expected, "fp32")
    self.assertEqual(np.argmax(values), 5)

  def test_no_warm_up_starts_at_the_peak(self):
    config = config_lib.OptimConfig(learning_rate=2.0, warmup_fraction=0.0)
    self.assertEqual(float(schedules.learning_rate(config, 10)(0)), 2.0)

  def test_a_run_of_one_step_takes_the_peak(self):
    schedule = schedules.learning_rate(
        config_lib.OptimConfig(learning_rate=2.0), 1
    )
    self.assertEqual(float(schedule(0)), 2.0)


if __name__ == "__main__":
  absltest.main()
