"""Attention residuals: each sub-layer mixes what earlier blocks have built."""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float

from pallas_kernels import attn_res
from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import norms
from sparsemm_jax.layers import stats


class PartialMix(NamedTuple):
  """What phase one makes for phase two; arrays of several mixes are stacked."""

  mixed: Float[Array, "*n b t d"]
  log_sum_exp: Float[Array, "*n b t"]


def partial_mix(
    config: config_lib.ModelConfig,
    params: Mapping[str, Float[Array, "n d"]],
    bank: Sequence[Float[Array, "b t d"]],
) -> PartialMix:
  """Mixes the bank for n layers at once: phase one.

  Args:
    config: the model's.
    params: of DepthMix, stacked over layers.
    bank: S arrays [B, T, D].

  Returns:
    Arrays with n in front: what each layer's DepthMix takes as `partial`.
  """
  return PartialMix(
      *attn_res.attn_res_stats(
          bank,
          params["pseudo_query"],
          params["key_scale"],
          eps=config.norm_eps,
          implementation=config.attn_res_implementation,
      )
  )


def moved_rows(
    num_sources: int, num_layers: int, *, two_phases: bool, remat: bool
) -> float:
  """Counts what one mix of a scanned group moves in a training step.

  Unit: [B, T, D] arrays in the activations' dtype, read or written once. The
  mix gives its norm and the running sum's gradient is left out. One phase reads
  S sources and the running sum and writes the result, twice with
  rematerialisation; backward reads them with the cotangent, writes their
  gradients, and adds the bank's to those of other layers. In two phases the
  scan sees one array in the bank's place; XLA reads the bank for each layer's
  partial mix, and once for its gradient. (The Hopper kernel reads it once for
  all, which would change the choice at S = 2 only, by less than two rows, for
  four more rows of memory per layer.)

  Args:
    num_sources: S, in the bank.
    num_layers: that share the bank in the scan, two mixes each.
    two_phases: whether the bank is mixed before the scan.
    remat: whether the forward pass runs twice.
  """
  passes = 2 if remat else 1
  if not two_phases:
    accumulated = 4 * num_sources / 2  # over a layer's two mixes
    return passes * (num_sources + 2) + (2 * num_sources + 3) + accumulated
  phase_one, merged = num_sources + 1, 3
  of_bank = num_sources + 2 + num_sources / num_layers
  return passes * (phase_one + merged) + 5 + of_bank


def use_two_phases(num_sources: int, num_layers: int, *, remat: bool) -> bool:
  """Whether a scanned group moves fewer bytes in two phases."""
  rows = functools.partial(moved_rows, num_sources, num_layers, remat=remat)
  return rows(two_phases=True) < rows(two_phases=False)


class DepthMix(nn.Module):
  """h = sum_i softmax_i(w . RMSNorm(v_i)) v_i over the sources v_i.

  The sources are the finished blocks (the bank, first the embedding) and the
  running sum of this block (the prefix). w starts at zero, which makes h their
  mean: the pre-norm residual stream up to a factor that the next norm removes.

  Source: Attention Residuals, section 3, arXiv:2603.15031.
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(
      self,
      bank: Sequence[Float[Array, "b t d"]],
      prefix: Float[Array, "b t d"] | None,
      first: Bool[Array, ""] | None = None,
      norm_scale: Float[Array, " d"] | None = None,
      partial: PartialMix | None = None,
  ) -> Float[Array, "b t d"]:
    """Mixes the sources.

    Args:
      bank: S arrays [B, T, D].
      prefix: [B, T, D], or None where the block has none yet.
      first: where traced layers share this code, True in the layer whose
        prefix does not exist yet (zeros stand for it); None: it counts.
      norm_scale: [D] of an RMSNorm of the mix, where only that is wanted: one
        kernel does both.
      partial: this mix of the bank alone where it is known; see partial_mix.

    Returns:
      [B, T, D], the mix or its norm.
    """
    dim = self.config.d_model
    dtype = jnp.dtype(self.config.param_dtype)
    names = nn.with_logical_partitioning
    query = self.param(
        "pseudo_query", names(nn.initializers.zeros, ("embed",)), (dim,), dtype
    )
    scale = self.param(
        "key_scale", names(nn.initializers.ones, ("embed",)), (dim,), dtype
    )
    eps = self.config.norm_eps
    sources = (*bank,) if prefix is None else (*bank, prefix)
    use_last = None if first is None else ~first
    options = dict(
        norm_scale=norm_scale,
        eps=eps,
        implementation=self.config.attn_res_implementation,
    )
    if partial is not None:
      mixed = attn_res.attn_res_merge(
          *partial, prefix, query, scale, use_prefix=use_last, **options
      )
    elif len(sources) > 1:
      mixed = attn_res.attn_res(
          sources, query, scale, use_last=use_last, **options
      )
    else:  # the first layer has the embedding alone: nothing to weigh
      (mixed,) = sources
      if norm_scale is not None:
        normed = norms.rms_norm(mixed, norm_scale, eps=eps)
        mixed = normed.astype(mixed.dtype)
    if stats.wanted(self, "depth_stats"):
      weights = depth_weights(sources, query, scale, use_last, eps=eps)
      stats.sow(self, "depth_stats", "weights", weights)
    return mixed


def depth_weights(
    sources: Sequence[Float[Array, "b t d"]],
    pseudo_query: Float[Array, " d"],
    key_scale: Float[Array, " d"],
    use_last: Bool[Array, ""] | None = None,
    *,
    eps: float,
) -> Float[Array, " s"]:
  """The softmax weights of attn_res, averaged over tokens: [S], sum 1."""
  query = pseudo_query.astype(jnp.float32)
  logits = jnp.stack([
      jnp.dot(norms.rms_norm(source, key_scale, eps=eps), query)
      for source in sources
  ])  # [S, B, T]
  if use_last is not None:
    last = jnp.where(use_last, logits[-1], -jnp.inf)
    logits = logits.at[-1].set(last)
  return jnp.mean(jax.nn.softmax(logits, axis=0), axis=(1, 2))
