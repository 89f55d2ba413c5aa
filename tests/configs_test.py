"""Tests that every config builds, and that wrong settings are named."""

import dataclasses
import importlib.util
import json
import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp

from pallas_kernels import attn_res
from pallas_kernels import grouped_matmul
from pallas_kernels import kda
from sparsemm_jax import config as config_lib
from sparsemm_jax.data import pipeline
from sparsemm_jax.models import presets
from sparsemm_jax.parallel import mesh as mesh_lib
from sparsemm_jax.training import state

FOLDER = pathlib.Path(__file__).parents[1] / "configs"
FILES = sorted(path.stem for path in FOLDER.glob("*.py"))


def _load(name):
  spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


class ConfigsTest(parameterized.TestCase):

  def test_there_are_configs(self):
    self.assertContainsSubset({"tiny", "small"}, FILES)

  @parameterized.parameters(*FILES)
  def test_a_run_can_be_built(self, name):
    config = config_lib.from_config_dict(_load(name))
    self.assertIsInstance(config, config_lib.RunConfig)
    pipeline.make_tokenizer(config)
    abstract = jax.eval_shape(lambda: state.init_state(config))
    one_device = mesh_lib.make_mesh(config_lib.MeshConfig(), jax.devices()[:1])
    shardings = state.state_shardings(config, one_device)
    self.assertEqual(
        jax.tree.structure(shardings), jax.tree.structure(abstract)
    )
    self.assertNotEmpty(jax.tree.leaves(abstract.router_state))

  @parameterized.parameters(*FILES)
  def test_dicts_and_json_give_the_config_back(self, name):
    values = _load(name)
    config = config_lib.from_config_dict(values)
    self.assertEqual(
        config_lib.from_config_dict(config_lib.to_config_dict(config)), config
    )
    text = json.dumps(config_lib.to_dict(config))
    self.assertEqual(config_lib.from_config_dict(json.loads(text)), config)

  def test_a_field_that_is_none_takes_a_value_of_its_type_and_none(self):
    values = config_lib.to_config_dict(config_lib.RunConfig())
    self.assertIsNone(values.train.keep_every)
    values.train.keep_every = 5
    values.model.kda.implementation = "reference"
    config = config_lib.from_config_dict(values)
    self.assertEqual(config.train.keep_every, 5)
    self.assertEqual(config.model.kda.implementation, "reference")
    with self.assertRaises(TypeError):
      values.train.keep_latest = "two"


def _set(values, path, value):
  *parents, name = path.split(".")
  for parent in parents:
    values = values[int(parent)] if parent.isdigit() else values[parent]
  values[name] = value


