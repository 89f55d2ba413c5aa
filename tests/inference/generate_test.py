"""Tests that generation continues a prompt as the whole model would."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax.inference import generate
from sparsemm_jax.models import vision
from tests import testing
from tests.models import small_model

CONFIG = small_model.config(num_layers=2, vision=small_model.VISION)
PAD = small_model.VISION.media_pad_id
LENGTHS = np.array([13, 6, 9], np.int32)
NEW = 6
NEVER = PAD  # an end_id that no row generates, which is checked below


def _prompts():
  """Rows with an image of 4 tokens, without, and with one of 1 token."""
  tokens = small_model.tokens(3, 13, seed=1)
  tokens[0, 2:6] = PAD
  tokens[2, 1] = PAD
  tokens[1, 8] = PAD  # behind the prompt: may be anything
  return tokens


def _images():
  rng = np.random.default_rng(2)
  segment_ids = np.zeros((3, 16), np.int32)
  grids = np.zeros((3, 16, 2), np.int32)
  positions = np.zeros((3, 16, 2), np.int32)
  for row, side in ((0, 4), (2, 2)):
    count = side * side
    segment_ids[row, :count] = 1
    grids[row, :count] = side
    # Runs of 4 patches are 2 x 2 squares.
    places = np.indices((side, side)).reshape(2, side // 2, 2, side // 2, 2)
    positions[row, :count] = places.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
  patches = rng.uniform(-1, 1, (3, 16, 12)).astype(np.float32)
  return vision.Images(patches, positions, grids, segment_ids)


@functools.cache
def _compiled(prefill_chunk, end_id):
  """generate, compiled fast."""
  return generate.generate.lower(
      CONFIG, small_model.variables(CONFIG), _prompts(), LENGTHS,
      jax.random.key(0), images=_images(), max_new_tokens=NEW, end_id=end_id,
      temperature=0.0, prefill_chunk=prefill_chunk,
  ).compile({"xla_backend_optimization_level": 0})  # fmt: skip


def _generate(prefill_chunk=512, end_id=NEVER, seed=0):
  compiled = _compiled(prefill_chunk, end_id)
  return np.asarray(
      compiled(
          small_model.variables(CONFIG), _prompts(), LENGTHS,
          jax.random.key(seed), images=_images(),
      )
  )  # fmt: skip


@functools.cache
def _teacher_forced():
  """The likeliest tokens, one after another, by the whole model each time."""
  tokens = np.pad(_prompts(), ((0, 0), (0, NEW)))
  index = np.arange(tokens.shape[1])
  rows = np.arange(3)
  result, margins = [], []
  for step in range(NEW):
    valid = index < LENGTHS[:, None] + step
    logits = small_model.apply(
        CONFIG,
        np.where(valid, tokens, 0),
        segment_ids=valid.astype(np.int32),
        images=_images(),
    ).logits
    logits = np.asarray(logits)[rows, LENGTHS + step - 1]
    best = logits.argmax(axis=-1)
    ordered = np.sort(logits, axis=-1)
    margins.append(ordered[:, -1] - ordered[:, -2])
    tokens[rows, LENGTHS + step] = best
    result.append(best)
  return np.stack(result, 1), np.stack(margins, 1)


class GenerateTest(parameterized.TestCase):

  @parameterized.named_parameters(("whole", 512), ("cut", 5), ("one", 1))
  def test_greedy_tokens_are_those_of_teacher_forcing(self, prefill_chunk):
    expected, margins = _teacher_forced()
    self.assertGreater(margins.min(), 1e-3)  # so that no tie decides
    self.assertNotIn(NEVER, expected)
    testing.assert_same(_generate(prefill_chunk), expected)

  def test_temperature_zero_takes_no_notice_of_the_key(self):
    testing.assert_same(_generate(seed=1), _generate(seed=2))

  def test_nothing_but_the_end_follows_the_end(self):
    expected = _teacher_forced()[0].copy()
    end = int(expected[0, 2])
    for row in expected:
      (places,) = np.nonzero(row == end)
      if len(places):
        row[places[0] :] = end
    self.assertTrue((expected[0, 2:] == end).all())
    self.assertFalse((expected == end).all(axis=1).any())
    testing.assert_same(_generate(end_id=end), expected)

  def test_a_single_token_can_be_asked_for(self):
    shape = jax.eval_shape(
        functools.partial(
            generate.generate, CONFIG, max_new_tokens=1, end_id=NEVER
        ),
        small_model.variables(CONFIG), _prompts(), LENGTHS, jax.random.key(0),
    ).shape  # fmt: skip
    self.assertEqual(shape, (3, 1))


class SampleTest(parameterized.TestCase):

  @parameterized.parameters((0.3, 1), (0.6, 2), (0.79, 2), (0.81, 3), (0.99, 4))
  def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(self, p, size):
    logits = np.log(np.array([[0.15, 0.5, 0.05, 0.3]], np.float32))
    order = [1, 3, 0, 2]
    kept = np.zeros((1, 4), bool)
    kept[0, order[:size]] = True
    testing.assert_same(generate.nucleus(logits, p), kept)

  def test_the_nucleus_reaches_top_p_and_would_not_without_its_last(self):
    logits = np.random.default_rng(0).normal(0, 3, (50, 30)).astype(np.float32)
    probabilities = np.asarray(jax.nn.softmax(logits), np.float64)
    for top_p in (1e-6, 0.5, 0.9):
      kept = np.asarray(generate.nucleus(logits, top_p))
      total = np.where(kept, probabilities, 0).sum(axis=1)
      last = np.where(kept, probabilities, 1).min(axis=1)
      rest = np.where(kept, 0, probabilities).max(axis=1)
      self.assertTrue((total >= top_p - 1e-6).all())
      self.assertTrue((total - last < top_p + 1e-6).all())
      self.assertTrue((last >= rest).all())
    testing.assert_same(
        generate.nucleus(logits, 1e-6), logits == logits.max(1, keepdims=True)
    )

  def test_samples_follow_the_tempered_probabilities(self):
    logits = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    rows = jnp.broadcast_to(logits, (20000, 4))
    drawn = generate.sample_token(
        jax.random.key(0), rows, temperature=2.0, top_p=1.0
    )
    share = np.bincount(drawn, minlength=4) / 20000
    np.testing.assert_allclose(share, jax.nn.softmax(logits / 2), atol=0.015)

  def test_samples_stay_in_the_nucleus_of_the_tempered_probabilities(self):
    rows = jnp.broadcast_to(jnp.array([0.0, 1.0, 2.0, -1.0]), (2000, 4))
    draw = functools.partial(generate.sample_token, jax.random.key(0), rows)
    # softmax([0, 1, 2, -1]) is about .09 .24 .64 .03; at temperature 4 flatter.
    self.assertEqual(set(np.asarray(draw(temperature=1.0, top_p=0.7))), {1, 2})
    self.assertEqual(
        set(np.asarray(draw(temperature=4.0, top_p=0.7))), {0, 1, 2}
    )


if __name__ == "__main__":
  absltest.main()
