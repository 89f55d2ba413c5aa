"""Batches from a RunConfig: order, mixture, splits, processes, resume."""

import collections
import itertools
import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import grain
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax import data
from sparsemm_jax.data import digits
from sparsemm_jax.data import documents
from sparsemm_jax.data import mixture
from sparsemm_jax.data import packing
from sparsemm_jax.data import pipeline
from sparsemm_jax.data import tokenizer as tokenizer_lib
from tests import testing

VISION = config_lib.VisionConfig(patch_size=2)
BOTH = {"digits": 1.0, "python": 1.0}
DIGITS = config_lib.SourceConfig(kind="digits", eval_fraction=0.2)
PYTHON = config_lib.SourceConfig(kind="python_text")


def run_config(
    stages: tuple[config_lib.StageConfig, ...],
    sources: dict[str, config_lib.SourceConfig] | None = None,
    **arguments,
) -> config_lib.RunConfig:
  sources = sources or {"digits": DIGITS, "python": PYTHON}
  return config_lib.RunConfig(
      model=config_lib.ModelConfig(vision=VISION),
      data=config_lib.DataConfig(sources=sources, **arguments),
      train=config_lib.TrainConfig(stages=stages),
  )


def stage(**arguments) -> config_lib.StageConfig:
  arguments = {
      "seq_len": 128,
      "batch_size": 8,
      "max_patches": 64,
      "mixture": BOTH,
  } | arguments
  return config_lib.StageConfig(steps=10, **arguments)


def take(count: int, *arguments, **keywords) -> list[pipeline.Batch]:
  iterator = pipeline.make_train_iterator(*arguments, **keywords)
  return list(itertools.islice(iterator, count))


def assert_same_batches(actual, expected) -> None:
  testing.assert_same(len(actual), len(expected))
  for a, b in zip(actual, expected, strict=True):
    testing.assert_same(sorted(a), sorted(b))
    for key in b:
      testing.assert_same(a[key], b[key], key)


def starts(batch: pipeline.Batch) -> list[str]:
  """The documents that begin in a batch, up to 40 tokens of each."""
  tokenizer = tokenizer_lib.ByteTokenizer()
  found = []
  for tokens, positions in zip(
      batch["tokens"], batch["positions"], strict=True
  ):
    for place in np.flatnonzero(
        (tokens == tokenizer.end_of_document_id) & (positions == 0)
    ):
      found.append(tokenizer.decode(tokens[place : place + 40]))
  return found


