"""The decoder's blocks spread over the mesh axis `stage`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float

from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import attn_res
from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.models import block
from sparsemm_jax.parallel import pipeline


def stages() -> int:
  """Devices along the axis `stage` of the mesh in use, 1 without one."""
  return jax.sharding.get_abstract_mesh().shape.get("stage", 1)


class Plan:
  """Which Transformer blocks run where.

  Chunk c has the blocks starts[c] ... starts[c + 1] - 1 and runs on device
  c mod P. A device's blocks of one kind (attention and MLP) are numbered in
  order of depth: slots.

  Attributes:
    schedule: of the pipeline.
    starts: [C + 1] block each chunk starts with.
    specs: of every block.
    device: that every block is on.
    slot: that every block has there.
  """

  def __init__(self, config: config_lib.ModelConfig, stages: int):
    """Plans a model's blocks for so many devices."""
    chunks = stages * config.pipeline.virtual_stages
    sizes = config.pipeline.layers_per_chunk
    if sizes is None:  # as even as can be, the longer chunks first
      fewest, more = divmod(config.num_layers, chunks)
      sizes = (fewest + 1,) * more + (fewest,) * (chunks - more)
    if len(sizes) != chunks or sum(sizes) != config.num_layers:
      raise config_lib.ConfigError(
          f"PipelineConfig.layers_per_chunk={sizes} does not cut"
          f" {config.num_layers} blocks into {chunks} chunks"
      )
    self.starts = [sum(sizes[:c]) for c in range(chunks + 1)]
    every = config.attn_res_block_size
    self.schedule = pipeline.Schedule(
        stages,
        config.pipeline.virtual_stages,
        config.pipeline.micro_batches or stages,
        tuple(-(-t // every) if every else 0 for t in self.starts[:-1]),
    )
    self.specs, self.device, self.slot = [], [], []
    for chunk, size in enumerate(sizes):
      for _ in range(size):
        layer = len(self.specs)
        spec = block.BlockSpec(config.is_mla(layer), config.is_moe(layer))
        device = chunk % stages
        place = (device, spec)
        before = zip(self.device, self.specs, strict=True)
        self.slot.append(sum(other == place for other in before))
        self.specs.append(spec)
        self.device.append(device)

  def layers(self, chunk: int) -> range:
    """The blocks of a chunk."""
    return range(self.starts[chunk], self.starts[chunk + 1])

  def stack(self, per_layer: list[Any]) -> dict[block.BlockSpec, Any]:
    """Joins trees of blocks as spec -> tree of [P, slots, ...].

    A device with fewer blocks of a kind than others has zeros behind them.
    """
    result = {}
    for spec in sorted(set(self.specs)):
      layers = [i for i, other in enumerate(self.specs) if other == spec]
      places = {(self.device[i], self.slot[i]): i for i in layers}
      slots = max(slot for _, slot in places) + 1
      none = jax.tree.map(jnp.zeros_like, per_layer[layers[0]])
      rows = []
      for device in range(self.schedule.stages):
        trees = [
            per_layer[places[device, slot]]
            if (device, slot) in places
            else none
            for slot in range(slots)
        ]
        rows.append(jax.tree.map(lambda *x: jnp.stack(x), *trees))
      result[spec] = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    return result


def run_blocks(
    config: config_lib.ModelConfig,
    variables: Any,
    x: Float[Array, "b t d"],
    layout: layout_lib.Layout,
) -> Float[Array, "b t d"]:
  """Computes what the decoder computes before its final norm.

  Row r of the batch is in micro-batch r mod M, as in gradient accumulation.

  Args:
    config: the model's; config.pipeline says how to cut it.
    variables: of the Decoder, unboxed.
    x: [B, T, D] embeddings, B a multiple of M.
    layout: of their tokens.

  Returns:
    [B, T, D].

  Raises:
    ConfigError: the blocks or the rows cannot be cut so.
  """
  plan = Plan(config, stages())
  micro_batches = plan.schedule.micro_batches
  if x.shape[0] % micro_batches:
    raise config_lib.ConfigError(
        f"{x.shape[0]} rows do not divide into"
        f" PipelineConfig.micro_batches={micro_batches}"
    )
  split = lambda x: jnp.swapaxes(
      x.reshape(-1, micro_batches, *x.shape[1:]), 0, 1
  )
  per_layer = [
      {name: tree for name, tree in layer.items() if tree}
      for layer in _by_layer(config, variables)
  ]
  output = variables["params"].get("output_res")
  local = functools.partial(_run_local, config, plan)
  out = jax.shard_map(
      local,
      in_specs=(jax.P("stage"), jax.P(), jax.P(), jax.P()),
      out_specs=jax.P(),
      axis_names={"stage"},
      check_vma=False,
  )(plan.stack(per_layer), output, split(x), jax.tree.map(split, layout))
  return jnp.swapaxes(out, 0, 1).reshape(x.shape)


def _run_local(config, plan, stacked, output, x, layout):
  """What one device does; its stacks are [1, slots, ...]."""
  params = (jax.tree.map(lambda x: x[0], stacked), output)
  stage = functools.partial(_run_chunk, config, plan)
  h, _ = pipeline.pipeline(stage, params, x, layout, plan.schedule)
  return jax.lax.psum(h, "stage")  # zero on all devices but the last


def _run_chunk(config, plan, chunk, params, bank, prefix, layout):
  """Runs a chunk's blocks; see `pipeline.StageFn`."""
  stacks, output = params
  every = config.attn_res_block_size
  for layer in plan.layers(chunk):
    if every and layer % every == 0:
      bank, prefix = (*bank, prefix), None
    spec = plan.specs[layer]
    variables = jax.tree.map(lambda x: x[plan.slot[layer]], stacks[spec])
    module = block.rematted(config)(config, spec, parent=None)
    prefix, _ = module.apply(variables, prefix, bank if every else None, layout)
  h = prefix
  if output is not None and chunk == plan.schedule.chunks - 1:
    mix = attn_res.DepthMix(config, parent=None)
    h = mix.apply({"params": output}, bank, prefix)
  return bank, h, {}


def _by_layer(config, variables):
  """The collections of every Transformer block, whether scanned or not."""
  result = []
  for groups in block.block_groups(config):
    for group in groups:
      tree = {
          name: variables.get(name, {}).get(group.name, {})
          for name in ("params", "router_state")
      }
      if group.repeats == 1:
        result.append(tree)
        continue
      for repeat in range(group.repeats):
        for index in range(len(group.pattern)):
          result.append({
              name: jax.tree.map(
                  lambda x: x[repeat], part.get(f"layer_{index}", {})
              )
              for name, part in tree.items()
          })
  return result
