"""Rows hold every token once, in order, with images whole."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import grain
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax import data
from sparsemm_jax.data import documents
from sparsemm_jax.data import images
from sparsemm_jax.data import packing
from sparsemm_jax.data import tokenizer as tokenizer_lib
from tests import testing

VISION = config_lib.VisionConfig(patch_size=2)
BYTES = tokenizer_lib.ByteTokenizer()


def encode(*parts, name: str = "d") -> documents.EncodedDocument:
  return documents.encode(documents.Document(parts, name), BYTES, VISION)


def image(seed: int, height: int = 4, width: int = 4) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (height, width, 3), np.uint8)


def interleaved_documents() -> list[documents.EncodedDocument]:
  """Forty documents, some longer than a row, some with several images."""
  rng = np.random.default_rng(0)
  result = []
  for index in range(40):
    parts = []
    for part in range(rng.integers(1, 7)):
      parts.append(chr(97 + index % 26) * int(rng.integers(1, 60)))
      if rng.random() < 0.5:
        height = int(rng.integers(1, 13))
        parts.append(image(100 * index + part, height, 4))
    result.append(encode(*parts, name=f"d{index}"))
  return result


def number_tokens(
    document: documents.EncodedDocument, index: int
) -> np.ndarray:
  """Ids that tell the document and the place in it."""
  return 10000 * index + np.arange(len(document.tokens), dtype=np.int32)


def pack(
    parent: list[documents.EncodedDocument], seq_len: int, max_patches: int
) -> packing.PackIterDataset:
  shape = packing.RowShape(seq_len, max_patches, VISION.patch_dim)
  return packing.PackIterDataset(grain.MapDataset.source(parent), shape, BYTES)


def segments(row: dict[str, np.ndarray]) -> list[np.ndarray]:
  """The places of each segment of a row."""
  ids = row["segment_ids"]
  return [np.flatnonzero(ids == i) for i in range(1, ids.max() + 1)]


class PackingTest(parameterized.TestCase):

  @parameterized.parameters((64, 16), (100, 24), (1024, 256))
  def test_every_token_and_image_is_seen_once_in_order(self, length, patches):
    parent = [
        dataclasses.replace(document, tokens=number_tokens(document, index))
        for index, document in enumerate(interleaved_documents())
    ]
    read = [[document.tokens[0]] for document in parent]
    for row in pack(parent, length, patches):
      for place in segments(row):
        tokens, targets = row["tokens"][place], row["targets"][place]
        read[targets[0] // 10000].append(targets)
        # The piece goes on where the last one ended.
        self.assertEqual(tokens[0] + 1, targets[0])
    for document, pieces in zip(parent, read, strict=True):
      testing.assert_same(np.hstack(pieces), document.tokens)

  @parameterized.parameters((64, 16), (100, 24))
  def test_an_image_is_never_cut(self, length, patches):
    parent = interleaved_documents()
    count = 0
    for row in pack(parent, length, patches):
      for place in segments(row):
        marks = row["tokens"][place]
        begins = np.flatnonzero(marks == BYTES.media_begin_id)
        ends = np.flatnonzero(marks == BYTES.media_end_id)
        pads = np.flatnonzero(marks == BYTES.media_pad_id)
        self.assertLen(ends, len(begins))
        for begin, end in zip(begins, ends, strict=True):
          self.assertLess(begin, end)
          pads = pads[(pads < begin) | (pads > end)]
        self.assertEmpty(pads)
        count += len(begins)
    self.assertEqual(count, sum(len(d.images) for d in parent))

  def test_merged_patches_line_up_with_media_pads(self):
    parent = interleaved_documents()
    expected = {
        images.normalize(p.patches.patches).tobytes(): p.patches
        for d in parent
        for p in d.images
    }
    found = 0
    for row in pack(parent, 100, 24):
      ids = row["patch_segment_ids"]
      used = np.count_nonzero(ids)
      pads = np.count_nonzero(row["tokens"] == BYTES.media_pad_id)
      self.assertEqual(used, pads * VISION.patches_per_token)
      testing.assert_same(ids[used:], 0)
      testing.assert_same(row["patches"][used:], 0)
      for number in range(1, ids.max() + 1):
        (place,) = np.nonzero(ids == number)
        patches = expected[row["patches"][place].tobytes()]
        testing.assert_same(row["patch_positions"][place], patches.positions)
        self.assertTrue((row["patch_grids"][place] == patches.grid).all())
        found += 1
    self.assertEqual(found, sum(len(d.images) for d in parent))

  def test_loss_leaves_out_media_pads_and_padding_and_nothing_else(self):
    for row in pack(interleaved_documents(), 100, 24):
      expected = (row["segment_ids"] > 0) & (
          row["targets"] != BYTES.media_pad_id
      )
      testing.assert_same(row["loss_mask"], expected)

  def test_targets_stay_inside_the_document(self):
    for row in pack(interleaved_documents(), 100, 24):
      for place in segments(row):
        self.assertEqual(place[-1] - place[0] + 1, len(place))
        testing.assert_same(
            row["targets"][place[:-1]], row["tokens"][place[1:]]
        )
        testing.assert_same(row["positions"][place], np.arange(len(place)))

  def test_padding_is_marked(self):
    (row,) = pack([encode("abc")], 6, 0)
    testing.assert_same(row["tokens"], [257, 97, 98, 99, 256, 256])
    testing.assert_same(row["targets"], [97, 98, 99, 257, 256, 256])
    testing.assert_same(row["segment_ids"], [1, 1, 1, 1, 0, 0])
    testing.assert_same(row["loss_mask"], [1, 1, 1, 1, 0, 0])
    self.assertNotIn("patches", row)

  def test_modality_tells_documents_with_images(self):
    rows = pack([encode("a"), encode("b", image(0)), encode("c")], 64, 4)
    (row,) = rows
    texts, second = [], row["modality"][row["segment_ids"] == 2]
    for segment in (1, 3):
      texts.append(row["modality"][row["segment_ids"] == segment])
    self.assertTrue((second == 1).all())
    self.assertTrue((np.concatenate(texts) == 0).all())

  def test_a_document_that_fits_a_row_is_not_cut(self):
    parent = [encode("x" * n) for n in (40, 30, 50, 20, 61, 62)]
    rows = list(pack(parent, 64, 0))
    starts = sum((row["tokens"] == 257).sum() for row in rows)
    self.assertEqual(starts, len(parent))
    self.assertEqual(sum(len(segments(row)) for row in rows), len(parent))

  def test_long_documents_fill_rows_and_take_turns(self):
    parent = [encode(chr(97 + i) * 1000) for i in range(4)]
    rows = list(pack(parent, 100, 0))
    self.assertGreater(np.mean([row["loss_mask"] for row in rows[:-1]]), 0.98)
    first = [row["tokens"][1] for row in rows[:4]]
    self.assertEqual(first, [97, 98, 99, 100])

  def test_an_image_larger_than_a_row_is_an_error_that_names_it(self):
    document = encode(image(0, 8, 8), name="train.jsonl:7")
    with self.assertRaisesRegex(data.DataError, "train.jsonl:7: .*seq_len=15"):
      next(iter(pack([document], 15, 64)))
    with self.assertRaisesRegex(
        data.DataError, "train.jsonl:7: .* 16 patches.*max_patches=12"
    ):
      next(iter(pack([document], 64, 12)))
    with self.assertRaisesRegex(
        data.DataError, "train.jsonl:7: has an image .*max_patches is 0"
    ):
      next(iter(pack([document], 64, 0)))

  def test_any_state_restores_the_rest_exactly(self):
    grain.experimental.assert_equal_output_after_checkpoint(
        pack(interleaved_documents()[:6], 100, 24)
    )

  def test_a_document_alone_is_a_row_of_its_size(self):
    row = packing.single_row(encode("ab", image(3), "c"), BYTES)
    self.assertEqual(row["tokens"][-1], ord("c"))
    self.assertEqual(row["patches"].shape, (4, VISION.patch_dim))
    self.assertTrue((row["segment_ids"] == 1).all())
    text = packing.single_row(encode("ab"), BYTES)
    testing.assert_same(text["tokens"], [257, 97, 98])
    self.assertNotIn("patches", text)


if __name__ == "__main__":
  absltest.main()
