"""Fault reports: the broken invariant, its location, and the ten lines around the node."""

from __future__ import annotations

import linecache

from torch import fx

from zerofx.errors import ProgramError
from zerofx.ir import dump
from zerofx.ir.meta import Info, info
from zerofx.ir.program import Planned

AROUND = 10


def fault(program: Planned, graph: str, node: fx.Node, message: str) -> ProgramError:
    """Return the error for a broken invariant: the message, the user's line, and the context.

    The context consists of lines of schedule.py if the program was loaded from an emitted
    directory, otherwise of lines of the graph.
    """
    where = user_line(node)
    place = f" ({where})" if where and where not in message else ""
    lines = _file_lines(program, info(node)) or _graph_lines(program, graph, node)
    return ProgramError(f"{graph}: {message}{place}\n" + "\n".join(lines))


def user_line(node: fx.Node) -> str:
    """Return the user's line of a node, or of its inputs: communication has no line of its own."""
    reads = node.all_input_nodes if node.op == "call_function" else []
    return next((info(n).line for n in (node, *reads) if info(n).line), "")


def name_of(node: fx.Node) -> str:
    """Name a node for a message: by the user's name if it has one."""
    if node.op == "output":
        return "the result"
    return info(node).name or node.name


def _file_lines(program: Planned, where: Info) -> list[str]:
    if program.directory is None or not where.place:
        return []
    name, _, number = where.place.partition(":")
    return file_lines(str(program.directory / name), int(number))


def file_lines(path: str, marked: int) -> list[str]:
    """Return the ten lines on either side of a line of a file, headed by its path."""
    linecache.checkcache(path)
    lines = [line.rstrip("\n") for line in linecache.getlines(path)]
    first = max(1, marked - AROUND)
    shown = lines[first - 1 : marked + AROUND]
    rows = [f"{'>' if i == marked else ' '} {i:4d}  {row}" for i, row in enumerate(shown, first)]
    return [f"{path}:{marked}:", *rows]


def _graph_lines(program: Planned, graph: str, node: fx.Node) -> list[str]:
    # the result tuple has no line of its own: the last node is shown instead
    shown = node.prev if node.op == "output" else node
    return dump.fault(program, graph, shown, AROUND).split("\n")
