import copy
import math

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

import slws
import ssm_kernels
import vim
from vim import tokens
from vim.zoo import VARIANTS

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_classes": 7}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def tiny(seed=0, **arguments):
    torch.manual_seed(seed)
    return vim.VisionMamba(**{**TINY, **arguments})


# Millions, from the papers' tables; the first four as published, the others as the published code counts.
PUBLISHED = {
    "shufflemamba_tiny": 7.15,
    "vim_small": 25.8,
    "vim_base": 97.6,
    "shufflemamba_small": 25.8,
    "shufflemamba_middle": 74.2,
    "shufflemamba_base": 97.6,
    "shufflemamba_large": 340.0,
    "videomamba_tiny": 7.15,
    "videomamba_small": 25.8,
    "videomamba_middle": 74.2,
    "videomamba_base": 97.6,
    "mambareg_small": 27.8,
    "mambareg_base": 99.3,
    "mambareg_large": 341.2,
    "mambamlp_base": 85.0,
    "mambamlp_large": 297.0,
    "mambamlp_huge": 662.7,
    "arm_base": 85.0,
    "arm_large": 297.0,
    "arm_huge": 662.7,
}


def parameters(name, **arguments):
    model = timm.create_model(name, device="meta", **arguments)
    return sum(p.numel() for p in model.parameters()) / 1e6


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts(name):
    assert parameters(f"{name}_patch16_224") == pytest.approx(PUBLISHED[name], rel=0.005)


def test_parameter_counts_that_are_published_rounded():
    """Vim-Tiny is 7.1M in print, the same network as SLWS's 7.15M; stride 8 adds (27^2 - 14^2) * width positions."""
    assert round(parameters("vim_tiny_patch16_224"), 2) == 7.15
    assert parameters("shufflemamba_large_patch16_224", depth=40) == pytest.approx(283.7, rel=0.005)
    for size, width in (("tiny", 192), ("small", 384), ("base", 768)):
        more = parameters(f"vim_{size}_patch16_stride8_224") - parameters(f"vim_{size}_patch16_224")
        assert more * 1e6 == pytest.approx((27**2 - 14**2) * width)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_registered_model_is_built_by_timm(name):
    model = timm.create_model(name, num_classes=3, in_chans=1, img_size=(64, 48), device="meta", depth=2)
    assert model.family == name.split("_")[0]
    assert model.head.weight.shape[0] == 3
    assert model.patch_embed.proj.weight.shape[1] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"directions": 3}, "directions must be 1, 2 or 4, got 3"),
        ({"merge": "max"}, "merge must be 'mean' or 'sum', got 'max'"),
        ({"norm": "batch"}, "norm must be one of 'rms', 'layer', got 'batch'"),
        ({"cls_position": "last"}, "cls_position must be one of .* got 'last'"),
        ({"pool": "max"}, "pool must be one of 'token', 'mean', got 'max'"),
        ({"init": "zero"}, "init must be one of 'mamba', 'published', got 'zero'"),
        ({"cls_position": None}, "pool='token' needs a class token or registers"),
        ({"num_registers": 4}, "num_registers=4 needs cls_position=None, got 'middle'"),
        ({"cls_position": None, "num_registers": 4, "register_reduce": 3}, "register_reduce=3 does not divide"),
        ({"directions": 4, "slws_rate": 0.1}, "slws_rate=0.1 with directions=4"),
        ({"slws_rate": 1.5}, r"rate must lie in \[0, 1\], got 1.5"),
        ({"img_size": 33}, "image height 33 is not covered by patches of 8 at stride 8"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny(**arguments)


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="bimamba_type"):
        vim.VisionMamba(bimamba_type="v2")


def test_the_wrong_image_size_is_named():
    with pytest.raises(ValueError, match=r"images are \(40, 32\), the model is made for \(32, 32\)"):
        tiny()(torch.zeros(1, 3, 40, 32))
    with pytest.raises(ValueError, match="image height 44 is not covered by patches of 8 at stride 8"):
        tiny(dynamic_img_size=True)(torch.zeros(1, 3, 44, 32))


@pytest.mark.parametrize("cls_position", ["middle", "first"])
def test_any_size_channels_and_classes(cls_position):
    model = tiny(img_size=(24, 40), in_chans=4, num_classes=3, stride=4, cls_position=cls_position, expand=1)
    assert model.patch_embed.grid_size == (5, 9)
    assert model(torch.randn(2, 4, 24, 40)).shape == (2, 3)
    dynamic = tiny(dynamic_img_size=True, cls_position=cls_position).eval()
    assert dynamic(torch.randn(1, 3, 48, 16)).shape == (1, 7)
    assert torch.equal(dynamic(IMAGES), tiny(cls_position=cls_position).eval()(IMAGES))


