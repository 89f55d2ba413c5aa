"""Eight devices on one CPU: run `pytest tests/multidevice` by itself."""

import os

import pytest

_FLAG = "--xla_force_host_platform_device_count=8"


def pytest_ignore_collect(config):
  """Leaves these tests out of a run that names a larger folder."""
  if not _is_asked_for(config):
    return True
  # XLA reads the flag once, when jax first looks for devices.
  if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}"
  return None


def pytest_collection_finish(session):
  """Fails with the reason where jax had looked for devices before."""
  import jax  # after the flag

  if _is_asked_for(session.config) and jax.device_count() != 8:
    raise pytest.UsageError(
        f"tests/multidevice needs 8 devices, found {jax.device_count()}: run it"
        " in a process of its own"
    )


def _is_asked_for(config):
  return all("multidevice" in str(argument) for argument in config.args)
