"""Counts the bytes that a training step moves, from its compiled program.

  python -m experiments.ablations.depth.traffic \
    --variants=12:mosaic_gpu,6:mosaic_gpu:1

Compiles `overhead`'s steps for an H200 ahead of time (no GPU is needed; a
minute or more each) and prints what each moves beyond the ordinary one, in
arrays of the residual stream. Counted are operands and results of every kernel,
a loop's times its trips; a slice counts as itself, an update in place as what
is written. Rereads inside a kernel and hits in the L2 cache are not seen, and
matrix products are not tuned without the card.
"""

from collections.abc import Sequence
import dataclasses
import math
import re

from absl import flags
import jax

from experiments import command
from experiments.ablations.depth import overhead
from pallas_kernels import aot
from sparsemm_jax.training import state as state_lib
from sparsemm_jax.training import step as step_lib

_ITEM_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2,
    "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8,
}  # fmt: skip
# What names memory that is there already, or only waits.
_FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while",
    "async-done", "fusion-done", "copy-done", "partition-id", "replica-id",
    "after-all", "opt-barrier",
}  # fmt: skip
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+)"
    r" (?P<op>[\w\-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)"
)


@dataclasses.dataclass(frozen=True)
class _Instruction:
  name: str
  type: str
  op: str
  operands: Sequence[str]
  index: str  # of a parameter
  rest: str  # attributes
  is_root: bool

  @property
  def size(self) -> int:
    """Bytes of the result."""
    return sum(
        _ITEM_BYTES[kind] * math.prod(int(n) for n in shape.split(",") if n)
        for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", self.type)
        if kind in _ITEM_BYTES
    )

  def attribute(self, name: str) -> str | None:
    """The computation that an attribute names."""
    found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
    return found and found[1]


def moved_bytes(hlo: str) -> int:
  """Returns the bytes read and written by a compiled program's text."""
  computations, entry = {}, None
  for line in hlo.splitlines():
    head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
    if head:
      current = computations[head[2]] = {}
      entry = head[2] if head[1] else entry
    elif found := _INSTRUCTION.match(line):
      current[found["name"]] = _Instruction(
          found["name"], found["type"], found["op"],
          re.findall(r"%([\w.\-]+)", found["operands"]), found["operands"],
          found["rest"], bool(found["root"]),
      )  # fmt: skip
  return _of_computation(computations, entry)


def _of_computation(computations, name):
  body = computations[name]
  total = 0
  for instruction in body.values():
    called = instruction.attribute("calls") or instruction.attribute("to_apply")
    if instruction.op == "while":
      trips = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.rest)
      loop = _of_computation(computations, instruction.attribute("body"))
      total += int(trips[1]) * loop
    elif instruction.op in ("call", "async-start", "fusion-start"):
      total += _of_computation(computations, called)
    elif instruction.op == "fusion":
      total += _of_fusion(computations[called], body, instruction)
    elif instruction.op == "dynamic-update-slice":
      total += 2 * body[instruction.operands[1]].size
    elif instruction.op == "dynamic-slice":
      total += 2 * instruction.size
    elif instruction.op not in _FREE:
      read = sum(body[name].size for name in instruction.operands)
      total += read + instruction.size
  return total


def _of_fusion(fused, body, fusion):
  users = {name: [] for name in fused}
  for instruction in fused.values():
    for name in instruction.operands:
      users[name].append(instruction)

  def uses(name):
    """Users, with views of the same memory looked through."""
    for user in users[name]:
      if user.op in ("bitcast", "reshape"):
        yield from uses(user.name)
      else:
        yield user, name

  def read(parameter):
    whole = body[fusion.operands[int(parameter.index)]].size
    parts = 0
    for user, name in uses(parameter.name):
      if user.op in ("dynamic-slice", "slice"):
        parts += user.size
      elif user.op != "dynamic-update-slice" or user.operands[0] != name:
        return whole
    return min(parts, whole)

  def written(instruction):
    if instruction.op == "dynamic-update-slice":
      return fused[instruction.operands[1]].size
    if instruction.op == "tuple":
      return sum(written(fused[name]) for name in instruction.operands)
    if instruction.op in ("bitcast", "reshape"):
      return written(fused[instruction.operands[0]])
    return instruction.size

  parameters = [i for i in fused.values() if i.op == "parameter"]
  (root,) = (i for i in fused.values() if i.is_root)
  return sum(map(read, parameters)) + written(root)


def main(argv) -> None:
  """Counts; see the module's docstring."""
  del argv
  ordinary, temporary = _step(None)
  config, _ = overhead.parse_variant(None)
  stage = config.train.stages[0]
  array = 2 * stage.batch_size * stage.seq_len * config.model.d_model
  print(f"ordinary: {ordinary / array:.0f} arrays, {temporary} MiB temporary")
  for variant in flags.FLAGS.variants:
    moved, temporary = _step(variant)
    print(
        f"{variant}: {(moved - ordinary) / array:+.0f} arrays of"
        f" {array / 2**20:.0f} MiB, {temporary} MiB temporary",
        flush=True,
    )


def _step(variant):
  """Bytes moved and MiB of temporaries of a variant's step."""
  config, phases = overhead.parse_variant(variant)
  batch = jax.eval_shape(lambda: overhead.random_batch(config))
  with overhead.forced_phases(phases):
    with aot.abstract_device("h200"):
      state = jax.eval_shape(lambda: state_lib.init_state(config))
      train_step = jax.jit(step_lib.make_train_step(config), donate_argnums=0)
    compiled = aot.compile_for(train_step, state, batch, target="h200")
  temporary = compiled.memory_analysis().temp_size_in_bytes // 2**20
  return moved_bytes(compiled.as_text()), temporary


if __name__ == "__main__":
  command.run(main)
