"""The figure of the method: python -m vim.figures OUT.png draws what SLWS does to the tokens of one image.

The shuffles in it are real draws of `slws.SLWS`, with `slws.linear_rates` as probabilities.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

from slws import SLWS, linear_rates

from .plots import _pyplot
from .runtime import UserError, exit_codes

SIDE, PATCH = 3, 24  # the image is SIDE x SIDE patches of PATCH pixels
GREY, RED, PALE = "#777777", "#b3261e", "#f2f2f2"


def picture() -> np.ndarray:
    """A landscape (72, 72, 3) in [0, 1], made of formulas: its nine patches all look different."""
    y, x = np.mgrid[0 : SIDE * PATCH, 0 : SIDE * PATCH] / (SIDE * PATCH)
    image = np.stack([0.45 + 0.45 * y, 0.65 + 0.25 * y, np.full_like(y, 0.95)], -1)
    image[(x - 0.74) ** 2 + (y - 0.2) ** 2 < 0.015] = (1.0, 0.8, 0.2)
    image[y > 0.52 - 0.3 * np.abs(np.sin(4.2 * x + 0.3))] = (0.45, 0.5, 0.62)
    image[y > 0.62 + 0.06 * np.sin(7 * x)] = (0.35, 0.6, 0.3)
    image[y > 0.8 + 0.12 * (x - 0.4)] = (0.2, 0.42, 0.65)
    image[(np.abs(x - 0.2) < 0.02) & (np.abs(y - 0.62) < 0.11)] = (0.4, 0.26, 0.13)
    image[(x - 0.2) ** 2 + (y - 0.5) ** 2 < 0.007] = (0.1, 0.35, 0.15)
    image[(np.abs(x - 0.84) < 0.19 - y / 8) & (np.abs(y - 0.93) < 0.03)] = (0.6, 0.2, 0.15)
    image[(x > 0.84) & (x - 0.84 < y - 0.74) & (y < 0.88)] = (1.0, 1.0, 0.95)
    return image


def patches(image: np.ndarray) -> list[np.ndarray]:
    """The patches of `picture`, row by row."""
    rows = image.reshape(SIDE, PATCH, SIDE, PATCH, 3).swapaxes(1, 2)
    return list(rows.reshape(-1, PATCH, PATCH, 3))


def draws(rates: list[float], tokens: int, seed: int) -> list[torch.Tensor | None]:
    """Each layer's permutation of one training step, or None where it does not shuffle."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [SLWS(rate).sample(tokens) for rate in rates]


class _Canvas:
    """Tokens as small pictures in columns; the class token as a labelled box."""

    def __init__(self, axis, tokens: list[np.ndarray]):
        self.axis, self.tokens = axis, tokens
        self.colors = [f"C{i}" for i in range(len(tokens) + 1)]

    def token(self, which: int, x: float, row: int) -> None:
        box = (x - 0.36, x + 0.36, -row - 0.36, -row + 0.36)
        pixels = np.ones((1, 1, 3)) if which == 0 else self.tokens[which - 1]
        self.axis.imshow(pixels, extent=box, interpolation="nearest", zorder=3)
        width, height = box[1] - box[0], box[3] - box[2]
        frame = {"fill": False, "edgecolor": self.colors[which], "linewidth": 2, "zorder": 4}
        self.axis.add_patch(_rectangle((box[0], box[2]), width, height, **frame))
        if which == 0:
            self.axis.text(x, -row, "cls", ha="center", va="center", fontsize=8, zorder=5)

    def column(self, x: float, order: list[int]) -> None:
        for row, which in enumerate(order):
            self.token(which, x, row)

    def strands(self, left: float, right: float, before: list[int], after: list[int]) -> None:
        """A curve for each token from its row in `before` to its row in `after`."""
        along = np.linspace(0, 1, 40)
        smooth = along**2 * (3 - 2 * along)
        for row, which in enumerate(before):
            height = -row + (row - after.index(which)) * smooth
            x = left + 0.4 + (right - left - 0.8) * along
            self.axis.plot(x, height, color=self.colors[which], linewidth=1.4, zorder=2)


