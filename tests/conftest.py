"""Shared by every test: absl flags parsed once, compiled programs kept."""

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Mosaic GPU's interpreter blocks one of XLA's threads per warpgroup; with fewer
# threads than warpgroups (XLA's default is one per core) it never ends.
os.environ.setdefault("NPROC", "8")

from absl import flags  # noqa: E402  (the platform must be set before jax)
import jax  # noqa: E402

if not flags.FLAGS.is_parsed():
  flags.FLAGS(sys.argv[:1])  # grain reads absl flags lazily

jax.config.update("jax_numpy_rank_promotion", "raise")
