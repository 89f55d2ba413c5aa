"""Kimi Delta Attention: linear attention with a bounded decay per channel."""

import functools
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float

from pallas_kernels import kda
from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.layers import linear
from sparsemm_jax.layers import norms
from sparsemm_jax.layers import short_conv
from sparsemm_jax.parallel import context


class KdaCache(NamedTuple):
  """What a row leaves behind for its next token, whatever its length."""

  state: Float[Array, "b hv k v"]  # fp32
  q_tail: Float[Array, "b w h k"]  # the last W - 1 inputs of q's convolution
  k_tail: Float[Array, "b w h k"]
  v_tail: Float[Array, "b w hv v"]


class KimiDeltaAttention(nn.Module):
  """y = W_o [sigmoid(W_g x) * RMSNorm_head(KDA(q, k, v, z, W_b x))].

  q, k, v = SiLU(conv(W x)), z = W_up W_down x; no map has a bias except the
  gate's dt_bias. The output gate has full rank.

  Source: Kimi K3 report, eq. 1-6, arXiv:2607.24653.
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(
      self,
      x: Float[Array, "b t d"],
      layout: layout_lib.Layout,
      cache: KdaCache | None = None,
  ) -> tuple[Float[Array, "b t d"], KdaCache | None]:
    """[B, T, D] -> [B, T, D] and the cache after these tokens."""
    config = self.config
    kda_config = config.kda
    heads, value_heads = kda_config.num_heads, kda_config.value_heads
    key_dim, value_dim = kda_config.head_dim, kda_config.value_dim
    width, rank = config.d_model, kda_config.rank
    per_head = ("embed", "heads", "head_dim")
    project = functools.partial(linear.Linear, config)

    def mixed(name, heads, dim, tail):
      y = project((width,), (heads, dim), per_head, name=f"{name}_proj")(x)
      conv = short_conv.ShortConvolution(
          config, heads, dim, name=f"{name}_conv"
      )
      return conv(y, layout, tail)

    tails = cache[1:] if cache else (None,) * 3
    q, q_tail = mixed("q", heads, key_dim, tails[0])
    k, k_tail = mixed("k", heads, key_dim, tails[1])
    v, v_tail = mixed("v", value_heads, value_dim, tails[2])
    narrow = project((width,), (rank,), ("embed", "rank"), name="decay_down")(x)
    z = project(
        (rank,), (value_heads, key_dim), ("rank", "heads", "head_dim"),
        name="decay_up",
    )(narrow)  # fmt: skip
    beta_logits = project(
        (width,), (value_heads,), ("embed", "heads"), name="beta_proj"
    )(x, "float32")
    out, state = self._attend(q, k, v, z, beta_logits, layout, cache)

    gate = project((width,), (value_heads, value_dim), per_head, name="g_proj")
    out = norms.RMSNorm(config, value_dim, "head_dim", name="out_norm")(
        out, "float32"
    ) * jax.nn.sigmoid(gate(x).astype(jnp.float32))
    y = project(
        (value_heads, value_dim), (width,), ("heads", "head_dim", "embed"),
        name="o_proj",
    )(out)  # fmt: skip
    if cache is None:
      return y, None
    return y, KdaCache(state, q_tail, k_tail, v_tail)

  def _attend(self, q, k, v, z, beta_logits, layout, cache):
    """Runs the chunked form, or the recurrence for a single cached token."""
    config = self.config.kda
    names = nn.with_logical_partitioning
    a_log = self.param(
        "a_log",
        names(nn.initializers.zeros, ("heads",)),
        (config.value_heads,),
        jnp.float32,
    )
    dt_bias = self.param(
        "dt_bias",
        names(init_dt_bias, ("heads", "head_dim")),
        (config.value_heads, config.head_dim),
        jnp.float32,
    )
    raw = (q, k, v, z, beta_logits, a_log, dt_bias)
    options = dict(
        lower_bound=config.lower_bound,
        segment_ids=layout.segments,
        implementation=config.implementation,
    )
    if cache is None:
      return context.fused_kda(*raw, **options), None
    if q.shape[1] > 1:
      return kda.fused_kda(*raw, initial_state=cache.state, **options)
    g = kda.bounded_log_decay(z, a_log, dt_bias, lower_bound=config.lower_bound)
    # A padding token neither decays nor writes.
    valid = layout.valid[:, :, None]
    return kda.recurrent_kda(
        norms.l2_normalize(q),
        norms.l2_normalize(k),
        v,
        jnp.where(valid[..., None], g, 0.0),
        jnp.where(valid, jax.nn.sigmoid(beta_logits), 0.0),
        initial_state=cache.state,
    )


def init_dt_bias(
    key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype
) -> Float[Array, "hv k"]:
  """softplus^-1(dt) of dt log-uniform in [1e-3, 1e-1]: a slow decay."""
  low, high = math.log(1e-3), math.log(1e-1)
  dt = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
  return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)