def _rectangle(*place, **style):
    from matplotlib.patches import Rectangle

    return Rectangle(*place, **style)


def method(path: str | Path, depth: int = 5, rate: float = 0.8, seed: int = 10) -> Path:
    """Draw the tokens of one image through `depth` layers with SLWS `rate`. Raises UserError without matplotlib."""
    plt = _pyplot()
    if plt is None:
        raise UserError("figures need matplotlib: pip install 'slws-vim[plot]'")
    image, rates = picture(), linear_rates(depth, rate)
    count, natural = SIDE**2 + 1, list(range(SIDE**2 + 1))
    figure, axis = plt.subplots(figsize=(14.5, 6.1), layout="constrained")
    canvas = _Canvas(axis, patches(image))
    bottom, step = -count, 5.4

    axis.imshow(image, extent=(-6.4, -2.4, -6.5, -2.5), zorder=1)
    for line in range(1, SIDE):
        axis.plot([-6.4, -2.4], [-2.5 - 4 * line / SIDE] * 2, color="white", linewidth=2)
        axis.plot([-6.4 + 4 * line / SIDE] * 2, [-6.5, -2.5], color="white", linewidth=2)
    axis.text(-4.4, -2.1, "image", ha="center", fontsize=11)
    axis.annotate("", (-0.7, -4.5), (-2.2, -4.5), arrowprops={"arrowstyle": "->", "color": GREY})
    axis.text(0, 1.0, "tokens", ha="center", fontsize=11)
    axis.text(-4.4, bottom - 0.95, "shuffle probability\nof the layer", ha="center", va="center", fontsize=11)
    canvas.column(0, natural)
    axis.text(depth * step, 1.0, "output", ha="center", fontsize=11)

    for layer, (chance, drawn) in enumerate(zip(rates, draws(rates, count, seed), strict=True)):
        left = layer * step
        inside, right = left + step / 2, left + step
        order = natural if drawn is None else drawn.tolist()
        color = GREY if drawn is None else RED
        place = (inside - 0.75, bottom + 0.3), 1.5, count + 0.4
        axis.add_patch(_rectangle(*place, facecolor=PALE, edgecolor=color, linewidth=1.5, zorder=1))
        axis.text(inside, 1.0, f"layer {layer + 1}", ha="center", fontsize=11)
        canvas.strands(left, inside, natural, order)
        canvas.column(inside, order)
        canvas.strands(inside, right, order, natural)
        canvas.column(right, natural)
        if drawn is not None:
            axis.text((left + inside) / 2, 1.0, "shuffle", ha="center", fontsize=9, color=RED, style="italic")
            axis.text((inside + right) / 2, 1.0, "restore", ha="center", fontsize=9, color=RED, style="italic")
        base = bottom - 1.75
        axis.add_patch(_rectangle((inside - 1.5, base), 3, 0.45, facecolor="white", edgecolor=GREY))
        axis.add_patch(_rectangle((inside - 1.5, base), 3 * chance, 0.45, facecolor=RED, alpha=0.75))
        said = f"{chance:.1f}: {'left alone' if drawn is None else 'shuffled'}"
        axis.text(inside, bottom - 0.75, said, ha="center", va="center", fontsize=10, color=color)

    axis.set(xlim=(-7, depth * step + 0.8), ylim=(bottom - 2.1, 1.9), aspect="equal")
    axis.axis("off")
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return Path(path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vim.figures", description="Draw the figure of the method.")
    parser.add_argument("out", type=Path, help="an image file, e.g. docs/method.png")
    args = parser.parse_args(argv)
    sys.stdout.write(f"{method(args.out)}\n")


if __name__ == "__main__":
    with exit_codes("python -m vim.figures"):
        main()
