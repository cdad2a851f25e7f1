"""The pictures and their JSON twins."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import goldens
import pytest
import torch
from stack import stack

import zerofx
from zerofx.capture import capture
from zerofx.hardware import default_hardware, hardware_for
from zerofx.ir.program import Planned
from zerofx.ir.spec import Kind, meanings, specs
from zerofx.passes.order import Setting, build
from zerofx.plan.plan import Plan
from zerofx.plan.sizes import format_bytes
from zerofx.tools.demo.gpt import GPT, GPTConfig
from zerofx.tools.predict import stage_programs
from zerofx.tools.views.diff import DiffView, PipelineDiff
from zerofx.tools.views.passes import PassesView


@cache
def program(stage: int = 3, world: int = 4, **fields: object) -> Planned:
    plan = {"bucket_bytes": 0, "persist_below": 0, "kernels": "aten", "stage": stage, **fields}
    return zerofx.rewrite(capture(*stack()), plan, world)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_schedule_golden(stage: int) -> None:
    goldens.check(f"schedule_stage{stage}", str(program(stage).schedule()))


@pytest.mark.parametrize("stage", [0, 3])
def test_memory_golden(stage: int) -> None:
    goldens.check(f"memory_stage{stage}", str(program(stage).memory()))


def test_diff_golden() -> None:
    goldens.check("diff", str(DiffView(program(3), program(2))))


def test_schedule_twin_has_every_step() -> None:
    view = program().schedule()
    twin = json.loads(json.dumps(view.to_dict()))
    steps = twin["steps"]
    assert [s["index"] for s in steps] == list(range(len(steps)))
    assert max(s["resident_bytes"] for s in steps) == twin["peak_bytes"] == view.peak_bytes
    assert steps[twin["peak_step"]]["resident_bytes"] == twin["peak_bytes"]
    launched = [(s["graph"], s["bucket"], s["verb"]) for s in steps if s["kind"] == "launch"]
    waited = [(s["graph"], s["bucket"], s["verb"]) for s in steps if s["kind"] == "wait"]
    assert sorted(launched) == sorted(waited) and len(set(launched)) == len(launched)


def test_every_short_word_of_a_schedule_is_explained() -> None:
    assert all(meanings().values())
    own = [spec for spec in specs() if spec.runtime is None]  # tests declare ops as well
    verbs = {spec.verb for spec in own if spec.kind in (Kind.LAUNCH, Kind.SYNC)}
    assert verbs <= set(meanings())
    glossary = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
    rows = [line.split("|")[1] for line in glossary.splitlines() if line.startswith("| ")]
    words = {word.strip() for row in rows for word in row.split(",")}
    assert verbs <= words
    # Stage 0 gathers nothing, so that nothing is said of it.
    shown = str(program(0).schedule()).splitlines()[-2:]
    assert "AR all-reduce" in shown[0] and "AG" not in shown[0]
    assert "x released" not in shown[1] and "x released" in str(program(3).schedule())


def test_schedule_marks_the_peak_once() -> None:
    lines = str(program().schedule()).splitlines()
    marked = [line for line in lines if line.endswith("<- peak")]
    assert len(marked) == 1
    assert f"at step {int(marked[0].split()[0])})" in lines[1]


def test_memory_twin_adds_up() -> None:
    twin = json.loads(json.dumps(program().memory().to_dict()))
    assert sum(twin["at_peak"].values()) == twin["peak_bytes"] == max(twin["curve_bytes"])
    assert sum(h["bytes"] for h in twin["held_at_peak"]) == twin["peak_bytes"]
    assert all(twin["between_steps"][c] <= n for c, n in twin["at_peak"].items())
    assert twin["traffic"]["all_gather"]["calls"] == 11


class LogitsAndLoss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 512)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(x))
        return logits, logits.logsumexp(-1).mean()


def test_results_that_a_loop_may_keep_are_mentioned_where_they_matter() -> None:
    captured = capture(LogitsAndLoss(), (torch.randn(64, 8),))
    plan = {"kernels": "aten", "stage": 0}
    program = zerofx.rewrite(captured, plan, 1)
    view, kept = program.memory(), program.memory(keeps_results=True)
    more = kept.peak_bytes - view.peak_bytes
    assert more == view.results_bytes == view.to_dict()["results_bytes"] > 0
    line = (
        f"A loop that keeps all results until step() holds {format_bytes(more)} more "
        "(--keep-results); Plan(outputs='loss') returns the loss alone."
    )
    assert str(view).splitlines().count(line) == 1
    predicted = zerofx.predict(captured, plan, hardware="cpu-box")
    assert str(predicted).splitlines().count(line) == 1
    small = dataclasses.replace(view, results_bytes=view.peak_bytes // 101)
    alone = zerofx.rewrite(capture(LogitsAndLoss(), (torch.randn(64, 8),), outputs="loss"), plan, 1)
    for other in (kept, small, alone.memory()):
        assert "A loop that keeps" not in str(other)


def test_diff_of_a_program_with_itself_is_empty() -> None:
    twin = DiffView(program(), program()).to_dict()
    assert twin["plan"] == [] and twin["lines"] == ["(the same steps in the same order)"]
    assert all(row["left"] == row["right"] for row in twin["numbers"])


def test_diff_names_what_changed() -> None:
    twin = DiffView(program(3, 4), program(3, 2, prefetch=0)).to_dict()
    assert {row["field"] for row in twin["plan"]} == {"plan.prefetch", "world"}
    assert any(line.startswith("-    all_gather") for line in twin["lines"])


def test_diff_foresees_times() -> None:
    both = [zerofx.predict(program(s), hardware="dgx-h100").forecast for s in (3, 2)]
    view = DiffView.of(*both)
    numbers = {name: (a, b) for name, a, b in view.numbers()}
    assert numbers["step us"] == tuple(f.timeline.step_us for f in both)
    left, right = numbers["gather busy us"]
    assert left == pytest.approx(2 * right, rel=0.1)  # stage 2 gathers once
    assert numbers["exposed communication us"][0] > 0
    text = str(view)
    assert "exposed communication  " in text and " us" in text and "gather busy  " in text
    names = {row["name"] for row in view.to_dict()["numbers"]}
    assert {"step us", "reduce exposed us"} <= names


def test_passes_with_and_without_a_program() -> None:
    built = build(Setting(program().plan, 4, hardware_for("cpu"))).passes
    bare = PassesView.of(built)
    assert "Map every alias of a parameter" in str(bare) and "history" not in bare.to_dict()
    full = PassesView.of(built, program())
    twin = json.loads(json.dumps(full.to_dict()))
    assert len(twin["history"]) == len(twin["passes"]) + 1 == len(str(full).splitlines()) - 1
    assert twin["history"][-1]["peak_bytes"] == program().history[-1].peak_bytes


def test_inference_has_a_schedule_and_memory() -> None:
    module, args, kwargs = stack()
    captured = capture(module.requires_grad_(False), args, kwargs)
    q = zerofx.rewrite(captured, {"stage": 3, "kernels": "aten"}, 2)
    assert "inference" in str(q.schedule()) and q.memory().peak_bytes > 0
    assert q.memory().to_dict()["at_peak"]["optimizer"] == 0


def staged(size: int, **axes: object) -> tuple[Planned, ...]:
    model, ids = GPT(GPTConfig(width=32)), torch.zeros(1, 16, dtype=torch.long)
    captured = capture(model, (ids, ids), outputs="loss")
    plan = Plan(stage=1, kernels="aten", parallel={"pipeline": size, **axes})
    if size == 1:
        return (zerofx.rewrite(captured, plan, 2),)
    return tuple(stage_programs(captured, Setting(plan, size, default_hardware())))


def test_diff_of_pipelines_has_a_section_for_each_stage_that_differs() -> None:
    left, right = staged(2), staged(2, schedule="zero-bubble")
    view = PipelineDiff(left, right)
    text = str(view)
    assert "pipeline stage 0" in text and "pipeline stage 1" in text and "pause" in text
    numbers = {name: (a, b) for name, a, b in view.numbers()}
    assert numbers["stages"] == (2, 2)
    for stage, (one, other) in enumerate(zip(left, right, strict=True)):
        peaks = one.memory().peak_bytes, other.memory().peak_bytes
        assert numbers[f"stage {stage}: peak bytes"] == peaks
    twin = json.loads(json.dumps(view.to_dict()))
    assert [row["field"] for row in twin["plan"]] == ["plan.parallel"]
    assert [stage["left_stage"] for stage in twin["stages"]] == [0, 1]
    same = PipelineDiff(left, left)
    assert "the same steps, bytes and times: stage 0, 1" in str(same)


def test_diff_with_a_pipeline_on_one_side_compares_the_fullest() -> None:
    left, right = staged(1), staged(2)
    view = PipelineDiff(left, right)
    fullest = max(range(2), key=lambda i: right[i].memory().peak_bytes)
    assert [(a, b) for a, b, _ in view.stages] == [(0, fullest)]
    assert "2 pipeline stages" in str(view)
    both = [
        zerofx.predict(
            capture(GPT(GPTConfig(width=32)), (ids, ids), outputs="loss"),
            {"stage": 1, "kernels": "aten", "parallel": axes}, hardware="dgx-h100", world_size=2,
        ).forecast
        for ids in [torch.zeros(1, 16, dtype=torch.long)]
        for axes in ("none", {"pipeline": 2})
    ]  # fmt: skip
    numbers = {name: (a, b) for name, a, b in PipelineDiff.of(*both).numbers()}
    assert numbers["step us"] == tuple(f.step_us.middle for f in both)
    assert numbers["waits for other stages us"] == (0.0, both[1].idle_us.middle)
