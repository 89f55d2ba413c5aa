"""Sources of documents, read in place and on demand."""

import base64
import binascii
import glob
import importlib
import json
import os
import pathlib
import sysconfig
from typing import Any
from typing import Protocol

from sparsemm_jax import config as config_lib
from sparsemm_jax import data
from sparsemm_jax.data import digits
from sparsemm_jax.data import documents

IMAGE_PLACEHOLDER = "<image>"
MAX_FILE_BYTES = 2**18  # of one standard-library source; the rest is not read

# Not prose or code worth learning (tests, character tables), not part of the
# standard library, or already there as topics.
_SKIPPED_FOLDERS = frozenset({
    "test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages",
    "dist-packages", "lib-dynload", "__pycache__",
})  # fmt: skip


class Source(Protocol):
  """Documents by index.

  Attributes:
    has_images: whether every document has an image; False too if unknown.
  """

  has_images: bool

  def __len__(self) -> int:
    """The number of documents."""

  def __getitem__(self, index: int) -> documents.Document:
    """Reads one document."""

  def identity(self, index: int) -> str:
    """What the split into train and held-out goes by, without reading it."""


class DigitsSource:
  """Every question about every digit; the split goes by image."""

  has_images = True

  def __len__(self) -> int:
    return digits.num_questions()

  def __getitem__(self, index: int) -> documents.Document:
    asked = digits.ask(index)
    image, text = asked.prompt
    return documents.Document((image, text + asked.answer), f"digits[{index}]")

  def identity(self, index: int) -> str:
    return str(digits.image_of(index))


class PythonTextSource:
  """Python's documentation topics and the sources of its standard library."""

  has_images = False

  def __init__(self):
    topics = importlib.import_module("pydoc_data.topics").topics
    self._topics = sorted(topics.items())
    self._root = pathlib.Path(sysconfig.get_path("stdlib"))
    self._files = sorted(_python_files(self._root))

  def __len__(self) -> int:
    return len(self._topics) + len(self._files)

  def __getitem__(self, index: int) -> documents.Document:
    if index < len(self._topics):
      text = self._topics[index][1]
    else:
      file = self._root / self._files[index - len(self._topics)]
      with file.open("rb") as opened:
        text = opened.read(MAX_FILE_BYTES).decode("utf-8", errors="ignore")
    return documents.Document((text,), self.identity(index))

  def identity(self, index: int) -> str:
    if index < len(self._topics):
      return f"topic {self._topics[index][0]}"
    return self._files[index - len(self._topics)]


def _python_files(root: pathlib.Path) -> list[str]:
  files = []
  for folder, subfolders, names in os.walk(root):
    subfolders[:] = [
        name for name in subfolders if name not in _SKIPPED_FOLDERS
    ]
    for name in names:
      if name.endswith(".py"):
        path = pathlib.Path(folder, name)
        if path.stat().st_size:
          files.append(path.relative_to(root).as_posix())
  return files


class TextSource:
  """Text files, one document each."""

  has_images = False

  def __init__(self, pattern: str):
    self._files = _matching_files(pattern)

  def __len__(self) -> int:
    return len(self._files)

  def __getitem__(self, index: int) -> documents.Document:
    file = self._files[index]
    try:
      text = pathlib.Path(file).read_text("utf-8")
    except UnicodeDecodeError as error:
      raise data.DataError(f"{file}: not UTF-8: {error}") from None
    return documents.Document((text,), file)

  def identity(self, index: int) -> str:
    return os.path.basename(self._files[index])


class JsonlSource:
  """Lines {"text": "... <image> ...", "images": [...]}; see parse_record.

  All lines are parsed once at the start, so that a bad one stops a run before
  it has begun; images are read on demand.
  """

  has_images = False

  def __init__(self, pattern: str):
    self._lines = []  # (file, line number, offset)
    for file in _matching_files(pattern):
      offset = 0
      with open(file, "rb") as opened:
        for number, line in enumerate(opened, 1):
          if line.strip():
            parse_record(line, file, f"{file}:{number}")
            self._lines.append((file, number, offset))
          offset += len(line)

  def __len__(self) -> int:
    return len(self._lines)

  def __getitem__(self, index: int) -> documents.Document:
    file, number, offset = self._lines[index]
    with open(file, "rb") as opened:
      opened.seek(offset)
      return parse_record(opened.readline(), file, f"{file}:{number}")

  def identity(self, index: int) -> str:
    file, number, _ = self._lines[index]
    return f"{os.path.basename(file)}:{number}"


