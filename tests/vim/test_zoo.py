"""Weights by name: from a hub cache laid out here, never from the network; and the table of what is public."""

import re

import pytest
import timm
import torch

import vim
from vim.checkpoint import MissingFile, WeightsError
from vim.zoo import PUBLIC, VARIANTS

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_classes": 7}
pytestmark = pytest.mark.usefixtures("offline")


def official(name, **changed):
    torch.manual_seed(1)
    family, arguments = VARIANTS[name]
    model = vim.VisionMamba(**{**arguments, **TINY, **changed})
    return model, vim.convert_state_dict(model.state_dict(), family, to="official")


@pytest.mark.parametrize("name", ["vim_tiny_patch16_224", "videomamba_middle_patch16_224"])
def test_weights_by_name_come_from_the_cache(name, offline, cached):
    source, weights = official(name)
    row = PUBLIC[name]
    cached(offline, row.repository, row.file, {"model": weights})
    model = timm.create_model(name, pretrained=True, **TINY)
    assert all(torch.equal(v, source.state_dict()[k]) for k, v in model.state_dict().items())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.eval()(x), source.eval()(x))

    # Another image size, channels and classes: adapted and left fresh as load_weights does.
    other = timm.create_model(name, pretrained=True, **{**TINY, "img_size": (24, 40), "num_classes": 3, "in_chans": 4})
    assert torch.equal(other.norm_f.weight, source.norm_f.weight) and other.head.weight.shape == (3, 16)
    assert other.pos_embed.shape == (1, 16, 16)

    # Features of the first layer: loaded before the other layers are dropped.
    features = timm.create_model(name, pretrained=True, features_only=True, out_indices=(0,), **TINY)
    assert len(features.model.layers) == 1 and torch.equal(features.model.pos_embed, source.pos_embed)


def test_another_cache_and_an_incomplete_one(cached, tmp_path):
    source, weights = official("vim_small_patch16_224")
    row = PUBLIC["vim_small_patch16_224"]
    cached(tmp_path / "mine", row.repository, row.file, {"model": weights})
    model = timm.create_model("vim_small_patch16_224", pretrained=True, cache_dir=tmp_path / "mine", **TINY)
    assert torch.equal(model.pos_embed, source.pos_embed)
    with pytest.raises(
        ValueError, match=rf"hustvl/Vim-small-midclstok@main: {row.file} cannot be downloaded \(.*local cache"
    ):
        timm.create_model("vim_small_patch16_224", pretrained=True, **TINY)


def test_stride_8_weights_take_the_stride_8_file(offline, cached):
    name = "vim_tiny_patch16_stride8_224"
    changed = {"img_size": 224, "patch_size": 16, "depth": 1}
    _, weights = official(name, **changed)
    row, plain = PUBLIC[name], PUBLIC["vim_tiny_patch16_224"]
    assert row.repository == plain.repository and row.file != plain.file
    cached(offline, row.repository, row.file, {"model": weights})
    model = timm.create_model(name, pretrained=True, **{**TINY, **changed})
    assert torch.equal(model.head.weight, weights["head.weight"])
    cached(offline, row.repository, plain.file, {"model": weights})
    with pytest.raises(ValueError, match=r"stride 8 .*the model's stride is 16"):
        timm.create_model("vim_tiny_patch16_224", pretrained=True, **{**TINY, **changed})


def test_a_hostile_or_foreign_file_of_the_hub_is_refused(offline, cached, tmp_path):
    row = PUBLIC["vim_tiny_patch16_224"]

    class Hostile:
        def __reduce__(self):
            return (tmp_path / "executed").mkdir, ()

    path = cached(offline, row.repository, row.file, {"model": {}, "x": Hostile()})
    with pytest.raises(WeightsError, match="holds code"):
        timm.create_model("vim_tiny_patch16_224", pretrained=True, **TINY)
    assert not (tmp_path / "executed").exists()
    torch.save({"model": official("mambareg_tiny_patch16_224", num_registers=4)[1]}, path)
    with pytest.raises(WeightsError, match=r"registers .* not of family 'vim'"):
        timm.create_model("vim_tiny_patch16_224", pretrained=True, **TINY)


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - PUBLIC.keys()))
def test_names_without_weights_list_those_that_have_some(name):
    with pytest.raises(ValueError, match=rf"no public weights of {name} are known; there are some of") as caught:
        timm.create_model(name, pretrained=True, **TINY)
    assert all(row in str(caught.value) for row in PUBLIC) and f"family='{VARIANTS[name][0]}'" in str(caught.value)


def test_the_table():
    assert PUBLIC.keys() <= VARIANTS.keys()
    for name, row in PUBLIC.items():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", row.repository) and re.fullmatch(
            r"[\w.-]+\.(pth|safetensors)", row.file
        )
        assert row.revision and row.note == "not downloaded here"
        cfg = timm.get_pretrained_cfg(name)
        assert (cfg.hf_hub_id, cfg.hf_hub_filename) == (f"{row.repository}@{row.revision}", row.file)
    assert len({(row.repository, row.file) for row in PUBLIC.values()}) == len(PUBLIC)
    assert not timm.get_pretrained_cfg("arm_base_patch16_224").has_weights
    assert {name for name in timm.list_models(pretrained=True) if name in VARIANTS} == PUBLIC.keys()


def test_a_file_named_in_the_configuration(tmp_path):
    """timm's own way to load a local file: pretrained_cfg_overlay."""
    source, weights = official("arm_base_patch16_224")
    torch.save(weights, tmp_path / "a.pth")
    overlay = {"file": str(tmp_path / "a.pth")}
    model = timm.create_model("arm_base_patch16_224", pretrained=True, pretrained_cfg_overlay=overlay, **TINY)
    assert torch.equal(model.pos_embed, source.pos_embed)
    with pytest.raises(MissingFile, match=r"nowhere\.pth: no such file"):
        overlay = {"file": "nowhere.pth"}
        timm.create_model("arm_base_patch16_224", pretrained=True, pretrained_cfg_overlay=overlay, **TINY)
