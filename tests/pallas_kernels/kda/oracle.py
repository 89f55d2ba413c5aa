"""Bounded-decay delta attention in NumPy float64, a token at a time.

Written from the recurrence alone and sharing nothing with the package.
"""

import numpy as np


def fused_kda(
    q,
    k,
    v,
    z,
    beta_logits,
    a_log,
    dt_bias,
    initial_state,
    segment_ids=None,
    lower_bound=-5.0,
):
  """Returns (out, final_state) of raw projections."""
  q, k, z = (np.asarray(x, np.float64) for x in (q, k, z))
  a_log, dt_bias = (np.asarray(x, np.float64) for x in (a_log, dt_bias))
  slope = np.exp(a_log)[:, None]
  g = lower_bound * _sigmoid(slope * (z + dt_bias))
  beta = _sigmoid(np.asarray(beta_logits, np.float64))
  q = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6)
  k = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
  return kda(q, k, v, g, beta, initial_state, segment_ids)


def kda(q, k, v, g, beta, initial_state, segment_ids=None):
  """Returns (out, final_state); inputs as chunk_kda's."""
  q, k, v, g, beta, state = (
      np.array(x, np.float64) for x in (q, k, v, g, beta, initial_state)
  )
  batch, tokens, value_heads, _ = v.shape
  per_query_head = value_heads // q.shape[2]
  out = np.zeros_like(v)
  for b in range(batch):
    current = None
    for t in range(tokens):
      if segment_ids is not None:
        segment = int(segment_ids[b, t])
        if segment == 0:
          continue
        if current is not None and segment != current:
          state[b] = 0.0
        current = segment
      for j in range(value_heads):
        key, query = k[b, t, j // per_query_head], q[b, t, j // per_query_head]
        decayed = np.exp(g[b, t, j])[:, None] * state[b, j]
        error = v[b, t, j] - key @ decayed
        state[b, j] = decayed + beta[b, t, j] * np.outer(key, error)
        out[b, t, j] = query @ state[b, j] / np.sqrt(len(query))
  return out, state


def _sigmoid(x):
  return 1.0 / (1.0 + np.exp(-x))
