"""Tests of held-out bits per byte and of counting right captions."""

import dataclasses
import math
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax.data import bigram
from sparsemm_jax.data import pipeline
from sparsemm_jax.inference import generate
from sparsemm_jax.training import evaluation
from tests import testing
from tests import tiny_run

TEXTS = ("a naïve café", "ab" * 40)


def _text_run(folder):
  """A run whose held-out documents are TEXTS."""
  for split, texts in (("eval", TEXTS), ("train", ("abc",))):
    for index, text in enumerate(texts):
      pathlib.Path(folder, f"{split}{index}.txt").write_text(text, "utf-8")
  source = config_lib.SourceConfig(
      kind="text", path=f"{folder}/train*.txt", eval_path=f"{folder}/eval*.txt"
  )
  return dataclasses.replace(
      tiny_run.text_config(),
      data=config_lib.DataConfig(sources={"t": source}),
      train=config_lib.TrainConfig(
          stages=(tiny_run.stage(steps=1, mixture={"t": 1.0}),)
      ),
  )


def _uniform_step(batch):
  """An eval step that costs two nats a target, and counts tokens."""
  targets = int(batch["loss_mask"].sum())
  tokens = int((batch["segment_ids"] > 0).sum())
  return {
      "by_modality": {
          "text": (np.float32(2.0 * targets), np.int32(targets)),
          "image_text": (np.float32(0.0), np.int32(0)),
      },
      "counts": np.array([[tokens, 0], [0, tokens]], np.int32),
      "depth_weights": {},
  }


class HeldOutTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("in_one_batch", 128, 4),
      ("cut_into_pieces", 16, 2),
      ("row_by_row", 16, 1),
  )
  def test_bits_per_byte_counts_every_target_and_every_byte_once(
      self, seq_len, batch_size
  ):
    run = _text_run(self.create_tempdir().full_path)
    result = evaluation.held_out(
        run, "t", _uniform_step, seq_len=seq_len, batch_size=batch_size,
        num_batches=1000,
    )  # fmt: skip
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    targets = num_bytes + len(TEXTS)  # an end of document each
    self.assertEqual(result.targets, targets)
    self.assertAlmostEqual(
        result.bits_per_byte, 2.0 * targets / num_bytes / math.log(2), places=6
    )
    self.assertAlmostEqual(result.loss, 2.0, places=6)
    testing.assert_same(result.counts, np.array([[targets, 0], [0, targets]]))
    self.assertIsNone(result.bigram_bits_per_byte)

  def test_the_bigram_is_scored_on_the_same_targets(self):
    run = _text_run(self.create_tempdir().full_path)
    # Knows nothing: every target costs log(264) nats.
    baseline = bigram.BigramModel(run.model.vocab_size)
    result = evaluation.held_out(
        run, "t", _uniform_step, seq_len=64, batch_size=1, num_batches=1000,
        baseline=baseline,
    )  # fmt: skip
    ratio = result.bigram_bits_per_byte / result.bits_per_byte
    self.assertAlmostEqual(ratio, math.log(264) / 2.0, places=6)

  def test_the_bigram_is_fitted_on_training_text_alone(self):
    run = _text_run(self.create_tempdir().full_path)
    model = evaluation.fit_bigram(run, "t")
    seen, unseen = model.nats(ord("a"), ord("b")), model.nats(
        ord("b"), ord("a")
    )
    self.assertLess(seen, math.log(2))
    self.assertGreater(unseen, math.log(100))

  def test_no_target_to_evaluate_is_an_error(self):
    run = _text_run(self.create_tempdir().full_path)
    with self.assertRaisesRegex(config_lib.ConfigError, r"data\.sources\.t"):
      evaluation.held_out(
          run, "t", _uniform_step, seq_len=16, batch_size=1, num_batches=0
      )


class CaptionsTest(absltest.TestCase):

  def test_only_the_exact_answer_is_right(self):
    run = tiny_run.config()
    tokenizer = pipeline.make_tokenizer(run)
    examples = pipeline.caption_examples(run, "eval", 7)
    end = tokenizer.end_of_document_id
    asked = []

    def answer(model, variables, tokens, lengths, key, *, images, **options):
      """Right for even questions; then one wrong, one cut off, one too long."""
      del model, variables, key
      self.assertEqual(options["temperature"], 0.0)
      self.assertEqual(options["end_id"], end)
      self.assertEqual(tokens.shape[0], 4)  # one shape, the last batch too
      result = np.full((len(tokens), options["max_new_tokens"]), end, np.int32)
      for row in range(len(tokens)):
        number = len(asked)
        prompt = tokens[row, : lengths[row]]
        asked.append(prompt)
        self.assertEqual((images.segment_ids[row] > 0).sum(), 4)
        if number >= len(examples):
          continue
        text = examples[number].answer
        text = {1: "?", 3: text[:-1], 5: text + "."}.get(number, text)
        ids = tokenizer.encode(text)
        result[row, : len(ids)] = ids
      return result

    with mock.patch.object(generate, "generate", answer):
      captions = evaluation.captions(run, {}, limit=7, batch_size=4)
    self.assertEqual(
        [caption.right for caption in captions],
        [True, False, True, False, True, False, True],
    )
    self.assertEqual(captions[0].answer, examples[0].answer)
    for prompt, example in zip(asked, examples, strict=False):
      testing.assert_same(prompt, example.prompt.tokens)

  def test_an_answer_ends_with_the_document(self):
    tokenizer = pipeline.make_tokenizer(tiny_run.config())
    end = tokenizer.end_of_document_id
    ids = [*tokenizer.encode("seven"), end, *tokenizer.encode("teen")]
    self.assertEqual(evaluation.answer_text(ids, tokenizer), "seven")

  def test_stacked_prompts_keep_their_images(self):
    run = tiny_run.config()
    image = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    wide = np.repeat(image, 2, axis=1)
    prompts = [
        pipeline.encode_prompt(run, parts)
        for parts in (["text"], [image, "short"], [wide, "a longer one"])
    ]
    length = max(len(prompt.tokens) for prompt in prompts)
    tokens, lengths, images = evaluation.stack_prompts(prompts, length)
    self.assertEqual(list(lengths), [len(p.tokens) for p in prompts])
    self.assertEqual((images.segment_ids > 0).sum(axis=1).tolist(), [0, 4, 8])
    for row, prompt in enumerate(prompts):
      testing.assert_same(tokens[row, : lengths[row]], prompt.tokens)
      if row:
        patches = prompt.images["patches"][0]
        testing.assert_same(images.patches[row, : len(patches)], patches)
    _, _, images = evaluation.stack_prompts(prompts[:1], length)
    self.assertIsNone(images)


if __name__ == "__main__":
  absltest.main()
