"""Write a program as text: one node a line, fixed columns, identical layers once.

    def forward(
        shard_0,                                      # f32[64]     shard fc0
    ):
        gather_0 = zfx.all_gather(shard_0, bucket=0)  # f32[256]    gather fc0  +1.0 KiB   1 ahead
        mm = aten.mm(x, fc0_weight)                   # f32[8, 16]  fc0         +512 B     m.py:12
        zfx.release(full_0)                           #             fc0         -1.0 KiB

The text is the same in every run: no addresses, no times. How much is shown is the `level`:
summary (the header line), units, regions, nodes (identical layers once), full (every node).
"""

from __future__ import annotations

from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import dump_nodes, dump_regions
from zerofx.ir.program import Entry, Planned, Program
from zerofx.ir.repeats import collapse
from zerofx.ir.text import as_text, printable
from zerofx.plan.sizes import format_bytes

LEVELS = ("summary", "units", "regions", "nodes", "full")


def dump_program(program: Program, title: str = "", level: str = "nodes") -> str:
    """Return the program's text under a header line.

    title: the header; by default the last pass's, from the history.

    Raises:
        PlanError: no such level.
    """
    history = program.history if isinstance(program, Planned) else []
    last = history[-1].header if history else ""
    title = printable(title or last or program.model_name)
    body = dump_body(program, level)
    return f"# {title}\n\n{body}" if body else f"# {title}"


def dump_body(program: Program, level: str = "nodes") -> str:
    """Return the program's text without the header."""
    if check_level(level) == "summary":
        return ""
    return "\n\n".join(as_text(dump_graph(program, name, level)) for name in program.graphs)


def check_level(level: str) -> str:
    if level not in LEVELS:
        raise PlanError(f"dump level {level!r} is unknown; use one of {', '.join(LEVELS)}")
    return level


def dump_graph(program: Program, graph: str, level: str = "nodes") -> list[str]:
    """Return the lines of one of the program's graphs."""
    if level == "units":
        return dump_regions.unit_lines(program, graph)
    if level == "regions":
        return dump_regions.region_lines(program, graph)
    writer = dump_nodes.Writer(program, graph)
    return writer.frame(lambda rows: collapse(rows, is_on=level != "full"))


def fault(program: Program, graph: str, node: fx.Node, around: int = 10) -> str:
    """Return the lines around a node, the node's own marked: what a verification error shows."""
    writer = dump_nodes.Writer(program, graph)
    at = writer.nodes.index(node)
    first, last = max(0, at - around), min(len(writer.nodes), at + around + 1)
    shown = [writer.line(n) for n in writer.nodes[first:last]]
    marks = ["> " if i == at else "  " for i in range(first, last)]
    lines = [mark + line[2:] for mark, line in zip(marks, shown, strict=True)]
    return as_text([f"in {graph}:", *lines])


def header(program: Planned, entry: Entry, comm_bytes: int, peak_bytes: int) -> str:
    """Return an entry's first line: its number, pass, setting, and what the pass changed.

    The program's history holds what came before.
    """
    before = program.history[-1] if program.history else None
    parts = [f"{len(program.history):02d} {entry.pass_spec}"]
    if program.is_laid_out:
        where = f"world={program.world_size} on {program.hardware.name}"
        parts.append(f"stage={program.plan.stage} {where}")
    num_before = before.num_nodes if before else entry.num_nodes
    parts.append(f"nodes {num_before} -> {entry.num_nodes}")
    parts.append(f"comm {format_bytes(comm_bytes)}")
    parts.append(f"peak {_change(before.peak_bytes if before else peak_bytes, peak_bytes)}")
    return "   ".join(parts)


def _change(before: int, after: int) -> str:
    """Return `3.0 -> 3.5 KiB`, the unit twice only where it differs."""
    left, right = format_bytes(before).split(), format_bytes(after).split()
    if left[1] == right[1]:
        left = left[:1]
    return f"{' '.join(left)} -> {' '.join(right)}"
