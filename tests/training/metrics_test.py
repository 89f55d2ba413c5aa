"""Tests of what is written, and of the speedometer."""

import json
import math
import pathlib

from absl.testing import absltest
import jax.numpy as jnp
import numpy as np

from sparsemm_jax.training import metrics
from tests import testing


class MetricWriterTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)

  def _lines(self):
    return (self.workdir / metrics.FILE_NAME).read_text().splitlines()

  def test_each_line_is_on_disk_when_write_returns(self):
    with metrics.MetricWriter(self.workdir) as writer:
      for step in (1, 2):
        writer.write(step, {"loss": jnp.float32(0.5), "count": 7})
        self.assertEqual(
            json.loads(self._lines()[-1]),
            {"step": step, "loss": 0.5, "count": 7},
        )
    self.assertLen(self._lines(), 2)

  def test_what_is_not_finite_is_null_and_reads_back_as_nan(self):
    with metrics.MetricWriter(self.workdir) as writer:
      writer.write(1, {"loss": math.nan, "load": np.array([1.0, np.inf])})
    record = json.loads(self._lines()[0])
    self.assertEqual(record, {"step": 1, "loss": None, "load": [1.0, None]})
    _, loads = metrics.read(self.workdir)["load"]
    testing.assert_same(loads, [[1.0, np.nan]])

  def test_a_resumed_run_takes_the_place_of_what_it_does_again(self):
    with metrics.MetricWriter(self.workdir) as writer:
      for step in (10, 20, 30, 40):
        writer.write(step, {"loss": float(step)})
    with metrics.MetricWriter(self.workdir, resumed_at=20) as writer:
      writer.write(25, {"loss": -25.0})
      writer.write(25, {"eval": 1.0})
    self.assertLen(self._lines(), 6)
    series = metrics.read(self.workdir)
    testing.assert_same(series["loss"][0], [10, 20, 25])
    testing.assert_same(series["loss"][1], [10.0, 20.0, -25.0])
    testing.assert_same(series["eval"][0], [25])

  def test_a_line_that_does_not_parse_is_named(self):
    for line in ('{"ste', "{}", "7"):
      text = '{"step": 1}\n' + line + "\n"
      (self.workdir / metrics.FILE_NAME).write_text(text)
      with self.assertRaisesRegex(ValueError, r"metrics.jsonl:2: "):
        metrics.read(self.workdir)

  def test_tensorboard_gets_the_scalars(self):
    with metrics.MetricWriter(self.workdir) as writer:
      writer.write(3, {"train/loss": 0.5})
    (events,) = (self.workdir / "tensorboard").iterdir()
    self.assertIn(b"train/loss", events.read_bytes())


class ThroughputTest(absltest.TestCase):

  def test_rate_counts_only_what_came_after_the_last_reading(self):
    now = [0.0]
    meter = metrics.Throughput(clock=lambda: now[0])
    meter.add(100)
    now[0] = 2.0
    self.assertEqual(meter.read(), 50.0)
    meter.add(1000)  # a compilation
    now[0] = 10.0
    meter.restart()
    meter.add(30)
    meter.add(30)
    now[0] = 13.0
    self.assertEqual(meter.read(), 20.0)


if __name__ == "__main__":
  absltest.main()
