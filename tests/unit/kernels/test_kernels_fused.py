"""Fused patterns: plain forms against autograd, emitted Triton kernels against the plain forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import (
    check_emitted,
    gated_calls,
    loss_calls,
    norm_calls,
    rotary_calls,
    run_emitted,
)
from torch import Tensor

from zerofx.analysis.memory.workspace import workspace_bytes
from zerofx.codegen import kernels as kernel_sources
from zerofx.codegen.kernels import kernel_call, render_kernels
from zerofx.kernels import cross_entropy, ops
from zerofx.kernels.cross_entropy import Options
from zerofx.tools.demo.measure import PeakMemory

Run = Callable[..., Any]
SMALL = [
    (norm_calls, 15, 37), (norm_calls, 1, 1), (gated_calls, 10, 37),
    (gated_calls, 3, 1100), (rotary_calls, 3, 7), (rotary_calls, 1, 1), (loss_calls, 33, 37),
    (loss_calls, 1, 5),
]  # fmt: skip


def _check_small(path: str, dtype: torch.dtype) -> int:
    """Check every small case, the loss head and the norms' backward in parts as well."""
    count = sum(check_emitted(path, make, dtype, "cpu", *sizes) for make, *sizes in SMALL)
    tiles = {"TILE_BYTES": 4 * 33 * 20, "_COLUMNS": 4}
    with patch.multiple(cross_entropy, **tiles):
        count += check_emitted(path, loss_calls, dtype, "cpu", 33, 37)
    with patch.multiple(cross_entropy, _ROWS=10, **tiles):
        count += check_emitted(path, loss_calls, dtype, "cpu", 33, 37)
    with patch.object(kernel_sources, "_PROGRAMS", 4):
        count += check_emitted(path, norm_calls, dtype, "cpu", 15, 37)
    return count + check_emitted(path, loss_calls, dtype, "cpu", 33, 37)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_emitted_kernels_in_the_interpreter(
    interpreted: Run,
    tmp_path: Path,
    dtype: torch.dtype,
) -> None:
    assert interpreted(_check_small, str(tmp_path / "kernels.py"), dtype) == 86


def test_emitted_kernels_without_triton_run_the_plain_form(tmp_path: Path) -> None:
    """On CPU tensors the emitted functions are the ops, bit for bit."""
    for make, *sizes in SMALL:
        calls = list(make(torch.float32, "cpu", *sizes))
        for name, found, expected in run_emitted(tmp_path / "kernels.py", calls):
            pairs = (
                [(found, expected)]
                if isinstance(found, Tensor)
                else zip(found, expected, strict=True)
            )
            assert all(torch.equal(a, b) for a, b in pairs), name


