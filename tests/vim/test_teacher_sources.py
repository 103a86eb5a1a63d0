"""Where teachers come from: names, files, folders; what each refuses, in one line."""

import json
import logging
from dataclasses import asdict

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from tinyteachers import (
    CLIP,
    IMAGENET,
    by_name,
    close,
    distill,
    hf,
    resampled,
    seen_by_teacher,
    shaken,
    shrink,
    student_images,
)
from transformers import CLIPModel

from vim import checkpoint, export, factory
from vim.runtime import UserError
from vim.schema import Config, DataConfig, ModelConfig, SlwsConfig
from vim.teachers import build_teacher, check_teacher


def our_run(folder, config, model, ema=None):
    """A checkpoint as train.py writes it."""
    found = {"format": checkpoint.FORMAT, "config": asdict(config), "model": model.state_dict()}
    found["meta"] = factory.describe(model, config, [str(i) for i in range(model.num_classes)])
    checkpoint.save(found | {"ema": ema and ema.state_dict()}, folder / "best.pt")
    return folder / "best.pt"


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_own_checkpoint(tmp_path, suffix):
    """Averaged weights, the run's own mean and std, an oblong grid, without its SLWS and its first weights."""
    small = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "reg_tokens": 1}
    model = ModelConfig("vit_tiny_patch16_224", [16, 24], kwargs=small, drop_path=0.5)
    cfg = Config(model=model, data=DataConfig(mean=[0.1, 0.2, 0.3], std=[0.5]), slws=SlwsConfig(0.9))
    raw, averaged = (shaken(factory.build_model(cfg, 5), seed) for seed in (1, 2))
    cfg.model.kwargs["pretrained"] = True  # the weights it began with are of no use now
    path = our_run(tmp_path, cfg, raw, averaged)
    if suffix == "safetensors":
        export.export(path, "safetensors", tmp_path / "best.safetensors")
    settings = distill(tmp_path / f"best.{suffix}", target="projected")
    check_teacher(settings)
    images = student_images((16, 24))
    for target, width in (("projected", 5), ("tokens", 32)):
        settings.target = target
        teacher = build_teacher(settings, (4, 6), *IMAGENET, 3)
        with torch.no_grad():
            seen = seen_by_teacher(images, (16, 24), (0.1, 0.2, 0.3), (0.5,) * 3)
            wanted = averaged.forward_intermediates(seen, 1, output_fmt="NLC", norm=target == "projected")[1][0]
            wanted = averaged.head(wanted) if target == "projected" else wanted
        assert teacher.width == width
        close(teacher(images).tokens, wanted)


def test_files_of_other_layouts_and_grids(tmp_path, monkeypatch):
    """OpenAI's names, and a file with 6 x 6 positions for a model of 8 x 8: one resampling, without antialiasing."""
    shrink(monkeypatch, 16)
    name = "vit_base_patch16_clip_quickgelu_224.openai"
    settings, model = by_name(tmp_path, name)
    renamed = {}
    for key, tensor in model.state_dict().items():
        for ours, theirs in (
            ("patch_embed.proj", "conv1"),
            ("blocks.", "transformer.resblocks."),
            ("norm_pre", "ln_pre"),
            (".norm", ".ln_"),
            ("attn.qkv.", "attn.in_proj_"),
            ("attn.proj", "attn.out_proj"),
            ("mlp.fc1", "mlp.c_fc"),
            ("mlp.fc2", "mlp.c_proj"),
        ):
            key = key.replace(ours, theirs)
        renamed["visual." + ("ln_post" + key[4:] if key.startswith("norm.") else key)] = tensor
    renamed["visual.class_embedding"] = renamed.pop("visual.cls_token").flatten()
    renamed["visual.proj"] = renamed.pop("visual.head.weight").T.contiguous()
    del renamed["visual.head.bias"]
    positions = torch.randn(37, 32)
    renamed["visual.positional_embedding"] = renamed.pop("visual.pos_embed")[0]
    small = {**renamed, "visual.positional_embedding": positions, "logit_scale": torch.ones(())}
    half = {k: w.half() for k, w in renamed.items()}
    torch.save(half, tmp_path / "half.pt")
    torch.save({k: w.float() for k, w in half.items()}, tmp_path / "same.pt")
    torch.save(small, tmp_path / "small.pt")
    images, made = student_images((128, 80)), {}
    for file in ("w.safetensors", "half.pt", "same.pt"):
        settings.teacher_weights = str(tmp_path / file)
        made[file] = build_teacher(settings, (8, 5), *IMAGENET, 3)(images).tokens
    close(made["half.pt"], made["w.safetensors"], atol=0.02)
    close(made["half.pt"], made["same.pt"], 0)  # read as fp32 before anything is computed
    settings.teacher_weights = str(tmp_path / "small.pt")
    teacher = build_teacher(settings, (8, 5), *IMAGENET, 3)
    close(teacher.vit.pos_embed[0, :1], positions[:1], 0)
    close(teacher.vit.pos_embed[:, 1:], resampled(positions[None, 1:], (6, 6), (8, 5)), 0)