class TrainTest(parameterized.TestCase):

  def test_batches_have_the_agreed_keys_shapes_and_types(self):
    (batch,) = take(1, run_config((stage(),)), 0)
    tokens = dict.fromkeys(
        ["tokens", "targets", "segment_ids", "positions", "modality"],
        ((8, 128), np.int32),
    )
    expected = tokens | {
        "loss_mask": ((8, 128), bool),
        "patches": ((8, 64, 12), np.float32),
        "patch_positions": ((8, 64, 2), np.int32),
        "patch_grids": ((8, 64, 2), np.int32),
        "patch_segment_ids": ((8, 64), np.int32),
    }
    actual = {key: (value.shape, value.dtype) for key, value in batch.items()}
    self.assertEqual(actual, expected)

  def test_text_stages_carry_no_patches(self):
    config = run_config((stage(max_patches=0, mixture={"python": 1.0}),))
    (batch,) = take(1, config, 0)
    self.assertFalse([key for key in batch if key.startswith("patch")])

  def test_the_order_depends_on_seed_and_stage_alone(self):
    config = run_config((stage(), stage()))
    first = take(3, config, 0)
    assert_same_batches(take(3, config, 0), first)
    other_seed = take(3, run_config((stage(),), seed=1), 0)
    for other in (take(3, config, 1), other_seed):
      self.assertFalse((other[0]["tokens"] == first[0]["tokens"]).all())

  def test_resume_is_exact_through_json(self):
    config = run_config((stage(),))
    iterator = pipeline.make_train_iterator(config, 0)
    for _ in range(5):
      next(iterator)
    state = json.dumps(iterator.get_state())
    expected = [next(iterator) for _ in range(5)]
    resumed = pipeline.make_train_iterator(config, 0)
    resumed.set_state(json.loads(state))
    assert_same_batches([next(resumed) for _ in range(5)], expected)
    # An iterator that has moved on goes back as well.
    iterator.set_state(json.loads(state))
    assert_same_batches([next(iterator) for _ in range(5)], expected)

  def test_any_state_restores_the_rest_exactly(self):
    dataset = pipeline.make_train_dataset(
        run_config((stage(seq_len=64, batch_size=2),)), 0
    )
    grain.experimental.assert_equal_output_after_checkpoint(
        grain.experimental.LimitIterDataset(dataset, 3)
    )

  @parameterized.parameters((1.0, 1.0), (3.0, 1.0), (0.2, 0.8))
  def test_rows_follow_the_weights(self, images, text):
    weights = {"digits": images, "python": text}
    config = run_config((stage(batch_size=20, mixture=weights),))
    batches = take(4, config, 0)
    share = np.mean([batch["modality"][:, 0] for batch in batches])
    self.assertAlmostEqual(share, images / (images + text), delta=0.02)

  def test_every_epoch_shows_all_documents_in_another_order(self):
    files = self.write_texts(12)
    texts = {"t": config_lib.SourceConfig(kind="text", path=files)}
    config = run_config(
        (stage(seq_len=10, batch_size=1, max_patches=0, mixture={"t": 1.0}),),
        texts,
    )
    size = len(mixture.Split("t", texts["t"], "train"))
    shown = [starts(batch) for batch in take(3 * size, config, 0)]
    shown = [name for (name,) in shown]
    epochs = [shown[i * size : (i + 1) * size] for i in range(3)]
    # The lookahead lets an epoch begin a little before the last one ends.
    self.assertEqual(set(collections.Counter(shown).values()), {3})
    self.assertNotEqual(epochs[0], epochs[1])

  def test_processes_share_the_documents_without_overlap(self):
    splits = [
        mixture.Split("digits", DIGITS, "train").shard(i, 3) for i in range(3)
    ]
    together = np.concatenate([split.indices for split in splits])
    whole = mixture.Split("digits", DIGITS, "train").indices
    testing.assert_same(np.sort(together), whole)
    texts = {
        "t": config_lib.SourceConfig(kind="text", path=self.write_texts(40))
    }
    config = run_config(
        (stage(seq_len=10, batch_size=2, max_patches=0, mixture={"t": 1.0}),),
        texts,
    )
    size = len(mixture.Split("t", texts["t"], "train"))
    shown = []
    for process in range(2):
      count = len(range(process, size, 2))  # one epoch, a document a row
      batches = take(count, config, 0, process_index=process, process_count=2)
      self.assertEqual(batches[0]["tokens"].shape, (1, 10))
      shown.append([name for batch in batches for name in starts(batch)])
    self.assertEmpty(set(shown[0]) & set(shown[1]))
    self.assertLen(set(shown[0] + shown[1]), size)

  def write_texts(self, count: int) -> str:
    folder = pathlib.Path(self.create_tempdir().full_path)
    for index in range(count):
      (folder / f"{index:03}.txt").write_text(f"file {index:03}")
    return str(folder / "*.txt")


class ErrorsTest(absltest.TestCase):

  def test_images_in_a_stage_without_patches(self):
    config = run_config((stage(max_patches=0),))
    with self.assertRaisesRegex(
        data.DataError, "data.sources.digits has images .*max_patches is 0"
    ):
      pipeline.make_train_iterator(config, 0)

  def test_a_missing_file_names_the_source(self):
    sources = {"books": config_lib.SourceConfig(kind="text", path="/no/*.txt")}
    config = run_config((stage(mixture={"books": 1.0}),), sources)
    with self.assertRaisesRegex(
        data.DataError, r"data.sources.books: no file matches /no/\*.txt"
    ):
      pipeline.make_train_iterator(config, 0)

  def test_a_bad_document_in_the_middle_names_its_line(self):
    path = self.create_tempfile(
        "train.jsonl",
        '{"text": "a"}\n{"text": "<image>", "images": ["none.png"]}\n',
    ).full_path
    sources = {
        "s": config_lib.SourceConfig(kind="jsonl", path=path, eval_path=path)
    }
    config = run_config((stage(mixture={"s": 1.0}),), sources)
    with self.assertRaisesRegex(data.DataError, f"{path}:2: no image .*none"):
      take(1, config, 0)

  def test_rows_that_processes_cannot_share(self):
    with self.assertRaisesRegex(data.DataError, "batch_size=8 .* 3 processes"):
      take(1, run_config((stage(),)), 0, process_count=3)
    few = mixture.Split("python", PYTHON, "eval")
    with self.assertRaisesRegex(data.DataError, "too few for 5000 processes"):
      few.shard(0, 5000)

  def test_a_vocabulary_or_media_pad_of_another_tokenizer(self):
    for model, message in (
        (config_lib.ModelConfig(vocab_size=256), "model.vocab_size=256"),
        (
            config_lib.ModelConfig(
                vision=config_lib.VisionConfig(media_pad_id=7)
            ),
            "media_pad_id=7",
        ),
    ):
      with self.assertRaisesRegex(data.DataError, message):
        pipeline.make_tokenizer(config_lib.RunConfig(model=model))

  def test_a_split_without_documents(self):
    path = self.create_tempfile("a.txt", "a").full_path
    config = config_lib.SourceConfig(kind="text", path=path)
    sizes = []
    for split in mixture.SPLITS:
      try:
        sizes.append(len(mixture.Split("t", config, split)))
      except data.DataError as error:
        self.assertRegex(str(error), f"no document is left for {split} of 1")
    self.assertEqual(sizes, [1])


