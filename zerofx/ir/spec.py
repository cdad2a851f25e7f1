"""Op specs: one declaration per zerofx op, which every part of the compiler queries.

Passes insert ops, codegen writes and reads them, verify proves them, and the planner predicts their
memory and time. None of these refers to an op by name. Each queries its `OpSpec`, which is declared
once, in `zerofx/ops/` or in an external package. Only the op's own definition, the pass that
inserts it and its method of the engine name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.node import has_side_effect

from zerofx.compat.graphs import OpOverload
from zerofx.layout.buckets import Layout, Mesh
from zerofx.layout.tiers import Tier
from zerofx.policy import reduction
from zerofx.policy.exchange import Receives
from zerofx.policy.reduction import Leg
from zerofx.runtime.graph_calls import current_calls
from zerofx.runtime.schedule import add_method


class Kind(Enum):
    """The action of an op in a schedule. Only `wait` may read the result of a launch."""

    LAUNCH = "launch"  # starts a transfer; its result may be read after its wait
    WAIT = "wait"  # completes a transfer; returns its result
    MAKE = "make"  # allocates memory or creates a value immediately
    VIEW = "view"  # views a part of a gathered bucket
    PACK = "pack"  # writes gradients into its first argument
    STORE = "store"  # makes p.grad: moves a reduced slice there, or hands whole gradients over
    UPDATE = "update"  # runs the optimizer on a shard, in place
    RELEASE = "release"  # drops a gathered copy
    SYNC = "sync"  # a collective that is launched and waited for in one call
    PAUSE = "pause"  # hands results out; what follows runs when the schedule comes back to it
    FREE = "free"  # frees the memory of a slot that holds nothing any more


STEPS = frozenset({Kind.LAUNCH, Kind.WAIT, Kind.RELEASE, Kind.PACK, Kind.UPDATE, Kind.SYNC})


class Carries(Enum):
    """The content that an op moves, creates or consumes."""

    PARAMETERS = "a bucket's parameters, whole"
    SHARD = "this rank's shard of a bucket"
    GRADIENTS = "a bucket's gradients, whole"
    REDUCED = "this rank's slice of reduced gradients"
    VALUE = "a value of the model's"  # numbered as a value, not as a bucket
    BUFFERS = "the model's buffers"
    NOTHING = "whatever its argument holds"


class Holds(Enum):
    """The origin of the content of a range of memory, as verify follows it."""

    GATHERED = "gathered"  # an all-gather: alive from launch to release
    RESIDENT = "resident"  # refreshed in place: stays between calls
    KEPT = "kept"  # gathered in forward, saved whole for backward
    SHARD = "shard"  # this rank's slice of a bucket
    PARAM = "parameter"  # a full parameter, before sharding
    STATE = "state"  # a module buffer or user input that forward updates afterwards
    PACKED = "packed"  # a gradient buffer, until its reduction has been waited for
    REDUCED = "reduced"  # the result of a reduction
    LEAVING = "offloaded"  # a value whose memory is freed when its copy completes
    HOSTED = "hosted"  # its copy on the host
    STORED = "stored"  # its copy on NVMe
    RELOADED = "reloaded"  # its copy back on the device
    CONVERTED = "converted"  # a value after a change of placement
    STAGED = "shard read from NVMe"  # a shard's copy in host memory
    SECONDARY = "secondary shard"  # a part of a gathered bucket, from forward to backward
    NEAR = "reloaded shard"  # the device copy of a shard kept off the device


class _InOrder(type):
    """A metaclass that iterates over the instances of its class in order of creation."""

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls._made.values())  # type: ignore[attr-defined]


class Lane(str, metaclass=_InOrder):
    """A sequence of steps that run one after the other; there is one lane per name.

    An op that needs a lane of its own creates it: `Lane("block gather")`. Views, timelines and
    recordings show it after the existing ones.
    """

    _made: ClassVar[dict[str, Lane]] = {}

    COMPUTE: ClassVar[Lane]
    GATHER: ClassVar[Lane]
    REDUCE: ClassVar[Lane]
    HOST: ClassVar[Lane]
    D2H: ClassVar[Lane]
    H2D: ClassVar[Lane]
    NVME: ClassVar[Lane]
    TO_NVME: ClassVar[Lane]
    UPDATE: ClassVar[Lane]
    VALUES: ClassVar[Lane]

    def __new__(cls, name: str) -> Lane:
        if name not in cls._made:
            cls._made[name] = super().__new__(cls, name)
        return cls._made[name]

    @property
    def value(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Lane, (str(self),)


Lane.COMPUTE = Lane("compute")
Lane.GATHER = Lane("gather")
Lane.REDUCE = Lane("reduce")
Lane.HOST = Lane("host")
Lane.D2H = Lane("to host")
Lane.H2D = Lane("from host")
Lane.NVME = Lane("from nvme")
Lane.TO_NVME = Lane("to nvme")
Lane.VALUES = Lane("values")  # collectives of the model's own values, over a tensor axis
Lane.UPDATE = Lane("host update")  # the optimizer on states kept off the device


@dataclass(frozen=True)
class Exact:
    """The proof erases the op: its result is bitwise equal to what was sent."""

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True)
class Bounded:
    """The proof erases the op but records its error.

    relative: the largest difference of an element from the sent value, relative to the largest
        magnitude of its block. block: the number of adjacent elements of a rank's part that form a
        block.
    """

    relative: float
    block: int

    def __str__(self) -> str:
        return f"within {self.relative:.3g} of the largest of {self.block} neighbours"


@dataclass(frozen=True)
class Capped:
    """The op gives some rows no slot if there are more than an expert's capacity.

    The proof compares with the call as it is, after the pass that has inserted it.
    """

    def __str__(self) -> str:
        return "without the rows beyond each expert's capacity"


@dataclass(frozen=True)
class Payload:
    """The data that one launch moves. what: the collective's kind or the copy's lane of traffic.

    axis: the mesh axis of a collective, if it is not the op's.
    """

    what: str
    nbytes: int
    itemsize: int
    axis: str = ""


def _nothing_moved(*_: Any) -> list[Payload]:
    return []


def _takes_no_time(walk: Any, node: fx.Node) -> None:
    pass


@dataclass(frozen=True, eq=False)
class OpSpec:
    """The complete declaration of one op.

    For torch
        schema: as for torch.library. fake: the shape rule. run: the action of a node when a graph
            is executed: `run(calls, *args)`, with `runtime.graph_calls.GraphCalls`. has_effect: the
            node is kept even if nothing reads its result.
    Identity
        kind, carries; axis: the mesh axis that it communicates over, "" for a local op. bucket,
            slot: positions of these arguments, or None. gradients: the position of a list of
            gradients, which a list of their offsets in the bucket follows. stays: its result is in
            memory that persists between calls. in_backward: it is allowed only in backward. lands:
            the tier of its result. takes: inputs that it may read although no other op may.
    Time
        lane, verb ("AG") and the meaning of the verb. task: appends its tasks to a
            `analysis.task_walk.Walk`; finishes: for a launch, those of its wait once the data is
            there. sends: the collectives of a node; `moves`: its copies between
            tiers; both as `Payload` (see `analysis.traffic`).
    Memory
        hold: the storages of its result (see `analysis.places.Places`). arrive: the same
            for the wait of a launch. borrows: for a reduction, whether it
            receives into the buffers of its axis; legs: its collectives, one after the other.
            receives: for a collective of values, the part of
            these buffers that it borrows over gloo: `receives(node, ranks, is_native)`, where
            is_native says whether a full buffer of a given number of bytes is reduced natively.
            is_static: dropping its result frees nothing. adds, frees: bytes of the device that the
                op allocates and frees, for the columns of a dump.
    Names and code
        stem: the name of its result; arrives_as: of its wait's result. method: the engine's method,
            which emitted code calls as `rt.<method>`; runtime: that method, called with the engine,
            for an op that the engine has no method for. write: its statement; `read`: the reverse
            (see `codegen.schedule.Function`, `codegen.load_calls.Calls`). place: text before its
            unit in dumps.
    Placement over the ranks of an axis
        lies: for a conversion, the placement of its result: `lies(now, shape, args, ranks)`, with
            its argument's placement and whole shape; a returned text states what it requires.
    Proof
        order: checks it and records its effect on memory (see `ir.order.Order`); end: the check of
            its wait. erase: the digest of its value (see `ir.verify_values.Numbering`). precision:
            `Exact`, `Bounded` or `Capped`. oracle: for the independent executor of the tests.
    """

    schema: str
    kind: Kind
    fake: Callable[..., Any]
    run: Callable[..., Any]
    order: Callable[[Any, fx.Node], None]
    erase: Callable[[Any, fx.Node], Any]
    has_effect: bool = False

    carries: Carries = Carries.NOTHING
    axis: str = ""
    bucket: int | None = None
    slot: int | None = None
    gradients: int | None = None
    stays: bool = False
    in_backward: bool = False
    lands: Tier = Tier.DEVICE
    takes: frozenset[Holds] = frozenset()

    lane: Lane | None = None
    verb: str = ""
    means: str = ""
    task: Callable[[Any, fx.Node], None] = _takes_no_time
    finishes: Callable[[Any, fx.Node], None] = _takes_no_time
    sends: Callable[[Any, fx.Node, int], list[Payload]] = _nothing_moved
    moves: Callable[[Any, str, fx.Node], list[Payload]] = _nothing_moved

    hold: Callable[[Any, fx.Node, int], tuple[Any, ...]] | None = None
    arrive: Callable[[Any, fx.Node, int], tuple[Any, ...]] | None = None
    borrows: Callable[[Any, fx.Node], bool] = field(default=lambda program, node: True)
    legs: Callable[[Mesh], tuple[Leg, ...]] = reduction.legs
    receives: Callable[[fx.Node, int, Callable[[int], bool]], Receives] | None = None
    is_static: Callable[[fx.Node, Layout], bool] = field(default=lambda node, layout: False)
    adds: Callable[[fx.Node], int] = field(default=lambda node: 0)
    frees: Callable[[fx.Node], int] = field(default=lambda node: 0)
    frees_at_wait: bool = False  # its input's device memory

    stem: str = ""
    arrives_as: Callable[[fx.Node], str] | None = None
    method: str = ""
    runtime: Callable[..., Any] | None = None
    write: Callable[[Any, fx.Node], tuple[str, ...]] | None = None
    read: Callable[..., Any] | None = None
    place: str = ""
    is_quiet: bool = False  # shown only by dumps at level "nodes"

    lies: Callable[..., Any] | None = None
    end: Callable[[Any, fx.Node, fx.Node], None] | None = None
    precision: Exact | Bounded | Capped = Exact()
    oracle: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """The op's name: `all_gather`."""
        return self.schema.split("(")[0]

    @property
    def call(self) -> str:
        """The method of the engine that emitted code calls."""
        return self.method or self.name

    @property
    def is_agreed(self) -> bool:
        """Whether ranks must launch it together."""
        return bool(self.axis)

    @property
    def is_sync(self) -> bool:
        """Whether it is a collective that is launched and waited for in one call."""
        return self.kind is Kind.SYNC

    @property
    def is_value(self) -> bool:
        """Whether its content is numbered as a value rather than as a bucket."""
        return self.carries is Carries.VALUE

    @property
    def is_gather(self) -> bool:
        """Whether it gathers a bucket's parameters from several ranks."""
        return self.kind is Kind.LAUNCH and self.carries is Carries.PARAMETERS

    @property
    def is_reduction(self) -> bool:
        """Whether it reduces a bucket's gradients."""
        return self.kind is Kind.LAUNCH and self.carries is Carries.GRADIENTS

    @property
    def is_handing_over(self) -> bool:
        """Whether it makes whole gradients p.grad, which nothing reduces."""
        return self.kind is Kind.STORE and self.carries is Carries.GRADIENTS

    @property
    def is_reload(self) -> bool:
        """Whether it copies a rank's shard to the device."""
        is_shard = self.kind is Kind.LAUNCH and self.carries is Carries.SHARD
        return is_shard and self.lands is Tier.DEVICE

    @property
    def is_copy(self) -> bool:
        """Whether it is a local launch that moves a value of the model."""
        return self.kind is Kind.LAUNCH and self.is_value and not self.is_agreed

    @property
    def is_exchange(self) -> bool:
        """Whether it launches a collective on a value of the model."""
        return self.kind is Kind.LAUNCH and self.is_value and self.is_agreed

    @property
    def is_move(self) -> bool:
        """Whether it is a local launch that moves a shard or a reduced slice."""
        return self.kind is Kind.LAUNCH and not self.is_agreed and not self.is_value