def test_public_weights_come_through_timm(tmp_path, monkeypatch):
    """The tag's weights, its mean and std, and the head only where it is asked for."""
    shrink(monkeypatch, 16)
    settings, model = by_name(tmp_path, "vit_base_patch16_clip_quickgelu_224.openai", target="projected")
    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", lambda *where, **how: model.state_dict())
    wanted = build_teacher(settings, (5, 5), *IMAGENET, 3)
    images = student_images((80, 80))
    settings.teacher_weights = None
    got = build_teacher(settings, (5, 5), *IMAGENET, 3)
    close(got(images).tokens, wanted(images).tokens, 0)
    close(got.mean.flatten(), torch.tensor(CLIP[0]))
    assert got.width == 512


def test_no_download(monkeypatch, offline):
    shrink(monkeypatch, 16)
    settings = distill("vit_base_patch16_clip_quickgelu_224.openai")
    check_teacher(settings)
    with pytest.raises(UserError) as caught:
        build_teacher(settings, (4, 4), *IMAGENET, 3)
    line = str(caught.value)
    assert line.startswith(f"distill.teacher {settings.teacher}: its weights cannot be downloaded (")
    assert "name a file of them in distill.teacher_weights, or a folder of a Hugging Face CLIP in" in line
    assert "\n" not in line


def test_files_of_the_hub(tmp_path, monkeypatch, offline, cached):
    """A checkpoint of ours, and weights for a name, each by its place on the hub."""
    images = student_images((16, 16))
    small = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    cfg = Config(model=ModelConfig("vit_tiny_patch16_224", 16, kwargs=small))
    path = our_run(tmp_path, cfg, shaken(factory.build_model(cfg, 5)))
    cached(offline, "a/b", "best.pt", path.read_bytes())
    wanted, got = (
        build_teacher(distill(where), (4, 4), *IMAGENET, 3)(images) for where in (path, "hf_hub:a/b/best.pt")
    )
    close(got.tokens, wanted.tokens, 0)

    shrink(monkeypatch, 16)
    settings, _ = by_name(tmp_path, "vit_small_patch16_224")
    wanted = build_teacher(settings, (4, 4), *IMAGENET, 3)(images)
    cached(offline, "a/b", "w.safetensors", (tmp_path / "w.safetensors").read_bytes())
    settings.teacher_weights = "hf_hub:a/b/w.safetensors"
    check_teacher(settings)
    close(build_teacher(settings, (4, 4), *IMAGENET, 3)(images).tokens, wanted.tokens, 0)

    refuses(distill("hf_hub:a/b/none.pt"), "a/b: none.pt cannot be downloaded")
    refuses(distill("hf-hub:a/b"), "hf-hub:a/b: is not of the form hf_hub:OWNER/REPO/FILE")
    settings.teacher_weights = "hf_hub:a/b/none.pt"
    refuses(settings, "a/b: none.pt cannot be downloaded")


def test_weights_of_quickgelu_in_a_plain_model(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("vim"), "propagate", True)
    shrink(monkeypatch, 16)
    plain, quick = "vit_base_patch16_clip_224.openai", "vit_base_patch16_clip_quickgelu_224.openai"
    for name in (plain, quick):
        caplog.clear()
        build_teacher(by_name(tmp_path, name)[0], (4, 4), *IMAGENET, 3)
        assert (f"{name}: its weights were trained with QuickGELU" in caplog.text) == (name == plain)
        assert bool(caplog.records) == (name == plain)


