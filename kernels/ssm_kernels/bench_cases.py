"""What `python -m ssm_kernels.bench` compares.

vim, timm, mambapy and transformers are looked up when their case is made and only where they are installed: this
package depends on none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from . import available_backends, backend, testing
from .conv1d import causal_conv1d
from .norm import add_norm
from .permute import permute_rows
from .scan import selective_scan

OURS = "ours"


@dataclass
class Case:
    """One comparison: named steps, each a full run of the thing; `wrong` names steps that failed the parity gate."""

    name: str
    steps: dict[str, Callable[[], object]]
    base: str  # the step that the others' ratios refer to
    wrong: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def _rows(device: torch.device, *shape: int) -> Tensor:
    """(b, channels, l) in channel-last memory, as the mixer makes them."""
    b, d, length = shape
    return torch.randn(b, length, d, device=device).transpose(1, 2)


def _gate(fn: Callable, textbook: Callable, inputs: dict, grads: list[Tensor], **options) -> str | None:
    try:
        testing.assert_parity(fn, textbook, inputs, grads, **options)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return None


def _step(fn: Callable, inputs: dict, grads: list[Tensor], **options) -> Callable[[], object]:
    leaves = {k: v.detach().requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()}
    wanted = [v for v in leaves.values() if v.is_floating_point()]

    def step():
        out = fn(**leaves, **options)
        return torch.autograd.grad(out, wanted, grads if isinstance(out, tuple) else grads[0])

    return step


def _op_case(name: str, fn: Callable, textbook: Callable, make: Callable, **options) -> Case:
    """`make(small)` gives inputs and output gradients; the small ones are for the parity gate."""
    inputs, grads = make(False)
    device = grads[0].device
    case = Case(f"{name} {'x'.join(map(str, grads[0].shape))} forward+backward", {}, "reference")
    for chosen in available_backends(name, device):
        run = lambda chosen=chosen, **kw: fn(**kw, backend=chosen)  # noqa: E731
        if wrong := _gate(run, textbook, *make(True), **options):
            case.wrong[chosen] = wrong
        case.steps[chosen] = _step(run, inputs, grads, **options)
    case.steps["plain PyTorch"] = _step(textbook, inputs, grads, **options)
    moved = [x for x in (*inputs.values(), *grads) if x.is_floating_point()]
    room = [torch.empty_like(x) for x in moved]
    case.steps["copy of inputs and output"] = lambda: [to.copy_(x) for to, x in zip(room, moved, strict=True)]
    return case


def scan_case(device: torch.device, quick: bool) -> Case:
    def make(small):
        b, d, length, n = (2, 13, 63, 16) if small or quick else (16, 384, 197, 16)
        inputs = {
            "u": _rows(device, b, d, length),
            "delta": 0.5 * _rows(device, b, d, length) - 1,
            "A": -torch.exp(0.5 * torch.randn(d, n, device=device)),
            "B": _rows(device, b, n, length),
            "C": _rows(device, b, n, length),
            "D": torch.randn(d, device=device),
            "delta_bias": torch.randn(d, device=device) - 1,
        }
        return inputs, [_rows(device, b, d, length)]

    return _op_case("selective_scan", selective_scan, testing.textbook_scan, make, delta_softplus=True)


def conv_case(device: torch.device, quick: bool) -> Case:
    def make(small):
        b, d, length = (2, 13, 63) if small or quick else (16, 384, 197)
        inputs = {"x": _rows(device, b, d, length), "weight": torch.randn(d, 4, device=device)}
        inputs["bias"] = torch.randn(d, device=device)
        return inputs, [_rows(device, b, d, length)]

    return _op_case("causal_conv1d", causal_conv1d, testing.textbook_conv, make, activation="silu")


def norm_case(device: torch.device, quick: bool) -> Case:
    def make(small):
        b, length, d = (2, 17, 13) if small or quick else (16, 197, 192)
        x, residual, *grads = (torch.randn(b, length, d, device=device) for _ in range(4))
        index = torch.randperm(length, device=device)
        return {"x": x, "residual": residual, "weight": torch.randn(d, device=device), "index": index}, grads

    return _op_case("add_norm", add_norm, testing.textbook_add_norm, make)


def permute_case(device: torch.device, quick: bool) -> Case:
    def make(small):
        b, length, d = (2, 17, 13) if small or quick else (16, 197, 192)
        inputs = {"x": torch.randn(b, length, d, device=device), "index": torch.randperm(length, device=device)}
        return inputs, [torch.randn(b, length, d, device=device)]

    def gather(x, index):
        return x.gather(1, index[None, :, None].expand_as(x))

    def ours(x, index, backend):
        return permute_rows(index, x, backend=backend)

    case = _op_case("permute_rows", ours, gather, make)
    inputs, grads = make(False)
    case.steps["clone, its backward too"] = _step(lambda x, index: _Clone.apply(x), inputs, grads)
    return case


class _Clone(torch.autograd.Function):
    """The traffic of a permutation, as many bytes read and written and new memory, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy.clone()


