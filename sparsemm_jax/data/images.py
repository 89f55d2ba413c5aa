"""Images to patches at native resolution.

Source: MoonViT's preprocessing as released with Kimi K3.
"""

import functools
import io
import math
import pathlib
from typing import NamedTuple

from jaxtyping import Float
from jaxtyping import Int
from jaxtyping import UInt8
import numpy as np
from PIL import Image

from sparsemm_jax import config as config_lib
from sparsemm_jax import data

ImageLike = np.ndarray | bytes | pathlib.Path


class Patches(NamedTuple):
  """The patches of one image, each run of merge_size**2 one token."""

  patches: UInt8[np.ndarray, "n patch_dim"]
  positions: Int[np.ndarray, "n 2"]  # row, column
  grid: tuple[int, int]  # rows, columns


def scaled_size(
    height: int, width: int, config: config_lib.VisionConfig
) -> tuple[int, int]:
  """Returns the (height, width) in pixels an image is scaled down to."""
  patch = config.patch_size
  area = max(1, width // patch) * max(1, height // patch)
  side = config.max_patches_per_side * patch
  scale = min(
      1.0,
      math.sqrt(config.max_patches_per_image / area),
      side / width,
      side / height,
  )
  return max(1, int(height * scale)), max(1, int(width * scale))


@functools.lru_cache(maxsize=1024)
def patch_grid(
    height: int, width: int, config: config_lib.VisionConfig
) -> tuple[int, int]:
  """Returns the (rows, columns) of patches of a height x width image."""
  block = config.patch_size * config.merge_size
  scaled = scaled_size(height, width, config)
  rows, columns = (-(-size // block) * config.merge_size for size in scaled)
  return rows, columns


def num_image_tokens(
    height: int, width: int, config: config_lib.VisionConfig
) -> int:
  """Returns ceil(h / b) ceil(w / b), b = patch_size merge_size, (h, w) scaled.

  Args:
    height: of the original image, pixels.
    width: of the original image, pixels.
    config: patch and merge sizes and the limits on the number of patches.

  Returns:
    The number of media pad tokens that stand for the image.
  """
  rows, columns = patch_grid(height, width, config)
  return rows * columns // config.patches_per_token


def load_image(
    image: ImageLike, where: str = "image"
) -> UInt8[np.ndarray, "h w 3"]:
  """Returns the image as RGB bytes.

  Args:
    image: a path, the bytes of an image file, or a uint8 array [h, w] or
      [h, w, 3].
    where: what to name in the message of an error.

  Raises:
    DataError: a missing or corrupt file, or an array of another form.
  """
  if isinstance(image, np.ndarray):
    if image.ndim == 2:
      image = np.repeat(image[:, :, None], 3, axis=2)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
      raise data.DataError(
          f"{where}: an image array is uint8 [h, w] or [h, w, 3], got"
          f" {image.dtype} {list(image.shape)}"
      )
    if not image.size:
      raise data.DataError(f"{where}: empty image {list(image.shape)}")
    return image
  file = io.BytesIO(image) if isinstance(image, bytes) else image
  name = "inline image" if isinstance(image, bytes) else f"image {image}"
  try:
    with Image.open(file) as opened:
      return np.asarray(opened.convert("RGB"))
  except FileNotFoundError:
    raise data.DataError(f"{where}: no {name}") from None
  # Pillow's decoders raise SyntaxError and struct errors on damaged files too.
  except Exception as error:
    raise data.DataError(f"{where}: cannot read {name}: {error}") from None


def extract_patches(
    image: UInt8[np.ndarray, "h w 3"], config: config_lib.VisionConfig
) -> Patches:
  """Scales an image down if it is too large, pads it and cuts it in patches.

  Args:
    image: [h, w, 3] RGB bytes. Padding (black) goes right and below.
    config: sizes and limits.

  Returns:
    The patches, (row, column, channel) inside each; blocks of merge_size x
    merge_size patches in row-major order, row-major inside a block too.
  """
  height, width = image.shape[:2]
  scaled = scaled_size(height, width, config)
  if scaled != (height, width):
    resized = Image.fromarray(image).resize(
        scaled[::-1], Image.Resampling.BICUBIC
    )
    image = np.asarray(resized)
  rows, columns = patch_grid(height, width, config)
  patch, merge = config.patch_size, config.merge_size
  padded = np.zeros((rows * patch, columns * patch, 3), np.uint8)
  padded[: scaled[0], : scaled[1]] = image
  blocks = padded.reshape(
      rows // merge, merge, patch, columns // merge, merge, patch, 3
  )
  patches = blocks.transpose(0, 3, 1, 4, 2, 5, 6).reshape(-1, config.patch_dim)
  return Patches(patches, _positions(rows, columns, merge), (rows, columns))


@functools.lru_cache(maxsize=64)
def _positions(rows: int, columns: int, merge: int) -> Int[np.ndarray, "n 2"]:
  grid = np.stack(
      np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1
  )
  blocks = grid.reshape(rows // merge, merge, columns // merge, merge, 2)
  positions = blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2).astype(np.int32)
  positions.setflags(write=False)  # shared by every image of this size
  return positions


def normalize(
    patches: UInt8[np.ndarray, "*n"],
) -> Float[np.ndarray, "*n"]:
  """Returns (x / 255 - 0.5) / 0.5 in fp32."""
  scaled = patches / np.float32(255)
  scaled -= np.float32(0.5)
  scaled /= np.float32(0.5)
  return scaled
