"""Shows a person, or a log file, how far a run is."""

from collections.abc import Callable
from collections.abc import Mapping
import datetime
import sys
import time
from typing import Any
from typing import TextIO

import jax
from rich import console as rich_console
from rich import progress as rich_progress


class Progress:
  """A bar with ETA and loss on a terminal, plain lines anywhere else.

  Only process 0 shows anything.
  """

  def __init__(
      self,
      num_steps: int,
      *,
      start: int = 0,
      stream: TextIO | None = None,
      clock: Callable[[], float] = time.monotonic,
  ):
    """Prepares the display; `with` shows it.

    Args:
      num_steps: of the run.
      start: steps taken before, by the run that this one resumes.
      stream: where to; None: stdout.
      clock: seconds.
    """
    self._num_steps, self._start, self._step = num_steps, start, start
    self._stream = sys.stdout if stream is None else stream
    self._clock, self._began = clock, clock()
    self._is_shown = jax.process_index() == 0
    self._bar = None
    if self._is_shown and self._stream.isatty():
      self._bar = _make_bar(self._stream)
      self._task = self._bar.add_task(
          "", total=num_steps, completed=start, values=""
      )

  def advance(self, step: int) -> None:
    """Says that `step` steps are taken; cheap, for every step."""
    self._step = step
    if self._bar is not None:
      self._bar.update(self._task, completed=step)

  def log(self, values: Mapping[str, Any]) -> None:
    """Shows values, {short name: number}, in the bar or as a line."""
    text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
    if self._bar is not None:
      self._bar.update(self._task, values=text)
    elif self._is_shown:
      self._print(
          f"step {self._step}/{self._num_steps}  {text}  eta {self._eta()}"
      )

  def message(self, text: str) -> None:
    """Prints a line of its own: a new stage, an evaluation, a checkpoint."""
    if self._bar is not None:
      self._bar.console.print(text, markup=False, highlight=False)
    elif self._is_shown:
      self._print(text)

  def __enter__(self) -> "Progress":
    if self._bar is not None:
      self._bar.start()
    return self

  def __exit__(self, *unused_error) -> None:
    if self._bar is not None:
      self._bar.stop()

  def _print(self, text: str) -> None:
    now = datetime.datetime.now().strftime("%m%d %H:%M:%S")
    print(f"I{now} {text}", file=self._stream, flush=True)

  def _eta(self) -> str:
    taken = self._step - self._start
    if not taken:
      return "?"
    left = self._num_steps - self._step
    seconds = (self._clock() - self._began) / taken * left
    return str(datetime.timedelta(seconds=round(seconds)))


def _make_bar(stream: TextIO) -> rich_progress.Progress:
  return rich_progress.Progress(
      rich_progress.MofNCompleteColumn(),
      rich_progress.BarColumn(),
      rich_progress.TaskProgressColumn(),
      rich_progress.TimeElapsedColumn(),
      rich_progress.TextColumn("eta"),
      rich_progress.TimeRemainingColumn(),
      rich_progress.TextColumn("{task.fields[values]}", markup=False),
      console=rich_console.Console(file=stream),
  )
