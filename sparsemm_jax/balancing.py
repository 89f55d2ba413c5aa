"""Top-k routing, and the rules that keep the experts' loads equal.

Everything here is a pure function of arrays. The bias is a state, not a
parameter: it is added to the scores for selection only, held fixed for a whole
optimizer step, and replaced (quantile_bias) or nudged (sign_bias) after it from
integer counts. Counts of micro-batches and of shards are summed before the
update, so the result does not depend on how a batch was cut.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int


class Routing(NamedTuple):
  """Where each token goes, and by how much each visit counts."""

  expert_indices: Int[Array, "g a"]  # int32, best first
  combine_weights: Float[Array, "g a"]  # fp32, sum to 1 over a
  cutoff: Float[Array, " g"]  # fp32, the biased score that just missed


Range = tuple[Float[Array, ""] | float, Float[Array, ""] | float]

# A margin cannot leave it: the quantiles of cutoff_i - scores_ij are all within
# 1 of those of cutoff_i, so that biases lie in [-1, 1] and cutoffs in [-1, 2].
POOLED_RANGE = (-2.0, 2.0)


def adaptive_range(bias: Float[Array, " e"], spread: float = 1.0) -> Range:
  """Returns min(bias) - spread and max(bias) + spread: no margin lies outside.

  Args:
    bias: [E] fp32, under which the margins are taken.
    spread: largest difference between two scores less their prices.
  """
  return jnp.min(bias) - spread, jnp.max(bias) + spread


def route(
    scores: Float[Array, "g e"],
    bias: Float[Array, " e"],
    num_experts_per_token: int,
    price: Float[Array, "g e"] | None = None,
) -> Routing:
  """Selects each token's experts by biased score and weighs them without bias.

  expert_indices = the A largest of scores - price + bias (ties: lower index)
  combine_weights = scores_j / (sum of the selected scores + 1e-20)
  cutoff = the (A+1)-th largest of scores - price + bias

  With A = E nothing is left out and the cutoff is the smallest biased score:
  the margins stay within the histogram's range.

  Args:
    scores: [G, E] router scores in [0, 1]; the gradient reaches them through
      combine_weights alone.
    bias: [E] fp32 selection bias, without gradient.
    num_experts_per_token: A, between 1 and E.
    price: [G, E] of sequence_price, already weighted; None: 0.

  Returns:
    The routing; see Routing.

  Raises:
    ValueError: shapes that do not match, or A outside [1, E].

  Source: Kimi K3 report, eq. 13-14, arXiv:2607.24653.
  """
  num_experts = scores.shape[-1]
  if scores.ndim != 2 or bias.shape != (num_experts,):
    raise ValueError(
        f"scores [G, E] and bias [E] needed, got {scores.shape}, {bias.shape}"
    )
  if not 1 <= num_experts_per_token <= num_experts:
    raise ValueError(
        f"{num_experts_per_token=} is not between 1 and {num_experts=}"
    )
  scores = scores.astype(jnp.float32)
  biased = scores + bias.astype(jnp.float32)[None]
  biased = jax.lax.stop_gradient(biased if price is None else biased - price)
  values, indices = jax.lax.top_k(
      biased, min(num_experts_per_token + 1, num_experts)
  )
  # Unless XLA sees top_k whole, it sorts every row: 3 to 20 times slower. One
  # barrier for each: of a pair, XLA on a mesh loses which part is which.
  values = jax.lax.optimization_barrier(values)
  indices = jax.lax.optimization_barrier(indices)
  indices = indices[:, :num_experts_per_token]
  selected = jnp.take_along_axis(scores, indices, axis=-1)
  total = jnp.sum(selected, axis=-1, keepdims=True)
  return Routing(indices, selected / (total + 1e-20), values[:, -1])


def margin_histogram(
    scores: Float[Array, "g e"],
    cutoff: Float[Array, " g"],
    bias: Float[Array, " e"],
    *,
    num_bins: int = 1000,
    token_mask: Bool[Array, " g"] | None = None,
    margin_range: Range | None = None,
) -> Int[Array, "e bins"]:
  """Counts, per expert, the bias each token would need to select that expert.

  r_ij = cutoff_i - scores_ij, counted in bin floor((r - lo) bins / (hi - lo)),
  (lo, hi) = margin_range. Integer counts: histograms of
  micro-batches and shards add up to that of the whole bit for bit.

  Args:
    scores: [G, E] router scores in [0, 1], without the bias, less any price.
    cutoff: [G] from route, under the same bias.
    bias: [E] fp32, the bias of the whole optimizer step.
    num_bins: bins per expert; the quantile's error is at most one bin.
    token_mask: [G] True where a token counts (False at padding), or None.
    margin_range: what the bins cover; None: adaptive_range(bias).

  Returns:
    [E, num_bins] int32. Each row sums to the number of counted tokens; a NaN
    margin is in no bin.

  Source: Kimi K3 report, appendix D, arXiv:2607.24653.
  """
  scores, cutoff, bias = jax.lax.stop_gradient((scores, cutoff, bias))
  low, high = margin_range or adaptive_range(bias)
  margins = cutoff[:, None].astype(jnp.float32) - scores.astype(jnp.float32)
  # Multiplied before it is divided: a margin of 0 must not slip a bin down.
  position = jnp.floor((margins - low) * num_bins / (high - low))
  counted = ~jnp.isnan(position)
  if token_mask is not None:
    counted &= token_mask[:, None]
  num_experts = scores.shape[-1]
  bins = jnp.clip(position, 0, num_bins - 1).astype(jnp.int32)
  flat = bins + jnp.arange(0, num_experts * num_bins, num_bins, jnp.int32)[None]
  return _count(
      jnp.where(counted, flat, num_experts * num_bins), num_experts * num_bins
  ).reshape(num_experts, num_bins)


def quantile_bias(
    histogram: Int[Array, "e bins"],
    bias: Float[Array, " e"],
    *,
    num_experts_per_token: int,
    margin_range: Range | None = None,
) -> Float[Array, " e"]:
  """Replaces the bias by the margins' quantile at which every load is equal.

  q = m A / E of the m counted tokens should reach each expert: the new bias is
  the q-th smallest margin, read from the first bin whose cumulative count
  reaches ceil(q) and interpolated within it, then mean-centred.

  Args:
    histogram: [E, num_bins] int32 margin_histogram of the whole step.
    bias: [E] fp32, the bias under which the histogram was taken.
    num_experts_per_token: A.
    margin_range: of the histogram; None: adaptive_range(bias).

  Returns:
    [E] fp32 bias for the next step; bias itself if nothing was counted.

  Source: Kimi K3 report, eq. 14 and appendix D, arXiv:2607.24653.
  """
  num_experts, num_bins = histogram.shape
  bias = bias.astype(jnp.float32)
  cumulative = jnp.cumsum(histogram, axis=-1)
  tokens = cumulative[:, -1]
  # q = whole + part / E in integers, without forming tokens * A.
  part = (tokens % num_experts) * num_experts_per_token
  whole = (tokens // num_experts) * num_experts_per_token + part // num_experts
  part = part % num_experts
  index, below, in_bin = _crossing(histogram, cumulative, whole + (part > 0))
  needed = (whole - below) + part.astype(jnp.float32) / num_experts
  position = index + jnp.clip(needed / jnp.maximum(in_bin, 1), 0.0, 1.0)
  low, high = margin_range or adaptive_range(bias)
  estimate = low + position * (high - low) / num_bins
  return _centred(estimate, tokens > 0, bias)


def pooled_quantile_bias(
    pool: Float[Array, "e bins"],
    histogram: Int[Array, "e bins"],
    bias: Float[Array, " e"],
    *,
    num_experts_per_token: int,
    decay: float = 0.95,
) -> tuple[Float[Array, "e bins"], Float[Array, " e"]]:
  """Takes quantile_bias's quantile over many steps, of few tokens each.

  pool' = decay * pool + histogram; bias' = its margins' q-th smallest, with
  q = A / E of what it holds, interpolated in its bin and mean-centred.

  Args:
    pool: [E, bins] fp32 decayed counts of margins, zeros at first.
    histogram: [E, bins] int32 margin_histogram of the whole step, taken over
      POOLED_RANGE: bins that move with the bias could not be added up.
    bias: [E] fp32, the bias under which the histogram was taken.
    num_experts_per_token: A.
    decay: weight of the step before; 1 / (1 - decay) steps are remembered.

  Returns:
    pool' and bias'; both as they were if nothing was counted in this step.
  """
  num_experts, num_bins = pool.shape
  bias = bias.astype(jnp.float32)
  counted = jnp.any(histogram > 0)
  pool = jnp.where(counted, decay * pool + histogram, pool)
  cumulative = jnp.cumsum(pool, axis=-1)
  target = cumulative[:, -1] * (num_experts_per_token / num_experts)
  index, below, in_bin = _crossing(pool, cumulative, target)
  fraction = jnp.where(in_bin > 0, (target - below) / in_bin, 0.0)
  position = index + jnp.clip(fraction, 0.0, 1.0)
  low, high = POOLED_RANGE
  estimate = low + position * (high - low) / num_bins
  return pool, _centred(estimate, counted & (cumulative[:, -1] > 0), bias)


def sequence_price(
    scores: Float[Array, "b t e"],
    segments: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    *,
    num_experts_per_token: int,
    num_bins: int = 100,
    decay: float = 0.99,
    chunk_size: int = 16,
) -> Float[Array, "b t e"]:
  """Prices each expert by how well it scored so far in the token's document.

  price_ij = the centre of the bin that holds the (1 - A/E)-quantile of
  scores_i'j over the tokens i' <= i of i's document, weighted decay^(i - i').
  Causal: a token's price depends on itself and on tokens before it.

  Args:
    scores: [B, T, E] router scores in [0, 1]; no gradient reaches them.
    segments: [B, T] document of each token, 0 at padding.
    positions: [B, T] tokens of the same document before this one.
    num_experts_per_token: A.
    num_bins: of the scores.
    decay: per token.
    chunk_size: tokens whose histograms are held at once.

  Returns:
    [B, T, E] fp32; 0 at padding.

  Source: sequence-level quantile balancing, kexue.fm/archives/11760. Deviation:
  the weights are normalised, so that a document's first tokens have a price.
  """
  length, num_experts = scores.shape[1:]
  quantile = 1.0 - num_experts_per_token / num_experts
  bins = jax.lax.stop_gradient(scores).astype(jnp.float32) * num_bins
  bins = jnp.clip(bins, 0, num_bins - 1).astype(jnp.int32)
  chunks = jax.tree.map(
      lambda x: _chunked(x, chunk_size), (bins, segments, positions)
  )
  rows = scores.shape[0]
  none = jnp.zeros((rows,), jnp.int32)
  mass = jnp.zeros((rows, num_experts, num_bins), jnp.float32)
  _, prices = jax.lax.scan(
      functools.partial(_price_chunk, quantile, decay),
      (mass, none, none),
      chunks,
  )
  return prices.swapaxes(0, 1).reshape(rows, -1, num_experts)[:, :length]


def sign_bias(
    counts: Int[Array, " e"], bias: Float[Array, " e"], *, step_size: float
) -> Float[Array, " e"]:
  """Moves the bias one step up where the load is below the mean, down above.

  bias + step_size * sign(mean(counts) - counts)

  Args:
    counts: [E] int32 tokens per expert over the whole step.
    bias: [E] fp32, the bias under which they were counted.
    step_size: score units per optimizer step, e.g. 1e-3.

  Returns:
    [E] fp32 bias for the next step.

  Source: loss-free balancing, arXiv:2408.15664.
  """
  total = jnp.sum(counts)
  whole, part = total // counts.size, total % counts.size
  # The sign of mean - count in integers: the halves settle count == floor(mean).
  direction = jnp.sign(2 * (whole - counts) + (part > 0))
  return bias.astype(jnp.float32) + step_size * direction


def switch_loss(
    scores: Float[Array, "g e"],
    expert_indices: Int[Array, "g a"],
    *,
    weight: float,
    token_mask: Bool[Array, " g"] | None = None,
) -> Float[Array, ""]:
  """Penalises loads and scores that pile up on the same experts.

  weight * E * sum_j f_j P_j, f_j the share of the assignments that reach
  expert j, P_j the mean over tokens of scores_j / sum(scores). Its value at
  uniform loads is weight; the gradient goes through P alone.

  Args:
    scores: [G, E] router scores.
    expert_indices: [G, A] int32 from route.
    weight: the loss's coefficient, e.g. 1e-3.
    token_mask: [G] True where a token counts, or None.

  Returns:
    fp32 scalar; 0 if no token counts.

  Source: Switch Transformers, eq. 4-6, arXiv:2101.03961.
  """
  num_experts = scores.shape[-1]
  counts = expert_counts(expert_indices, num_experts, token_mask)
  load = counts / jnp.maximum(jnp.sum(counts), 1)
  if token_mask is None:
    token_mask = jnp.ones(scores.shape[0], bool)
  counted = token_mask[:, None]
  # Selected before and after: a NaN at padding reaches no gradient.
  scores = jnp.where(counted, scores.astype(jnp.float32), 1.0)
  share = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
  tokens = jnp.maximum(jnp.sum(token_mask), 1)
  mean_share = jnp.sum(jnp.where(counted, share, 0.0), axis=0) / tokens
  return weight * num_experts * jnp.sum(load * mean_share)


def expert_counts(
    expert_indices: Int[Array, "g a"],
    num_experts: int,
    token_mask: Bool[Array, " g"] | None = None,
) -> Int[Array, " e"]:
  """Counts the tokens each expert was assigned.

  Args:
    expert_indices: [G, A] int32 from route.
    num_experts: E.
    token_mask: [G] True where a token counts, or None.

  Returns:
    [E] int32.
  """
  if token_mask is not None:
    expert_indices = jnp.where(token_mask[:, None], expert_indices, num_experts)
  return _count(expert_indices, num_experts)


def max_violation(counts: Int[Array, " e"]) -> Float[Array, ""]:
  """Returns max(counts) / mean(counts) - 1 in fp32; 0 if nothing was counted.

  Args:
    counts: [E] int32 tokens per expert.

  Source: loss-free balancing, arXiv:2408.15664.
  """
  mean = jnp.sum(counts) / counts.size
  return jnp.where(mean > 0, jnp.max(counts) / jnp.maximum(mean, 1e-9) - 1, 0.0)


def _crossing(histogram, cumulative, target):
  """First bin of each expert that reaches its target, what lies below, in it."""
  index = jnp.argmax(cumulative >= target[:, None], axis=-1)
  in_bin = jnp.take_along_axis(histogram, index[:, None], axis=-1)[:, 0]
  upto = jnp.take_along_axis(cumulative, index[:, None], axis=-1)[:, 0]
  return index, upto - in_bin, in_bin


def _centred(estimate, counted, bias):
  """The estimates less their mean; the bias where nothing was counted."""
  estimate = jnp.where(counted, estimate, bias)
  centred = estimate - jnp.mean(estimate)
  return jnp.where(jnp.any(counted), centred, bias)


def _price_chunk(quantile, decay, carry, chunk):
  """Prices of a chunk's tokens; carries the histogram of the latest one."""
  mass, last_segment, last_position = carry  # [B, E, bins], [B], [B]
  bins, segments, positions = chunk  # [B, C, E], [B, C], [B, C]
  counted = segments > 0
  place = jnp.arange(segments.shape[1])

  def weight(same, since):
    return jnp.where(same, decay ** jnp.maximum(since, 0), 0.0)

  same = segments[:, :, None] == segments[:, None, :]
  same &= counted[:, None, :] & (place[:, None] >= place[None])[None]
  inside = weight(same, positions[:, :, None] - positions[:, None, :])
  before = weight(
      segments == last_segment[:, None], positions - last_position[:, None]
  )
  one_hot = jax.nn.one_hot(bins, mass.shape[-1], dtype=jnp.float32)
  masses = jnp.einsum(
      "bic,bcek->biek", inside, one_hot, precision=jax.lax.Precision.HIGHEST
  )
  masses += before[:, :, None, None] * mass[:, None]
  cumulative = jnp.cumsum(masses, axis=-1)
  reached = cumulative >= quantile * cumulative[..., -1:]
  price = (jnp.argmax(reached, axis=-1) + 0.5) / mass.shape[-1]

  # The last token that is not padding; if all is padding, what there was.
  last = jnp.max(jnp.where(counted, place[None], -1), axis=1)

  def latest(new, old):
    index = jnp.maximum(last, 0).reshape(-1, *[1] * (new.ndim - 1))
    new = jnp.take_along_axis(new, index, axis=1)[:, 0]
    return jnp.where((last >= 0).reshape(-1, *[1] * (old.ndim - 1)), new, old)

  carry = (
      latest(masses, mass),
      latest(segments, last_segment),
      latest(positions, last_position),
  )
  return carry, jnp.where(counted[:, :, None], price, 0.0)


def _chunked(x, size):
  """[B, T, ...] -> [chunks, B, size, ...], padded with zeros."""
  pad = -x.shape[1] % size
  x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
  return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)


def _count(indices, length):
  """[length] int32 occurrences; an index of `length` or more is not counted."""
  counts = jnp.zeros(length, jnp.int32)
  return counts.at[indices.reshape(-1)].add(1, mode="drop")
