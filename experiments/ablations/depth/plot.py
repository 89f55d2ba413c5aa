"""Draws the results_*.json of this folder, one a depth, as PNG files.

python -m experiments.ablations.depth.plot
"""

import json
import pathlib

from absl import flags
from matplotlib import figure
import numpy as np

from experiments import command

_FOLDER = flags.DEFINE_string(
    "folder", str(pathlib.Path(__file__).parent), "Where they are."
)


def _name(result) -> str:
  size = result["block_size"]
  return f"size {size}" if size else "ordinary"


def _best_losses(result) -> np.ndarray:
  rate = result["learning_rates"].index(result["best_rate"])
  return np.array(result["held_out_loss"])[:, rate]


def draw_losses(by_depth) -> figure.Figure:
  """Held-out loss by block size, and training loss beside ordinary's."""
  picture = figure.Figure(
      figsize=(10, 3.4 * len(by_depth)), layout="constrained"
  )
  rows = picture.subplots(len(by_depth), 2, squeeze=False, width_ratios=(1, 2))
  for (layers, results), (held_out, curve) in zip(
      by_depth.items(), rows, strict=True
  ):
    ordinary = next(r for r in results if not r["block_size"])
    for index, result in enumerate(results):
      values = _best_losses(result)
      held_out.scatter([index] * len(values), values, s=18)
      held_out.errorbar(
          index, values.mean(), values.std(ddof=1), color="black", capsize=3
      )
      gap = np.array(result["train_loss"]) - ordinary["train_loss"]
      smooth = np.convolve(gap, np.ones(10) / 10, "valid")
      curve.plot(np.arange(len(smooth)) + 9, smooth, label=_name(result))
    held_out.set_xticks(range(len(results)), map(_name, results), rotation=30)
    held_out.set(
        ylabel="held-out loss, nats per byte", title=f"{layers} blocks"
    )
    curve.set(
        xlabel="step", ylabel="training loss above ordinary's",
        title="mean of 10 steps and of the seeds",
    )  # fmt: skip
    curve.legend(fontsize=8)
  return picture


def draw_norms(by_depth) -> figure.Figure:
  """Output and gradient norms over depth, with the seeds' range."""
  picture = figure.Figure(figsize=(10, 3 * len(by_depth)), layout="constrained")
  rows = picture.subplots(len(by_depth), 2, squeeze=False)
  for (layers, results), row in zip(by_depth.items(), rows, strict=True):
    for axes, key, label in zip(
        row,
        ("output_rms", "gradient_norm"),
        ("RMS of what a block hands on", "norm of a block's gradient"),
        strict=True,
    ):
      for result in results:
        values = np.array(result[key])
        place = np.arange(values.shape[1]) + 1
        axes.plot(place, values.mean(0), label=_name(result), linewidth=1)
        axes.fill_between(place, values.min(0), values.max(0), alpha=0.2)
      axes.set(
          xlabel="Transformer block", ylabel=label, yscale="log",
          title=f"{layers} blocks",
      )  # fmt: skip
    row[0].legend(fontsize=8)
  return picture


def draw_similarity(by_depth) -> figure.Figure:
  """Cosines between the inputs of every two blocks' attention."""
  most = max(map(len, by_depth.values()))
  picture = figure.Figure(
      figsize=(2.2 * most, 2.4 * len(by_depth)), layout="constrained"
  )
  rows = picture.subplots(len(by_depth), most, squeeze=False)
  for (layers, results), row in zip(by_depth.items(), rows, strict=True):
    for axes, result in zip(row, results, strict=False):
      image = axes.imshow(result["similarity"], vmin=0, vmax=1)
      axes.set_title(f"{layers} blocks, {_name(result)}", fontsize=8)
      axes.tick_params(labelsize=6)
  picture.colorbar(image, ax=rows, shrink=0.6)
  return picture


def draw_weights(by_depth) -> figure.Figure:
  """The learned weights of every mix."""
  shown = {
      layers: [r for r in results if r["block_size"]]
      for layers, results in by_depth.items()
  }
  most = max(map(len, shown.values()))
  picture = figure.Figure(
      figsize=(2.6 * most, 3 * len(shown)), layout="constrained"
  )
  rows = picture.subplots(len(shown), most, squeeze=False)
  for (layers, results), row in zip(shown.items(), rows, strict=True):
    for axes, result in zip(row, results, strict=False):
      image = axes.imshow(
          result["weights"], vmin=0, vmax=1, aspect="auto",
          interpolation="nearest",
      )  # fmt: skip
      axes.set_title(f"{layers} blocks, {_name(result)}", fontsize=8)
      axes.tick_params(labelsize=6)
    row[0].set(
        ylabel="mix, two per block",
        xlabel="source: embedding, ..., running sum",
    )
  picture.colorbar(image, ax=rows, shrink=0.6)
  return picture


def main(argv) -> None:
  """Draws; see the module's docstring."""
  del argv
  folder = pathlib.Path(_FOLDER.value)
  by_depth = {}
  for path in sorted(folder.glob("results_*.json")):
    for result in json.loads(path.read_text())["models"]:
      by_depth.setdefault(result["layers"], []).append(result)
  if not by_depth:
    raise FileNotFoundError(f"{folder} has no results_*.json")
  for name, draw in (
      ("losses", draw_losses),
      ("norms", draw_norms),
      ("similarity", draw_similarity),
      ("weights", draw_weights),
  ):
    draw(by_depth).savefig(folder / f"{name}.png", dpi=80)


if __name__ == "__main__":
  command.run(main)
