"""Softmax attention inside the segments of a packed row."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

# Not -inf: a row without a single allowed key must stay finite.
_MASKED = -1e30


def masked_softmax(
    logits: Float[Array, "b h q k"], allowed: Bool[Array, "b q k"]
) -> tuple[Float[Array, "b h q k"], Float[Array, "b h q k"]]:
  """Returns the softmax over allowed keys and the masked logits, fp32."""
  logits = jnp.where(allowed[:, None], logits, _MASKED)
  return jax.nn.softmax(logits, axis=-1), logits


def attention(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t h k"],
    v: Float[Array, "b t h v"],
    segments: Int[Array, "b t"],
    *,
    scale: float,
    causal: bool,
    query_block: int = 1024,
) -> tuple[Float[Array, "b t h v"], Float[Array, " h"]]:
  """Attends to the tokens of the same segment, the earlier ones if causal.

  Rows longer than query_block are worked off block by block and recomputed in
  the backward pass, so that memory grows with T, not with T^2.

  Args:
    q: [B, T, H, K].
    k: [B, T, H, K].
    v: [B, T, H, V].
    segments: [B, T] numbers; 0 is padding, which sees padding only.
    scale: multiplies the logits.
    causal: whether a token sees no later one.
    query_block: queries whose logits exist at the same time.

  Returns:
    out: [B, T, H, V] fp32.
    max_logit: [H] fp32, the largest scaled logit of a query that is not
      padding; without gradient.
  """
  batch, length, heads, _ = q.shape
  index = jnp.arange(length, dtype=jnp.int32)

  def attend(queries, query_segments, query_index):
    logits = jnp.einsum(
        "bqhd,bkhd->bhqk", queries, k, preferred_element_type=jnp.float32
    )
    allowed = query_segments[:, :, None] == segments[:, None]
    if causal:
      allowed &= (query_index[:, None] >= index[None])[None]
    weights, logits = masked_softmax(logits * scale, allowed)
    out = jnp.einsum(
        "bhqk,bkhd->bqhd", weights.astype(v.dtype), v,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    counted = (query_segments != 0)[:, None, :, None]
    top = jnp.max(
        jnp.where(counted, jax.lax.stop_gradient(logits), _MASKED),
        axis=(0, 2, 3),
    )
    return out, top

  if length <= query_block:
    return attend(q, segments, index)
  blocks = -(-length // query_block)
  split = functools.partial(_split, blocks=blocks, size=query_block)
  out, top = jax.lax.map(
      lambda block: jax.checkpoint(attend)(*block),
      (split(q), split(segments), split(index[None])[:, 0]),
  )
  out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, heads, v.shape[-1])
  return out[:, :length], jnp.max(top, axis=0)


def _split(x, *, blocks, size):
  """[B, T, ...] -> [blocks, B, size, ...], padded with zeros."""
  pads = [(0, 0)] * x.ndim
  pads[1] = (0, blocks * size - x.shape[1])
  x = jnp.pad(x, pads).reshape(x.shape[0], blocks, size, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)
