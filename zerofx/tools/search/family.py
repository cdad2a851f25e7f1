"""The variants of a model in a search, each captured once, or one captured program."""

from __future__ import annotations

import copy
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zerofx.analysis.memory.memory import ADAMW_STATE_BYTES
from zerofx.analysis.time.forecast import batch
from zerofx.capture import capture
from zerofx.capture.capture import describe_uncalled
from zerofx.capture.formats import compute_dtypes
from zerofx.capture.units import find_units
from zerofx.compat.graphs import pytree
from zerofx.errors import CaptureError, TargetError, as_sentence
from zerofx.ir.program import Loop, ParamInfo, Planned, Program
from zerofx.passes.cut_stages import CutStages, cut, divided_units, unit_positions
from zerofx.passes.order import Setting
from zerofx.passes.parts import with_parts
from zerofx.passes.pipeline import Proof, resume, run
from zerofx.passes.placement import capture_options, compute_dtype, module_dtypes
from zerofx.plan.parts import Parallel
from zerofx.plan.plan import Plan
from zerofx.tools.search.excerpts import Excerpt, excerpt, lengths, rank_kinds
from zerofx.tools.search.lengthen import lengthened
from zerofx.tools.targets import Target, own_errors
from zerofx.tools.words import counted

# Slots, prefetches and transfers span some layers, and slots alternate between neighbours. From
# this many layers on, every two more layers add the same.
SETTLED = 6
STRIDE = 2
MOST_SETTLED = 12  # no further numbers of layers are tried above it
BEFORE_BUCKETS = "spill-activations"  # the last pass before the layout of parameters matters
PLACED = "place"  # the last pass on the whole model, after which pipeline stages are cut
CUT = CutStages.name

# Fields of `Parallel` that say nothing about values: how a pipeline runs, and where it is cut.
WHOLE: dict[str, Any] = {
    "micro_batches": "auto", "cuts": "auto", "accumulate": "whole", "shared": (),
}  # fmt: skip

# To capture and to place a model takes longer than to cut it. So ranks of all kinds are priced in
# one model, whose length is a multiple of this. Layers that are left over are another rank's.
SHARED_LENGTH = 8

_P = TypeVar("_P", bound=Program)

# Called with the next action, and whether it is of interest until the following one only.
Says = Callable[[str, bool], None]


def silent(what: str, is_passing: bool) -> None:
    """Ignore the message."""


@dataclass(frozen=True)
class RankPrograms:
    """The programs of ranks with equal stages, of the first of them.

    positions: of the ranks. variants: the rank's programs, in one model or in two of different
    lengths, with `fewer` layers less in each stage of the first.
    """

    positions: tuple[int, ...]
    variants: tuple[tuple[Planned, ...], ...]
    fewer: int = 0

    def extrapolated(self, values: tuple[float, ...]) -> float:
        """Return the value for all layers from that of each variant."""
        if len(values) == 1:
            return values[0]
        short, longer = values
        return short + (longer - short) * self.fewer / STRIDE


# The positions of ranks of a kind, their short pipelines, and the layers less in the first of them.
Kind = tuple[tuple[int, ...], tuple[Excerpt, ...], int]


# -- Warnings about plans that are tried: withheld, and given once for the plan that is shown ------


log = logging.getLogger("zerofx")


