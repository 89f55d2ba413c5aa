"""Other libraries' bounded attention on the same raw inputs.

Each is optional and only measured: a peer that does not import is left out
and its reason printed. fla runs in a process of its own, `python -m
experiments.kda_bench.fla`.
"""

import functools
import importlib

import jax
from jax import numpy as jnp

from pallas_kernels.kda import gate


def jax_peers(names):
  """{name: run(x) -> output} of those of `names` that import."""
  makers = {"jax-linear-attention": _jla, "tokamax": _tokamax}
  runs = {}
  for name in names:
    if name not in makers:
      continue
    try:
      runs[name] = makers[name]()
    except ImportError as error:
      print(f"{name} is left out: {error}")
  return runs


def _jla():
  """jax-linear-attention; XLA makes the gate, the bound and beta."""
  peer = importlib.import_module("jla.ops.mosaic_gpu.kda")

  def run(x):
    g = gate.bounded_log_decay(x["z"], x["a_log"], x["dt_bias"])
    beta = jax.nn.sigmoid(x["beta_logits"].astype(jnp.float32))
    return peer.kda(x["q"], x["k"], x["v"], g, beta, use_qk_l2norm=True)[0]

  return run


def _tokamax():
  """tokamax's xla_chunked, heads first; the transposes are part of the call."""
  peer = importlib.import_module("tokamax._src.ops.kda.api")
  call = functools.partial(
      peer.kimi_delta_attention,
      use_qk_l2norm=True,
      use_gate_in_kernel=True,
      lower_bound=-5.0,
      implementation="xla_chunked",
  )

  def run(x):
    heads_first = (jnp.moveaxis(x[name], 2, 0) for name in "qkvz")
    beta = jax.nn.sigmoid(x["beta_logits"].astype(jnp.float32))
    out, _ = call(
        *heads_first,
        jnp.moveaxis(beta, 2, 0),
        a_log=x["a_log"],
        delta_time_bias=x["dt_bias"].reshape(-1),
    )
    return jnp.moveaxis(out, 0, 2)

  return run
