"""A Program: the graphs of one signature of one model, with what every pass did to them."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx

from zerofx.compat.graphs import LazyGraphModule, TreeSpec
from zerofx.hardware import Hardware, default_hardware
from zerofx.ir.meta import OutputInfo, Role, info
from zerofx.ir.sizes import Sizes
from zerofx.layout.buckets import Layout, Mesh
from zerofx.layout.placements import Part, R
from zerofx.layout.tiles import Tile
from zerofx.plan.plan import Plan
from zerofx.policy.schedules import Hop

if TYPE_CHECKING:  # only the reports' types: see the methods that import them
    from zerofx.tools.reports import Recorded
    from zerofx.tools.views.look import Look
    from zerofx.tools.views.memory import MemoryView
    from zerofx.tools.views.schedule import ScheduleView

_P = TypeVar("_P", bound="Program")


class Fact(Enum):
    """What a pass may require of a program, establish, or destroy."""

    CAPTURED = auto()
    TIED_MERGED = auto()
    PLACED = auto()
    STAGES_CUT = auto()
    SPLIT = auto()
    VALUES_AWAITED = auto()
    REGIONS_CUT = auto()
    BUCKETS_ASSIGNED = auto()
    PARAMS_SHARDED = auto()
    GRADS_REDUCED = auto()
    KEPT_GATHERED = auto()
    RELEASED = auto()
    PREFETCHED = auto()
    WAITS_SUNK = auto()
    SHARDS_OFFLOADED = auto()
    UPDATES_PLACED = auto()
    SLOTS_ASSIGNED = auto()


JOINT, FORWARD, BACKWARD = "joint", "forward", "backward"
NO_BUCKETS = Layout(buckets=(), mesh=Mesh.of())  # before they are assigned


@dataclass(frozen=True)
class Use:
    """One name of a parameter: its number among all names of the model, and the layer it is in.

    unit: that of the layer itself, which of a tied parameter may be another one than the first's.
    layer: as of `ParamInfo`.
    """

    number: int
    unit: str
    layer: str


@dataclass(frozen=True)
class ParamInfo:
    """One parameter as captured; tied names all map to the first (`canonical`).

    dtype: in which its value is kept. compute_dtype: in which the graphs read it.
    layer: "linear" or "embedding" for the weight of such a module. tile: which tile of a tiled
    parameter it is. style: how its layer may be cut over the tensor axis, see `layout.styles`, and
    `outputs` which of its dimensions counts the layer's outputs, -1 for none. part: how it is cut;
    then `shape` is that of a rank's part. uses: under which of its names which layer has it.
    positions: of the pipeline stages that hold it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    unit: str = ""
    aliases: tuple[str, ...] = ()
    compute_dtype: torch.dtype = None  # type: ignore[assignment]  # as dtype
    layer: str = field(default="", compare=False)
    tile: Tile | None = None
    style: str = field(default="", compare=False)
    outputs: int = field(default=-1, compare=False)
    part: Part | None = None
    uses: tuple[Use, ...] = field(default=(), compare=False)
    positions: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if self.compute_dtype is None:
            object.__setattr__(self, "compute_dtype", self.dtype)


@dataclass(frozen=True)
class Calling:
    """How the user's call maps to the graph and back.

    in_spec: tree of ((args...), {kwargs}); leaves are numbered in its order.
    tensor_leaves: numbers of the leaves that are tensors (graph inputs); others were constants.
    out_spec: tree of the result; `outputs` below give where each leaf comes from.
    constants: output leaf -> the Python value it always has (None, a number, a string).
    loss: output leaf that is differentiated, None where all float outputs are.
    detached: output leaves that require no grad in eager PyTorch, and so none here.
    dropped: names of outputs of unknown types left out (a KV cache).
    left: what each call leaves in attributes of the model that forward does not look at; each has
        `apply(model)`.
    """

    in_spec: TreeSpec
    out_spec: TreeSpec
    tensor_leaves: tuple[int, ...]
    constants: dict[int, Any] = field(default_factory=dict)
    output_names: tuple[str, ...] = ()
    loss: int | None = None
    differentiable: tuple[int, ...] = ()
    detached: tuple[int, ...] = ()
    dropped: tuple[str, ...] = ()
    left: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Reference:
    """What the captured graph computes, as digests that `verify` compares every rewrite with.

    outputs: label ("grad wte.weight", "output #1") -> digest of the value's whole expression.
    values: short digests of all values, to name the first one that differs.
    """

    outputs: dict[str, str]
    values: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Record:
    """What a program was behind a pass, in full.

    comm_bytes: what a rank sends in a step; peak_bytes: the most that it holds in one.
    """

    comm_bytes: int = 0
    peak_bytes: int = 0
    header: str = ""
    body: str = ""


@dataclass(frozen=True)
class Entry:
    """One line of a program's history; its record is made when first asked for."""

    pass_spec: str
    summary: str
    num_nodes: int
    record: Callable[[], Record] = field(default=Record, repr=False, compare=False)

    @property
    def comm_bytes(self) -> int:
        """What a rank sends in a step."""
        return self.record().comm_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a rank holds in a step."""
        return self.record().peak_bytes

    @property
    def header(self) -> str:
        return self.record().header

    @property
    def dump(self) -> str:
        """The program's text behind the pass, identical layers once."""
        return f"# {self.header}\n\n{self.record().body}"


