"""What every command shares: --config, --workdir, and one-line errors."""

from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Sequence
import contextlib
import difflib
import importlib.machinery
import importlib.util
import re
import sys
from typing import Any
from typing import NamedTuple
from typing import NoReturn

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

EVALUATION = "evaluation.json"  # `evaluate` writes it, `report` reads it

_OVERRIDE = re.compile(r"--?config\.([^=]+)=(.*)")
_USER_ERRORS = (
    config_lib.ConfigError,
    data.DataError,
    checkpoint.CheckpointError,
    loop.TrainingError,
    OSError,
)
_IMPLEMENTATIONS = {  # part of an operation's name -> the field that chooses
    "kda": "model.kda.implementation",
    "attn_res": "model.attn_res_implementation",
    "grouped_matmul": "model.moe.implementation",
}


def define_workdir(description: str) -> flags.FlagHolder[str]:
  """Defines --workdir, which must be set."""
  flags.disclaim_key_flags()  # --help shows it with the command's own flags
  holder = flags.DEFINE_string("workdir", None, description, required=True)
  flags.register_validator(
      holder, lambda value: value != "", "must name a folder"
  )
  return holder


def define_config() -> Callable[[], config_lib.RunConfig]:
  """Defines --config and its overrides; returns how to read the result.

  `--config=configs/tiny.py --config.optim.learning_rate=1e-3`; a field that
  may be unset takes `--config.optim.qk_clip_threshold=None`.
  """
  flags.disclaim_key_flags()
  holder = config_flags.DEFINE_config_file(
      "config",
      None,
      "A python file with get_config(), such as configs/tiny.py; fields are"
      " changed with --config.<section>.<field>=<value>.",
      sys_argv=_config_argv,
  )
  flags.FLAGS[holder.name].parser = _ConfigFile()

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
_config_argv: list[str] = []  # where --config looks for its overrides


class _ConfigFile(flags.ArgumentParser):
  """Loads the file that --config names; what is wrong with it is one line."""

  def parse(self, path):
    file, *argument = path.split(":", 1)
    loader = importlib.machinery.SourceFileLoader("config_file", file)
    try:
      module = importlib.util.module_from_spec(
          importlib.util.spec_from_loader(loader.name, loader)
      )
      sys.modules[loader.name] = module
      loader.exec_module(module)
      values = module.get_config(*argument)
    except Exception as error:
      reason = (str(error).splitlines() or [""])[0]
      raise flags.Error(
          f"--config: {file}: {type(error).__name__}: {reason}"
      ) from None
    if not isinstance(values, ml_collections.ConfigDict):
      raise flags.Error(
          f"--config: {file}: get_config() must return to_config_dict("
          f"RunConfig(...)), got {type(values).__name__}"
      )
    return values.lock()


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


@contextlib.contextmanager
def output(path: epath.Path) -> Generator[epath.Path]:
  """Makes a file beside `path`, and moves it there when it is written.

  Raises:
    OSError: before anything is done, if the file could not be written.
  """
  if path.exists():
    path.open("a").close()
  part = path.with_name(f"part-{path.name}")
  part.touch()
  try:
    yield part
    part.replace(path)
  finally:
    part.unlink(missing_ok=True)


def run(
    main: Callable[[Sequence[str]], Any], *, takes_arguments: bool = False
) -> None:
  """Runs a command; bad input gets one line and exit status 2.

  Args:
    main: takes argv without its flags.
    takes_arguments: whether anything may follow the command's name in it.
  """
  app.run(_guarded(main, takes_arguments), flags_parser=_parse_flags)


def _guarded(main, takes_arguments):
  def guarded(argv):
    if argv[1:] and not takes_arguments:
      _fail(f"unexpected argument {argv[1]!r}: flags start with --")
    if not flags.FLAGS["verbosity"].present:
      logging.set_verbosity(logging.WARNING)  # orbax is talkative
    try:
      return main(argv)
    except _USER_ERRORS as error:
      _fail(error)
    except NotImplementedError as error:  # of an implementation that is named
      operation = str(error).partition(":")[0]
      for part, field in _IMPLEMENTATIONS.items():
        if part in operation:
          _fail(f"config.{field}: {error}")
      raise

  return guarded


def _fail(error: Any) -> NoReturn:
  print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
  sys.exit(2)


def _parse_flags(argv: Sequence[str]) -> list[str]:
  """Parses the flags; `_fail`s with one line if there is anything wrong."""
  overrides = [_OVERRIDE.fullmatch(argument) for argument in argv]
  plain = [a for a, match in zip(argv, overrides, strict=True) if not match]
  kept = [
      argument
      for argument, match in zip(argv, overrides, strict=True)
      if not (match and match[2] in ("None", "none"))
  ]
  _unset[:] = [
      match[1] for match in overrides if match and match[0] not in kept
  ]
  try:
    # First the config without overrides, to name a field that it lacks.
    _config_argv[:] = plain
    flags.FLAGS(plain)
    message = _unknown_field([match[1] for match in overrides if match])
    if message:
      _fail(message)
    _config_argv[:] = kept
    return flags.FLAGS(kept)
  except (
      flags.Error, config_lib.ConfigError, AttributeError, KeyError, IndexError,
      TypeError, ValueError,
  ) as error:  # fmt: skip
    _fail(error)


def _steps(path: str) -> list[str | int]:
  """Splits `train.stages[0].steps` into its keys and indices."""
  parts = re.findall(r"[^.\[\]]+", path)
  return [int(part) if part.isdigit() else part for part in parts]


def _unknown_field(paths: Sequence[str]) -> str | None:
  """Finds the first path that the config does not have."""
  config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
  for path in paths if config is not None else ():
    node: Any = config
    for step in _steps(path):
      try:
        node = node[step]
      except (KeyError, IndexError, TypeError, AttributeError):
        near = (
            difflib.get_close_matches(str(step), list(node), 1)
            if isinstance(node, ml_collections.ConfigDict)
            else []
        )
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"--config.{path}: there is no field {step!r}{hint}"
  return None
