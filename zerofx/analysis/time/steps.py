"""The schedule's steps: one per region, launch, wait or release, in execution order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from zerofx.analysis.memory.memory import Memory, memory
from zerofx.analysis.memory.storage import Compiled
from zerofx.ir.graphs import is_glue
from zerofx.ir.meta import info
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import STEPS, Kind, kind_of, launch_of, spec_of
from zerofx.ir.spec import Lane as Lane


@dataclass(frozen=True)
class Step:
    """One step of a schedule.

    kind: "region", "pack", "launch", "wait", "release", "update" or "sync".
    verb: the kind of a launch: "AG", "RS", "AR", "BC", "D2H", "H2D", "RD" or "WR".
    bucket: the bucket that it moves; for a copy to or from the host, the number of its value.
    heaviest: the most expensive op of a region, or "" if there is none to name.
    is_value: it copies a value, which `bucket` numbers, rather than a bucket's shard or gradient.
    resident_bytes: the most bytes that the rank holds during the step.
    name: unique in the program; it identifies measurements of a step: "forward region
        3", "forward AG b0" (a launch, and what it moves), "forward AG b0 wait".
    times: the step's half-open range of `Memory.life`'s times.
    """

    index: int
    graph: str
    lane: Lane
    kind: str
    unit: str
    bucket: int = -1
    verb: str = ""
    heaviest: str = ""
    num_nodes: int = 0
    region: int = -1
    is_value: bool = False
    resident_bytes: int = 0
    name: str = ""
    times: tuple[int, int] = (0, 0)

    @property
    def is_backward(self) -> bool:
        return self.graph == BACKWARD


@dataclass(frozen=True)
class StepList:
    """All steps of forward and backward, and the memory report they were computed with."""

    steps: tuple[Step, ...]
    memory: Memory

    @property
    def peak_step(self) -> int:
        peak = max((s.resident_bytes for s in self.steps), default=0)
        return next((s.index for s in self.steps if s.resident_bytes == peak), 0)


_HEAVY = ("convolution", "mm", "attention", "embedding", "norm", "softmax")  # most expensive first


def schedule(
    program: Planned, compiled: Compiled | None = None, keeps_results: bool = False
) -> StepList:
    """Return the program's steps with the bytes resident at each; see `memory`."""
    report = memory(program, compiled=compiled, keeps_results=keeps_results)
    found: list[Step] = []
    taken: Counter[str] = Counter()
    for graph, nodes, first in _groups(program, report):
        last = first + len(nodes)
        resident = max(report.curve[first:last], default=0)
        step = _step(len(found), graph, nodes, resident)
        name = _name(step)
        taken[name] += 1
        if taken[name] > 1:
            name = f"{name} ({taken[name]})"
        found.append(replace(step, name=name, times=(first, last)))
    return StepList(tuple(found), report)


def _name(step: Step) -> str:
    """Return the name of a step, which several steps may share."""
    if step.kind == "region":
        return f"{step.graph} region {step.region}"
    if step.kind == "sync" and not step.is_value:
        return f"{step.graph} sync"
    what = f"{'v' if step.is_value else 'b'}{step.bucket}"
    if step.kind == "sync":
        return f"{step.graph} {step.verb} {what}"
    if step.kind in ("launch", "wait"):
        return f"{step.graph} {step.verb} {what}{' wait' if step.kind == 'wait' else ''}"
    return f"{step.graph} {step.kind} {what}"


def _groups(program: Planned, report: Memory) -> Iterator[tuple[str, list[fx.Node], int]]:
    """Yield (graph, nodes, time of the first) for each step; other nodes join the previous step."""
    nodes: list[fx.Node] = []
    graph, first, key = "", 0, None
    for time, (where, node) in enumerate(report.life.nodes):
        here = _key(where, node)
        if here is None or here == key:
            if nodes:
                nodes.append(node)
            continue
        if nodes:
            yield graph, nodes, first
        graph, nodes, first, key = where, [node], time, here
    if nodes:
        yield graph, nodes, first


def _key(graph: str, node: fx.Node) -> tuple | None:
    """Return the key of a node's step, or None for nodes without a step of their own."""
    if node.op != "call_function" or is_glue(node):
        return None
    kind = kind_of(node)
    if kind is not None:
        return (graph, node) if kind in STEPS else None
    return graph, "region", info(node).region


def _step(index: int, graph: str, nodes: list[fx.Node], resident: int) -> Step:
    node, where = nodes[0], info(nodes[0])
    spec = spec_of(node)
    if spec is not None:
        of = spec_of(launch_of(node)) if spec.kind is Kind.WAIT else spec
        assert of is not None and of.lane is not None, f"{of} takes a step, but has no lane"
        is_sync = spec.kind is Kind.SYNC and not spec.is_value
        return Step(
            index, graph, of.lane, spec.kind.value, "" if is_sync else where.unit,
            -1 if is_sync else where.index, of.verb, is_value=of.is_value, resident_bytes=resident,
        )  # fmt: skip
    compute = [n for n in nodes if n.op == "call_function" and spec_of(n) is None]
    return Step(
        index, graph, Lane.COMPUTE, "region", _unit(compute), heaviest=_heaviest(compute),
        num_nodes=len(compute), region=-1 if where.region is None else where.region,
        resident_bytes=resident,
    )  # fmt: skip


def _unit(nodes: list[fx.Node]) -> str:
    return next((info(n).unit for n in nodes if info(n).unit), "")


def _heaviest(nodes: list[fx.Node]) -> str:
    """Return the most expensive kind of op among `nodes`: `convolution`, `mm`, `attention`."""
    names = {str(getattr(n.target, "__name__", n.target)) for n in nodes}
    return next((word for word in _HEAVY if any(word in name for name in names)), "")
