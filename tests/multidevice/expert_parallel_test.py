"""Tests that experts spread over ranks compute what one device would."""

import dataclasses
import functools
import re
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from sparsemm_jax import balancing
from sparsemm_jax import config as config_lib
from sparsemm_jax.layers import layout as layout_lib
from sparsemm_jax.layers import moe
from sparsemm_jax.parallel import expert
from sparsemm_jax.parallel import mesh as mesh_lib
from sparsemm_jax.parallel import rules
from sparsemm_jax.training import loop
from sparsemm_jax.training import router
from sparsemm_jax.training import state as state_lib
from sparsemm_jax.training import step as step_lib
from tests import testing
from tests import tiny_run
from tests.models import small_model

ROWS, LENGTH = 8, 6
CONFIG = small_model.config(
    d_model=24,
    moe=config_lib.MoeConfig(
        num_experts=112, num_experts_per_token=4, latent_dim=16,
        expert_hidden_dim=10, histogram_bins=50, num_shared_experts=0,
        row_budget=None,
    ),
)  # fmt: skip
MESHES = {
    "expert_2_data_fsdp": dict(data=2, fsdp=2, expert=2),
    "expert_4_data": dict(data=2, expert=4),
    "expert_8": dict(data=1, expert=8),
    "expert_2_context_tensor": dict(data=1, expert=2, context=2, tensor=2),
}


def _with_moe(config, **changes):
  return dataclasses.replace(
      config, moe=dataclasses.replace(config.moe, **changes)
  )


@functools.cache
def _variables(config):
  """Parameters larger than at initialisation, and where a mesh puts them."""
  x = jnp.zeros((1, 1, config.d_model))
  layout = layout_lib.packed(jnp.ones((1, 1), jnp.int32))
  boxed = jax.eval_shape(
      lambda: moe.LatentMoE(config).init(jax.random.key(0), x, layout)
  )
  rng = np.random.default_rng(0)
  params = jax.tree.map(
      lambda leaf: np.float32(rng.normal(0, 0.2, leaf.shape)),
      nn.unbox(boxed["params"]),
  )
  return params, boxed["params"]


def _inputs(config):
  """Rows of tokens, one of them nothing but padding: a rank without tokens."""
  rng = np.random.default_rng(1)
  x = np.float32(rng.normal(size=(ROWS, LENGTH, config.d_model)))
  segments = np.ones((ROWS, LENGTH), np.int32)
  segments[3] = 0
  segments[5, -2:] = 0
  bias = np.float32(0.1 * rng.normal(size=config.moe.num_experts))
  return x, segments, bias - bias.mean()


def _make_step(config):
  """The layer's loss, its gradients, and the counts for the next bias."""

  def loss(params, x, segments, bias):
    variables = {"params": params, "router_state": {"router": {"bias": bias}}}
    y, sown = moe.LatentMoE(config).apply(
        variables, x, layout_lib.packed(segments), mutable=["router_stats"]
    )
    y = jnp.where((segments > 0)[..., None], jnp.sin(y), 0.0)
    return jnp.sum(y), (y, router.total(sown["router_stats"]))

  def step(params, x, segments, bias):
    gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, (y, sums)), grads = gradient(params, x, segments, bias)
    state = {"router": {"bias": bias}}
    state = router.update(state, sums, config.moe, step=0)
    return {
        "loss": value, "y": y, "grads": grads, "sums": sums,
        "bias": state["router"]["bias"],
    }  # fmt: skip

  return step


@functools.cache
def _compiled(config, mesh_name=None):
  """The step, compiled for one device or a mesh; and how to place arrays."""
  params, boxed = _variables(config)
  x, segments, bias = _inputs(config)
  if mesh_name is None:
    step = jax.jit(_make_step(config))
    return step.lower(params, x, segments, bias).compile(), lambda *args: args
  mesh = mesh_lib.make_mesh(config_lib.MeshConfig(**MESHES[mesh_name]))
  replicated = jax.NamedSharding(mesh, jax.P())
  rows = rules.batch_sharding(mesh)
  shardings = (rules.shardings(mesh, boxed), rows, rows, replicated)
  place = lambda *args: jax.device_put(args, shardings)
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules.LOGICAL_RULES):
    step = jax.jit(_make_step(config))
    return step.lower(*place(params, x, segments, bias)).compile(), place


