"""The whole model: tokens and images in, logits out."""

from typing import Any
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax.inference import cache as cache_lib
from sparsemm_jax.layers import embeddings
from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.layers import linear
from sparsemm_jax.models import block
from sparsemm_jax.models import decoder
from sparsemm_jax.models import vision


class ModelOutput(NamedTuple):
  """What a call of the model returns."""

  logits: Float[Array, "b t w"]  # fp32
  hidden: Float[Array, "b t d"]  # after the final norm, before the head
  cache: cache_lib.Cache | None


class SparseMultimodalModel(nn.Module):
  """A sparse decoder over text and image tokens.

  Collections: "params"; "router_state" (read only). The collections in
  layers.stats.COLLECTIONS are filled if the caller makes them mutable.
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(
      self,
      tokens: Int[Array, "b t"],
      segment_ids: Int[Array, "b t"] | None = None,
      images: vision.Images | None = None,
      cache: cache_lib.Cache | None = None,
  ) -> ModelOutput:
    """Runs the model.

    Args:
      tokens: [B, T] int32.
      segment_ids: [B, T] int32 document ids, 0 at padding; None: one document
        without padding. With a cache: 1, and 0 for padding at the end.
      images: whose tokens replace the media pads, in order; with a cache, the
        images of the row from its beginning, in every call that has pads.
      cache: of inference.cache, to continue the rows it holds.

    Returns:
      A ModelOutput; its cache is None if none came in.

    Raises:
      ValueError: media pads and image tokens differ in number (only outside
        jit and without a cache; see check_image_tokens).
    """
    config = self.config
    if segment_ids is None:
      segment_ids = jnp.ones_like(tokens)
    if cache is None:
      layout = layout_lib.packed(segment_ids)
    else:
      layout = layout_lib.appended(segment_ids, cache.lengths)
    x = embeddings.TokenEmbedding(config, name="token_embedding")(tokens)
    pads = None
    if config.vision is not None:
      pads = tokens == config.vision.media_pad_id
      x = self._place_images(x, tokens, pads, images, cache)
    x = nn.with_logical_constraint(x, block.ACTIVATION)
    hidden, layers = decoder.Decoder(config, name="decoder")(
        x, layout, None if cache is None else cache.layers
    )
    logits = linear.Linear(
        config, (config.d_model,), (config.vocab_size,), ("embed", "vocab"),
        name="head",
    )(hidden, "float32")  # fmt: skip
    return ModelOutput(logits, hidden, _advance(cache, layers, layout, pads))

  def _place_images(self, x, tokens, pads, images, cache):
    """Replaces the embeddings of media pads by image tokens, in order."""
    config = self.config
    if images is None:
      if not self.is_initializing():
        return x
      images = vision.Images.blank(tokens.shape[0], config.vision)
    elif cache is None and not isinstance(tokens, jax.core.Tracer):
      check_image_tokens(tokens, images, config)
    image_tokens = vision.VisionEncoder(config, name="vision")(images)
    order = jnp.cumsum(pads, axis=1, dtype=jnp.int32) - 1
    if cache is not None:
      order += cache.image_tokens[:, None]
    order = jnp.clip(order, 0, image_tokens.shape[1] - 1)
    placed = jnp.take_along_axis(image_tokens, order[:, :, None], axis=1)
    return jnp.where(pads[:, :, None], placed.astype(x.dtype), x)


def _advance(cache, layers, layout, pads):
  if cache is None:
    return None
  image_tokens = cache.image_tokens
  if pads is not None:
    image_tokens += jnp.sum(pads & layout.valid, axis=1, dtype=jnp.int32)
  added = jnp.sum(layout.valid, axis=1, dtype=jnp.int32)
  return cache_lib.Cache(layers, cache.lengths + added, image_tokens)


def check_image_tokens(
    tokens: Any, images: vision.Images | None, config: config_lib.ModelConfig
) -> None:
  """Checks that each row has as many media pads as image tokens.

  Args:
    tokens: [B, T] concrete.
    images: concrete, or None for no image in any row.
    config: the model's.

  Raises:
    ValueError: naming the row and both counts.
  """
  if config.vision is None:
    if images is not None:
      raise ValueError("images given, but ModelConfig.vision is None")
    return
  pads = np.sum(np.asarray(tokens) == config.vision.media_pad_id, axis=1)
  patches = np.zeros_like(pads)
  if images is not None:
    patches = np.sum(np.asarray(images.segment_ids) != 0, axis=1)
  expected = patches / config.vision.patches_per_token
  for row in np.flatnonzero(pads != expected):
    raise ValueError(
        f"row {row} has {pads[row]} media pads (id"
        f" {config.vision.media_pad_id}) but its images give"
        f" {expected[row]:g} tokens"
    )
