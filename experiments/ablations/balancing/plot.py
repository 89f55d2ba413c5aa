"""Draws stream.json and train.json, whichever is there, as PNG files.

python -m experiments.ablations.balancing.plot
"""

import json
import pathlib

from absl import flags
from matplotlib import figure
import numpy as np

from experiments import command

_FOLDER = flags.DEFINE_string(
    "folder", str(pathlib.Path(__file__).parent), "Where the files are."
)


def draw_stream(results) -> figure.Figure:
  """Max violation by step of every rule and seed."""
  picture = figure.Figure(figsize=(6, 4), layout="constrained")
  axes = picture.add_subplot()
  floor = results["sampling_floor"]
  for name, values in results["max_violation"].items():
    other = "seed" in name
    axes.plot(
        np.maximum(values, 1e-3),
        label=None if other else name,
        color="C0" if other else None,
        linewidth=0.7 if other else 1.5,
        zorder=1 if other else 2,
    )
  axes.axhline(floor, color="black", linestyle=":", label="sampling floor")
  axes.axhline(1.3 * floor, color="gray", linestyle=":", label="1.3 x floor")
  axes.set(
      xlabel="step", ylabel="max violation", yscale="log",
      title=f"{results['num_experts']} experts, {results['tokens']} random"
      " tokens per step",
  )  # fmt: skip
  axes.legend(fontsize=8)
  return picture


def draw_training(results) -> figure.Figure:
  """Max violation by step and held-out loss of every rule."""
  picture = figure.Figure(figsize=(10, 4), layout="constrained")
  balance, loss = picture.subplots(1, 2, width_ratios=(2, 1))
  floor = results["sampling_floor"]
  for index, (rule, values) in enumerate(results["rules"].items()):
    balance.plot(values["max_violation"], label=rule, linewidth=1)
    held_out = np.array(values["held_out_loss"])
    loss.scatter([index] * len(held_out), held_out, s=18)
  balance.axhline(floor, color="black", linestyle=":", label="sampling floor")
  balance.axhline(1.5 * floor, color="gray", linestyle=":", label="1.5 x floor")
  balance.set(
      xlabel="step", ylabel="max violation, mean of layers and seeds",
      yscale="log",
  )  # fmt: skip
  balance.legend(fontsize=8)
  loss.set_xticks(
      range(len(results["rules"])), results["rules"], rotation=30, ha="right"
  )
  loss.set(ylabel="held-out loss, nats per byte; one dot per seed")
  return picture


def main(argv) -> None:
  """Draws; see the module's docstring."""
  del argv
  folder = pathlib.Path(_FOLDER.value)
  pictures = {"stream": draw_stream, "train": draw_training}
  there = [name for name in pictures if (folder / f"{name}.json").exists()]
  if not there:
    raise FileNotFoundError(f"{folder} has no stream.json and no train.json")
  for name in there:
    results = json.loads((folder / f"{name}.json").read_text())
    pictures[name](results).savefig(folder / f"{name}.png", dpi=90)


if __name__ == "__main__":
  command.run(main)
