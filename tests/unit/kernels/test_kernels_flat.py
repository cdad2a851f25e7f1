"""Kernels over flat memory: AdamW, LAMB, pack and 8-bit codes, against their plain torch forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zerofx.kernels import adamw, lamb, pack, quantise
from zerofx.kernels.launch import use_triton

Run = Callable[..., Any]
SIZES = [1, 1023, 1025, 3000]


def _random(*shape: int, device: str = "cpu", seed: int = 0, scale: float = 1.0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return made.to(device)


def _close(got: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    error = (got.double() - expected.double()).norm()
    assert error <= tolerance * expected.double().norm() + 1e-30, float(error)


# -- AdamW -----------------------------------------------------------------------------------------
def _adam_state(numel: int, device: str) -> list[Tensor]:
    param, grad, exp_avg = (_random(numel, device=device, seed=s) for s in range(3))
    return [param, grad, exp_avg, _random(numel, device=device, seed=3).square()]


def check_adamw(device: str, numel: int, is_adamw: bool) -> None:
    """One step through Triton, with scale and copy, is the plain formula's."""
    assert use_triton(torch.device(device))
    rule = adamw.Rule(1e-2, 0.9, 0.999, 1e-8, 0.1, 3, is_adamw)
    for scale in (None, 4.0, torch.tensor(4.0, device=device)):
        ours, plain = _adam_state(numel, device), _adam_state(numel, device)
        low = torch.empty(numel, dtype=torch.float16, device=device)
        adamw.flat_adamw_(
            *ours, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3,
            grad_scale=scale, adam_w_mode=is_adamw, lowp=low,
        )  # fmt: skip
        adamw.adamw_torch_(*plain, rule, scale)
        for got, expected in zip(ours, plain, strict=True):
            _close(got, expected)
        assert torch.equal(low, ours[0].half())


@pytest.mark.parametrize("is_adamw", [True, False])
@pytest.mark.parametrize("numel", SIZES)
def test_adamw_in_the_interpreter(interpreted: Run, numel: int, is_adamw: bool) -> None:
    interpreted(check_adamw, "cpu", numel, is_adamw)


