"""The commands vim-train and vim-eval: the very files train.py and eval.py, which the wheel carries beside this one."""

from __future__ import annotations

import runpy
from pathlib import Path


def _run(name: str) -> None:
    here = Path(__file__).parent
    carried, checkout = here / f"_{name}.py", here.parent / f"{name}.py"
    runpy.run_path(str(carried if carried.exists() else checkout), run_name="__main__")


def train() -> None:
    _run("train")


def evaluate() -> None:
    _run("eval")
