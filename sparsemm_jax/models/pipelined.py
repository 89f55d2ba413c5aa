"""The decoder's blocks spread over the mesh axis `stage`."""

from collections.abc import Sequence
import functools
import operator
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

# The statistics that can be summed up (depth weights differ in length).
STATS = ("router_stats", "attention_stats")


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
    slots: of a kind, on the device that has most of them.
    collections: of statistics that the blocks fill.
  """

  def __init__(
      self,
      config: config_lib.ModelConfig,
      stages: int,
      collections: tuple[str, ...] = (),
  ):
    """Plans a model's blocks for so many devices; collections: wanted."""
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
    self.collections = collections
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
    self.slots = {
        spec: (
            1
            + max(
                slot
                for slot, other in zip(self.slot, self.specs, strict=True)
                if other == spec
            )
        )
        for spec in sorted(set(self.specs))
    }

  def layers(self, chunk: int) -> range:
    """The blocks of a chunk."""
    return range(self.starts[chunk], self.starts[chunk + 1])

  def stack(self, per_layer: list[Any]) -> dict[block.BlockSpec, Any]:
    """Joins trees of blocks as spec -> tree of [P, slots, ...].

    A device with fewer blocks of a kind than others has zeros behind them.
    """
    join = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
    result = {}
    for spec, slots in self.slots.items():
      places = {
          (self.device[layer], self.slot[layer]): per_layer[layer]
          for layer, other in enumerate(self.specs)
          if other == spec
      }
      none = jax.tree.map(jnp.zeros_like, next(iter(places.values())))
      result[spec] = join([
          join([places.get((device, slot), none) for slot in range(slots)])
          for device in range(self.schedule.stages)
      ])
    return result

  def unstack(self, stacks: dict[block.BlockSpec, Any]) -> list[Any]:
    """The inverse of `stack`."""
    return [
        jax.tree.map(operator.itemgetter((device, slot)), stacks[spec])
        for spec, device, slot in zip(
            self.specs, self.device, self.slot, strict=True
        )
    ]


def run_blocks(
    config: config_lib.ModelConfig,
    variables: Any,
    x: Float[Array, "b t d"],
    layout: layout_lib.Layout,
    collections: Sequence[str] = (),
) -> tuple[Float[Array, "b t d"], Any]:
  """Computes what the decoder computes before its final norm.

  Row r of the batch is in micro-batch r mod M, as in gradient accumulation.

  Args:
    config: the model's; config.pipeline says how to cut it.
    variables: of the Decoder, unboxed.
    x: [B, T, D] embeddings, B a multiple of M.
    layout: of their tokens.
    collections: statistics to return, of STATS. Integers are sums over the
      micro-batches, the largest logits their maximum, losses their mean.

  Returns:
    [B, T, D], and the collections as the blocks would fill them.

  Raises:
    ConfigError: the blocks or the rows cannot be cut so.
  """
  plan = Plan(config, stages(), tuple(c for c in STATS if c in collections))
  micro_batches = plan.schedule.micro_batches
  if x.shape[0] % micro_batches:
    raise config_lib.ConfigError(
        f"{x.shape[0]} rows do not divide into"
        f" PipelineConfig.micro_batches={micro_batches}"
    )
  split = lambda x: jnp.swapaxes(
      x.reshape(-1, micro_batches, *x.shape[1:]), 0, 1
  )
  names = ("params", "router_state")
  per_layer = _by_layer(config, {n: variables.get(n, {}) for n in names})
  h, sums = jax.shard_map(
      functools.partial(_run_device, config, plan),
      in_specs=(jax.P("stage"), jax.P(), jax.P(), jax.P()),
      out_specs=(jax.P(), jax.P("stage")),
      axis_names={"stage"},
      check_vma=False,
  )(
      plan.stack(per_layer),
      variables["params"].get("output_res"),
      # The devices' gradients of x are summed in its dtype.
      split(x.astype(jnp.float32)),
      jax.tree.map(split, layout),
  )
  h = jnp.swapaxes(h, 0, 1).reshape(x.shape).astype(x.dtype)
  return h, _by_group(config, plan.unstack(_totals(sums, micro_batches)))


