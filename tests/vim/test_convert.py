"""Published weights into our models and back: names, row order, resizing, and every refusal."""

import argparse
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import vim
from vim import convert, export
from vim.zoo import FAMILIES

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_classes": 7}
EXTRA = {"mambareg": {"num_registers": 4, "register_reduce": 2}}


def tiny(family="shufflemamba", **changed):
    torch.manual_seed(0)
    return vim.VisionMamba(**{**TINY, **FAMILIES[family], **EXTRA.get(family, {}), **changed})


def official(family="shufflemamba", **changed):
    return vim.convert_state_dict(tiny(family, **changed).state_dict(), family, to="official")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def resized(rows, old, new, prefix=1):
    """Prefix rows as they are, the others interpolated as an image."""
    grid = rows[:, prefix:].reshape(1, *old, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, new, mode="bicubic", antialias=True)
    return torch.cat([rows[:, :prefix], grid.flatten(2).transpose(1, 2)], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bit_identical(family):
    native = tiny(family).state_dict()
    foreign = vim.convert_state_dict(native, family, to="official")
    assert same(vim.convert_state_dict(foreign, family), native)
    assert same(vim.convert_state_dict(vim.convert_state_dict(foreign, family), family, to=family), foreign)
    model = tiny(family)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    report = vim.load_weights(model, foreign, family=family)
    assert same(model.state_dict(), native) and report.loaded == len(native)
    assert not (report.adapted or report.dropped or report.missing)


def test_official_layouts():
    native, foreign = tiny("vim").state_dict(), official("vim")
    assert torch.equal(foreign["pos_embed"][:, 8], native["pos_embed"][:, 0])  # the class row before patch 8 of 16
    assert torch.equal(foreign["pos_embed"][:, 7], native["pos_embed"][:, 8])
    assert torch.equal(foreign["pos_embed"][:, 9], native["pos_embed"][:, 9])
    foreign = official("mambareg")
    assert [tuple(foreign[k].shape) for k in ("cls_token", "pos_embed_cls", "pos_embed")] == [
        (1, 4, 16),
        (1, 4, 16),
        (1, 16, 16),
    ]
    assert "reg_token" not in foreign


@pytest.mark.parametrize("family", ["vim", "shufflemamba", "mambareg", "mambamlp", "arm"])
def test_positions_follow_the_image_and_prefix_rows_stay(family):
    native, rows = tiny(family).state_dict(), 4 if family == "mambareg" else 1
    for size, grid in ((48, (6, 6)), ((16, 64), (2, 8)), ((24, 40), (3, 5))):
        model = tiny(family, img_size=size)
        report = vim.load_weights(model, official(family), family=family)
        wanted = resized(native["pos_embed"], (4, 4), grid, rows)
        assert torch.equal(model.pos_embed[:, :rows], native["pos_embed"][:, :rows])
        torch.testing.assert_close(model.pos_embed, wanted, rtol=0, atol=1e-6)
        assert report.adapted == [f"pos_embed 4x4 -> {grid[0]}x{grid[1]}"]
        model.eval()(torch.zeros(1, 3, *model.patch_embed.img_size))


def test_positions_from_a_grid_that_is_not_square(tmp_path):
    narrow = tiny(img_size=(16, 64))  # 2 x 8 patches, as many as 4 x 4
    save_file(narrow.state_dict(), tmp_path / "a.safetensors", {"layout": "native", "grid": "[2, 8]", "stride": "8"})
    model = tiny()
    vim.load_weights(model, tmp_path / "a.safetensors")
    torch.testing.assert_close(model.pos_embed, resized(narrow.pos_embed, (2, 8), (4, 4)), rtol=0, atol=1e-6)
    assert not torch.equal(model.pos_embed, narrow.pos_embed)
    same_grid = tiny(img_size=(16, 64))
    vim.load_weights(same_grid, {k: v + 1 for k, v in narrow.state_dict().items()}, family="native")
    assert torch.equal(same_grid.pos_embed, narrow.pos_embed + 1)
    odd, other = tiny(img_size=(24, 40)), official(img_size=(24, 40))
    other["pos_embed"] = other["pos_embed"] + 1
    assert not vim.load_weights(odd, other, family="shufflemamba").adapted
    assert torch.equal(odd.pos_embed, other["pos_embed"])
    with pytest.raises(ValueError, match="15 positions are no square grid"):
        vim.load_weights(tiny(), official(img_size=(24, 40)), family="shufflemamba")


@pytest.mark.parametrize(("there", "here", "patches"), [(8, 16, 729), (16, 8, 196)])
def test_strides_are_never_mixed_silently(there, here, patches, tmp_path):
    big = {"img_size": 224, "patch_size": 16, "embed_dim": 8, "depth": 1}
    weights, model = official("vim", **big, stride=there), tiny("vim", **big, stride=here)
    before = model.pos_embed.clone()
    with pytest.raises(ValueError, match=rf"stride {there} \({patches} patches\), the model's stride is {here}"):
        vim.load_weights(model, weights, family="vim")
    assert torch.equal(model.pos_embed, before)
    vim.load_weights(model, weights, family="vim", resize_stride=True)
    native = vim.convert_state_dict(weights, "vim")["pos_embed"]
    sides = {8: (27, 27), 16: (14, 14)}
    torch.testing.assert_close(model.pos_embed, resized(native, sides[there], sides[here]), rtol=0, atol=1e-6)


def test_head_of_other_classes_is_dropped_and_reported():
    model = tiny(num_classes=3)
    fresh = model.head.weight.clone()
    report = vim.load_weights(model, official(), family="shufflemamba")
    assert torch.equal(model.head.weight, fresh)
    assert report.missing == ["head.bias", "head.weight"] and report.loaded == len(official()) - 2
    assert "head.weight (7 classes, the model has 3)" in str(report)
    assert vim.load_weights(tiny(num_classes=0), official(), family="shufflemamba").missing == []


def test_first_convolution_follows_the_channels():
    weight = official()["patch_embed.proj.weight"]
    gray, alpha = tiny(in_chans=1), tiny(in_chans=4)
    report = vim.load_weights(gray, official(), family="shufflemamba")
    torch.testing.assert_close(gray.patch_embed.proj.weight, weight.sum(1, keepdim=True))
    assert report.adapted == ["patch_embed.proj 3 -> 1 channels"]
    vim.load_weights(alpha, official(), family="shufflemamba")
    torch.testing.assert_close(alpha.patch_embed.proj.weight, torch.cat([weight, weight[:, :1]], 1) * 0.75)
    with pytest.raises(ValueError, match="takes 1 channels; only 3 can be adapted"):
        vim.load_weights(tiny(), official(in_chans=1), family="shufflemamba")


def test_wrappers_and_prefixes(tmp_path):
    raw, averaged = official(), {k: v + 1 for k, v in official().items()}
    model = tiny()
    arguments = argparse.Namespace(lr=1e-3, model="x")
    published = {"model": raw, "model_ema": averaged, "optimizer": {"state": {}}, "epoch": 3, "args": arguments}
    files = {
        "published": (published, averaged),
        "timm": ({"state_dict": raw, "state_dict_ema": None}, raw),
        "nested": ({"model": {"model": raw}}, raw),
        "prefixes": ({f"module._orig_mod.{k}": v for k, v in averaged.items()}, averaged),
        "plain": (raw, raw),
    }
    for name, (content, wanted) in files.items():
        torch.save(content, tmp_path / f"{name}.pth")
        vim.load_weights(model, tmp_path / f"{name}.pth", family="shufflemamba")
        assert same(dict(model.state_dict()), wanted), name
        vim.load_weights(model, content, family="shufflemamba")
        assert same(dict(model.state_dict()), wanted), name
    vim.load_weights(model, tmp_path / "published.pth", family="shufflemamba", use_ema=False)
    assert same(dict(model.state_dict()), raw)


REFUSED = {
    "zero matches": ({"net.a": torch.zeros(1)}, "no tensor matches the model's; its names: net.a"),
    "no tensors": ({"epoch": 3}, "no tensor matches the model's; its names: none"),
    "unexplained": ({**official(), "layers.0.extra": torch.zeros(1)}, r"1 keys are not in the model: layers\.0\.extra"),
    "missing": ({k: v for k, v in official().items() if k != "norm_f.weight"}, "lacks 1 tensors of the model: norm_f"),
    "shape": ({**official(), "norm_f.weight": torch.ones(9)}, r"norm_f\.weight is \(9,\), the model's is \(16,\)"),
    "registers": (official("mambareg"), "registers .* not of family 'shufflemamba'"),
    "mlp": (official("mambamlp"), "MLP in each layer: they are not of family 'shufflemamba'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(case):
    weights, message = REFUSED[case]
    model = tiny()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        vim.load_weights(model, weights, family="shufflemamba")
    assert same(dict(model.state_dict()), before)


def test_the_family_must_be_known_and_fit():
    with pytest.raises(ValueError, match=r"name the family of these weights.*vim, shufflemamba"):
        vim.load_weights(tiny(), official())
    with pytest.raises(ValueError, match="unknown family 'vmi'; choose from vim, shufflemamba"):
        vim.load_weights(tiny(), official(), family="vmi")
    with pytest.raises(ValueError, match="family 'vim' want cls_position='middle', the model has 'first'"):
        vim.load_weights(tiny(), official("vim"), family="vim")
    with pytest.raises(ValueError, match="family 'videomamba' want merge='sum', the model has 'mean'"):
        vim.load_weights(tiny(), official("videomamba"), family="videomamba")
    pretrained = official("mambamlp", directions=2, merge="sum")
    with pytest.raises(ValueError, match="family 'mambamlp' want merge='sum', the model has 'mean'"):
        vim.load_weights(tiny("mambamlp", directions=2, merge="mean"), pretrained, family="mambamlp")
    assert vim.load_weights(tiny("mambamlp", directions=2, merge="sum"), pretrained, family="mambamlp").loaded
    with pytest.raises(ValueError, match="to must be 'native', 'official' or 'vim', got 'arm'"):
        vim.convert_state_dict(official("vim"), "vim", to="arm")
    with pytest.raises(ValueError, match="'mambareg' lack cls_token"):
        vim.convert_state_dict({"pos_embed_cls": torch.zeros(1, 4, 16)}, "mambareg")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pt: no such file"):
        vim.load_weights(tiny(), "nowhere.pt")


def test_traits_that_a_file_records_win_over_its_family(tmp_path, run_main):
    about = {"layout": "native", "family": "vim", "cls_position": json.dumps("first"), "merge": "sum", "name": "x"}
    save_file(tiny("videomamba").state_dict(), tmp_path / "a.safetensors", about)
    assert vim.load_weights(tiny("videomamba"), tmp_path / "a.safetensors").loaded == len(official())
    for family, message in (("vim", "cls_position='first', the model has 'middle'"), ("shufflemamba", "merge='sum'")):
        with pytest.raises(ValueError, match=message):
            vim.load_weights(tiny(family), tmp_path / "a.safetensors")
    argv = ("--checkpoint", tmp_path / "a.safetensors", "--format", "official", "--out", tmp_path / "b.pth")
    done = run_main(export.main, *argv)
    assert done.code == 2 and "cls_position 'first' is not that of the family vim" in done.err
    assert not (tmp_path / "b.pth").exists()


@pytest.mark.parametrize("family", ["mambamlp", "arm"])
def test_two_directions_become_four(family):
    """The transposed pair starts as copies: on images that are their own transpose all four agree with the two."""
    two = {"directions": 2, "merge": "sum"}
    model, weights = tiny(family), official(family, **two)
    for name in ("layers.0.mixer.conv1d.weight", "layers.1.mixer.A_log"):  # so that no two directions are alike
        weights[name] = weights[name] + 0.3
    report = vim.load_weights(model, weights, family=family)
    assert report.adapted == ["mixers of 2 directions -> 4, the transposed pair as copies"]
    assert report.loaded == len(model.state_dict()) and not report.missing
    found = model.state_dict()
    for i in (0, 1):
        for name in ("conv1d{}.weight", "conv1d{}.bias", "x_proj{}.weight", "dt_proj{}.weight", "dt_proj{}.bias"):
            for twin, source in (("", ""), ("_b", "_b"), ("_c", ""), ("_c_b", "_b")):
                key = f"layers.{i}.mixer.{name}"
                assert torch.equal(found[key.format(twin)], weights[key.format(source)]), key.format(twin)
        for twin, source in (("A_c_log", "A_log"), ("A_c_b_log", "A_b_log"), ("D_c", "D"), ("D_c_b", "D_b")):
            assert torch.equal(found[f"layers.{i}.mixer.{twin}"], weights[f"layers.{i}.mixer.{source}"]), twin

    # Two summed directions, halved, are four averaged ones where rows and columns read the same.
    pair = tiny(family, directions=2, merge="mean")
    pair.load_state_dict(vim.convert_state_dict(weights, family))
    for each in (model, pair):
        grid = each.pos_embed.data[:, 1:].view(1, 4, 4, 16)
        grid.copy_((grid + grid.transpose(1, 2)) / 2)
        each.patch_embed.proj.weight.data.copy_(
            (each.patch_embed.proj.weight + each.patch_embed.proj.weight.transpose(2, 3)) / 2
        )
    image = torch.rand(1, 3, 32, 32)
    image = image + image.transpose(2, 3)
    torch.testing.assert_close(model.eval()(image), pair.eval()(image))
    incomplete = {k: v for k, v in weights.items() if k != "layers.0.mixer.D"}
    with pytest.raises(ValueError, match=r"has layers\.0\.mixer\.D_b and no layers\.0\.mixer\.D"):
        vim.load_weights(tiny(family), incomplete, family=family)


def test_four_directions_do_not_become_two():
    with pytest.raises(ValueError, match="keys are not in the model: "):
        vim.load_weights(tiny("mambamlp", directions=2, merge="sum"), official("mambamlp"), family="mambamlp")


def test_masked_pretraining_starts_final_norm_and_head_afresh(tmp_path):
    """`norm` of the pretraining encoder is not the `norm_f` of fine-tuning; nothing of it is dropped unsaid."""
    encoder = official("mambamlp", directions=2, merge="sum", num_classes=0)
    encoder = {k.replace("norm_f", "norm"): v + 0.1 for k, v in encoder.items()}
    decoder = {"mask_token": torch.ones(1, 1, 8), "decoder_embed.weight": torch.ones(8, 16)}
    torch.save({"model": encoder | decoder}, tmp_path / "pretrained.pth")
    model = tiny("mambamlp", merge="mean")
    fresh = {k: v.clone() for k, v in model.state_dict().items()}
    report = vim.load_weights(model, tmp_path / "pretrained.pth", family="mambamlp")
    kept = ["head.bias", "head.weight", "norm_f.bias", "norm_f.weight"]
    assert report.missing == kept and all(torch.equal(model.state_dict()[k], fresh[k]) for k in kept)
    dropped = {"norm.weight", "norm.bias", "mask_token", "decoder_embed.weight"}
    assert {each.removesuffix(" (of pretraining)") for each in report.dropped} == dropped
    assert torch.equal(model.layers[1].mlp.w1.weight, encoder["layers.1.mlp.w1.weight"])
    with pytest.raises(ValueError, match="keys are not in the model: mask_token"):  # only beside pretraining's norm
        vim.load_weights(tiny("mambamlp"), {**official("mambamlp"), "mask_token": torch.ones(1)}, family="mambamlp")


def test_arm_keeps_its_class_token_in_the_middle():
    native, foreign = tiny("arm").state_dict(), official("arm")
    assert torch.equal(foreign["pos_embed"][:, 8], native["pos_embed"][:, 0])
    with pytest.raises(ValueError, match="family 'arm' want cls_position='middle', the model has 'first'"):
        vim.load_weights(tiny("mambamlp"), foreign, family="arm")
    with pytest.raises(ValueError, match="family 'mambamlp' want cls_position='first', the model has 'middle'"):
        vim.load_weights(tiny("arm"), official("mambamlp"), family="mambamlp")


@pytest.mark.parametrize("grid", [(4, 4), (3, 3), (1, 3), (5, 1), (1, 1)])
def test_arm_reads_out_both_sides_of_its_class_token_alike(grid):
    """The published read-out: the mean of the patches before the class token and of those after, halved."""
    model = tiny("arm", img_size=(8 * grid[0], 8 * grid[1])).eval()
    features = model.forward_features(torch.rand(2, 3, 8 * grid[0], 8 * grid[1]))
    patches = grid[0] * grid[1]
    sides = [n for n in (patches // 2, patches - patches // 2) if n]  # a single patch has none before it
    weights = [1 / (len(sides) * n) for n in sides for _ in range(n)]
    wanted = sum(w * features[:, 1 + i] for i, w in enumerate(weights))
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), wanted)
    other = tiny("mambamlp", img_size=(8 * grid[0], 8 * grid[1])).eval()
    features = other.forward_features(torch.rand(2, 3, 8 * grid[0], 8 * grid[1]))
    torch.testing.assert_close(other.forward_head(features, pre_logits=True), features[:, 1:].mean(1))


def test_command_both_ways(run_main, tmp_path):
    foreign, ours, back = (str(tmp_path / n) for n in ("a.pth", "ours.safetensors", "back.pth"))
    torch.save({"model": official("vim"), "args": argparse.Namespace(lr=1)}, foreign)
    done = run_main(convert.main, foreign, "--family", "vim", "--out", ours)
    assert (done.code, done.out) == (0, f"{ours}: {len(official('vim'))} tensors\n")
    assert same(load_file(ours), dict(tiny("vim").state_dict()))
    vim.load_weights(tiny("vim"), ours)  # the file says of which family it is
    assert run_main(convert.main, ours, "--to", "vim", "--out", back).code == 0
    assert same(torch.load(back, weights_only=True)["model"], official("vim"))
    other = str(tmp_path / "official.safetensors")
    assert run_main(convert.main, ours, "--to", "vim", "--out", other).code == 0
    model = tiny("vim")
    model.pos_embed.data.zero_()
    vim.load_weights(model, other)
    assert torch.equal(model.pos_embed, tiny("vim").pos_embed)

    refused = {
        (ours, "--family", "vim"): "is in this package's layout",
        (foreign, "--to", "vim"): "is not in this package's layout",
        (ours, "--to", "shufflemamba"): "says it is of family 'vim', not 'shufflemamba'",
        (foreign, "--family", "mambareg"): "not of family 'mambareg'",
        (foreign,): "name one of --family",
        (str(tmp_path / "no.pth"), "--family", "vim"): "no.pth: no such file",
    }
    for argv, message in refused.items():
        done = run_main(convert.main, *argv, "--out", tmp_path / "c.pth")
        assert done.code == 2 and message in done.err and done.err.count("\n") == 1, done.err
        assert not (tmp_path / "c.pth").exists()
    done = run_main(convert.main, foreign, "--family", "vim", "--out", tmp_path / "no" / "c.pth")
    assert done.code == 2 and f"there is no folder {tmp_path / 'no'}" in done.err
