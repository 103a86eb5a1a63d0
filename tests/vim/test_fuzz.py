"""Two hundred damaged, doctored and hostile files of weights: each is refused in one line or loads what it should.

Every mutation is drawn from its seed. Nothing in a file is executed, nothing loads silently wrong, no model is touched
by a file that is refused, and reading a small file takes little memory whatever the file claims.
"""

import io
import json
import os
import pickle
import resource
import struct
import subprocess
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import vim
from vim import checkpoint
from vim.checkpoint import WeightsError
from vim.zoo import FAMILIES

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "d_state": 4, "num_classes": 7}
RUNS = 20  # of each kind


def model():
    torch.manual_seed(0)
    return vim.VisionMamba(**{**TINY, **FAMILIES["shufflemamba"]})


STATE = {k: v.clone() for k, v in model().state_dict().items()}


def torch_file(content) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def safetensors_file(tmp_path) -> bytes:
    """One of ours, with its checksum."""
    path = tmp_path / "whole.safetensors"
    checkpoint.save_tensors(STATE, path, {"layout": "native", "family": "shufflemamba"})
    return path.read_bytes()


def good(rng, tmp_path) -> tuple[str, bytes]:
    """(suffix, content) of an intact file of one of both kinds."""
    if rng.integers(2):
        return ".safetensors", safetensors_file(tmp_path)
    return ".pth", torch_file({"model": STATE})


def truncated(rng, tmp_path):
    suffix, content = good(rng, tmp_path)
    return suffix, content[: rng.integers(len(content))]


def flipped(rng, tmp_path):
    """One to eight flipped bits anywhere, most of them in the weights: checksums show them."""
    suffix, content = good(rng, tmp_path)
    data = bytearray(content)
    for place in rng.integers(len(data), size=rng.integers(1, 9)):
        data[place] ^= 1 << rng.integers(8)
    return suffix, bytes(data)


def flipped_in_the_header(rng, tmp_path):
    """A flipped bit among names, shapes and offsets; in a safetensors file of others, which has no checksum."""
    suffix, content = good(rng, tmp_path)
    if suffix == ".safetensors":
        save_file(STATE, tmp_path / "plain.safetensors", {"layout": "native", "family": "shufflemamba"})
        content = (tmp_path / "plain.safetensors").read_bytes()
    data = bytearray(content)
    end = 8 + struct.unpack("<Q", data[:8])[0] if suffix == ".safetensors" else 2000
    data[rng.integers(end)] ^= 1 << rng.integers(8)
    return suffix, bytes(data)


def renamed(rng, tmp_path):
    state = dict(STATE)
    for name in rng.choice(sorted(state), rng.integers(1, 4), replace=False):
        state[f"{name[:-1]}{'xyz'[rng.integers(3)]}"] = state.pop(str(name))
    return ".pth", torch_file({"model": state})


def wrong_shape(rng, tmp_path):
    state = dict(STATE)
    name = str(rng.choice([n for n in sorted(state) if "head" not in n]))
    state[name] = [state[name].flatten(), state[name][..., :-1], state[name][None]][rng.integers(3)].clone()
    if state[name].shape == STATE[name].shape:  # flattening a vector changes nothing
        state[name] = state[name][None]
    return ".pth", torch_file({"model": state})


def no_tensor(rng, tmp_path):
    """A tensor replaced by something else of Python's, which a state dict cannot hold."""
    state = dict(STATE)
    name = str(rng.choice(sorted(state)))
    state[name] = [None, 3, "text", [1.0, 2.0], {"a": 1}][rng.integers(5)]
    return ".pth", torch_file({"model": state})


class Hostile:
    """Makes a folder when unpickled, in one of several ways."""

    def __init__(self, path, how):
        self.path, self.how = str(path), how

    def __reduce__(self):
        ways = [
            (os.mkdir, (self.path,)),
            (os.system, (f"mkdir {self.path}",)),
            (eval, (f"__import__('os').mkdir({self.path!r})",)),
            (exec, (f"import os; os.mkdir({self.path!r})",)),
            (subprocess.call, (["mkdir", self.path],)),
        ]
        return ways[self.how]


def hostile(rng, tmp_path):
    payload = Hostile(tmp_path / "executed", int(rng.integers(5)))
    content = [{"model": STATE, "args": payload}, {"model": {**STATE, "x": payload}}, payload][rng.integers(3)]
    if rng.integers(2):  # the old format, or none of torch's at all
        return ".pth", pickle.dumps(content, protocol=int(rng.integers(2, 5)))
    return ".pth", torch_file(content)