def test_set_input_size_resamples_positions_and_keeps_the_prefix_row():
    model = tiny().eval()
    dynamic = tiny(dynamic_img_size=True).eval()
    before = model.pos_embed.detach().clone()
    model.set_input_size((48, 16))
    assert model.pos_embed.shape == (1, 1 + 6 * 2, 32)
    assert torch.equal(model.pos_embed[:, :1], before[:, :1])
    images = torch.randn(1, 3, 48, 16)
    torch.testing.assert_close(model(images), dynamic(images))


def test_token_layouts():
    """models.md: the class token of 197 sits at 98, of 730 at 364; register k at step * (k + 1) + k."""
    assert tokens.prefix_positions(196, "middle", 0) == [98]
    assert tokens.prefix_positions(27 * 27, "middle", 0) == [364]
    assert tokens.prefix_positions(196, None, 12) == [15 * (k + 1) + k for k in range(12)]
    order = tokens.sequence_order(6, [3], "cpu")
    assert order.tolist() == [1, 2, 3, 0, 4, 5, 6]
    assert tokens.sequence_order(6, [2, 5], "cpu").tolist() == [2, 3, 0, 4, 5, 1, 6, 7]
    assert tokens.sequence_order(6, [0], "cpu") is None
    columns = tokens.column_order((2, 3), tokens.sequence_order(6, [0], "cpu"), 1, "cpu")
    assert columns.tolist() == [0, 1, 4, 2, 5, 3, 6]
    middle = tokens.column_order((2, 3), order, 1, "cpu")
    assert order[middle].tolist() == [1, 4, 2, 0, 5, 3, 6]  # native tokens column by column, class token in place


def by_hand(model, images, shuffles):
    """The forward pass with every layer shuffled and restored on its own, as the published code does it."""
    x, grid = model._embed(images)
    order = tokens.sequence_order(grid[0] * grid[1], tokens.prefix_positions(16, model.cls_position, 0), "cpu")
    x = x if order is None else x[:, order]
    residual = torch.zeros_like(x)
    for layer, index in zip(model.layers, shuffles, strict=True):
        if index is not None:
            gather = index[None, :, None].expand_as(x)
            x, residual = torch.gather(x, 1, gather), torch.gather(residual, 1, gather)
        x, residual = layer(x, residual)
        if index is not None:
            back = torch.argsort(index)[None, :, None].expand_as(x)
            x, residual = torch.gather(x, 1, back), torch.gather(residual, 1, back)
    x = x if order is None else x[:, torch.argsort(order)]
    residual = residual if order is None else residual[:, torch.argsort(order)]
    return model.forward_head(model._final_norm(x, residual))


