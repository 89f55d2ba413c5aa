"""Next-token loss, counted per modality."""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int

MODALITIES = ("text", "image_text")


def next_token_losses(
    logits: Float[Array, "b t w"], targets: Int[Array, "b t"]
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
  """Cross entropy of each target, and the square that the z-loss weighs.

  nats = logsumexp(logits) - logits[target], square = logsumexp(logits)^2

  Args:
    logits: [B, T, vocab], made fp32 here.
    targets: [B, T] token ids.

  Returns:
    nats and square, each [B, T] fp32.
  """
  logits = logits.astype(jnp.float32)
  normaliser = jax.nn.logsumexp(logits, axis=-1)
  target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)
  return normaliser - target_logits[..., 0], normaliser**2


def sums_by_modality(
    losses: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    modality: Int[Array, "b t"],
) -> dict[str, tuple[Float[Array, ""], Int[Array, ""]]]:
  """Sums losses and counts targets for each of MODALITIES.

  Args:
    losses: [B, T] nats.
    mask: [B, T], False where a target does not count; selects, so that what
      stands there may be anything.
    modality: [B, T], index into MODALITIES.

  Returns:
    name -> (sum of losses fp32, number of targets int32).
  """
  result = {}
  for index, name in enumerate(MODALITIES):
    chosen = mask & (modality == index)
    result[name] = (
        jnp.sum(jnp.where(chosen, losses, 0.0)),
        jnp.sum(chosen, dtype=jnp.int32),
    )
  return result
