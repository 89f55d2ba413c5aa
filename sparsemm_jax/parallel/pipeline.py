"""Pipeline parallelism that sends each attention-residual row once.

The layers are cut into C = P V chunks; chunk c runs on device c mod P of the
axis `stage`, so each of the P devices has V virtual stages. A chunk needs the
running sum (the prefix) and every row of the bank that was frozen before it. A
device keeps the rows it has seen, so a hop carries only the rows that are new
to the receiver, and the prefix. In units of one row of one micro-batch, with a
block per chunk (rows[c] = c),

  naive    sum_{c=1}^{C-1} c                  = C (C - 1) / 2
  cached   sum_{c=1}^{C-1} min(c, P)          = P (P - 1) / 2 + (V - 1) P^2

The gradient mirrors it: a row's gradient is summed on the device that holds
the row, over all its chunks, and goes back once, on the hop it came by. The
first row, the input, is on every device from the start.

Only a chunk's prefix and, once per device, each row are kept for the backward
pass, which runs the chunk again.

Source: Attention Residuals, section 4.1, arXiv:2603.15031; Kimi K3 report,
section 5.2.2, arXiv:2607.24653.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
import numpy as np

Tree = Any
# (chunk, params, bank, prefix, example) -> (bank, prefix, sums)
StageFn = Callable[
    [int, Tree, tuple[Array, ...], Array, Tree],
    tuple[tuple[Array, ...], Array, Tree],
]


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Which chunk runs when and where, and what each hop carries.

  Micro-batches go in groups of P: a device runs its first virtual stage for a
  group, then the second, ..., and the next group follows without a gap.

  Attributes:
    stages: P, devices along the axis.
    virtual_stages: V, chunks of a device.
    micro_batches: M.
    rows: rows of the bank before each of the P V chunks; 0 before the first.
  """

  stages: int
  virtual_stages: int
  micro_batches: int
  rows: tuple[int, ...]

  def __post_init__(self):
    if len(self.rows) != self.stages * self.virtual_stages:
      raise ValueError(
          f"rows {self.rows} for {self.stages} x {self.virtual_stages} chunks"
      )
    if self.rows[0] or list(self.rows) != sorted(self.rows):
      raise ValueError(f"rows {self.rows} must rise from 0")

  @property
  def chunks(self) -> int:
    return len(self.rows)

  @property
  def kept_rows(self) -> int:
    """Rows a device has room for: all before the last chunk but the input."""
    return max(self.rows[-1] - 1, 0)

  def new_rows(self, chunk: int) -> range:
    """The rows that come with the prefix to a chunk after the first."""
    count = self.rows[chunk]
    if chunk < self.stages:
      return range(min(1, count), count)
    return range(self.rows[chunk - self.stages + 1], count)

  def sent(self, chunk: int) -> int:
    """Rows that leave a chunk, its prefix included; 0 after the last."""
    if chunk >= self.chunks - 1:
      return 0
    return len(self.new_rows(chunk + 1)) + 1

  @property
  def message_rows(self) -> int:
    """The most rows a hop carries."""
    return max((self.sent(c) for c in range(self.chunks)), default=0)

  @functools.cached_property
  def ticks(self) -> tuple[np.ndarray, np.ndarray]:
    """(chunk, micro-batch) of each tick and device, each [ticks, P] int32.

    A device without work at a tick has chunk C and micro-batch 0.
    """
    stages, period = self.stages, self.chunks
    groups = -(-self.micro_batches // stages)
    step = np.arange(groups * period + stages - 1)[:, None] - np.arange(stages)
    group, place = np.divmod(step, period)
    micro = group * stages + place % stages
    busy = (step >= 0) & (micro < self.micro_batches)
    chunk = place // stages * stages + np.arange(stages)
    last = np.flatnonzero(busy.any(axis=1))[-1] + 1
    return (
        np.where(busy, chunk, self.chunks)[:last].astype(np.int32),
        np.where(busy, micro, 0)[:last].astype(np.int32),
    )


def pipeline(
    stage_fn: StageFn,
    params: Tree,
    x: Float[Array, "m ..."],
    examples: Tree,
    schedule: Schedule,
    *,
    axis_name: str = "stage",
) -> tuple[Float[Array, "m ..."], Tree]:
  """Runs micro-batches through chunks spread over the devices of an axis.

  Call it inside `jax.shard_map(..., check_vma=False)`; it is differentiable in
  params and x. For each micro-batch it computes

    bank, h = (), x
    for chunk in range(C): bank, h, sums_c = stage_fn(chunk, params, bank, h, e)

  Args:
    stage_fn: takes the chunk's number (a Python int), this device's params, the
      bank (a tuple of arrays like h), h and the micro-batch's example; returns
      the bank with rows added behind, the next h, and sums, a tree of arrays
      whose shapes are the same for every chunk. The first row that enters the
      bank must be x itself; before chunk c it must have schedule.rows[c] rows.
    params: this device's.
    x: [M, ...] micro-batches, the same on every device.
    examples: tree of [M, ...], the same on every device; without gradient.
    schedule: for axis_name's devices.
    axis_name: the mesh axis.

  Returns:
    h: [M, ...] after the last chunk, on the last device; zero on the others.
    sums: summed over micro-batches and this device's chunks.

  Raises:
    ValueError: a bank has not the rows that the schedule says.
  """
  static = (stage_fn, schedule, axis_name)
  return _pipeline(static, params, x, examples)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pipeline(static, params, x, examples):
  return _forward(static, params, x, examples)[0]


def _forward(static, params, x, examples):
  """Returns (h, sums), and what the backward pass needs."""
  stage_fn, schedule, axis_name = static
  last = schedule.chunks - 1

  def run(chunk, params, x, example, rows, message):
    rows, prefix = _receive(schedule, chunk, x, rows, message)
    bank = _bank(schedule, chunk, x, rows)
    bank, h, sums = stage_fn(chunk, params, bank, prefix, example)
    rows = _keep(schedule, chunk, bank, rows)
    message = _message(schedule, chunk, rows, h)
    out = h if chunk == last else jnp.zeros_like(h)
    return rows, message, prefix, out, sums

  def tick(carry, tick):
    message, kept, sums = carry
    chunk, micro, x_micro, example = _work(tick, axis_name, x, examples)
    branches = [functools.partial(run, c) for c in range(schedule.chunks)]
    args = (params, x_micro, example, _at(kept, micro), message)
    rows, message, prefix, out, more = _switch(chunk, branches, args, 0, 3)
    kept = jax.lax.dynamic_update_index_in_dim(kept, rows, micro, 0)
    message = _hop(schedule, tick, message, axis_name)
    sums = jax.tree.map(jnp.add, sums, more)
    return (message, kept, sums), (prefix, out)

  zeros = functools.partial(jnp.zeros, dtype=x.dtype)
  message = zeros((schedule.message_rows, *x.shape[1:]))
  kept = zeros((x.shape[0], schedule.kept_rows, *x.shape[1:]))
  args = (params, x[0], _at(examples, 0), kept[0], message)
  shapes = jax.eval_shape(functools.partial(run, 0), *args)
  sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[-1])
  (_, kept, sums), (prefixes, out) = jax.lax.scan(
      tick, (message, kept, sums), _ticks(schedule)
  )
  # The last device ends a group's micro-batches in P ticks, one after another.
  out = jnp.concatenate([
      out[start : start + schedule.stages]
      for start in range(last, out.shape[0], schedule.chunks)
  ])
  return (out, sums), (params, x, examples, kept, prefixes)