def _run(config, mesh_name=None, **changes):
  """Runs the step on the standard inputs, some of them changed."""
  compiled, place = _compiled(config, mesh_name)
  x, segments, bias = _inputs(config)
  given = {"x": x, "segments": segments, "bias": bias, **changes}
  return jax.device_get(
      compiled(*place(_variables(config)[0], *given.values()))
  )


def _collectives(text):
  """Each collective of a compiled program: (name, dtype, shape) per array."""
  found = []
  for arrays, name in re.findall(
      r"= (\S.*?) (all-gather|all-reduce|reduce-scatter|all-to-all)\(", text
  ):
    for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", arrays):
      found.append(
          (name, dtype, tuple(map(int, filter(None, shape.split(",")))))
      )
  return found


def _summed_integers(found):
  """Shapes of the arrays of integers, without the scalars, that are reduced."""
  return [
      shape
      for name, dtype, shape in found
      if name == "all-reduce" and dtype.startswith(("s", "u")) and shape
  ]


CASES = (
    ("expert_2_data_fsdp", "gather"),
    ("expert_2_data_fsdp", "all_to_all"),
    ("expert_2_context_tensor", "gather"),
    ("expert_4_data", "all_to_all"),
    ("expert_8", "all_to_all"),  # gather: with 896 experts below
)


def _case_config(mesh, exchange):
  """The config whose default is this exchange does not name it."""
  is_default = (MESHES[mesh]["expert"] < 4) == (exchange == "gather")
  return CONFIG if is_default else _with_moe(CONFIG, exchange=exchange)


