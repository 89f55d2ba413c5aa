"""Tests of the arithmetic on stages."""

from absl.testing import absltest

from sparsemm_jax import config as config_lib
from sparsemm_jax.training import curriculum

CONFIG = config_lib.TrainConfig(
    stages=(
        config_lib.StageConfig(seq_len=8, batch_size=4, steps=3),
        # 5 steps hold 320 tokens: 257 need them all.
        config_lib.StageConfig(seq_len=16, batch_size=4, tokens=257),
        config_lib.StageConfig(seq_len=32, batch_size=2, steps=1),
    )
)


class CurriculumTest(absltest.TestCase):

  def test_boundaries_are_first_steps_and_the_end(self):
    self.assertEqual(curriculum.boundaries(CONFIG), (0, 3, 8, 9))

  def test_every_step_has_its_place_in_a_stage(self):
    places = [tuple(curriculum.stage_at(CONFIG, step)) for step in range(9)]
    expected = [(0, 0), (0, 1), (0, 2)]
    expected += [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 0)]
    self.assertEqual(places, expected)

  def test_steps_outside_the_run_are_refused(self):
    for step in (-1, 9):
      with self.assertRaisesRegex(ValueError, f"step {step} .* 9 steps"):
        curriculum.stage_at(CONFIG, step)

  def test_tokens_add_up_over_stages(self):
    totals = [curriculum.num_tokens(CONFIG, steps) for steps in (0, 2, 4, 9)]
    self.assertEqual(totals, [0, 64, 160, 96 + 320 + 64])
    self.assertEqual(curriculum.num_tokens(CONFIG), totals[-1])


if __name__ == "__main__":
  absltest.main()
