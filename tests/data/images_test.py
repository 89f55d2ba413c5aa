"""Images become patches whose merge is a reshape."""

import io
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
from PIL import Image

from sparsemm_jax import config as config_lib
from sparsemm_jax import data
from sparsemm_jax.data import images
from tests import testing


def random_image(height: int, width: int) -> np.ndarray:
  rng = np.random.default_rng(height * 1000 + width)
  return rng.integers(0, 256, (height, width, 3), np.uint8)


class ImagesTest(parameterized.TestCase):

  @parameterized.parameters(
      (448, 448, 256),
      (448, 449, 272),
      (449, 448, 272),
      (896, 896, 1024),
      (1080, 1920, 2691),
      (3584, 3584, 16384),
      (8000, 8000, 16641),
      (1, 1, 1),
  )
  def test_token_counts_of_the_published_model(self, height, width, tokens):
    config = config_lib.VisionConfig(patch_size=14)
    self.assertEqual(images.num_image_tokens(height, width, config), tokens)

  @parameterized.parameters((28, 28), (1, 300), (63, 20), (29, 57))
  def test_token_count_is_that_of_the_patches(self, height, width):
    config = config_lib.VisionConfig(patch_size=14)
    patches = images.extract_patches(random_image(height, width), config)
    tokens = images.num_image_tokens(height, width, config)
    self.assertLen(patches.patches, tokens * config.patches_per_token)
    self.assertEqual(np.prod(patches.grid), len(patches.patches))

  def test_large_images_shrink_and_small_ones_never_grow(self):
    config = config_lib.VisionConfig(patch_size=2, max_patches_per_image=16)
    self.assertEqual(images.scaled_size(8, 8, config), (8, 8))
    self.assertEqual(images.scaled_size(3, 5, config), (3, 5))
    self.assertEqual(images.scaled_size(16, 16, config), (8, 8))
    self.assertLen(images.extract_patches(random_image(16, 16), config)[0], 16)
    side = config_lib.VisionConfig(patch_size=2, max_patches_per_side=4)
    self.assertEqual(images.scaled_size(2, 16, side), (1, 8))

  def test_merging_by_reshape_gives_square_blocks_of_pixels(self):
    config = config_lib.VisionConfig(patch_size=3, merge_size=2)
    image = random_image(18, 12)
    patches, positions, grid = images.extract_patches(image, config)
    self.assertEqual(grid, (6, 4))
    merged = patches.reshape(-1, 4, 3, 3, 3)
    places = positions.reshape(-1, 4, 2)
    for token in range(6):
      row, column = divmod(token, 2)
      block = image[6 * row : 6 * row + 6, 6 * column : 6 * column + 6]
      for part in range(4):
        y, x = divmod(part, 2)
        testing.assert_same(
            merged[token, part], block[3 * y : 3 * y + 3, 3 * x : 3 * x + 3]
        )
        testing.assert_same(places[token, part], [2 * row + y, 2 * column + x])

  def test_padding_goes_right_and_below(self):
    config = config_lib.VisionConfig(patch_size=2, merge_size=1)
    image = np.full((3, 3, 3), 200, np.uint8)
    patches = images.extract_patches(image, config).patches.reshape(4, 2, 2, 3)
    testing.assert_same(patches[0, :, :, 0], [[200, 200], [200, 200]])
    testing.assert_same(patches[1, :, :, 0], [[200, 0], [200, 0]])
    testing.assert_same(patches[2, :, :, 0], [[200, 200], [0, 0]])
    testing.assert_same(patches[3, :, :, 0], [[200, 0], [0, 0]])

  def test_bytes_map_onto_minus_one_to_one(self):
    values = images.normalize(np.array([0, 51, 255], np.uint8))
    self.assertEqual(values.dtype, np.float32)
    testing.assert_close(values, [-1.0, -0.6, 1.0], "float64 oracle, fp32")

  def test_a_file_its_bytes_and_its_array_are_the_same_image(self):
    image = random_image(5, 7)
    path = pathlib.Path(self.create_tempdir().full_path, "a.png")
    Image.fromarray(image).save(path)
    testing.assert_same(images.load_image(path), image)
    testing.assert_same(images.load_image(path.read_bytes()), image)
    testing.assert_same(images.load_image(image), image)
    gray = images.load_image(image[:, :, 0])
    testing.assert_same(gray, np.repeat(image[:, :, :1], 3, axis=2))

  def test_palette_and_transparent_images_become_rgb(self):
    buffer = io.BytesIO()
    Image.new("RGBA", (4, 3), (10, 20, 30, 0)).save(buffer, "PNG")
    image = images.load_image(buffer.getvalue())
    testing.assert_same(image, np.full((3, 4, 3), [10, 20, 30], np.uint8))

  def test_unusable_images_are_named(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    missing, broken = folder / "missing.png", folder / "broken.png"
    Image.fromarray(random_image(64, 64)).save(broken)
    broken.write_bytes(broken.read_bytes()[:3000])
    with self.assertRaisesRegex(data.DataError, "^x:3: no image .*missing.png"):
      images.load_image(missing, "x:3")
    with self.assertRaisesRegex(
        data.DataError, "^x:3: cannot read image .*broken.png"
    ):
      images.load_image(broken, "x:3")
    with self.assertRaisesRegex(data.DataError, "^x:3: cannot read inline"):
      images.load_image(b"not an image", "x:3")
    with self.assertRaisesRegex(data.DataError, r"float64 \[4, 4, 3\]"):
      images.load_image(np.zeros((4, 4)), "x:3")


if __name__ == "__main__":
  absltest.main()