class ArrayRecordSource:
  """Records of ArrayRecord files, each as a line of JsonlSource."""

  has_images = False

  def __init__(self, pattern: str):
    import grain  # not needed by the other sources

    self._records = []  # (file, position in the file)
    self._readers = {}
    for file in _matching_files(pattern):
      try:
        reader = grain.sources.ArrayRecordDataSource(file)
        self._records += [(file, position) for position in range(len(reader))]
      except Exception as error:  # the reader raises whatever its C++ part did
        message = " ".join(str(error).split())
        raise data.DataError(
            f"{file}: not an ArrayRecord file: {message}"
        ) from None
      self._readers[file] = reader

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> documents.Document:
    file, position = self._records[index]
    where = f"{file}: record {position + 1}"
    return parse_record(self._readers[file][position], file, where)

  def identity(self, index: int) -> str:
    file, position = self._records[index]
    return f"{os.path.basename(file)}:{position + 1}"


def parse_record(line: bytes, file: str, where: str) -> documents.Document:
  """Reads a JSON record of interleaved text and images.

  Args:
    line: {"text": str, "images": list}; each "<image>" in the text stands for
      the next of `images`, a path relative to the folder of `file` or
      {"base64": the bytes of an image file}. "images" may be left out.
    file: the file of the record.
    where: the name of the record.

  Raises:
    DataError: anything else.
  """
  try:
    record = json.loads(line)
  except ValueError as error:
    raise data.DataError(f"{where}: not JSON: {error}") from None
  if not isinstance(record, dict) or not isinstance(record.get("text"), str):
    raise data.DataError(f'{where}: needs a field "text" with a string')
  images = record.get("images", [])
  if not isinstance(images, list):
    raise data.DataError(f'{where}: "images" is not a list')
  try:
    record["text"].encode("utf-8")
  except UnicodeEncodeError as error:
    raise data.DataError(f'{where}: "text" is not Unicode: {error}') from None
  texts = record["text"].split(IMAGE_PLACEHOLDER)
  if len(texts) - 1 != len(images):
    raise data.DataError(
        f"{where}: {len(texts) - 1} {IMAGE_PLACEHOLDER} in the text but"
        f" {len(images)} images"
    )
  folder = pathlib.Path(file).parent
  parts = [texts[0]]
  for image, text in zip(images, texts[1:], strict=True):
    parts += [_record_image(image, folder, where), text]
  return documents.Document(tuple(part for part in parts if part != ""), where)


def _record_image(
    image: Any, folder: pathlib.Path, where: str
) -> pathlib.Path | bytes:
  if isinstance(image, str):
    return folder / image
  if isinstance(image, dict) and isinstance(image.get("base64"), str):
    try:
      return base64.b64decode(image["base64"], validate=True)
    except binascii.Error as error:
      raise data.DataError(f"{where}: image is not base64: {error}") from None
  raise data.DataError(
      f'{where}: an image is a path or {{"base64": ...}}, got {image!r:.60}'
  )


def _matching_files(pattern: str) -> list[str]:
  files = sorted(
      file
      for file in glob.glob(pattern, recursive=True)
      if os.path.isfile(file)
  )
  if not files:
    raise data.DataError(f"no file matches {pattern}")
  return files


def open_source(
    config: config_lib.SourceConfig, path: str | None = None
) -> Source:
  """Opens the source of the config.

  Args:
    config: its kind and path.
    path: instead of the path of the config.

  Raises:
    DataError: no such file, a line of it that cannot be used, or a path for a
      kind that has none.
  """
  if path is not None and config.path is None:
    raise data.DataError(f"kind {config.kind!r} reads no files, got {path}")
  path = path or config.path
  match config.kind:
    case "digits":
      return DigitsSource()
    case "python_text":
      return PythonTextSource()
    case "text":
      return TextSource(path)
    case "jsonl":
      return JsonlSource(path)
    case "array_record":
      return ArrayRecordSource(path)
  raise ValueError(f"unknown kind of source: {config.kind}")
