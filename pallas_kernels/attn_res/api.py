"""The public attention-residual functions: checks, then the implementation."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float

from pallas_kernels import dispatch
from pallas_kernels.attn_res import mosaic_gpu
from pallas_kernels.attn_res import mosaic_tpu
from pallas_kernels.attn_res import reference


def attn_res(
    sources: Sequence[Float[Array, "... d"]] | Float[Array, "s ... d"],
    pseudo_query: Float[Array, " d"],
    key_scale: Float[Array, " d"],
    *,
    use_last: Bool[Array, ""] | None = None,
    norm_scale: Float[Array, " d"] | None = None,
    eps: float = 1e-6,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "... d"]:
  """Mixes depth sources by a softmax over their normalised agreement.

  h = sum_i p_i v_i,  p = softmax_i(pseudo_query . (key_scale * v_i / rms(v_i)))

  The values are not normalised, the logits not divided by sqrt(D). A zero
  pseudo_query gives the mean of the sources.

  Args:
    sources: S arrays [..., D] of one shape and dtype, or one array [S, ..., D].
    pseudo_query: [D] a parameter, the same for every token.
    key_scale: [D] the key norm's gain.
    use_last: where False, the last source has no weight and no gradient, but
      must be finite: layers that share one program need not all have it. None:
      it counts.
    norm_scale: [D] the gain of an RMSNorm of h, norm_scale * h / rms(h), which
      is returned in place of h; None: h.
    eps: added to the mean squares under the roots.
    implementation: "mosaic_gpu" (Hopper) or "mosaic_tpu" (both bf16 or fp32,
      S <= 32, D <= 8192), "reference", a sequence of names tried in order, or
      None for the best on this device.

  Returns:
    [..., D] in the sources' dtype; computed in fp32 and cast once (twice with
    a norm where no kernel fuses it).

  Raises:
    ValueError: no source, shapes or dtypes that do not fit together, or
      use_last with one source.
    NotImplementedError: nothing that was asked for serves these arguments.

  Source: Attention Residuals, section 3, arXiv:2603.15031.
  """
  if not isinstance(sources, jax.Array):
    sources = tuple(sources)
  _check_sources(sources, pseudo_query.shape)
  if use_last is not None and len(sources) < 2:
    raise ValueError("use_last needs a source beside the last")
  _check_norm_scale(norm_scale, pseudo_query)
  query = _query(pseudo_query, key_scale)
  arguments = eps, sources, query, use_last, norm_scale
  candidates = {
      "mosaic_gpu": lambda: mosaic_gpu.mix(*arguments),
      "mosaic_tpu": lambda: mosaic_tpu.mix(*arguments),
      "reference": lambda: reference.normed_mix(*arguments),
  }
  return dispatch.run("attn_res", candidates, implementation)


def attn_res_stats(
    bank: Sequence[Float[Array, "... d"]] | Float[Array, "s ... d"],
    pseudo_queries: Float[Array, "q d"],
    key_scales: Float[Array, "q d"],
    *,
    eps: float = 1e-6,
    implementation: dispatch.Implementation = None,
) -> tuple[Float[Array, "q ... d"], Float[Array, "q ..."]]:
  """Mixes the finished sources for all layers of a block at once.

  For each query, attn_res over the bank alone and the log-sum-exp of its
  logits, with which attn_res_merge adds the block's running prefix.

  Args:
    bank: finished sources, S >= 1, as in attn_res.
    pseudo_queries: [Q, D] one per layer.
    key_scales: [Q, D] one per layer.
    eps: added to the mean square under the root.
    implementation: of the sums over the bank; else as in attn_res_merge.

  Returns:
    partial: [Q, ..., D] normalised mixes, in bank's dtype.
    log_sum_exp: [Q, ...] fp32.

  Raises:
    ValueError: no source, or shapes that do not fit together.
    NotImplementedError: nothing that was asked for serves these arguments.

  Source: Attention Residuals, algorithm 1 (phase 1), arXiv:2603.15031.
  Deviation: the partial is normalised, so that rounding it to bf16 does not
  grow with the number of sources.
  """
  if not isinstance(bank, jax.Array):
    bank = tuple(bank)
  _check_sources(bank, pseudo_queries.shape[1:])
  queries = _query(pseudo_queries, key_scales)
  candidates = {
      "mosaic_gpu": lambda: reference.stats(
          eps, mosaic_gpu.combine, bank, queries
      ),
      "mosaic_tpu": lambda: mosaic_tpu.stats(eps, bank, queries),
      "reference": lambda: reference.stats(
          eps, reference.combine, bank, queries
      ),
  }
  return dispatch.run("attn_res_stats", candidates, implementation)


def attn_res_merge(
    partial: Float[Array, "... d"],
    log_sum_exp: Float[Array, "..."],
    prefix: Float[Array, "... d"],
    pseudo_query: Float[Array, " d"],
    key_scale: Float[Array, " d"],
    *,
    use_prefix: Bool[Array, ""] | None = None,
    norm_scale: Float[Array, " d"] | None = None,
    eps: float = 1e-6,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "... d"]:
  """Adds the running prefix to one layer's mix of the finished sources.

  Equal to attn_res over the bank's sources and the prefix.

  Args:
    partial: [..., D] that layer's row of attn_res_stats.
    log_sum_exp: [...] fp32, likewise.
    prefix: [..., D] the block's running sum.
    pseudo_query: [D].
    key_scale: [D].
    use_prefix: use_last of attn_res, for the prefix.
    norm_scale: as in attn_res.
    eps: added to the mean squares under the roots.
    implementation: as in attn_res; on TPUs it is XLA's whatever the name.

  Returns:
    [..., D] in prefix's dtype.

  Raises:
    ValueError: shapes that do not fit together.
    NotImplementedError: nothing that was asked for serves these arguments.

  Source: Attention Residuals, algorithm 1 (phase 2), arXiv:2603.15031.
  """
  _check_sources((prefix,), pseudo_query.shape)
  if partial.shape != prefix.shape or log_sum_exp.shape != prefix.shape[:-1]:
    raise ValueError(
        f"partial {partial.shape} and log_sum_exp {log_sum_exp.shape} do not"
        f" fit prefix {prefix.shape}"
    )
  _check_norm_scale(norm_scale, pseudo_query)
  query = _query(pseudo_query, key_scale)
  arguments = eps, partial, log_sum_exp, prefix, query, use_prefix, norm_scale
  candidates = {
      "mosaic_gpu": lambda: mosaic_gpu.merge(*arguments),
      "mosaic_tpu": lambda: mosaic_tpu.merge(*arguments),
      "reference": lambda: reference.normed_merge(*arguments),
  }
  return dispatch.run("attn_res_merge", candidates, implementation)


def _query(pseudo_query, key_scale):
  """Only the product of query and key gain matters to a logit."""
  if pseudo_query.shape != key_scale.shape:
    raise ValueError(
        f"pseudo_query {pseudo_query.shape} and key_scale {key_scale.shape}"
        " differ in shape"
    )
  return pseudo_query.astype(jnp.float32) * key_scale.astype(jnp.float32)


def _check_norm_scale(norm_scale, pseudo_query):
  if norm_scale is not None and norm_scale.shape != pseudo_query.shape:
    raise ValueError(
        f"norm_scale {norm_scale.shape} differs from pseudo_query"
        f" {pseudo_query.shape}"
    )


def _check_sources(sources, query_shape):
  if len(sources) == 0:
    raise ValueError("attn_res needs at least one source")
  kinds = sorted({f"{v.dtype}{list(v.shape)}" for v in sources})
  if len(kinds) > 1:
    raise ValueError(f"sources differ in shape or dtype: {kinds}")
  if sources[0].shape[-1:] != query_shape:
    raise ValueError(
        f"sources {kinds[0]} do not fit a pseudo-query {list(query_shape)}"
    )
