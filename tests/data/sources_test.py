"""Sources read real documents and name the line that they cannot use."""

import base64
import io
import json
import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized
from array_record.python import array_record_module
import numpy as np
from PIL import Image
from sklearn import datasets

from sparsemm_jax import config as config_lib
from sparsemm_jax import data
from sparsemm_jax.data import digits
from sparsemm_jax.data import documents
from sparsemm_jax.data import sources
from sparsemm_jax.data import tokenizer as tokenizer_lib
from tests import testing

VISION = config_lib.VisionConfig(patch_size=2)


def png(image: np.ndarray) -> bytes:
  buffer = io.BytesIO()
  Image.fromarray(image).save(buffer, "PNG")
  return buffer.getvalue()


def open_source(kind: str, path: str | None = None) -> sources.Source:
  return sources.open_source(config_lib.SourceConfig(kind=kind, path=path))


class EmbeddedSourcesTest(absltest.TestCase):

  def test_digits_are_those_of_scikit_learn(self):
    source = open_source("digits")
    bundled = datasets.load_digits()
    self.assertLen(source, 1797 * len(digits.QUESTIONS))
    for number in (0, 7, 1796):
      image, _ = source[number * len(digits.QUESTIONS)].parts
      testing.assert_same(
          image[:, :, 0], np.round(bundled.images[number] * 255 / 16)
      )
      testing.assert_same(image[:, :, 0], image[:, :, 2])

  def test_answers_follow_from_question_and_label(self):
    labels = datasets.load_digits().target
    (seven,) = np.flatnonzero(labels == 7)[:1]
    start = int(seven) * len(digits.QUESTIONS)
    answers = {
        digits.ask(start + i).question: digits.ask(start + i).answer
        for i in range(len(digits.QUESTIONS))
    }
    self.assertEqual(answers["Which digit?"], "7")
    self.assertEqual(answers["Spell it."], "seven")
    self.assertEqual(answers["Describe it."], "A handwritten seven.")
    self.assertEqual(answers["Even or odd?"], "odd")
    self.assertEqual(answers["What comes next?"], "8")
    self.assertLen(answers, len(digits.QUESTIONS))

  def test_a_digit_document_begins_with_its_prompt(self):
    source = open_source("digits")
    asked = digits.ask(19)
    image, text = asked.prompt
    testing.assert_same(source[19].parts[0], image)
    self.assertEqual(source[19].parts[1], text + asked.answer)

  def test_all_questions_about_an_image_share_its_identity(self):
    source = open_source("digits")
    count = len(digits.QUESTIONS)
    self.assertLen({source.identity(i) for i in range(count)}, 1)
    self.assertNotEqual(source.identity(count - 1), source.identity(count))

  def test_python_text_is_the_interpreter_s_own(self):
    source = open_source("python_text")
    names = [source.identity(i) for i in range(len(source))]
    self.assertLen(set(names), len(names))
    self.assertIn("topic while", names)
    text = source[names.index("json/decoder.py")].parts[0]
    self.assertEqual(text, pathlib.Path(json.decoder.__file__).read_text())
    for name in names:
      self.assertNotRegex(name, r"(^|/)(tests?|site-packages|encodings)/")
    self.assertGreater(len(names), 400)

  def test_embedded_sources_refuse_a_path(self):
    config = config_lib.SourceConfig(kind="digits")
    with self.assertRaisesRegex(data.DataError, "reads no files"):
      sources.open_source(config, "x.txt")


class FileSourcesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.image = np.arange(96, dtype=np.uint8).reshape(4, 8, 3)
    (self.folder / "a.png").write_bytes(png(self.image))

  def write_lines(self, *lines: str) -> str:
    path = self.folder / "train.jsonl"
    path.write_text("\n".join(lines), "utf-8")
    return str(path)

  def assert_interleaved(self, document: documents.Document) -> None:
    tokenizer = tokenizer_lib.ByteTokenizer()
    encoded = documents.encode(document, tokenizer, VISION)
    image = [259, *b"image 8x4", 260, 258, 258, 261]
    self.assertEqual(
        encoded.tokens.tolist(),
        [257, *b"left ", *image, *b" middle ", *image, *b" \xc3\xa9", 257],
    )
    for start, stop, patches in encoded.images:
      self.assertEqual(encoded.tokens[start], tokenizer.media_begin_id)
      self.assertEqual(encoded.tokens[stop - 1], tokenizer.media_end_id)
      testing.assert_same(
          patches.patches[0].reshape(2, 2, 3), self.image[:2, :2]
      )

  def record(self) -> dict:
    inline = base64.b64encode(png(self.image)).decode()
    return {
        "text": "left <image> middle <image> é",
        "images": ["a.png", {"base64": inline}],
    }

  def test_jsonl_interleaves_text_and_images(self):
    path = self.write_lines('{"text": "plain"}', "", json.dumps(self.record()))
    source = open_source("jsonl", path)
    self.assertLen(source, 2)
    self.assertEqual(source[0].parts, ("plain",))
    self.assertEqual(source[1].name, f"{path}:3")
    self.assert_interleaved(source[1])

  def test_array_record_interleaves_text_and_images(self):
    path = str(self.folder / "train.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    writer.write(b'{"text": "plain"}')
    writer.write(json.dumps(self.record()).encode())
    writer.write(b'{"no text": 1}')
    writer.close()
    source = open_source("array_record", path)
    self.assertLen(source, 3)
    self.assertEqual(source[0].parts, ("plain",))
    self.assert_interleaved(source[1])
    with self.assertRaisesRegex(
        data.DataError, re.escape(f'{path}: record 3: needs a field "text"')
    ):
      source[2]

  def test_a_file_of_another_format_is_not_an_array_record(self):
    path = self.folder / "train.array_record"
    path.write_text("something else")
    with self.assertRaisesRegex(data.DataError, "not an ArrayRecord file"):
      open_source("array_record", str(path))

  def test_text_files_are_one_document_each(self):
    (self.folder / "b.txt").write_text("naïve", "utf-8")
    (self.folder / "a.txt").write_text("first", "utf-8")
    source = open_source("text", str(self.folder / "*.txt"))
    self.assertEqual([d.parts for d in source], [("first",), ("naïve",)])

  def test_text_that_is_not_utf8_is_named(self):
    (self.folder / "a.txt").write_bytes(b"ok \xff")
    source = open_source("text", str(self.folder / "a.txt"))
    with self.assertRaisesRegex(data.DataError, "a.txt: not UTF-8"):
      source[0]

  @parameterized.parameters("text", "jsonl", "array_record")
  def test_missing_files_are_named(self, kind):
    with self.assertRaisesRegex(data.DataError, "no file matches /nowhere/x"):
      open_source(kind, "/nowhere/x")

  @parameterized.parameters(
      ("{", "not JSON"),
      ('{"text": "\\ud800"}', '"text" is not Unicode'),
      ('{"texts": "a"}', 'needs a field "text"'),
      ('["a"]', 'needs a field "text"'),
      ('{"text": "<image>"}', "1 <image> in the text but 0 images"),
      ('{"text": "a", "images": ["a.png"]}', "0 <image> in the text but 1"),
      ('{"text": "a", "images": "a.png"}', '"images" is not a list'),
      ('{"text": "<image>", "images": [3]}', "an image is a path or"),
      ('{"text": "<image>", "images": [{"base64": "!"}]}', "not base64"),
  )
  def test_a_bad_line_stops_before_the_run_with_its_number(self, line, message):
    path = self.write_lines('{"text": "good"}', "", line)
    with self.assertRaisesRegex(
        data.DataError, "^" + re.escape(f"{path}:3: ") + ".*" + message
    ):
      open_source("jsonl", path)

  @parameterized.parameters("missing.png", "broken.png")
  def test_a_bad_image_is_named_with_its_line(self, name):
    (self.folder / "broken.png").write_bytes(png(self.image)[:50])
    line = json.dumps({"text": "<image>", "images": [name]})
    path = self.write_lines('{"text": "good"}', line)
    document = open_source("jsonl", path)[1]
    with self.assertRaisesRegex(
        data.DataError, "^" + re.escape(f"{path}:2: ") + ".*" + name
    ):
      documents.encode(document, tokenizer_lib.ByteTokenizer(), VISION)


if __name__ == "__main__":
  absltest.main()
