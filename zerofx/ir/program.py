"""Programs: the graphs of one signature of one model, with the history of the passes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import fx

from zerofx.compat.graphs import LazyGraphModule, TreeSpec, copied_node
from zerofx.hardware import Hardware, default_hardware
from zerofx.ir.meta import OutputInfo, Placed, Role, info
from zerofx.ir.sizes import Sizes
from zerofx.layout.buckets import Layout, Mesh
from zerofx.layout.placements import Part, R
from zerofx.layout.tiles import Tile
from zerofx.plan.plan import Plan
from zerofx.policy.schedules import Hop

if TYPE_CHECKING:  # only for the types of reports: see the methods that import them
    from zerofx.tools.reports import Recorded
    from zerofx.tools.views.look import Look
    from zerofx.tools.views.memory import MemoryView
    from zerofx.tools.views.schedule import ScheduleView

_P = TypeVar("_P", bound="Program")


class Fact(Enum):
    """A property of a program that a pass may require, establish, or destroy."""

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
    """One name of a parameter: its number among all names of the model, and its layer.

    unit: the unit of that layer, which for a tied parameter may differ from that of the first name.
    layer: as in `ParamInfo`.
    """

    number: int
    unit: str
    layer: str


@dataclass(frozen=True)
class ParamInfo:
    """One parameter as captured; tied names all map to the first (`canonical`).

    dtype: the format in which its value is kept. compute_dtype: the format in which the graphs read
        it.
    layer: "linear" or "embedding" for the weight of such a module. tile: the tile of a tiled
        parameter. style: how its layer may be cut over the tensor axis, see `layout.styles`.
    outputs: the dimension that counts the layer's outputs, or -1. part: its cut;
        then `shape` is that of a rank's part. uses: its names, each with its layer.
    positions: the pipeline stages that hold it. is_stack: it has one matrix for each expert.
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
    is_stack: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.compute_dtype is None:
            object.__setattr__(self, "compute_dtype", self.dtype)


@dataclass(frozen=True)
class Calling:
    """The mapping between the user's call and the graph.

    in_spec: tree of ((args...), {kwargs}); leaves are numbered in its order.
    tensor_leaves: numbers of the leaves that are tensors (graph inputs); others were constants.
    out_spec: tree of the result; the fields below give the origin of each leaf.
    constants: output leaf -> its constant Python value (None, a number, a string), with a `Size`
        for a number that depends on sizes which vary.
    loss: output leaf that is differentiated, or None if all float outputs are.
    detached: output leaves that require no grad in eager PyTorch, and therefore none here.
    dropped: names of omitted outputs of unknown types (a KV cache).
    left: changes that each call makes to attributes that forward does not read; each has
        `apply(model)`.
    ignored: numbers of the leaves that are parameters which the plan ignores.
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
    ignored: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reference:
    """The computation of the captured graph, as digests that `verify` compares every rewrite with.

    outputs: label ("grad wte.weight", "output #1") -> digest of the value's whole expression.
    values: short digests of all values, used to name the first one that differs.
    """

    outputs: dict[str, str]
    values: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Record:
    """The full state of a program after a pass.

    comm_bytes: bytes that a rank sends in a step; peak_bytes: the most bytes that it holds in a
        step.
    """

    comm_bytes: int = 0
    peak_bytes: int = 0
    header: str = ""
    body: str = ""


@dataclass(frozen=True)
class Entry:
    """One line of a program's history; its record is made on first access."""

    pass_spec: str
    summary: str
    num_nodes: int
    record: Callable[[], Record] = field(default=Record, repr=False, compare=False)

    @property
    def comm_bytes(self) -> int:
        """The bytes that a rank sends in a step."""
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
        """The program's text after the pass, with identical layers once."""
        return f"# {self.header}\n\n{self.record().body}"


@dataclass(frozen=True)
class Decision:
    """A decision on one value or bucket under the plan's budget, with its reason.

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
    """A training step: its number of backwards, and whether all but the last run under no_sync."""

    accumulation: int = 1
    no_sync: bool = False


@dataclass(frozen=True)
class Wire:
    """A value that one pipeline stage computes and a later one reads, or a gradient sent back.

    source, target: positions of the stages. graph: the graph of a stage in which it is sent and
        received. output, leaf: its position among the source graph's results and the target
        graph's inputs. value: a fake of it. digest: of its expression, which `verify` compares on
        both sides. lies: its placements, and the shapes of what it is a
        part of.
    """

    name: str
    source: int
    target: int
    graph: str
    output: int
    leaf: int
    value: torch.Tensor = field(compare=False, repr=False)
    digest: str
    lies: Placed = field(default_factory=lambda: Placed(R, ()))


Sum: TypeAlias = "tuple[Sum, Sum] | tuple[int, str]"
"""A pair of sums that are added, or the position of a pipeline stage and a summand's digest."""


