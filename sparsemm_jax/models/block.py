"""One Transformer block, and groups of like blocks scanned together."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

import flax.linen as nn
import jax
from jax import ad_checkpoint
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float

from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import attn_res
from sparsemm_jax.layers import kda
from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.layers import mla
from sparsemm_jax.layers import moe
from sparsemm_jax.layers import norms
from sparsemm_jax.layers import stats

_BLOCK_INPUT = "block_input"
ACTIVATION = ("act_batch", "act_length", "act_embed")


class BlockSpec(NamedTuple):
  """What a Transformer block consists of."""

  is_mla: bool  # False: KDA
  is_moe: bool  # False: dense MLP


@dataclasses.dataclass(frozen=True)
class BlockGroup:
  """Consecutive blocks: a pattern of specs, `repeats` times over."""

  first_layer: int  # from 0
  pattern: tuple[BlockSpec, ...]
  repeats: int

  @property
  def num_layers(self) -> int:
    """How many blocks."""
    return len(self.pattern) * self.repeats

  @property
  def name(self) -> str:
    """The group's name in the parameter tree."""
    prefix = "layer" if self.repeats == 1 else "layers"
    return f"{prefix}_{self.first_layer}"


def block_groups(config: config_lib.ModelConfig) -> list[list[BlockGroup]]:
  """Cuts the model into attention-residual blocks and those into groups.

  A group with one repeat has one block in its pattern and is not scanned; all
  are such when `config.scan_layers` is False.
  """
  specs = [
      BlockSpec(config.is_mla(layer), config.is_moe(layer))
      for layer in range(config.num_layers)
  ]
  size = config.attn_res_block_size or config.num_layers
  result = []
  for start in range(0, config.num_layers, size):
    end = min(start + size, config.num_layers)
    groups = []
    while start < end:
      period, repeats = 1, 1
      if config.scan_layers:
        period, repeats = _repeating(specs[start:end], config.mla_every)
      pattern = tuple(specs[start : start + period])
      groups.append(BlockGroup(start, pattern, repeats))
      start += period * repeats
    result.append(groups)
  return result


def _repeating(specs, longest):
  """The period and repeats that cover most of the list's beginning."""
  best = (1, 1)
  for period in range(1, longest + 1):
    repeats = 1
    while specs[repeats * period : (repeats + 1) * period] == specs[:period]:
      repeats += 1
    if repeats > 1 and period * repeats > best[0] * best[1]:
      best = (period, repeats)
  return best


class TransformerBlock(nn.Module):
  """Attention and MLP, each on the norm of what the depth mix gives it.

  With attention residuals the input of a sub-layer is a mix of the bank and
  the prefix (see attn_res.DepthMix) and its output joins the prefix; without
  (bank None) the prefix is the ordinary residual stream.

  Attributes:
    config: the model's.
    spec: which attention and which MLP.
  """

  config: config_lib.ModelConfig
  spec: BlockSpec

  @nn.compact
  def __call__(
      self,
      prefix: Float[Array, "b t d"] | None,
      bank: Sequence[Float[Array, "b t d"]] | None,
      layout: layout_lib.Layout,
      first: Bool[Array, ""] | None = None,
      cache: Any = None,
      partials: Mapping[str, attn_res.PartialMix] | None = None,
  ) -> tuple[Float[Array, "b t d"], Any]:
    """Runs the block.

    Args:
      prefix: [B, T, D] sum of this residual block's outputs so far, or None.
      bank: finished residual blocks, or None for the ordinary stream.
      layout: of the tokens.
      first: see DepthMix, for the mix before attention.
      cache: of this block's attention, or None.
      partials: name of a DepthMix -> its mix of the bank where that is known.

    Returns:
      The new prefix and the cache after these tokens.
    """
    config = self.config

    def normed_input(name, prefix, first):
      norm = norms.RMSNorm(config, config.d_model, "embed", name=f"{name}_norm")
      if bank is None:
        return norm(prefix)
      mix = attn_res.DepthMix(config, name=f"{name}_res")
      partial = None if partials is None else partials[mix.name]
      return mix(bank, prefix, first, norm.scale, partial)

    attention = mla.GatedMLA if self.spec.is_mla else kda.KimiDeltaAttention
    x = normed_input("attn", prefix, first)
    x, cache = attention(config, name="attn")(x, layout, cache)
    prefix = x if prefix is None else prefix + x

    x = normed_input("mlp", prefix, None)
    if self.spec.is_moe:
      x = moe.LatentMoE(config, name="moe")(x, layout)
    else:
      x = moe.DenseMLP(config, config.dense_hidden_dim, name="mlp")(x)
    return nn.with_logical_constraint(prefix + x, ACTIVATION), cache