def test_clip_folder_in_other_forms(tmp_path):
    """pytorch_model.bin with the buffer of old versions, a preprocessor of its own, numbers left to their defaults."""
    hf(tmp_path, CLIPModel)
    images = student_images((16, 16))
    wanted = build_teacher(distill(tmp_path), (4, 4), *IMAGENET, 3)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    old = {"vision_model.embeddings.position_ids": torch.arange(17)[None]}
    torch.save(weights | old, tmp_path / "pytorch_model.bin")
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["vision_config"].pop("hidden_act") == "quick_gelu"
    assert about["vision_config"].pop("layer_norm_eps") == 1e-5
    (tmp_path / "config.json").write_text(json.dumps(about))
    check_teacher(distill(tmp_path))
    close(build_teacher(distill(tmp_path), (4, 4), *IMAGENET, 3)(images).tokens, wanted(images).tokens, 0)
    how = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(how))
    teacher = build_teacher(distill(tmp_path), (4, 4), *IMAGENET, 3)
    seen = seen_by_teacher(images, (16, 16), *how.values())
    close(teacher(images).tokens, teacher.vit.forward_intermediates(seen, 1, output_fmt="NLC")[1][0])


def refuses(settings, message):
    with pytest.raises(UserError, match=message) as caught:
        check_teacher(settings)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=message):
        build_teacher(settings, (4, 4), *IMAGENET, 3)


def test_names_that_are_no_teachers(tmp_path):
    refuses(distill("vit_large_patch14_clip_quikgelu_224"), "no timm model, is named .*; near it: vit_large_")
    refuses(distill("runs/teacher/best.pt"), "no file or folder, and no timm model, is named 'runs/teacher/best.pt'")
    refuses(
        distill("vit_base_patch16_224.clip"),
        "no weights 'vit_base_patch16_224.clip'; it has: vit_base.*augreg",
    )
    refuses(distill("vit_small_patch16_36x1_224"), "timm has no weights of it; name a file in distill.teacher_weights")
    refuses(distill("vit_tiny_patch16_224", teacher_weights="none.pt"), "teacher_weights: no such file: none.pt")
    refuses(distill("vit_small_patch16_dinov3"), "vit_small_patch16_dinov3: is a Eva, only timm's VisionTransformer")
    refuses(distill("resnet18"), "is a ResNet, only timm's VisionTransformer")
    (tmp_path / "w.pt").write_text("")
    given = {"teacher_weights": str(tmp_path / "w.pt")}
    refuses(distill("vim_tiny_patch16_224", **given), "is a VisionMamba, only timm's")
    refuses(distill("vit_base_patch16_xp_224", **given), "with ParallelScalingBlock, a teacher has Block")
    refuses(distill("vit_base_resnet26d_224", **given), "with HybridEmbed, a teacher has PatchEmbed")
    refuses(distill("vit_dwee_patch16_reg1_gap_256", **given), "with DiffAttention, a teacher has Attention")
    refuses(distill("vit_medium_patch16_gap_256", **given), "neither a class token nor attention pooling: set d")
    refuses(distill("vit_small_patch14_dinov2", target="projected"), "has no projection: set distill.target to tokens")


def test_files_that_are_no_teachers(tmp_path, monkeypatch):
    save_file({"w": torch.ones(1)}, tmp_path / "w.safetensors")
    torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        refuses(distill(tmp_path / name), f"distill.teacher: {tmp_path / name} is no checkpoint of train.py")
        refuses(distill(tmp_path / name, teacher_weights="x"), "teacher_weights is for timm names, .* has weights")
    ours = {"format": checkpoint.FORMAT, "model": {"w": torch.ones(1)}, "meta": {}}
    for config, message in (([1], "its config is no dictionary"), ({"model": None}, "model is a group of keys, not N")):
        torch.save(ours | {"config": config}, tmp_path / "ours.pt")
        refuses(distill(tmp_path / "ours.pt"), message)
    (tmp_path / "text.pt").write_text("no")
    refuses(distill(tmp_path / "text.pt"), "is damaged or no torch file")
    cfg = Config(model=ModelConfig("vim_tiny_patch16_224", 32, kwargs={"depth": 2, "embed_dim": 16}))
    refuses(distill(our_run(tmp_path, cfg, factory.build_model(cfg, 3))), "is a VisionMamba, only timm's")
    shrink(monkeypatch, 16)
    settings, model = by_name(tmp_path, "vit_small_patch14_dinov2")
    weights = model.state_dict()
    for change, message in (
        ({"extra": torch.ones(1)}, r"w\.safetensors: has what the teacher has not: extra \(1 tensors\)"),
        ({"norm.bias": None, "cls_token": None}, r"w\.safetensors: lacks: cls_token, norm\.bias \(2 tensors\)"),
        ({"norm.bias": torch.ones(3)}, r"w\.safetensors: has another shape of: norm\.bias"),
        (
            {"pos_embed": torch.ones(17, 32)},
            r"w\.safetensors: its tensors are not of vit_small_patch14_dinov2's shapes",
        ),
        ({"patch_embed.proj.weight": torch.ones(4)}, r"w\.safetensors: its tensors are not of "),
    ):
        save_file({k: w for k, w in (weights | change).items() if w is not None}, tmp_path / "w.safetensors")
        with pytest.raises(UserError, match=message):
            build_teacher(settings, (4, 4), *IMAGENET, 3)


