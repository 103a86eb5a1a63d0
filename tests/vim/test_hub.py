"""Files named as hf_hub:OWNER/REPO[@REVISION]/FILE: from a cache laid out here, and from a hub that runs here."""

import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import vim
from vim import checkpoint, convert, export, hub
from vim.checkpoint import WeightsError
from vim.runtime import UserError
from vim.zoo import FAMILIES

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "d_state": 4, "num_classes": 7}
EXTRA = {"mambareg": {"num_registers": 4, "register_reduce": 2}}
COMMIT = "f" * 40
pytestmark = pytest.mark.usefixtures("offline")


def tiny(family, seed=0):
    torch.manual_seed(seed)
    return vim.VisionMamba(**{**TINY, **FAMILIES[family], **EXTRA.get(family, {})})


def official(family, seed=0):
    return vim.convert_state_dict(tiny(family, seed).state_dict(), family, to="official")


def same(model, weights) -> bool:
    return all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("prefix", ["hf_hub:", "hf-hub:"])
def test_weights_without_a_row(prefix, offline, cached):
    """The default revision, a named one and a commit are three files; a file may lie in a folder."""
    place = "some.one/Mamba-Reg_x"
    cached(offline, place, "base/a b.pth", {"model": official("mambareg", 1)})
    cached(offline, place, "base/a b.pth", {"model": official("mambareg", 2)}, "v1.0", COMMIT)
    for where, seed in ((place, 1), (f"{place}@main", 1), (f"{place}@v1.0", 2), (f"{place}@{COMMIT}", 2)):
        model = tiny("mambareg")
        report = vim.load_weights(model, f"{prefix}{where}/base/a b.pth", family="mambareg")
        assert same(model, tiny("mambareg", seed).state_dict()) and report.loaded == len(model.state_dict())
        assert str(report).startswith(f"{prefix}{where}/base/a b.pth: ")
    with pytest.raises(WeightsError, match=f"^{prefix}{place}/base/a b.pth: name the family of these weights"):
        vim.load_weights(tiny("mambareg"), f"{prefix}{place}/base/a b.pth")


def test_every_command_takes_it(finished, tiny_args, run_train, run_eval, run_main, offline, cached, tmp_path):
    """A run's weights in the published layout of its family, and one of our own files: train, eval, convert, export."""
    weights = checkpoint.read_weights(finished / "best.pt")[0]
    cached(offline, "a/b", "vim.pth", {"model": vim.convert_state_dict(weights, "vim", to="official")})
    own = tmp_path / "own.safetensors"
    assert run_main(export.main, "--checkpoint", finished / "best.pt", "--out", own).code == 0
    cached(offline, "a/b", "own.safetensors", own.read_bytes())

    done = run_main(convert.main, "hf_hub:a/b/vim.pth", "--family", "vim", "--out", tmp_path / "c.pth")
    assert done.code == 0, done.err
    assert all(torch.equal(v, weights[k]) for k, v in checkpoint.read_weights(tmp_path / "c.pth")[0].items())

    wanted = json.loads(run_eval("--checkpoint", finished / "best.pt").out.splitlines()[-1])
    foreign = ("--family", "vim", "--config", finished / "config.yaml")
    for source, argv in (("hf_hub:a/b/vim.pth", foreign), ("hf_hub:a/b/own.safetensors", ())):
        done = run_eval("--checkpoint", source, *argv)
        assert done.code == 0, done.err
        assert json.loads(done.out.splitlines()[-1]) == wanted | {"checkpoint": source}

    start = (
        "--train.init_from",
        "hf_hub:a/b/vim.pth",
        "--train.init_family",
        "vim",
        "--optim.lr",
        "0",
        "--optim.min_lr",
        "0",
    )
    done = run_train(*tiny_args, "--out", tmp_path / "run", *start)
    assert done.code == 0, done.err
    assert all(torch.equal(v, weights[k]) for k, v in checkpoint.read(tmp_path / "run" / "last.pt")["model"].items())
    refused = run_train(*tiny_args, "--out", tmp_path / "no", "--train.init_from", "hf_hub:a/b/none.pth")
    assert refused.code == 2 and "a/b: none.pth cannot be downloaded (it is not in the local cache" in refused.err
    assert refused.err.count("\n") == 1 and not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "a",
        "a/b",
        "a/b/",
        "/b/c.pth",
        "a//c.pth",
        "a/b@/c.pth",
        "a/b@x@y/c.pth",
        "a/b/c@x",
        "a b/c/d.pth",
        "a/b/c/",
        "a/b@v",
    ],
)
def test_malformed(spec):
    with pytest.raises(UserError) as caught:
        vim.load_weights(tiny("vim"), f"hf_hub:{spec}", family="vim")
    assert str(caught.value).startswith(f"hf_hub:{spec}: is not of the form hf_hub:OWNER/REPO/FILE or ")


