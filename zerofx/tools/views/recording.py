"""A recording as text and as a file: lanes over time, their sums, and the idle time of compute."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofx.analysis.time.measured import Measured, check_same, same_step
from zerofx.analysis.time.steps import Lane
from zerofx.errors import RecordingError, as_sentence
from zerofx.ir.program import Planned
from zerofx.ir.text import as_text
from zerofx.plan.sizes import format_bytes
from zerofx.schema import FormError, parse_json, read_file
from zerofx.tools.views.bars import lane_lines, measured_track
from zerofx.tools.views.timeline import format_us
from zerofx.tools.words import counted

MOST_BYTES = 1 << 30  # of one recording
LONGEST = 12  # spans that are named


@dataclass
class RecordingView:
    """Measurements, one per program and rank: print them, `save` them, or take `to_dict()`."""

    programs: list[Measured] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n\n".join(as_text(lines_of(m)) for m in self.programs)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, which `load_recording` reads back from a file."""
        return {"recording": [m.to_dict() for m in self.programs]}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a JSON file, gzip if its name ends in `.gz`. Each rank writes its own."""
        text = json.dumps(self.to_dict()).encode()
        where = Path(path)
        where.write_bytes(gzip.compress(text, mtime=0) if where.suffix == ".gz" else text)
        return where

    def of(self, program: Planned) -> list[Measured]:
        """Return the measurements of a program, one per rank.

        Raises:
            RecordingError: it was not recorded; the message has the difference from the nearest.
        """
        same, reasons = [], []
        for measured in self.programs:
            try:
                check_same(measured, program)
                same.append(measured)
            except RecordingError as error:
                reasons.append(error)
        if not same:
            if not reasons:
                raise RecordingError(
                    "the recording is empty: its block has not ended. Read it after the block."
                )
            raise min(reasons, key=lambda e: len(str(e)))
        return same_step(sorted(same, key=lambda m: m.rank))


def load_recording(*paths: str | os.PathLike[str]) -> RecordingView:
    """Read files that `save` wrote, of any number of ranks.

    Raises:
        RecordingError: a file is no recording, or has another format; the message names it.
    """
    found = RecordingView()
    for path in paths:
        try:
            data = read_file(path, MOST_BYTES)
            said = parse_json(_unpacked(data) if data[:2] == b"\x1f\x8b" else data)
            found.programs += [Measured.from_dict(each) for each in _programs(said)]
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, RecordingError) as error:
            raise RecordingError(
                f"{path} is no recording that `record(...).save` wrote: {as_sentence(error)}"
            ) from error
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror}.") from error
    return found


def _unpacked(data: bytes) -> bytes:
    """Return the unpacked data, which may be as large as a file may be."""
    with gzip.open(io.BytesIO(data)) as file:
        found = file.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise FormError(f"unpacked, it has more than {MOST_BYTES} bytes")
    return found


def _programs(said: Any) -> list[dict[str, Any]]:
    """Return the programs of a file.

    Raises:
        RecordingError: the file has other content; the message names it if it is known.
    """
    if isinstance(said, dict) and isinstance(said.get("recording"), list):
        return said["recording"]
    what = f"a JSON {type(said).__name__} without them"
    if isinstance(said, dict) and "traceEvents" in said:
        what = "a trace for Perfetto, which cannot be read back"
    raise RecordingError(f"it should hold recorded programs, but is {what}.")


def _memory_lines(measured: Measured) -> list[str]:
    held = measured.memory
    if held is None:
        return []
    at = max(held.held, key=lambda name: held.held[name], default="")
    unsure = f" and up to {format_bytes(held.unsure_bytes)} more" if held.unsure_bytes else ""
    return [f"peak memory {format_bytes(held.peak_bytes)}{unsure}, at {at or 'no call'}"]


def lines_of(measured: Measured) -> list[str]:
    """Return the lanes of one program, their sums, and its longest spans."""
    steps = measured.steps_us
    plan = measured.identity["plan"]
    functions = ", ".join(f"{g} {format_us(us)}" for g, us in measured.functions_us.items())
    lines = [
        f"# {measured.model}   stage={plan.get('stage')} world={measured.world}   measured on rank "
        f"{measured.rank} ({measured.device}), medians of {counted(len(steps), 'step')}",
        f"step {format_us(measured.step_us)} ({format_us(min(steps))} .. {format_us(max(steps))}); "
        f"{functions}; compute waits {format_us(measured.exposed_us)} for transfers",
        *_memory_lines(measured),
        "",
        *lane_lines(measured_track(measured).bars),
        "",
    ]
    for lane in Lane:
        own = [s for s in measured.spans if s.lane is lane]
        if own:
            total = sum(s.us for s in own)
            lines.append(f"{lane.value:<12}{format_us(total):>10}   {counted(len(own), 'span')}")
    lines += ["", "longest"]
    ranked = sorted(measured.spans, key=lambda s: (-s.us, s.name))[:LONGEST]
    for s in ranked:
        spread = f"({format_us(s.low_us)} .. {format_us(s.high_us)})"
        ops = "  ".join(f"{op} {format_us(us)}" for op, us in s.ops)
        lines.append(
            f"  {format_us(s.us):>10} {spread:<24} {s.name:<28} {s.unit:<20} {ops}".rstrip()
        )
    return lines
