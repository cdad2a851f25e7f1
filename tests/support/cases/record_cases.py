"""What the tests of zerofx.record have in common: a training, recorded or not, and its spans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offload_cases import SMALL
from stack import Stack
from torch import Tensor

import zerofx
from zerofx.analysis.time.measured import Measured
from zerofx.analysis.time.steps import Lane

ATEN = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 0}
STEPS = 4


def train(
    steps: int, recorded: bool, fields: dict[str, Any] | None = None, profile: bool = False
) -> tuple[list[Tensor], Any, Any]:
    """Train a stack; return losses and parameters, the model, and the recording of it."""
    torch.manual_seed(0)
    fields = fields or {}
    model = zerofx.compile(Stack(), {**ATEN, **fields}, machine=SMALL)
    own = "update" in fields or fields.get("offload", {}).get("optimizer") == "nvme"
    kind = zerofx.optim.AdamW if own else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3)
    losses = []

    def step() -> None:
        loss = model(torch.randn(8, 16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    recording = None
    if recorded:
        with zerofx.record(model, profile=profile) as recording:
            for _ in range(steps):
                step()
    else:
        for _ in range(steps):
            step()
    return [*losses, *model.state_dict().values()], model, recording


def on_ranks(fields: dict[str, Any]) -> tuple[bool, list[dict[str, Any]], list[str]]:
    plain, _, _ = train(STEPS, False, fields)
    seen, model, recording = train(STEPS, True, fields)
    same = all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    steps = [s.name for s in model.programs[0].schedule().schedule.steps]
    return same, [m.to_dict() for m in recording.programs], steps


def check_spans(measured: Measured, steps: list[str]) -> None:
    """Check that every step of a schedule was measured, in its place."""
    found = measured.by_name()
    assert set(steps) | {"step update"} <= set(found)
    assert len(steps) == len(set(steps))
    for span in measured.spans:
        assert 0 <= span.low_us <= span.us <= span.high_us, span
        assert span.start_us <= span.end_us, span
    waits = [s for s in measured.spans if s.kind == "wait"]
    assert bool(waits) == (measured.world > 1)  # one process hands gradients over
    assert all(s.lane is Lane.COMPUTE for s in waits)
    for wait in waits:
        transfer = found[wait.name.removesuffix(" wait")]
        assert transfer.kind == "transfer" and transfer.start_us <= wait.start_us
        if transfer.is_own:  # it had arrived when the wait ended, or was ready before
            assert transfer.end_us <= wait.end_us and transfer.nbytes > 0
        else:
            assert transfer.end_us == wait.end_us
    assert measured.exposed_us == pytest.approx(sum(s.us for s in waits))
    calls = [s for s in measured.spans if s.kind != "transfer"]
    inside = sum(s.end_us - s.start_us for s in calls)
    assert inside < max(measured.steps_us)


def check_ranks(ranks: list[Any], fields: dict[str, Any]) -> None:
    for rank, (same, found, steps) in enumerate(ranks):
        assert same
        (measured,) = map(Measured.from_dict, found)
        assert (measured.rank, measured.world) == (rank, 2)
        check_spans(measured, steps)
        lanes = {s.lane for s in measured.spans}
        assert {Lane.GATHER, Lane.REDUCE, Lane.COMPUTE} <= lanes
        assert ("offload" in fields) == (Lane.H2D in lanes)
