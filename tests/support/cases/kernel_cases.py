"""Calls of every fused op, and the emitted kernels for them: what the kernels' tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerofx.codegen.kernels import kernel_call, render_kernels, tensor_args
from zerofx.kernels import ops
from zerofx.runtime.regions.load import import_file

Call = tuple[Any, tuple[Any, ...]]


def norm_calls(dtype: torch.dtype, device: str, rows: int, width: int) -> Iterator[Call]:
    x, dy, residual, w, b = _values(dtype, device, *[(rows, width)] * 3, (width,), (width,))
    for extra in (None, residual):
        yield ops.rms_norm, (x, extra, w, 1e-6)
        yield ops.layer_norm, (x, extra, w, b, 1e-5)
        _, _, rstd = ops.rms_norm(x, None, w, 1e-6)
        yield ops.rms_norm_backward, (dy, x, w, rstd, extra)
        _, _, mean, rstd = ops.layer_norm(x, None, w, b, 1e-5)
        yield ops.layer_norm_backward, (dy, x, w, mean, rstd, extra)


def gated_calls(dtype: torch.dtype, device: str, rows: int, width: int) -> Iterator[Call]:
    dy, gate, up, both = _values(dtype, device, *[(rows, width)] * 3, (rows, 2 * width))
    for one, other in ((gate, up), both.chunk(2, -1)):
        for activation in ("silu", "gelu", "gelu_tanh"):
            yield ops.gated_activation, (one, other, activation)
            yield ops.gated_activation_backward, (dy, one, other, activation)


def rotary_calls(dtype: torch.dtype, device: str, heads: int, length: int) -> Iterator[Call]:
    q = _values(dtype, device, (2, length, heads, 10))[0].transpose(1, 2)
    for batch in (1, 2):
        cos, sin = _values(dtype, device, *[(batch, 1, length, 10)] * 2)
        yield ops.rotary_embedding, (q, cos, sin)
        yield ops.rotary_embedding_backward, (q, cos, sin)


def loss_calls(dtype: torch.dtype, device: str, tokens: int, words: int) -> Iterator[Call]:
    hidden, weight, own = _values(dtype, device, (tokens, 16), (words, 16), (words,))
    target = torch.randint(0, words, (tokens,), generator=torch.Generator().manual_seed(1))
    target[1::7] = -100
    target, dloss = target.to(device), torch.tensor(0.7, device=device)
    for bias, *options in ((None, -100, True, 0.0), (own, 3, False, 0.1), (None, -100, True, 0.2)):
        args = (hidden, weight, bias, target)
        if options[0] == 3:
            target = target.clamp_min(0)
            args = (hidden, weight, bias, target)
        _, lse = ops.linear_cross_entropy(*args, *options)
        yield ops.linear_cross_entropy, (*args, *options)
        yield ops.linear_cross_entropy_backward, (dloss, *args, lse, True, True, *options)


def _values(dtype: torch.dtype, device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]


def run_emitted(path: Path, calls: list[Call]) -> Iterator[tuple[Any, Any, Any]]:
    """Render the kernels of `calls` into a file; yield (function's name, its results, the op's)."""
    kernels = [kernel_call(target, *args) for target, args in calls]
    path.write_text(render_kernels(kernels))
    module = import_file(path, "zerofx_kernels")
    for (target, args), call in zip(calls, kernels, strict=True):
        found = getattr(module, call.function)(*tensor_args(target, args))
        yield call.function, found, target(*args)


def check_emitted(path: str, make: Any, dtype: torch.dtype, device: str, *sizes: int) -> int:
    """Hold emitted kernels against the ops' plain forms; return how many calls were compared."""
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    count = 0
    for name, found, expected in run_emitted(Path(path), list(make(dtype, device, *sizes))):
        if isinstance(found, Tensor):
            found, expected = (found,), (expected,)
        assert len(found) == len(expected)
        for got, wanted in zip(found, expected, strict=True):
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), name
            assert got.stride() == wanted.stride(), name
            error = (got.double() - wanted.double()).norm()
            assert error <= tolerance * wanted.double().norm(), f"{name}: {error}"
        count += 1
    return count
