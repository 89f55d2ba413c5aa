"""What every command shares: the --config flag, and one-line errors."""

from collections.abc import Callable, Sequence
import difflib
import re
import sys
from typing import Any, NamedTuple

from absl import app
from absl import flags
from absl import logging
from etils import epath
from flax import linen as nn
import ml_collections
from ml_collections import config_flags

from sparsemm_jax import config as config_lib
from sparsemm_jax import data
from sparsemm_jax.training import checkpoint
from sparsemm_jax.training import loop
from sparsemm_jax.training import state

_OVERRIDE = re.compile(r"--?config\.([^=]+)=(.*)")
_USER_ERRORS = (
    config_lib.ConfigError,
    data.DataError,
    checkpoint.CheckpointError,
    loop.TrainingError,
    FileNotFoundError,
)


def define_config() -> Callable[[], config_lib.RunConfig]:
  """Defines --config and its overrides; returns how to read the result.

  `--config=configs/tiny.py --config.optim.learning_rate=1e-3`; a field that
  may be unset takes `--config.optim.qk_clip_threshold=None`.
  """
  holder = config_flags.DEFINE_config_file(
      "config",
      None,
      "A python file with get_config(), such as configs/tiny.py; fields are"
      " changed with --config.<section>.<field>=<value>.",
      lock_config=True,
  )

  def read():
    if holder.value is None:
      raise config_lib.ConfigError("--config is not set")
    values = holder.value
    with values.ignore_type():
      for path in _unset:
        *parents, name = _steps(path)
        node = values
        for step in parents:
          node = node[step]
        node[name] = None
    return config_lib.from_config_dict(values)

  return read


_unset: list[str] = []  # fields that flags set to None


class Run(NamedTuple):
  """A trained model, as a checkpoint keeps it.

  Attributes:
    path: of the checkpoint.
    config: the run's.
    step: optimizer steps taken.
    variables: {"params", "router_state"}, on the first device.
  """

  path: epath.Path
  config: config_lib.RunConfig
  step: int
  variables: dict[str, Any]

  @property
  def workdir(self) -> epath.Path:
    return self.path.parent.parent


def load_run(workdir: str) -> Run:
  """Loads a run's latest checkpoint, or the one that is named.

  Raises:
    CheckpointError: there is none, or it is damaged.
  """
  path = checkpoint.find(workdir)
  config = checkpoint.load_config(path)
  abstract = nn.unbox(state.abstract_variables(config.model))
  variables = checkpoint.restore_variables(path, **abstract)
  return Run(path, config, checkpoint.load_step(path), variables)


def run(main: Callable[[Sequence[str]], Any]) -> None:
  """Runs a command; bad input gets one line and exit status 2."""
  app.run(_guarded(main), flags_parser=_parse_flags)


def _guarded(main):
  def guarded(argv):
    if not flags.FLAGS["verbosity"].present:
      logging.set_verbosity(logging.WARNING)  # orbax is talkative
    try:
      return main(argv)
    except _USER_ERRORS as error:
      _fail(error)

  return guarded


def _fail(error: Any) -> None:
  print(f"error: {error}", file=sys.stderr)
  sys.exit(2)


def _parse_flags(argv: Sequence[str]) -> list[str]:
  kept = []
  for argument in argv:
    match = _OVERRIDE.fullmatch(argument)
    if match and match[2] in ("None", "none"):
      _unset.append(match[1])
    else:
      kept.append(argument)
  try:
    rest = app.parse_flags_with_usage(kept)
  except OSError as error:  # the loader's message lists what it tried
    _fail(f"--config: {' '.join(str(error).split())}")
  except config_lib.ConfigError as error:
    _fail(error)
  except (AttributeError, KeyError, IndexError, TypeError) as error:
    _fail(_unknown_field(argv) or error)
  message = _unknown_field([f"--config.{path}=" for path in _unset])
  if message:
    _fail(message)
  return rest


def _steps(path: str) -> list[str | int]:
  """Splits `train.stages[0].steps` into its keys and indices."""
  parts = re.findall(r"[^.\[\]]+", path)
  return [int(part) if part.isdigit() else part for part in parts]


def _unknown_field(argv: Sequence[str]) -> str | None:
  """Finds the first override whose field the config does not have."""
  config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
  for argument in argv:
    match = _OVERRIDE.match(argument)
    if not match or config is None:
      continue
    node: Any = config
    for step in _steps(match[1]):
      try:
        node = node[step]
      except (KeyError, IndexError, TypeError, AttributeError):
        near = (
            difflib.get_close_matches(str(step), list(node), 1)
            if isinstance(node, ml_collections.ConfigDict)
            else []
        )
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"--config.{match[1]}: there is no field {step!r}{hint}"
  return None
