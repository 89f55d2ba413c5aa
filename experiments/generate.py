"""Continues a prompt, about an image if there is one.

  python -m experiments.generate --workdir=runs/demo --image=digit.png \
    --prompt="Which digit?" --temperature=0
  python -m experiments.generate --workdir=runs/demo --prompt="def main("

A question about an image is asked as the training documents ask: the image, a
line with the question, and the answer on the next line.
"""

import pathlib

from absl import flags
import jax
import numpy as np

from experiments import command
from sparsemm_jax.config import ConfigError
from sparsemm_jax.data import pipeline
from sparsemm_jax.inference import generate
from sparsemm_jax.training import evaluation

_WORKDIR = command.define_workdir("A run's folder, or one checkpoint in it.")
_PROMPT = flags.DEFINE_string("prompt", "", "Text to continue.")
_IMAGE = flags.DEFINE_string("image", None, "An image file to ask about.")
_SAMPLE_IMAGE = flags.DEFINE_bool(
    "sample_image", False, "Ask about a held-out digit instead of --image."
)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Tokens to add.")
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.8, "Divides the logits; 0: always the likeliest token."
)
_TOP_P = flags.DEFINE_float(
    "top_p", 0.95, "Samples among the likeliest tokens of this probability."
)
_PREFILL_CHUNK = flags.DEFINE_integer(
    "prefill_chunk", 512, "Tokens of the prompt per call of the model."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the samples.")


def main(argv) -> None:
  """Generates; see the module's docstring."""
  del argv
  _check_flags()
  run = command.load_run(_WORKDIR.value)
  config = run.config
  prompt = pipeline.encode_prompt(config, _parts(config))
  tokens, lengths, images = evaluation.stack_prompts(
      [prompt], len(prompt.tokens)
  )
  tokenizer = pipeline.make_tokenizer(config)
  ids = generate.generate(
      config.model,
      run.variables,
      tokens,
      lengths,
      jax.random.key(_SEED.value),
      images=images,
      max_new_tokens=_MAX_NEW_TOKENS.value,
      end_id=tokenizer.end_of_document_id,
      temperature=_TEMPERATURE.value,
      top_p=_TOP_P.value,
      prefill_chunk=_PREFILL_CHUNK.value,
  )
  print(_PROMPT.value, end="\n" if images else "")
  print(evaluation.answer_text(np.asarray(ids)[0], tokenizer))


def _check_flags() -> None:
  for flag, ok, rule in (
      (_TEMPERATURE, _TEMPERATURE.value >= 0, "at least 0"),
      (_TOP_P, 0 < _TOP_P.value <= 1, "in (0, 1]"),
      (_MAX_NEW_TOKENS, _MAX_NEW_TOKENS.value > 0, "positive"),
      (_PREFILL_CHUNK, _PREFILL_CHUNK.value > 0, "positive"),
  ):
    if not ok:
      raise ConfigError(f"--{flag.name}={flag.value} must be {rule}")
  if _IMAGE.value and _SAMPLE_IMAGE.value:
    raise ConfigError("--image and --sample_image exclude each other")


def _parts(config):
  """The prompt's text, behind its image if there is one."""
  if _SAMPLE_IMAGE.value:
    example = pipeline.caption_examples(config, "eval", 1)[0]
    print(f"a held-out digit, of which the data say: {example.answer!r} to")
    print(f"{example.question!r}; asked:")
    image = example.image
  elif _IMAGE.value:
    image = pathlib.Path(_IMAGE.value)
  else:
    return [_PROMPT.value]
  return [image, f"\n{_PROMPT.value}\n"]


if __name__ == "__main__":
  command.run(main)