class Warned(logging.Filter):
    """The warnings of passes for plans that are tried, by what they depend on and by length."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[Any, dict[int, dict[str, logging.LogRecord]]] = {}
        self._under_way: list[tuple[Any, int]] = []
        self._thread = 0

    @contextmanager
    def withheld(self, key: Any, length: int) -> Iterator[None]:
        """Withhold the warnings that this thread gives. length: of the model, in layers."""
        self._thread = threading.get_ident()
        self._under_way.append((key, length))
        log.addFilter(self)  # once, however deep
        try:
            yield
        finally:
            self._under_way.pop()
            if not self._under_way:
                log.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a warning of this thread for later; everything else passes."""
        if record.levelno < logging.WARNING or record.thread != self._thread:
            return True
        key, length = self._under_way[-1]
        self._found.setdefault(key, {}).setdefault(length, {})[record.getMessage()] = record
        return False

    def give(self, key: Any) -> None:
        """Give each warning under a key once: of its kind, those about the longest model."""
        of_key = self._found.get(key, {})
        longest: dict[str, int] = {}
        for length, records in of_key.items():
            for record in records.values():
                longest[record.msg] = max(length, longest.get(record.msg, length))
        for length, records in sorted(of_key.items()):
            for record in records.values():
                if longest[record.msg] == length:
                    log.handle(record)


def warnings_of(plan: Plan) -> tuple[Parallel, str]:
    """Return what warnings about a plan depend on: how it divides values, and what is computed."""
    axes = replace(plan.parallel, pipeline=1, interleave=1, schedule="1f1b", **WHOLE)
    return axes, "loss" if plan.parallel.pipeline > 1 else plan.outputs


# -- The variants of a model in a search, each captured once ---------------------------------------


