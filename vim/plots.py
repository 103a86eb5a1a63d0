"""Figures, drawn with matplotlib where it is installed."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import torch
from torch import Tensor, nn

COLORS = {"val": "C1", "val, EMA": "C2"}  # the same in every panel


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
    panels = (
        ("loss", {"train_loss": "train, augmented", "loss": "val", "ema_loss": "val, EMA"}),
        ("top-1, %", {"top1": "val", "ema_top1": "val, EMA"}),
        ("cosine with the teacher", {"cosine": "val", "ema_cosine": "val, EMA"}),
        ("learning rate", {"lr": "lr"}),
    )
    panels = [panel for panel in panels if any(key in row for key in panel[1] for row in rows)]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 3.6), layout="constrained")
    for axis, (title, keys) in zip(axes, panels, strict=True):
        for key, label in keys.items():
            points = [(row["epoch"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                look = {"color": COLORS.get(label, "C0"), "marker": "." if len(points) < 30 else None}
                axis.plot(*zip(*points, strict=True), label=label, **look)
        axis.set(title=title, xlabel="epoch", xlim=(0, rows[-1]["epoch"] + 1))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        if len(axis.lines) > 1:
            axis.legend(frameon=False)
    path = Path(out) / "curves.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def distillation(
    images: Tensor, kept: Tensor, cosine: Tensor, grid: tuple[int, int], look: dict, path: str | Path
) -> Path | None:
    """For each image a column: the image, what the student saw of it, and how near its prediction is to the teacher.

    images (m, c, h, w), normalised with look's mean and std; kept (m, k) patch numbers; cosine (m, rows * columns);
    grid (rows, columns). None where matplotlib is not installed.
    """
    plt = _pyplot()
    if plt is None:
        return None
    mean, std = (torch.tensor(look[key]).view(-1, 1, 1) for key in ("mean", "std"))
    pictures = (images * std + mean).clamp(0, 1)[:, :3].movedim(1, -1)
    if pictures.shape[-1] == 1:
        pictures = pictures.expand(*pictures.shape[:3], 3)
    maps = cosine.unflatten(1, grid).numpy()
    visible = torch.zeros_like(cosine).scatter(1, kept, 1).unflatten(1, grid)
    share = nn.functional.interpolate(visible[:, None], pictures.shape[1:3], mode="nearest")[:, 0, ..., None]
    seen = (pictures * share + 0.5 * (1 - share)).numpy()
    columns = len(images)
    figure, axes = plt.subplots(3, columns, figsize=(1.5 * columns + 0.8, 4.8), layout="constrained", squeeze=False)
    for column in range(columns):
        axes[0, column].imshow(pictures[column].numpy())
        axes[1, column].imshow(seen[column])
        drawn = axes[2, column].imshow(maps[column], vmin=0, vmax=1, cmap="magma")
        axes[2, column].set_title(f"mean {maps[column].mean():.2f}", fontsize=8)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for axis, label in zip(axes[:, 0], ("image", "seen", "cosine"), strict=True):
        axis.set_ylabel(label)
    figure.colorbar(drawn, ax=axes.ravel().tolist(), label="cosine of prediction and teacher")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return Path(path)


def confusion(table: Tensor, classes: list[str], path: str | Path) -> Path | None:
    """Heat map of counts (class, prediction), each row scaled to its class's images."""
    plt = _pyplot()
    if plt is None:
        return None
    share = table / table.sum(1, keepdim=True).clamp_min(1)
    size = max(4.0, min(0.35 * len(classes), 24.0))
    figure, axis = plt.subplots(figsize=(size + 1, size), layout="constrained")
    image = axis.imshow(share.numpy(), vmin=0, vmax=1, cmap="Blues")
    axis.set(xlabel="prediction", ylabel="class")
    if len(classes) <= 60:
        axis.set_xticks(range(len(classes)), classes, rotation=90)
        axis.set_yticks(range(len(classes)), classes)
    for row, column in table.nonzero().tolist() if len(classes) <= 20 else ():
        color = "white" if share[row, column] > 0.5 else "black"
        axis.text(column, row, int(table[row, column]), ha="center", va="center", fontsize=8, color=color)
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
