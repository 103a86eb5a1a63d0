"""The shape of the code base: who imports whom, how long files are, what a wheel holds, what an import does."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
STANDARD = sys.stdlib_module_names
# What each part may import when it is loaded, and what it may import inside a function only, where it is optional.
SCRIPTS = {"vim"}
ALWAYS = {
    "ssm_kernels": {"torch"},
    "slws": {"torch", "ssm_kernels"},
    # yaml comes with jsonargparse, which reads the same files.
    "vim": {"slws", "ssm_kernels", "timm", "torch", "torchvision", "einops", "jsonargparse", "yaml", "numpy", "PIL"}
    | {"safetensors", "tqdm"},
}
OPTIONAL = {
    "ssm_kernels": {"triton", "mamba_ssm", "causal_conv1d"},
    "slws": set(),
    "vim": {"matplotlib", "sklearn", "transformers", "huggingface_hub", "onnx", "onnxscript", "onnxruntime"},
}


def tracked() -> list[Path]:
    """The files under version control, or, in a copy without its history, all that are no build products."""
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if found.returncode == 0:
        files = [ROOT / name for name in found.stdout.split("\0") if name]
    else:
        skipped = re.compile(r"(^|/)(\..*|__pycache__|runs|data|build|dist|.*\.egg-info)/")
        files = [p for p in ROOT.rglob("*") if not skipped.search(p.relative_to(ROOT).as_posix())]
    return sorted(p for p in files if p.is_file())


FILES = tracked()
MODULES = {p.relative_to(ROOT).as_posix(): p for p in FILES if p.suffix == ".py"}


def part_of(name: str) -> str | None:
    """The package a file belongs to, None outside of all."""
    first = name.removeprefix("kernels/").split("/")[0]
    return first if first in ALWAYS and "/" in name else None


def imports(source: str) -> list[tuple[str, bool]]:
    """(module, whether it is imported on loading) for each import statement; relative ones keep their dots.

    `from X import a` counts as X and, since a may be a module, as X.a; `if TYPE_CHECKING:` blocks do not count.
    """
    found = []

    def visit(node: ast.AST, loading: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, loading) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found.append((base, loading))
            found.extend((f"{base}{'' if base.endswith('.') else '.'}{alias.name}", loading) for alias in node.names)
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, loading and not inside)

    visit(ast.parse(source), True)
    return found


def strangers(name: str, source: str) -> set[str]:
    """Top-level packages that a file imports and may not."""
    part = part_of(name)
    always, optional = (ALWAYS[part] | {part}, OPTIONAL[part]) if part else (SCRIPTS, set())
    if part == "ssm_kernels" and Path(name).stem.startswith("triton"):
        always = always | {"triton"}  # loaded by the backend registry only where Triton was found
    bad = set()
    for module, loading in imports(source):
        top = module.split(".")[0]
        if top and top not in STANDARD and top not in always and (loading or top not in optional):
            bad.add(top)
    return bad


def test_reader_of_imports():
    source = "import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\ndef h():\n    import i\n"
    source += "try:\n    import j\nexcept ImportError:\n    pass\nclass K:\n    import l\n"
    source += "if TYPE_CHECKING:\n    import m\nif X:\n    import n\n"
    on_loading = ["a.b", "c", "c.d", ".", ".e", "..f", "..f.g", "j", "l", "n"]
    assert imports(source) == [(m, m != "i") for m in [*on_loading[:7], "i", *on_loading[7:]]]
    assert strangers("slws/x.py", "import timm, torch, os") == {"timm"}
    assert strangers("kernels/ssm_kernels/x.py", "import triton\nimport slws") == {"triton", "slws"}
    assert strangers("kernels/ssm_kernels/x.py", "def f():\n    import triton") == set()
    assert strangers("vim/x.py", "import matplotlib\nfrom . import y") == {"matplotlib"}
    assert strangers("train.py", "import sys, torch\nfrom vim import data") == {"torch"}


CODE = [name for name in MODULES if part_of(name) or name in ("train.py", "eval.py")]


@pytest.mark.parametrize("name", CODE)
def test_import_rule(name):
    assert not strangers(name, MODULES[name].read_text()), f"{name} imports what its part may not"


def reach(start: set[str]) -> set[str]:
    """Modules of vim that `start` imports, directly or through one another."""
    seen, todo = set(), set(start)
    while todo:
        name = todo.pop()
        seen.add(name)
        for module, _ in imports(MODULES[f"vim/{name}.py"].read_text()):
            inner = re.match(r"(?:vim\.|\.)(\w+)", module)
            if inner and f"vim/{inner[1]}.py" in MODULES:
                todo |= {inner[1]} - seen
    return seen


def test_engine_knows_neither_models_nor_tasks():
    assert reach({"engine"}) >= {"engine", "run", "runtime", "schema"}
    assert not reach({"engine", "run"}) & {"models", "blocks", "mixer", "tokens", "zoo", "tasks", "teachers"}


def limit(name: str) -> int:
    return {"train.py": 160, "eval.py": 80}.get(name, 400 if name.startswith(("kernels/", "tests/")) else 300)


@pytest.mark.parametrize("name", [p.relative_to(ROOT).as_posix() for p in FILES if p.suffix in (".py", ".cpp", ".h")])
def test_files_are_short(name):
    lines = len((ROOT / name).read_text().splitlines())
    assert lines <= limit(name), f"{name} has {lines} lines, {limit(name)} are allowed"


@pytest.mark.parametrize("name", [name for name in MODULES if not Path(name).name.startswith("test_")])
def test_every_module_says_what_it_is(name):
    assert ast.get_docstring(ast.parse(MODULES[name].read_text())), f"{name} has no docstring"


def swallowing(source: str) -> list[str]:
    """Public functions and methods (of public classes) whose signature ends in **anything: a misspelt word passes."""
    found = []

    def visit(node: ast.AST, public: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                shown = public and (not child.name.startswith("_") or child.name.startswith("__"))
                if shown and child.args.kwarg is not None:
                    found.append(child.name)
            elif isinstance(child, ast.ClassDef):
                visit(child, public and not child.name.startswith("_"))
            else:
                visit(child, public)

    visit(ast.parse(source), True)
    return found


def test_no_signature_swallows_keywords():
    source = "def f(a, **kw): ...\nclass B:\n    def __init__(self, **kw): ...\n    def _c(self, **kw): ...\n"
    assert swallowing(source + "def d(a): ...\nclass _E:\n    def f(self, **kw): ...\n") == ["f", "__init__"]
    for name, path in MODULES.items():
        if part_of(name) == "vim" or name in ("train.py", "eval.py"):
            assert not swallowing(path.read_text()), name


def test_kernels_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert {p.name for p in (ROOT / "kernels").iterdir() if p.name != "__pycache__"} == {"ssm_kernels"}


# Written in pieces, so that this file passes its own test.
HOSTS = ["pypi" + ".org", "python" + "hosted.org", "download." + "pytorch.org", "anaconda" + ".", "conda" + "-forge"]
HOSTS += ["npmjs" + ".", "crates" + ".io", "proxy.go" + "lang", "debian" + ".org", "ubuntu" + ".com", "docker" + ".io"]
HOSTS += ["gh" + "cr.io", "nvcr" + ".io"]
FOLDERS = ["wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers", "mn" + "t"]
PATHS = re.compile(rf"(?<![\w.])/(?:{'|'.join(FOLDERS)})/")


def places(text: str) -> list[str]:
    """Registry hosts and paths of one machine in a text."""
    return [host for host in HOSTS if host in text] + [text[m.start() :][:30] for m in PATHS.finditer(text)]


def test_no_host_and_no_machine_path_anywhere():
    assert places("see https://" + HOSTS[0]) and places("in /ho" + "me/someone/x") and not places("frame" + "work/x")
    for path in FILES:
        if path.suffix not in (".safetensors", ".png"):
            assert not places(path.read_text()), path.relative_to(ROOT)


def python(code: str, folder: Path) -> subprocess.CompletedProcess:
    """Run `code` in a fresh interpreter whose every place to write to is `folder`."""
    there = {"HOME": str(folder), "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    environment = os.environ | there | {"PYTHONPATH": PYTHONPATH, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


def test_slws_is_light(tmp_path):
    wanted = "sorted({'timm', 'vim', 'torchvision', 'transformers', 'mamba_ssm'} & set(sys.modules))"
    found = python(f"import slws, sys; print({wanted})", tmp_path)
    assert (found.stdout, found.stderr) == ("[]\n", "")


QUIET_IMPORT = """
import logging, pathlib, timm, torch
files = lambda: set(pathlib.Path.cwd().rglob("*"))
state = lambda: (torch.get_rng_state().tolist(), torch.get_default_dtype(), torch.get_num_threads(),
                 torch.is_grad_enabled(), list(logging.root.handlers), logging.getLogger("vim").handlers)
before = files(), state()  # torch makes an empty folder for its compiler when timm is imported
import vim
assert (files(), state()) == before, (files(), state())
"""


@pytest.mark.slow
def test_import_of_vim_has_no_side_effects(tmp_path):
    found = python(QUIET_IMPORT, tmp_path)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_wheel(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr  # No module named hatchling: pip install -e .[dev]
    with zipfile.ZipFile(next(tmp_path.glob("slws_vim-*.whl"))) as wheel:
        names = set(wheel.namelist())
    top = {name.split("/")[0] for name in names}
    assert {t for t in top if not t.endswith(".dist-info")} == {"vim", "slws", "ssm_kernels"}
    assert {"vim/_train.py", "vim/_eval.py"} <= names
    sources = [p.relative_to(ROOT).as_posix() for p in FILES if p.suffix in (".py", ".cpp", ".h")]
    assert {s.removeprefix("kernels/") for s in sources if part_of(s)} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
