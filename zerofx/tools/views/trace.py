"""Trace-event JSON for Perfetto (ui.perfetto.dev, or its trace processor): lanes as threads.

A process is one rank: the predicted one (all ranks are equal), and each recorded one. Arrows lead
from a launch to the first reader of its result; counters show the memory. Written as one gzip
file, of the form described in Chromium's "Trace Event Format".
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofx.analysis.time.steps import Lane
from zerofx.tools.views.bars import Bar
from zerofx.tools.views.details import Detail

Event = dict[str, Any]
PER_LANE = 1000  # numbers of tracks that a lane has for itself


@dataclass
class Process:
    """One rank's lanes over time.

    counters: name -> (time, value) of a curve, in order of time. offset_us: the time of its start.
    """

    name: str
    bars: Sequence[Bar]
    counters: Mapping[str, Sequence[tuple[float, int]]] = field(default_factory=dict)
    offset_us: float = 0.0


def write_trace(
    path: str | os.PathLike[str], processes: Sequence[Process], about: Mapping[str, Detail]
) -> Path:
    """Write a trace of several processes; it is gzip whatever its name."""
    data = json.dumps({"traceEvents": events(processes, about), "displayTimeUnit": "ms"})
    where = Path(path)
    where.write_bytes(gzip.compress(data.encode(), mtime=0))
    return where


def events(processes: Sequence[Process], about: Mapping[str, Detail]) -> list[Event]:
    """Return all events; flow numbers are unique over the processes."""
    found: list[Event] = []
    for pid, process in enumerate(processes, 1):
        tracks = _tracks(process.bars)
        found += _names(pid, process, tracks)
        found += _slices(pid, process, tracks, about)
        found += _flows(pid, process, tracks, about, len(found))
        found += _counters(pid, process)
    return found


def _tracks(bars: Sequence[Bar]) -> dict[str, int]:
    """Assign a track to each bar: one per lane, and more if bars overlap, which no track may."""
    found: dict[str, int] = {}
    free: dict[Lane, list[float]] = {}  # of each track, when it is free again
    for bar in sorted(bars, key=lambda b: b.start_us):
        ends = free.setdefault(bar.lane, [])
        own = next((k for k, end in enumerate(ends) if end <= bar.start_us), len(ends))
        ends[own:] = [bar.end_us, *ends[own + 1 :]]
        found[bar.name] = PER_LANE * list(Lane).index(bar.lane) + own + 1
    return found


def _names(pid: int, process: Process, tracks: Mapping[str, int]) -> Iterator[Event]:
    yield _meta("process_name", pid, name=process.name)
    yield _meta("process_sort_index", pid, sort_index=pid)
    for tid in sorted(set(tracks.values())):
        lane, own = divmod(tid - 1, PER_LANE)
        name = list(Lane)[lane].value + (f" {own + 1}" if own else "")
        yield _meta("thread_name", pid, tid, name=name)
        yield _meta("thread_sort_index", pid, tid, sort_index=tid)


def _meta(what: str, pid: int, tid: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _slices(
    pid: int, process: Process, tracks: Mapping[str, int], about: Mapping[str, Detail]
) -> Iterator[Event]:
    """Yield one complete event per bar."""
    for bar in process.bars:
        yield {
            "ph": "X", "name": label(bar), "cat": bar.kind, "pid": pid, "tid": tracks[bar.name],
            "ts": bar.start_us + process.offset_us, "dur": bar.us,
            "args": _args(bar, about.get(bar.name)),
        }  # fmt: skip


def label(bar: Bar) -> str:
    """Return the label of a bar: its unit and its verb."""
    what = bar.name.removeprefix(f"{bar.graph} ")
    prime = "'" if bar.graph == "backward" else ""
    if bar.kind == "region":
        return f"{bar.unit or '(root)'}{prime}"
    return f"{what} {bar.unit}{prime}".strip()


def _args(bar: Bar, detail: Detail | None) -> dict[str, Any]:
    args: dict[str, Any] = {"name": bar.name}
    if detail is not None:
        said = {"line": detail.line, "moves": detail.moves, "bytes": detail.nbytes,
                "what": "; ".join(detail.names)}  # fmt: skip
        args |= {k: v for k, v in said.items() if v}
    if bar.note:
        args["note"] = bar.note
    return args


def _flows(
    pid: int, process: Process, tracks: Mapping[str, int], about: Mapping[str, Detail], first: int
) -> Iterator[Event]:
    """Yield an arrow from every launch to the first bar that reads its result."""
    by_name = {bar.name: bar for bar in process.bars}
    for number, bar in enumerate(process.bars, first):
        detail = about.get(bar.name)
        to = by_name.get(detail.used_by) if detail and bar.kind == "transfer" else None
        if to is None:
            continue
        shared = {"name": "delivers", "cat": "flow", "id": number, "pid": pid}
        start = bar.start_us + process.offset_us
        end = max(to.start_us, bar.start_us) + process.offset_us
        yield shared | {"ph": "s", "tid": tracks[bar.name], "ts": start}
        yield shared | {"ph": "f", "bp": "e", "tid": tracks[to.name], "ts": end}


def _counters(pid: int, process: Process) -> Iterator[Event]:
    for name, curve in process.counters.items():
        for at, value in curve:
            yield {
                "ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at + process.offset_us,
                "args": {"bytes": value},
            }  # fmt: skip
