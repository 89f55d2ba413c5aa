"""Whether interpreted Hopper kernels raced for memory."""

from collections.abc import Iterator
import contextlib
from unittest import mock

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks


@contextlib.contextmanager
def none_found() -> Iterator[None]:
  """Fails if a kernel that runs inside, under detect_races, has a race.

  The interpreter prints races, and remembers those of its last kernel only.
  """
  seen = []
  make = gpu_callbacks.GPURaceDetectionState

  def remember(*args, **kwargs):
    seen.append(make(*args, **kwargs))
    return seen[-1]

  with mock.patch.object(gpu_callbacks, "GPURaceDetectionState", remember):
    yield
    jax.effects_barrier()
  if not seen:
    raise AssertionError("no Hopper kernel was interpreted")
  if any(state.races_found for state in seen):
    raise AssertionError("two threads race for memory (see stdout)")
