"""Draws what a run did: `<workdir>/report.png`.

  python -m experiments.report --workdir=runs/demo

Loss by modality with the stages' boundaries, max violation of each MoE layer,
the depth weights of the attention residuals, and captions under their images.
The last two come from `experiments.evaluate`, which has to run first.
"""

import json
import textwrap
from typing import Any

from etils import epath
from matplotlib import figure
from matplotlib import gridspec
import numpy as np

from experiments import command
from sparsemm_jax import config as config_lib
from sparsemm_jax import data
from sparsemm_jax.training import curriculum
from sparsemm_jax.training import metrics as metrics_lib

_WORKDIR = command.define_workdir("A run's folder, evaluated.")
_LOSSES = {"train/loss_text": "text", "train/loss_image_text": "captions"}


def main(argv) -> None:
  """Draws; see the module's docstring."""
  del argv
  workdir = epath.Path(_WORKDIR.value)
  path = workdir / "config.json"
  config = config_lib.from_config_dict(
      _read_json(path, "train first, and name the run's folder"),
      path=f"{path}: config",
  )
  metrics = _read_metrics(workdir, config.train.log_every)
  results = _read_json(workdir / command.EVALUATION, "evaluate first")
  path = workdir / "report.png"
  with command.output(path) as file:
    draw(config, metrics, results).savefig(file, dpi=110)
  print(f"wrote {path}")


def _read_json(path: epath.Path, otherwise: str) -> dict[str, Any]:
  if not path.exists():
    raise data.DataError(f"{path} is missing: {otherwise}")
  try:
    return dict(json.loads(path.read_text()))
  except (ValueError, TypeError) as error:
    raise data.DataError(f"{path} is damaged: {error}") from None


def _read_metrics(workdir: epath.Path, log_every: int):
  try:
    metrics = metrics_lib.read(workdir)
  except ValueError as error:
    raise data.DataError(str(error)) from None
  if not metrics.keys() >= _LOSSES.keys():
    raise data.DataError(
        f"{workdir / metrics_lib.FILE_NAME} has no training loss yet: it gets"
        f" one every train.log_every={log_every} steps"
    )
  return metrics


def draw(
    config: config_lib.RunConfig,
    metrics: dict[str, tuple[np.ndarray, np.ndarray]],
    results: dict[str, Any],
) -> figure.Figure:
  """Returns the figure.

  Args:
    config: of the run.
    metrics: of `training.metrics.read`.
    results: of `experiments.evaluate`.
  """
  result = figure.Figure(figsize=(13, 9), layout="constrained")
  grid = gridspec.GridSpec(3, 2, result, height_ratios=(3, 3, 2.2))
  losses, balance = (result.add_subplot(grid[0, i]) for i in range(2))
  for name, label in _LOSSES.items():
    steps, values = metrics[name]
    losses.plot(steps, values / np.log(2), label=label)
  losses.set(ylabel="training loss, bits per token", yscale="log")
  if "router/max_violation" in metrics:
    steps, values = metrics["router/max_violation"]
    first = config.model.num_dense_layers + 1
    for index, layer in enumerate(values.T):
      balance.plot(steps, layer, label=f"block {first + index}")
    balance.axhline(0.5, color="gray", linestyle=":")
    balance.set(ylabel="max violation of the expert load", yscale="log")
  for axes in (losses, balance):
    _mark_stages(axes, config.train)
    axes.set_xlabel("step")
    axes.legend(loc="upper right")
  sources = [s for s in results if "depth_weights" in (_as_dict(results[s]))]
  for place, source in enumerate(sources[:2]):
    _draw_depth(
        result.add_subplot(grid[1, place]),
        source,
        results[source]["depth_weights"],
    )
  if "captions" in results:
    _draw_captions(result.add_subfigure(grid[2, :]), results["captions"])
  return result


def _as_dict(value: Any) -> dict[str, Any]:
  return value if isinstance(value, dict) else {}


def _mark_stages(axes, train) -> None:
  starts = curriculum.boundaries(train)
  for start, stage in zip(starts, train.stages, strict=False):
    axes.axvline(start, color="black", linewidth=0.5)
    axes.text(
        start, 1.01, f" {stage.seq_len}", transform=axes.get_xaxis_transform()
    )


def _draw_depth(axes, source, weights) -> None:
  most = max(len(row) for row in weights.values())
  table = np.full((len(weights), most), np.nan)
  for row, values in zip(table, weights.values(), strict=True):
    row[: len(values)] = values
  picture = axes.imshow(table, vmin=0, vmax=1, aspect="auto", cmap="viridis")
  axes.set_yticks(range(len(weights)), list(weights), fontsize=7)
  axes.set_xticks(range(most), ["embedding", *map(str, range(1, most))])
  axes.set(
      title=f"depth weights, held-out {source}",
      xlabel="source: output of residual block",
      ylabel="mix before",
  )
  axes.figure.colorbar(picture, ax=axes)


def _draw_captions(part, captions) -> None:
  part.suptitle(
      f"{captions['accuracy']:.1%} of {captions['questions']} held-out"
      " questions answered right"
  )
  samples = captions["samples"]
  for axes, sample in zip(part.subplots(1, len(samples)), samples, strict=True):
    axes.imshow(np.array(sample["image"], np.uint8))
    axes.set_axis_off()
    axes.set_title(textwrap.fill(sample["question"], 18), fontsize=8)
    color = "black" if sample["right"] else "red"
    axes.text(
        0.5, -0.08, textwrap.fill(sample["answer"], 18), fontsize=9,
        color=color, ha="center", va="top", transform=axes.transAxes,
    )  # fmt: skip


if __name__ == "__main__":
  command.run(main)
