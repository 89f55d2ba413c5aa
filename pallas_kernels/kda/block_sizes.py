"""How much work the chunk form does at a time."""

_MEBI = 2**20
# Elements of one chunk-local array. It bounds the memory that does not grow
# with T: a CPU's caches like it small, a GPU or TPU needs it large.
_GROUP_ELEMENTS = {"cpu": _MEBI // 16, "gpu": 8 * _MEBI, "tpu": 8 * _MEBI}


def chunks_per_group(chunks: int, chunk_elements: int, platform: str) -> int:
  """Returns how many chunks to work on at once, at least 1.

  Args:
    chunks: chunks in the sequence.
    chunk_elements: elements of one chunk of the largest array, over all
      sequences and heads.
    platform: "cpu", "gpu" or "tpu".
  """
  most = max(1, _GROUP_ELEMENTS[platform] // chunk_elements)
  groups = -(-chunks // most)
  return -(-chunks // groups)  # even groups: the padding is the smallest