def test_shapes_are_those_of_the_results() -> None:
    """What the ops say of their results without running: shape, dtype and strides."""
    calls = [c for make, *sizes in SMALL for c in make(torch.bfloat16, "cpu", *sizes)]
    x, weight = torch.randn(4, 8).bfloat16(), torch.randn(8)  # a norm's weight kept in fp32
    calls += [(ops.rms_norm, (x, x, weight, 1e-6)), (ops.layer_norm, (x, x, weight, weight, 1e-6))]
    calls += [(ops.rms_norm_backward, (x, x, weight, torch.randn(4, 1), None))]
    for target, args in calls:
        real = target(*args)
        fake = target(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
        pairs = [(real, fake)] if isinstance(real, Tensor) else zip(real, fake, strict=True)
        for one, other in pairs:
            assert (one.shape, one.dtype) == (other.shape, other.dtype), target
            assert one.stride() == other.stride(), target


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_emitted_kernels_on_cuda(tmp_path: Path, dtype: torch.dtype) -> None:
    path = str(tmp_path / "kernels.py")
    for make, *sizes in (
        (norm_calls, 8191, 4096), (gated_calls, 4097, 11008), (rotary_calls, 32, 2047),
        (loss_calls, 20_000, 50_304), *SMALL,
    ):  # fmt: skip
        check_emitted(path, make, dtype, "cuda", *sizes)


def test_a_kernel_is_emitted_once() -> None:
    calls = [kernel_call(t, *a) for t, a in norm_calls(torch.float32, "cpu", 4, 8)]
    text = render_kernels([*calls, *calls])
    assert text.count("def rms_norm_f32_4x8_1em06(") == 1
    compile(text, "kernels.py", "exec")


@pytest.mark.slow
def test_kernels_compile_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton makes machine code of them for an H100, here without one."""
    pytest.importorskip("triton", reason="triton is not installed")
    from triton_compile import compiled_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    names = compiled_kernels(monkeypatch, tmp_path / "kernels.py", torch.bfloat16)
    assert {"_adamw", "_direction", "_apply", "_pack", "_quantise", "_dequantise"} <= names
    assert len(names) == 28, sorted(names)


# -- the plain forms, against autograd -------------------------------------------------------------
def _leaf(*shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


def _same(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for got, wanted in zip(found, expected, strict=True):
        assert got.shape == wanted.shape
        assert (got - wanted).norm() <= tolerance * wanted.norm() + 1e-12


def test_rms_norm() -> None:
    x, residual, weight = _leaf(3, 5, 8), _leaf(3, 5, 8, seed=1), _leaf(8, seed=2)
    total = x + residual
    expected = F.rms_norm(total, (8,), weight, 1e-6)
    y, s, rstd = ops.rms_norm(x.detach(), residual.detach(), weight.detach(), 1e-6)
    _same([y, s], [expected, total])
    dy, dsum = torch.randn_like(y), torch.randn_like(y)
    grads = torch.autograd.grad([expected, total], [x, residual, weight], [dy, dsum])
    ds, dweight = ops.rms_norm_backward(dy, s, weight.detach(), rstd, dsum)
    _same([ds, ds, dweight], grads)


def test_layer_norm() -> None:
    x, residual, weight, bias = (
        _leaf(3, 8),
        _leaf(3, 8, seed=1),
        _leaf(8, seed=2),
        _leaf(8, seed=3),
    )
    total = x + residual
    expected = F.layer_norm(total, (8,), weight, bias, 1e-5)
    given = [t.detach() for t in (x, residual, weight, bias)]
    y, s, mean, rstd = ops.layer_norm(*given, 1e-5)
    _same([y, s], [expected, total])
    dy, dsum = torch.randn_like(y), torch.randn_like(y)
    grads = torch.autograd.grad([expected, total], [x, residual, weight, bias], [dy, dsum])
    ds, dweight, dbias = ops.layer_norm_backward(dy, s, given[2], mean, rstd, dsum)
    _same([ds, ds, dweight, dbias], grads)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_activation(activation: str) -> None:
    gate, up = _leaf(3, 8), _leaf(3, 8, seed=1)
    how = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda a: F.gelu(a, approximate="tanh")}
    expected = how[activation](gate) * up
    _same([ops.gated_activation(gate.detach(), up.detach(), activation)], [expected])
    dy = torch.randn_like(expected)
    found = ops.gated_activation_backward(dy, gate.detach(), up.detach(), activation)
    _same(found, torch.autograd.grad(expected, [gate, up], dy))


def test_rotary_embedding() -> None:
    x, cos, sin = _leaf(2, 3, 5, 8), _leaf(1, 1, 5, 8, seed=1), _leaf(1, 1, 5, 8, seed=2)
    cos, sin = cos.detach(), sin.detach()
    expected = x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin
    _same([ops.rotary_embedding(x.detach(), cos, sin)], [expected])
    dy = torch.randn_like(expected)
    found = ops.rotary_embedding_backward(dy, cos, sin)
    _same([found], torch.autograd.grad(expected, [x], dy))


@pytest.mark.parametrize("tile", [(8192, 4 * 8192 * 256), (64, 4 * 64 * 5), (7, 4 * 7 * 5)])
@pytest.mark.parametrize("options", [
    Options(), Options(3, False), Options(-100, True, 0.1), Options(3, True, 0.3),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_cross_entropy(
    monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int], options: Options, has_bias: bool
) -> None:
    """In one tile, in tiles of words, and in tiles of words and tokens: the plain loss."""
    monkeypatch.setattr(cross_entropy, "_ROWS", tile[0])
    monkeypatch.setattr(cross_entropy, "TILE_BYTES", tile[1])
    monkeypatch.setattr(cross_entropy, "_COLUMNS", 4)
    hidden, weight = _leaf(33, 16), _leaf(37, 16, seed=1)
    bias = _leaf(37, seed=2) if has_bias else None
    target = torch.randint(0, 37, (33,), generator=torch.Generator().manual_seed(3))
    target[::5] = options.ignore_index
    expected = cross_entropy.linear_cross_entropy_plain(hidden, weight, bias, target, options)
    leaves = [t for t in (hidden, weight, bias) if t is not None]
    grads = torch.autograd.grad(expected, leaves, torch.tensor(0.7))
    with torch.no_grad():
        loss, lse = cross_entropy.linear_cross_entropy(hidden, weight, bias, target, options)
        found = cross_entropy.linear_cross_entropy_backward(
            torch.tensor(0.7), hidden, weight, bias, target, lse, options
        )
    assert abs(loss - expected) <= 1e-6 * abs(expected)
    _same(found[: len(leaves)], grads)
    assert has_bias or found[2].numel() == 0


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_gradients_that_nobody_wants_are_not_made(needs: tuple[bool, bool]) -> None:
    hidden, weight, target = torch.randn(4, 8), torch.randn(6, 8), torch.arange(4)
    _, lse = cross_entropy.linear_cross_entropy(hidden, weight, None, target, Options())
    given = (torch.ones(()), hidden, weight, None, target, lse, Options())
    whole = cross_entropy.linear_cross_entropy_backward(*given)
    part = cross_entropy.linear_cross_entropy_backward(*given, needs)
    for wanted, got, full in zip(needs, part, whole, strict=False):
        assert torch.equal(got, full) if wanted else got.numel() == 0


def test_the_loss_head_holds_little_memory() -> None:
    """At vocabulary 50,304 and 4,096 tokens: at most 15 % of the plain head, gradients to 1e-5."""
    hidden, weight = _leaf(4096, 64), _leaf(50_304, 64, seed=1)
    target = torch.randint(0, 50_304, (4096,), generator=torch.Generator().manual_seed(2))

    def plain() -> Any:
        loss = cross_entropy.linear_cross_entropy_plain(hidden, weight, None, target, Options())
        return loss.detach(), *torch.autograd.grad(loss, [hidden, weight])

    def tiled() -> Any:
        with torch.no_grad():
            given = (hidden, weight, None, target)
            loss, lse = cross_entropy.linear_cross_entropy(*given, Options())
            one = torch.ones(())
            grads = cross_entropy.linear_cross_entropy_backward(one, *given, lse, Options())
            return loss, *grads[:2]

    with PeakMemory(torch.device("cpu")) as memory:
        with memory.step():
            expected = plain()
        with memory.step():
            found = tiled()
    plain_bytes, tiled_bytes = (step.high_bytes for step in memory.steps)
    # what the plain run returned is alive in the second step as well
    tiled_bytes -= sum(t.nbytes for t in expected)
    assert tiled_bytes <= 0.15 * plain_bytes, (tiled_bytes, plain_bytes)
    _same(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_loss_head_holds_is_predicted(dtype: torch.dtype) -> None:
    """The memory walk's figure for what the ops allocate inside, against the allocator's."""
    hidden, weight = (t.detach().to(dtype) for t in (_leaf(512, 32), _leaf(20_000, 32, seed=1)))
    args = (hidden, weight, None, torch.arange(512))
    _, lse = ops.linear_cross_entropy(*args, -100, True, 0.0)
    back = (torch.ones(()), *args, lse, True, True, -100, True, 0.0)
    for target, given in ((ops.linear_cross_entropy, (*args, -100, True, 0.0)),
                          (ops.linear_cross_entropy_backward, back)):  # fmt: skip
        with PeakMemory(torch.device("cpu")) as memory, memory.step():
            results = target(*given)
        graph = torch.fx.Graph()
        nodes = [_holding(graph, a) if isinstance(a, Tensor) else a for a in given]
        predicted = workspace_bytes(graph.call_function(target, tuple(nodes)))
        measured = memory.steps[0].high_bytes - sum(r.nbytes for r in results)
        assert 0.9 <= predicted / measured <= 1.1, (target, predicted, measured)


def _holding(graph: torch.fx.Graph, tensor: Tensor) -> torch.fx.Node:
    node = graph.placeholder("x")
    node.meta["val"] = tensor
    return node