@pytest.mark.gpu
def test_adamw_on_cuda() -> None:
    for is_adamw in (True, False):
        check_adamw("cuda", 50_000_001, is_adamw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_adamw_is_torchs_optimizer(kind: Any, dtype: torch.dtype) -> None:
    """Over five steps; gradients of another dtype take the plain form."""
    param = torch.nn.Parameter(_random(1000))
    optimizer = kind([param], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    own = param.detach().clone()
    exp_avg, exp_avg_sq = torch.zeros(1000), torch.zeros(1000)
    for step in range(1, 6):
        grad = _random(1000, seed=step).to(dtype)
        param.grad = grad.float()
        optimizer.step()
        adamw.flat_adamw_(
            own, grad * 8, exp_avg, exp_avg_sq, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8,
            weight_decay=0.1, step=step, grad_scale=8.0, adam_w_mode=kind is torch.optim.AdamW,
        )  # fmt: skip
        _close(own, param.detach())


def test_memory_that_is_not_flat_is_refused() -> None:
    flat = torch.zeros(6)
    with pytest.raises(ValueError, match=r"grad has shape \[2, 3\].* 6 elements"):
        adamw.flat_adamw_(
            flat, flat.view(2, 3), flat, flat, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8,
            weight_decay=0.0, step=1,
        )  # fmt: skip


# -- LAMB ------------------------------------------------------------------------------------------
def check_lamb(device: str, edges: tuple[int, ...]) -> None:
    """Both phases through Triton are the plain formula's, empty segments included."""
    numel, bounds = edges[-1], torch.tensor(edges, device=device)
    rule = lamb.LambRule(0.9, 0.99, 1e-6, 0.01, 2)
    ours, plain = _adam_state(numel, device), _adam_state(numel, device)
    update, expected = torch.empty_like(ours[0]), torch.empty_like(ours[0])
    scale = torch.tensor(2.0, device=device)
    norms = lamb.flat_lamb_direction(*ours, bounds, rule, update=update, grad_scale=scale)
    _close(norms, lamb.direction_torch(*plain, bounds, rule, expected, scale), 1e-5)
    _close(update, expected)
    low = torch.empty(numel, dtype=torch.float16, device=device)
    ratios = lamb.flat_lamb_apply_(
        ours[0], update, bounds, norms, lr=0.1, max_coeff=0.5, min_coeff=0.08, lowp=low
    )
    lamb.apply_torch_(plain[0], expected, bounds, ratios, 0.1)
    for got, wanted in zip(ours, plain, strict=True):
        _close(got, wanted)
    assert torch.equal(low, ours[0].half())


@pytest.mark.parametrize("edges", [(0, 1), (0, 100, 100, 2400, 2500), (0, 1024, 5000)])
def test_lamb_in_the_interpreter(interpreted: Run, edges: tuple[int, ...]) -> None:
    interpreted(check_lamb, "cpu", edges)


@pytest.mark.gpu
def test_lamb_on_cuda() -> None:
    check_lamb("cuda", (0, 3, 3, 20_000_001, 20_500_000, 50_000_000))


def test_lamb_is_the_published_rule() -> None:
    """Two parameters, one step, by hand: the plain form against algorithm 2 written out."""
    params, grads = (
        [_random(5, seed=0), _random(7, seed=1)],
        [_random(5, seed=2), _random(7, seed=3)],
    )
    flat, bounds = torch.cat(params), torch.tensor([0, 5, 12])
    exp_avg, exp_avg_sq, update = torch.zeros(12), torch.zeros(12), torch.empty(12)
    rule = lamb.LambRule(0.9, 0.999, 1e-6, 0.01, 1, bias_correction=False)
    norms = lamb.flat_lamb_direction(
        flat, torch.cat(grads), exp_avg, exp_avg_sq, bounds, rule, update=update
    )
    lamb.flat_lamb_apply_(flat, update, bounds, norms, lr=4e-3, max_coeff=0.5, min_coeff=0.08)
    for param, grad, got in zip(params, grads, flat.split([5, 7]), strict=True):
        u = 0.1 * grad / ((0.001 * grad * grad).sqrt() + 1e-6) + 0.01 * param
        ratio = (param.norm() / u.norm()).clamp(0.08, 0.5)
        _close(got, param - 4e-3 * ratio * u)


# -- pack ------------------------------------------------------------------------------------------
def check_pack(device: str, rows: int) -> None:
    grads = [
        _random(rows, 60, device=device).t(),
        _random(77, device=device),
        _random(0).to(device),
    ]
    offsets, numel = [0, rows * 60 + 1, 5], rows * 60 + 100
    for scale in (0.5, torch.tensor(0.5, device=device)):
        buffer, plain = (torch.full((numel,), 9.0, device=device).half() for _ in range(2))
        stats = pack.pack_grads_(buffer, grads, offsets, scale=scale)
        expected = torch.zeros(2, device=device)
        pack.pack_torch_(plain, grads, offsets, scale, expected)
        assert torch.equal(buffer, plain)
        _close(stats, expected, 1e-5)
        assert stats[1] == 0 and buffer[rows * 60] == 9.0, "padding is not touched"


def check_pack_finds(device: str, bad: float) -> None:
    grads = [_random(3000, device=device), _random(3000, device=device)]
    for planted in (False, True):
        if planted:
            grads[1][2999] = bad
        stats = pack.pack_grads_(torch.empty(6000, device=device), grads, [0, 3000])
        assert bool(stats[1] > 0) == planted


@pytest.mark.parametrize("rows", [1, 35, 50])
def test_pack_in_the_interpreter(interpreted: Run, rows: int) -> None:
    interpreted(check_pack, "cpu", rows)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_pack_finds_what_is_not_finite(interpreted: Run, bad: float) -> None:
    check_pack_finds("cpu", bad)
    interpreted(check_pack_finds, "cpu", bad)


def test_squares_that_overflow_are_no_inf() -> None:
    stats = pack.pack_grads_(torch.empty(2), [torch.full((2,), 1e30)], [0])
    assert stats[0].isinf() and stats[1] == 0


def test_a_gradient_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[4\] at offset 3 does not fit .* 6 elements"):
        pack.pack_grads_(torch.empty(6), [torch.ones(4)], [3])


@pytest.mark.gpu
def test_pack_on_cuda() -> None:
    check_pack("cuda", 100_003)
    check_pack_finds("cuda", math.nan)


# -- 8-bit codes -----------------------------------------------------------------------------------
def check_quantise(device: str, numel: int, is_signed: bool) -> None:
    code = quantise.dynamic_code(is_signed).to(device)
    x = _random(numel, device=device) * _random(numel, device=device, seed=1).abs()
    x = x if is_signed else x.abs()
    x[: numel // 3] = 0  # whole blocks of zeros, where there are several
    q, absmax = quantise.quantise(x, code)
    expected, largest = quantise.quantise_torch(x, code, quantise.BLOCK)
    assert torch.equal(absmax, largest)
    # one ulp in a division may move a value that lies on a middle: the neighbour is as near
    assert (q.int() - expected.int()).abs().max() <= 1
    assert (q != expected).float().mean() < 1e-4
    back = quantise.dequantise(q, absmax, code)
    _close(back, quantise.dequantise_torch(q, absmax, code, quantise.BLOCK), 1e-7)


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("numel", [1, 256, 1000])
def test_quantise_in_the_interpreter(interpreted: Run, numel: int, is_signed: bool) -> None:
    interpreted(check_quantise, "cpu", numel, is_signed)


@pytest.mark.gpu
def test_quantise_on_cuda() -> None:
    check_quantise("cuda", 10_000_019, True)
    check_quantise("cuda", 10_000_019, False)


@pytest.mark.parametrize("is_signed", [True, False])
def test_dynamic_code(is_signed: bool) -> None:
    code = quantise.dynamic_code(is_signed)
    assert code.numel() == 256 == code.unique().numel()
    assert torch.equal(code, code.sort().values)
    assert 0 in code and code[-1] == 1
    assert (code.min() < 0) == is_signed


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_error_is_half_a_gap(is_signed: bool) -> None:
    """The declared bound, block by block; the signed book ends at -0.993 below."""
    code, x = quantise.dynamic_code(is_signed), _random(5000)
    x = x if is_signed else x.abs()
    back = quantise.dequantise(*quantise.quantise(x, code), code)
    gap = float(code.diff().max())
    rows = torch.nn.functional.pad(x, (0, -5000 % 256)).view(-1, 256).abs().amax(1)
    bound = rows.repeat_interleave(256)[:5000] * gap / 2
    assert ((x - back).abs() <= bound * 1.0001).all()


def test_codes_are_fixed_points() -> None:
    code = quantise.dynamic_code(True)
    q, absmax = quantise.quantise(code, code)
    assert torch.equal(q, torch.arange(256, dtype=torch.uint8))
    assert torch.equal(quantise.dequantise(q, absmax, code), code)
