"""What runs beside the schedule is recorded with its own begin and end."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_cases import ALL as OFFLOAD_ALL
from record_cases import ATEN, train
from stack import Stack

import zerofx
from zerofx.analysis.time.measured import Measured
from zerofx.analysis.time.steps import Lane
from zerofx.tools.record.stopwatch import CudaClock


def test_cuda_marks_are_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """No synchronisation before `settle`: marks are events on the compute's stream."""
    calls: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = len(calls)

        def record(self, stream: str) -> None:
            calls.append(stream)

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 0.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "compute")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("sync"))
    clock = CudaClock(torch.device("cuda"))
    first, second = clock.mark(), clock.mark()
    assert calls == ["compute", "compute"]
    clock.settle()
    assert calls[-1] == "sync" and clock.between_us(first, second) == 500.0


def recorded(fields: dict[str, Any], steps: int = 5) -> tuple[Measured, Any]:
    _, model, recording = train(steps, True, fields)
    (program,) = model.programs
    (measured,) = recording.of(program)
    return measured, program


def inside(span: Any, outer_start: float, outer_end: float) -> bool:
    return bool(outer_start - 1 <= span.start_us and span.end_us <= outer_end + 1)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_updates_in_backward_lie_on_their_lane(tier: str, tmp_path: Path) -> None:
    offload = {"optimizer": tier, "path": str(tmp_path) if tier == "nvme" else None}
    measured, program = recorded({"stage": 3, "update": "in-backward", "offload": offload})
    found = measured.by_name()
    updates = [s for s in program.schedule().schedule.steps if s.kind == "update"]
    assert updates
    zero, end = found["forward region 0"].start_us, max(measured.steps_us)
    for step in updates:
        update, launch = found[step.name], found[f"{step.name} launch"]
        assert update.lane is Lane.UPDATE and update.is_own and update.kind == "update"
        assert (launch.lane, launch.kind) == (Lane.HOST, "launch")
        assert launch.start_us <= update.start_us and inside(update, zero, end)
        if tier == "nvme":
            read, write = (found[f"backward {v} b{step.bucket}{s}"]
                           for v, s in (("RD", " states"), ("WR", "")))  # fmt: skip
            assert (read.lane, write.lane) == (Lane.NVME, Lane.TO_NVME)
            assert read.end_us <= update.start_us + 1 and update.end_us <= write.start_us + 1
            bucket = program.layout.buckets[step.bucket]
            nbytes = 3 * program.layout.shard_numel(bucket) * 4  # parameters and two states
            assert read.nbytes == nbytes and write.nbytes == nbytes
    one_thread = sorted((found[s.name].start_us, found[s.name].end_us) for s in updates)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(one_thread))
    predicted = zerofx.predict(program, hardware="dgx2-v100-32gb").forecast.timeline
    foreseen = {s.task.name for s in predicted.spans if s.task.lane is Lane.UPDATE}
    assert foreseen == {s.name for s in updates}  # the same names on the same lane


def test_delayed_updates_end_in_the_next_step() -> None:
    measured, program = recorded(
        {"stage": 3, "update": "in-backward", "offload": {"optimizer": "cpu", "delayed": True}}
    )
    updates = [s for s in program.schedule().schedule.steps if s.kind == "update"]
    for step in updates:
        update = measured.by_name()[step.name]
        assert update.lane is Lane.UPDATE and all(place is not None for place in update.places)


def test_a_step_over_files_shows_its_parts(tmp_path: Path) -> None:
    measured, program = recorded({"stage": 3, "offload": {"optimizer": "nvme", "path": tmp_path}})
    found = measured.by_name()
    whole = found["step update"]
    assert (whole.lane, whole.kind) == (Lane.HOST, "call")
    for bucket in program.layout.buckets:
        parts = [found[f"step {verb} b{bucket.index}"] for verb in ("RD", "update", "WR")]
        assert [p.lane for p in parts] == [Lane.NVME, Lane.UPDATE, Lane.TO_NVME]
        assert all(inside(p, whole.start_us, whole.end_us) and p.unit for p in parts)
        assert parts[0].end_us <= parts[1].start_us <= parts[1].end_us <= parts[2].start_us + 1
    predicted = zerofx.predict(program, hardware="dgx2-v100-32gb").forecast.timeline
    foreseen = {s.task.name for s in predicted.spans if s.task.lane is not Lane.HOST}
    noted = {s.name for s in measured.spans if s.graph == "step" and s.is_own}
    noted -= {f"step H2D b{b.index}" for b in program.layout.buckets}  # copies that follow
    assert noted <= foreseen


def test_activations_on_their_way_to_files(tmp_path: Path) -> None:
    """A transfer lasts as long as its bytes move, not from its launch to its wait."""
    offload = {"activations": "nvme", "path": str(tmp_path)}
    measured, program = recorded({"stage": 3, "offload": offload, **OFFLOAD_ALL})
    found = measured.by_name()
    launches = [s for s in program.schedule().schedule.steps if s.kind == "launch" and s.is_value]
    assert {s.verb for s in launches} == {"D2H", "H2D", "RD", "WR"}
    for step in launches:
        span = found[step.name]
        assert span.is_own and span.nbytes > 0 and span.lane is step.lane
        launch = found[f"{step.name} launch"]
        assert launch.start_us <= span.start_us
        if step.verb in ("D2H", "H2D"):  # copied within the call, on a CPU
            assert span.end_us <= launch.end_us


def without_steps() -> tuple[list[str], set[str]]:
    """Record a model that nobody updates; return its schedule's copies, and what was measured."""
    torch.manual_seed(0)
    model = zerofx.compile(Stack(), {**ATEN, "stage": 3, "offload": {"optimizer": "cpu"}})
    with zerofx.record(model) as recording:
        for _ in range(3):
            model(torch.randn(8, 16)).backward()
    (measured,) = recording.of(model.programs[0])
    steps = model.programs[0].schedule().schedule.steps
    return [s.name for s in steps if s.kind == "launch" and s.lane is Lane.H2D], {
        s.name for s in measured.spans
    }


def test_copies_that_stand_move_nothing(pool: Any) -> None:
    """A launch that finds its copy current leaves no transfer."""
    for copies, measured in pool.run(2, without_steps):
        assert copies and not set(copies) & measured
        assert {f"{name} launch" for name in copies} <= measured


def test_nothing_is_noted_outside_the_block() -> None:
    _, model, found = train(3, True, {"stage": 3, "offload": {"optimizer": "cpu"}})
    engine = model._engine
    assert found.programs[0].by_name()["step update"].lane is Lane.UPDATE  # all of it on the host
    assert engine.host.beside is None and engine.store.ledger.pending.beside is None
