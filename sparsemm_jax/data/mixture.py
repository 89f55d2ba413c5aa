"""Train and held-out documents, their order, and rows of several sources."""

import copy
import functools
import hashlib

import grain
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax import data
from sparsemm_jax.data import documents
from sparsemm_jax.data import packing
from sparsemm_jax.data import sources
from sparsemm_jax.data import tokenizer as tokenizer_lib

SPLITS = ("train", "eval")


def is_held_out(identity: str, fraction: float) -> bool:
  """Whether a document is held out: a hash of its identity < fraction."""
  digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
  return int.from_bytes(digest) < fraction * 2.0**64


class Split:
  """The documents of one split of a source, by index.

  Attributes:
    name: of the source in data.sources.
    source: all documents of the source.
    indices: of the documents of this split.
  """

  def __init__(self, name: str, config: config_lib.SourceConfig, split: str):
    if split not in SPLITS:
      raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    self.name = name
    own_files = split == "eval" and config.eval_path is not None
    try:
      self.source = sources.open_source(
          config, config.eval_path if own_files else None
      )
    except data.DataError as error:
      raise data.DataError(f"data.sources.{name}: {error}") from None
    self.indices = np.arange(len(self.source))
    if config.eval_path is None:
      held_out = np.array(
          [
              is_held_out(self.source.identity(i), config.eval_fraction)
              for i in range(len(self.source))
          ],
          bool,
      )
      self.indices = self.indices[held_out == (split == "eval")]
    if not len(self.indices):
      raise data.DataError(
          f"data.sources.{name}: no document is left for {split} of"
          f" {len(self.source)} (eval_fraction={config.eval_fraction})"
      )

  def __len__(self) -> int:
    return len(self.indices)

  def shard(self, index: int, count: int) -> "Split":
    """Returns every count-th document of the split, from `index` on."""
    if len(self) < count:
      raise data.DataError(
          f"data.sources.{self.name}: {len(self)} documents are too few for"
          f" {count} processes"
      )
    result = copy.copy(self)
    result.indices = self.indices[index::count]
    return result

  def __getitem__(self, index: int) -> documents.Document:
    return self.source[int(self.indices[index])]


def seed_of(*parts: int | str) -> int:
  """Returns a 32-bit seed that depends on all of the parts."""
  digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
  return int.from_bytes(digest)


def packed_rows(
    split: Split,
    shape: packing.RowShape,
    tokenizer: tokenizer_lib.Tokenizer,
    vision: config_lib.VisionConfig | None,
    *,
    seed: int,
    repeat: bool,
) -> grain.IterDataset:
  """Returns packed rows of one source, its documents shuffled every epoch.

  Args:
    split: the documents.
    shape: of a row.
    tokenizer: of the text.
    vision: patch sizes, None without a vision tower.
    seed: of the order.
    repeat: whether to go on after all documents have been seen.
  """
  if split.source.has_images and not shape.max_patches:
    raise data.DataError(
        f"data.sources.{split.name} has images but the stage's max_patches is 0"
    )
  dataset = grain.MapDataset.source(split).shuffle(seed)
  if repeat:
    dataset = dataset.repeat()
  encode = functools.partial(
      documents.encode, tokenizer=tokenizer, vision=vision
  )
  return packing.PackIterDataset(dataset.map(encode), shape, tokenizer)


def mix(
    rows: dict[str, grain.IterDataset], weights: dict[str, float]
) -> grain.IterDataset:
  """Returns rows of all sources, in proportion to their weights."""
  if len(rows) == 1:
    return next(iter(rows.values()))
  names = sorted(rows)
  return grain.IterDataset.mix(
      [rows[name] for name in names], [weights[name] for name in names]
  )