def _backward(static, residuals, cotangents):
  stage_fn, schedule, axis_name = static
  params, x, examples, kept, prefixes = residuals
  d_out, d_sums = cotangents
  last = schedule.chunks - 1

  def run(chunk, params, x, example, rows, prefix, d_rows, d_message, d_out):
    def compute(params, x, rows, prefix):
      bank = _bank(schedule, chunk, x, rows)
      bank, h, sums = stage_fn(chunk, params, bank, prefix, example)
      return _keep(schedule, chunk, bank, rows), h, sums

    d_rows, d_h = _message_gradient(schedule, chunk, d_rows, d_message)
    d_h = d_out if chunk == last else d_h
    _, pull = jax.vjp(compute, params, x, rows, prefix)
    d_params, d_x, d_rows, d_prefix = pull((d_rows, d_h, d_sums))
    d_message = _receive_gradient(schedule, chunk, d_rows, d_prefix)
    if not chunk:  # the first chunk's prefix is x
      d_x = d_x + d_prefix
    return d_params, d_x, d_rows, d_message

  def tick(carry, xs):
    d_params, d_x, d_kept, d_message = carry
    tick, prefix = xs
    d_message = _hop(schedule, tick, d_message, axis_name, back=True)
    chunk, micro, x_micro, example = _work(tick, axis_name, x, examples)
    branches = [functools.partial(run, c) for c in range(schedule.chunks)]
    args = (
        params, x_micro, example, _at(kept, micro), prefix,
        _at(d_kept, micro), d_message, _at(d_out, micro),
    )  # fmt: skip
    more, d_x_micro, d_rows, d_message = _switch(chunk, branches, args, 2, 5)
    d_params = jax.tree.map(jnp.add, d_params, more)
    d_x = jax.lax.dynamic_update_index_in_dim(
        d_x, _at(d_x, micro) + d_x_micro, micro, 0
    )
    d_kept = jax.lax.dynamic_update_index_in_dim(d_kept, d_rows, micro, 0)
    return (d_params, d_x, d_kept, d_message), None

  message = jnp.zeros((schedule.message_rows, *x.shape[1:]), x.dtype)
  carry = jax.tree.map(jnp.zeros_like, (params, x, kept, message))
  (d_params, d_x, _, _), _ = jax.lax.scan(
      tick, carry, (_ticks(schedule), prefixes), reverse=True
  )
  return d_params, d_x, None


