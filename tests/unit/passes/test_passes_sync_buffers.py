"""sync-buffers: buffers that forward updates follow rank 0."""

from __future__ import annotations

from typing import Any

import torch
from oracle import differences, execute, same_bits
from oracle_cases import Choice, expected, following_rank_0, make_state
from passes_compact import before, order, pass_named, run
from torch import Tensor, nn

import zerofx
from zerofx import ops
from zerofx.analysis.time.traffic import traffic
from zerofx.ir.graphs import root_producer
from zerofx.ir.meta import Role, value
from zerofx.passes.sync_buffers import SyncBuffers

NAME = "sync-buffers"


def test_one_broadcast_of_all_at_the_end_of_forward() -> None:
    program = before("convnet", Choice(1), NAME)
    after = run(program, SyncBuffers())
    assert order(after, "forward") == [*order(program, "forward"), "sync 6"]
    assert order(after, "backward") == order(program, "backward")
    updates = [s for s in after.outputs["forward"] if s.role is Role.BUFFER_UPDATE]
    assert len(updates) == 6
    synced = [n for n in after.results("forward") if root_producer(n).target is ops.sync_buffers]
    assert {value(n).dtype for n in synced} == {torch.float32, torch.int64}, "counters of batches"


def test_every_rank_ends_with_rank_0s_statistics() -> None:
    after = run(before("convnet", Choice(1), NAME), SyncBuffers())
    own = expected("convnet", 2)
    key = ("buffer", "norm.running_mean", -1)
    assert not same_bits(own[0].results[key], own[1].results[key])
    assert not differences(following_rank_0(own), execute([after] * 2, make_state("convnet", 2)))


def test_nothing_to_do() -> None:
    assert not SyncBuffers().run(before("gpt", Choice(1), NAME)).changed
    assert not SyncBuffers(enabled=False).run(before("convnet", Choice(1), NAME)).changed


def test_one_rank_needs_none() -> None:
    assert pass_named(Choice(3, 1), NAME) == SyncBuffers(enabled=False)
    assert pass_named(Choice(3, 2), NAME) == SyncBuffers(enabled=True)


class Seen(nn.Module):
    """Updates buffers of many widths, each from its own batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("small", torch.zeros(5, dtype=torch.int8))
        self.register_buffer("short", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("wide", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("turn", torch.zeros(1, dtype=torch.complex128))
        self.register_buffer("none", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        self.mask.logical_or_((x > 0).any(0)[:3])
        self.count.add_((x > 0).sum())
        self.small.add_((x < 0).sum().to(torch.int8))
        self.short.add_(h.detach().sum(0).bfloat16())
        self.wide.add_(x.double().sum() / 3)
        self.turn.add_(torch.complex(x.sum(), x[0, 0]).conj())
        self.none.add_(1)
        return h.sum()


def train_seen() -> tuple[dict[str, Tensor], dict[str, Tensor], int, int]:
    """Return this rank's buffers, an eager model's, and the bytes broadcast and predicted."""
    torch.manual_seed(0)
    plain = Seen()
    torch.manual_seed(0)
    model: Any = zerofx.compile(Seen(), {"kernels": "aten"})
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    sent = model._engine.world.counters["broadcast"]
    for _ in range(2):
        x = torch.randn(3, 4, generator=generator)
        before = sent.sent_bytes
        model(x).backward()
        plain(x)
    predicted = traffic(model.programs[0], rank).kinds["broadcast"].sent_bytes
    return (
        dict(model.named_buffers()),
        dict(plain.named_buffers()),
        sent.sent_bytes - before,
        predicted,
    )


def test_buffers_of_every_dtype_follow_rank_0(pool: Any) -> None:
    (first, eager, sent, predicted), (second, other, *_) = pool.run(2, train_seen)
    assert sent == predicted == sum(b.nbytes for b in eager.values())
    assert not torch.equal(eager["count"], other["count"])
    for name, buffer in eager.items():
        assert first[name].dtype == buffer.dtype
        torch.testing.assert_close(first[name], buffer)
        assert torch.equal(first[name], second[name]), name
