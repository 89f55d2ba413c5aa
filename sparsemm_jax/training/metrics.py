"""Writes the numbers of a run, and measures its speed."""

from collections.abc import Callable
from collections.abc import Mapping
import json
import math
import time
from typing import Any

from etils import epath
import jax
import numpy as np
import tensorboardX

FILE_NAME = "metrics.jsonl"


class MetricWriter:
  """Writes scalars to TensorBoard, scalars and vectors to JSON lines.

  A line holds the step and one call's values; a value that is not finite is
  null, since JSON has no other word for it (TensorBoard gets it as it is). A
  resumed run appends; `read` drops what an interrupted run left beyond the
  checkpoint. Only process 0 writes.
  """

  def __init__(self, workdir: epath.PathLike, *, resumed_at: int | None = None):
    """Opens the files.

    Args:
      workdir: of the run; made if missing.
      resumed_at: steps taken at the checkpoint; None: a new run.
    """
    self._is_writer = jax.process_index() == 0
    if not self._is_writer:
      return
    workdir = epath.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    purge_step = None if resumed_at is None else resumed_at + 1
    self._board = tensorboardX.SummaryWriter(
        str(workdir / "tensorboard"), purge_step=purge_step
    )
    self._lines = open(workdir / FILE_NAME, "a", encoding="utf-8")  # noqa: SIM115

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes and flushes one line.

    Args:
      step: optimizer steps taken.
      values: scalars, or vectors, by name; arrays are fetched.
    """
    if not self._is_writer:
      return
    values = {name: np.asarray(value) for name, value in values.items()}
    for name, value in values.items():
      if value.ndim == 0:
        self._board.add_scalar(name, value.item(), step)
    line = {name: _plain(value.tolist()) for name, value in values.items()}
    record = {"step": int(step), **line}
    self._lines.write(json.dumps(record, allow_nan=False) + "\n")
    self._lines.flush()
    self._board.flush()

  def close(self) -> None:
    """Closes the files."""
    if self._is_writer:
      self._board.close()
      self._lines.close()

  def __enter__(self) -> "MetricWriter":
    return self

  def __exit__(self, *unused_error) -> None:
    self.close()


def _plain(value: Any) -> Any:
  if isinstance(value, list):
    return [_plain(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def read(workdir: epath.PathLike) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Reads a run's metrics back.

  A line of step s cancels earlier lines of later steps, as those belong to a
  run that was interrupted and resumed before them.

  Args:
    workdir: of the run.

  Returns:
    name -> (steps [N], values [N, ...]), in the order of steps; null is NaN.

  Raises:
    ValueError: a line that does not parse or has no step; file and line are
      named.
  """
  records = []
  path = epath.Path(workdir) / FILE_NAME
  for number, line in enumerate(path.read_text().splitlines(), 1):
    try:
      record = json.loads(line)
      step = record["step"]
    except json.JSONDecodeError as error:
      raise ValueError(f"{path}:{number}: {error}") from None
    except (KeyError, TypeError):
      raise ValueError(f"{path}:{number}: no step in {line[:40]!r}") from None
    while records and records[-1]["step"] > step:
      records.pop()
    records.append(record)

  series = {}
  for record in records:
    step = record.pop("step")
    for name, value in record.items():
      series.setdefault(name, {})[step] = np.asarray(value, np.float64)
  return {
      name: (np.array(list(by_step)), np.stack(list(by_step.values())))
      for name, by_step in series.items()
  }


class Throughput:
  """Measures tokens per second between two readings."""

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self.restart()

  def restart(self) -> None:
    """Forgets what was added: after compiling, evaluating or saving."""
    self._tokens, self._start = 0, self._clock()

  def add(self, tokens: int) -> None:
    """Counts tokens of a step."""
    self._tokens += tokens

  def read(self) -> float:
    """Returns tokens per second since the last reading, and restarts."""
    rate = self._tokens / max(self._clock() - self._start, 1e-9)
    self.restart()
    return rate
