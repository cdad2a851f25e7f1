"""zerofx doctor --postmortem: how a job ended, by the flight records of its ranks."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofx import schema
from zerofx.comm.board import process_started
from zerofx.comm.differences import STUCK, is_difference, name_ranks
from zerofx.comm.flight_recorder import (
    EVENT_BYTES,
    FORMAT,
    HEAD_BYTES,
    NUM_EVENTS,
    REASON_BYTES,
)
from zerofx.errors import DoctorError, as_sentence

_MOST_BYTES = HEAD_BYTES + REASON_BYTES + NUM_EVENTS * EVENT_BYTES
_SHOWN_EVENTS, _SHOWN_FRAMES = 4, 6
_RAISED, _GAVE_UP, _RUNS, _VANISHED = "raised", "gave up on another", "still runs", "vanished"
_DIFFERED = "it ended with DesyncError: "  # as the rank that raised it wrote it
_OURS = "|".join(sorted(path.stem for path in Path(__file__).parents[1].iterdir()))
_INSIDE = re.compile(rf"/torch/[^ ]*\.py:|/zerofx/({_OURS})[/.]")  # a clone has other folders too


@dataclass(frozen=True)
class Event:
    """A call (launch 0) or a collective that a rank began, at a time in seconds since 1970."""

    event: int
    at: float
    call: int
    launch: int
    what: str


@dataclass(frozen=True)
class FlightRecord:
    """The flight record of one rank in one world."""

    path: Path
    job: str
    world: str
    rank: int
    ranks: tuple[int, ...]
    size: int
    host: str
    process: int
    process_started: int
    started: float
    command: tuple[str, ...]
    torch: str
    at: float = 0.0
    reason: str = ""
    is_own: bool = False
    stacks: dict[str, list[str]] = field(default_factory=dict)
    events: tuple[Event, ...] = ()

    @property
    def state(self) -> str:
        """How the rank ended, as far as its record and this machine can tell."""
        if self.reason:
            return _RAISED if self.is_own else _GAVE_UP
        is_here = self.host == socket.gethostname()
        if is_here and process_started(self.process) == self.process_started:
            return _RUNS
        return _VANISHED

    @property
    def reached(self) -> tuple[int, int]:
        """The last call and the last collective that the rank began."""
        call = max((e.call for e in self.events), default=0)
        return call, max((e.launch for e in self.events), default=0)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"

    @property
    def first_line(self) -> str:
        """The first line of the reason."""
        return self.reason.partition("\n")[0]

    @property
    def last(self) -> str:
        """The last call or collective that the rank began, as text."""
        if not self.events:
            return "began no call"
        event = self.events[-1]
        if not event.launch:
            return f"began {event.what} (call {event.call})"
        return f"launched collective {event.launch}: {event.what} (call {event.call})"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        events = [vars(e) for e in self.events]
        return {**vars(self), "path": str(self.path), "state": self.state, "events": events}


def read_record(path: Path) -> FlightRecord:
    """Read the record of one rank.

    Raises:
        DoctorError: the file is no flight record or is damaged; the message names it.
    """
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            raise DoctorError(
                f"{path} is no flight record: it is no file, or too large. Name a job's folder."
            )
        data = path.read_bytes()
    except OSError as error:
        raise DoctorError(
            f"{path} cannot be read: {as_sentence(error.strerror or error)}"
        ) from error
    try:
        head = _checked(json.loads(data[:HEAD_BYTES]), _HEAD)
        if head.pop("format") != FORMAT:
            raise ValueError("this version of zerofx does not read its format.")
        said = data[HEAD_BYTES : HEAD_BYTES + REASON_BYTES].strip(b"\0 \n")
        reason = _checked(json.loads(said), _REASON) if said else {}
    except (ValueError, RecursionError) as error:
        raise DoctorError(
            f"{path} is no flight record, or it is damaged: {as_sentence(error)}"
        ) from error
    events = []
    for at in range(HEAD_BYTES + REASON_BYTES, len(data), EVENT_BYTES):
        line = data[at : at + EVENT_BYTES].strip(b"\0 \n")
        try:
            events += [Event(**_checked(json.loads(line), _EVENT))] if line else []
        except (ValueError, RecursionError):
            continue  # it was being written when the process ended
    events.sort(key=lambda e: e.event)
    head["ranks"], head["command"] = tuple(head["ranks"]), tuple(head["command"])
    return FlightRecord(path=path, **head, **reason, events=tuple(events))


_TEXT, _COUNT = schema.text(), schema.integer()
_HEAD: dict[str, schema.Form] = {
    "format": _COUNT,
    **dict.fromkeys(("job", "world", "host", "torch"), _TEXT),
    **dict.fromkeys(("rank", "size", "process", "process_started"), _COUNT),
    "started": schema.number(),
    "ranks": schema.sequence(_COUNT),
    "command": schema.sequence(_TEXT),
}
_REASON: dict[str, schema.Form] = {
    "at": schema.number(),
    "reason": _TEXT,
    "is_own": schema.boolean,
    "stacks": schema.mapping(_TEXT, schema.sequence(_TEXT)),
}
_EVENT: dict[str, schema.Form] = {
    **dict.fromkeys(("event", "call", "launch"), _COUNT),
    "at": schema.number(),
    "what": _TEXT,
}


def _checked(found: Any, fields: dict[str, schema.Form]) -> dict[str, Any]:
    """Return these fields of what was read; a newer zerofx may write more."""
    schema.check(found, schema.record(fields))
    return {name: found[name] for name in fields}


# -- The report of a job ---------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldReport:
    """The ranks of one compiled model: the ones that failed first, and the last call of each."""

    records: tuple[FlightRecord, ...]

    @property
    def missing(self) -> list[int]:
        """The ranks without a record."""
        have = {r.rank for r in self.records}
        return [rank for rank in range(self.records[0].size) if rank not in have]

    @property
    def suspects(self) -> list[FlightRecord]:
        """The ranks that caused the failure, as far as the records tell.

        Ranks that raised an error of their own, else ranks that vanished, else ranks that all gave
        up on each other; of these the ones whose last call is the earliest.
        """
        for state in (_RAISED, _VANISHED, _RUNS, _GAVE_UP):
            found = [r for r in self.records if r.state == state]
            if not found:
                continue
            least = min(r.reached for r in found)
            is_behind = state in (_RAISED, _VANISHED) or least < max(
                r.reached for r in self.records
            )
            return [r for r in found if r.reached == least] if is_behind else []
        return []

    @property
    def difference(self) -> str:
        """What ranks did that others did not, as they compared it; "" if they found nothing."""
        if any(r.state == _RAISED for r in self.records):  # which made it differ
            return ""
        for r in sorted(self.records, key=lambda r: r.at):
            said = r.first_line.removeprefix(_DIFFERED)
            if r.reason.startswith(_DIFFERED) and is_difference(said):
                return said
        return ""

    @property
    def verdict(self) -> str:
        """The cause of the failure in a few sentences."""
        if self.difference:
            return f"{as_sentence(self.difference)}{_lines_of(self.records)}"
        if self.missing and not any(r.state == _RAISED for r in self.records):
            lacks = name_ranks(self.missing, "has", "have")
            return (
                f"{lacks} no record here: ended without an error while the others went on, ended "
                "before the first call, or kept the record on another host."
            )
        suspects = self.suspects
        if not suspects:
            if said := [r for r in self.records if r.reason and STUCK not in r.reason]:
                first = min(said, key=lambda r: r.at)
                return f"{first.name}: {as_sentence(first.first_line)}"
            return (
                "All ranks had reached the same collective, and its transfer did not finish. "
                "Check the network."
            )
        first = suspects[0]
        names = " and ".join(r.name for r in suspects[:4])
        if first.state == _RAISED:
            reason = first.first_line.rstrip(".")
            return f"{names}: {reason}. The others waited for it.{_lines_of(suspects)}"
        if first.state == _VANISHED:
            return (
                f"{names} ended without an error: killed from outside (SIGKILL, or SIGTERM by a "
                "launcher), out of memory (see dmesg), or crashed in native code. Before that it "
                f"{first.last}."
            )
        return (
            f"{names} did not come as far as the others: it {first.last}, and nothing after that."
        )

    def __str__(self) -> str:
        first = self.records[0]
        lines = [self.verdict, ""]
        for r in sorted(self.records, key=lambda r: r.rank):
            call, launch = r.reached
            lines.append(f"{r.name}: {r.state}, at call {call}, collective {launch}")
            for event in r.events[-_SHOWN_EVENTS:]:
                kind = f"collective {event.launch}" if event.launch else f"call {event.call}"
                lines.append(f"  {event.at - first.started:+10.3f} s  {kind}: {event.what}")
            if r.reason:
                lines.append(f"  {r.at - first.started:+10.3f} s  {r.reason}")
            if r in self.suspects or r.state == _GAVE_UP:
                lines += [f"      {line}" for line in _main_stack(r)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "verdict": self.verdict,
            "missing": self.missing,
            "suspects": [r.rank for r in self.suspects],
            "records": [r.to_dict() for r in self.records],
        }


def _main_stack(record: FlightRecord) -> list[str]:
    """Return the innermost lines of a script; those of torch and zerofx if there are no others."""
    stack = next(iter(record.stacks.values()), [])
    return (_script_lines(record) or stack)[-_SHOWN_FRAMES:]


def _script_lines(record: FlightRecord) -> list[str]:
    """Return the lines of the main thread outside torch and zerofx, the innermost last."""
    stack = next(iter(record.stacks.values()), [])
    return [line for line in stack if not _INSIDE.search(line)]


def _lines_of(records: Sequence[FlightRecord]) -> str:
    """Return a sentence with the line of each rank: the outermost in which their stacks differ."""
    stacks = {r.rank: lines for r in records if (lines := _script_lines(r))}
    if not stacks:
        return ""
    levels = [set(level) for level in zip(*stacks.values(), strict=False)]
    depth = next((i for i, lines in enumerate(levels) if len(lines) > 1), -1)
    ranks: dict[str, list[int]] = {}
    for rank, lines in stacks.items():
        ranks.setdefault(lines[depth], []).append(rank)
    places = (f"{name_ranks(at, 'was', 'were')} at {line}" for line, at in ranks.items())
    said = ", ".join(places)
    return f" {said[0].upper()}{said[1:]}."


@dataclass(frozen=True)
class Postmortem:
    """The report of one job: print it, or take `to_dict()` for JSON."""

    job: str
    worlds: tuple[WorldReport, ...]
    damaged: tuple[str, ...] = ()

    def __str__(self) -> str:
        records = [r for world in self.worlds for r in world.records]
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(r.started for r in records)))
        command = " ".join(records[0].command)
        lines = [f"job {self.job}, began {began}: {command}", ""]
        for number, world in enumerate(self.worlds, 1):
            if len(self.worlds) > 1:
                lines.append(f"model {number} of {len(self.worlds)}")
            lines += [str(world), ""]
        lines += [f"left out: {text}" for text in self.damaged]
        return "\n".join(lines).rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        worlds = [world.to_dict() for world in self.worlds]
        return {"job": self.job, "worlds": worlds, "damaged": list(self.damaged)}


def postmortem(folder: Path) -> Postmortem:
    """Read the records of a job.

    folder: of the job, or one with the folders of several jobs, of which the newest is read.

    Raises:
        DoctorError: there are no records that can be read.
    """
    paths = _records_in(folder)
    if not paths:
        jobs = [f for f in _entries(folder) if f.is_dir() and _records_in(f)]
        if not jobs:
            raise DoctorError(
                f"{folder} has no flight records (rank-*.jsonl). A rank that ends without an error "
                "removes its own. Name the folder from the warning of a rank that gave up."
            )
        paths = _records_in(max(jobs, key=lambda f: max(p.stat().st_mtime for p in _records_in(f))))
    records, damaged = [], []
    for path in paths:
        try:
            records.append(read_record(path))
        except DoctorError as error:
            damaged.append(str(error))
    if not records:
        raise DoctorError(as_sentence("; ".join(damaged)))
    worlds: dict[tuple[Any, ...], list[FlightRecord]] = {}
    for record in records:
        worlds.setdefault((record.job, record.world, record.ranks), []).append(record)
    reports = tuple(WorldReport(tuple(sorted(w, key=lambda r: r.rank))) for w in worlds.values())
    return Postmortem(records[0].job, reports, tuple(damaged))


def _entries(folder: Path) -> Sequence[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise DoctorError(
            f"{folder} cannot be read: {as_sentence(error.strerror or error)}"
        ) from error


def _records_in(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if re.fullmatch(r"rank-\d+-\d+\.jsonl", path.name)]
