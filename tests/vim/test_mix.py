"""The mixer's inner function against the textbook definitions, whatever the number of directions and the backend."""

import pytest
import torch
import torch.nn.functional as F

import ssm_kernels
from ssm_kernels import bench
from ssm_kernels.testing import assert_parity, poisoned_empties, textbook_conv, textbook_scan
from vim.mix import Direction, mix
from vim.mixer import Mixer

B, L, D, N, R = 2, 15, 12, 5, 3
BACKENDS = ssm_kernels.available_backends("selective_scan", "cpu")
TRANSPOSED = torch.tensor([0, *(1 + torch.arange(14).view(2, 7).t().reshape(-1))])  # class token, then 2 x 7 by column


def inputs(count):
    g = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    found = {"xz": rand(B, L, 2 * D)}
    for i in range(count):
        found |= {
            f"conv_weight{i}": rand(D, 1, 4),
            f"conv_bias{i}": rand(D),
            f"x_proj{i}": rand(R + 2 * N, D) / 3,
            f"dt_weight{i}": rand(D, R),
            f"dt_bias{i}": rand(D) - 2,
            f"A_log{i}": rand(D, N) / 2,
            f"D{i}": rand(D),
        }
    return found, [rand(B, L, D)]


def grouped(parameters):
    parameters = list(parameters.values())
    return [Direction(*parameters[i : i + 7]) for i in range(0, len(parameters), 7)]


def textbook_mix(xz, *, transposed, scale, **parameters):
    x, z = xz.transpose(1, 2).chunk(2, 1)
    y = 0
    for i, p in enumerate(grouped(parameters)):
        order = transposed if i >= 2 else torch.arange(L)
        u = textbook_conv(x[:, :, order], p.conv_weight[:, 0], p.conv_bias, "silu", i % 2 == 1)
        dt, b, c = (u.transpose(1, 2) @ p.x_proj.t()).transpose(1, 2).split([R, N, N], 1)
        delta = p.dt_weight @ dt
        scanned = textbook_scan(u, delta, -p.A_log.exp(), b, c, p.D, None, p.dt_bias, True, i % 2 == 1)
        y = y + scanned[:, :, torch.argsort(order)]
    return (y * scale * F.silu(z)).transpose(1, 2)


def ours(xz, *, transposed, scale, **parameters):
    return mix(xz, grouped(parameters), transposed, scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("count", "scale"), [(1, 1.0), (2, 0.5), (2, 1.0), (4, 0.25)])
def test_parity_with_the_textbook(backend, count, scale):
    found, grads = inputs(count)
    with ssm_kernels.use_backend(backend):
        assert_parity(ours, textbook_mix, found, grads, transposed=TRANSPOSED, scale=scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_gradients_the_values_are_the_same(backend):
    found, _ = inputs(4)
    parameters = {k: v for k, v in found.items() if k != "xz"}
    with ssm_kernels.use_backend(backend):
        plain = mix(found["xz"], grouped(parameters), TRANSPOSED, 0.25)
        xz = found["xz"].requires_grad_()
        torch.testing.assert_close(mix(xz, grouped(parameters), TRANSPOSED, 0.25), plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_inference_in_place_gives_the_same_values(backend, count, monkeypatch):
    """12 channels as 5, 5 and 2, 15 positions by 4, against the textbook in fp64 and the values of a training step."""
    monkeypatch.setattr("vim.mix._LARGE", 1)
    monkeypatch.setattr("vim.mix._CHANNELS", 5)
    monkeypatch.setattr("vim.mix._ROWS", 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found, _ = inputs(count)
    widths, scan = [], ssm_kernels.scan_over
    monkeypatch.setattr("vim.mix.scan_over", lambda u, *rest: widths.append(u.shape[1]) or scan(u, *rest))
    own = {**found, "xz": found["xz"].clone()}
    with ssm_kernels.use_backend(backend), poisoned_empties():
        xz, parameters = own.pop("xz"), grouped(own)
        in_place = mix(xz, parameters, TRANSPOSED, 0.5, disposable=True)
        assert widths == [5, 5, 2] * count
        found["xz"].requires_grad_()
        trained = ours(**found, transposed=TRANSPOSED, scale=0.5)
    doubles = {k: v.detach().double() for k, v in found.items()}
    exact = textbook_mix(**doubles, transposed=TRANSPOSED, scale=0.5)
    largest = float(exact.abs().max())
    torch.testing.assert_close(in_place, trained.detach(), rtol=0, atol=1e-6 * largest)
    torch.testing.assert_close(in_place.double(), exact, rtol=0, atol=1e-6 * largest)


def test_what_a_hook_has_kept_is_not_overwritten(monkeypatch):
    monkeypatch.setattr("vim.mix._LARGE", 1)
    torch.manual_seed(0)
    mixer, x, kept = Mixer(32), torch.randn(1, 9, 32), []
    with torch.inference_mode():
        wanted = mixer.in_proj(x)
        plain = mixer(x)
        mixer.in_proj.register_forward_hook(lambda module, inputs, output: kept.append(output))
        torch.testing.assert_close(mixer(x), plain, rtol=0, atol=0)
    assert torch.equal(kept[0], wanted)


def test_memory_of_inference():
    """Beside xz: the output and a few channels' delta; not the convolution, delta and scan of each direction."""
    torch.manual_seed(0)
    mixer, xz = Mixer(256, device="cpu"), torch.randn(1, 4200, 1024)
    with torch.inference_mode():
        run = lambda: mix(xz, mixer.directions(), None, 0.5, disposable=True)  # noqa: E731
        run()
        peak = bench.peak_bytes(run, torch.device("cpu"))
    if peak is None:
        pytest.skip("this system does not tell a process its peak memory")
    one = 4200 * 512 * 4
    assert one <= peak <= 2 * one


def test_gradients_against_finite_differences():
    found, _ = inputs(4)
    leaves = [v.double().requires_grad_() for v in found.values()]
    names = list(found)
    run = lambda *a: ours(**dict(zip(names, a, strict=True)), transposed=TRANSPOSED, scale=0.25)  # noqa: E731
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_is_the_same_in_the_recomputation(backend):
    """Gradients of a mixer under bf16 autocast agree with those of plain autograd under the same autocast."""
    torch.manual_seed(0)
    mixer, x = Mixer(16, directions=2), torch.randn(2, 9, 16)
    weigh = torch.randn(2, 9, 16)
    results = []
    for compiling in (False, True):  # a compiler gets plain operations
        with pytest.MonkeyPatch.context() as patch, ssm_kernels.use_backend(backend):
            patch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
            with torch.autocast("cpu", torch.bfloat16):
                out = mixer(x)
            results.append(torch.autograd.grad((out.float() * weigh).sum(), mixer.parameters()))
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02 * b.abs().max().item())


def test_a_frozen_mixer_passes_its_gradient_on():
    torch.manual_seed(0)
    mixer = Mixer(16).requires_grad_(False)
    x = torch.randn(2, 9, 16, requires_grad=True)
    mixer(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_memory_kept_for_backward():
    """Kept: xz and the sum of the scans, and on a backend that offers them a few states; not what can be recomputed."""
    torch.manual_seed(0)
    mixer, x = Mixer(64), torch.randn(2, 50, 64, requires_grad=True)
    own = {p.untyped_storage().data_ptr() for p in mixer.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mixer(x)
    row = 2 * 50 * 128 * 4  # one (b, l, inner) tensor of fp32
    assert sum(kept.values()) <= 6.5 * row  # x 0.5, xz 2, y 1, gated 1, states of both directions below 2