@dataclass(frozen=True)
class Decision:
    """What became of one value or bucket under the plan's budget, and why.

    subject: a node's or a bucket's name. choice: "keep", "recompute", "keep gathered", ...
    """

    subject: str
    module: str
    line: str
    choice: str
    nbytes: int
    why: str


@dataclass(frozen=True)
class Loop:
    """How the training loop goes through a step: backwards a step, all but the last under no_sync
    or not.
    """

    accumulation: int = 1
    no_sync: bool = False


@dataclass(frozen=True)
class Wire:
    """A value that one pipeline stage makes and a later one reads, or a gradient on its way back.

    source, target: positions of the stages. graph: in which of a stage's graphs it is sent and
    received. output, leaf: its numbers among what the source's graph returns and the target's
    takes. value: a fake of it. digest: of its expression, which `verify` finds on both sides.
    lies: how it lies over the tensor axis, with the shape of the whole.
    """

    name: str
    source: int
    target: int
    graph: str
    output: int
    leaf: int
    value: torch.Tensor = field(compare=False, repr=False)
    digest: str
    lies: tuple[Any, Any] = (R, ())


@dataclass(frozen=True)
class Stage:
    """Which part of a pipeline a program is: the pipeline stage at `position`, of `size` in all.

    wires: all of the pipeline, in the order in which each stage sends and takes them.
    results: the user's outputs, each with the stage that makes it. trained: the parameters that any
    stage has gradients for. num_leaves, num_outputs: how many the user's call has; those of wires
    are numbered from there. saved_bytes: what each stage of the same rank saves of a micro-batch,
    in order; none until all are known.
    """

    position: int = 0
    size: int = 1
    wires: tuple[Wire, ...] = ()
    results: tuple[Wire, ...] = ()
    trained: tuple[str, ...] = ()
    num_leaves: int = 0
    num_outputs: int = 0
    saved_bytes: tuple[int, ...] = ()

    @property
    def hops(self) -> tuple[Hop, ...]:
        """All that crosses, as schedules know it, in the order in which it is sent."""
        return tuple(Hop(w.graph, w.source, w.target, w.name) for w in self.wires)

    def taken(self, graph: str) -> tuple[Wire, ...]:
        """Return what this stage's graph receives."""
        return tuple(w for w in self.wires if w.graph == graph and w.target == self.position)

    def sent(self, graph: str) -> tuple[Wire, ...]:
        """Return what this stage's graph sends."""
        return tuple(w for w in self.wires if w.graph == graph and w.source == self.position)


@dataclass(frozen=True)
class Pool:
    """The slots that the programs of one model share: their bytes, and which stay between steps."""

    sizes: tuple[int, ...] = ()
    stay: frozenset[int] = frozenset()


class Unproved(Enum):
    """Why a program has no reference to be compared with."""

    NOT_YET = "merge-tied has not run"
    GIVEN_UP = "the user accepts other mathematics than was captured"


