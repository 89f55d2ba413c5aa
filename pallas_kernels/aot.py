"""Compile for an H200 or a TPU on a machine that has neither.

The compilers come as wheels (the `aot` extra of the project): libtpu for TPUs;
the cuda13 plugin with pjrt, nvcc (ptxas) and nvjitlink for the H200. They
produce final machine code, so registers, spills, shared memory, VMEM and
temporary bytes of a kernel are known, and can be tested, without hardware.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import sys
import tempfile
import warnings

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice
from jax.sharding import AbstractMesh
from jax.sharding import SingleDeviceSharding

_H200 = pathlib.Path(__file__).with_name("h200.txtpb")
_H200_DEVICE = AbstractDevice(
    device_kind="NVIDIA H200", num_cores=132, platform="gpu"
)
# Device kind and cores per device, as jax names them.
_TPU_KINDS = {
    "v4": ("TPU v4", 1),
    "v5e": ("TPU v5 lite", 1),
    "v5p": ("TPU v5", 1),
    "v6e": ("TPU v6 lite", 1),
    "tpu7x": ("TPU7x", 1),
}
_TPU_RANK = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}
# Machine that is not a TPU host: no metadata server to ask, one of several
# processes that load the library.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
_H200_WHEELS = ("jax_plugins.xla_cuda13", "nvidia.cu13")
_TPU_WHEELS = ("libtpu",)


@dataclasses.dataclass(frozen=True)
class KernelResources:
  """What ptxas gave one Hopper kernel.

  Attributes:
    name: the kernel's name.
    registers: registers per thread at launch.
    spill_bytes: bytes per thread stored to local memory because registers ran
      out; stores and loads are counted apart, this is the larger.
    serialized: whether ptxas had to serialise the kernel's wgmma or put
      waits between them (C7510 to C7517; C7519 and others do no harm).
  """

  name: str
  registers: int
  spill_bytes: int
  serialized: bool


def unavailable(target: str) -> str | None:
  """Returns why `target` cannot be compiled for here, or None if it can."""
  wheels = _H200_WHEELS if target == "h200" else _TPU_WHEELS
  for wheel in wheels:
    try:
      found = importlib.util.find_spec(wheel) is not None
    except ModuleNotFoundError:
      found = False
    if not found:
      return f"{target}: the package {wheel} is not installed (extra: aot)"
  return None


@functools.cache
def devices(target: str) -> tuple:
  """Returns the topology's devices, to build a mesh or a sharding from.

  Args:
    target: "h200" or a TPU generation ("v4", "v5e", "v5p", "v6e", "tpu7x"),
      which is one chip, or a slice such as "v5p:4x4x4".

  Raises:
    ValueError: a target that has no compiler.
    RuntimeError: the compiler's wheel is not installed.
  """
  generation, shape = _parse(target)
  if reason := unavailable(target):
    raise RuntimeError(reason)
  if target == "h200":
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=_H200.read_text(),
        topology="1x1x1",
    )
    return tuple(topology.devices)
  for name, value in _TPU_ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  rank = _TPU_RANK[generation]
  options = {}
  if shape is None:
    shape = "x".join(["1"] * rank)
    options["chips_per_host_bounds"] = [1, 1, 1]
  topology = topologies.get_topology_desc(
      platform="tpu", topology_name=f"{generation}:{shape}", **options
  )
  return tuple(topology.devices)


@contextlib.contextmanager
def abstract_device(target: str) -> Iterator[None]:
  """Makes code that asks what the device is see `target`."""
  generation, _ = _parse(target)
  if generation == "h200":
    device = _H200_DEVICE
  else:
    kind, num_cores = _TPU_KINDS[generation]
    device = AbstractDevice(
        device_kind=kind, num_cores=num_cores, platform="tpu"
    )
  mesh = AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    yield


def compile_for(fn: Callable, *shape_structs, target: str):
  """Compiles `fn` to machine code of a device that need not be here.

  Args:
    fn: a traceable function of arrays, jitted or not.
    *shape_structs: its arguments as pytrees of jax.ShapeDtypeStruct. Those
      without a sharding are put on the target's first device; for several
      devices build shardings from `devices(target)`.
    target: see `devices`.

  Returns:
    The compiled function (jax.stages.Compiled): memory_analysis(), as_text().

  Raises:
    ValueError: a target that has no compiler.
    RuntimeError: the compiler's wheel is not installed.
  """
  on_first = SingleDeviceSharding(devices(target)[0])

  def place(struct):
    if struct.sharding is not None:
      return struct
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=on_first)

  placed = jax.tree.map(place, shape_structs)
  platform = "cuda" if target == "h200" else "tpu"
  jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
  with abstract_device(target):
    lowered = jitted.trace(*placed).lower(lowering_platforms=(platform,))
  with warnings.catch_warnings():
    # JAX's persistent cache can write such a program, not read it: once more.
    warnings.filterwarnings("ignore", "Error reading persistent compilation")
    return lowered.compile()


def kernel_resources(
    fn: Callable, *shape_structs
) -> tuple[jax.stages.Compiled, list[KernelResources]]:
  """Compiles `fn` for the H200 and reads each Mosaic kernel's ptxas report.

  Args:
    fn: as in `compile_for`.
    *shape_structs: as in `compile_for`.

  Returns:
    The compiled function and one KernelResources per Mosaic GPU kernel. A
    kernel that this process compiled before is cached and not reported again.
  """
  with _captured_output() as output, _environment("MOSAIC_GPU_DUMP_PTXAS", "1"):
    compiled = compile_for(fn, *shape_structs, target="h200")
  return compiled, _parse_ptxas(output())


def _parse(target: str) -> tuple[str, str | None]:
  if target == "h200":
    return target, None
  generation, _, shape = target.partition(":")
  if generation not in _TPU_KINDS:
    raise ValueError(
        f"target {target!r} is not 'h200' or one of {sorted(_TPU_KINDS)},"
        " with an optional slice such as 'v5p:4x4x4'"
    )
  return generation, shape or None


def _parse_ptxas(text: str) -> list[KernelResources]:
  kernels = []
  for block in re.split(r"Compiling entry function '", text)[1:]:
    name = block.split("'", 1)[0]
    registers = re.search(r"Used (\d+) registers", block)
    # The first only: the next kernel's warnings come before its own name.
    spills = re.search(
        r"(\d+) bytes spill stores, (\d+) bytes spill loads", block
    )
    if registers:
      kernels.append(
          KernelResources(
              name=name,
              registers=int(registers[1]),
              spill_bytes=max(map(int, spills.groups())) if spills else 0,
              serialized=re.search(rf"C751[0-7].*'{name}'", text) is not None,
          )
      )
  return kernels


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
  before = os.environ.get(name)
  os.environ[name] = value
  try:
    yield
  finally:
    if before is None:
      del os.environ[name]
    else:
      os.environ[name] = before


@contextlib.contextmanager
def _captured_output() -> Iterator[Callable[[], str]]:
  """Catches what compiled code prints to the process's own descriptors."""
  sys.stdout.flush()
  sys.stderr.flush()
  kept = os.dup(1), os.dup(2)
  with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    text = []
    try:
      yield lambda: text[0]
    finally:
      sys.stdout.flush()
      sys.stderr.flush()
      os.dup2(kept[0], 1)
      os.dup2(kept[1], 2)
      os.close(kept[0])
      os.close(kept[1])
      file.seek(0)
      text.append(file.read().decode(errors="replace"))
