"""Blame: maps an error raised inside a region to the user's line and to eager PyTorch's error.

None of this runs in a successful call. After a failure, the traceback still has the line of
schedule.py that called the region, and on ATen the statement within it. Both can be mapped to
nodes, which know their module and line. A compiled region only reports that some index is out of
bounds. The node is then found by running the operators that take indices once more, on ATen. Their
indices are computed from the inputs of the call and from buffers. Zeros without memory replace all
other values.
"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.capture.explain import shows_all
from zerofx.codegen.text import read_origin
from zerofx.compat.graphs import schema_of
from zerofx.errors import ZerofxError
from zerofx.ir.graphs import is_compute, is_random, regions
from zerofx.ir.meta import Phase, Role, info, value
from zerofx.ir.program import FORWARD, Planned

# A statement of schedule.py that calls a region or a fused kernel (written by codegen/schedule.py).
_CALL = re.compile(r"(?:.* = )?\w+\(args\)|[\w, ]+ = kernels\.\w+\(.*\)")
# From a kernel that Inductor compiled.
_CHECK = re.compile(r"index out of bounds: 0 <= \w+ < (\d+)")
_REFUSED = re.compile("bounds|range")  # ATen's message for such an index
_INDICES = frozenset({"index", "indices", "target"})  # arguments whose values are checked
_RAISE_INDEX_ERROR = frozenset(
    {"aten::embedding", "aten::index", "aten::nll_loss_forward", "aten::nll_loss2d_forward"}
)
_SHOWN = 4  # maximum number of places shown, if several are possible


@dataclass(frozen=True)
class Blame:
    """Finds the user's line for an exception raised by a call of one program."""

    program: Planned
    directory: Path

    def __call__(
        self, error: BaseException, leaves: Sequence[Any], buffers: Mapping[str, Tensor]
    ) -> BaseException:
        """Return the error to raise: the same one with the line added, or eager PyTorch's.

        leaves, buffers: the arguments of the call, as far as they are still known.
        """
        if not isinstance(error, Exception) or isinstance(error, ZerofxError):
            return error
        graph, nodes, failed = self._find(error.__traceback__)
        if not nodes:
            return error
        if failed is not None:
            return _with_text(error, _place(failed))
        has_memory = not isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if graph == FORWARD and has_memory:
            found = self._rerun(error, nodes, leaves, buffers)
        else:
            found = None
        if found is None:
            check = _CHECK.search(str(error))
            if check is None:
                return _with_text(error, _places(nodes))
            takers = [n for n in nodes if _takes_index(n)] or nodes
            kinds = {_op_name(n) for n in takers}
            kind = IndexError if kinds <= _RAISE_INDEX_ERROR else type(error)
            found = kind(f"index out of bounds: not in 0 to {int(check[1]) - 1}"), takers
        raised, takers = found
        raised.__cause__ = error if shows_all() else None
        raised.__suppress_context__ = True
        return _with_text(raised.with_traceback(None), _places(takers))

    # -- mapping frames to nodes ----
    def _find(self, trace: TracebackType | None) -> tuple[str, list[fx.Node], fx.Node | None]:
        """Return the graph, the nodes of the region that ran, and on ATen the node that failed."""
        schedule, inside = str(self.directory / "schedule.py"), self.directory / "regions"
        called: tuple[str, int] | None = None
        statement: tuple[str, int] | None = None
        for frame, line in traceback.walk_tb(trace):
            path = frame.f_code.co_filename
            if path == schedule:
                called = frame.f_code.co_name, line
            elif Path(path).parent == inside:
                statement = path, line
        if called is None:
            return "", [], None
        graph, nodes = self._region(schedule, *called)
        return graph, nodes, self._statement(nodes, *statement) if nodes and statement else None

    def _region(self, schedule: str, function: str, line: int) -> tuple[str, list[fx.Node]]:
        """Return the graph and the nodes that a line of schedule.py runs."""
        if self.program.directory is not None:  # the program was loaded: nodes know their lines
            place = f"schedule.py:{line}"
            for name, gm in self.program.graphs.items():
                found = [n for n in gm.graph.nodes if info(n).place == place and is_compute(n)]
                if found:
                    return name, found
            return "", []
        rows = linecache.getlines(schedule)[:line]
        if function not in self.program.graphs or not any(map(_is_call, rows[-1:])):
            return "", []
        first = max((i for i, r in enumerate(rows) if r.startswith("def ")), default=line)
        before = sum(map(_is_call, rows[first:]))
        every = list(regions(self.program.graph(function)).values())
        return function, every[before - 1] if 0 < before <= len(every) else []

    def _statement(self, nodes: list[fx.Node], path: str, line: int) -> fx.Node | None:
        """Return the node of a line in a region's file, which equal layers share."""
        rows = linecache.getlines(path)
        if self.program.directory is None:
            body = next((i for i, r in enumerate(rows, 1) if r == "    args.clear()\n"), line)
            before = [row for row in rows[body:line] if not row.startswith("    del ")]
            return nodes[len(before) - 1] if 0 < len(before) <= len(nodes) else None
        module, said = read_origin("".join(rows[line - 1 : line]))
        alike = (n for n in nodes if info(n).line == said and info(n).module.endswith(module))
        return next(alike, None)

    # -- eager PyTorch's error --------------------------------------------------------------------
    @torch.no_grad()
    def _rerun(
        self,
        error: Exception,
        nodes: list[fx.Node],
        leaves: Sequence[Any],
        buffers: Mapping[str, Tensor],
    ) -> tuple[Exception, list[fx.Node]] | None:
        """Run operators that take indices on ATen; return the first error raised, and its nodes.

        Returns None if no computable indices lead to the error of the compiled region.
        """
        is_check = _CHECK.search(str(error)) is not None
        gm = self.program.graphs[FORWARD]
        inside, wanted = set(nodes), _ancestors(a for n in nodes for a in n.all_input_nodes)
        known: dict[fx.Node, Any] = {}
        for node in gm.graph.nodes:
            if node in wanted and (given := _given(gm, node, leaves, buffers)) is not None:
                known[node] = given
            reads_index = node in inside and any(map(_is_index, node.all_input_nodes))
            if not is_compute(node) or is_random(node) or not (node in wanted or reads_index):
                continue
            unknown = [a for a in node.all_input_nodes if a not in known]
            if any(map(_is_index, unknown)) or (unknown and node not in inside):
                continue
            try:
                made = _run(node, known)
            except Exception as again:  # # noqa: BLE001  (returned for the caller to raise)
                is_same = str(again) == str(error) or (is_check and _REFUSED.search(str(again)))
                if node in inside and is_same:
                    return again, [node]
                continue
            if not unknown and node in wanted:
                known[node] = made
        return None


