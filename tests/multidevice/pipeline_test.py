"""Tests that a pipeline computes what one device would, and what it sends."""

import functools
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import config as config_lib
from sparsemm_jax.parallel import mesh as mesh_lib
from sparsemm_jax.parallel import pipeline
from tests import testing

WIDTH = 6


def _cached(stages, virtual):
  """Comm_cached of Attention Residuals, 4.1, with one row per chunk."""
  first = stages * (stages - 1) // 2
  return first + (virtual - 1) * stages**2


def _stage(chunk, params, bank, prefix, example, *, schedule, freezes):
  """Mixes the bank, multiplies, adds up; freezes[chunk] says before what."""
  weights = params["w"][chunk // schedule.stages]  # [layers, D, D]
  for layer, freeze in enumerate(freezes[chunk]):
    if freeze:
      bank, prefix = (*bank, prefix), None
    sources = jnp.stack([*bank, *([] if prefix is None else [prefix])])
    logits = jnp.einsum("s...d,d->s...", sources, params["query"])
    mixed = jnp.sum(jax.nn.softmax(logits, 0)[..., None] * sources, 0)
    y = jnp.tanh(mixed @ weights[layer]) + example[:, None]
    prefix = y if prefix is None else prefix + y
  loss = jnp.sum(jnp.sin(prefix)) if chunk == schedule.chunks - 1 else 0.0
  return bank, prefix, {"loss": loss, "runs": jnp.int32(1)}


def _plan(stages, virtual, micro_batches, freezes=None):
  """A schedule, and its _stage; a block of one layer per chunk by default."""
  chunks = stages * virtual
  freezes = freezes or ((True,),) * chunks
  rows = np.concatenate([[0], np.cumsum([sum(f) for f in freezes])[:-1]])
  schedule = pipeline.Schedule(
      stages, virtual, micro_batches, tuple(rows.tolist())
  )
  stage = functools.partial(_stage, schedule=schedule, freezes=freezes)
  rng = np.random.default_rng(0)
  layers = max(map(len, freezes))
  shape = (stages, virtual, layers, WIDTH, WIDTH)
  params = {
      "w": rng.normal(size=shape).astype("f"),  # device r has chunks v P + r
      "query": rng.normal(size=WIDTH).astype("f"),
  }
  x = rng.normal(size=(micro_batches, 4, WIDTH)).astype("f")
  examples = rng.normal(size=(micro_batches, 4)).astype("f")
  return schedule, stage, (params, x), examples


def _mesh(stages):
  config = config_lib.MeshConfig(data=1, stage=stages)
  return mesh_lib.make_mesh(config, jax.devices()[:stages])


def _pipelined(schedule, stage, mesh):
  """((params, x), examples) -> (h, sums)."""

  def run(params, x, examples):
    params = {"w": params["w"][0], "query": params["query"]}
    results = pipeline.pipeline(stage, params, x, examples, schedule)
    return jax.lax.psum(results, "stage")

  params = {"w": jax.P("stage"), "query": jax.P()}
  function = jax.shard_map(
      run,
      mesh=mesh,
      in_specs=(params, jax.P(), jax.P()),
      out_specs=jax.P(),
      check_vma=False,
  )
  return lambda trained, examples: function(*trained, examples)


def _plain(schedule, stage):
  """The same without a pipeline."""

  def run(trained, examples):
    params, x = trained

    def one(h, example):
      bank, all_sums = (), []
      for chunk in range(schedule.chunks):
        local = {**params, "w": params["w"][chunk % schedule.stages]}
        bank, h, sums = stage(chunk, local, bank, h, example)
        all_sums.append(sums)
      return h, jax.tree.map(lambda *x: sum(x), *all_sums)

    h, sums = jax.vmap(one)(x, examples)
    return h, jax.tree.map(lambda x: jnp.sum(x, dtype=x.dtype), sums)

  return run


def _loss(run):
  def loss(trained, examples):
    h, sums = run(trained, examples)
    return sums["loss"] + jnp.sum(h * jnp.cos(h)), (h, sums)

  return jax.jit(jax.value_and_grad(loss, has_aux=True))


class PipelineTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("four_by_two", 4, 2, 6, None),
      ("eight", 8, 1, 3, None),
      # Chunks of 2, 1, 3, 2 layers; blocks begin inside chunks and at borders.
      ("uneven", 2, 2, 3, (
          (True, False), (False,), (True, False, True), (False, True)
      )),
      ("ordinary_residuals", 2, 2, 4, ((False,),) * 4),
  )  # fmt: skip
  def test_values_and_gradients_are_those_of_one_device(
      self, stages, virtual, micro_batches, freezes
  ):
    schedule, stage, trained, examples = _plan(
        stages, virtual, micro_batches, freezes
    )
    (expected, aux), expected_grads = _loss(_plain(schedule, stage))(
        trained, examples
    )
    run = _pipelined(schedule, stage, _mesh(stages))
    (actual, actual_aux), grads = _loss(run)(trained, examples)
    testing.assert_close(actual, expected, "sharded fp32")
    for a, b in zip(
        jax.tree.leaves((actual_aux, grads)),
        jax.tree.leaves((aux, expected_grads)),
        strict=True,
    ):
      testing.assert_close(a, b, "sharded fp32")