@dataclass(kw_only=True)
class Program(ABC):
    """The compiler's unit of work: `Captured` until it has a plan, `Planned` from there on.

    What asks for graphs alone takes a Program; what asks for a plan or a layout takes a Planned.

    graphs: {"joint"} after capture of a training call, {"forward"} for an inference call,
        {"forward", "backward"} after `split`.
    outputs: per graph, what each element of its output tuple stands for.
    params: canonical name -> ParamInfo, in registration order.
    compute_dtype: what capture was asked to compute in; None if the user asked for no format, so
        that each parameter keeps its own.
    captured: the captured graph as ranks compare it, one operator per line; empty if it is not.
    sizes: the sizes of inputs that vary from call to call, none if all are as they were captured.
    """

    graphs: dict[str, fx.GraphModule]
    outputs: dict[str, tuple[OutputInfo, ...]]
    calling: Calling
    params: dict[str, ParamInfo]
    buffers: tuple[str, ...] = ()
    model_name: str = "model"
    is_training: bool = True
    compute_dtype: torch.dtype | None = None
    captured: str = field(default="", repr=False)
    sizes: Sizes = field(default_factory=Sizes)

    @abstractmethod
    def planned(self) -> Planned:
        """Return the program as passes and analyses take it; the graphs are shared, not copied."""

    def graph(self, name: str) -> fx.Graph:
        return self.graphs[name].graph

    def placeholders(self, graph: str, role: Role | None = None) -> list[fx.Node]:
        """Return the placeholders of a graph, all or those of one role, in order."""
        nodes = placeholders(self.graph(graph))
        return [n for n in nodes if role is None or info(n).role is role]

    def results(self, graph: str) -> list[Any]:
        """Return the elements of a graph's output tuple (nodes, or None)."""
        return list(self.graph(graph).output_node().args[0])  # type: ignore[arg-type]

    # Each report imports its view when it is called, so that training loads none of them.
    def dump(self, level: str = "nodes") -> str:
        """Return the program as text: level summary, units, regions, nodes or full."""
        from zerofx.ir.dump import dump_program

        return dump_program(self, level=level)

    def schedule(self, basis: str = "aten") -> ScheduleView:
        """Return what runs when in each lane: print it, or take its `to_dict()`.

        basis: as in `memory`.
        """
        from zerofx.tools.reports import schedule_of

        return schedule_of(self, basis)

    def memory(self, **options: Any) -> MemoryView:
        """Return what a rank holds, with `peak_bytes`: print it, or take its `to_dict()`.

        options: `basis="aten"` (the default) counts regions op by op, `"compiled"` as Inductor
            compiles them, which takes a compile of those that the cache lacks; `optimizer_bytes`
            per element; `keeps_results`, whether the loop holds all results until step() or the
            loss alone (the default); `accumulation`, `no_sync`; `sizes`, such as {"s0_1": 512},
            values for sizes that vary (`program.sizes` has their names), instead of the largest
            that had been seen when the program was compiled.
        """
        from zerofx.tools.reports import memory_of

        return memory_of(self, **options)

    def look(
        self,
        recording: Recorded = None,
        hardware: Hardware | str | os.PathLike[str] | None = None,
        basis: str = "aten",
    ) -> Look:
        """Return the lanes over time: print it, or write its `page` or its `trace` for Perfetto.

        recording: what `zerofx.record` found of this program, or the files it was saved in.
        hardware: for which times are predicted: a name, a file, a description.
        basis: as in `memory`.
        """
        from zerofx.tools.reports import look_at

        return look_at(self, recording, hardware, basis=basis)

    def view(self, path: str | os.PathLike[str], passes: bool = True, **beside: Any) -> Path:
        """Write one offline HTML page: lanes over time, memory, every pass and decision.

        passes: with what each pass changed, for which all of them run again. beside: as in `look`.
        """
        return self.look(**beside).page(path, passes)

    def clone(self: _P) -> _P:
        """Copy the graphs; fake values and infos are shared, nodes are not."""
        graphs: dict[str, fx.GraphModule] = {
            k: LazyGraphModule(g, copy_graph(g.graph)) for k, g in self.graphs.items()
        }
        return replace(self, graphs=graphs, outputs=dict(self.outputs))


@dataclass(kw_only=True)
class Captured(Program):
    """What capture makes of one call of a model: graphs without communication, and no plan yet."""

    def planned(self) -> Planned:
        """Return the program under the default plan, with no pass run on it.

        The pipeline puts its own plan in place of that one; the reports take it as it is, for
        no plan changes what a program without communication holds and computes.
        """
        shared = {f.name: getattr(self, f.name) for f in fields(Program)}
        return Planned(plan=Plan(), **shared)


@dataclass(kw_only=True)
class Planned(Program):
    """A program with the plan that it is compiled for, which passes rewrite one by one.

    world_size: ranks; 1 until buckets are assigned.
    hardware: what it is planned for.
    layout: where each parameter lies; without buckets until they are assigned (`is_laid_out`).
    slot_bytes: the bytes of each slot; none until slots are assigned.
    reference: what the captured graph computes, taken by `merge-tied`; or why it is missing.
    signature: digest of inputs, parameters and computation: equal for interchangeable programs;
        empty until the reference is taken.
    directory: the emitted directory that the program was loaded from; None for one that was not,
        which has no files to quote in an error or to run as they are.
    decisions: what the budget decided, each with its reason.
    loop: what memory is counted for, and the budget was solved for.
    pool: the slots that other programs of the model need too.
    stage: which part of a pipeline it is; the only one where the plan has no pipeline.
    """

    plan: Plan
    world_size: int = 1
    hardware: Hardware = field(default_factory=default_hardware, repr=False)
    layout: Layout = NO_BUCKETS
    facts: frozenset[Fact] = frozenset()
    history: list[Entry] = field(default_factory=list)
    slot_bytes: tuple[int, ...] = ()
    reference: Reference | Unproved = Unproved.NOT_YET
    signature: str = ""
    directory: Path | None = None
    decisions: tuple[Decision, ...] = ()
    loop: Loop = field(default_factory=Loop)
    pool: Pool = field(default_factory=Pool)
    stage: Stage = field(default_factory=Stage)

    @property
    def is_laid_out(self) -> bool:
        """Whether buckets are assigned, so that the layout has every parameter."""
        return Fact.BUCKETS_ASSIGNED in self.facts

    def planned(self) -> Planned:
        return self

    def emit(self, directory: str | os.PathLike[str]) -> Path:
        """Write the module that runs into a directory."""
        from zerofx.codegen.emit import emit

        return emit(self, directory)

    def clone(self) -> Planned:
        return replace(super().clone(), history=list(self.history))


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """Return a graph's placeholders: nothing stands before or between them."""
    return list(takewhile(lambda n: n.op == "placeholder", graph.nodes))


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copy a graph node for node, keeping names and sharing metadata values."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        out = new.node_copy(node, lambda n: env[n])
        out.meta = copy.copy(node.meta)
        out.name = node.name
        env[node] = out
    return new
