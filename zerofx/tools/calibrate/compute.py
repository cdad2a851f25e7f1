"""Probes of compute and memory: the kinds of work in regions, at some sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zerofx.analysis.time.kernels import ERF, LOG, POW, SIN, TANH
from zerofx.analysis.time.prices import ATTENTION_HEADS
from zerofx.tools.calibrate.probe import TURNS, Probe, Work, in_turn

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDTHS = (32, 64, 128, 256, 512, 1024)  # of a linear, with 4 times as many columns
ROWS = 256
LENGTHS = (64, 256, 512)
HEADS, HEAD_WIDTH = ATTENTION_HEADS, 64
# Bytes of one tensor: from the first-level cache to well beyond the last.
TENSOR_BYTES = (16 << 10, 128 << 10, 1 << 20, 8 << 20, 64 << 20)
COMPILED_BYTES = (128 << 10, 1 << 20, 16 << 20)
FUNCTION_BYTES = (1 << 20,)  # functions compute: their rates hardly depend on the size
KEPT_BYTES = 64 << 20  # of results that stay alive: more than the caches hold
NORM_WIDTH = 256
IMAGES, CHANNELS, HEIGHT = 8, 64, 8  # of batch norms and pools: the width fills a tensor's bytes
WINDOW, STRIDE = 3, 2
UPDATE_NUMELS = (10_000, 100_000, 1_000_000, 10_000_000)
COPY_BYTES = (64 << 10, 1 << 20, 8 << 20, 32 << 20)


def matmuls() -> list[Probe]:
    """Return linears with their two backward products, by width and format."""
    probes = []
    for name, dtype in FORMATS.items():
        for width in WIDTHS:
            flops = 2.0 * ROWS * width * 4 * width
            make = partial(in_turn, partial(_linear, width, dtype))
            probes.append(Probe(f"matmul.{name}", flops, 3 * flops, make))
    return probes


def _linear(width: int, dtype: torch.dtype) -> Work:
    x, w = torch.randn(ROWS, width).to(dtype), torch.randn(4 * width, width).to(dtype)
    grad = torch.randn(ROWS, 4 * width).to(dtype)

    def work() -> object:
        return F.linear(x, w), torch.mm(grad, w), torch.mm(grad.t(), x)

    return work


def attentions() -> list[Probe]:
    """Return causal attention, forward and backward, by length and format.

    Short sequences come in batches: the rate depends on the length, not on the number of samples.
    """
    probes = []
    for name, dtype in FORMATS.items():
        for length in LENGTHS:
            product, samples = 2.0 * HEADS * length * length * HEAD_WIDTH, LENGTHS[-1] // length
            make = partial(in_turn, partial(_attention, samples, length, dtype))
            probes.append(Probe(f"attention.{name}", 2 * product, 7 * product * samples, make))
    return probes


def _attention(samples: int, length: int, dtype: torch.dtype) -> Work:
    shape = (samples, HEADS, length, HEAD_WIDTH)
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(3))
    grad = torch.randn(shape).to(dtype)

    def work() -> object:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), grad)

    return work


# -- pointwise work and reductions ------------------------------------------------------------
def pointwise(a: Tensor, b: Tensor) -> Tensor:
    """Read two, write one. Repeated differences of the last two results stay small."""
    return a - b


def heavy(a: Tensor, b: Tensor) -> Tensor:
    """Read one, write one, and take an exponential of each element."""
    return torch.sigmoid(a)


def reduction(a: Tensor, b: Tensor) -> Tensor:
    """Read one twice, write one: a norm over rows. Without a weight, ATen's is not vectorized."""
    weight, bias = b[:NORM_WIDTH], b[NORM_WIDTH : 2 * NORM_WIDTH]
    return F.layer_norm(a.view(-1, NORM_WIDTH), (NORM_WIDTH,), weight, bias)


def batch_norm(a: Tensor, b: Tensor) -> Tensor:
    """Read one twice, write one: a norm over samples and pixels."""
    return F.batch_norm(a.view(IMAGES, CHANNELS, -1), None, None, training=True)


def batch_norm_of_rows(a: Tensor, b: Tensor) -> Tensor:
    """A norm over tensors with channels last, as compiled convolutions return them."""
    pixels = a.view(IMAGES, -1, CHANNELS).transpose(1, 2)
    return F.batch_norm(pixels, None, None, training=True)