class HeldOutTest(parameterized.TestCase):

  @parameterized.parameters(("digits", DIGITS), ("python", PYTHON))
  def test_train_and_held_out_are_apart_and_whole(self, name, config):
    train = mixture.Split(name, config, "train")
    held_out = mixture.Split(name, config, "eval")
    names = [
        {split.source.identity(i) for i in split.indices}
        for split in (train, held_out)
    ]
    self.assertEmpty(names[0] & names[1])
    self.assertLen(train.source, len(train) + len(held_out))
    share = len(names[1]) / (len(names[0]) + len(names[1]))
    self.assertAlmostEqual(share, config.eval_fraction, delta=0.03)

  def test_held_out_digits_never_train(self):
    train, held_out = (
        {
            document.parts[0].tobytes()
            for document in mixture.Split("digits", DIGITS, split)
        }
        for split in mixture.SPLITS
    )
    self.assertEmpty(train & held_out)

  def test_own_files_for_evaluation(self):
    train = self.create_tempfile("a.txt", "train").full_path
    other = self.create_tempfile("b.txt", "held out").full_path
    config = config_lib.SourceConfig(kind="text", path=train, eval_path=other)
    texts = [
        [d.parts for d in mixture.Split("t", config, split)]
        for split in mixture.SPLITS
    ]
    self.assertEqual(texts, [[("train",)], [("held out",)]])

  def test_batches_hold_every_held_out_document_once(self):
    config = run_config((stage(),))
    batches = list(
        pipeline.eval_batches(config, "python", seq_len=4096, batch_size=8)
    )
    self.assertEqual({b["tokens"].shape for b in batches}, {(8, 4096)})
    tokens = sum(np.count_nonzero(b["loss_mask"]) for b in batches)
    texts = list(pipeline.iter_text(config, "python", "eval"))
    self.assertEqual(tokens, sum(len(text) + 1 for text in texts))
    count = sum(len(starts(batch)) for batch in batches)
    self.assertLen(texts, count)

  def test_a_limit_gives_the_first_batches(self):
    config = run_config((stage(),))
    batches, fewer = (
        list(
            pipeline.eval_batches(
                config,
                "digits",
                seq_len=128,
                batch_size=2,
                max_patches=64,
                num_batches=count,
            )
        )
        for count in (3, 2)
    )
    assert_same_batches(batches[:2], fewer)

  def test_caption_examples_continue_to_the_training_document(self):
    config = run_config((stage(),))
    examples = pipeline.caption_examples(config, limit=20)
    self.assertLen(examples, 20)
    self.assertGreater(len({e.question for e in examples}), 3)
    tokenizer = tokenizer_lib.ByteTokenizer()
    for example in examples:
      document = documents.Document(
          (example.image, f"\n{example.question}\n{example.answer}"), "d"
      )
      encoded = documents.encode(document, tokenizer, VISION)
      answer = [*tokenizer.encode(example.answer), tokenizer.end_of_document_id]
      testing.assert_same(
          np.concatenate([example.prompt.tokens, answer]), encoded.tokens
      )
      row = packing.single_row(encoded, tokenizer)
      for key in example.prompt.images:
        testing.assert_same(example.prompt.images[key], row[key][None])
      self.assertLen(example.prompt.images, 4)

  def test_caption_examples_need_digits(self):
    config = run_config((stage(mixture={"python": 1.0}),), {"python": PYTHON})
    with self.assertRaisesRegex(data.DataError, "no source of kind 'digits'"):
      pipeline.caption_examples(config)

  def test_a_prompt_of_text_has_no_images(self):
    prompt = pipeline.encode_prompt(run_config((stage(),)), ["def"])
    testing.assert_same(prompt.tokens, [257, *b"def"])
    self.assertEqual(prompt.images, {})

  def test_text_of_image_documents_leaves_images_out(self):
    config = run_config((stage(),))
    text = next(pipeline.iter_text(config, "digits", "train"))
    self.assertLess(max(text), 256)
    self.assertIn(
        bytes(text.tolist()).decode().split("\n")[1],
        [question for question, _ in digits.QUESTIONS],
    )


if __name__ == "__main__":
  absltest.main()
