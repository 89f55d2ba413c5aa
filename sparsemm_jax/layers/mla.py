"""Gated multi-head latent attention, without positions unless asked."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float

from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import attention
from sparsemm_jax.layers import embeddings
from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.layers import linear
from sparsemm_jax.layers import norms
from sparsemm_jax.layers import stats


class MlaCache(NamedTuple):
  """What a row leaves behind for its next token: one latent per token."""

  latents: Float[Array, "b s r"]  # [normed latent | shared key part]


class GatedMLA(nn.Module):
  """y = W_o [sigmoid(W_g x) * softmax(q k^T / sqrt(dim)) v].

  q = W_uq RMSNorm(W_dq x); [c | k_shared] = W_dkv x; [k | v] = W_ukv RMSNorm(c).
  Each head's key is its k beside k_shared, which mla.rope_theta rotates (and
  the same part of q) and None leaves alone.

  Source: Kimi K3 report, eq. 7, arXiv:2607.24653.
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(
      self,
      x: Float[Array, "b t d"],
      layout: layout_lib.Layout,
      cache: MlaCache | None = None,
  ) -> tuple[Float[Array, "b t d"], MlaCache | None]:
    """[B, T, D] -> [B, T, D] and the cache after these tokens."""
    config, mla = self.config, self.config.mla
    width, heads = config.d_model, mla.num_heads
    q_rank, kv_rank = mla.q_lora_rank, mla.kv_lora_rank
    nope, shared, v_dim = (
        mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim,
    )  # fmt: skip
    project = functools.partial(linear.Linear, config)
    expand = ("rank", "heads", "head_dim")

    q = project((width,), (q_rank,), ("embed", "rank"), name="q_down")(x)
    q = norms.RMSNorm(config, q_rank, "rank", name="q_norm")(q)
    q = project((q_rank,), (heads, nope + shared), expand, name="q_up")(q)
    joint = project(
        (width,), (kv_rank + shared,), ("embed", "rank"), name="kv_down"
    )(x)
    latent = norms.RMSNorm(config, kv_rank, "rank", name="kv_norm")(
        joint[..., :kv_rank]
    )
    k_shared = self._turn(joint[:, :, None, kv_rank:], layout)
    q = jnp.concatenate([q[..., :nope], self._turn(q[..., nope:], layout)], -1)
    kv_up = project((kv_rank,), (heads, nope + v_dim), expand, name="kv_up")
    scale = (nope + shared) ** -0.5

    if cache is None:
      kv = kv_up(latent)
      k_shared = jnp.broadcast_to(k_shared, (*kv.shape[:3], shared))
      k = jnp.concatenate([kv[..., :nope], k_shared], axis=-1)
      out, max_logit = attention.attention(
          q, k, kv[..., nope:], layout.segments, scale=scale, causal=True
      )
      stats.sow(self, "attention_stats", "max_logit", max_logit)
    else:
      latents = jnp.concatenate([latent, k_shared[:, :, 0]], axis=-1)
      cache = _write(cache, latents, layout)
      kernel = kv_up.kernel.astype(q.dtype)
      out = _attend_latents(q, cache.latents, kernel, layout, nope, scale)

    gate = project(
        (width,), (heads, v_dim), ("embed", "heads", "head_dim"), name="g_proj"
    )(x)
    out = out * jax.nn.sigmoid(gate.astype(jnp.float32))
    y = project(
        (heads, v_dim), (width,), ("heads", "head_dim", "embed"), name="o_proj"
    )(out)
    return y, cache

  def _turn(self, x, layout):
    """Rotates [B, T, H, qk_rope_head_dim] by position if rope_theta is set."""
    mla = self.config.mla
    if mla.rope_theta is None:
      return x
    frequencies = embeddings.rope_frequencies(
        mla.qk_rope_head_dim, mla.rope_theta
    )
    positions = layout.positions.astype(jnp.float32)
    return embeddings.rotate(x, positions[:, :, None] * frequencies[None, None])


def _write(cache, latents, layout):
  """Puts the new tokens behind the cached ones; padding is dropped."""
  capacity = cache.latents.shape[1]
  slots = jnp.where(layout.valid, layout.positions, capacity)
  rows = jnp.arange(slots.shape[0], dtype=slots.dtype)[:, None]
  return MlaCache(
      cache.latents.at[rows, slots].set(
          latents.astype(cache.latents.dtype), mode="drop"
      )
  )


def _attend_latents(q, latents, kernel, layout, nope, scale):
  """Attends in the latent width, so that cached tokens are never expanded.

  Args:
    q: [B, T, H, nope + shared].
    latents: [B, S, R + shared].
    kernel: [R, H, nope + V] of kv_up.
    layout: of the T new tokens, which the cache holds already.
    nope: width of the per-head key part.
    scale: multiplies the logits.

  Returns:
    [B, T, H, V] fp32.
  """
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  rank = kernel.shape[0]
  q_latent = dot("bthn,rhn->bthr", q[..., :nope], kernel[..., :nope])
  q = jnp.concatenate([q_latent.astype(q.dtype), q[..., nope:]], axis=-1)
  logits = dot("bthr,bsr->bhts", q, latents) * scale
  slots = jnp.arange(latents.shape[1], dtype=jnp.int32)
  allowed = slots[None, None] <= layout.positions[:, :, None]
  weights, _ = attention.masked_softmax(logits, allowed)
  weights = weights.astype(latents.dtype)
  mixed = dot("bhts,bsr->bthr", weights, latents[..., :rank])
  return dot("bthr,rhv->bthv", mixed.astype(q.dtype), kernel[..., nope:])
