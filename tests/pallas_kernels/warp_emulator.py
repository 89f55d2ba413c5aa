"""Runs a warpgroup's MLIR program lane by lane in numpy.

A kernel's device code that the Pallas interpreter replaces by array terms can
so be held against them. The modules a program is written on (arith, llvm, ...)
are replaced by ones that compute at once: a value is an array of 128 lanes, a
vector a list of values, a branch runs both sides under masks. Every barrier is
one point in time here, so missing ones are not seen.
"""

import contextlib
import types
from unittest import mock

from jaxlib.mlir.dialects import arith
import ml_dtypes
import numpy as np

LANES = 128
_BASE = 1024  # where a memref stands in shared memory
_LANE = np.arange(LANES) % 32
_ROW, _PAIR = _LANE // 4, _LANE % 4
_WRAP = 0xFFFFFFFF


class Array:
  """A FragmentedArray in the wgmma layout: registers hold pairs of values."""

  def __init__(self, registers):
    self.registers = registers

  @classmethod
  def of(cls, x):
    """Of a [64, N] array; [64] by rows otherwise."""
    x = np.asarray(x)
    rows = [16 * (np.arange(LANES) // 32) + _ROW + 8 * h for h in (0, 1)]
    if x.ndim == 1:
      registers = [[x[r]] for r in rows]
    else:
      columns = [8 * t + 2 * _PAIR for t in range(x.shape[1] // 8)]
      registers = [[x[r, c], x[r, c + 1]] for c in columns for r in rows]
    out = np.empty(len(registers), dtype=object)
    out[:] = registers
    return cls(out)

  def values(self, columns=None):
    """The array back, of fp32 by rows or of words of two bf16."""
    out = np.zeros((64, columns or 1), np.float32)
    for i, register in enumerate(self.registers.flat):
      tile, half = divmod(i, 2)
      row = 16 * (np.arange(LANES) // 32) + _ROW + 8 * half
      if columns is None:
        out[row, 0] = register[0]
      else:
        for j, value in enumerate(_halves(register[0])):
          out[row, 8 * tile + 2 * _PAIR + j] = value
    return out if columns else out[:, 0]


class Emulator:
  """Shared memory, and stand-ins for the modules of a program."""

  def __init__(self):
    self.memory = np.zeros(2**16, np.uint8)
    self._masks = [np.ones(LANES, bool)]
    self._yielded = []

  def run(self, module, program, *arguments):
    """program(*arguments) with the module's MLIR replaced."""
    names = dict(
        arith=_arith(),
        llvm=types.SimpleNamespace(
            inline_asm=self._assembly,
            extractvalue=lambda kind, x, i: x[i[0]],
            ptrtoint=lambda kind, x: x,
            StructType=mock.MagicMock(),
        ),
        math=types.SimpleNamespace(
            fma=lambda a, b, c: np.float32(np.float64(a) * b + c)
        ),
        nvvm=types.SimpleNamespace(
            shfl_sync=lambda m, x, source, *_: x[
                32 * (np.arange(LANES) // 32) + source
            ],
            ShflKind=mock.MagicMock(),
        ),
        scf=types.SimpleNamespace(IfOp=_If, yield_=self._yielded.append),
        vector=types.SimpleNamespace(
            extract=lambda r, static_position, **_: r[static_position[0]],
            broadcast=lambda kind, x: [x],
            bitcast=lambda kind, r: r,
        ),
        ir=mock.MagicMock(
            IntegerType=mock.MagicMock(get_signless=lambda n: "int"),
            F32Type=mock.MagicMock(get=lambda: "float"),
            InsertionPoint=self._insertion_point,
        ),
        mgpu=types.SimpleNamespace(
            FragmentedArray=lambda _registers, **_: Array(_registers)
        ),
        mgpu_utils=types.SimpleNamespace(
            memref_ptr=lambda x: np.full(LANES, _BASE),
            warpgroup_barrier=lambda: None,
        ),
    )
    with mock.patch.multiple(module, **names):
      return program(*arguments)

  def put_tile(self, x):
    """Writes a [64, K] bf16 array as tiles of (8, 64), swizzled."""
    words = x.astype(ml_dtypes.bfloat16)
    for row in range(64):
      for piece in range(x.shape[1] // 8):
        tile = row // 8 * (x.shape[1] // 64) + piece // 8
        place = (piece % 8) ^ (row % 8)
        start = _BASE + 1024 * tile + 128 * (row % 8) + 16 * place
        values = words[row, 8 * piece :][:8]
        self.memory[start : start + 16] = values.view(np.uint8)

  @contextlib.contextmanager
  def _insertion_point(self, block):
    self._masks.append(self._masks[-1] & block.mask)
    yield
    self._masks.pop()
    block.parent.take(block, self._yielded.pop())

  def _assembly(self, kind, operands, text, constraints, **_):
    del kind, constraints
    if "%laneid" in text:
      return _LANE
    if "%tid.x" in text:
      return np.arange(LANES)
    name = text.split(".")[0]
    return {
        "cvt": _pack,
        "st": self._store,
        "movmatrix": _transpose,
        "ldmatrix": lambda at: self._load_matrices(at, ".trans" in text),
        "mma": _multiply,
    }[name](*operands)

  def _store(self, address, word):
    mask = self._masks[-1]
    for i in range(4):
      self.memory[address[mask] + i] = word[mask] >> 8 * i & 0xFF

  def _load_matrices(self, address, transposed):
    address = np.where(self._masks[-1], address, 0)
    words = [np.zeros(LANES, np.int64) for _ in range(4)]
    for warp in range(4):
      lanes = slice(32 * warp, 32 * warp + 32)
      for i, rows in enumerate(address[lanes].reshape(4, 8)):
        block = np.stack([self.memory[a : a + 16] for a in rows])
        block = np.int64(block.view(np.uint16))
        block = block.T if transposed else block
        words[i][lanes] = _words_of(block)
    return words


class _If:
  """Both sides under masks; selects between what they yield."""

  def __init__(self, condition, results=(), has_else=False):
    del results, has_else
    self._condition, self.results = condition, None
    block = lambda mask: types.SimpleNamespace(mask=mask, parent=self)
    self.then_block, self.else_block = block(condition), block(~condition)

  def take(self, block, values):
    if block is self.then_block:
      self.results = values
    else:
      pairs = zip(self.results, values, strict=True)
      self.results = [np.where(self._condition, x, y) for x, y in pairs]


def _arith():
  """Integers are kept in 32 bits, unsigned; floats in fp32."""
  signed = lambda x: np.where(x >= 2**31, x - 2**32, x)
  predicate = arith.CmpIPredicate
  compare = {
      predicate.eq: lambda a, b: a == b,
      predicate.uge: lambda a, b: a >= b,
      predicate.sge: lambda a, b: signed(a) >= signed(b),
      predicate.sle: lambda a, b: signed(a) <= signed(b),
  }

  def bitcast(kind, x):
    if kind == "float":
      return x.astype(np.uint32).view(np.float32)
    return x.astype(np.float32).view(np.uint32).astype(np.int64)

  def constant(kind, x):
    if kind == "float":
      return np.full(LANES, x, np.float32)
    return np.full(LANES, x) & _WRAP

  return types.SimpleNamespace(
      CmpIPredicate=predicate,
      cmpi=lambda p, a, b: compare[p](a, b),
      constant=constant,
      bitcast=bitcast,
      select=np.where,
      addi=lambda a, b: a + b & _WRAP,
      subi=lambda a, b: a - b & _WRAP,
      muli=lambda a, b: a * b & _WRAP,
      divui=lambda a, b: a // b,
      remui=lambda a, b: a % b,
      andi=lambda a, b: a & b,
      xori=lambda a, b: a ^ b,
      shli=lambda a, b: a << b & _WRAP,
      addf=lambda a, b: a + b,
      subf=lambda a, b: a - b,
      mulf=lambda a, b: a * b,
      negf=lambda a: -a,
  )


def _pack(high, low):
  bits = lambda x: x.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.int64)
  return bits(high) << 16 | bits(low)


def _halves(word):
  bits = (word & 0xFFFF) << 16, word & 0xFFFF0000
  return [x.astype(np.uint32).view(np.float32) for x in bits]


def _words_of(block):
  """Of an [8, 8] block of 16 bits, each lane's word."""
  row, pair = _ROW[:32], 2 * _PAIR[:32]
  return block[row, pair] | block[row, pair + 1] << 16


def _block_of(words):
  """The [8, 8] block of a warp's words, in 16 bits."""
  block = np.zeros((8, 8), np.int64)
  row, pair = _ROW[:32], 2 * _PAIR[:32]
  block[row, pair], block[row, pair + 1] = words & 0xFFFF, words >> 16
  return block


def _transpose(word):
  blocks = [_block_of(w).T for w in word.reshape(4, 32)]
  return np.concatenate([_words_of(b) for b in blocks])


def _multiply(*operands):
  """D = A B + C of a 16x16 and a 16x8 operand, by warp."""
  number = lambda words: _halves(_block_of(words) << 16)[1]
  out = [np.zeros(LANES, np.float32) for _ in range(4)]
  for warp in range(4):
    lanes = slice(32 * warp, 32 * warp + 32)
    a, b = operands[:4], operands[4:6]
    a = [number(x[lanes]) for x in a]
    a = np.block([[a[0], a[2]], [a[1], a[3]]])
    # A right operand's lane has two rows of one column.
    b = np.concatenate([number(x[lanes]).T for x in b])
    product = a.astype(np.float64) @ b
    row, column = _ROW[:32], 2 * _PAIR[:32]
    for i in range(4):
      half, odd = divmod(i, 2)
      value = product[row + 8 * half, column + odd] + operands[6 + i][lanes]
      out[i][lanes] = value
  return out
