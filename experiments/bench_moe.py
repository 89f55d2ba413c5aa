"""Times one LatentMoE layer on one device: the whole, and part by part.

  python -m experiments.bench_moe

By default K3's 896 experts and top-16 at half of its widths, 8192 tokens =
131,072 rows, every array in bf16. A part is compiled and timed by itself on
what the part before it returned, so the parts do not add up to the whole,
where XLA fuses across them.
"""

import concurrent.futures
import functools
import inspect
import time

from absl import app
from absl import flags
import jax
from jax import numpy as jnp
import numpy as np

from pallas_kernels import grouped_matmul
from sparsemm_jax import balancing
from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import activations
from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.layers import moe
from sparsemm_jax.parallel import rows as rows_lib

_TOKENS = flags.DEFINE_integer("tokens", 8192, "Tokens of the batch.")
_WIDTH = flags.DEFINE_integer("width", 3584, "d_model.")
_LATENT = flags.DEFINE_integer("latent", 1792, "The experts' outer width.")
_HIDDEN = flags.DEFINE_integer("hidden", 1536, "The experts' inner width.")
_EXPERTS = flags.DEFINE_integer("experts", 896, "")
_PER_TOKEN = flags.DEFINE_integer("per_token", 16, "Experts per token.")
_SHARED = flags.DEFINE_integer("shared", 2, "Shared experts.")
_IMPLEMENTATION = flags.DEFINE_string(
    "implementation", None, "Of grouped_matmul; the device's best by default."
)


def _parts():
  """Part -> (function of earlier results by name, what it returns)."""
  experts, per_token = _EXPERTS.value, _PER_TOKEN.value
  width, latent, hidden = _WIDTH.value, _LATENT.value, _HIDDEN.value
  multiply = functools.partial(
      grouped_matmul.grouped_matmul, implementation=_IMPLEMENTATION.value
  )

  def scores(x, router):
    logits = jnp.matmul(
        x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST
    )
    return jax.nn.sigmoid(logits)

  def shared(x, shared_gate, shared_up, shared_down):
    return activations.situ_glu(x @ shared_gate, x @ shared_up) @ shared_down

  shared_dim = _SHARED.value * hidden
  shapes = {
      "x": (_TOKENS.value, width),
      "router": (width, experts),
      "bias": (experts,),
      "latent_down": (width, latent),
      "latent_up": (latent, width),
      "gate": (experts, latent, hidden),
      "up": (experts, latent, hidden),
      "down": (experts, hidden, latent),
      "shared_gate": (width, shared_dim),
      "shared_up": (width, shared_dim),
      "shared_down": (shared_dim, width),
  }
  parts = {
      "scores": scores,
      "routing": lambda scores, bias: balancing.route(scores, bias, per_token),
      "histogram": lambda scores, routing, bias: balancing.margin_histogram(
          scores, routing.cutoff, bias
      ),
      "z": lambda x, latent_down: x @ latent_down,
      "visits": lambda routing: rows_lib.sort_by_expert(
          routing.expert_indices, experts
      ),
      "rows": lambda z, visits: rows_lib.to_experts(z, visits),
      "product": lambda rows, gate, up, visits: multiply(
          rows, (gate, up), visits.group_sizes
      ),
      "activation": lambda product: activations.situ_glu(
          *jnp.split(product, 2, axis=-1)
      ),
      "returned": lambda activation, down, visits: multiply(
          activation, down, visits.group_sizes
      ),
      "u": lambda returned, routing, visits: rows_lib.to_tokens(
          returned, routing.combine_weights, visits
      ),
      "y": lambda u, latent_up: u.astype(jnp.bfloat16) @ latent_up,
      "shared": shared,
  }
  return shapes, parts


_LABELS = {
    "scores": "router",
    "routing": "top-k",
    "histogram": "margin histogram",
    "z": "latent down",
    "visits": "sort by expert",
    "rows": "gather rows",
    "product": "gate and up product",
    "activation": "SiTU-GLU",
    "returned": "down product",
    "u": "combine",
    "y": "latent up",
    "shared": "shared experts",
}


