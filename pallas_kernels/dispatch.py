"""Implementation names, their order of trial, and what the device is."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TypeVar

import jax

Implementation = str | Sequence[str] | None

_NAMES = {
    "reference",
    "chunked",
    "xla",
    "mosaic_gpu",
    "mosaic_tpu",
    "ragged_dot",
}
_PLATFORM_OF = {"mosaic_gpu": "gpu", "mosaic_tpu": "tpu", "ragged_dot": "tpu"}

T = TypeVar("T")


def device_platform() -> str:
  """Returns "cpu", "gpu" or "tpu": where the traced program will run.

  An abstract mesh with an abstract device (ahead-of-time compilation) wins
  over the default device, which wins over the default backend.
  """
  abstract = jax.sharding.get_abstract_mesh().abstract_device
  if abstract is not None:
    return abstract.platform
  default = jax.config.jax_default_device
  if default is None:
    return jax.default_backend()
  return default if isinstance(default, str) else default.platform


def check_hopper() -> None:
  """Raises NotImplementedError unless the program will run on a Hopper GPU."""
  if device_platform() == "gpu":
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    kind = (abstract or jax.devices("gpu")[0]).device_kind
    if any(name in kind for name in ("H100", "H200", "H800", "H20")):
      return
  raise NotImplementedError("the device is no Hopper GPU")


def check_tpu() -> None:
  """Raises NotImplementedError unless the program will run on a TPU."""
  if device_platform() != "tpu":
    raise NotImplementedError("the device is no TPU")


def run(
    op: str,
    candidates: Mapping[str, Callable[[], T]],
    implementation: Implementation = None,
) -> T:
  """Calls the first candidate that serves.

  Args:
    op: the operation's name, for messages.
    candidates: implementation name -> thunk, best first; a thunk raises
      NotImplementedError, saying why, where it cannot serve.
    implementation: a name (must serve), a sequence of names (tried in order),
      or None (every candidate made for this device, best first).

  Returns:
    What the first candidate that serves returns.

  Raises:
    ValueError: a name that is no implementation of any operation.
    NotImplementedError: nothing that was asked for can serve. No kernel serves
      where XLA partitions the program over a mesh: it cannot cut a kernel and
      would run the whole of it on every device. In `jax.shard_map` it need not.
  """
  if implementation is None:
    platform = device_platform()
    names = [
        name
        for name in candidates
        if _PLATFORM_OF.get(name, platform) == platform
    ]
  else:
    names = (
        [implementation]
        if isinstance(implementation, str)
        else list(implementation)
    )
  unknown = [name for name in names if name not in _NAMES]
  if unknown or not names:
    raise ValueError(
        f"{op}: implementation {implementation!r} is not one of"
        f" {sorted(candidates)}"
    )
  refusals = []
  for name in names:
    if name not in candidates:
      refusals.append(f"{name}: {op} has no such implementation")
      continue
    try:
      if name in _PLATFORM_OF:
        _check_undivided()
      return candidates[name]()
    except NotImplementedError as error:
      refusals.append(f"{name}: {error}")
  raise NotImplementedError(f"{op}: " + "; ".join(refusals))


def _check_undivided():
  mesh = jax.sharding.get_abstract_mesh()
  spread = [axis for axis in mesh.auto_axes if mesh.shape[axis] > 1]
  if spread:
    raise NotImplementedError(f"mesh axes {spread} want a shard_map around it")
