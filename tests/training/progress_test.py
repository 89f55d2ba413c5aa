"""Tests of what a person and a log file see."""

import io

from absl.testing import absltest

from sparsemm_jax.training import progress


class Terminal(io.StringIO):

  def isatty(self):
    return True


class ProgressTest(absltest.TestCase):

  def test_a_file_gets_plain_lines_with_an_eta(self):
    stream, now = io.StringIO(), [0.0]
    with progress.Progress(
        100, start=20, stream=stream, clock=lambda: now[0]
    ) as bar:
      now[0] = 60.0
      bar.advance(30)
      bar.log({"loss": 1.23456, "tokens/s": 123456.0})
      bar.message("stage 1")
    first, second = stream.getvalue().splitlines()
    # 10 steps took 60 s: 70 steps take 420 s.
    self.assertRegex(
        first,
        r"^I\d{4} \d\d:\d\d:\d\d step 30/100  loss 1.235  tokens/s 1.235e\+05"
        r"  eta 0:07:00$",
    )
    self.assertRegex(second, r"^I\d{4} \d\d:\d\d:\d\d stage 1$")
    self.assertNotIn("\x1b", stream.getvalue())

  def test_a_terminal_gets_a_bar_with_eta_and_loss(self):
    stream = Terminal()
    with progress.Progress(100, start=20, stream=stream) as bar:
      bar.advance(50)
      bar.log({"loss": 1.23456})
      bar.message("[stage 1]")
    output = stream.getvalue()
    for text in ("50/100", "50%", "eta", "loss 1.235", "[stage 1]"):
      self.assertIn(text, output)


if __name__ == "__main__":
  absltest.main()
