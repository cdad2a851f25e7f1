"""The order of the passes: one list, built for a setting and checked as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zerofx.errors import PlanError
from zerofx.hardware import Hardware
from zerofx.ir.program import Loop, Pool
from zerofx.layout.buckets import Layout
from zerofx.passes.assign_buckets import AssignBuckets
from zerofx.passes.assign_slots import AssignSlots
from zerofx.passes.base import Fact, Pass
from zerofx.passes.cast import Cast
from zerofx.passes.cut_regions import CutRegions
from zerofx.passes.cut_stages import CutStages
from zerofx.passes.decide import Choices, budget_bytes
from zerofx.passes.defer_weights import DeferWeights
from zerofx.passes.drop_copies import DropCopies
from zerofx.passes.fuse import Fuse
from zerofx.passes.hand_over import HandOver
from zerofx.passes.hierarchical import Hierarchical
from zerofx.passes.join_sums import JoinSums
from zerofx.passes.keep_gathered import KeepGathered
from zerofx.passes.merge_tied import MergeTied
from zerofx.passes.offload_activations import OffloadActivations
from zerofx.passes.offload_shards import OffloadShards
from zerofx.passes.open_attention import OpenAttention
from zerofx.passes.open_experts import OpenExperts
from zerofx.passes.overlap_values import OverlapValues
from zerofx.passes.place import OpenLosses, OpenProducts, Place
from zerofx.passes.prefetch import PrefetchGathers
from zerofx.passes.quantize import Quantize
from zerofx.passes.release import Release
from zerofx.passes.secondary_shards import SecondaryShards
from zerofx.passes.shard_gradients import ShardGradients
from zerofx.passes.shard_parameters import ShardParameters
from zerofx.passes.sink_waits import SinkWaits
from zerofx.passes.spill_activations import SpillActivations
from zerofx.passes.split import Split
from zerofx.passes.sync_buffers import SyncBuffers
from zerofx.passes.tile import Tile
from zerofx.passes.update_in_backward import UpdateInBackward
from zerofx.plan.fields import nearest, whole
from zerofx.plan.plan import Plan


@dataclass(frozen=True)
class Setting:
    """The inputs that determine the pipeline.

    choices: the decisions of the plan's budget; None uses the plan's fields unchanged.
    loop: the training steps that the budget covers. pool: slots that exist for other programs.
    margin_bytes: the part of the budget left for what compiled regions use beyond their operators.
    pipeline: the passes to run, as text; empty runs all of them. position: the pipeline stage
    whose program is compiled.
    """

    plan: Plan
    world_size: int
    hardware: Hardware
    layout: Layout | None = None
    choices: Choices | None = None
    loop: Loop = field(default_factory=Loop)
    pool: Pool = field(default_factory=Pool)
    margin_bytes: int = 0
    pipeline: str = ""
    position: int = 0

    def __post_init__(self) -> None:
        whole(1)("world_size", self.world_size)
        whole(1)("accumulation", self.loop.accumulation)


Make = Callable[[Setting], Pass]

# One pass per line, in execution order, each with the reason for its place. A memory
# budget is decided between the two lists: its decisions are options of the second.
PREPARE: list[Make] = [
    # first: it defines the format of a parameter for everything that counts or compares parameters
    lambda s: Cast(precision=s.plan.precision),
    # before merge-tied, after which the reference is taken: later graphs are proved against that
    # graph
    lambda s: Fuse(patterns=_patterns(s)),
    # before merge-tied for the same reason: a bias is added after a sum over ranks
    lambda s: OpenProducts(parallel=s.plan.parallel),
    # and for losses, which are of all positions and all classes
    lambda s: OpenLosses(parallel=s.plan.parallel),
    # and for attention around a ring, which sums its blocks one by one
    lambda s: OpenAttention(parallel=s.plan.parallel),
    # and for experts of a capacity, which drop tokens
    lambda s: OpenExperts(parallel=s.plan.parallel),
    # after those, which look for the products of whole weights. Before merge-tied for the same
    # reason: a sum over tiles rounds differently
    lambda s: Tile(plan=s.plan, world_size=s.world_size, layout=s.layout),
    # before anything counts a parameter or a gradient
    lambda s: MergeTied(),
    # as soon as it can be proved, so that no pass counts, moves or shards a copy that is not needed
    lambda s: DropCopies(),
    # after the reference, which is of whole values; before anything counts what a rank holds
    lambda s: Place(parallel=s.plan.parallel),
    # after place: a stage's values are sharded as the whole model's are; before all that counts
    # them
    lambda s: CutStages(parallel=s.plan.parallel, position=s.position),
]
PLACE: list[Make] = [
    # before gathers exist: an untagged gather before the split would be saved, not re-gathered
    lambda s: Split(activations=s.choices.activations if s.choices else s.plan.activations),
    # before collectives of values overlap compute, and before regions are cut: at the pause too
    lambda s: DeferWeights(enabled=s.plan.parallel.splits_backward),
    # after split, which must not save a value in flight; before regions are cut at launches
    lambda s: OverlapValues(),
    # before communication: cuts depend on units alone, so identical layers stay identical
    lambda s: CutRegions(),
    # between regions, and before gathers: it moves only values of forward, and all later passes
    # measure without them
    lambda s: OffloadActivations(
        activations=s.plan.activations,
        everything=s.plan.offload.activations != "none" and s.plan.activations != "auto",
        values=s.choices.offloaded if s.choices else (),
        distance=distance(s),
        least_bytes=s.hardware.offload_min_bytes,
        # everything else on the host is counted together with it, after the last pass
        host_budget_bytes=None if _spills(s) or _lives_away(s) else s.plan.host_budget,
    ),
    # immediately after: it takes what has just been offloaded to the host from there
    lambda s: SpillActivations(enabled=_spills(s)),
    # before the collectives, whose sizes it decides
    lambda s: AssignBuckets(
        plan=s.plan,
        world_size=s.world_size,
        persist_below=_or(s.plan.persist_below, s.hardware.persist_below_bytes),
        bucket_bytes=_or(s.plan.bucket_bytes, s.hardware.bucket_bytes),
        layout=s.layout,
    ),
    lambda s: ShardParameters(stage=s.plan.stage),
    # once it is known which gradients share a bucket, and before they are reduced
    lambda s: JoinSums(),
    # after shard-parameters: it reads the shard placeholders
    lambda s: ShardGradients(
        world_size=s.world_size // s.plan.parallel.num_shared, by_rows=s.plan.sparse_gradients
    ),
    # once all collectives over the shard axis exist, and before any pass moves or weighs them
    lambda s: Quantize(weights=s.plan.quantized_weights, gradients=s.plan.quantized_gradients),
    # after quantize: blocks are for gathers across nodes, and what they deliver is kept exactly
    lambda s: SecondaryShards(enabled=s.plan.secondary_shard_size is not None),
    # after both, which replace gathers: what is still exact and over the shard axis has two steps
    lambda s: Hierarchical(enabled=s.plan.hierarchical_size is not None),
    # running statistics are broadcast from rank 0
    # A pipeline shares them once per call, when its micro-batches are through.
    lambda s: SyncBuffers(
        enabled=s.plan.buffers == "rank0" and s.world_size > 1 and s.plan.parallel.pipeline == 1
    ),
    lambda s: Release(),
    # after release: moving a launch requires knowing when its buffer is free again
    lambda s: PrefetchGathers(distance=distance(s)),
    lambda s: SinkWaits(),
    # after the collectives have their final positions: copies are launched ahead of them
    lambda s: OffloadShards(distance=distance(s)),
    # after all passes that move reads of shards, which an update overwrites
    lambda s: UpdateInBackward(enabled=s.plan.update == "in-backward"),
    # after all passes that move packs and reductions: it takes the place of both without data ranks
    lambda s: HandOver(),
    # after all passes that move and release: the room left is measured on the final order
    lambda s: KeepGathered(
        budget_bytes=s.choices.spend_bytes if s.choices else budget_bytes(s.plan, s.margin_bytes)
    ),
    # last: slots follow the final order
    lambda s: AssignSlots(),
]


def _spills(setting: Setting) -> bool:
    """Return whether offloaded activations go on to NVMe, so that the host holds few of them."""
    return setting.plan.offload.activations == "nvme"


def _lives_away(setting: Setting) -> bool:
    """Return whether parameters or optimizer states are kept off the device."""
    offload = setting.plan.offload
    return {offload.parameters, offload.optimizer} != {"none"}


def _patterns(setting: Setting) -> str:
    """Return the patterns to fuse. Fusing changes rounding; on CPU only the loss head gains.

    If values are cut over ranks nothing is fused: no rule says what a kernel does on parts, so that
    every rank would gather its inputs and compute all of it.
    """
    if setting.plan.numerics == "bitwise" or setting.plan.parallel.value_axes:
        return "none"
    return "all" if setting.hardware.device_type == "cuda" else "linear-cross-entropy"


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def distance(setting: Setting) -> int:
    """Return how many buckets ahead gathers are launched."""
    if setting.choices is not None:
        return setting.choices.prefetch
    prefetch = setting.plan.prefetch
    return setting.hardware.prefetch if prefetch == "auto" else int(prefetch)


_ADDED: list[tuple[str, Make]] = []  # after the pass of this name


@contextlib.contextmanager
def added_pass(make: Make, after: str) -> Iterator[None]:
    """Run an additional pass after the pass named `after`, for the duration of the block."""
    entry = (after, make)
    _ADDED.append(entry)
    try:
        yield
    finally:
        _ADDED.remove(entry)


@dataclass(frozen=True)
class Pipeline:
    """The passes of a setting. A memory budget is decided after `prepare`, before `place`."""

    prepare: tuple[Pass, ...]
    place: tuple[Pass, ...]

    @property
    def passes(self) -> tuple[Pass, ...]:
        return self.prepare + self.place

    def __str__(self) -> str:
        """Return the pipeline as text that `Setting.pipeline` accepts, one pass per line."""
        return "\n".join(p.spec() for p in self.passes)


def build(setting: Setting) -> Pipeline:
    """Build the passes of a setting and check that each finds what it requires.

    Raises:
        PlanError: the pipeline's text is invalid, or a requirement of a pass is missing; the
            message names both.
    """
    prepare, place = (_made(setting, makes) for makes in (PREPARE, PLACE))
    if setting.pipeline:
        undecided = replace(setting, choices=None)
        asked = {p.name: p.shown() for p in _made(undecided, [*PREPARE, *PLACE])}
        prepare, place = _chosen(setting.pipeline, prepare, place, asked)
    check_order([*prepare, *place])
    return Pipeline(tuple(prepare), tuple(place))


def _made(setting: Setting, makes: Sequence[Make]) -> list[Pass]:
    found: list[Pass] = []
    for make in makes:
        found.append(make(setting))
        name = found[-1].name
        found += [added(setting) for after, added in _ADDED if after == name]
    return found


def _chosen(
    text: str,
    prepare: Sequence[Pass],
    place: Sequence[Pass],
    asked: Mapping[str, Mapping[str, str]],
) -> tuple[list[Pass], list[Pass]]:
    """Return the passes that a text names, in its order, each with the options that it gives.

    asked: per pass, its options before a budget decides. An option that the text repeats unchanged
        is left to the budget.
    """
    known = {p.name: p for p in (*prepare, *place)}
    found: list[Pass] = []
    for name, options in parse(text):
        if name not in known:
            raise PlanError(f"pipeline: no pass is named {name!r}{nearest(name, known)}")
        changed = {k: v for k, v in options.items() if v != asked[name].get(k)}
        found.append(known[name].with_options(changed))
    first = {p.name for p in prepare}
    cut = next((i for i, p in enumerate(found) if p.name not in first), len(found))
    return found[:cut], found[cut:]


def parse(text: str) -> list[tuple[str, dict[str, str]]]:
    """Parse a pipeline: passes split by newlines or commas, options in braces, # comments.

        cast, fuse{patterns=none}, split{activations=keep}   # like this

    Raises:
        PlanError: a brace or an option is invalid; the message quotes it.
    """
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    found = []
    for spec in (part for line in lines for part in _divided(line)):
        name, brace, rest = spec.partition("{")
        if brace and not rest.endswith("}"):
            raise PlanError(f"pipeline: {spec!r} has no closing brace.")
        options = {}
        for option in _divided(rest[:-1]):
            key, equals, value = option.partition("=")
            if not equals:
                raise PlanError(f"pipeline: {option!r} in {spec!r} is not of the form name=value.")
            options[key.strip()] = value.strip()
        found.append((name.strip(), options))
    return found


def _divided(text: str) -> list[str]:
    """Split at the commas outside of brackets, and drop empty parts."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "{[(") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def check_order(passes: Sequence[Pass]) -> None:
    """Raise if a pass lacks what it requires, or follows what it conflicts with.

    Raises:
        PlanError: names the pass and the facts.
    """
    facts = {Fact.CAPTURED}
    for p in passes:
        if missing := p.requires - facts:
            raise PlanError(f"{p.name} runs before what it needs: {_names(missing)}.")
        if clash := p.conflicts & facts:
            raise PlanError(f"{p.name} must run before: {_names(clash)}.")
        facts |= p.provides


def _names(facts: frozenset[Fact]) -> str:
    return ", ".join(sorted(f.name.lower().replace("_", "-") for f in facts))