_pipeline.defvjp(_forward, _backward)


def _ticks(schedule):
  """The schedule as a scan's input: chunks, micro-batches, kinds of hop."""
  kinds = np.array(hop_kinds(schedule), np.int32)
  return tuple(jnp.asarray(table) for table in (*schedule.ticks, kinds))


def hop_kinds(schedule: Schedule) -> list[int]:
  """Which of the branches of the hop each tick takes."""
  kinds = _hops(schedule)
  return [kinds.index(sends) for sends in _sends(schedule)]


def _sends(schedule):
  """Per tick, how many rows each device sends to the next one."""
  chunk, _ = schedule.ticks
  return [tuple(map(schedule.sent, row)) for row in chunk.tolist()]


def _hops(schedule):
  """The different ones of _sends."""
  return sorted(set(_sends(schedule)))


def _work(tick, axis_name, x, examples):
  """This device's chunk, micro-batch, and its input and example."""
  device = jax.lax.axis_index(axis_name)
  chunk, micro = tick[0][device], tick[1][device]
  return chunk, micro, _at(x, micro), _at(examples, micro)


def _at(tree, index):
  return jax.tree.map(
      lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree
  )


def _switch(index, branches, args, result, argument):
  """Runs a branch; one past the last stands for no work.

  That gives zeros, but as its `result`-th output its `argument`-th input.
  """
  shapes = jax.eval_shape(branches[0], *args)

  def idle(*args):
    outputs = [
        jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
        for shape in shapes
    ]
    outputs[result] = args[argument]
    return tuple(outputs)

  return jax.lax.switch(index, [*branches, idle], *args)