@pytest.mark.parametrize("cls_position", ["middle", "first"])
@pytest.mark.parametrize("mlp", [False, True])
def test_composed_shuffles_equal_shuffle_then_restore(cls_position, mlp, monkeypatch):
    """Values and gradients, exactly: some layers shuffled, two in a row, the last one too."""
    model = tiny(cls_position=cls_position, mlp=mlp, slws_rate=0.5).train()
    torch.manual_seed(3)
    shuffles = [None, torch.randperm(17), torch.randperm(17), torch.randperm(17)]
    drawn = iter(shuffles)
    monkeypatch.setattr(slws.SLWS, "sample", lambda self, length, device=None: next(drawn))
    found = model(IMAGES)
    monkeypatch.undo()
    wanted = by_hand(model, IMAGES, shuffles)
    assert torch.equal(found, wanted)
    weigh = torch.randn(2, 7)
    leaves = list(model.parameters())
    for ours, theirs in zip(
        torch.autograd.grad((found * weigh).sum(), leaves),
        torch.autograd.grad((wanted * weigh).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found, by_hand(model, IMAGES, [None] * 4))


def test_eval_is_bitwise_equal_with_and_without_slws():
    plain, shuffling = tiny().eval(), tiny(slws_rate=1.0).eval()
    assert torch.equal(plain(IMAGES), shuffling(IMAGES))
    assert plain.state_dict().keys() == shuffling.state_dict().keys()
    shuffling.train()
    assert not torch.allclose(plain(IMAGES), shuffling(IMAGES))


def test_a_model_shuffles_at_linear_rates():
    model = tiny(slws_rate=0.8, depth=5).train()
    torch.manual_seed(0)
    seen = torch.zeros(5)
    for _ in range(4000):
        steps, _ = model._plan(3, (1, 3), "cpu")
        orders = [None if s.stored is None else s.stored.tolist() for s in steps]
        seen += torch.tensor([orders[i] not in ([1, 0, 2, 3],) for i in range(5)], dtype=torch.float)
    same = 1 / math.factorial(4)  # a drawn shuffle may be the identity
    for rate, count in zip(slws.linear_rates(5, 0.8), seen, strict=True):
        expected = rate * (1 - same)
        assert abs(count / 4000 - expected) <= 4 * math.sqrt(max(expected * (1 - expected), 1e-9) / 4000)


@pytest.mark.parametrize("arguments", [{}, {"mlp": True, "norm": "layer"}])
def test_activation_checkpointing_reuses_the_permutation(arguments):
    plain = tiny(slws_rate=1.0, drop_path_rate=0.5, **arguments).train()
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    results = []
    for model in (plain, saving):
        torch.manual_seed(5)
        out = model(IMAGES)
        out.square().sum().backward()
        results.append([out, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_drop_path_is_the_published_rule():
    """Published: block i's entrance drops its input with ([0] + linspace)[i], the last addition with the full rate.

    That is the output of block i dropped with linspace(0, rate, depth)[i], the standard rule.
    """
    rate, depth = 0.6, 4
    model = tiny(drop_path_rate=rate).train()
    rates = [getattr(layer.drop_path, "drop_prob", 0.0) for layer in model.layers]
    published_entrance = [0.0, *torch.linspace(0, rate, depth).tolist()]
    assert published_entrance[1:depth] == pytest.approx(rates[:-1])  # what block i + 1 drops is block i's output
    assert rates[-1] == rate  # what the last addition drops is the last block's output


def test_initialisation():
    model = tiny(depth=9)
    dt = [nn.functional.softplus(layer.mixer.dt_proj_b.bias.detach()) for layer in model.layers]
    assert all(float(x.min()) >= 1e-3 * 0.999 and float(x.max()) <= 0.1 * 1.001 for x in dt)
    assert float(torch.stack(dt).log().std()) > 1.0  # log-uniform over two decades: 4.6 / sqrt(12) = 1.33
    mixer = model.layers[0].mixer
    torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 17.0).expand(64, 16))
    assert torch.equal(mixer.D_b, torch.ones(64))
    wide = vim.VisionMamba(**{**TINY, "depth": 1}).layers[0].mixer.out_proj.weight.std()
    torch.testing.assert_close(mixer.out_proj.weight.std(), wide / 3, rtol=0.1, atol=0)


def test_published_initialisation_and_decay_set():
    model = tiny(init="published")
    mixer = model.layers[0].mixer
    assert torch.equal(mixer.dt_proj.bias, torch.zeros(64))
    assert mixer.in_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    decayed = {n for n, p in model.named_parameters() if any(p is q for q in decayed_parameters(model))}
    ours = tiny()
    decayed_ours = {n for n, p in ours.named_parameters() if any(p is q for q in decayed_parameters(ours))}
    assert decayed - decayed_ours == {f"layers.{i}.mixer.A{s}_log" for i in range(4) for s in ("", "_b")}


def decayed_parameters(model):
    groups = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    return next(g["params"] for g in groups if g["weight_decay"] > 0)


def test_what_is_decayed():
    model = tiny()
    decayed = {n for n, p in model.named_parameters() if any(p is q for q in decayed_parameters(model))}
    kinds = {n.split("mixer.")[-1] for n in decayed if "mixer" in n}
    assert kinds == {f"{name}{s}.weight" for name in ("conv1d", "x_proj", "dt_proj") for s in ("", "_b")} | {
        "in_proj.weight",
        "out_proj.weight",
    }
    assert {n for n in decayed if "mixer" not in n} == {"patch_embed.proj.weight", "head.weight"}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"directions": 1},
        {"directions": 4, "pool": "mean", "expand": 1, "mlp": True},
        {"cls_position": None, "num_registers": 3, "register_reduce": 2},
        {"cls_position": None, "pool": "mean"},
    ],
)
def test_every_parameter_gets_a_gradient(arguments):
    model = tiny(**arguments).train()
    model(IMAGES).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_timm_interface():
    model = timm.create_model("vim_tiny_patch16_224", img_size=32, patch_size=8, depth=4, num_classes=7).eval()
    features = model.forward_features(IMAGES)
    assert features.shape == (2, 17, 192)
    torch.testing.assert_close(model.forward_head(features), model(IMAGES))
    assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)

    final, middle = model.forward_intermediates(IMAGES, indices=[1, 3])
    torch.testing.assert_close(final, features)
    assert [tuple(m.shape) for m in middle] == [(2, 192, 4, 4)] * 2
    last = model.forward_intermediates(IMAGES, 1, norm=True, output_fmt="NLC", intermediates_only=True)[0]
    torch.testing.assert_close(last, features[:, 1:])
    with_prefix = model.forward_intermediates(IMAGES, 1, norm=True, return_prefix_tokens=True, stop_early=True)
    torch.testing.assert_close(with_prefix[1][0][1], features[:, :1])

    assert model.get_classifier() is model.head
    model.reset_classifier(3)
    assert model(IMAGES).shape == (2, 3)
    model.reset_classifier(0)
    assert model(IMAGES).shape == (2, 192)


