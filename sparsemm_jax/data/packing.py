"""Fills rows of a fixed length with documents.

Several documents are open at a time. A row starts with the one that has waited
longest and is filled with whatever of the others fits. Only a document longer
than a row is cut (never inside an image); its pieces follow in later rows, so
that neighbouring rows come from different documents.
"""

import collections
import dataclasses
from typing import Any
from typing import NamedTuple

import grain
import numpy as np

from sparsemm_jax import data
from sparsemm_jax.data import documents
from sparsemm_jax.data import images
from sparsemm_jax.data import tokenizer as tokenizer_lib

OPEN_DOCUMENTS = 16


@dataclasses.dataclass(frozen=True)
class RowShape:
  """What a row holds.

  Attributes:
    seq_len: tokens, T.
    max_patches: patches, P; 0 for rows without images.
    patch_dim: numbers per patch.
  """

  seq_len: int
  max_patches: int = 0
  patch_dim: int = 0


def check_fits(document: documents.EncodedDocument, shape: RowShape) -> None:
  """Raises DataError if an image of the document is larger than a row."""
  for start, stop, patches in document.images:
    size = len(patches.patches)
    if not shape.max_patches:
      raise data.DataError(
          f"{document.name}: has an image but the stage's max_patches is 0"
      )
    if stop - start > shape.seq_len:
      raise data.DataError(
          f"{document.name}: an image takes {stop - start} tokens, more than"
          f" the stage's seq_len={shape.seq_len}"
      )
    if size > shape.max_patches:
      raise data.DataError(
          f"{document.name}: an image takes {size} patches, more than the"
          f" stage's max_patches={shape.max_patches}"
      )


def furthest(
    document: documents.EncodedDocument,
    start: int,
    room: int,
    patch_room: int,
) -> int:
  """Returns where a piece that begins at `start` has to stop.

  Args:
    document: its last token is only ever a target.
    start: first token of the piece.
    room: tokens that still fit.
    patch_room: patches that still fit.

  Returns:
    The largest stop with at most `room` tokens and `patch_room` patches in
    [start, stop) and no image cut.
  """
  stop = min(start + room, len(document.tokens) - 1)
  for first, last, patches in document.images:
    if first < start:
      continue
    if first >= stop:
      break
    patch_room -= len(patches.patches)
    if last > stop or patch_room < 0:
      return first
  return stop


class _Piece(NamedTuple):
  """Tokens [start, stop) of a document."""

  document: documents.EncodedDocument
  start: int
  stop: int

  @property
  def patches(self) -> list[images.Patches]:
    return [
        image.patches
        for image in self.document.images
        if self.start <= image.start < self.stop
    ]


class _Row:
  """A row being filled."""

  def __init__(self, shape: RowShape):
    self._shape = shape
    self._pieces: list[_Piece] = []
    self._patches: list[images.Patches] = []
    self.room, self.patch_room = shape.seq_len, shape.max_patches

  @property
  def is_empty(self) -> bool:
    return not self._pieces

  def add(
      self, document: documents.EncodedDocument, start: int, stop: int
  ) -> None:
    """Appends tokens [start, stop) of the document as a new segment."""
    piece = _Piece(document, start, stop)
    patches = piece.patches
    self._pieces.append(piece)
    self._patches += patches
    self.room -= stop - start
    self.patch_room -= sum(len(image.patches) for image in patches)

  def finish(self, tokenizer: tokenizer_lib.Tokenizer) -> dict[str, np.ndarray]:
    """Returns the arrays of the row, filled up with padding."""
    pieces = self._pieces
    sizes = [stop - start for _, start, stop in pieces]
    tokens = np.concatenate([d.tokens[i:j] for d, i, j in pieces])
    targets = np.concatenate([d.tokens[i + 1 : j + 1] for d, i, j in pieces])
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    values = {
        "segment_ids": np.repeat(np.arange(1, len(sizes) + 1), sizes),
        "positions": np.arange(len(tokens)) - first,
        "modality": np.repeat([bool(d.images) for d, _, _ in pieces], sizes),
    }
    length, pad_id = self._shape.seq_len, tokenizer.pad_id
    row = {
        "tokens": _fill(tokens, length, np.int32, pad_id),
        "targets": _fill(targets, length, np.int32, pad_id),
        "loss_mask": _fill(targets != tokenizer.media_pad_id, length, bool),
    }
    row |= {key: _fill(v, length, np.int32) for key, v in values.items()}
    return row | self._patch_arrays()

  def _patch_arrays(self) -> dict[str, np.ndarray]:
    length = self._shape.max_patches
    if not length:
      return {}
    # The empty arrays give a row without images its shapes.
    sizes = np.array([len(image.patches) for image in self._patches], np.int32)
    patches = np.concatenate([
        np.zeros((0, self._shape.patch_dim), np.uint8),
        *[image.patches for image in self._patches],
    ])
    positions = np.concatenate([
        np.zeros((0, 2), np.int32),
        *[image.positions for image in self._patches],
    ])
    grids = np.array([image.grid for image in self._patches], np.int32)
    grids = np.repeat(grids.reshape(-1, 2), sizes, axis=0)
    numbers = np.repeat(np.arange(1, len(sizes) + 1), sizes)
    return {
        "patches": _fill(images.normalize(patches), length, np.float32),
        "patch_positions": _fill(positions, length, np.int32),
        "patch_grids": _fill(grids, length, np.int32),
        "patch_segment_ids": _fill(numbers, length, np.int32),
    }


