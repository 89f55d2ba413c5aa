"""Chunked prefill, then decode, with a cache of constant-size KDA states."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

from sparsemm_jax import config as config_lib
from sparsemm_jax import models
from sparsemm_jax.inference import cache as cache_lib
from sparsemm_jax.models import vision


@functools.partial(
    jax.jit,
    static_argnames=(
        "config", "max_new_tokens", "end_id", "temperature", "top_p",
        "prefill_chunk",
    ),
)  # fmt: skip
def generate(
    config: config_lib.ModelConfig,
    variables: Any,
    tokens: Int[Array, "b t"],
    lengths: Int[Array, " b"],
    key: jax.Array,
    *,
    images: vision.Images | None = None,
    max_new_tokens: int,
    end_id: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    prefill_chunk: int = 512,
) -> Int[Array, "b n"]:
  """Continues each row of prompts.

  Args:
    config: the model's.
    variables: {"params", "router_state"}.
    tokens: [B, T] prompts, each followed by anything up to T.
    lengths: [B] tokens of each prompt, at least one.
    key: a random key; not used when temperature is 0.
    images: of the prompts, or None.
    max_new_tokens: N.
    end_id: the token that ends a document; what follows it is end_id.
    temperature: divides the logits; 0 takes the likeliest token.
    top_p: keeps the likeliest tokens whose probabilities add up to this.
    prefill_chunk: tokens of the prompt per call of the model.

  Returns:
    [B, N] int32.
  """
  batch, prompt_len = tokens.shape
  model = models.SparseMultimodalModel(config)
  sample = functools.partial(sample_token, temperature=temperature, top_p=top_p)
  chunk = min(prefill_chunk, prompt_len)
  num_chunks = -(-prompt_len // chunk)
  tokens = jnp.pad(tokens, ((0, 0), (0, num_chunks * chunk - prompt_len)))
  by_chunk = tokens.reshape(batch, num_chunks, chunk).swapaxes(0, 1)

  def prefill(carry, chunk_tokens):
    cache, last_logits, start = carry
    index = start + jnp.arange(chunk, dtype=jnp.int32)[None]
    valid = index < lengths[:, None]
    output = model.apply(
        variables,
        chunk_tokens,
        segment_ids=valid.astype(jnp.int32),
        images=images,
        cache=cache,
    )
    last = lengths - 1 - start
    here = (last >= 0) & (last < chunk)
    logits = jnp.take_along_axis(
        output.logits, jnp.clip(last, 0, chunk - 1)[:, None, None], axis=1
    )[:, 0]
    last_logits = jnp.where(here[:, None], logits, last_logits)
    return (output.cache, last_logits, start + chunk), None

  def decode(carry, key):
    cache, token, done = carry
    output = model.apply(variables, token[:, None], cache=cache)
    new = jnp.where(done, end_id, sample(key, output.logits[:, 0]))
    return (output.cache, new, done | (new == end_id)), new

  cache = cache_lib.init_cache(config, batch, prompt_len + max_new_tokens)
  logits = jnp.zeros((batch, config.vocab_size), jnp.float32)
  (cache, logits, _), _ = jax.lax.scan(prefill, (cache, logits, 0), by_chunk)
  first_key, *keys = jax.random.split(key, max_new_tokens)
  first = sample(first_key, logits)
  carry = (cache, first, first == end_id)
  if max_new_tokens == 1:
    return first[:, None]
  _, rest = jax.lax.scan(decode, carry, jnp.stack(keys))
  return jnp.concatenate([first[:, None], rest.swapaxes(0, 1)], axis=1)


def sample_token(
    key: jax.Array,
    logits: Float[Array, "b w"],
    *,
    temperature: float,
    top_p: float,
) -> Int[Array, " b"]:
  """Draws one token a row.

  Args:
    key: a random key.
    logits: [B, vocab] fp32.
    temperature: divides the logits; 0 takes the likeliest token.
    top_p: keeps the smallest set of likeliest tokens that reaches this
      probability; at least one.

  Returns:
    [B] int32.
  """
  if temperature == 0.0:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  logits = logits / temperature
  if top_p < 1.0:
    logits = jnp.where(nucleus(logits, top_p), logits, -jnp.inf)
  return jax.random.categorical(key, logits).astype(jnp.int32)


def nucleus(logits: Float[Array, "b w"], top_p: float) -> Bool[Array, "b w"]:
  """Marks the likeliest tokens that reach probability top_p together."""
  ordered = jnp.sort(logits, axis=-1, descending=True)
  probabilities = jax.nn.softmax(ordered, axis=-1)
  before = jnp.cumsum(probabilities, axis=-1) - probabilities
  kept = jnp.sum(before < top_p, axis=-1, keepdims=True, dtype=jnp.int32)
  cutoff = jnp.take_along_axis(ordered, jnp.maximum(kept, 1) - 1, axis=-1)
  return logits >= cutoff