def test_features_only():
    net = timm.create_model(
        "vim_tiny_patch16_224", img_size=32, patch_size=8, depth=4, features_only=True, out_indices=(0, 2)
    )
    assert net.feature_info.channels() == [192, 192]
    assert net.feature_info.reduction() == [8, 8]
    assert [tuple(f.shape) for f in net(IMAGES)] == [(2, 192, 4, 4)] * 2


def test_intermediates_of_a_shuffling_model_are_in_order():
    """Each layer's features come back in grid order although the rows lie shuffled between layers."""
    model = tiny(slws_rate=1.0, mlp=True).train()
    for layer in model.layers:  # a network that works on each token alone, so that order must not matter
        layer.mixer = Tokenwise()
    _, shuffled = model.forward_intermediates(IMAGES, 4)
    _, plain = model.eval().forward_intermediates(IMAGES, 4)
    for a, b in zip(shuffled, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_a_pruned_model_runs():
    model = tiny().eval()
    wanted = model.forward_intermediates(IMAGES, [1], intermediates_only=True)[0]
    assert model.prune_intermediate_layers([1], prune_norm=True) == [1]
    final, (found,) = model.forward_intermediates(IMAGES, [1])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch.testing.assert_close(final[:, 1:].mT.reshape(wanted.shape), wanted, rtol=0, atol=0)
    torch.testing.assert_close(model.forward_features(IMAGES), final, rtol=0, atol=0)


class Tokenwise(nn.Module):
    def forward(self, x, transposed=None):
        return x.square()


def test_layerwise_decay_groups_the_layers():
    """From the head down, each layer's lr is half that of the one above; the embedding comes last."""
    model = tiny()
    groups = param_groups_layer_decay(model, 0.05, layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    scales = {name: scale[id(p)] for name, p in model.named_parameters()}
    assert scales["head.weight"] == 1.0 and scales["norm_f.weight"] == 1 / 2  # timm counts the norm to the last layer
    assert [scales[f"layers.{i}.mixer.A_log"] for i in range(4)] == [1 / 16, 1 / 8, 1 / 4, 1 / 2]
    assert scales["pos_embed"] == scales["patch_embed.proj.weight"] == 1 / 32


def test_bf16_keeps_the_states_residual_and_a_in_fp32():
    """Under autocast the scan's A and D and the residual stream stay fp32."""
    model = tiny().train()
    seen = {}

    def residual_of(module, args, out):
        seen["residual"] = out[1].dtype

    model.layers[-1].register_forward_hook(residual_of)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(IMAGES)
    assert out.dtype == torch.bfloat16 and seen["residual"] == torch.float32
    torch.testing.assert_close(out.float(), model(IMAGES), rtol=0.1, atol=0.05)


def test_pretrained_says_what_to_do_instead():
    with pytest.raises(ValueError, match=r"no public weights of arm_base_patch16_224 .* vim\.load_weights"):
        timm.create_model("arm_base_patch16_224", pretrained=True, embed_dim=16, depth=1)


def test_backends_can_be_chosen_around_a_model():
    model = tiny().eval()
    with ssm_kernels.use_backend("reference"):
        reference = model(IMAGES)
    torch.testing.assert_close(model(IMAGES), reference, rtol=1e-4, atol=1e-5)


def test_attach_slws_leaves_these_models_to_their_own_argument():
    with pytest.raises(ValueError, match="four directions scan a patch grid"):
        slws.attach_slws(tiny(directions=4), 0.5)
    with pytest.raises(ValueError, match="already shuffles by itself"):
        slws.attach_slws(tiny(slws_rate=0.5), 0.5)
    with slws.attach_slws(tiny(), 0.5) as handle:
        assert list(handle.rates.values()) == pytest.approx(slws.linear_rates(4, 0.5))
