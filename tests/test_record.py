"""zerofx.record: every step of the schedule is measured, and nothing changes by it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from stack import Stack, stack
from test_look import check_format, events_of
from torch import Tensor, nn

import zerofx
from zerofx.analysis.measured import Measured
from zerofx.analysis.steps import Lane
from zerofx.errors import RecordingError
from zerofx.runtime.stopwatch import CudaClock
from zerofx.views.recording import RecordingView, load_recording

ATEN = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 0}
STEPS = 4


def train(
    steps: int, recorded: bool, fields: dict[str, Any] | None = None, profile: bool = False
) -> tuple[list[Tensor], Any, Any]:
    """Train a stack; return losses and parameters, the model, and the recording of it."""
    torch.manual_seed(0)
    model = zerofx.compile(Stack(), {**ATEN, **(fields or {})})
    kind = zerofx.optim.AdamW if "update" in (fields or {}) else torch.optim.AdamW
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
    assert waits and all(s.lane is Lane.COMPUTE for s in waits)
    for wait in waits:
        transfer = found[wait.name.removesuffix(" wait")]
        assert transfer.kind == "transfer" and transfer.end_us == wait.end_us
        assert transfer.start_us <= wait.start_us
    assert measured.exposed_us == pytest.approx(sum(s.us for s in waits))
    calls = [s for s in measured.spans if s.kind != "transfer"]
    inside = sum(s.end_us - s.start_us for s in calls)
    assert inside < max(measured.steps_us)


@pytest.mark.parametrize("fields", [{"stage": 3}, {"stage": 1, "update": "in-backward"}], ids=str)
def test_one_process(fields: dict[str, Any]) -> None:
    same, found, steps = on_ranks(fields)
    assert same
    (measured,) = map(Measured.from_dict, found)
    assert len(measured.steps_us) == STEPS - 1 and measured.world == 1
    assert set(measured.functions_us) == {"forward", "backward"}
    assert measured.steps_us[measured.typical] == sorted(measured.steps_us)[1]
    for step in range(STEPS - 1):  # one place in each step, from which the medians are
        assert all(s.places[step] == (s.start_us, s.end_us) for s in measured.at(step).spans)
    span = measured.by_name()["forward region 0"]
    assert span.us == sorted(b - a for a, b in filter(None, span.places))[1]
    if "update" not in fields:
        check_spans(measured, steps)
    else:
        assert set(steps) <= set(measured.by_name())


@pytest.fixture(scope="module")
def two_ranks(pool: Any) -> list[Any]:
    """What two ranks recorded at stage 3."""
    return list(pool.run(2, on_ranks, {"stage": 3}))


def test_two_ranks(two_ranks: list[Any]) -> None:
    check_ranks(two_ranks, {"stage": 3})


def test_two_ranks_with_copies(pool: Any) -> None:
    fields = {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}}
    check_ranks(pool.run(2, on_ranks, fields), fields)


def check_ranks(ranks: list[Any], fields: dict[str, Any]) -> None:
    for rank, (same, found, steps) in enumerate(ranks):
        assert same
        (measured,) = map(Measured.from_dict, found)
        assert (measured.rank, measured.world) == (rank, 2)
        check_spans(measured, steps)
        lanes = {s.lane for s in measured.spans}
        assert {Lane.GATHER, Lane.REDUCE, Lane.COMPUTE} <= lanes
        assert ("offload" in fields) == (Lane.H2D in lanes)


def test_ranks_lie_side_by_side(two_ranks: list[Any], tmp_path: Path) -> None:
    """One file for all ranks, on one clock, beside a program made on paper."""
    found = [Measured.from_dict(m) for _, (m,), _ in two_ranks]
    program = zerofx.rewrite(zerofx.capture(*stack()), {**ATEN, "stage": 3}, 2)
    look = program.look(RecordingView(found), "cpu-box")
    assert [t.name for t in look.tracks] == ["predicted", "measured, rank 0", "measured, rank 1"]
    events = events_of(look.trace(tmp_path / "t.json.gz"))
    check_format(events)
    shown = RecordingView(found).of(program)
    (typical,) = {m.typical for m in shown}  # one step, on both
    walls = [m.walls_ns[typical] for m in shown]
    for measured, pid in zip(shown, (2, 3), strict=True):
        first = min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == pid)
        began = (measured.walls_ns[typical] - min(walls)) / 1e3
        assert first == pytest.approx(began + min(s.start_us for s in measured.spans))
    arrows = {e["pid"] for e in events if e["ph"] == "s"}
    assert arrows == {1, 2, 3}


def test_nothing_is_left_behind() -> None:
    train(1, False)
    hooks = sys.modules["torch.optim.optimizer"]
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    before = [dict(getattr(hooks, name)) for name in names]  # zerofx has its own there
    _, model, _ = train(2, True)
    run = next(iter(model._programs.bound.values())).executable
    for function in (run.forward, run.backward):
        assert isinstance(function, FunctionType) and "schedule.py" in function.__code__.co_filename
        own = function.__globals__
        assert all(own[name] is region for name, region in vars(own["regions"]).items())
    assert model._programs.on_bound is None
    assert [dict(getattr(hooks, name)) for name in names] == before


def test_an_exception_ends_the_recording() -> None:
    _, model, _ = train(1, False)
    executable = next(iter(model._programs.bound.values())).executable
    before = executable.forward, executable.backward
    with pytest.raises(KeyError), zerofx.record(model):
        model(torch.randn(8, 16))
        raise KeyError("mine")
    assert (executable.forward, executable.backward) == before and model._programs.on_bound is None


def test_a_broken_step_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, _ = train(1, False)
    with zerofx.record(model, warmup=0) as recording:
        for k in range(3):
            loss = model(torch.randn(8, 16))
            with monkeypatch.context() as patch:
                if k == 1:
                    patch.setattr(model._engine.updates, "prepare", None)  # in a reduction
                    with pytest.raises(TypeError):
                        loss.backward()
                else:
                    loss.backward()
    assert len(recording.programs[0].steps_us) == 2


def test_profile_names_operators() -> None:
    _, _, recording = train(3, True, profile=True)
    regions = [s for s in recording.programs[0].spans if s.kind == "region"]
    named = {op for s in regions for op, _ in s.ops}
    assert any("addmm" in op or "aten::mm" in op for op in named), named
    assert all(us > 0 for s in regions for _, us in s.ops[:1])


def test_text_and_file(tmp_path: Path) -> None:
    _, model, recording = train(3, True)
    text = str(recording)
    assert "measured on rank 0 (cpu), medians of 2 steps" in text and "forward region" in text
    lane = next(line for line in text.splitlines() if line.startswith("compute "))
    assert "#" in lane
    for name in ("run.json", "run.json.gz"):
        assert load_recording(recording.save(tmp_path / name)).programs == recording.programs
    assert recording.of(model.programs[0]) == recording.programs
    (tmp_path / "bad.json").write_text(json.dumps({"recording": [{"format": 99}]}))
    with pytest.raises(RecordingError, match=r"bad.json is no recording.*format 99: .* reads 1"):
        load_recording(tmp_path / "bad.json")
    with pytest.raises(RecordingError, match=r"absent.json: No such file"):
        load_recording(tmp_path / "absent.json")


def test_a_recording_of_another_program_is_refused() -> None:
    _, _, recording = train(2, True)
    other = zerofx.compile(Stack(width=32), {**ATEN, "stage": 1})
    other(torch.randn(4, 32))
    with pytest.raises(RecordingError) as error:
        recording.of(other.programs[0])
    text = str(error.value)
    assert "inputs.x is f32[8, 16] there and f32[4, 32] here" in text
    assert "plan.stage is 3 there and 1 here" in text and "parameters is 1428 there" in text


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: nn.Linear(2, 2), "that zerofx.compile returned, got Linear"),
        (lambda: zerofx.compile(Stack(), ATEN), "0 steps ran in the block, of which warmup=1"),
    ],
)
def test_refusals(model: Any, text: str) -> None:
    with pytest.raises(RecordingError, match=text), zerofx.record(model()):
        pass


def test_blocks_do_not_nest() -> None:
    _, model, _ = train(1, False)
    with (
        pytest.raises(RecordingError, match="recorded already"),
        zerofx.record(model, warmup=0),
        zerofx.record(model),
    ):
        pass


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
