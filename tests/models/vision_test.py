"""The vision tower, and where its tokens go."""

import dataclasses

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from sparsemm_jax import models
from sparsemm_jax.models import vision
from tests import testing
from tests.models import small_model

CONFIG = small_model.config(num_layers=1, vision=small_model.VISION)
PAD = small_model.VISION.media_pad_id


def image_patches(height, width, seed):
  """Patches of one random image, in the order that merging needs."""
  rng = np.random.default_rng(seed)
  y, x = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
  positions = np.stack([y, x], axis=-1)
  positions = positions.reshape(height // 2, 2, width // 2, 2, 2)
  positions = positions.transpose(0, 2, 1, 3, 4).reshape(-1, 2)
  count = height * width
  return vision.Images(
      rng.uniform(-1, 1, (count, 12)).astype(np.float32),
      positions.astype(np.int32),
      np.tile(np.int32([height, width]), (count, 1)),
      np.ones(count, np.int32),
  )


def packed(*images, length):
  """One row of images, padded to `length` patches."""
  numbered = [
      image._replace(segment_ids=image.segment_ids * (index + 1))
      for index, image in enumerate(images)
  ]
  joined = [np.concatenate(parts) for parts in zip(*numbered, strict=True)]
  spare = length - len(joined[0])
  return vision.Images(
      *(np.pad(x, [(0, spare)] + [(0, 0)] * (x.ndim - 1))[None] for x in joined)
  )


class EncoderTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    module = vision.VisionEncoder(CONFIG)
    params = small_model.variables(CONFIG)["params"]["vision"]
    apply = jax.jit(module.apply)
    self.encode = lambda images: apply({"params": params}, images)[0]
    self.params = params

  def test_images_of_one_row_do_not_see_each_other(self):
    first, second = image_patches(4, 2, 0), image_patches(2, 6, 1)
    both = self.encode(packed(first, second, length=24))
    self.assertEqual(both.shape, (6, CONFIG.d_model))
    alone = [self.encode(packed(x, length=24)) for x in (first, second)]
    testing.assert_close(both[:2], alone[0][:2], "append fp32")
    testing.assert_close(both[2:5], alone[1][:3], "append fp32")
    # A pixel of the first reaches all of its tokens and no other.
    first.patches[7, 0] += 1.0
    changed = self.encode(packed(first, second, length=24))
    testing.assert_same(changed[2:5], both[2:5])
    difference = np.abs(np.asarray(changed[:2] - both[:2])).max(axis=1)
    self.assertTrue((difference > 1e-4).all(), difference)

  def test_both_coordinates_matter(self):
    image = image_patches(4, 4, 0)
    expected = self.encode(packed(image, length=24))[:4]
    flipped = image._replace(positions=image.positions[:, ::-1].copy())
    actual = self.encode(packed(flipped, length=24))[:4]
    self.assertGreater(testing.rms_error(actual, expected), 1e-3)

  def test_scanned_equals_unrolled(self):
    images = packed(image_patches(4, 4, 0), length=16)
    params = dict(self.params)
    layers = [params.pop(f"layer_{i}") for i in range(2)]
    params["layers"] = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    config = dataclasses.replace(CONFIG, scan_layers=True, remat="full")
    apply = jax.jit(vision.VisionEncoder(config).apply)
    actual = apply({"params": params}, images)[0]
    testing.assert_close(actual, self.encode(images), "fp32")


class PositionTest(absltest.TestCase):

  def _rows(self, table, height, width):
    images = packed(image_patches(height, width, 0), length=height * width)
    module = vision.PositionTable(CONFIG)
    rows = jax.jit(module.apply)({"params": {"embedding": table}}, images)[0]
    return np.asarray(rows), images.positions[0]

  def test_a_grid_of_the_tables_size_reads_the_table(self):
    table = jax.random.normal(jax.random.key(0), (4, 4, 16))
    rows, positions = self._rows(table, 4, 4)
    expected = np.asarray(table)[positions[:, 0], positions[:, 1]]
    testing.assert_close(rows, expected, "float64 oracle, fp32")

  def test_other_grids_interpolate_linearly(self):
    y, x = np.meshgrid(np.arange(4.0), np.arange(4.0), indexing="ij")
    table = np.zeros((4, 4, 16))
    table[..., 0], table[..., 1] = y, x
    rows, positions = self._rows(jnp.float32(table), 8, 2)
    # Cell centres at half-integers of both grids; flat beyond the last ones.
    expected = (positions + 0.5) * 4 / np.array([8, 2]) - 0.5
    expected = np.clip(expected, 0, 3)
    testing.assert_close(rows[:, :2], expected, "float64 oracle, fp32")

  def test_rope_pairs_take_x_first(self):
    angles = vision.rope_angles(jnp.int32([[[3, 5]]]), 8, 10000.0)[0, 0]
    slow = 10000.0 ** (-4 / 8)
    expected = [5, 3, 5 * slow, 3 * slow]
    testing.assert_close(angles, expected, "float64 oracle, fp32")


class PlacementTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    tokens = small_model.tokens(2, 10)
    tokens[0, [1, 2, 5]] = PAD
    tokens[1, [4]] = PAD
    rows = [
        packed(image_patches(2, 4, 0), image_patches(2, 2, 1), length=16),
        packed(image_patches(2, 2, 2), length=16),
    ]
    self.tokens = tokens
    self.images = vision.Images(*map(np.concatenate, zip(*rows, strict=True)))

  def test_image_tokens_replace_media_pads_in_order(self):
    config, tokens = CONFIG, self.tokens
    variables = small_model.variables(config)
    encoder = vision.VisionEncoder(config)
    image_tokens = jax.jit(encoder.apply)(
        {"params": variables["params"]["vision"]}, self.images
    )
    # A model whose token table holds the image tokens gives the same logits.
    table = variables["params"]["token_embedding"]["embedding"]
    table = jnp.concatenate([table, image_tokens[0, :3], image_tokens[1, :1]])
    spelled = tokens.copy()
    spelled[0, [1, 2, 5]] = config.vocab_size + np.arange(3)
    spelled[1, 4] = config.vocab_size + 3
    params = {**variables["params"], "token_embedding": {"embedding": table}}
    wide = dataclasses.replace(config, vocab_size=table.shape[0], vision=None)
    params["head"] = {
        "kernel": jnp.pad(params["head"]["kernel"], ((0, 0), (0, 4)))
    }
    expected = jax.jit(models.SparseMultimodalModel(wide).apply)(
        {**variables, "params": params}, spelled
    )
    actual = small_model.apply(config, tokens, images=self.images)
    testing.assert_close(actual.hidden, expected.hidden, "append fp32")

  def test_a_wrong_number_of_media_pads_is_refused(self):
    tokens = self.tokens.copy()
    tokens[1, 7] = PAD
    message = "row 1 has 2 media pads .* but its images give 1 tokens"
    with self.assertRaisesRegex(ValueError, message):
      models.check_image_tokens(tokens, self.images, CONFIG)
    model = models.SparseMultimodalModel(CONFIG)
    with self.assertRaisesRegex(ValueError, message):
      model.apply(small_model.variables(CONFIG), tokens, images=self.images)
    with self.assertRaisesRegex(ValueError, "row 0 has 3 media pads"):
      models.check_image_tokens(tokens, None, CONFIG)
    models.check_image_tokens(self.tokens, self.images, CONFIG)

  def test_images_need_a_tower(self):
    config = dataclasses.replace(CONFIG, vision=None)
    with self.assertRaisesRegex(ValueError, "ModelConfig.vision is None"):
      models.check_image_tokens(self.tokens, self.images, config)


if __name__ == "__main__":
  absltest.main()
