"""The mesh of devices a run is spread over."""

from collections.abc import Sequence
import dataclasses
import math

import jax
from jax import sharding

from sparsemm_jax import config as config_lib

# Rows of a batch are spread over these axes together.
ROW_AXES = ("data", "fsdp", "expert")
AXES = tuple(field.name for field in dataclasses.fields(config_lib.MeshConfig))


def make_mesh(
    config: config_lib.MeshConfig,
    devices: Sequence[jax.Device] | None = None,
) -> sharding.Mesh:
  """Arranges devices along the axes data, fsdp, expert, context, tensor, stage.

  Args:
    config: devices along each axis; an axis of -1 takes what is left.
    devices: to be arranged; None: all of them.

  Raises:
    ConfigError: the product of the axes is not the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = dataclasses.asdict(config)
  fixed = math.prod(size for size in sizes.values() if size != -1)
  free = [axis for axis, size in sizes.items() if size == -1]
  if free and len(devices) % fixed == 0:
    sizes[free[0]] = len(devices) // fixed
  if math.prod(sizes.values()) != len(devices):
    written = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    raise config_lib.ConfigError(
        f"MeshConfig: {written} does not fit {len(devices)} devices"
    )
  return jax.make_mesh(
      tuple(sizes.values()),
      AXES,
      # Linen's logical constraints fail on the default, Explicit axes.
      axis_types=(sharding.AxisType.Auto,) * len(AXES),
      devices=devices,
  )


def check_rows(
    mesh: sharding.Mesh, stages: Sequence[config_lib.StageConfig]
) -> None:
  """Checks that each micro-batch of each stage divides over the mesh.

  Raises:
    ConfigError: a stage whose rows do not divide over ROW_AXES; it is named.
  """
  shards = math.prod(mesh.shape[axis] for axis in ROW_AXES)
  for index, stage in enumerate(stages):
    rows = stage.batch_size // stage.micro_batches
    if rows % shards:
      raise config_lib.ConfigError(
          f"train.stages[{index}]: {rows} rows (batch_size={stage.batch_size} /"
          f" micro_batches={stage.micro_batches}) do not divide over {shards}"
          f" devices along {', '.join(ROW_AXES)}"
      )
