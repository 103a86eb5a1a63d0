"""Outputs and gradients of the published formulas (tests/fixtures/*.safetensors, computed independently, fp32, CPU)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vim

FIXTURES = Path(__file__).parents[1] / "fixtures"
COMMON = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_classes": 7}
MLP = {"expand": 1, "norm": "layer", "mlp": True, "cls_position": "first"}
CASES = {
    "vim_official_p8_32": ("vim", {}),
    "slws_official_p8_32": ("shufflemamba", {"cls_position": "first"}),
    "slws_reg_p8_32": ("mambareg", {"cls_position": None, "num_registers": 4, "register_reduce": 2}),
    "videomamba_p8_32": ("videomamba", {"cls_position": "first", "merge": "sum"}),
    "mambamlp_v2_nodiv_cls0": ("mambamlp", {**MLP, "merge": "sum"}),
    "mambamlp_v3_cls0_gap": ("mambamlp", {**MLP, "directions": 4, "pool": "mean"}),
}


def relative(found, wanted):
    return ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)).item()


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name):
    family, arguments = CASES[name]
    golden = load_file(FIXTURES / f"{name}.safetensors")
    weights = {k.removeprefix("model."): v for k, v in golden.items() if k.startswith("model.")}
    grads = {k.removeprefix("grad."): v for k, v in golden.items() if k.startswith("grad.")}
    model = vim.VisionMamba(**COMMON, **arguments).eval()
    report = vim.load_weights(model, weights, family=family)
    assert report.loaded == len(weights) - (family == "mambareg")  # the register family has two position tensors

    x = golden["input"].clone().requires_grad_()
    out = model(x)
    assert relative(out, golden["output"]) < 1e-5
    (out * torch.linspace(-1, 1, 7)).sum().backward()
    assert relative(x.grad, golden["input_grad"]) < 1e-4
    found = vim.convert_state_dict({n: p.grad for n, p in model.named_parameters()}, family, to="official")
    assert found.keys() >= grads.keys()
    for key, wanted in grads.items():
        assert relative(found[key], wanted) < 1e-4, key