@dataclass
class Family(ABC):
    """The variants of one model under one plan: numbers of layers and of samples.

    loop: options of the training loop, as `forecast` takes them. warned: the warnings of all plans,
        under `warnings_of` each.
    """

    plan: Plan
    loop: Mapping[str, Any] = field(default_factory=dict)
    says: Says = silent
    warned: Warned = field(default_factory=Warned)
    _begun: dict[tuple[Any, ...], Planned] = field(default_factory=dict)
    _placed: dict[tuple[Any, ...], Planned] = field(default_factory=dict)
    _stages: dict[tuple[Any, ...], dict[int, Planned]] = field(default_factory=dict)
    _layers_of_ranks: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict)

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the model."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """Samples of the example call."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens of one sample; 0 if it has none."""

    @property
    @abstractmethod
    def trained_numel(self) -> int:
        """Elements of parameters that are trained."""

    @property
    @abstractmethod
    def numel(self) -> int:
        """Elements of all parameters."""

    @property
    @abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """The numbers of layers to capture: all, or two from which the rest is extrapolated."""

    @property
    def layers(self) -> int:
        """Number of layers of the stack whose length varies; 0 if there is none."""
        return 0

    @property
    def layer_units(self) -> tuple[str, ...]:
        """The names of those layers."""
        return ()

    @property
    def layer_numel(self) -> int:
        """Parameters of one layer of that stack, 0 without one."""
        return 0

    @property
    def tiled(self) -> tuple[str, ...]:
        """Name patterns of the large linears: those that are a quarter of a layer or more."""
        return ()

    @abstractmethod
    def extrapolated(self, values: tuple[float, ...]) -> float:
        """Return the value for all layers from those found at each of `lengths`."""

    @property
    def longer(self) -> Family | None:
        """The same family with more layers to price from; None if there is none."""
        return None

    @abstractmethod
    def slope(self, values: tuple[float, ...]) -> float:
        """Return what one layer adds, at least, from the values found at each of `lengths`."""

    @abstractmethod
    def described(self, parallel: Parallel) -> list[ParamInfo]:
        """Return all parameters of the model, as one rank of the tensor axis holds them."""

    @abstractmethod
    def _program(self, length: int, samples: int, outputs: str = "all") -> Program:
        """Return the captured program of the first layers, for a micro-batch of this size.

        outputs: what it computes for the caller: "all", or the "loss".
        """

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state per element."""
        return self.loop.get("optimizer_bytes", ADAMW_STATE_BYTES)

    @property
    def has_loss(self) -> bool:
        """Whether forward returns a loss, which a pipeline needs."""
        return (
            self._program(self.lengths[0], self.samples, self.plan.outputs).calling.loss is not None
        )

    @cached_property
    def units(self) -> int:
        """The number of units, of which each pipeline stage has one at least."""
        uses = (use for param in self.described(Parallel()) for use in param.uses)
        return len({use.unit for use in uses if use.unit})

    def layers_of_ranks(self, parallel: Parallel) -> tuple[int, ...]:
        """Return how many layers of the stack each rank of a pipeline has; none without a stack.

        Raises:
            PlanError: the model cannot be cut into as many stages.
        """
        key = (
            parallel.tensor, parallel.pipeline, parallel.interleave, parallel.cuts, parallel.shared,
        )  # fmt: skip
        if key not in self._layers_of_ranks:
            at = unit_positions(self.described(parallel), parallel) if self.layers else {}
            own = set(self.layer_units)
            stages = [stage % parallel.pipeline for unit, stage in at.items() if unit in own]
            counts = tuple(stages.count(rank) for rank in range(parallel.pipeline))
            self._layers_of_ranks[key] = counts if self.layers else ()
        return self._layers_of_ranks[key]

    def programs(self, samples: int, outputs: str = "all") -> tuple[Program, ...]:
        """Return the captured program of each length, for a micro-batch of this many samples."""
        return tuple(self._program(length, samples, outputs) for length in self.lengths)

    def finished(self, samples: int, setting: Setting) -> tuple[Planned, ...]:
        """Return the program of each length with all passes run, unproved."""
        found = []
        for length in self.lengths:
            with self.warned.withheld(warnings_of(setting.plan), length):
                begun = self._begin(length, samples, setting)
                found.append(resume(begun, setting, BEFORE_BUCKETS))
        return tuple(found)

    def _begin(self, length: int, samples: int, setting: Setting) -> Planned:
        """Return the program of a length before the layout of buckets."""
        plan = setting.plan
        if plan.memory_budget is not None:  # all fields decide what meets it
            key: tuple[Any, ...] = (length, samples, plan, setting.world_size, setting.loop)
            if key not in self._begun:
                program = self._program(length, samples, plan.outputs)
                self._begun[key] = run(program, setting, BEFORE_BUCKETS, Proof.NONE)
            return self._begun[key]
        key = self._placed_key(length, samples, setting), _early(setting)
        if key not in self._begun:
            placed = self._placed_program(length, samples, setting)
            self._begun[key] = resume(placed, setting, PLACED, BEFORE_BUCKETS)
        return self._begun[key]

    def _placed_key(self, length: int, samples: int, setting: Setting) -> tuple[Any, ...]:
        """Return all that the passes up to `place` depend on in this family."""
        plan = setting.plan
        axes, outputs = warnings_of(plan)
        tiles: Any = plan.tiling
        if tiles == "auto":
            tiles = plan, setting.world_size
        elif tiles != "off":
            tiles = tiles, setting.world_size
        return length, samples, outputs, axes, tiles, plan.numerics, plan.precision

    def _placed_program(self, length: int, samples: int, setting: Setting) -> Planned:
        """Return the program of a length with the passes run that a pipeline begins with."""
        key = self._placed_key(length, samples, setting)
        if key not in self._placed:
            outputs = key[2]
            made = self._lengthened(
                length, lambda short: self._placed_program(short, samples, setting)
            )
            if made is None:
                program = self._program(length, samples, outputs)
                with self.warned.withheld(warnings_of(setting.plan), length):
                    made = run(program, setting, PLACED, Proof.NONE)
            self._placed[key] = made
        return self._placed[key]

    def _lengthened(self, length: int, of: Callable[[int], _P]) -> _P | None:
        """Return the program of a length, made from `of` a shorter one; None if it cannot be."""
        return None

    def ranks(self, samples: int, setting: Setting, micro_batches: int) -> list[RankPrograms]:
        """Return the programs of a pipeline's ranks with all passes run, those of a kind once."""
        parallel = setting.plan.parallel
        looped = replace(setting, loop=Loop(micro_batches, no_sync=True))
        kinds = self._excerpts(parallel, samples)
        begun = self._begin_stages(samples, looped, kinds)
        if begun is None:  # values skip stages
            kinds = self._every_rank(parallel)
            begun = self._begin_stages(samples, looped, kinds)
            assert begun is not None
        finished = iter([resume(each, looped, BEFORE_BUCKETS) for each in begun])
        return [
            RankPrograms(
                ranks,
                tuple(tuple(next(finished) for _ in each.own(parallel)) for each in made),
                fewer,
            )
            for ranks, made, fewer in kinds
        ]

    def _begin_stages(
        self, samples: int, setting: Setting, kinds: Sequence[Kind]
    ) -> list[Planned] | None:
        """Return the stages' programs before the layout of buckets; None if they do not show it."""
        found, whole = [], setting.plan.parallel
        for each in (e for _, made, _ in kinds for e in made):
            for number, stage in self._cut(each, samples, setting).items():
                early: tuple[Any, ...] = _early(setting)
                if setting.plan.memory_budget is not None:  # all fields decide what meets it
                    early = setting.plan, setting.world_size, setting.loop
                key = self._cut_key(each, samples, setting), number, each.numbers, early
                if key not in self._begun:
                    if not each.shows(stage):
                        return None
                    own = each.renumbered(replace(stage), whole)
                    with self.warned.withheld(warnings_of(setting.plan), each.length):
                        self._begun[key] = resume(own, setting, CUT, BEFORE_BUCKETS)
                found.append(self._begun[key])
        return found

    def _cut_key(self, each: Excerpt, samples: int, setting: Setting) -> tuple[Any, ...]:
        """Return all that the passes up to `cut-stages` depend on in this family.

        They are the same for all schedules and numbers of micro-batches: only without a loss in
        forward is one schedule refused.
        """
        parallel = setting.plan.parallel
        schedule = "" if self.has_loss else parallel.schedule
        placed = self._placed_key(each.length, samples, setting)
        return placed, each.size, each.position, each.starts, parallel.interleave, schedule

    def _cut(self, each: Excerpt, samples: int, setting: Setting) -> dict[int, Planned]:
        """Return the programs of a rank's stages in a short pipeline, by their numbers there."""
        key = self._cut_key(each, samples, setting)
        if key not in self._stages:
            placed = self._placed_program(each.length, samples, setting)
            whole = setting.plan.parallel
            short = each.parallel(whole, self._units_of(each.length, whole))
            own = each.own(whole)
            self._stages[key] = dict(zip(own, cut(placed, short, own), strict=True))
        return self._stages[key]

    @abstractmethod
    def _excerpts(self, parallel: Parallel, samples: int) -> list[Kind]:
        """Return (positions, short pipelines, layers less in the first) of each kind of ranks.

        samples: of a micro-batch; a model of enough layers that was captured for it is taken again.
        """

    @abstractmethod
    def _units_of(self, length: int, parallel: Parallel) -> list[str]:
        """Return the units of the model of that length that stages divide, in order."""

    def _every_rank(self, parallel: Parallel) -> list[Kind]:
        """Return each rank of the pipeline of the whole model."""
        size = parallel.pipeline
        at = list(unit_positions(self.described(parallel), parallel).values())
        starts = tuple(at.index(i) for i in range(1, parallel.num_stages))
        numbers = tuple(range(parallel.num_stages))
        return [
            ((rank,), (Excerpt(self.layers, size, rank, starts, numbers),), 0)
            for rank in range(size)
        ]