def _run_device(config, plan, stacks, output, x, layout):
  """What one device does; its stacks are [1, slots, ...], as its sums."""
  params = (jax.tree.map(lambda x: x[0], stacks), output)
  x = x.astype(config.dtype)
  micro = jnp.arange(x.shape[0], dtype=jnp.int32)
  first = lambda tree: jax.tree.map(operator.itemgetter(0), tree)
  every = config.attn_res_block_size
  source = (None, (x[0],)) if every else (x[0], None)

  def sums_of(spec):
    """The statistics of one block, once for each slot."""
    _, sums = _run_block(
        config, plan, spec, first(params[0][spec]), *source,
        first(layout), micro[0],
    )  # fmt: skip
    return jax.tree.map(lambda x: jnp.stack([x] * plan.slots[spec]), sums)

  shapes = {
      spec: jax.eval_shape(functools.partial(sums_of, spec))
      for spec in params[0]
  }
  stage = functools.partial(_run_chunk, config, plan, shapes)
  h, sums = pipeline.pipeline(stage, params, x, (layout, micro), plan.schedule)
  # Zero on all devices but the last. (XLA:CPU cannot add bf16 here.)
  h = jax.lax.psum(h.astype(jnp.float32), "stage")
  return h, jax.tree.map(lambda x: x[None], sums)


def _run_chunk(config, plan, shapes, chunk, params, bank, prefix, example):
  """Runs a chunk's blocks; see `pipeline.StageFn`."""
  stacks, output = params
  every = config.attn_res_block_size
  sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  for layer in plan.layers(chunk):
    if every and layer % every == 0:
      bank, prefix = (*bank, prefix), None
    spec, slot = plan.specs[layer], plan.slot[layer]
    variables = jax.tree.map(operator.itemgetter(slot), stacks[spec])
    prefix, new = _run_block(
        config, plan, spec, variables, prefix, bank if every else None, *example
    )
    put = functools.partial(_put, slot)
    sums[spec] = jax.tree.map(put, sums[spec], new)
  h = prefix
  if output is not None and chunk == plan.schedule.chunks - 1:
    mix = attn_res.DepthMix(config, parent=None)
    h = mix.apply({"params": output}, bank, prefix)
  return bank, h, sums


def _put(index, total, value):
  return total.at[index].set(value)


def _run_block(config, plan, spec, variables, prefix, bank, layout, micro):
  """Runs one block; returns its prefix and its statistics, to be summed."""
  module = block.rematted(config)(config, spec, parent=None)
  (prefix, _), seen = module.apply(
      variables, prefix, bank, layout, mutable=list(plan.collections)
  )

  def summand(path, value):
    if not _is_maximum(path):
      return value
    # A row for each micro-batch: their sum holds them all.
    rows = jnp.zeros((plan.schedule.micro_batches, *value.shape), value.dtype)
    return rows.at[micro].set(value)

  return prefix, jax.tree_util.tree_map_with_path(summand, seen)


def _totals(sums, micro_batches):
  """Makes maxima and means of what the pipeline has summed."""

  def total(path, value):  # [P, slots, ...]
    if _is_maximum(path):
      return jnp.max(value, axis=2)
    is_count = jnp.issubdtype(value.dtype, jnp.integer)
    return value if is_count else value / micro_batches

  return jax.tree_util.tree_map_with_path(total, sums)


def _is_maximum(path):
  return jax.tree_util.keystr(path[-1:]).count("max_logit") > 0


def _places(config):
  """Where every block is in the tree: (group, repeat, place in the pattern)."""
  for groups in block.block_groups(config):
    for group in groups:
      for repeat in range(group.repeats):
        for place in range(len(group.pattern)):
          yield group, repeat, f"layer_{place}"


def _by_layer(config, variables):
  """Splits collections into those of every block, whether scanned or not."""

  def part(tree, group, repeat, place):
    tree = tree.get(group.name, {})
    if group.repeats == 1:
      return tree
    return jax.tree.map(operator.itemgetter(repeat), tree.get(place, {}))

  return [
      {
          name: found
          for name, tree in variables.items()
          if (found := part(tree, *where))
      }
      for where in _places(config)
  ]


def _by_group(config, per_layer):
  """The inverse of `_by_layer`."""
  gathered = {}
  for layer, (group, _, place) in zip(per_layer, _places(config), strict=True):
    for name, tree in layer.items():
      groups = gathered.setdefault(name, {})
      if group.repeats == 1:
        groups[group.name] = tree
      else:
        groups.setdefault(group.name, {}).setdefault(place, []).append(tree)
  join = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
  return jax.tree.map(
      lambda x: join(x) if isinstance(x, list) else x,
      gathered,
      is_leaf=lambda x: isinstance(x, list),
  )
