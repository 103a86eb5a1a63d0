"""The README says what is so: its commands parse or run, its numbers, its file tree and its figure are those of here.

A fenced block after a line `<!-- checked -->` is run; every train.py and eval.py command, marked or not, is parsed.
"""

import contextlib
import importlib
import io
import itertools
import math
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from vim import VisionMamba, config, figures
from vim.checkpoint import MissingFile
from vim.mixer import Mixer
from vim.zoo import VARIANTS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FENCES = [(bool(m[1]), m[2], m[3]) for m in re.finditer(r"(<!-- checked -->\n)?```(\w*)\n(.*?)```", README, re.DOTALL)]


def checked(kind):
    return [text for marked, language, text in FENCES if marked and language == kind]


def commands():
    """Every shell command of the README as a list of words, continued lines joined."""
    for _, language, text in FENCES:
        if language == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                yield shlex.split(line)


def arguments_of(script):
    found = [words[words.index(script) + 1 :] for words in commands() if script in words]
    assert found, f"no command of the README uses {script}"
    return found


def run_here(words):
    """(exit code, stdout) of `python ...`, in this process."""
    out, old = io.StringIO(), sys.argv
    module = words[1] == "-m"
    sys.argv = words[1 + module :]
    try:
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run, what = (runpy.run_module, words[2]) if module else (runpy.run_path, str(ROOT / words[1]))
            run(what, run_name="__main__")
    except SystemExit as end:
        return end.code, out.getvalue()
    finally:
        sys.argv = old
    return 0, out.getvalue()


def test_checked_commands_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = [shlex.split(line) for text in checked("sh") for line in text.splitlines()]
    assert len(lines) >= 3 and all(words[0] == "python" for words in lines)
    for words in lines:
        code, out = run_here(words)
        assert not code, words
        if "vim.doctor" in words:
            assert "selective_scan" in out
        elif "--print_config" in words:
            assert "lr: 0.001" in out and "name: shufflemamba_base_patch16_224" in out
        else:
            assert "--slws.rate RATE" in out


@pytest.mark.parametrize("text", checked("python"))
def test_checked_snippets_run(text):
    names = {}
    exec(compile(text, "README.md", "exec"), names)
    assert any(isinstance(v, torch.nn.Module) for v in names.values())


def test_configuration_parses(tmp_path):
    [text] = checked("yaml")
    (tmp_path / "c.yaml").write_text(text)
    found = config.parse(["--config", str(tmp_path / "c.yaml")])
    assert found.model.name in VARIANTS and found.slws.rate == 0.15


def test_training_evaluation_and_export_commands_parse(monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in arguments_of("train.py"):
        if "--help" not in words and "--print_config" not in words:
            assert config.parse(words).out
    for words in arguments_of("eval.py"):
        own = {"--checkpoint", "--family"}  # the rest is train.py's
        rest = [w for i, w in enumerate(words) if w not in own and (i == 0 or words[i - 1] not in own)]
        assert rest and config.parse(rest).data.root == "IMAGENET"
    [words] = arguments_of("vim.export")
    with pytest.raises(MissingFile, match=r"best\.pt"):  # so all else was understood
        importlib.import_module("vim.export").main(words)


def test_commands_keep_the_images_per_update(monkeypatch):
    monkeypatch.chdir(ROOT)
    machines, processes = ("--nnodes", "--nodes"), ("--nproc_per_node", "--ntasks-per-node")
    seen = 0
    for words in commands():
        if "configs/shufflemamba_base.yaml" in words and "--print_config" not in words:
            given = dict(itertools.pairwise(words))
            count = [int(next((given[k] for k in keys if k in given), 1)) for keys in (machines, processes)]
            found = config.parse(words[words.index("train.py") + 1 :])
            assert math.prod(count) * found.data.batch_size * found.train.accumulation == 2048, words
            seen += 1
    assert seen == 4  # one machine, fewer GPUs, torchrun on two machines, SLURM


def test_parameter_counts(monkeypatch):
    stated = {}
    for row in re.findall(r"^\| `(\w+_\{size\}_\w+)` \| ([^|]+) \|", README, re.MULTILINE):
        stated |= {row[0].replace("{size}", size): n for size, n in re.findall(r"(\w+) (\d+\.\d\d)", row[1])}
    monkeypatch.setattr(VisionMamba, "init_weights", lambda self: None)  # values do not count here, and take longest
    monkeypatch.setattr(Mixer, "init_ssm", lambda self: None)
    with torch.device("meta"):
        found = {n: f"{sum(p.numel() for p in timm.create_model(n).parameters()) / 1e6:.2f}" for n in VARIANTS}
    assert stated == found


def tree(text):
    """{path: whether lines stand below it} of the annotated tree: two blanks of indentation per level."""
    found, above = {}, []
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r"\s{2,}", line.strip())[0].split(" ")
        above = above[:depth]
        if above:
            found["".join(above)] = True
        found |= {"".join([*above, name]): False for name in names}
        above.append(names[0])
    return found


def test_file_tree():
    assert tree("a.py b.py  two\nc/     x\n  d/e/   y\n    f.py\n") == {
        "a.py": False,
        "b.py": False,
        "c/": True,
        "c/d/e/": True,
        "c/d/e/f.py": False,
    }
    [text] = re.findall(r"## Files\n\n```\n(.*?)```", README, re.DOTALL)
    stated = tree(text)
    missing = [path for path in stated if not (ROOT / path).exists()]
    assert not missing, f"the README's tree names what is not there: {missing}"

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    whole = tuple(path for path, below in stated.items() if path.endswith("/") and not below)
    for path in listed:
        plain = path.startswith(".") or path.endswith("__init__.py") or path.startswith(whole)
        assert plain or path in stated, f"the README's tree does not name {path}"


def test_configurations_and_published_numbers_agree():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d\d\.\d) \|", README, re.MULTILINE))
    for name, path in ((p.stem, p) for p in (ROOT / "configs").glob("*.yaml")):
        published = re.search(r"Expected top-1: (\d\d\.\d) \(published\)", path.read_text())
        assert rows.pop(name, None) == (published and published[1]), name
    assert not rows


def test_links_lead_somewhere():
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/log.md", "docs/results.md"):
        text = (ROOT / document).read_text()
        for link in re.findall(r"\]\(([^)#]+)", text):
            assert link.startswith("https://arxiv.org/") or (ROOT / document).parent.joinpath(link).exists(), link


def test_figure_is_of_real_draws(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need the plot extra")
    before = torch.get_rng_state()
    made = figures.method(tmp_path / "method.png")
    assert torch.equal(before, torch.get_rng_state())  # drawing disturbs nobody's randomness
    shown, fresh = Image.open(ROOT / "docs/method.png"), Image.open(made)
    assert shown.size == fresh.size and (ROOT / "docs/method.png").stat().st_size < 200_000
    difference = np.abs(np.asarray(shown.convert("L"), float) - np.asarray(fresh.convert("L"), float))
    assert difference.mean() < 1.5  # another font makes 0.7, another draw 3.4 and more

    image = figures.picture()
    rows = [np.concatenate(figures.patches(image)[i : i + 3], 1) for i in (0, 3, 6)]
    assert np.array_equal(np.concatenate(rows, 0), image)
    drawn = figures.draws([0.0, 1.0], 10, 0)
    assert drawn[0] is None and sorted(drawn[1].tolist()) == list(range(10))