@dataclass
class FamilyOfOne(Family):
    """The family of one captured program: all its layers, its own micro-batch."""

    program: Program = field(kw_only=True)

    @property
    def name(self) -> str:
        return self.program.model_name

    @cached_property
    def samples(self) -> int:
        return batch(self.program)[0]

    @cached_property
    def tokens(self) -> int:
        return batch(self.program)[1] // self.samples

    @cached_property
    def trained_numel(self) -> int:
        return sum(prod(p.shape) for p in self.program.params.values() if p.requires_grad)

    @cached_property
    def numel(self) -> int:
        return sum(prod(p.shape) for p in self.program.params.values())

    @property
    def lengths(self) -> tuple[int, ...]:
        return (0,)

    def extrapolated(self, values: tuple[float, ...]) -> float:
        return values[0]

    def slope(self, values: tuple[float, ...]) -> float:
        return 0.0

    def described(self, parallel: Parallel) -> list[ParamInfo]:
        return with_parts(self.program.params.values(), parallel)

    def _excerpts(self, parallel: Parallel, samples: int) -> list[Kind]:
        return self._every_rank(parallel)

    def _units_of(self, length: int, parallel: Parallel) -> list[str]:
        return divided_units(self.described(Parallel()), parallel)

    def _program(self, length: int, samples: int, outputs: str = "all") -> Program:
        if samples != self.samples:
            raise TargetError(
                f"{self.name} was captured for {self.samples} samples, not {samples}."
            )
        return self.program


