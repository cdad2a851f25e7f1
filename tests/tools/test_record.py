"""zerofx.record: every step of the schedule is measured, on one rank and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from record_cases import ATEN, STEPS, check_ranks, check_spans, on_ranks, train
from stack import stack
from test_look import check_format, events_of

import zerofx
from zerofx.analysis.time.measured import Measured
from zerofx.tools.demo.gpt import GPT, GPTConfig
from zerofx.tools.views.recording import RecordingView


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


def test_loops_that_accumulate_and_evaluate() -> None:
    """Each program has its own steps, from its forward to the next of any; fused kernels too."""
    torch.manual_seed(0)
    plan = {**ATEN, "stage": 3, "numerics": "fast"}
    model = zerofx.compile(GPT(GPTConfig(layers=1, width=16, seq=8)), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.zeros(1, 8, dtype=torch.long)
    with zerofx.record(model, warmup=2) as recording:
        for _ in range(3):
            for _ in range(2):
                model(x, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.eval()(x, x)
            model.train()
    training, evaluation = model.programs
    (trained,), (evaluated,) = recording.of(training), recording.of(evaluation)
    assert len(trained.steps_us) == 4 and len(evaluated.steps_us) == 3
    for program, measured in ((training, trained), (evaluation, evaluated)):
        steps = program.schedule().schedule.steps
        assert {s.name for s in steps} <= set(measured.by_name())
    places = trained.by_name()["step update"].places  # behind every second backward
    assert [place is not None for place in places] == [False, True, False, True]
    assert "step update" not in evaluated.by_name()


def test_profile_names_operators() -> None:
    _, _, recording = train(3, True, profile=True)
    regions = [s for s in recording.programs[0].spans if s.kind == "region"]
    named = {op for s in regions for op, _ in s.ops}
    assert any("addmm" in op or "aten::mm" in op for op in named), named
    assert all(us > 0 for s in regions for _, us in s.ops[:1])
