"""Tests of logical names and of the specs that follow from them."""

from absl.testing import absltest
from absl.testing import parameterized
import flax.linen as nn
import jax
from jax import sharding
import jax.numpy as jnp

from sparsemm_jax import config as config_lib
from sparsemm_jax.optim import build
from sparsemm_jax.parallel import mesh as mesh_lib
from sparsemm_jax.parallel import rules

P = sharding.PartitionSpec


def _boxed(shape, names):
  return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, "float32"), names)


def _mesh(**sizes):
  shape = {axis: sizes.get(axis, 1) for axis in mesh_lib.AXES}
  return sharding.AbstractMesh(tuple(shape.values()), tuple(shape))


class RulesTest(parameterized.TestCase):

  @parameterized.parameters(
      # An axis of the mesh of size 1 spreads nothing.
      ((8, 4, 6), ("embed", "heads", "head_dim"), {}, P(None, None, None)),
      (
          (8, 4, 6), ("embed", "heads", "head_dim"), dict(fsdp=2, tensor=2),
          P("fsdp", "tensor", None),
      ),
      ((3, 8, 4), ("layers", "embed", "mlp"), dict(tensor=2),
       P(None, None, "tensor")),
      ((8, 6, 4), ("expert", "latent", "expert_mlp"),
       dict(expert=4, fsdp=2, tensor=2), P("expert", "fsdp", "tensor")),
      # 3 heads do not divide over 2 devices.
      ((8, 3, 6), ("embed", "heads", "head_dim"), dict(fsdp=2, tensor=2),
       P("fsdp", None, None)),
      # Both axes ask for fsdp: the first has it.
      ((8, 4), ("embed", "latent"), dict(fsdp=2), P("fsdp", None)),
      # ... unless it does not divide.
      ((7, 4), ("embed", "latent"), dict(fsdp=2), P(None, "fsdp")),
      # The stages of a pipeline share what fsdp does.
      ((8, 4), ("embed", "heads"), dict(stage=4, tensor=2),
       P("stage", "tensor")),
      ((8, 4), ("embed", "heads"), dict(fsdp=2, stage=4),
       P(("fsdp", "stage"), None)),
      # 2 x 4 devices do not divide 12, 2 do.
      ((12, 4), ("embed", "heads"), dict(fsdp=2, stage=4), P("fsdp", None)),
      # ... so that the next axis has the other.
      ((12, 4), ("embed", "latent"), dict(fsdp=2, stage=4),
       P("fsdp", "stage")),
  )  # fmt: skip
  def test_specs_follow_the_rules(self, shape, names, sizes, expected):
    result = rules.shardings(_mesh(**sizes), {"w": _boxed(shape, names)})
    self.assertEqual(result["w"].spec, expected)

  def test_an_axis_kept_whole_is_logged_once(self):
    tree = {"odd_one": _boxed((7, 5), ("embed", "rank"))}
    with self.assertLogs("absl", "INFO") as logs:
      rules.shardings(_mesh(fsdp=2), tree)
      rules.shardings(_mesh(fsdp=2), tree)
    self.assertLen(logs.output, 1)
    self.assertIn("odd_one", logs.output[0])
    self.assertIn("embed of size 7", logs.output[0])

  @parameterized.parameters(
      (_boxed((8,), ("embd",)), r"\['a'\]\['w'\]: no rule .* 'embd'"),
      (_boxed((8, 2), ("embed",)), r"\['a'\]\['w'\]: logical names"),
      (jax.ShapeDtypeStruct((8,), "float32"), r"\['a'\]\['w'\] has no logical"),
  )
  def test_a_parameter_without_a_rule_is_named(self, leaf, message):
    with self.assertRaisesRegex(ValueError, message):
      rules.logical_names({"a": {"w": leaf}})

  def test_moments_are_spread_like_their_parameters(self):
    tree = {
        "kernel": _boxed((8, 4), ("embed", "mlp")),
        "norm": {"scale": _boxed((8,), ("embed",))},
    }
    mesh = _mesh(fsdp=2, tensor=2)
    optimizer = build.make_optimizer(
        config_lib.OptimConfig(), rules.logical_names(tree), 10
    )
    state = jax.eval_shape(
        optimizer.init,
        jax.tree.map(lambda x: jnp.zeros(x.shape), nn.unbox(tree)),
    )
    result = rules.optimizer_shardings(
        mesh, optimizer, state, rules.shardings(mesh, tree)
    )
    self.assertEqual(jax.tree.structure(result), jax.tree.structure(state))
    inner = result[1].inner_states
    muon, adam = inner["muon"].inner_state[0], inner["adam"].inner_state
    self.assertEqual(muon.mu["kernel"].spec, P("fsdp", "tensor"))
    self.assertEqual(adam.nu["norm"]["scale"].spec, P("fsdp"))
    self.assertEqual(adam.count.spec, P())


if __name__ == "__main__":
  absltest.main()
