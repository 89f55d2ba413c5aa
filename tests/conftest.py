"""Shared by every test: absl flags parsed once, compiled programs kept."""

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Mosaic GPU's interpreter blocks one of XLA's threads per warpgroup; with fewer
# threads than warpgroups (XLA's default is one per core) it never ends.
os.environ.setdefault("NPROC", "8")
# A test runs a program once or twice: quick to compile beats quick to run. What
# claims bits or runs long is marked `exact`: `make test` leaves XLA's flags alone.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)

from absl import flags  # noqa: E402  (the platform must be set before jax)
import jax  # noqa: E402

if not flags.FLAGS.is_parsed():
  flags.FLAGS(sys.argv[:1])  # grain reads absl flags lazily

jax.config.update("jax_numpy_rank_promotion", "raise")