class MessagesTest(parameterized.TestCase):

  @parameterized.parameters(
      # Unknown fields, with the nearest name.
      ("optim.learning_rat", 1.0, "config.optim.learning_rat: unknown field"),
      ("optim.learning_rat", 1.0, "did you mean 'learning_rate'?"),
      ("train.stages.0.seq_length", 8, "config.train.stages[0].seq_length"),
      # Other types.
      ("model.d_model", 1.5, "config.model.d_model: expected int, got 1.5"),
      ("model.d_model", True, "config.model.d_model: expected int, got True"),
      ("model.dtype", None, "config.model.dtype: expected str, got None"),
      ("optim.muon", 1, "config.optim.muon: expected bool, got 1"),
      ("model.moe", 3, "config.model.moe: expected fields, got 3"),
      # Values a section refuses.
      ("model.dtype", "fp8", "config.model: ModelConfig.dtype must be one of"),
      ("model.d_model", 0, "ModelConfig.d_model must be positive, got 0"),
      ("model.num_dense_layers", 99, "ModelConfig.num_dense_layers=99"),
      ("model.kda.num_value_heads", 3, "KdaConfig.num_value_heads=3"),
      ("model.kda.lower_bound", 0.0, "KdaConfig.lower_bound=0.0"),
      ("model.kda.lower_bound", -9.0, "is not in (-5.9146, 0)"),
      ("model.kda.implementation", "xla", "KdaConfig.implementation must be"),
      ("model.attn_res_implementation", "xla", "attn_res_implementation must"),
      ("model.moe.implementation", "chunked", "MoeConfig.implementation must"),
      ("model.moe.num_experts_per_token", 16, "must be below num_experts=16"),
      ("model.moe.balancing", "luck", "MoeConfig.balancing must be one of"),
      ("model.vision.head_dim", 30, "VisionConfig.head_dim=30"),
      ("model.vision.media_pad_id", 9999, "VisionConfig.media_pad_id"),
      ("optim.adam_b1", 1.5, "OptimConfig.adam_b1=1.5"),
      ("mesh.data", 0, "MeshConfig.data=0 must be positive or -1"),
      ("mesh.fsdp", -1, "MeshConfig: more than one axis is -1"),
      ("train.stages", (), "TrainConfig.stages is empty"),
      ("train.stages.0.micro_batches", 3, "StageConfig.batch_size=8"),
      ("train.stages.0.tokens", 9, "exactly one of steps and tokens"),
      ("train.stages.0.mixture", {}, "StageConfig.mixture"),
      ("data.tokenizer.kind", "tokenizers", "TokenizerConfig.path must be set"),
      ("data.sources.python.path", "x", "SourceConfig.path must not be set"),
      # Sections that do not fit each other.
      ("train.stages.0.mixture", {"x": 1.0}, "train.stages[0].mixture names"),
      ("train.stages.0.max_patches", 6, "train.stages[0].max_patches=6 is not"),
  )  # fmt: skip
  def test_a_wrong_setting_is_named(self, path, value, message):
    run = config_lib.RunConfig(model=presets.get_preset("tiny"))
    values = config_lib.to_dict(run)
    _set(values, path, value)
    with self.assertRaises(config_lib.ConfigError) as caught:
      config_lib.from_config_dict(values)
    self.assertIn(message, str(caught.exception))
    self.assertNotIn("\n", str(caught.exception))

  @parameterized.parameters(
      (kda.fused_kda, [(1, 1, 1, 1)] * 4 + [(1, 1, 1), (1,), (1, 1)],
       config_lib.KDA_IMPLEMENTATIONS),
      (attn_res.attn_res, [(1, 1, 1), (1,), (1,)], config_lib.ATTN_RES_IMPLEMENTATIONS),
      (grouped_matmul.grouped_matmul, [(1, 1), (1, 1, 1)],
       config_lib.GROUPED_MATMUL_IMPLEMENTATIONS),
  )  # fmt: skip
  def test_the_implementations_are_those_of_the_kernels(
      self, function, shapes, names
  ):
    arguments = [jnp.zeros(shape) for shape in shapes]
    if function is grouped_matmul.grouped_matmul:
      arguments.append(jnp.ones(1, jnp.int32))
    with self.assertRaisesRegex(
        ValueError, re.escape(f"not one of {sorted(names[1:])}")
    ):
      function(*arguments, implementation="foo")

  def test_images_need_a_vision_tower(self):
    stage = config_lib.StageConfig(steps=1, max_patches=4)
    with self.assertRaisesRegex(config_lib.ConfigError, "model.vision is None"):
      config_lib.RunConfig(train=config_lib.TrainConfig(stages=(stage,)))

  @parameterized.parameters(
      (dict(vocab_size=200, vision=None), "model.vocab_size=200 is below"),
      (
          dict(
              vision=dataclasses.replace(
                  presets.get_preset("tiny").vision, media_pad_id=257
              )
          ),
          "model.vision.media_pad_id=257",
      ),
  )
  def test_the_tokenizer_has_to_fit_the_model(self, changes, message):
    model = dataclasses.replace(presets.get_preset("tiny"), **changes)
    with self.assertRaisesRegex(ValueError, message):
      pipeline.make_tokenizer(config_lib.RunConfig(model=model))


if __name__ == "__main__":
  absltest.main()