@dataclass
class ModelFamily(Family):
    """A model with fewer of its identical layers, and with other micro-batches.

    samples: of the example call, found as the first dimension of its first tensor.
    """

    target: Target = field(kw_only=True)
    settled: int = SETTLED
    _programs: dict[tuple[int, int, str], Program] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return repr(self.target.name)

    @cached_property
    def stack(self) -> str:
        """The name of the list of identical layers that can be shortened; "" if there is none."""
        found = list(_stacks(self.target.module))
        return found[0] if len(found) == 1 else ""

    @cached_property
    def layers(self) -> int:
        """Number of layers of the stack."""
        return len(_at(self.target.module, self.stack)) if self.stack else 0

    @property
    def layer_units(self) -> tuple[str, ...]:
        return tuple(f"{self.stack}.{i}" for i in range(self.layers)) if self.stack else ()

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of layers to capture: all, or two from which the rest is extrapolated.

        All layers together meet a budget, so that fewer layers do not tell.
        """
        short = self.settled + (self.layers - self.settled) % STRIDE
        is_short = self.layers <= short + STRIDE
        has_budget = self.plan.memory_budget is not None or self.plan.host_budget is not None
        return (self.layers,) if is_short or has_budget else (short, short + STRIDE)

    @cached_property
    def longer(self) -> Family | None:
        """The same model, priced from more layers; None if all are priced already."""
        if len(self.lengths) == 1 or self.settled > MOST_SETTLED:
            return None
        return ModelFamily(
            self.plan, self.loop, self.says, self.warned, target=self.target,
            settled=self.settled + 2 * STRIDE, _programs=self._programs,
        )  # fmt: skip

    def extrapolated(self, values: tuple[float, ...]) -> float:
        """Return the value for all layers from those found at each of `lengths`."""
        if len(values) == 1:
            return values[0]
        short, longer = values
        return short + (longer - short) * (self.layers - self.lengths[0]) / STRIDE

    def slope(self, values: tuple[float, ...]) -> float:
        if len(values) == 1:
            return 0.0
        short, longer = values
        return max(longer - short, 0.0) / STRIDE

    def described(self, parallel: Parallel) -> list[ParamInfo]:
        return with_parts(self._params.values(), parallel)

    @cached_property
    def _params(self) -> dict[str, ParamInfo]:
        module, precision = self.target.module, self.plan.precision
        computes = compute_dtypes(module, compute_dtype(precision), module_dtypes(precision))
        return describe_uncalled(module, find_units(module, self.plan.units), computes)

    def _excerpts(self, parallel: Parallel, samples: int) -> list[Kind]:
        kinds = []
        if self.stack and parallel.cuts == "auto":
            kinds = rank_kinds(self.described(parallel), parallel, self.stack, self.layers)
        tried = [(k, n) for k in kinds for n in lengths(k, SETTLED, STRIDE)]
        needed = max((excerpt(k, n, parallel, 0).length for k, n in tried), default=0)
        least = min(-(-needed // SHARED_LENGTH) * SHARED_LENGTH, self.layers)
        known = [n for n, own, outputs in self._programs if (own, outputs) == (samples, "loss")]
        least = min((n for n in known if n >= needed), default=least)
        found: list[Kind] = []
        for kind in kinds:
            fewer = lengths(kind, SETTLED, STRIDE)
            made = tuple(excerpt(kind, n, parallel, least) for n in fewer)
            found.append((kind.positions, made, fewer[0]))
        if not found or any(e.length > self.layers for _, made, _ in found for e in made):
            return self._every_rank(parallel)
        return found

    def _units_of(self, length: int, parallel: Parallel) -> list[str]:
        units = divided_units(self._params.values(), parallel)
        gone = {f"{self.stack}.{i}" for i in range(length, self.layers)}
        return [unit for unit in units if unit not in gone]

    def begin_with(self, program: Program) -> None:
        """Reuse the captured program of the example call if all layers are captured."""
        if self.lengths == (self.layers,):
            self._programs[self.layers, self.samples, self.plan.outputs] = program

    @cached_property
    def samples(self) -> int:
        tensors = [t for t in self._leaves() if isinstance(t, Tensor) and t.dim() > 0]
        if not tensors:
            raise TargetError(
                f"model {self.target.name!r} has an example call without a batch dimension. Pass a "
                "tensor whose first dimension counts samples."
            )
        return tensors[0].shape[0]

    @cached_property
    def tokens(self) -> int:
        """Tokens of one sample: columns of the first integer matrix; 0 without one."""
        for t in self._leaves():
            if isinstance(t, Tensor) and t.dim() == 2 and not t.is_floating_point():
                return t.shape[1]
        return 0

    def _leaves(self) -> list[Any]:
        return pytree.tree_leaves((self.target.args, self.target.kwargs))

    @cached_property
    def trained_numel(self) -> int:
        return sum(p.numel() for p in self.target.module.parameters() if p.requires_grad)

    @cached_property
    def numel(self) -> int:
        return sum(p.numel() for p in self.target.module.parameters())

    @cached_property
    def layer_numel(self) -> int:
        """Parameters of one layer of the stack, 0 without one."""
        if not self.stack:
            return 0
        return sum(p.numel() for p in _at(self.target.module, self.stack)[0].parameters())

    @cached_property
    def tiled(self) -> tuple[str, ...]:
        """Name patterns of the large linears: those that are a quarter of a layer or more."""
        if not self.stack:
            return ()
        layer = _at(self.target.module, self.stack)[0]
        large = [n for n, m in layer.named_modules() if _is_large(m, self.layer_numel)]
        return tuple(f"{self.stack}.*.{name}" for name in large)

    def _program(self, length: int, samples: int, outputs: str = "all") -> Program:
        key = length, samples, outputs
        if key not in self._programs:
            made = self._lengthened(length, lambda short: self._program(short, samples, outputs))
            try:
                if made is None:
                    made = self._capture(length, samples, outputs)
                self._programs[key] = made
            except (CaptureError, TargetError) as error:
                if samples == self.samples:
                    raise
                raise TargetError(
                    f"model {self.name} cannot be captured with {samples} samples. Its example "
                    f"call has {self.samples}, which a global batch can have per rank: "
                    f"{as_sentence(error)}"
                ) from error
        return self._programs[key]

    @cached_property
    def has_loss(self) -> bool:
        """Whether forward returns a loss: however many layers there are."""
        same = self.samples, self.plan.outputs
        known = (n for n, *own in self._programs if tuple(own) == same)
        length = next(known, STRIDE if self.stack else self.layers)
        return self._program(length, *same).calling.loss is not None

    def _lengthened(self, length: int, of: Callable[[int], _P]) -> _P | None:
        short = SETTLED + (length - SETTLED) % STRIDE
        if not short < length < self.layers:  # all of them are captured as they are
            return None
        return lengthened(of(short), self.stack, length)

    def _capture(self, length: int, samples: int, outputs: str = "all") -> Program:
        """Capture the first layers with a micro-batch of this many samples."""
        module, plan = self.target.module, self.plan
        layers = f" with {length} of {self.layers} layers" if self.stack else ""
        self.says(f"capturing {self.name}{layers}, {counted(samples, 'sample')}", True)
        if length != self.layers:
            module = _shortened(module, self.stack, length)
        args, kwargs = self._call(samples)
        with own_errors(self.target.name, "its forward"):
            options = capture_options(plan) | {"outputs": outputs}
            return capture(module, args, kwargs, **options)

    def _call(self, samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the example call with another number of samples."""
        before = self.samples

        def resized(leaf: Any) -> Any:
            if samples == before or not isinstance(leaf, Tensor) or leaf.dim() == 0:
                return leaf
            return leaf.new_zeros(samples, *leaf.shape[1:]) if leaf.shape[0] == before else leaf

        return pytree.tree_map(resized, (self.target.args, self.target.kwargs))


