"""Tests of the optimizer against NumPy, one parameter of each kind."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import optax

from sparsemm_jax import config as config_lib
from sparsemm_jax.optim import build
from sparsemm_jax.optim import schedules
from tests import testing

# name -> (logical names, shape)
PARAMETERS = {
    "q_proj": (("layers", "embed", "heads", "head_dim"), (2, 12, 3, 4)),
    "o_proj": (("layers", "heads", "head_dim", "embed"), (2, 3, 4, 12)),
    "gate_proj": (("layers", "expert", "latent", "expert_mlp"), (2, 5, 6, 8)),
    "router": (("embed", "router"), (12, 5)),
    "norm": (("layers", "embed"), (2, 12)),
    "dt_bias": (("heads", "head_dim"), (3, 4)),
    "conv": (("conv", "heads", "head_dim"), (4, 3, 4)),
    "table": (("vocab", "embed"), (9, 12)),
    "positions": (("position_y", "position_x", "vision_embed"), (4, 4, 6)),
    "head": (("embed", "vocab"), (12, 9)),
}
MUON = ("q_proj", "o_proj", "gate_proj", "router")
DECAYED = (*MUON, "head")
NUM_STEPS = 100
NAMES = {name: names for name, (names, _) in PARAMETERS.items()}


def _tree(seed):
  rng = np.random.default_rng(seed)
  return {
      name: rng.normal(size=shape).astype(np.float32)
      for name, (_, shape) in PARAMETERS.items()
  }


@functools.partial(jax.jit, static_argnums=0)
def _update(config, params, grads):
  optimizer = build.make_optimizer(config, NAMES, NUM_STEPS)
  return optimizer.update(grads, optimizer.init(params), params)


def _global_norm(tree):
  return np.sqrt(sum(np.sum(np.square(x)) for x in tree.values()))


def _newton_schulz(matrix):
  """Five steps in float64; singular values end near one."""
  x = matrix.astype(np.float64)
  if not x.any():
    return x
  x = x / np.linalg.norm(x)
  for _ in range(5):
    gram = x @ x.T
    x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
  return 0.2 * np.sqrt(max(matrix.shape)) * x


def _expected_directions(grads):
  """The first step: Muon's momentum is the gradient, Adam's g / |g|."""
  result = {name: np.sign(g) for name, g in grads.items()}
  q, o = np.zeros((2, 12, 3, 4)), np.zeros((2, 3, 4, 12))
  gate = np.zeros((2, 5, 6, 8))
  for layer in range(2):
    for head in range(3):
      q[layer, :, head] = _newton_schulz(grads["q_proj"][layer, :, head])
    o[layer] = _newton_schulz(grads["o_proj"][layer].reshape(12, 12)).reshape(
        3, 4, 12
    )
    for expert in range(5):
      gate[layer, expert] = _newton_schulz(grads["gate_proj"][layer, expert])
  router = _newton_schulz(grads["router"])
  return result | dict(q_proj=q, o_proj=o, gate_proj=gate, router=router)


class BuildTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = config_lib.OptimConfig(learning_rate=0.1, clip_norm=1e6)
    cls.params, cls.grads = _tree(0), _tree(1)
    cls.grads["gate_proj"][1, 2] = 0.0  # an expert that saw no token
    cls.updates, _ = _update(cls.config, cls.params, cls.grads)

  def test_one_step_equals_numpy_for_every_kind_of_parameter(self):
    rate = float(schedules.learning_rate(self.config, NUM_STEPS)(0))
    for name, direction in _expected_directions(self.grads).items():
      decay = self.config.weight_decay if name in DECAYED else 0.0
      expected = -rate * (direction + decay * self.params[name])
      testing.assert_close(self.updates[name], expected, "fp32", name)

  def test_weights_without_a_gradient_only_decay(self):
    rate = float(schedules.learning_rate(self.config, NUM_STEPS)(0))
    idle = self.params["gate_proj"][1, 2]
    expected = -rate * self.config.weight_decay * idle
    testing.assert_close(self.updates["gate_proj"][1, 2], expected, "fp32")

  def test_every_parameter_has_the_state_of_exactly_one_rule(self):
    optimizer = build.make_optimizer(config_lib.OptimConfig(), NAMES, 10)
    inner = jax.eval_shape(optimizer.init, _tree(0))[1].inner_states
    muon = inner["muon"].inner_state[0].mu
    adam = inner["adam"].inner_state.mu
    for name in NAMES:
      by_muon, by_adam = (
          not isinstance(moments[name], optax.MaskedNode)
          for moments in (muon, adam)
      )
      self.assertEqual((by_muon, by_adam), (name in MUON, name not in MUON))

  def test_without_muon_adam_updates_everything_with_the_same_decay(self):
    config = config_lib.OptimConfig(muon=False, clip_norm=0.5)
    updates, state = _update(config, self.params, self.grads)
    rate = float(schedules.learning_rate(config, NUM_STEPS)(0))
    factor = config.clip_norm / _global_norm(self.grads)
    for name in NAMES:
      decay = config.weight_decay if name in DECAYED else 0.0
      clipped = factor * self.grads[name]
      direction = clipped / (np.abs(clipped) + config.adam_eps)
      expected = -rate * (direction + decay * self.params[name])
      testing.assert_close(updates[name], expected, "fp32", name)
    # Its momentum has seen a gradient of clipped norm.
    momentum = state[1].inner_states["adam"].inner_state.mu
    norm = _global_norm(momentum) / (1 - config.adam_b1)
    testing.assert_close(norm, config.clip_norm, "fp32")

  @parameterized.parameters(
      (("embed", "mlp", "rank"),), (("embed", "heads", "head_dim", "mlp"),)
  )
  def test_a_parameter_without_a_rule_is_named(self, names):
    with self.assertRaisesRegex(ValueError, r"\['strange'\].*no rule"):
      build.make_optimizer(
          config_lib.OptimConfig(), {"block": {"strange": names}}, 10
      )


if __name__ == "__main__":
  absltest.main()