def _agrees(make_output: Callable[[], list[Tensor]], tolerance: float = 1e-4) -> str | None:
    """The automatic choice of backends against the reference, relative to the largest entry of each tensor."""
    found = make_output()
    with backend.use_backend("reference"):
        wanted = make_output()
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        error = float((x - y).abs().max() / y.abs().max().clamp_min(1e-30))
        if not error <= tolerance:
            return f"tensor {i} is off by {error:.3g} from the reference backend"
    return None


def _train_step(module: nn.Module, x: Tensor) -> Callable[[], list[Tensor]]:
    weights = [p for p in module.parameters() if p.requires_grad]

    def step():
        y = module(x)
        return [y.detach(), *torch.autograd.grad(y.square().mean(), weights)]

    return step


class _TwoWays(nn.Module):
    """Two causal blocks as a bidirectional mixer."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.ahead, self.back = make(), make()

    def forward(self, x):
        return self.ahead(x) + self.back(x.flip(1)).flip(1)


def _mambapy(dim: int) -> nn.Module:
    mamba = importlib.import_module("mambapy.mamba")
    return _TwoWays(lambda: mamba.MambaBlock(mamba.MambaConfig(d_model=dim, n_layers=1, d_state=16)))


def _transformers(dim: int) -> nn.Module:
    module = importlib.import_module("transformers.models.mamba.modeling_mamba")
    config = importlib.import_module("transformers").MambaConfig(hidden_size=dim, state_size=16, use_mambapy=False)
    return _TwoWays(lambda: module.MambaMixer(config, layer_idx=0))


def mixer_case(device: torch.device, quick: bool) -> Case:
    b, length, dim = (1, 17, 32) if quick else (16, 197, 192)
    x = torch.randn(b, length, dim, device=device)
    case = Case(f"bidirectional mixer {b}x{length}x{dim} forward+backward", {}, OURS)
    makers = {
        OURS: lambda dim: importlib.import_module("vim.mixer").Mixer(dim),
        "2 mambapy blocks": _mambapy,
        "2 transformers mixers, slow path": _transformers,
    }
    for name, make in makers.items():
        try:
            case.steps[name] = _train_step(make(dim).to(device), x)
        except ImportError as error:
            case.left_out[name] = str(error)
    if OURS in case.steps and (wrong := _agrees(case.steps[OURS])):
        case.wrong[OURS] = wrong
    return case


def model_cases(device: torch.device, quick: bool) -> list[Case]:
    """Vim-Tiny and DeiT-Tiny: a training step at 224, inference at 512 and 1248."""
    try:
        timm = importlib.import_module("timm")
        importlib.import_module("vim")
    except ImportError as error:
        return [Case("models", {}, OURS, left_out={"models": str(error)})]
    cases = []
    for size, batch in ((224, 1 if quick else 16), (512, 1), (1248, 1))[: 1 if quick else 3]:
        training = size == 224
        x = torch.randn(batch, 3, size, size, device=device)
        case = Case(f"tiny model {size}, batch {batch}, {'training step' if training else 'inference'}", {}, OURS)
        for name, model in ((OURS, "vim_tiny_patch16_224"), ("DeiT", "deit_tiny_patch16_224")):
            made = timm.create_model(model, img_size=size, num_classes=1000).to(device).train(training)
            case.steps[name] = _train_step(made, x) if training else _inference_step(made, x)
        if wrong := _agrees(case.steps[OURS], 1e-3):
            case.wrong[OURS] = wrong
        if training:
            shuffling = timm.create_model("vim_tiny_patch16_224", img_size=size, slws_rate=1.0).to(device).train()
            for layer in shuffling.layers:
                layer.slws.rate = 1.0
            case.steps[f"{OURS}, every layer shuffled"] = _train_step(shuffling, x)
        cases.append(case)
    return cases


def _inference_step(model: nn.Module, x: Tensor) -> Callable[[], list[Tensor]]:
    def step():
        with torch.inference_mode():
            return [model(x)]

    return step


CASES = {
    "selective_scan": scan_case,
    "causal_conv1d": conv_case,
    "permute_rows": permute_case,
    "add_norm": norm_case,
    "mixer": mixer_case,
    "model": model_cases,
}