def _early(setting: Setting) -> tuple[Any, ...]:
    """Return the fields that the passes from `place` to the layout of buckets read, no budget set.

    Copies of activations run as far ahead as gathers do. A budget of the host is for all that lies
    there.
    """
    plan = setting.plan
    copies = plan.offload.activations
    ahead = plan.prefetch if copies != "none" else "auto"
    host = None if plan.host_budget is None else (plan.host_budget, plan.offload)
    return plan.activations, copies, ahead, host, plan.parallel.splits_backward


def _is_large(module: nn.Module, layer_numel: int) -> bool:
    return isinstance(module, nn.Linear) and 4 * module.weight.numel() >= layer_numel


def _stacks(module: nn.Module, name: str = "") -> Iterator[str]:
    """Yield the outermost lists of identical layers that are worth shortening."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > SETTLED + STRIDE + 1:
        layers = list(module)
        if len(set(map(_form, layers))) == 1 and all(map(_repeats, layers, layers[STRIDE:])):
            yield name
            return
    for child_name, child in module.named_children():
        yield from _stacks(child, f"{name}.{child_name}" if name else child_name)


def _form(layer: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for layers of equal cost."""
    modules = tuple((name, type(m)) for name, m in layer.named_modules())
    tensors = chain(layer.named_parameters(), layer.named_buffers())
    return modules, tuple((n, t.shape, t.dtype, t.requires_grad) for n, t in tensors)


def _repeats(layer: nn.Module, later: nn.Module) -> bool:
    """Return whether a layer and the one STRIDE later have the same settings.

    Settings are plain attributes; those that count the layers grow with them. Rates are left out:
    they may vary with depth, and cost nothing.
    """
    for one, other in zip(layer.modules(), later.modules(), strict=True):
        settings, others = _settings(one), _settings(other)
        if settings.keys() != others.keys():
            return False
        for name, setting in settings.items():
            if type(setting) is int and others[name] == setting + STRIDE:
                continue
            if setting != others[name]:
                return False
    return True


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the numbers, texts and flags among a module's attributes."""
    plain = (bool, int, str, type(None))
    return {k: v for k, v in vars(module).items() if type(v) in plain}


def _at(module: nn.Module, name: str) -> Any:
    return module.get_submodule(name)


def _shortened(module: nn.Module, stack: str, length: int) -> nn.Module:
    """Return a copy with the first layers of a stack; tensors are shared, not copied."""
    tensors: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
    copied = copy.deepcopy(module, {id(t): t for t in tensors})
    layers = _at(copied, stack)
    del layers[length:]
    return copied
