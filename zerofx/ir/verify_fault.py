"""How a broken program is reported: what, where, and ten lines around the node."""

from __future__ import annotations

import linecache

from torch import fx

from zerofx.errors import ProgramError
from zerofx.ir.meta import Info, info
from zerofx.ir.program import Program

AROUND = 10


def fault(program: Program, graph: str, node: fx.Node, message: str) -> ProgramError:
    """Return the error for a broken invariant: the message, the user's line, and the surroundings.

    The surroundings are lines of schedule.py where the program was loaded from an emitted
    directory, else lines of the graph.
    """
    where = user_line(node)
    place = f" ({where})" if where and where not in message else ""
    lines = _file_lines(program, info(node)) or _graph_lines(program, graph, node)
    return ProgramError(f"{graph}: {message}{place}\n" + "\n".join(lines))


def user_line(node: fx.Node) -> str:
    """Return the user's line of a node, or of what it reads: communication has none itself."""
    for candidate in (node, *node.all_input_nodes):
        if info(candidate).line:
            return info(candidate).line
    return ""


def name_of(node: fx.Node) -> str:
    """Name a node for a message: by the user's name where it has one."""
    where = info(node)
    return where.name or node.name


def numbered(lines: list[str], first: int, marked: int) -> list[str]:
    """Return lines with their numbers, from `first` on, and an arrow at number `marked`."""
    return [
        f"{'-->' if i == marked else '   '} {i:4d}  {line}" for i, line in enumerate(lines, first)
    ]


def _file_lines(program: Program, where: Info) -> list[str]:
    if program.directory is None or not where.place:
        return []
    name, _, number = where.place.partition(":")
    return file_lines(str(program.directory / name), int(number))


def file_lines(path: str, marked: int) -> list[str]:
    """Return the ten lines of a file around one, headed by its path."""
    linecache.checkcache(path)
    lines = [line.rstrip("\n") for line in linecache.getlines(path)]
    first = max(1, marked - AROUND // 2)
    return [f"{path}:{marked}", *numbered(lines[first - 1 : first + AROUND - 1], first, marked)]


def _graph_lines(program: Program, graph: str, node: fx.Node) -> list[str]:
    nodes = list(program.graph(graph).nodes)
    at = nodes.index(node)
    first = max(0, at - AROUND // 2)
    rows = [one_line(n) for n in nodes[first : first + AROUND]]
    return numbered(rows, first, at)


def one_line(node: fx.Node) -> str:
    """Write a node as one short line."""
    text = node.format_node() or str(node)
    where = info(node)
    return "  # ".join(t for t in (text[:160], where.name or where.unit, where.line) if t)
