"""Tests that a sequence spread over eight devices is one sequence."""

import functools
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from pallas_kernels import kda
from pallas_kernels.kda import context
from sparsemm_jax import config as config_lib
from sparsemm_jax.parallel import mesh as mesh_lib
from tests import testing

SHARDS = 8
TOKENS = 10  # of one shard
SPEC = jax.P(None, "context")
REGIMES = {"random": None, "saturated": 8.0, "hardly_decaying": -12.0}  # z
BY_TOKEN = ("q", "k", "v", "g", "beta", "z", "beta_logits")


def _lengths(*runs):
  """Segment ids [1, T] from (id, tokens) pairs."""
  ids, lengths = zip(*runs, strict=True)
  return np.repeat(ids, lengths).astype(np.int32)[None]


# Two rows each; a shard has 10 tokens.
SEGMENTS = {
    "one_document": np.ones((2, SHARDS * TOKENS), np.int32),
    "documents_across_boundaries": np.concatenate([
        _lengths((4, 3), (7, 32), (1, 5), (2, 10), (3, 29), (9, 1)),
        _lengths((2, 10), (5, 20), (2, 50)),
    ]),
    # Padding inside a document, shards of padding only, an id that comes back
    # after another one, ids that differ in their upper half only.
    "padding_shards": np.concatenate([
        _lengths((0, 13), (6, 4), (0, 25), (6, 8), (0, 10), (8, 1), (6, 19)),
        _lengths((3, 8), (0, 30), (3 + 2**16, 9), (3, 13), (0, 20)),
    ]),
    "nothing_but_padding": np.zeros((2, SHARDS * TOKENS), np.int32),
}


def _inputs(op, regime="random"):
  """Random fp32 inputs: two rows, one query head for two value heads."""
  tokens, heads, key, value = (2, SHARDS * TOKENS), 2, 8, 4
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  q, k = normal(*tokens, 1, key), normal(*tokens, 1, key)
  inputs = {
      "v": normal(*tokens, heads, value),
      "initial_state": normal(2, heads, key, value),
  }
  if op == "chunk_kda":
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    g = -5.0 * rng.uniform(size=(*tokens, heads, key)).astype(np.float32)
    beta = rng.uniform(size=(*tokens, heads)).astype(np.float32)
    return {"q": unit(q), "k": unit(k), "g": g, "beta": beta, **inputs}
  z = 2.0 * normal(*tokens, heads, key) - 3.0
  return {
      "q": q,
      "k": k,
      "z": z if regime == "random" else np.full_like(z, REGIMES[regime]),
      "beta_logits": normal(*tokens, heads),
      "a_log": 0.3 * normal(heads),
      "dt_bias": normal(heads, key),
      **inputs,
  }


def _one_device(op, implementation):
  """(inputs, segment_ids) -> (out, final_state)."""
  function = functools.partial(getattr(kda, op), implementation=implementation)
  return lambda inputs, ids: function(**inputs, segment_ids=ids)


def _eight_devices(op):
  """The same by chunks, tokens spread."""
  mesh = mesh_lib.make_mesh(config_lib.MeshConfig(data=1, context=SHARDS))
  function = functools.partial(getattr(context, op), implementation="chunked")

  def run(inputs, ids):
    specs = {name: SPEC if name in BY_TOKEN else jax.P() for name in inputs}
    return jax.shard_map(
        lambda inputs, ids: function(**inputs, segment_ids=ids),
        mesh=mesh,
        in_specs=(specs, SPEC),
        out_specs=(SPEC, jax.P()),
        check_vma=False,
    )(inputs, ids)

  return run


def _with_gradients(run):
  """A compiled (inputs, segment_ids, cotangents) -> (outputs, gradients)."""

  def pull(inputs, ids, cotangents):
    outputs, vjp = jax.vjp(lambda x: run(x, ids), inputs)
    return outputs, vjp(cotangents)[0]

  return jax.jit(pull)


class ContextTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.eight = staticmethod(_with_gradients(_eight_devices("fused_kda")))
    cls.one = staticmethod(
        _with_gradients(_one_device("fused_kda", "reference"))
    )

  @parameterized.product(regime=tuple(REGIMES), segments=tuple(SEGMENTS))
  def test_values_and_gradients_are_those_of_one_device(self, regime, segments):
    inputs = _inputs("fused_kda", regime)
    rng = np.random.default_rng(1)
    cotangents = tuple(
        rng.standard_normal(inputs[name].shape).astype(np.float32)
        for name in ("v", "initial_state")
    )
    ids = SEGMENTS[segments]
    outputs, grads = self.eight(inputs, ids, cotangents)
    with jax.enable_x64(True):
      float64 = lambda tree: jax.tree.map(np.float64, tree)
      expected, expected_grads = self.one(
          float64(inputs), ids, float64(cotangents)
      )
    for actual, value in zip(outputs, expected, strict=True):
      testing.assert_close(actual, value, "sharded fp32")
    for name in inputs:
      kind = "sharded fp32"
      if regime == "saturated" and name in ("z", "a_log", "dt_bias"):
        # Differences of larger numbers, on one device too (4e-5; the two sums
        # over tokens 3e-4).
        kind = "fp32 gradient" if name == "z" else "bf16 gradient"
      testing.assert_close(grads[name], expected_grads[name], kind, name)

  def test_given_gates_take_one_all_gather(self):
    inputs = _inputs("chunk_kda")
    ids = SEGMENTS["documents_across_boundaries"]
    run = jax.jit(_eight_devices("chunk_kda"))
    program = run.lower(inputs, ids).compile()
    collectives = re.findall(
        r" (all-[a-z]+|reduce-scatter|collective-[a-z]+)(?:-start)?\(",
        program.as_text(),
    )
    self.assertEqual(collectives, ["all-gather"])
    outputs = program(inputs, ids)
    expected = jax.jit(_one_device("chunk_kda", "reference"))(inputs, ids)
    for actual, value in zip(outputs, expected, strict=True):
      testing.assert_close(actual, value, "sharded fp32")


if __name__ == "__main__":
  absltest.main()