def _fill(
    values: np.ndarray, length: int, dtype: Any, fill: int = 0
) -> np.ndarray:
  """Values along the first axis, then `fill` up to `length`."""
  result = np.full((length, *values.shape[1:]), fill, dtype)
  result[: len(values)] = values
  return result


def single_row(
    document: documents.EncodedDocument, tokenizer: tokenizer_lib.Tokenizer
) -> dict[str, np.ndarray]:
  """Returns the row of exactly the document's size that holds it alone."""
  length = len(document.tokens) - 1
  sizes = [image.patches.patches.shape for image in document.images]
  patches = sum(size for size, _ in sizes)
  patch_dim = sizes[0][1] if sizes else 0
  row = _Row(RowShape(length, patches, patch_dim))
  row.add(document, 0, length)
  return row.finish(tokenizer)


@dataclasses.dataclass
class _Open:
  """A document and where its next piece begins."""

  index: int
  start: int
  document: documents.EncodedDocument

  @property
  def length(self) -> int:
    """Tokens left; the last token of a document is only a target."""
    return len(self.document.tokens) - 1 - self.start


class PackIterDataset(grain.IterDataset):
  """Rows of `shape` from a MapDataset of EncodedDocuments, in its order."""

  def __init__(
      self,
      parent: grain.MapDataset,
      shape: RowShape,
      tokenizer: tokenizer_lib.Tokenizer,
  ):
    super().__init__(parent)
    self._documents = parent
    self._shape = shape
    self._tokenizer = tokenizer

  def __iter__(self) -> grain.DatasetIterator:
    return _PackIterator(self._documents, self._shape, self._tokenizer)


class _PackIterator(grain.DatasetIterator):
  """Its state is which documents are open and where; never their content."""

  def __init__(
      self,
      parent: grain.MapDataset,
      shape: RowShape,
      tokenizer: tokenizer_lib.Tokenizer,
  ):
    super().__init__()
    self._documents = parent
    self._shape = shape
    self._tokenizer = tokenizer
    self._next = 0  # the first document not yet opened
    self._open: collections.deque[_Open] = collections.deque()

  def get_state(self) -> dict[str, Any]:
    pairs = [[item.index, item.start] for item in self._open]
    closed = [[-1, -1]] * (OPEN_DOCUMENTS - len(pairs))
    return {"next": self._next, "open": pairs + closed}

  def set_state(self, state: dict[str, Any]) -> None:
    self._next = state["next"]
    self._open = collections.deque(
        self._read(index, start) for index, start in state["open"] if index >= 0
    )

  def __next__(self) -> dict[str, np.ndarray]:
    self._refill()
    row = _Row(self._shape)
    cut = []  # more of these would be another piece of the same document
    while (found := self._find(row)) is not None:
      position, stop = found
      item = self._open[position]
      del self._open[position]
      row.add(item.document, item.start, stop)
      item.start = stop
      if item.length:
        cut.append(item)
      self._refill(len(cut))
    self._open.extend(cut)
    if row.is_empty:
      raise StopIteration
    return row.finish(self._tokenizer)

  def _find(self, row: _Row) -> tuple[int, int] | None:
    """Which open document comes next in the row, and up to where."""
    for position, item in enumerate(self._open):
      stop = furthest(item.document, item.start, row.room, row.patch_room)
      taken = stop - item.start
      if taken and (
          taken == item.length or row.is_empty or self._is_longer(item)
      ):
        return position, stop
    return None

  def _is_longer(self, item: _Open) -> bool:
    """Whether the rest of a document does not fit a row of its own."""
    stop = furthest(
        item.document, item.start, self._shape.seq_len, self._shape.max_patches
    )
    return stop - item.start < item.length

  def _refill(self, held: int = 0) -> None:
    while len(self._open) + held < OPEN_DOCUMENTS and self._next < len(
        self._documents
    ):
      self._open.append(self._read(self._next, 0))
      self._next += 1

  def _read(self, index: int, start: int) -> _Open:
    document = self._documents[index]
    check_fits(document, self._shape)
    return _Open(index, start, document)
