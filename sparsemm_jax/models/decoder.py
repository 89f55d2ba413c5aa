"""The stack of Transformer blocks, with attention residuals over its depth."""

from typing import Any

import flax.linen as nn
from jaxtyping import Array
from jaxtyping import Float

from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import attn_res
from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.layers import norms
from sparsemm_jax.layers import stats
from sparsemm_jax.models import block
from sparsemm_jax.models import pipelined


class Decoder(nn.Module):
  """Embeddings to the hidden states that the head reads.

  Every attn_res_block_size Transformer blocks (not sub-layers) the running sum
  of outputs moves to the bank and a new sum starts; a last mix over the bank
  and the unfinished sum precedes the final norm. Within a residual block the
  bank is constant, so its layers scan with the prefix as the only carry; where
  that moves fewer bytes the bank is mixed for all of them before. On a mesh
  with stages the blocks run as a pipeline (see pipelined), without this.

  Source: Attention Residuals, section 3.2, arXiv:2603.15031.
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(
      self,
      x: Float[Array, "b t d"],
      layout: layout_lib.Layout,
      cache: dict[str, Any] | None = None,
  ) -> tuple[Float[Array, "b t d"], dict[str, Any] | None]:
    """[B, T, D] -> [B, T, D] and the cache after these tokens."""
    config = self.config
    in_stages = pipelined.stages() > 1 and cache is None
    if in_stages and not self.is_initializing():
      x, new_cache = self._run_stages(x, layout), None
    else:
      x, new_cache = self._run_blocks(x, layout, cache)
    x = norms.RMSNorm(config, config.d_model, "embed", name="final_norm")(x)
    return x, new_cache

  def _run_stages(self, x, layout):
    """As _run_blocks, the blocks spread over the mesh."""
    wanted = [c for c in pipelined.STATS if stats.wanted(self, c)]
    variables = nn.unbox(self.variables)
    x, seen = pipelined.run_blocks(self.config, variables, x, layout, wanted)
    for collection, tree in seen.items():
      for name, value in tree.items():
        self.put_variable(collection, name, value)
    return x

  def _run_blocks(self, x, layout, cache):
    """Runs everything before the final norm, on every device."""
    config = self.config
    residuals = config.attn_res_block_size is not None
    bank = () if residuals else None
    new_cache = {}
    for groups in block.block_groups(config):
      if residuals:
        bank, x = (*bank, x), None
      for group in groups:
        x, new_cache[group.name] = block.run_group(
            config, group, x, bank, layout,
            None if cache is None else cache[group.name],
        )  # fmt: skip
    if residuals:
      x = attn_res.DepthMix(config, name="output_res")(bank, x)
    return x, None if cache is None else new_cache