def test_a_fingerprint_tells_what_no_weight_does(tmp_path):
    """The same weights with another preprocessing, activation, number of heads or eps are another teacher."""
    hf(tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())

    def found(look=None, **change):
        (tmp_path / "config.json").write_text(json.dumps(good | change))
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(look or {}))
        return build_teacher(distill(tmp_path), (4, 4), *IMAGENET, 3).fingerprint()

    others = [found({"image_mean": [0.5]}), found({"image_std": [0.5]}), found(hidden_act="gelu")]
    others += [found(num_attention_heads=7), found(layer_norm_eps=0.1)]
    assert len({found(), *others}) == 6 and found() == found()


def test_folders_that_are_no_teachers(tmp_path):
    refuses(distill(tmp_path), "folder .* has no config.json")
    hf(tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        (
            {"model_type": "siglip"},
            "holds a model of type 'siglip', not clip or clip_vision_model",
        ),
        ({"hidden_act": "relu"}, "has hidden_act 'relu', not quick_gelu or gelu"),
        ({"num_attention_heads": 5}, r"config\.json: dim should be divisible by num_heads"),
        ({"hidden_size": "wide"}, r"config\.json: "),
        ({"patch_size": 0}, r"config\.json: "),
        ({"layer_norm_eps": None}, r"config\.json: "),
        ({"num_hidden_layers": 0}, "has no layers"),
        ({"model_type": "clip", "vision_config": [1]}, r"config\.json has vision_config \[1\]"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(good | change))
        refuses(distill(tmp_path), message)
    for text, message in (("{", "is no JSON file"), ("[" * 10**5, "is no JSON file"), ("[]", "holds no JSON object")):
        (tmp_path / "config.json").write_text(text)
        refuses(distill(tmp_path), message)
    (tmp_path / "config.json").write_text(json.dumps(good))
    refuses(distill(tmp_path, target="projected"), "has no projection: set distill.target to tokens")
    refuses(distill(tmp_path, teacher_weights="x"), "distill.teacher_weights is for timm names")
    for change, message in (
        ({"image_mean": "abc"}, "image_mean must be 3 numbers, got .'abc'"),
        ({"image_mean": [0.1, 0.2]}, "image_mean must be 3 numbers, got "),
        ({"image_std": [1, 0, 1]}, "image_std must be 3 numbers above 0, got "),
        ({"image_std": [1, float("nan"), 1]}, "image_std must be 3 numbers above 0, got "),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(change))
        refuses(distill(tmp_path), f"distill.teacher: .*preprocessor_config.json: {message}")
    (tmp_path / "preprocessor_config.json").unlink()
    weights = load_file(tmp_path / "model.safetensors")
    for change, message in (
        (
            {"encoder.layers.0.self_attn.k_proj.bias": None},
            "has what the teacher has not: blocks.0.attn.q_proj",
        ),
        ({"encoder.layers.0.self_attn.q_proj.weight": torch.ones(28)}, "has what the teacher has not: blocks.0.attn"),
        ({"embeddings.class_embedding": None}, "lacks: cls_token"),
        ({"embeddings.position_embedding.weight": torch.ones(5, 28)}, "has another shape of: pos_embed"),
    ):
        save_file({k: w for k, w in (weights | change).items() if w is not None}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=message):
            build_teacher(distill(tmp_path), (4, 4), *IMAGENET, 3)
    (tmp_path / "model.safetensors").unlink()
    refuses(distill(tmp_path), "has neither model.safetensors nor pytorch_model.bin")
