"""Every file of examples/ runs, is short, and shuffles."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
NEEDS = {"hf_mamba": "transformers", "hf_mamba2": "transformers", "mambapy_mamba": "mambapy", "timm_vit": "timm"}


def test_there_is_one_per_ecosystem():
    wanted = {"module_list", "vmamba_stages", "mamba_ssm_mixer", *NEEDS}
    assert wanted <= {path.stem for path in EXAMPLES}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # older releases lack the new name
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, capsys, monkeypatch):
    assert len(path.read_text().splitlines()) < 40
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem], reason=f"{NEEDS[path.stem]} is not installed")
    torch.manual_seed(0)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except ConnectionError as reason:  # mamba-ssm's source comes from the package index
        pytest.skip(str(reason))
    rows = [re.match(r"\S+ +\S+ +([\d.]+) +\S+ +(\d+)/(\d+)$", line) for line in capsys.readouterr().out.splitlines()]
    rows = [(float(rate), int(shuffled), int(calls)) for rate, shuffled, calls in (r.groups() for r in rows if r)]
    rates = [rate for rate, *_ in rows]
    assert len(rows) >= 4 and rates == sorted(rates) and rates[0] == 0 and rates[-1] == 0.5
    assert rows[0][1] == 0 and 0 < rows[-1][1] < rows[-1][2]
