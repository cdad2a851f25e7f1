"""The look of a program: text, trace events, the command, and what is refused."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import goldens
import pytest
import torch
from stack import Stack, stack

import zerofx
from zerofx.ir.program import Planned
from zerofx.tools.cli import main

PLAN = {"stage": 3, "kernels": "aten", "bucket_bytes": 0, "persist_below": 0}
TARGET = str(Path(__file__).parents[1] / "support" / "stack.py") + ":stack"
SET = [part for k, v in PLAN.items() for part in ("--set", f"{k}={v}")]


@cache
def recorded(**more: Any) -> tuple[Planned, Any]:
    """A program of one rank and a recording of it."""
    torch.manual_seed(0)
    model = zerofx.compile(Stack(), {**PLAN, **more})
    with zerofx.record(model) as recording:
        for _ in range(3):
            model(torch.zeros(8, 16)).backward()
    return model.programs[0], recording


def events_of(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def check_format(events: list[dict[str, Any]]) -> None:
    """Hold events to the rules of the format: named tracks, nesting slices, whole flows."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in "MXsfC", event
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
        elif event["ph"] in "sf":
            flows[event["id"]].append(event)
        elif event["ph"] == "C":
            assert all(isinstance(v, int) for v in event["args"].values())
    assert set(slices) == named
    for own in slices.values():
        own.sort()
        for (start, dur), (after, _) in itertools.pairwise(own):
            assert start + dur <= after + 1e-6, "slices of one track overlap"
    for begin, end in flows.values():  # exactly two
        assert (begin["ph"], end["ph"]) == ("s", "f") and begin["ts"] <= end["ts"]
        for at in (begin, end):
            own = slices[at["pid"], at["tid"]]
            assert any(a - 1e-6 <= at["ts"] <= a + d + 1e-6 for a, d in own), at


def test_trace_follows_the_format(tmp_path: Path) -> None:
    program, recording = recorded()
    path = program.look(recording).trace(tmp_path / "run.json.gz")
    events = events_of(path)
    check_format(events)
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["args"]["name"] for e in slices} == {s.name for s in recording.programs[0].spans}
    region = next(e for e in slices if e["args"]["name"] == "forward region 0")
    assert region["args"]["line"].startswith("stack.py:") and "addmm" in region["args"]["what"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "measured, rank 0"
    ]
    held = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert max(held) == program.memory().peak_bytes


def test_arrows_lead_from_gathers_to_their_use(tmp_path: Path) -> None:
    program = zerofx.rewrite(zerofx.capture(*stack()), PLAN, 4)
    events = events_of(program.look().trace(tmp_path / "t.json.gz"))
    check_format(events)
    launched = [s for s in program.schedule().schedule.steps if s.kind == "launch"]
    gathers = [s for s in launched if s.verb == "AG"]
    at = {(e["pid"], e["tid"], e["ts"]): e["args"]["name"] for e in events if e["ph"] == "X"}
    pairs = defaultdict(list)
    for e in events:
        if e["ph"] in "sf":
            pairs[e["id"]].append(at[e["pid"], e["tid"], e["ts"]])
    used = dict(pairs.values())
    assert {s.name for s in gathers} <= set(used)
    assert used["forward AG b2"] == "forward region 2"  # the layer whose parameters it gathers


def test_predicted_beside_measured(tmp_path: Path) -> None:
    program, recording = recorded()
    look = program.look(recording, "cpu-box")
    assert [t.name for t in look.tracks] == ["predicted", "measured, rank 0"]
    predicted, measured = ({b.name for b in t.bars} for t in look.tracks)
    steps = program.schedule().schedule.steps
    assert {s.name for s in steps if s.kind in ("region", "pack")} <= predicted & measured
    twin = look.to_dict()
    device = look.predicted.hardware.device
    assert len(twin["tracks"]) == 2 and dict(twin["limits"]).keys() == {device}
    for track in twin["tracks"]:  # every step has its place, one after another
        times = [t for pair in track["times"] for t in pair]
        assert len(track["times"]) == len(twin["steps"]) and times == sorted(times)
    path = look.trace(tmp_path / "t.json.gz")
    check_format(events_of(path))
    names = [e["args"]["name"] for e in events_of(path) if e["name"] == "process_name"]
    assert names == ["predicted", "measured, rank 0"]