def _is_call(row: str) -> bool:
    return _CALL.fullmatch(row.partition("  # ")[0].strip()) is not None


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the index tensors among some nodes, with all nodes that they are computed from."""
    found: set[fx.Node] = set()
    waiting = [node for node in nodes if _is_index(node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _is_index(node: fx.Node) -> bool:
    val = value(node)
    return isinstance(val, Tensor) and not (val.is_floating_point() or val.is_complex())


def _takes_index(node: fx.Node) -> bool:
    schema = schema_of(node.target)
    named = schema is not None and any(a.name in _INDICES for a in schema.arguments)
    return named and any(map(_is_index, node.all_input_nodes))


def _given(
    gm: fx.GraphModule, node: fx.Node, leaves: Sequence[Any], buffers: Mapping[str, Tensor]
) -> Tensor | None:
    """Return the tensor that the call received for a placeholder, or that the graph holds."""
    if node.op == "get_attr":
        return getattr(gm, str(node.target))  # type: ignore[no-any-return]
    where = info(node)
    if where.role is Role.BUFFER:
        return buffers.get(where.name)
    is_leaf = where.role is Role.INPUT and where.index < len(leaves)
    return leaves[where.index] if is_leaf else None


def _run(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """Run a node on ATen; unknown values are replaced by zeros of the right shape."""

    def argument(read: fx.Node) -> Any:
        if read in known:
            return known[read]
        val = value(read)
        return torch.zeros((), dtype=val.dtype, device=val.device).expand(val.shape)

    args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
    return node.target(*args, **kwargs)  # type: ignore[operator]


# -- text ------------------------------------------------------------------------------------------
def _op_name(node: fx.Node) -> str:
    schema = schema_of(node.target)
    return schema.name if schema else getattr(node.target, "__name__", "")


def _place(node: fx.Node) -> str:
    """Return "(model.py:14 in head: aten.embedding)", or "" if the line is unknown."""
    where, op = info(node), _op_name(node).replace("::", ".")
    phase = "backward of " if where.phase is Phase.BACKWARD else ""
    return f"({phase}{where.line} in {where.module or 'the model'}: {op})" if where.line else ""


def _places(nodes: Sequence[fx.Node]) -> str:
    """Return the possible places, in execution order."""
    found = {(info(n).line, info(n).module or "the model"): n for n in nodes if info(n).line}
    if len(found) == 1 and len(nodes) == 1:
        return _place(nodes[0])
    said = [f"{line} in {module}" for line, module in found]
    if not said:
        return ""
    more = len(said) - _SHOWN
    shown = said if more <= 0 else [*said[: _SHOWN - 1], f"... ({more} more)", said[-1]]
    one_of = "one of: " if len(said) > 1 else ""
    phase = "backward of " if info(nodes[0]).phase is Phase.BACKWARD else ""
    return f"({phase}{one_of}{', '.join(shown)})"


def _with_text(error: Exception, text: str) -> Exception:
    """Append a text to an error's message; its type stays."""
    if not text:
        return error
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} {text}",)
    elif (add := getattr(error, "add_note", None)) is not None:  # Python 3.11 and later
        add(text)
    return error
