"""Text to token ids and back, with the special tokens of image documents."""

import os
from typing import Protocol

import sentencepiece
import tokenizers

from sparsemm_jax import config as config_lib
from sparsemm_jax import data

# In the order of the ids a vocabulary without them is extended by.
SPECIAL_TOKENS = (
    "<|pad|>",
    "<|end_of_document|>",
    "<|media_pad|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
)


class Tokenizer(Protocol):
  """What the pipeline asks of a tokenizer.

  Attributes:
    vocab_size: one more than the largest id.
    pad_id: fills the rest of a row.
    end_of_document_id: stands before and after every document.
    media_pad_id: one per image token, replaced by the vision tower's output.
    media_begin_id, media_content_id, media_end_id: the frame of an image.
  """

  vocab_size: int
  pad_id: int
  end_of_document_id: int
  media_pad_id: int
  media_begin_id: int
  media_content_id: int
  media_end_id: int

  def encode(self, text: str) -> list[int]:
    """Ids of the text, never a special one."""

  def decode(self, ids: list[int]) -> str:
    """The text of the ids, special ones left out."""


class _SpecialIds:
  """Special ids by name, from a list in the order of SPECIAL_TOKENS."""

  def __init__(self, ids: list[int]):
    (
        self.pad_id,
        self.end_of_document_id,
        self.media_pad_id,
        self.media_begin_id,
        self.media_content_id,
        self.media_end_id,
    ) = ids
    self._special = frozenset(ids)


class ByteTokenizer(_SpecialIds):
  """UTF-8 bytes are ids 0..255; special tokens 256..261; two ids are spare."""

  vocab_size = 264

  def __init__(self):
    super().__init__(list(range(256, 256 + len(SPECIAL_TOKENS))))

  def encode(self, text: str) -> list[int]:
    return list(text.encode("utf-8", errors="replace"))

  def decode(self, ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer(_SpecialIds):
  """A `tokenizer.json` of the Hugging Face `tokenizers` library.

  Special tokens the file already has keep their ids; the others are appended
  after its vocabulary. Their spelling inside a text is encoded as plain text.
  """

  def __init__(self, path: str):
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception
      raise data.DataError(f"{path}: not a tokenizer.json: {error}") from None
    self._tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    self._tokenizer.encode_special_tokens = True
    super().__init__([self._tokenizer.token_to_id(t) for t in SPECIAL_TOKENS])
    self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())

  def encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: list[int]) -> str:
    return self._tokenizer.decode(
        [int(i) for i in ids if i not in self._special]
    )


class SentencePieceTokenizer(_SpecialIds):
  """A SentencePiece model file.

  Special tokens that are control symbols of the model keep their ids; the
  others are appended after its vocabulary.
  """

  def __init__(self, path: str):
    try:
      self._model = sentencepiece.SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError) as error:
      message = " ".join(str(error).split())
      raise data.DataError(
          f"{path}: not a SentencePiece model: {message}"
      ) from None
    self.vocab_size = self._model.get_piece_size()
    ids = []
    for token in SPECIAL_TOKENS:
      known = self._model.piece_to_id(token)
      if self._model.is_control(known):
        ids.append(known)
      else:
        ids.append(self.vocab_size)
        self.vocab_size += 1
    super().__init__(ids)

  def encode(self, text: str) -> list[int]:
    return self._model.encode(text)

  def decode(self, ids: list[int]) -> str:
    return self._model.decode([int(i) for i in ids if i not in self._special])


def make_tokenizer(config: config_lib.TokenizerConfig) -> Tokenizer:
  """Returns the tokenizer of the config.

  Args:
    config: its kind, and the file for kinds other than "byte".

  Raises:
    DataError: the file is missing or of another format.
  """
  if config.kind == "byte":
    return ByteTokenizer()
  if not os.path.isfile(config.path):
    raise data.DataError(f"data.tokenizer.path: no file {config.path}")
  if config.kind == "tokenizers":
    return HuggingFaceTokenizer(config.path)
  return SentencePieceTokenizer(config.path)
