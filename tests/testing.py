"""The one table of tolerances, and the asserts that use it."""

import numpy as np

# Relative RMS error unless the name says otherwise. Never widened to pass.
TOLERANCES = {
    "float64 oracle, fp32": 1e-6,
    "fp32": 1e-5,
    "fp32 gradient": 1e-4,
    "bf16": 5e-3,
    "bf16 gradient": 1e-2,
    "sharded fp32": 1e-5,
    "decode fp32": 1e-4,
    "append fp32": 1e-6,
}


def rms_error(actual, expected) -> float:
  """RMS(actual - expected) / RMS(expected) in float64; NaN stays NaN."""
  actual = np.asarray(actual, np.float64)
  expected = np.asarray(expected, np.float64)
  if actual.shape != expected.shape:
    raise AssertionError(f"shape {actual.shape} is not {expected.shape}")
  if not expected.size:
    return 0.0
  difference = np.sqrt(np.mean((actual - expected) ** 2))
  scale = np.sqrt(np.mean(expected**2))
  if scale == 0.0:
    return float(difference)
  return float(difference / scale)


def assert_close(actual, expected, kind: str, what: str = "") -> None:
  """Fails unless the relative RMS error is within TOLERANCES[kind]."""
  error = rms_error(actual, expected)
  if not error <= TOLERANCES[kind]:  # NaN fails too
    raise AssertionError(
        f"{what or 'value'}: relative RMS error {error:.3e} is above"
        f" {TOLERANCES[kind]:.0e} ({kind})"
    )


def assert_same(actual, expected, what: str = "") -> None:
  """Fails unless the two arrays agree bit for bit (NaN equals NaN)."""
  np.testing.assert_array_equal(
      np.asarray(actual), np.asarray(expected), err_msg=what
  )
