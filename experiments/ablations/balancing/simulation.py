"""A stream of random tokens, balanced as a training step balances.

The tokens are x ~ N(0, 1) in 64 dimensions; an expert's score is
sigmoid(x . w + o), w . x ~ N(0, 1) and o ~ N(0, 1) fixed, so that some experts
are far more popular than others.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import balancing

RULES = ("quantile", "sign 1e-3", "sign 1e-2", "none")
_WIDTH = 64


def simulate(
    rules: tuple[str, ...],
    seed: int,
    *,
    steps: int,
    num_experts: int,
    num_experts_per_token: int,
    tokens: int,
) -> dict[str, np.ndarray]:
  """Runs the stream.

  Args:
    rules: names out of RULES.
    seed: of the experts and the tokens.
    steps: how many.
    num_experts: E.
    num_experts_per_token: A.
    tokens: per step.

  Returns:
    rule -> tokens per expert at each step [steps, E].
  """
  key = jax.random.key(seed)
  kernel = jax.random.normal(key, (_WIDTH, num_experts)) / _WIDTH**0.5
  offsets = jax.random.normal(jax.random.fold_in(key, 1), (num_experts,))
  step = jax.jit(
      functools.partial(
          _step, num_experts_per_token=num_experts_per_token, tokens=tokens
      )
  )
  biases = {rule: jnp.zeros(num_experts) for rule in rules}
  counts = {rule: [] for rule in rules}
  for number in range(steps):
    drawn = jax.random.fold_in(key, 2 + number)
    biases, now = step(drawn, kernel, offsets, biases)
    for rule in rules:
      counts[rule].append(np.asarray(now[rule]))
  return {rule: np.stack(values) for rule, values in counts.items()}


def _step(key, kernel, offsets, biases, *, num_experts_per_token, tokens):
  """Routes one batch with every rule's bias; returns new biases, counts."""
  x = jax.random.normal(key, (tokens, _WIDTH))
  scores = jax.nn.sigmoid(x @ kernel + offsets[None])
  updated, counts = {}, {}
  for rule, bias in biases.items():
    routing = balancing.route(scores, bias, num_experts_per_token)
    counts[rule] = balancing.expert_counts(
        routing.expert_indices, kernel.shape[1]
    )
    updated[rule] = bias
    if rule == "quantile":
      updated[rule] = balancing.quantile_bias(
          balancing.margin_histogram(scores, routing.cutoff, bias),
          bias,
          num_experts_per_token=num_experts_per_token,
      )
    elif rule.startswith("sign"):
      size = float(rule.split()[1])
      updated[rule] = balancing.sign_bias(counts[rule], bias, step_size=size)
  return updated, counts