class ScannedBlocks(nn.Module):
  """The body of a scan: one pass over a group's pattern."""

  config: config_lib.ModelConfig
  pattern: tuple[BlockSpec, ...]

  @nn.compact
  def __call__(self, prefix, bank, layout, first, cache, partials):
    """Carries the prefix through the pattern; see TransformerBlock."""
    new_cache = {}
    for index, spec in enumerate(self.pattern):
      name = f"layer_{index}"
      prefix = ad_checkpoint.checkpoint_name(prefix, _BLOCK_INPUT)
      prefix, new_cache[name] = rematted(self.config, in_scan=True)(
          self.config, spec, name=name
      )(
          prefix, bank, layout, first if index == 0 else None,
          None if cache is None else cache[name],
          None if partials is None else partials[name],
      )  # fmt: skip
    return prefix, None if cache is None else new_cache


def run_group(
    config: config_lib.ModelConfig,
    group: BlockGroup,
    prefix: Float[Array, "b t d"] | None,
    bank: Sequence[Float[Array, "b t d"]] | None,
    layout: layout_lib.Layout,
    cache: Any,
) -> tuple[Float[Array, "b t d"], Any]:
  """Runs a group's blocks; call it inside a compact module.

  Args:
    config: the model's.
    group: which blocks.
    prefix: [B, T, D], or None at the start of a residual block.
    bank: finished residual blocks, or None for the ordinary stream.
    layout: of the tokens.
    cache: of this group, stacked over repeats if there are several; or None.

  Returns:
    The new prefix and the cache after these tokens.
  """
  if group.repeats == 1:
    (spec,) = group.pattern
    block = rematted(config)(config, spec, name=group.name)
    return block(prefix, bank, layout, None, cache)
  first = None
  if prefix is None:
    # A carry needs a value; `first` keeps it out of the first mix.
    prefix = jnp.zeros_like(bank[0])
    first = jnp.arange(group.repeats) == 0
  scan = nn.scan(
      ScannedBlocks,
      variable_axes=dict.fromkeys(
          ("params", "router_state", *stats.COLLECTIONS), 0
      ),
      split_rngs={"params": True},
      in_axes=(nn.broadcast, nn.broadcast, 0, 0, 0),
      length=group.repeats,
      metadata_params={nn.PARTITION_NAME: "layers"},
  )
  blocks = scan(config, group.pattern, name=group.name)
  remat = config.remat != "none"
  if cache is not None or blocks.is_initializing():
    return blocks(prefix, bank, layout, first, cache, None)
  two_phases = bank is not None and attn_res.use_two_phases(
      len(bank), group.num_layers, remat=remat
  )

  def run(blocks, prefix, bank):
    partials = _partial_mixes(config, blocks, bank) if two_phases else None
    return blocks(prefix, bank, layout, first, None, partials)

  if remat:
    # What all blocks share is not kept: phase one is made again, and the
    # attention's masks and an fp32 bank, which JAX would move out of the loop
    # into memory, stay in it.
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(_BLOCK_INPUT)
    if inner := _policy(config):
      policy = policies.save_from_both_policies(policy, inner)
    run = nn.remat(run, policy=policy)
  return run(blocks, prefix, bank)


def _partial_mixes(config, blocks, bank):
  """Phase one of every mix of scanned blocks: layer -> mix -> PartialMix."""
  params = nn.unbox(blocks.variables["params"])
  return {
      layer: {
          name: attn_res.partial_mix(config, tree[name], bank)
          for name in ("attn_res", "mlp_res")
      }
      for layer, tree in params.items()
  }


def rematted(
    config: config_lib.ModelConfig, *, in_scan: bool = False
) -> type[TransformerBlock]:
  """TransformerBlock under the config's rematerialisation policy."""
  if config.remat == "none":
    return TransformerBlock
  return nn.remat(
      TransformerBlock, policy=_policy(config), prevent_cse=not in_scan
  )


def _policy(config):
  if config.remat == "dots":
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  return None