@dataclass(frozen=True)
class Stage:
    """Which part of a pipeline a program is: the pipeline stage at `position`, of `size` in all.

    wires: all of the pipeline, in the order in which each stage sends and takes them. captured:
    label -> digest of each output of the whole program. sums: for a parameter that several stages
    may hold, its captured gradient as the sum of what these stages have.
    results: the user's outputs, each with the stage that makes it; handed: the gradients of ignored
    parameters, likewise. written: buffer -> the stage whose forward updates it. trained: the
    parameters that any stage has gradients for. num_leaves, num_outputs: how many the user's call
    has; those of wires are numbered from there. saved_bytes: what each stage of the same rank saves
    of a micro-batch, in order. resident_bytes: bucket -> its copy that one of these keeps gathered
    between steps. Both are empty until all of the rank's stages are known.
    """

    position: int = 0
    size: int = 1
    wires: tuple[Wire, ...] = ()
    results: tuple[Wire, ...] = ()
    handed: tuple[Wire, ...] = ()
    written: Mapping[str, int] = field(default_factory=dict)
    trained: tuple[str, ...] = ()
    captured: Mapping[str, str] = field(default_factory=dict)
    sums: Mapping[str, Sum] = field(default_factory=dict)
    num_leaves: int = 0
    num_outputs: int = 0
    saved_bytes: tuple[int, ...] = ()
    resident_bytes: Mapping[int, int] = field(default_factory=dict)

    def summands(self, name: str) -> dict[int, list[str]]:
        """Return what each stage adds up of a shared parameter's gradient: digests, in order."""
        found: dict[int, list[str]] = {}
        stack = [self.sums[name]]
        while stack:
            first, second = stack.pop()
            if isinstance(first, int):
                found.setdefault(first, []).append(str(second))
            else:
                stack += [second, first]  # type: ignore[list-item]
        return found

    @property
    def hops(self) -> tuple[Hop, ...]:
        """All that crosses, as schedules know it, in the order in which it is sent."""
        return tuple(Hop(w.graph, w.source, w.target, w.name) for w in self.wires)

    def taken(self, graph: str) -> tuple[Wire, ...]:
        """Return the wires that this stage's graph receives."""
        return tuple(w for w in self.wires if w.graph == graph and w.target == self.position)

    def sent(self, graph: str) -> tuple[Wire, ...]:
        """Return the wires that this stage's graph sends."""
        return tuple(w for w in self.wires if w.graph == graph and w.source == self.position)


@dataclass(frozen=True)
class Pool:
    """The slots that a model's programs share: their bytes, and which persist between steps."""

    sizes: tuple[int, ...] = ()
    stay: frozenset[int] = frozenset()


class Unproved(Enum):
    """The reason why a program has no reference to compare with."""

    NOT_YET = "merge-tied has not run"
    GIVEN_UP = "the user accepts other mathematics than was captured"


