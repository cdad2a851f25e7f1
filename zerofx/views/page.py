"""One self-contained page of a program: lanes over time, memory beneath, every pass and decision.

What it shows travels inside it as JSON, its script and style as text: it opens without a network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from zerofx.analysis.steps import Schedule
from zerofx.ir.program import Program
from zerofx.sizes import format_bytes
from zerofx.views.bars import Track, format_us
from zerofx.views.page_data import page_data
from zerofx.views.schedule import title

_HERE = Path(__file__).parent / "templates"
_SCRIPTS = ("page_axis.js", "page_lanes.js", "page_memory.js", "page_tables.js", "page.js")


def render(
    program: Program, schedule: Schedule, tracks: Sequence[Track], in_steps: bool, passes: bool
) -> str:
    """Return the page.

    in_steps: no times are known, so the tracks count steps. passes: what each changed.
    """
    data = page_data(program, schedule, tracks, passes) | {"in_steps": in_steps}
    said = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    script = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    template = jinja2.Template((_HERE / "page.html.j2").read_text(encoding="utf-8"))
    facts = _facts(program, schedule, [] if in_steps else tracks)
    return template.render(title=title(program), facts=facts, css=style, script=script, data=said)


def _facts(program: Program, schedule: Schedule, tracks: Sequence[Track]) -> list[tuple[str, str]]:
    """Return what stands above the picture: (name, value)."""
    report = schedule.memory
    found: list[tuple[str, Any]] = [("peak memory a rank", format_bytes(report.peak_bytes))]
    if program.plan is not None and program.plan.memory_budget:
        found.append(("memory budget", format_bytes(program.plan.memory_budget)))
    if report.host_bytes:
        found.append(("host memory", format_bytes(report.host_bytes)))
    if report.nvme_bytes:
        found.append(("files", format_bytes(report.nvme_bytes)))
    for track in tracks:
        low, high = map(format_us, track.range_us)
        found.append((f"step, {track.name}", f"{format_us(track.end_us)} ({low} .. {high})"))
    found += [("world", program.world_size), ("steps of the schedule", len(schedule.steps))]
    if program.plan is not None:
        found += [("stage", program.plan.stage), ("kernels", program.plan.kernels)]
    return [(name, str(value)) for name, value in found]
