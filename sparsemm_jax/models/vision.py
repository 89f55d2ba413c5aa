"""Native-resolution vision tower: packed patches in, image tokens out."""

from collections.abc import Mapping
import functools
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import attention
from sparsemm_jax.layers import embeddings
from sparsemm_jax.layers import linear
from sparsemm_jax.layers import norms


class Images(NamedTuple):
  """The patches of each row's images, packed as a row's documents are.

  Patches of an image are ordered so that each run of merge_size^2 becomes one
  token.
  """

  patches: Float[Array, "b p c"]  # [-1, 1], (y, x, channel) inside a patch
  positions: Int[Array, "b p 2"]  # (y, x) in patches, inside the image
  grids: Int[Array, "b p 2"]  # (height, width) of the image in patches
  segment_ids: Int[Array, "b p"]  # image number from 1; 0 padding

  @classmethod
  def from_batch(cls, batch: Mapping[str, Array]) -> "Images | None":
    """Reads a training batch; None if it has no room for images."""
    if "patches" not in batch:
      return None
    return cls(
        batch["patches"], batch["patch_positions"], batch["patch_grids"],
        batch["patch_segment_ids"],
    )  # fmt: skip

  @classmethod
  def blank(cls, rows: int, config: config_lib.VisionConfig) -> "Images":
    """One token's worth of padding per row, for initialisation."""
    count = config.patches_per_token
    return cls(
        jnp.zeros((rows, count, config.patch_dim)),
        jnp.zeros((rows, count, 2), jnp.int32),
        jnp.zeros((rows, count, 2), jnp.int32),
        jnp.zeros((rows, count), jnp.int32),
    )


class VisionEncoder(nn.Module):
  """Tower, merge of merge_size x merge_size patches, projector.

  Source: Kimi K3 report, section 2.4, arXiv:2607.24653.
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, images: Images) -> Float[Array, "b m d"]:
    """[B, P] patches -> [B, P / merge_size^2, D] image tokens."""
    config, vision = self.config, self.config.vision
    # Attention weighs padding by zero, which a NaN would survive.
    is_image = images.segment_ids[..., None] != 0
    patches = jnp.where(is_image, images.patches, 0.0)
    x = linear.Linear(
        config, (vision.patch_dim,), (vision.d_model,),
        ("patch", "vision_embed"), name="patch_embed",
    )(patches)  # fmt: skip
    x = x + PositionTable(config, name="position_table")(images)
    angles = rope_angles(images.positions, vision.head_dim, vision.rope_theta)
    x = self._blocks(x, angles, images.segment_ids)
    x = norms.RMSNorm(config, vision.d_model, "vision_embed", name="norm")(x)
    x = x.reshape(x.shape[0], -1, vision.patches_per_token * vision.d_model)
    return Projector(config, name="projector")(x)

  def _blocks(self, x, angles, segment_ids):
    config = self.config
    block = VisionBlock
    if config.remat != "none":
      block = nn.remat(block, prevent_cse=not config.scan_layers)
    if not config.scan_layers:
      for layer in range(config.vision.num_layers):
        x, _ = block(config, name=f"layer_{layer}")(x, angles, segment_ids)
      return x
    scan = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(nn.broadcast, nn.broadcast),
        length=config.vision.num_layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    x, _ = scan(config, name="layers")(x, angles, segment_ids)
    return x


class PositionTable(nn.Module):
  """A learned S x S table, stretched bilinearly over each image's grid."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, images: Images) -> Float[Array, "b p d"]:
    """[B, P, d_model] rows, one per patch."""
    vision = self.config.vision
    size = vision.position_table_size
    table = self.param(
        "embedding",
        nn.with_logical_partitioning(
            nn.initializers.normal(self.config.init_std),
            ("position_y", "position_x", "vision_embed"),
        ),
        (size, size, vision.d_model),
        jnp.dtype(self.config.param_dtype),
    )
    grids = jnp.maximum(images.grids, 1).astype(jnp.float32)
    # Centres of patches at centres of table cells: a full-size grid is exact.
    place = (images.positions.astype(jnp.float32) + 0.5) * size / grids - 0.5
    place = jnp.clip(place, 0, size - 1)
    low = jnp.floor(place).astype(jnp.int32)
    high = jnp.minimum(low + 1, size - 1)
    share = place - low
    rows = 0.0
    for y, wy in (low, 1 - share), (high, share):
      for x, wx in (low, 1 - share), (high, share):
        corner = table[y[..., 0], x[..., 1]].astype(jnp.float32)
        rows += corner * (wy[..., 0] * wx[..., 1])[..., None]
    return rows.astype(self.config.dtype)


class VisionBlock(nn.Module):
  """Pre-norm attention inside each image, then a tanh-GELU MLP."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(
      self,
      x: Float[Array, "b p d"],
      angles: Float[Array, "b p f"],
      segment_ids: Int[Array, "b p"],
  ) -> tuple[Float[Array, "b p d"], None]:
    """[B, P, d_model] -> the same, and None for nn.scan."""
    config, vision = self.config, self.config.vision
    project = functools.partial(linear.Linear, config)
    norm = functools.partial(
        norms.RMSNorm, config, vision.d_model, "vision_embed"
    )
    width, inner = (vision.d_model,), (vision.mlp_hidden_dim,)
    heads = (vision.num_heads, vision.head_dim)
    per_head = ("heads", "head_dim")

    y = norm(name="attn_norm")(x)
    q, k, v = (
        project(width, heads, ("vision_embed", *per_head), name=name)(y)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    y, _ = attention.attention(
        embeddings.rotate(q, angles), embeddings.rotate(k, angles), v,
        segment_ids, scale=vision.head_dim**-0.5, causal=False,
    )  # fmt: skip
    x = x + project(heads, width, (*per_head, "vision_embed"), name="o_proj")(y)
    y = norm(name="mlp_norm")(x)
    names = ("vision_embed", "vision_mlp")
    y = project(width, inner, names, name="up_proj")(y)
    y = nn.gelu(y.astype(jnp.float32), approximate=True)
    return x + project(inner, width, names[::-1], name="down_proj")(y), None


class Projector(nn.Module):
  """RMSNorm(W_2 erf-GELU(W_1 x)) from merged patches to the decoder's width."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x: Float[Array, "b m c"]) -> Float[Array, "b m d"]:
    """[B, M, merge_size^2 * d_model] -> [B, M, D]."""
    config = self.config
    merged, width = x.shape[-1:], (config.d_model,)
    project = functools.partial(
        linear.Linear, config,
        kernel_init=nn.initializers.variance_scaling(
            2.0, "fan_in", "truncated_normal"
        ),
    )  # fmt: skip
    x = project(merged, merged, ("vision_embed", "vision_mlp"), name="up_proj")(
        x
    )
    x = nn.gelu(x.astype(jnp.float32), approximate=False)
    x = project(merged, width, ("vision_mlp", "embed"), name="down_proj")(x)
    return norms.RMSNorm(config, config.d_model, "embed", name="norm")(x)


def rope_angles(
    positions: Int[Array, "b p 2"], head_dim: int, theta: float
) -> Float[Array, "b p f"]:
  """Angles [B, P, head_dim / 2]: pair 2i turns with x, pair 2i + 1 with y.

  Both turn by theta^(-4i / head_dim) radians per patch.
  """
  frequencies = embeddings.rope_frequencies(head_dim // 2, theta)
  x_first = positions[..., ::-1].astype(jnp.float32)
  angles = x_first[:, :, None] * frequencies[None, None, :, None]
  return angles.reshape(*positions.shape[:2], -1)