def _draw(shapes):
  """Random arrays, scaled so that every product keeps its inputs' size."""

  @jax.jit
  def make():
    keys = jax.random.split(jax.random.key(0), len(shapes))
    values = {}
    for key, (name, shape) in zip(keys, shapes.items()):
      scale = 1.0 if name == "x" else shape[-2:][0] ** -0.5
      dtype = jnp.float32 if name in ("router", "bias") else jnp.bfloat16
      values[name] = (scale * jax.random.normal(key, shape, dtype)).astype(
          dtype
      )
    values["bias"] *= 0.0
    return values

  return make()


def _config():
  return config_lib.ModelConfig(
      d_model=_WIDTH.value,
      dtype="bfloat16",
      param_dtype="bfloat16",
      moe=config_lib.MoeConfig(
          num_experts=_EXPERTS.value,
          num_experts_per_token=_PER_TOKEN.value,
          latent_dim=_LATENT.value,
          expert_hidden_dim=_HIDDEN.value,
          num_shared_experts=_SHARED.value,
          implementation=_IMPLEMENTATION.value,
      ),
  )


def _layer():
  """The layer's forward, and its forward and backward; and their shapes."""
  layer = moe.LatentMoE(_config())
  x = jax.ShapeDtypeStruct((1, _TOKENS.value, _WIDTH.value), jnp.bfloat16)
  layout = layout_lib.packed(jnp.ones((1, _TOKENS.value), jnp.int32))
  variables = jax.eval_shape(
      lambda x: layer.init(jax.random.key(0), x, layout), x
  )

  def forward(variables, x):
    return layer.apply(variables, x, layout)

  def both(variables, x):
    state = {k: v for k, v in variables.items() if k != "params"}
    out, pull = jax.vjp(
        lambda params, x: forward({"params": params, **state}, x),
        variables["params"],
        x,
    )
    return out, pull(out)

  return forward, both, variables, x


def timed(run) -> float:
  """Median milliseconds of a call over 5 runs of several back to back."""
  jax.block_until_ready(run())
  began = time.perf_counter()
  jax.block_until_ready(run())
  calls = int(np.clip(0.03 / (time.perf_counter() - began), 1, 10))
  times = []
  for _ in range(5):
    began = time.perf_counter()
    for _ in range(calls):
      result = run()
    jax.block_until_ready(result)
    times.append((time.perf_counter() - began) / calls * 1e3)
  return float(np.median(times))


def _names(function):
  return list(inspect.signature(function).parameters)


def _compiled():
  """Everything compiled, side by side: the parts by name, and the layer."""
  shapes, parts = _parts()
  structs = jax.eval_shape(lambda: _draw(shapes))
  jobs = {}
  for name, function in parts.items():
    given = [structs[n] for n in _names(function)]
    jobs[name] = function, given
    structs[name] = jax.eval_shape(function, *given)
  forward, both, *arrays = _layer()
  jobs["whole layer, forward"] = forward, arrays
  jobs["whole layer, forward+backward"] = both, arrays
  compile_one = lambda job: jax.jit(job[0]).lower(*job[1]).compile()
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    compiled = dict(zip(jobs, pool.map(compile_one, jobs.values())))
  whole = {name: compiled.pop(name) for name in list(compiled)[len(parts) :]}
  given = {name: _names(function) for name, function in parts.items()}
  return shapes, given, compiled, whole, arrays


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments {argv[1:]}")
  shapes, given, parts, whole, structs = _compiled()
  print(f"# {jax.devices()[0].device_kind}, {_TOKENS.value} tokens", flush=True)
  values, total = _draw(shapes), 0.0
  for name, part in parts.items():
    run = functools.partial(part, *[values[n] for n in given[name]])
    values[name] = run()
    milliseconds = timed(run)
    total += milliseconds
    print(f"{_LABELS[name]:32s} {milliseconds:8.3f} ms", flush=True)
  print(f"{'sum of the parts':32s} {total:8.3f} ms", flush=True)
  largest = int(jnp.max(values["visits"].group_sizes))
  mean = _TOKENS.value * _PER_TOKEN.value / _EXPERTS.value
  print(f"# the largest expert has {largest / mean:.2f} x the mean's rows")
  del values, run
  key = jax.random.key(1)
  draw = lambda s: 0.02 * jax.random.normal(key, s.shape, s.dtype)
  arrays = jax.jit(lambda: jax.tree.map(draw, structs))()
  for name, layer in whole.items():
    milliseconds = timed(functools.partial(layer, *arrays))
    print(f"{name:32s} {milliseconds:8.3f} ms", flush=True)


if __name__ == "__main__":
  app.run(main)
