"""Times calls on the device at hand."""

import time

import jax
from jax import numpy as jnp
import numpy as np


def timed(fn, *args, repeats):
  """Median milliseconds of a call, and the spread over groups of calls."""
  jax.block_until_ready(fn(*args))
  start = time.perf_counter()
  jax.block_until_ready(fn(*args))
  calls = max(2, min(20, int(0.05 / (time.perf_counter() - start))))
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    for _ in range(calls):
      out = fn(*args)
    jax.block_until_ready(out)
    times.append((time.perf_counter() - start) / calls * 1e3)
  return float(np.median(times)), float(max(times) - min(times))


def copy_rate(repeats):
  """Bytes read and written per millisecond by a device copy."""
  x = jnp.ones((2**29,), jnp.float32)
  milliseconds, _ = timed(jax.jit(lambda x: -x), x, repeats=repeats)
  return 2 * x.nbytes / milliseconds
