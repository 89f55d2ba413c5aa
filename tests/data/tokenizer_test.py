"""Tokenizers turn text into ids and back."""

import os

from absl.testing import absltest
from absl.testing import parameterized
import sentencepiece
import tokenizers

from sparsemm_jax import config as config_lib
from sparsemm_jax import data
from sparsemm_jax.data import tokenizer as tokenizer_lib

TEXT = "def f(x):\n  return x  # naïve, 日本語, 🙂"


def special_ids(tokenizer: tokenizer_lib.Tokenizer) -> list[int]:
  return [
      tokenizer.pad_id,
      tokenizer.end_of_document_id,
      tokenizer.media_pad_id,
      tokenizer.media_begin_id,
      tokenizer.media_content_id,
      tokenizer.media_end_id,
  ]


def write_byte_level_file(path: str, known: tuple[str, ...] = ()) -> int:
  """Writes a small tokenizer.json and returns its vocabulary size."""
  result = tokenizers.Tokenizer(tokenizers.models.BPE())
  result.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False
  )
  result.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=300,
      special_tokens=list(known),
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
  )
  result.train_from_iterator([TEXT] * 20, trainer)
  result.save(path)
  return result.get_vocab_size()


def make(kind: str, path: str | None = None) -> tokenizer_lib.Tokenizer:
  return tokenizer_lib.make_tokenizer(
      config_lib.TokenizerConfig(kind=kind, path=path)
  )


class TokenizerTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path

  def test_bytes_have_the_documented_ids(self):
    tokenizer = make("byte")
    self.assertEqual(tokenizer.encode("aé"), [97, 0xC3, 0xA9])
    self.assertEqual(tokenizer.decode(tokenizer.encode(TEXT)), TEXT)
    self.assertEqual(special_ids(tokenizer), [256, 257, 258, 259, 260, 261])
    self.assertEqual(tokenizer.vocab_size, 264)
    self.assertEqual(tokenizer.decode([257, 97, 258, 263]), "a")

  def test_hugging_face_file_is_extended_after_its_vocabulary(self):
    path = os.path.join(self.folder, "tokenizer.json")
    size = write_byte_level_file(path)
    tokenizer = make("tokenizers", path)
    self.assertEqual(special_ids(tokenizer), list(range(size, size + 6)))
    self.assertEqual(tokenizer.vocab_size, size + 6)
    ids = tokenizer.encode(TEXT)
    self.assertLess(len(ids), len(TEXT.encode()))
    self.assertEqual(tokenizer.decode([size + 1, *ids, size + 2]), TEXT)

  def test_hugging_face_file_keeps_the_special_tokens_it_has(self):
    path = os.path.join(self.folder, "tokenizer.json")
    size = write_byte_level_file(path, ("<|media_pad|>", "<|pad|>"))
    tokenizer = make("tokenizers", path)
    self.assertEqual(tokenizer.media_pad_id, 0)
    self.assertEqual(tokenizer.pad_id, 1)
    self.assertEqual(tokenizer.vocab_size, size + 4)

  @parameterized.parameters((), ("<|media_pad|>",))
  def test_special_tokens_spelled_in_a_text_stay_text(self, *known):
    path = os.path.join(self.folder, "tokenizer.json")
    write_byte_level_file(path, known)
    for tokenizer in (make("byte"), make("tokenizers", path)):
      text = "a <|media_pad|> b"
      ids = tokenizer.encode(text)
      self.assertEmpty(set(ids) & set(special_ids(tokenizer)))
      self.assertEqual(tokenizer.decode(ids), text)

  def test_sentencepiece_model_is_extended_after_its_vocabulary(self):
    corpus = os.path.join(self.folder, "corpus.txt")
    with open(corpus, "w", encoding="utf-8") as file:
      file.write("a model reads text and images\n" * 50)
    prefix = os.path.join(self.folder, "pieces")
    sentencepiece.SentencePieceTrainer.train(
        input=corpus,
        model_prefix=prefix,
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        control_symbols=["<|media_pad|>"],
        minloglevel=2,
    )
    tokenizer = make("sentencepiece", prefix + ".model")
    pieces = sentencepiece.SentencePieceProcessor(model_file=prefix + ".model")
    size = pieces.get_piece_size()
    self.assertEqual(
        tokenizer.media_pad_id, pieces.piece_to_id("<|media_pad|>")
    )
    self.assertEqual(tokenizer.pad_id, size)
    self.assertEqual(tokenizer.vocab_size, size + 5)
    text = "a model reads 日本語 and <|media_pad|> images"
    ids = tokenizer.encode(text)
    self.assertNotIn(tokenizer.media_pad_id, ids)
    self.assertEqual(tokenizer.decode([size, *ids, size + 1]), text)

  @parameterized.parameters("tokenizers", "sentencepiece")
  def test_a_bad_file_is_named(self, kind):
    with self.assertRaisesRegex(data.DataError, "no file /nowhere/t.json"):
      make(kind, "/nowhere/t.json")
    path = self.create_tempfile("broken.json", "{").full_path
    with self.assertRaisesRegex(data.DataError, "broken.json: not a"):
      make(kind, path)


if __name__ == "__main__":
  absltest.main()
