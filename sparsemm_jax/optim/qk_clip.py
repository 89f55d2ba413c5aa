"""Keeps the attention logits of MLA bounded by rescaling its weights."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float


def qk_clip(params: Any, attention_stats: Any, threshold: float) -> Any:
  """Rescales the heads whose largest logit S of the step is above threshold.

  With gamma = min(1, threshold / S), the per-head key part and the query part
  that meets it shrink by sqrt(gamma) each. The query part that meets the key
  shared by all heads shrinks by gamma, since that key is not one head's to
  change. Every logit of the head is thus gamma times what it was.

  Args:
    params: the parameters after the optimizer's update, unboxed.
    attention_stats: `max_logit`, [..., H] fp32, at the path of every MLA
      module; with micro-batches the maximum over all of them.
    threshold: of the scaled logits, positive.

  Returns:
    The parameters, changed in `q_up` and `kv_up` of the MLA modules only.

  Source: Kimi K2 report, arXiv 2507.20534, section 2.1. K3 never rotates the
    shared part; it is shared all the same.
  """
  result = dict(params)
  for name, stats in attention_stats.items():
    if not isinstance(stats, Mapping):
      continue
    if "max_logit" in stats:
      result[name] = _clip_module(params[name], stats["max_logit"], threshold)
    else:
      result[name] = qk_clip(params[name], stats, threshold)
  return result


def _clip_module(
    params: Any, max_logit: Float[Array, "... h"], threshold: float
) -> Any:
  query, key_value = params["q_up"]["kernel"], params["kv_up"]["kernel"]
  # kv_down makes the latent that kv_up expands, and the shared key beside it.
  shared = params["kv_down"]["kernel"].shape[-1] - key_value.shape[-3]
  nope = query.shape[-1] - shared
  gamma = jnp.where(max_logit > threshold, threshold / max_logit, 1.0)
  gamma = gamma[..., None, :, None]  # [..., 1, H, 1]
  root = jnp.sqrt(gamma)

  query_factor = jnp.where(jnp.arange(query.shape[-1]) < nope, root, gamma)
  key_factor = jnp.where(jnp.arange(key_value.shape[-1]) < nope, root, 1.0)
  return {
      **params,
      "q_up": {"kernel": (query * query_factor).astype(query.dtype)},
      "kv_up": {"kernel": (key_value * key_factor).astype(key_value.dtype)},
  }