def large_claims(rng, tmp_path):
    """A safetensors header that is, or speaks of, gigabytes; tensors that overlap or lie outside of the file."""
    huge = int(rng.choice([2 * 2**30, 2**40, 2**63 - 1]))
    if rng.integers(3) == 0:
        return ".safetensors", struct.pack("<Q", huge) + b"{" + bytes(100)
    entry = {"dtype": "F32", "shape": [huge // 4], "data_offsets": [0, huge]}
    if rng.integers(2):
        entry = {"dtype": "F32", "shape": [4], "data_offsets": [int(rng.integers(100)), int(rng.integers(16))]}
    header = json.dumps({"a": entry, "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return ".safetensors", struct.pack("<Q", len(header)) + header + bytes(64)


def bomb(rng, tmp_path):
    """A torch file in which one record is packed and 16 MB, or longer or shorter than the tensor in it."""
    content = torch_file({"model": STATE})
    out = io.BytesIO()
    how = rng.integers(3)
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(out, "w", zipfile.ZIP_STORED if how else zipfile.ZIP_DEFLATED) as new,
    ):
        names = [n for n in old.namelist() if "/data/" in n]
        chosen = names[rng.integers(len(names))]
        for name in old.namelist():
            record = old.read(name)
            if name == chosen:
                record = (bytes(2**24), record + bytes(100), record[:-4])[how]
            new.writestr(name, record)
    return ".pth", out.getvalue()


def other_types(rng, tmp_path):
    """Floats of another width load as what they say; integers, booleans and complex numbers are no weights."""
    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64)
    dtype = dtypes[rng.integers(len(dtypes))]
    name = str(rng.choice(sorted(STATE)))
    return ".pth", torch_file({"model": {**STATE, name: STATE[name].to(dtype)}})


KINDS = (
    *(truncated, flipped, flipped_in_the_header, renamed, wrong_shape),
    *(no_tensor, hostile, large_claims, bomb, other_types),
)
REFUSED = {truncated, renamed, wrong_shape, no_tensor, hostile, large_claims, bomb}


def same(found, kind) -> bool:
    """Whether a state dict holds the original's tensors, up to rounding where the file holds another width."""
    if kind is other_types:
        return all(torch.allclose(v, STATE[k], rtol=1e-2, atol=1e-3) for k, v in found.items())
    return all(torch.equal(v, STATE[k]) for k, v in found.items())


def most_memory() -> int:
    """Bytes that this process has held at once so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # of a file that says so of itself
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_files(kind, tmp_path):
    assert len(KINDS) * RUNS == 200
    refused, growth = 0, 0
    for seed in range(RUNS):
        suffix, content = kind(np.random.default_rng([seed, KINDS.index(kind)]), tmp_path)
        path = tmp_path / f"a{suffix}"
        path.write_bytes(content)
        target = model()
        for parameter in target.parameters():
            parameter.data.fill_(7.0)
        before = most_memory()
        try:
            report = vim.load_weights(target, path, None if suffix == ".safetensors" else "shufflemamba")
        except WeightsError as error:
            refused += 1
            text = str(error)
            assert str(path) in text and "\n" not in text and len(text) < 500, (seed, text)
            assert all((p == 7.0).all() for p in target.parameters()), f"seed {seed}: refused, but the model is changed"
        else:
            assert kind not in REFUSED, f"seed {seed}: loaded, {report}"
            assert report.loaded == len(STATE) and not report.missing and same(target.state_dict(), kind), seed
        growth += most_memory() - before
        assert not (tmp_path / "executed").exists(), f"seed {seed}: executed"
    assert growth < 15 * 2**20
    assert refused == RUNS if kind in REFUSED else refused


@pytest.mark.parametrize("header", [b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', b"", b"{"])
def test_a_header_that_is_two_gigabytes(header, tmp_path):
    """Not only said to be so: the file is as long (and empty on the disk), and still little of it is read."""
    path = tmp_path / "a.safetensors"
    size = 2 * 2**30
    with path.open("wb") as file:
        file.write(struct.pack("<Q", size) + header)
        file.truncate(8 + size + 16)
    before = most_memory()
    with pytest.raises(WeightsError, match="is damaged or no safetensors file"):
        vim.load_weights(model(), path, "shufflemamba")
    assert most_memory() - before < 15 * 2**20


def test_files_that_are_not_damaged_load(tmp_path):
    for suffix, content in ((".safetensors", safetensors_file(tmp_path)), (".pth", torch_file({"model": STATE}))):
        (tmp_path / f"b{suffix}").write_bytes(content)
        target = model()
        vim.load_weights(target, tmp_path / f"b{suffix}", None if suffix == ".safetensors" else "shufflemamba")
        assert same(target.state_dict(), None)


LIES = {
    "grid": ('"x"', "5", "[4]", "[4, 4, 1]", "[8, 3]", "[-4, -4]", "null"),
    "stride": ('"x"', "[8]", "null", "16"),
    "family": ("vmi", "vim", ""),
    "layout": ("official", "x"),
    "cls_position": ('"middle"', "5", "{}"),
    "merge": ("sum", ""),
    "config": ("[]", '"x"', "5"),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in LIES for value in LIES[key]])
def test_metadata_that_lie(key, value, tmp_path):
    """Another family's word for the same tensors must not load, nor a grid that is none; a wrong type is no crash."""
    about = {"layout": "native", "family": "shufflemamba", key: value}
    save_file(STATE, tmp_path / "a.safetensors", about)
    try:
        vim.load_weights(model(), tmp_path / "a.safetensors")
    except WeightsError as error:
        assert "\n" not in str(error)
    else:
        assert (key, value) in (("family", ""), ("layout", "official"), ("layout", "x"))  # nothing said; the same rows


def test_weights_that_are_not_numbers_are_weights(tmp_path):
    """NaN in a file is what the file says: evaluation and training find it, loading does not judge."""
    broken = {k: v * float("nan") for k, v in STATE.items()}
    target = model()
    assert vim.load_weights(target, broken, "shufflemamba").loaded == len(STATE)
    assert target.head.weight.isnan().all()


def test_a_hostile_file_would_have_run(tmp_path):
    """The mutations are real: plain pickle executes each of them."""
    for how in range(5):
        (tmp_path / str(how)).mkdir()
        path = tmp_path / str(how) / "executed"
        pickle.loads(pickle.dumps(Hostile(path, how)))
        assert path.is_dir()