def _hop(schedule, tick, message, axis_name, *, back=False):
  """Sends the first rows of every device's message to the next device.

  Args:
    schedule: says how many rows each device sends at this tick.
    tick: of `_ticks`.
    message: [rows, ...].
    axis_name: the mesh axis.
    back: the other way round, for the gradient.
  """

  def hop(sends, message):
    pieces, low = [], 0
    for high in sorted(set(sends) - {0}):
      pairs = [
          (device, (device + 1) % schedule.stages)
          for device, rows in enumerate(sends)
          if rows >= high
      ]
      pairs = [pair[::-1] for pair in pairs] if back else pairs
      pieces.append(jax.lax.ppermute(message[low:high], axis_name, pairs))
      low = high
    return jnp.concatenate([*pieces, jnp.zeros_like(message[low:])])

  # Every device takes the same branch: the kind depends on the tick alone.
  branches = [functools.partial(hop, sends) for sends in _hops(schedule)]
  return jax.lax.switch(tick[2], branches, message)


# What stands where: kept row i is row i + 1 of the bank (row 0 is x); a message
# has the rows new to the receiver and behind them the prefix.


def _receive(schedule, chunk, x, rows, message):
  """Puts a message's rows to those kept; returns them and the prefix."""
  if not chunk:
    return rows, x
  new = schedule.new_rows(chunk)
  if new:
    rows = jax.lax.dynamic_update_slice_in_dim(
        rows, message[: len(new)], new.start - 1, 0
    )
  return rows, message[len(new)]


def _receive_gradient(schedule, chunk, d_rows, d_prefix):
  """The gradient of the message of `_receive`."""
  if not chunk:
    return _pad(schedule, [d_rows[:0]])
  new = schedule.new_rows(chunk)
  mine = d_rows[max(new.start - 1, 0) : max(new.stop - 1, 0)]
  return _pad(schedule, [mine, d_prefix[None]])


def _bank(schedule, chunk, x, rows):
  """The bank before a chunk."""
  count = schedule.rows[chunk]
  return (x, *(rows[i] for i in range(count - 1))) if count else ()


def _keep(schedule, chunk, bank, rows):
  """Puts what a chunk added to the bank to the rows kept."""
  if chunk < schedule.chunks - 1 and len(bank) != schedule.rows[chunk + 1]:
    raise ValueError(
        f"{len(bank)} rows in the bank after chunk {chunk}, but the schedule"
        f" says {schedule.rows[chunk + 1]}"
    )
  for i in range(max(schedule.rows[chunk], 1), len(bank)):
    if i <= schedule.kept_rows:
      rows = jax.lax.dynamic_update_index_in_dim(rows, bank[i], i - 1, 0)
  return rows


def _message(schedule, chunk, rows, h):
  """What leaves a chunk, padded to the length of every message."""
  if chunk == schedule.chunks - 1:
    return _pad(schedule, [rows[:0]])
  new = schedule.new_rows(chunk + 1)
  mine = rows[max(new.start - 1, 0) : max(new.stop - 1, 0)]
  return _pad(schedule, [mine, h[None]])


def _message_gradient(schedule, chunk, d_rows, d_message):
  """Adds the gradient of `_message` to that of the rows; returns also h's."""
  if chunk == schedule.chunks - 1:
    return d_rows, None
  new = schedule.new_rows(chunk + 1)
  before = max(new.start - 1, 0)
  after = d_rows.shape[0] - before - len(new)
  widths = [(before, after)] + [(0, 0)] * (d_rows.ndim - 1)
  return d_rows + jnp.pad(d_message[: len(new)], widths), d_message[len(new)]


def _pad(schedule, pieces):
  length = sum(piece.shape[0] for piece in pieces)
  shape = (schedule.message_rows - length, *pieces[0].shape[1:])
  return jnp.concatenate([*pieces, jnp.zeros(shape, pieces[0].dtype)])