def test_a_path_is_a_path(tmp_path, monkeypatch):
    """What does not begin with the prefix, or is a Path, is never looked for elsewhere."""
    monkeypatch.chdir(tmp_path)
    for source in ("a/b/c.pth", "hub:a/b/c.pth", tmp_path / "c.pth", type(tmp_path)("hf_hub:a/b/c.pth")):
        assert hub.local(source) is source
        with pytest.raises(FileNotFoundError, match="no such file"):
            vim.load_weights(tiny("vim"), source, family="vim")


def test_a_hostile_file_of_the_hub_is_not_run(offline, cached, tmp_path):
    class Hostile:
        def __reduce__(self):
            return (tmp_path / "executed").mkdir, ()

    cached(offline, "a/b", "c.pth", {"model": official("vim"), "x": Hostile()})
    with pytest.raises(WeightsError, match="holds code"):
        vim.load_weights(tiny("vim"), "hf_hub:a/b/c.pth", family="vim")
    assert not (tmp_path / "executed").exists()


def test_without_the_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"^a/b@v1: c\.pth is on the hub, which needs: pip install 'slws-vim\[hf\]'$"):
        vim.load_weights(tiny("vim"), "hf_hub:a/b@v1/c.pth", family="vim")


class Hub(BaseHTTPRequestHandler):
    """What the client asks of the hub: one repository, o/r, with c.pth at main and v1."""

    content = b""

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def answer(self, body: bool):
        owner, name, _, revision, file = self.path.strip("/").split("/", 4)
        error = None
        if (owner, name) != ("o", "r"):
            error = "RepoNotFound", "Repository not found"
        elif revision not in ("main", "v1", COMMIT):
            error = "RevisionNotFound", "Invalid rev id"
        elif file != "c.pth":
            error = "EntryNotFound", "Entry not found"
        self.send_response(404 if error else 200)
        if error:
            self.send_header("X-Error-Code", error[0])
            self.send_header("X-Error-Message", error[1])
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", '"0123"')
        self.send_header("Content-Length", "0" if error else str(len(self.content)))
        self.end_headers()
        if body and not error:
            self.wfile.write(self.content)

    def log_message(self, *args):
        pass


@contextmanager
def served(content: bytes):
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Served", (Hub,), {"content": content}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


TRY = """
import sys
from vim import hub
for spec in sys.argv[1:]:
    try:
        print(open(hub.local(spec), "rb").read().decode())
    except ValueError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_what_a_hub_answers(run_process, tmp_path, monkeypatch):
    """The client itself against a server on this machine, in a process that reads its settings anew."""
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    specs = ["hf_hub:o/r/c.pth", "hf_hub:o/r@v1/c.pth", "hf_hub:o/r@v2/c.pth", "hf_hub:o/r/d.pth", "hf_hub:o/q/c.pth"]
    with served(b"weights") as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        done = run_process("-c", TRY, *specs)
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        *("weights", "weights"),
        "UserError o/r@v2: the repository has no such revision",
        "UserError o/r: the repository has no file d.pth",
        "UserError o/q: the hub has no such repository, or it is not public",
    ]
