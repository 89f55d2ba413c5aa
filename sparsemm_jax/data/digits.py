"""Handwritten digits with questions about them.

The images are the 1797 real 8x8 digits bundled with scikit-learn (a part of
the UCI test set of handwritten digits). The question settles the form of the
answer, and question and label together settle its text.
"""

import functools
from typing import NamedTuple

import numpy as np

_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight",
    "nine",
)  # fmt: skip

# {digit}, {word}, {parity} and {next} are filled in from the label.
QUESTIONS = (
    ("Which digit?", "{digit}"),
    ("What number is it?", "{digit}"),
    ("Spell it.", "{word}"),
    ("As a word?", "{word}"),
    ("Describe it.", "A handwritten {word}."),
    ("What is shown?", "It shows a {digit}."),
    ("Even or odd?", "{parity}"),
    ("What comes next?", "{next}"),
)


class Question(NamedTuple):
  """One question about one image."""

  image: np.ndarray  # [8, 8, 3] uint8
  question: str
  answer: str

  @property
  def prompt(self) -> tuple[np.ndarray, str]:
    """The document up to the answer."""
    return self.image, f"\n{self.question}\n"


@functools.cache
def _load() -> tuple[np.ndarray, np.ndarray]:
  from sklearn import datasets  # slow to import, and not every run needs it

  digits = datasets.load_digits()
  gray = np.round(digits.images * (255 / 16)).astype(np.uint8)  # from 0..16
  return np.repeat(gray[..., None], 3, axis=-1), digits.target


def num_questions() -> int:
  """Returns how many pairs of an image and a question there are."""
  return len(_load()[0]) * len(QUESTIONS)


def image_of(index: int) -> int:
  """Returns the number of the image that question number `index` is about."""
  return int(index) // len(QUESTIONS)


def ask(index: int) -> Question:
  """Returns question number `index`, in 0 <= index < num_questions()."""
  images, labels = _load()
  image = image_of(index)
  digit = int(labels[image])
  text, answer = QUESTIONS[int(index) % len(QUESTIONS)]
  values = {
      "digit": digit,
      "word": _WORDS[digit],
      "parity": ("even", "odd")[digit % 2],
      "next": digit + 1,
  }
  return Question(images[image], text, answer.format(**values))
