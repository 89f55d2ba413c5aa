"""The dense decoder with its residual blocks as data, one scan over all layers.

`SparseMultimodalModel` unrolls its residual blocks, so that each block size is
a program of its own and forty-eight blocks of one layer take long to compile.
Here the bank is one array and a flag per layer says where a residual block
begins: models that differ in block size and seed train as one vmapped program.
Parameters, sub-layers and formulas are the library's; the tests compare loss
and gradients with SparseMultimodalModel.
"""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import embeddings
from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.layers import linear
from sparsemm_jax.layers import mla
from sparsemm_jax.layers import moe
from sparsemm_jax.layers import norms
from sparsemm_jax.training import losses


class Depth(NamedTuple):
  """What the layers leave behind; means over tokens.

  Attributes:
    output_rms: [L] of the residual stream, or of the block's running sum.
    weights: [2 L + 1, S + 1] of each mix: the bank's rows, then the sum.
    inputs: [L, B, T, D] what each block's attention reads, normalised.
  """

  output_rms: Float[Array, " l"]
  weights: Float[Array, "m s"]
  inputs: Float[Array, "l b t d"]


def starts(num_layers: int, block_size: int) -> Bool[np.ndarray, " l"]:
  """Marks the layers that begin a residual block; block size 0: none does."""
  if not block_size:
    return np.zeros(num_layers, bool)
  return np.arange(num_layers) % block_size == 0


def bank_rows(num_layers: int, block_size: int) -> int:
  """Counts the rows of the bank after the last layer."""
  return int(starts(num_layers, block_size).sum())


def apply(
    config: config_lib.ModelConfig,
    params: Any,
    tokens: Int[Array, "b t"],
    segment_ids: Int[Array, "b t"],
    is_start: Bool[Array, " l"],
    *,
    rows: int,
) -> tuple[Float[Array, "b t w"], Depth]:
  """Runs the model.

  Args:
    config: MLA and a dense MLP in every layer, one residual block.
    params: of SparseMultimodalModel(config).
    tokens: [B, T].
    segment_ids: [B, T].
    is_start: [L] of `starts`; none: ordinary residuals.
    rows: S of the bank, at least what is_start fills.

  Returns:
    fp32 logits and what the layers left behind.
  """
  layout = layout_lib.packed(segment_ids)

  def run(module, own, *args):
    return module.apply({"params": own}, *args)

  def norm(own, x):
    return run(norms.RMSNorm(config, config.d_model, "embed"), own, x)

  def layer(carry, inputs):
    bank, filled, prefix = carry
    own, start = inputs
    slot = (jnp.arange(rows) == filled) & start
    bank = jnp.where(slot[:, None, None, None], prefix[None], bank)
    filled += start
    prefix = jnp.where(start, 0, prefix)

    # A block's first mix has no running sum yet.
    x, first = mix(own["attn_res"], bank, filled, prefix, ~start, config)
    x = read = norm(own["attn_norm"], x)
    prefix += run(mla.GatedMLA(config), own["attn"], x, layout)[0]
    x, second = mix(own["mlp_res"], bank, filled, prefix, True, config)
    x = norm(own["mlp_norm"], x)
    mlp = moe.DenseMLP(config, config.dense_hidden_dim)
    prefix += run(mlp, own["mlp"], x)
    rms = jnp.sqrt(jnp.mean(jnp.square(prefix.astype(jnp.float32)), axis=-1))
    left = Depth(jnp.mean(rms), jnp.stack([first, second]), read)
    return (bank, filled, prefix), left

  decoder = params["decoder"]
  embed = embeddings.TokenEmbedding(config)
  x = run(embed, params["token_embedding"], tokens)
  bank = jnp.zeros((rows, *x.shape), x.dtype)
  stacked = decoder["layers_0"]["layer_0"]
  (bank, filled, x), left = jax.lax.scan(
      jax.checkpoint(layer), (bank, jnp.int32(0), x), (stacked, is_start)
  )
  x, last = mix(decoder["output_res"], bank, filled, x, True, config)
  x = norm(decoder["final_norm"], x)
  head = linear.Linear(
      config, (config.d_model,), (config.vocab_size,), ("embed", "vocab")
  )
  weights = left.weights.reshape(-1, rows + 1)
  weights = jnp.concatenate([weights, last[None]])
  logits = run(head, params["head"], x, "float32")
  return logits, left._replace(weights=weights)


def mix(
    own: Any,
    bank: Float[Array, "s b t d"],
    filled: Int[Array, ""],
    prefix: Float[Array, "b t d"],
    use_prefix: Bool[Array, ""] | bool,
    config: config_lib.ModelConfig,
) -> tuple[Float[Array, "b t d"], Float[Array, " m"]]:
  """`attn_res` over the bank's filled rows and the prefix, if it counts.

  Returns:
    The mix [B, T, D], and its weights [S + 1] as means over tokens.
  """
  query = own["pseudo_query"] * own["key_scale"]

  def logits(v):
    v = v.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(
        jnp.mean(jnp.square(v), axis=-1) + config.norm_eps
    )
    along = jnp.expand_dims(query, range(v.ndim - 1))
    return jnp.sum(v * along, axis=-1) * inverse_rms

  every = jnp.concatenate([logits(bank), logits(prefix)[None]])
  counts = jnp.append(
      jnp.arange(bank.shape[0]) < filled, jnp.asarray(use_prefix)
  )
  every = jnp.where(counts[:, None, None], every, -jnp.inf)
  weights = jax.nn.softmax(every, axis=0)
  mixed = jnp.sum(weights[:-1, ..., None] * bank.astype(jnp.float32), axis=0)
  mixed += weights[-1, ..., None] * prefix.astype(jnp.float32)
  return mixed.astype(prefix.dtype), jnp.mean(weights, axis=(1, 2))


def make_loss(config: config_lib.ModelConfig, rows: int):
  """Returns loss(params, batch, is_start) -> (nats per target, Depth)."""

  def loss(params, batch, is_start):
    logits, depth = apply(
        config,
        params,
        batch["tokens"],
        batch["segment_ids"],
        is_start,
        rows=rows,
    )
    nats, _ = losses.next_token_losses(logits, batch["targets"])
    mask = batch["loss_mask"]
    return jnp.sum(jnp.where(mask, nats, 0.0)) / jnp.sum(mask), depth

  return loss