class BytesTest(parameterized.TestCase):

  @parameterized.parameters((4, 2), (8, 1), (8, 2))
  def test_hops_carry_what_the_cached_formula_says(self, stages, virtual):
    chunks, micro_batches, shape = stages * virtual, stages, (3, 5)
    schedule = pipeline.Schedule(
        stages, virtual, micro_batches, tuple(range(chunks))
    )

    def stage(chunk, params, bank, prefix, example):
      del chunk, example
      bank = (*bank, prefix)
      return bank, params * sum(bank[1:], bank[0]), {}

    run = jax.shard_map(
        lambda params, x: pipeline.pipeline(stage, params, x, (), schedule)[0],
        mesh=_mesh(stages),
        in_specs=(jax.P(), jax.P()),
        out_specs=jax.P("stage"),
        check_vma=False,
    )
    step = jax.jit(jax.grad(lambda params, x: jnp.sum(run(params, x))))
    x = np.ones((micro_batches, *shape), np.float32)
    text = step.lower(np.float32(1.0), x).compile().as_text()
    row = 4 * micro_batches * np.prod(shape)
    kinds = pipeline.hop_kinds(schedule)
    forward, backward = (
        sum(branches[kind] for kind in kinds) / row for branches in _hops(text)
    )
    self.assertEqual(forward, _cached(stages, virtual))
    self.assertEqual(backward, _cached(stages, virtual))
    naive = chunks * (chunks - 1) // 2
    self.assertEqual(forward < naive, virtual > 1)


def _hops(text):
  """Bytes that each branch of each conditional with a hop sends, from HLO."""
  sent = {}
  for name, body in re.findall(
      r"^(?:ENTRY )?%([\w.\-]+) \(.*?\n(.*?)^}", text, re.M | re.S
  ):
    hops = re.findall(
        r"= f32\[([\d,]+)\]\S* collective-permute(?:-start)?\("
        r".*source_target_pairs=\{(\{.*?\})\}",
        body,
    )
    sent[name] = sum(
        4 * np.prod([int(size) for size in shape.split(",")]) * pairs.count("{")
        for shape, pairs in hops
    )
  found = [
      [sent[name.strip(" %")] for name in branches.split(",")]
      for branches in re.findall(r"branch_computations=\{(.*?)\}", text)
  ]
  if sum(map(sum, found)) != sum(sent.values()):
    raise AssertionError("a hop outside the conditionals")
  return [branches for branches in found if any(branches)]


if __name__ == "__main__":
  absltest.main()
