"""Attention around a ring of ranks is attention: outputs, gradients, bytes, balance, formats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from placed_ranks import Meeting, ThreadAxis, on_threads
from torch import Tensor

from zerofx.layout.placements import Cut, join, part
from zerofx.policy import ring as policy
from zerofx.runtime import ring

LENGTH = Cut(2)


def on_ranks(ranks: int, body: Any) -> tuple[list[Any], list[int]]:
    """Run `body(engine, rank)` on threads; return what each gives, and the bytes that it sent."""
    meeting = Meeting(ranks)
    axes = [ThreadAxis(rank, meeting) for rank in range(ranks)]

    def run(rank: int) -> Any:
        return body(SimpleNamespace(world=SimpleNamespace(axis=lambda name: axes[rank])), rank)

    results = on_threads(ranks, [meeting], run)
    return results, [sum(axis.sent) for axis in axes]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return a value laid out as projections give it: [batch, length, heads, width] in memory."""
    batch, heads, length, width = shape
    made = torch.randn(batch, length, heads, width, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("ranks", "heads", "kept", "width", "dtype", "tolerance"),
    [
        (2, 3, 3, 8, torch.float32, 2e-6),
        (3, 4, 2, 8, torch.float32, 2e-6),
        (4, 4, 1, 8, torch.float32, 2e-6),
        (4, 2, 2, 16, torch.bfloat16, 2e-2),
        (5, 1, 1, 8, torch.float64, 1e-12),
    ],
)
def test_it_is_attention(
    causal: bool, ranks: int, heads: int, kept: int, width: int, dtype: torch.dtype,
    tolerance: float,
) -> None:  # fmt: skip
    """Forward and backward, joined, against autograd; bytes against the formula."""
    length, scale = 4 * ranks, 0.3
    q, k, v, grad = (
        draw(2, h, length, width, dtype=dtype, seed=i)
        for i, h in enumerate((heads, kept, kept, heads))
    )
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    repeated = [x.repeat_interleave(heads // kept, 1) for x in leaves[1:]]
    out = torch.nn.functional.scaled_dot_product_attention(
        leaves[0], *repeated, is_causal=causal, scale=scale
    )
    expected = [out, *torch.autograd.grad(out, leaves, grad.double())]

    def body(engine: Any, rank: int) -> Any:
        mine = [part(x, LENGTH, rank, ranks, zigzag=True) for x in (grad, q, k, v)]
        out, lse = ring.ring_attention(engine, *mine[1:], "context", ranks, causal, scale)
        alone = ring.attend(*mine[1:], causal, scale)
        assert [x.stride() for x in alone] == [out.stride(), lse.stride()]
        middle = len(engine.world.axis("context").sent)
        grads = ring.ring_attention_backward(
            engine, *mine, out, lse, "context", ranks, causal, scale
        )
        alone = ring.attend_backward(*mine, out, lse, causal, scale)
        assert [x.stride() for x in alone] == [x.stride() for x in grads]
        return middle, [out, *grads]

    found, sent = on_ranks(ranks, body)
    for at, whole in enumerate(expected):
        got = join([given[at] for _, given in found], LENGTH, zigzag=True)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), whole, rtol=tolerance, atol=tolerance)
    numel = 2 * 2 * kept * (length // ranks) * width
    assert policy.message_numel(*[(2, kept, length // ranks, width)] * 2) == numel
    both = sum(policy.sent_bytes(numel, dtype.itemsize, ranks, back) for back in (False, True))
    assert sent == [both] * ranks
    assert both == (ranks - 1) * numel * (2 * dtype.itemsize + max(dtype.itemsize, 4))
    assert {messages for messages, _ in found} == {ranks - 1}


def masks(length: int, heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return masks of two samples; some rows see no key at all, or all keys hidden alike."""
    at = torch.arange(length)
    ahead = at > at[:, None]
    padded = at < torch.tensor([3, 0])[:, None]  # at the front of the first
    both = ahead | padded[:, None, None]
    drawn = torch.randn(2, heads, length, length, generator=torch.Generator().manual_seed(9))
    lowest = torch.finfo(dtype).min
    none, row = torch.zeros(both.shape, dtype=dtype), torch.zeros(2, 1, 1, length, dtype=dtype)
    large = -1e18 if dtype is torch.float64 else -1e9
    found = {
        "padding": row.masked_fill(padded[:, None, None], -torch.inf),
        "lowest padding": row.masked_fill(padded[:, None, None], lowest),
        "causal": none.masked_fill(both, -torch.inf),
        "lowest": none.masked_fill(both, lowest),
        "large": none.masked_fill(both, large),
        "both": none.masked_fill(both, lowest).masked_fill(padded[:, None, None], -torch.inf),
        "all": torch.full_like(row, -torch.inf),
        "all lowest": torch.full_like(none[..., :1], lowest),
        "bias": drawn.masked_fill(both, -torch.inf),
        "window": none[0, 0].masked_fill(ahead | (at < at[:, None] - 2), -torch.inf),
    }  # fmt: skip
    return {name: mask.to(dtype) for name, mask in found.items()}


@pytest.mark.parametrize("kind", masks(4, 1, torch.float32))
@pytest.mark.parametrize(
    ("ranks", "heads", "kept", "dtype", "tolerance"),
    [
        (2, 2, 2, torch.float32, 2e-6),
        (4, 4, 2, torch.float32, 2e-6),
        (2, 2, 1, torch.bfloat16, 2e-2),
        (3, 1, 1, torch.float64, 1e-12),
    ],
)
def test_a_mask_takes_part(
    kind: str, ranks: int, heads: int, kept: int, dtype: torch.dtype, tolerance: float
) -> None:
    """What torch's operator gives for whole attention, in rows that see nothing, too."""
    length, scale = 4 * ranks, 0.3
    mask = masks(length, heads, dtype)[kind]
    q, k, v, grad = (
        draw(2, h, length, 8, dtype=dtype, seed=i) for i, h in enumerate((heads, kept, kept, heads))
    )
    out, lse = ring.attend(q, k, v, False, scale, mask)
    expected = [out, lse, *ring.attend_backward(grad, q, k, v, out, lse, False, scale, mask)]

    def body(engine: Any, rank: int) -> Any:
        mine = [part(x, LENGTH, rank, ranks, zigzag=True) for x in (grad, q, k, v)]
        rows = mask
        if mask.shape[-2] > 1:
            rows = part(mask, Cut(mask.dim() - 2), rank, ranks, zigzag=True)
        made = ring.ring_attention(engine, *mine[1:], "context", ranks, False, scale, rows)
        alone = ring.attend(*mine[1:], False, scale)
        assert [x.stride() for x in alone] == [x.stride() for x in made]
        sent = len(engine.world.axis("context").sent)
        more = ("context", ranks, False, scale, rows)
        return sent, [*made, *ring.ring_attention_backward(engine, *mine, *made, *more)]

    found, _ = on_ranks(ranks, body)
    assert {messages for messages, _ in found} == {ranks - 1}  # nothing is sent of the mask
    for at, whole in enumerate(expected):
        got = join([given[at] for _, given in found], LENGTH, zigzag=True)
        assert got.dtype == whole.dtype and whole.isfinite().all()
        torch.testing.assert_close(
            got.double(), whole.double(), rtol=tolerance, atol=tolerance * (10 if at > 1 else 1)
        )


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_the_work_is_the_same_on_all_ranks(ranks: int) -> None:
    """Each pair of positions once, and in each step as many on each rank."""
    chunk = 3
    local, length = 2 * chunk, 2 * chunk * ranks
    everyone = [policy.blocks(rank, ranks, local, local, True) for rank in range(ranks)]
    order = [part(torch.arange(length), Cut(0), r, ranks, zigzag=True) for r in range(ranks)]
    seen = torch.zeros(length, length, dtype=torch.int64)
    for rank, steps in enumerate(everyone):
        for block in steps:
            rows, columns = (
                order[rank][slice(*block.rows)],
                order[block.source][slice(*block.columns)],
            )
            pairs = torch.ones(len(rows), len(columns), dtype=torch.int64)
            seen[rows[:, None], columns[None]] += pairs.tril() if block.is_causal else pairs
    assert torch.equal(seen, torch.ones_like(seen).tril())
    by_step = [[block.num_scores for block in steps] for steps in everyone]
    assert all(steps == by_step[0] for steps in by_step)
    assert sum(by_step[0]) * ranks == length * (length + 1) // 2
    # contiguous parts would give the last rank this share more than the mean:
    contiguous = [sum((r > s) + 0.5 * (r == s) for s in range(ranks)) for r in range(ranks)]
    assert max(contiguous) / (sum(contiguous) / ranks) > 1.4


def test_without_a_mask_every_block_is_whole() -> None:
    for rank in range(3):
        steps = policy.blocks(rank, 3, 4, 6, False)
        assert [b.source for b in steps] == [rank, (rank - 1) % 3, (rank - 2) % 3]
        assert {(b.rows, b.columns, b.is_causal) for b in steps} == {((0, 4), (0, 6), False)}
