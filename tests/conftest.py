"""Shared by every test: absl flags parsed once, compiled programs kept."""

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import flags  # noqa: E402  (the platform must be set before jax)
import jax  # noqa: E402

if not flags.FLAGS.is_parsed():
  flags.FLAGS(sys.argv[:1])  # grain reads absl flags lazily

jax.config.update("jax_numpy_rank_promotion", "raise")
