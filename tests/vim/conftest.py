"""The cache of huggingface_hub's client, laid out by hand: nothing is downloaded."""

import huggingface_hub
import pytest
import torch


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """huggingface_hub's own offline mode, and an empty cache as its default one, whose folder this is."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture(scope="session")
def cached():
    """cached(hub, repository, file, content) lays `content`, bytes or what torch.save takes, out as the client does."""

    def lay(hub, repository, file, content, revision="main", commit="0123456789" * 4):
        root = hub / f"models--{repository.replace('/', '--')}"
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / revision).write_text(commit)
        path = root / "snapshots" / commit / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        return path

    return lay