class ExpertParallelTest(parameterized.TestCase):

  def _assert_same_step(self, actual, expected):
    self.assertEqual(actual["sums"]["dropped"], 0)
    self.assertGreater(np.abs(expected["bias"]).max(), 0)
    testing.assert_same(actual["bias"], expected["bias"], "bias")
    jax.tree.map(testing.assert_same, actual["sums"], expected["sums"])
    jax.tree_util.tree_map_with_path(
        lambda path, a, b: testing.assert_close(
            a, b, "sharded fp32", jax.tree_util.keystr(path)
        ),
        {name: actual[name] for name in ("loss", "y", "grads")},
        {name: expected[name] for name in ("loss", "y", "grads")},
    )

  @parameterized.parameters(*CASES)
  def test_loss_gradients_and_bias_are_those_of_one_device(
      self, mesh, exchange
  ):
    config = _case_config(mesh, exchange)
    with self.subTest("all experts"):
      self._assert_same_step(_run(config, mesh), _run(CONFIG))
    with self.subTest("all tokens to the experts of one rank"):
      bias = np.zeros(112, np.float32)
      bias[[5, 6, 7, 8]] = 9.0
      expected = _run(CONFIG, bias=bias)
      counts = expected["sums"]["router"]["counts"]
      self.assertEqual(np.count_nonzero(counts), 4)
      self._assert_same_step(_run(config, mesh, bias=bias), expected)

  @parameterized.parameters(*CASES)
  def test_rows_travel_and_weights_stay(self, mesh, exchange):
    compiled, _ = _compiled(_case_config(mesh, exchange), mesh)
    found = _collectives(compiled.as_text())
    names = {name for name, _, _ in found}
    self.assertEqual("all-to-all" in names, exchange == "all_to_all")
    ranks = MESHES[mesh]["expert"]
    stacks = {
        shape
        for name, _, shape in found
        if name == "all-gather" and shape[1:] in ((16, 10), (10, 16))
    }
    # fsdp completes the matrices of the experts that a rank holds.
    of_a_rank = {(112 // ranks, 16, 10), (112 // ranks, 10, 16)}
    self.assertEqual(stacks, of_a_rank if "fsdp" in MESHES[mesh] else set())
    # Counts, histogram and dropped visits together.
    self.assertEqual(_summed_integers(found), [(112 + 112 * 50 + 1,)])

  def test_896_experts_and_16_per_token(self):
    config = small_model.config(
        d_model=16,
        moe=config_lib.MoeConfig(
            num_experts=896, num_experts_per_token=16, latent_dim=8,
            expert_hidden_dim=6, histogram_bins=50, num_shared_experts=0,
        ),
    )  # fmt: skip
    self._assert_same_step(_run(config, "expert_8"), _run(config))


class RunExpertsTest(parameterized.TestCase):
  """Expert j multiplies by j + 1: what becomes of each visit is known."""

  E, A, RANKS = 16, 3, 4

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.z = np.float32(rng.normal(size=(8, 4, 5)))
    # Low experts are popular: the first ranks get more than their share.
    self.indices = np.argsort(
        rng.normal(size=(8, 4, self.E)) + 0.3 * np.arange(self.E), axis=-1
    )[..., : self.A].astype(np.int32)
    self.weights = np.float32(rng.uniform(0.1, 1.0, size=(8, 4, self.A)))
    self.valid = rng.uniform(size=(8, 4)) > 0.1

  def _run(self, **changes):
    config = config_lib.MoeConfig(
        num_experts=self.E, num_experts_per_token=self.A, **changes
    )
    mesh = mesh_lib.make_mesh(config_lib.MeshConfig(data=2, expert=self.RANKS))

    def multiply(weights, rows, group_sizes):
      factors = jnp.repeat(
          weights["factor"], group_sizes, total_repeat_length=rows.shape[0]
      )
      inside = jnp.arange(rows.shape[0]) < jnp.sum(group_sizes)
      return jnp.where(inside[:, None], rows * factors[:, None], 0.0)

    def run(factor, z, weights, indices, valid):
      routing = balancing.Routing(indices, weights, weights[..., 0])
      return expert.run_experts(
          multiply, {"factor": factor}, {"factor": ("expert",)},
          z, routing, valid, config,
      )  # fmt: skip

    @jax.jit
    def run_and_differentiate(*args):
      u, backward, dropped = jax.vjp(
          lambda *three: run(*three, *args[3:]), *args[:3], has_aux=True
      )
      return u, dropped, backward(jnp.cos(u))

    factor = np.arange(1, self.E + 1, dtype=np.float32)
    with jax.set_mesh(mesh):
      u, dropped, grads = run_and_differentiate(
          factor, self.z, self.weights, self.indices, self.valid
      )
    self.grads = jax.device_get(grads)
    return np.asarray(u), np.asarray(dropped)

  def _expected(self, kept):
    terms = (self.indices + 1) * self.weights * kept
    return np.sum(terms, axis=-1, keepdims=True) * self.z

  def test_padding_visits_no_expert(self):
    self.z[~self.valid] = np.nan
    u, dropped = self._run(exchange="gather")
    testing.assert_same(u[~self.valid], 0 * u[~self.valid])
    kept = np.broadcast_to(self.valid[..., None], self.indices.shape)
    self.z[~self.valid] = 0.0
    testing.assert_close(u, self._expected(kept), "fp32")
    testing.assert_same(dropped, np.zeros(8))

  def test_visits_beyond_the_budget_are_counted_and_left_out(self):
    per_rank = 4 * self.A  # the visits of one rank's tokens
    results = {}
    for exchange in ("gather", "all_to_all"):
      results[exchange] = self._run(
          exchange=exchange, row_budget=1.0, drop_overflow=True
      )
    u, dropped = results["gather"]
    testing.assert_close(results["all_to_all"][0], u, "fp32")
    testing.assert_same(results["all_to_all"][1], dropped)
    # Each source may fill the same share of a rank it would overflow.
    owner = np.where(self.valid[..., None], self.indices // 4, 4)
    kept = np.zeros(self.indices.shape, bool)
    for group in (slice(0, 4), slice(4, 8)):  # along the axis data
      wanted = np.stack(
          [np.bincount(o.ravel(), minlength=5)[:4] for o in owner[group]]
      )
      total = wanted.sum(axis=0)
      self.assertGreater(total.max(), per_rank)
      share = np.minimum(1, per_rank / np.maximum(total, 1))
      upto = np.floor(np.cumsum(wanted, axis=0) * share + 1e-6)
      left = np.diff(upto, axis=0, prepend=0)
      for row, a, t in np.ndindex(4, self.A, 4):  # best experts first
        rank = owner[group][row, t, a]
        if rank < 4 and left[row, rank] > 0:
          left[row, rank] -= 1
          kept[group][row, t, a] = True
    testing.assert_same(
        dropped, self.valid.sum(1) * self.A - kept.sum((1, 2)), "dropped"
    )
    self.assertGreater(dropped.sum(), 0)
    testing.assert_close(u, self._expected(kept), "fp32")

  @parameterized.parameters("gather", "all_to_all")
  def test_visits_beyond_the_budget_wait_for_another_pass(self, exchange):
    expected, _ = self._run(exchange=exchange, row_budget=None)
    grads = self.grads
    # A quarter of the mean: five passes and more.
    actual, dropped = self._run(exchange=exchange, row_budget=0.25)
    testing.assert_same(dropped, np.zeros(8))
    testing.assert_close(actual, expected, "fp32")
    for a, e in zip(self.grads, grads, strict=True):
      testing.assert_close(a, e, "fp32 gradient")

  def test_the_ragged_collective_gets_the_parts_that_padding_moves(self):
    expected, _ = self._run(exchange="all_to_all", row_budget=None)
    grads = self.grads

    def by_definition(
        operand, output, input_offsets, send_sizes, output_offsets, recv_sizes,
        *, axis_name,
    ):  # fmt: skip
      del recv_sizes
      me = jax.lax.axis_index(axis_name)
      operand, inputs, sizes, outputs = (
          jax.lax.all_gather(x, axis_name)
          for x in (operand, input_offsets, send_sizes, output_offsets)
      )
      row = jnp.arange(output.shape[0])
      for source in range(self.RANKS):
        i = row - outputs[source, me]
        inside = (i >= 0) & (i < sizes[source, me])
        taken = operand[source][jnp.clip(i + inputs[source, me], 0,
                                         operand.shape[1] - 1)]  # fmt: skip
        output = jnp.where(inside[:, None], taken, output)
      return output

    with (
        mock.patch.object(jax.lax, "ragged_all_to_all", by_definition),
        mock.patch.object(dispatch, "device_platform", lambda: "gpu"),
    ):
      actual, _ = self._run(exchange="all_to_all", row_budget=None)
    testing.assert_close(actual, expected, "append fp32")
    for a, e in zip(self.grads, grads, strict=True):
      testing.assert_close(a, e, "append fp32")


class TrainTest(absltest.TestCase):

  def test_the_load_of_the_ranks_is_measured_where_there_are_several(self):
    counts = np.int32([[5, 1, 1, 1], [0, 2, 2, 4]])
    stats = {
        "decoder": {
            f"layer_{i}": {"moe": {"router": {"counts": row}, "dropped": 0}}
            for i, row in enumerate(counts)
        }
    }
    self.assertNotIn("router/rank_violation", router.metrics(stats))
    mesh = mesh_lib.make_mesh(config_lib.MeshConfig(data=4, expert=2))
    with jax.set_mesh(mesh):
      violation = router.metrics(stats)["router/rank_violation"]
    np.testing.assert_allclose(violation, [0.5, 0.5])

  def test_one_all_reduce_sums_all_layers_and_one_program_serves_all_steps(
      self,
  ):
    run = tiny_run.text_config(
        moe={"row_budget": None},
        stages=(tiny_run.stage(steps=9, seq_len=16),),
    )
    run = dataclasses.replace(
        run,
        model=dataclasses.replace(
            run.model, num_layers=2, mla_every=1, scan_layers=True
        ),
        optim=config_lib.OptimConfig(muon=False),
    )
    mesh = mesh_lib.make_mesh(config_lib.MeshConfig(data=2, fsdp=2, expert=2))
    shardings = state_lib.state_shardings(run, mesh)
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        jax.eval_shape(lambda: state_lib.init_state(run)),
        shardings,
    )
    batch = loop.put_batch(tiny_run.batches(run, 1)[0], mesh)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules.LOGICAL_RULES):
      gradient_step = jax.jit(step_lib.make_gradient_step(run))
      lowered = gradient_step.lower(state, batch)
      compiled = lowered.compile()
      sums = jax.tree.map(
          lambda leaf, sharding: jax.ShapeDtypeStruct(
              leaf.shape, leaf.dtype, sharding=sharding
          ),
          lowered.out_info,
          compiled.output_shardings,
      )
      update_step = jax.jit(step_lib.make_update_step(run))
      update = update_step.lower(state, sums).compile()
    found = _collectives(compiled.as_text())
    self.assertEqual(_summed_integers(found), [(2 * (8 + 8 * 100 + 1),)])
    # A state that came back spread otherwise would compile both once more.
    new_shardings, _ = update.output_shardings
    jax.tree_util.tree_map_with_path(
        lambda path, leaf, new, old: self.assertTrue(
            new.is_equivalent_to(old, leaf.ndim), jax.tree_util.keystr(path)
        ),
        state, new_shardings, shardings,
    )  # fmt: skip


if __name__ == "__main__":
  absltest.main()
