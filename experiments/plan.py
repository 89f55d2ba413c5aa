r"""Plans a model from budgets, before anything is trained.

  python -m experiments.plan experts --total=2.78e12 --active=1.04e11 \\
      --memory_gib=141 --bandwidth_gb=400 --tokens_per_step=6.7e7 --devices=1024

prints experts, widths, ranks and what they cost, each with its reason. A budget
that nothing meets gets one line saying why, and exit status 2.
"""

import textwrap

from absl import flags

from experiments import command
from sparsemm_jax import config as config_lib
from sparsemm_jax.planning import experts

_TOTAL = flags.DEFINE_float("total", None, "Parameters of the language model.")
_ACTIVE = flags.DEFINE_float(
    "active", None, "Parameters that a token uses, without the embedding table."
)
_MEMORY = flags.DEFINE_float("memory_gib", 141.0, "Memory of one device.")
_BANDWIDTH = flags.DEFINE_float(
    "bandwidth_gb", 50.0, "1e9 bytes per second that one device receives."
)
_TOKENS = flags.DEFINE_float(
    "tokens_per_step", 2**22, "Tokens of an optimizer step, on all devices."
)
_DEVICES = flags.DEFINE_integer("devices", 1, "Number of devices.")
_VOCAB = flags.DEFINE_integer("vocab_size", 163840, "Tokens of the vocabulary.")


def main(argv) -> None:
  """Prints the plan that the first argument names."""
  names = argv[1:]
  if names != ["experts"]:
    raise config_lib.ConfigError(
        f"what to plan must be one of: experts; got {' '.join(names) or None}"
    )
  for flag in (_TOTAL, _ACTIVE):
    if flag.value is None:
      raise config_lib.ConfigError(f"--{flag.name} is not set")
  plan = experts.plan_experts(
      experts.Budget(
          total=_TOTAL.value,
          active=_ACTIVE.value,
          memory_gib=_MEMORY.value,
          bandwidth_gb=_BANDWIDTH.value,
          tokens_per_step=_TOKENS.value,
          devices=_DEVICES.value,
          vocab_size=_VOCAB.value,
      )
  )
  for name, value, reason in plan.lines():
    print(f"{name:21}{value}")
    print(textwrap.indent(textwrap.fill(reason, 76), "    "))


if __name__ == "__main__":
  command.run(main, takes_arguments=True)