def test_schedule_golden() -> None:
    goldens.check("look", str(zerofx.rewrite(zerofx.capture(*stack()), PLAN, 4).look()))


def test_every_launch_is_foreseen() -> None:
    program = zerofx.rewrite(zerofx.capture(*stack()), PLAN, 4)
    (track,) = program.look(hardware="dgx-h100").tracks
    foreseen = {b.name for b in track.bars if b.kind == "transfer"}
    steps = program.schedule().schedule.steps
    assert {s.name for s in steps if s.kind == "launch"} == foreseen and track.critical


def test_text_has_every_lane() -> None:
    program, recording = recorded(precision="bf16")  # so that buckets are packed
    lines = str(program.look(recording)).splitlines()
    assert any(line.startswith("measured, rank 0: ") for line in lines)
    rows = {line.split("  ")[0]: line for line in lines}
    assert {"compute", "reduce", "host"} <= set(rows) and "#" in rows["compute"]
    twin = json.loads(json.dumps(program.look(recording).to_dict()))
    assert [s[0] for s in twin["steps"]] == [s.name for s in program.schedule().schedule.steps]
    assert max(map(sum, zip(*twin["memory"]["bytes"], strict=True))) == twin["peak_bytes"]


def test_storages_add_up_to_the_curve() -> None:
    program, _ = recorded()
    twin = program.look().to_dict()
    for i in (0, len(twin["steps"]) // 2, len(twin["steps"]) - 1):
        held = sum(n for _, _, _, n, first, last in twin["storages"] if first <= i <= last)
        assert held >= twin["steps"][i][9]  # what is held in a step, one thing after another too


def test_the_command_writes_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json.gz"
    with pytest.raises(SystemExit) as ended:
        main(["view", TARGET, *SET, "--out", str(page), "--trace", str(trace), "--no-passes"])
    assert ended.value.code == 0
    assert "page.html" in capsys.readouterr().out and page.stat().st_size < 200_000
    check_format(events_of(trace))
    with pytest.raises(SystemExit):
        main(["view", TARGET, *SET, "--json"])
    assert json.loads(capsys.readouterr().out)["in_steps"] is True
    with pytest.raises(SystemExit) as ended:
        main(["view", TARGET, *SET, "--hardware", "dgx-h100", "--world", "16"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "predicted: " in text and "dgx-h100, each of 16 ranks" in text
    with pytest.raises(SystemExit) as ended:
        main(["view", TARGET, *SET, "--hardware", "abacus"])
    assert ended.value.code == 1 and "abacus" in capsys.readouterr().err


def test_a_recording_of_another_program_is_refused_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, recording = recorded()
    saved = recording.save(tmp_path / "run.json.gz")
    with pytest.raises(SystemExit) as ended:
        main(["view", TARGET, *SET, "--world", "4", "--recording", str(saved)])
    assert ended.value.code == 1 and "world is 1 there and 4 here" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["view", TARGET, *SET, "--world", "1", "--recording", str(saved)])
    assert ended.value.code == 0 and "measured, rank 0" in capsys.readouterr().out


def test_a_model_that_cannot_be_captured_is_said_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "branches.py"
    path.write_text(
        "import torch\n"
        "class Branches(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x if x.sum().item() > 0 else -x\n"
        "def build():\n"
        "    return Branches(), (torch.zeros(2),), {}\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["view", f"{path}:build"])
    assert ended.value.code == 1 and "branches.py:4" in capsys.readouterr().err
