"""A document of text and images, and its form as tokens and patches."""

import dataclasses
import pathlib
from typing import NamedTuple

from jaxtyping import Int
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax import data
from sparsemm_jax.data import images
from sparsemm_jax.data import tokenizer as tokenizer_lib


@dataclasses.dataclass(frozen=True)
class Document:
  """Text and images in reading order.

  Attributes:
    parts: a str is text; anything else is an image (a pathlib.Path, the bytes
      of an image file, or an array).
    name: where it comes from, such as "train.jsonl:12".
  """

  parts: tuple[str | pathlib.Path | bytes | np.ndarray, ...]
  name: str


class PlacedImage(NamedTuple):
  """An image in a document: its frame and pads are tokens [start, stop)."""

  start: int
  stop: int
  patches: images.Patches


@dataclasses.dataclass(frozen=True)
class EncodedDocument:
  """Tokens and patches of a document.

  Attributes:
    tokens: end of document, the text and images, end of document.
    images: the images in order.
    name: of the document.
  """

  tokens: Int[np.ndarray, " n"]
  images: tuple[PlacedImage, ...]
  name: str


def image_tokens(
    image: np.ndarray,
    tokenizer: tokenizer_lib.Tokenizer,
    vision: config_lib.VisionConfig,
) -> list[int]:
  """Returns the frame of an [h, w, 3] image and its media pads."""
  height, width = image.shape[:2]
  pads = images.num_image_tokens(height, width, vision)
  return [
      tokenizer.media_begin_id,
      *tokenizer.encode(f"image {width}x{height}"),
      tokenizer.media_content_id,
      *[tokenizer.media_pad_id] * pads,
      tokenizer.media_end_id,
  ]


def encode(
    document: Document,
    tokenizer: tokenizer_lib.Tokenizer,
    vision: config_lib.VisionConfig | None,
) -> EncodedDocument:
  """Turns a document into tokens and patches.

  Args:
    document: text and images.
    tokenizer: of the text.
    vision: patch sizes; None if the model has no vision tower.

  Raises:
    DataError: an image that cannot be read, or any image without `vision`.
  """
  tokens = [tokenizer.end_of_document_id]
  placed = []
  for part in document.parts:
    if isinstance(part, str):
      tokens += tokenizer.encode(part)
      continue
    if vision is None:
      raise data.DataError(
          f"{document.name}: has an image but model.vision is None"
      )
    image = images.load_image(part, document.name)
    start = len(tokens)
    tokens += image_tokens(image, tokenizer, vision)
    patches = images.extract_patches(image, vision)
    placed.append(PlacedImage(start, len(tokens), patches))
  tokens.append(tokenizer.end_of_document_id)
  return EncodedDocument(
      np.array(tokens, np.int32), tuple(placed), document.name
  )