@dataclass(kw_only=True)
class Program(ABC):
    """The compiler's unit of work: `Captured` until it has a plan, `Planned` from then on.

    Code that needs only graphs takes a Program; code that needs a plan or a layout takes a Planned.

    graphs: {"joint"} after capture of a training call, {"forward"} for an inference call,
        {"forward", "backward"} after `split`.
    outputs: per graph, the meaning of each element of its output tuple.
    params: canonical name -> ParamInfo, in registration order.
    compute_dtype: the requested compute format; None if the user requested none and each parameter
        keeps its own.
    captured: the captured graph as ranks compare it, one operator per line; empty if there is none.
    sizes: the sizes of inputs that vary from call to call; empty if all are as captured.
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
        """Return the program for passes and analyses; the graphs are shared, not copied."""

    def graph(self, name: str) -> fx.Graph:
        return self.graphs[name].graph

    def placeholders(self, graph: str, role: Role | None = None) -> list[fx.Node]:
        """Return the placeholders of a graph, all or those of one role, in order."""
        nodes = placeholders(self.graph(graph))
        return [n for n in nodes if role is None or info(n).role is role]

    def results(self, graph: str) -> list[Any]:
        """Return the elements of a graph's output tuple (nodes, or None)."""
        return list(self.graph(graph).output_node().args[0])  # type: ignore[arg-type]

    # Each report imports its view when it is called, so that training does not load any of them.
    def dump(self, level: str = "nodes") -> str:
        """Return the program as text: level summary, units, regions, nodes or full."""
        from zerofx.ir.dump import dump_program

        return dump_program(self, level=level)

    def schedule(self, basis: str = "aten") -> ScheduleView:
        """Return the schedule of each lane: print it, or use its `to_dict()`.

        basis: as in `memory`.
        """
        from zerofx.tools.reports import schedule_of

        return schedule_of(self, basis)

    def memory(self, **options: Any) -> MemoryView:
        """Return the memory of a rank, with `peak_bytes`: print it, or use its `to_dict()`.

        options: `basis="aten"` (the default) counts regions op by op, `"compiled"` as Inductor
            compiles them, which compiles the regions missing from the cache; `optimizer_bytes`
            per element; `keeps_results`, whether the loop holds all results until step() or only
            the loss (the default); `accumulation`, `no_sync`; `sizes`, for example {"s0_1": 512},
            values for sizes that vary (`program.sizes` has their names), instead of the largest
            seen when the program was compiled.
        """
        from zerofx.tools.reports import memory_of

        return memory_of(self, **options)

    def look(
        self,
        recording: Recorded = None,
        hardware: Hardware | str | os.PathLike[str] | None = None,
        basis: str = "aten",
    ) -> Look:
        """Return the lanes over time: print them, or write the `page`, or the `trace` for Perfetto.

        recording: the result of `zerofx.record` for this program, or the files it was saved in.
        hardware: the hardware for which times are predicted: a name, a file, or a description.
        basis: as in `memory`.
        """
        from zerofx.tools.reports import look_at

        return look_at(self, recording, hardware, basis=basis)

    def view(self, path: str | os.PathLike[str], passes: bool = True, **beside: Any) -> Path:
        """Write one offline HTML page: lanes over time, memory, every pass and decision.

        passes: include the changes of each pass, for which all passes run again. beside: as in
            `look`.
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
    """The capture of one call of a model: graphs without communication, and no plan yet."""

    def planned(self) -> Planned:
        """Return the program under the default plan, with no pass run on it.

        The pipeline replaces the default plan by its own. The reports use it as it is, because
        no plan changes the memory and compute of a program without communication.
        """
        shared = {f.name: getattr(self, f.name) for f in fields(Program)}
        return Planned(plan=Plan(), **shared)


@dataclass(kw_only=True, repr=False)
class Planned(Program):
    """A program with the plan that it is compiled for, which passes rewrite one by one.

    world_size: ranks; 1 until buckets are assigned.
    hardware: the hardware that it is planned for.
    layout: the location of each parameter; without buckets until they are assigned (`is_laid_out`).
    slot_bytes: the bytes of each slot; empty until slots are assigned.
    reference: the computation of the captured graph, taken by `merge-tied`; or why it is missing.
    signature: digest of inputs, parameters and computation, equal for interchangeable programs;
        empty until the reference is taken.
    directory: the emitted directory that the program was loaded from. None for a program that was
        not loaded, which has no files to quote in an error or to execute.
    decisions: the decisions of the budget, each with its reason.
    loop: the training loop for which memory is counted and the budget was solved.
    pool: the slots that other programs of the model need too.
    stage: the program's stage of a pipeline; the only one if the plan has no pipeline.
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
    def has_loss_outside(self) -> bool:
        """Whether the caller computes the loss of a training call from its results."""
        return self.is_training and self.calling.loss is None

    @property
    def joins_results(self) -> bool:
        """Whether the caller is given results that lie together for all micro-batches.

        Each one is copied to its place there, and its gradient is a part of the whole gradient.
        """
        return self.has_loss_outside and self.stage.size > 1

    @property
    def is_laid_out(self) -> bool:
        """Whether buckets are assigned, so that the layout contains every parameter."""
        return Fact.BUCKETS_ASSIGNED in self.facts

    def planned(self) -> Planned:
        return self

    def __repr__(self) -> str:
        """Return one line; `dump()` shows the graphs."""
        where = f"stage {self.plan.stage}, world {self.world_size}, signature {self.signature[:8]}"
        return f"<program of {self.model_name}: {', '.join(self.graphs)}; {where}>"

    def emit(self, directory: str | os.PathLike[str]) -> Path:
        """Write the executable module into a directory."""
        from zerofx.codegen.emit import emit

        return emit(self, directory)

    def clone(self) -> Planned:
        return replace(super().clone(), history=list(self.history))


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """Return a graph's placeholders, which are its first nodes."""
    return list(takewhile(lambda n: n.op == "placeholder", graph.nodes))


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copy a graph node for node, keeping names and sharing metadata values."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = out = copied_node(new, node, env.__getitem__)
        if out.name != node.name:
            out.name = node.name
    return new