# -- the registry ---------------------------------------------------------------------------------
_LIB = torch.library.Library("zerofx", "DEF")
_SPECS: dict[OpOverload, OpSpec] = {}
_BY_ID: dict[int, OpSpec] = {}  # of the ops, which live as long: torch hashes an op in Python


def define(spec: OpSpec) -> OpOverload:
    """Register an op with torch and with zerofx; return the callable that graphs use.

    Raises:
        ValueError: an op of this name exists already.
    """
    name = spec.name
    if any(known.name == name for known in _SPECS.values()):
        raise ValueError(f"an op named {name} exists already. Give the new one another name.")

    def real(*args: Any, **kwargs: Any) -> Any:
        return spec.run(current_calls(), *args, **kwargs)

    _LIB.define(spec.schema)
    _LIB.impl(name, real if _asks_engine(spec) else spec.fake, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zerofx::{name}", spec.fake, lib=_LIB)
    op: OpOverload = getattr(torch.ops.zerofx, name).default
    if spec.has_effect:
        has_side_effect(op)
    if spec.runtime is not None:
        add_method(spec.call, spec.runtime)
    _SPECS[op] = _BY_ID[id(op)] = spec
    return op


def _asks_engine(spec: OpSpec) -> bool:
    return spec.kind is not Kind.VIEW  # a view is the same for every engine


def spec_of(node: fx.Node) -> OpSpec | None:
    """Return the spec of the op that a node calls, or None for compute and everything else."""
    return _BY_ID.get(id(node.target))


def spec_of_target(target: Any) -> OpSpec | None:
    """Return the spec of an op that graphs call, or None if it is none of zerofx."""
    return _BY_ID.get(id(target))


def target_of(spec: OpSpec) -> OpOverload:
    """Return the callable that graphs use for a spec."""
    return next(op for op, known in _SPECS.items() if known is spec)


def specs() -> tuple[OpSpec, ...]:
    """Return the specs of all ops, in the order in which they were declared."""
    return tuple(_SPECS.values())


def timed_calls() -> tuple[str, ...]:
    """Return the engine's methods that correspond to one step of a schedule each."""
    return tuple(spec.call for spec in specs() if spec.kind in STEPS)


def verb_of(lane: Lane) -> str:
    """Return the verb of a lane whose launches all go one way, such as between two tiers."""
    return next(s.verb for s in specs() if s.kind is Kind.LAUNCH and s.lane is lane)


def meanings() -> dict[str, str]:
    """Return the meaning of each launch's verb, in the order of the lanes."""
    order = list(Lane)
    told = [spec for spec in specs() if spec.verb and spec.lane is not None]
    told.sort(key=lambda s: (order.index(s.lane), s.kind is Kind.SYNC))  # type: ignore[arg-type]
    return {spec.verb: spec.means for spec in told}


def kind_of(node: fx.Node) -> Kind | None:
    """Return the kind of a node's op, or None for nodes that call no zerofx op."""
    spec = spec_of(node)
    return None if spec is None else spec.kind


def launch_of(wait: fx.Node) -> fx.Node:
    """Return the launch that a wait completes."""
    return wait.all_input_nodes[0]


def launched(node: fx.Node) -> OpSpec | None:
    """Return the spec of the launch that a wait completes, or None if the node is no such wait."""
    if kind_of(node) is not Kind.WAIT or kind_of(launch_of(node)) is not Kind.LAUNCH:
        return None
    return spec_of(launch_of(node))


def is_wait_of(node: fx.Node, test: Callable[[OpSpec], bool]) -> bool:
    """Return whether a node waits for a launch whose spec passes a test."""
    spec = launched(node)
    return spec is not None and test(spec)


def wait_for(launch: fx.Node) -> fx.Node:
    """Return the wait of a launch."""
    return next(u for u in launch.users if kind_of(u) is Kind.WAIT)


def is_reduction(node: fx.Node) -> bool:
    """Return whether a node launches the reduction of a bucket's gradients."""
    spec = spec_of(node)
    return spec is not None and spec.is_reduction


def is_exchange(node: fx.Node) -> bool:
    """Return whether a node launches a collective on a value of the model."""
    spec = spec_of(node)
    return spec is not None and spec.is_exchange


_LEAVING = frozenset({Kind.RELEASE, Kind.FREE})  # kinds that name a slot and take none


def takes_slot(node: fx.Node) -> bool:
    """Return whether a node's result may be in a slot."""
    spec = spec_of(node)
    return spec is not None and spec.slot is not None and spec.kind not in _LEAVING


def slot_of(node: fx.Node) -> int:
    """Return the slot of a node's result, or the slot that it releases; -1 if there is none."""
    spec = spec_of(node)
    position = None if spec is None else spec.slot
    if position is None or len(node.args) <= position:
        return -1
    return node.args[position]  # type: ignore[return-value]


def set_slot(node: fx.Node, slot: int) -> None:
    """Write a slot into a node that names one."""
    spec = spec_of(node)
    assert spec is not None and spec.slot is not None, f"{node} names no slot"
    node.args = (*node.args[: spec.slot], slot)


def gradients_of(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """Return the gradients that a node takes, each with its offset in the bucket."""
    spec = spec_of(node)
    if spec is None or spec.gradients is None:
        return []
    grads: Any = node.args[spec.gradients]
    offsets: Any = node.args[spec.gradients + 1]
    return list(zip(grads, offsets, strict=True))


def bucket_of(node: fx.Node) -> int:
    """Return the bucket that a node names, or -1."""
    spec = spec_of(node)
    position = None if spec is None else spec.bucket
    return -1 if position is None else node.args[position]  # type: ignore[return-value]
