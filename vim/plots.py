"""Figures, drawn with matplotlib where it is installed."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from torch import Tensor


def _pyplot():
    """matplotlib's pyplot without a screen, or None where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def curves(out: str | Path) -> Path | None:
    """curves.png of a run directory from its metrics.jsonl: losses, accuracy, learning rate by epoch."""
    plt = _pyplot()
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    if plt is None or not rows:
        return None
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    panels = (
        ("loss", {"train_loss": "train", "loss": "val", "ema_loss": "val, EMA"}),
        ("top-1, %", {"top1": "val", "ema_top1": "val, EMA"}),
        ("learning rate", {"lr": "lr"}),
    )
    for axis, (title, keys) in zip(axes, panels, strict=True):
        for key, label in keys.items():
            points = [(row["epoch"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 30 else None)
        axis.set(title=title, xlabel="epoch")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(frameon=False)
    path = Path(out) / "curves.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def confusion(table: Tensor, classes: list[str], path: str | Path) -> Path | None:
    """Heat map of counts (class, prediction), each row scaled to its class's images."""
    plt = _pyplot()
    if plt is None:
        return None
    share = table / table.sum(1, keepdim=True).clamp_min(1)
    size = max(4.0, min(0.35 * len(classes), 24.0))
    figure, axis = plt.subplots(figsize=(size + 1, size), layout="constrained")
    image = axis.imshow(share, vmin=0, vmax=1, cmap="Blues")
    axis.set(xlabel="prediction", ylabel="class")
    if len(classes) <= 60:
        axis.set_xticks(range(len(classes)), classes, rotation=90)
        axis.set_yticks(range(len(classes)), classes)
    figure.colorbar(image, label="share of the class")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return Path(path)


def per_class(table: Tensor, classes: list[str], path: str | Path) -> None:
    """CSV of class, images, top-1 in percent, and the class it is most often taken for."""
    rows = [("class", "images", "top1", "most_confused_with")]
    for index, counts in enumerate(table):
        images, right = int(counts.sum()), int(counts[index])
        others = counts.clone()
        others[index] = 0
        confused = classes[int(others.argmax())] if int(others.sum()) else ""
        rows.append((classes[index], images, f"{100 * right / images:.2f}" if images else "nan", confused))
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