def pool(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A max pool, which returns the largest elements of windows with their places."""
    images = a.view(IMAGES, CHANNELS // 2, HEIGHT, -1)
    return torch.ops.aten.max_pool2d_with_indices(images, [WINDOW] * 2, [STRIDE] * 2, [1, 1])


def layout(a: Tensor, b: Tensor) -> Tensor:
    """A copy of 3 x 3 weights to channels last."""
    weights = a[: a.numel() // (9 * CHANNELS) * 9 * CHANNELS].view(-1, CHANNELS, 3, 3)
    return weights.clone(memory_format=torch.channels_last)


KERNELS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "pointwise": pointwise, "heavy": heavy, "reduction": reduction, "batch_norm": batch_norm,
    "pool": pool,
}  # fmt: skip
# Functions of each element whose rates differ from that of an exponential.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    TANH: lambda a, b: torch.tanh(a),
    ERF: lambda a, b: torch.erf(a),
    LOG: lambda a, b: torch.log(b),
    POW: lambda a, b: torch.pow(b, 1.7),
    SIN: lambda a, b: torch.sin(a),
}
COMPILED = KERNELS | FUNCTIONS | {"batch_norm": batch_norm_of_rows, "layout": layout}
# Tensors read and written; of the others the elements that are worked on, one for one of `a`'s.
PASSED = {"pointwise": 3, "reduction": 2, "batch_norm": 2, "layout": 2}
COLD = ("layout",)  # weights, which those of other layers have evicted from the caches
CHAINED = ("pointwise", "reduction")  # each reads what the ones before have written
SLOW = ("batch_norm", "pool")  # op by op: their rates end before the largest tensors
ELEMENTS = {"heavy": 1.0, "pool": WINDOW**2 / STRIDE**2, **dict.fromkeys(FUNCTIONS, 1.0)}


def operands(nbytes: int) -> tuple[Tensor, Tensor]:
    """Return two flat tensors of this many bytes; the second one's elements are positive."""
    return torch.randn(nbytes // 4), torch.rand(nbytes // 4) + 0.5


def sizes_of(kind: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes at which a kind is measured."""
    return FUNCTION_BYTES if kind in FUNCTIONS else sizes


def memories(
    how: str, kinds: Iterable[str], sizes: tuple[int, ...],
    function_of: Callable[[str, int], Callable],
) -> list[Probe]:  # fmt: skip
    """Return probes of passes over memory, exponentials and pools, for one kind of kernels."""
    probes = []
    for kind in kinds:
        for size in sizes_of(kind, sizes):
            make = partial(_memory, function_of, kind, size)
            if kind in COLD:
                make = partial(in_turn, make)
            if kind in ELEMENTS:
                worked = ELEMENTS[kind] * size / 4
                curve = f"heavy.{how}.{kind}" if kind in FUNCTIONS else f"{kind}.{how}"
                probes.append(Probe(curve, worked, worked, make))
            else:
                moved = PASSED[kind] * size
                probes.append(Probe(f"memory.{kind}.{how}", moved, moved, make))
    return probes


def _memory(function_of: Callable[[str, int], Callable], kind: str, size: int) -> Work:
    a, b = operands(size)
    function = function_of(kind, size)
    return _chain(function, a, b, kind) if kind in CHAINED else lambda: function(a, b)


def _chain(function: Callable[[Tensor, Tensor], Any], a: Tensor, b: Tensor, kind: str) -> Work:
    """Return a call that reads what the one or two before have returned, as ops of a step do.

    The results of many calls stay alive, as backward needs them. Each is thus written into memory
    that was used long before, not into that of the previous result, which a cache still holds.
    """
    kept = deque([b, a], maxlen=2 + min(TURNS, KEPT_BYTES // a.nbytes))

    def work() -> None:
        found = function(kept[-1], kept[-2] if kind == "pointwise" else b)
        kept.append((found[0] if isinstance(found, (list, tuple)) else found).view(-1))

    return work


def aten() -> list[Probe]:
    """Return pointwise work op by op."""
    small, large = [k for k in KERNELS if k in SLOW], [k for k in KERNELS if k not in SLOW]
    probes = memories("aten", small, TENSOR_BYTES[:-1], lambda kind, size: KERNELS[kind])
    probes += memories("aten", FUNCTIONS, TENSOR_BYTES, lambda kind, size: FUNCTIONS[kind])
    return probes + memories("aten", large, TENSOR_BYTES, lambda kind, size: KERNELS[kind])


# -- overheads, copies, updates ---------------------------------------------------------------
def others() -> list[Probe]:
    """Return the launch of an op, copies between tensors, and optimizer steps."""
    probes = [Probe("launch", 1, 1, _launch), Probe("stream", 1, 3 * (64 << 20), _stream)]
    probes += [Probe("host_copy", size, size, partial(_copy, size)) for size in COPY_BYTES]
    return probes + [Probe("host_update", n, n, partial(_update, n)) for n in UPDATE_NUMELS]


def _launch() -> Work:
    a, b = torch.randn(8), torch.randn(8)
    return lambda: torch.add(a, b)


def _stream() -> Work:
    """Add into existing memory, so that no page is touched for the first time."""
    (a, b), out = operands(64 << 20), torch.empty((64 << 20) // 4)
    return lambda: torch.add(a, b, out=out)


def _copy(size: int) -> Work:
    a, b = operands(size)
    return lambda: b.copy_(a)


def _update(numel: int) -> Work:
    param = torch.zeros(numel, requires_grad=True)
    param.grad = torch.full((numel,), 1e-3)
    return torch.optim.AdamW([param], fused=True).step
