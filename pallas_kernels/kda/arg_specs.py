"""Named shapes: those the peers were measured at, and small ones for tests."""

import dataclasses

import jax
from jax import numpy as jnp


@dataclasses.dataclass(frozen=True)
class ArgSpec:
  """A shape of `fused_kda` on raw projections."""

  batch: int
  tokens: int
  heads: int
  value_heads: int
  key_width: int = 128
  value_width: int = 128
  dtype: jnp.dtype = jnp.bfloat16

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the array arguments' shapes and dtypes by name."""
    tokens = (self.batch, self.tokens)
    query = (*tokens, self.heads, self.key_width)
    gate = (*tokens, self.value_heads, self.key_width)
    struct = jax.ShapeDtypeStruct
    return {
        "q": struct(query, self.dtype),
        "k": struct(query, self.dtype),
        "v": struct((*tokens, self.value_heads, self.value_width), self.dtype),
        "z": struct(gate, self.dtype),
        "beta_logits": struct((*tokens, self.value_heads), self.dtype),
        "a_log": struct((self.value_heads,), jnp.float32),
        "dt_bias": struct((self.value_heads, self.key_width), jnp.float32),
    }


SPECS = {
    # Kimi K3's 96 heads; one long sequence; a training batch.
    "b1_t8192_h96": ArgSpec(1, 8192, 96, 96),
    "b1_t65536_h32": ArgSpec(1, 65536, 32, 32),
    "b8_t2048_h32": ArgSpec(8, 2048, 32, 32),
    # The training demo on a CPU.
    "b8_t256_h4_k32": ArgSpec(8, 256, 4, 4, 32, 32, jnp.float32),
    "b8_t256_h4_k64": ArgSpec(8, 256, 4, 4, 64, 64, jnp.float32),
    "b1_t2048_h4": ArgSpec(1, 2048, 4, 4, dtype=jnp.float32),
    # Small ones: a tail, shared query heads, a width that is no power of two.
    "small_tail": ArgSpec(2, 130, 2, 2, 64, 64),
    "small_shared_heads": ArgSpec(1, 128, 1, 2, 64, 64),
    "small_odd_width": ArgSpec(1, 65, 1, 1, 60, 60, jnp.float32),
}
