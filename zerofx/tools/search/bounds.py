"""Lower bounds of a choice before any pass runs for it: bytes and time of every schedule.

Memory is at least the persistent bytes plus the peak of activations; a step takes at least the time
of its longest lane. Compute and activations are those of the same model on one rank without
sharding, found once per shape of micro-batch. The rest are closed forms in the parameters.

With tensor or context axes, they are those of one such group of ranks, the exchange of values with
them. In a pipeline of P ranks, M micro-batches take (M - 1) times what the slowest rank takes of
one, plus one micro-batch through all ranks; the first rank holds P of them. With zero-bubble, where
ranks compute the gradients of weights while they would wait, a rank waits for one forward of those
before it. With gpipe each rank holds all micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from zerofx.analysis.memory.liveness import lifetimes
from zerofx.analysis.memory.storage import Category
from zerofx.analysis.time.prices import Roofline
from zerofx.analysis.time.steps import Lane
from zerofx.analysis.time.tasks import tasks
from zerofx.analysis.time.timeline import Span, timeline
from zerofx.errors import CaptureError, TargetError
from zerofx.hardware import Hardware
from zerofx.ir.program import FORWARD, Loop, Planned
from zerofx.layout.buckets import Mesh
from zerofx.layout.tiers import Tier
from zerofx.passes.order import Setting
from zerofx.plan.plan import Plan
from zerofx.policy import reduction
from zerofx.tools.search.family import WHOLE, Family
from zerofx.tools.search.space import Choice

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Fields of a plan for one rank without transfers.
ALONE = {
    "stage": 0, "shard_axis_size": None, "update": "step", "tiling": "off", "prefetch": "auto",
    "memory_budget": None, "host_budget": None,
}  # fmt: skip
BESIDE = (Lane.H2D, Lane.D2H, Lane.NVME, Lane.TO_NVME)


@dataclass(frozen=True)
class Alone:
    """One micro-batch on one rank, nothing sharded: compute, activations, and their copies."""

    compute_us: float
    activation_bytes: float
    copies_us: float  # of the lane that copies most
    launches_us: float  # of the host
    layer_us: float = 0.0  # of the compute, for each layer
    layer_bytes: float = 0.0  # of the activations
    layer_forward_us: float = 0.0  # of forward's compute

    def part(self, share: float) -> Alone:
        """Return the least of a smaller micro-batch, of this share of the samples."""
        return Alone(*(share * value for value in astuple(self)))


@dataclass(frozen=True)
class Bound:
    """Lower bounds of a choice; `lane` is the one with the longest time.

    idle_us: the part of the time in which ranks of a pipeline wait for others, on average.
    """

    step_us: float
    peak_bytes: float
    lane: str
    idle_us: float = 0.0


def _activations(choice: Choice) -> tuple[Any, str]:
    """Return what happens to activations, and the tier that they are offloaded to."""
    return choice.plan.activations, choice.plan.offload.activations


# The least share that a micro-batch takes among others of what it takes by itself, if it waits for
# values of other ranks: the next one fills some of the waits.
ALONE_SHARE = 0.95
NOTHING = Alone(0.0, 0.0, 0.0, 0.0)


@dataclass
class Bounds:
    """Bounds of every choice for one family on one hardware and world.

    plainest: the choice with the largest micro-batch that keeps all activations.
    """

    family: Family
    hardware: Hardware
    world_size: int
    plainest: Choice
    _alone: dict[object, Alone] = field(default_factory=dict)

    @property
    def num_compiled(self) -> int:
        """How many models were compiled for one rank; the bounds of further choices share them."""
        return len(self._alone)

    def of(self, choice: Choice) -> Bound:
        """Return the lower bounds of `choice`.

        Raises:
            CaptureError: the model cannot be captured at that micro-batch.
        """
        if choice.plan.activations == "auto":  # a budget decides for all ranks
            return self.rough(choice)
        return self._bound(choice, self._of_one_rank(choice))

    def rough(self, choice: Choice) -> Bound:
        """Return lower bounds of `choice` without capturing the model for it.

        Recomputing and copying activations only add to compute. If no rate falls with size, a
        sample of a smaller micro-batch takes at least as long as one of the largest.
        """
        if choice.plan.parallel.is_used:
            return self._with_axes(choice, "keep", "none")
        if not self._rates_grow and choice.samples != self.plainest.samples:
            return Bound(0.0, self._peak_bytes(choice, NOTHING), "compute")
        most = self._of_one_rank(self.plainest)
        part = choice.samples / self.plainest.samples
        return self._bound(choice, Alone(most.compute_us * part, 0.0, 0.0, most.launches_us))

    def closer(self, choice: Choice) -> Bound:
        """Return bounds between those of `rough` and `of`, from the largest micro-batch."""
        if choice.plan.parallel.is_used and choice.plan.activations != "auto":
            return self._with_axes(choice, *_activations(choice))
        return self.rough(choice)

    def _with_axes(self, choice: Choice, activations: Any, tier: str) -> Bound:
        """Return bounds from the largest micro-batch, with activations of a choice or as they are.

        What a rank holds of a sample does not grow with their number, and a part that does not
        depend on it is counted as if it did, so that the bound holds.
        """
        samples = max(self.plainest.samples, choice.samples)
        try:
            most = self._alone_with(choice.plan, samples, activations, tier)
        except (CaptureError, TargetError):  # which the model does not take
            return Bound(0.0, self._peak_bytes(choice, NOTHING), "compute")
        found = most.part(choice.samples / samples)
        if not self._rates_grow and samples != choice.samples:
            found = replace(found, compute_us=0.0, layer_us=0.0, layer_forward_us=0.0)
        if (activations, tier) != _activations(choice):
            found = replace(found, activation_bytes=0.0, layer_bytes=0.0)
        return self._bound(choice, replace(found, launches_us=0.0))

    @cached_property
    def _rates_grow(self) -> bool:
        """Tell whether no product and no pass over memory is slower at a larger size."""
        kinds = ("matmul", "attention", "memory", "heavy")
        curves = [c for n, c in self.hardware.curves.items() if n.split(".")[0] in kinds]
        shares = [[value for _, value in curve.points] for curve in curves]
        return all(values == sorted(values) for values in shares)

    def _bound(self, choice: Choice, alone: Alone) -> Bound:
        lanes = self._lanes(choice, alone)
        lane = max(lanes, key=lambda name: lanes[name])
        size, num = choice.plan.parallel.pipeline, choice.accumulation
        idle = max(lanes["compute"] - num * alone.compute_us / size, 0.0) if size > 1 else 0.0
        return Bound(lanes[lane], self._peak_bytes(choice, alone), lane, idle)

    def _of_one_rank(self, choice: Choice) -> Alone:
        return self._alone_with(choice.plan, choice.samples, *_activations(choice))

    def _alone_with(self, plan: Plan, samples: int, activations: Any, tier: str) -> Alone:
        axes = replace(plan.parallel, pipeline=1, interleave=1, schedule="1f1b", **WHOLE)
        outputs = "loss" if plan.parallel.pipeline > 1 else plan.outputs
        key = samples, activations, tier, axes, outputs
        if key not in self._alone:
            offload = {"activations": tier, "path": plan.offload.path}
            if tier != "nvme":
                del offload["path"]
            own = {"offload": offload, "parallel": axes.to_plain(), "outputs": outputs}
            bare = replace(Plan.from_dict(plan.to_dict() | ALONE | own), activations=activations)
            self.hardware.check_format(plan.precision.compute)
            setting = Setting(bare, axes.num_shared, self.hardware, loop=Loop())
            programs = self.family.finished(samples, setting)
            found = [self._alone_in(program) for program in programs]
            columns = list(zip(*found, strict=True))
            compute, activations, copies, launches = map(self.family.extrapolated, columns[:4])
            slopes = (self.family.slope(columns[i]) for i in (0, 1, 4))
            self._alone[key] = Alone(compute, activations, copies, launches, *slopes)
        return self._alone[key]

    def _alone_in(self, program: Planned) -> tuple[float, float, float, float, float]:
        prices = Roofline.of(program.plan, self.hardware, program.world_size)
        found = timeline(tasks(program, prices))
        spans = found.spans
        own = [s.task for s in spans if s.task.kind in ("region", "pack")]
        compute = sum(task.us for task in own)
        forward = sum(task.us for task in own if task.graph == FORWARD)
        if program.plan.parallel.is_used:  # values of other ranks are waited for as well
            compute = max(compute, ALONE_SHARE * _with_values_us(spans))
        copies = max(found.busy_us[lane] for lane in BESIDE)
        host = [s.task for s in spans if s.task.lane is Lane.HOST]
        launches = sum(task.us for task in host if task.graph != "step")  # which is once for all
        return compute, _most_held(program), copies, launches, forward

    # -- time -------------------------------------------------------------------------------
    def _lanes(self, choice: Choice, alone: Alone) -> dict[str, float]:
        """Return the least time of each lane; the device computes, updates and waits in one."""
        plan, times = choice.plan, choice.accumulation
        parallel = plan.parallel
        prices = Roofline.of(plan, self.hardware, self.world_size)
        ranks, copies = plan.axis_sizes(self.world_size)
        numel, item = self.family.numel, ITEM_BYTES[plan.precision.compute]
        trained = self.family.trained_numel
        numel, trained = numel // parallel.num_dividing, trained // parallel.num_dividing
        tier = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}[plan.offload.optimizer]
        update = prices.update(Tier.HOST if tier is Tier.NVME else tier, trained // ranks).us
        compute = self._micro_batches_us(choice, alone)
        is_beside = plan.update == "in-backward" and tier is not Tier.DEVICE
        lanes = {
            "compute": compute if is_beside else compute + update,
            "launches": times * alone.launches_us / parallel.pipeline,
            "host update": update if is_beside else 0.0,
            "copies": times * alone.copies_us + self._state_copies(choice, prices, ranks),
        }
        if ranks > 1:
            gathered = item * (self._gathers(choice) if plan.stage == 3 else numel)
            # with secondary shards, a part of this stays within nodes
            among = plan.node_size(ranks) if plan.node_size(ranks) > 1 else ranks
            gather = prices.collective("all_gather", int(gathered), among, parallel.tensor)
            lanes["gather"] = gather.us
        reduced = trained * ITEM_BYTES[plan.precision.reduce]
        reduces = 1 if choice.no_sync or parallel.pipeline > 1 else times
        mesh = Mesh.of(
            shard=ranks, replicate=copies, tensor=parallel.tensor, pipeline=parallel.pipeline,
            context=parallel.context,
        )  # fmt: skip
        for leg in reduction.legs(mesh):
            each = prices.collective(leg.kind, reduced, leg.size, leg.stride).us
            lanes["reduce"] = lanes.get("reduce", 0.0) + reduces * each
            reduced //= leg.num_slices
        return lanes

    def _micro_batches_us(self, choice: Choice, alone: Alone) -> float:
        """Return the least time for the forwards and backwards of all micro-batches."""
        parallel, num = choice.plan.parallel, choice.accumulation
        size, turns = parallel.pipeline, parallel.interleave
        if size == 1:
            return num * alone.compute_us
        layers = self.family.layers_of_ranks(parallel)
        slowest = max(alone.compute_us / size, max(layers, default=0) * alone.layer_us)
        if parallel.splits_backward:
            ahead = accumulate(layers, initial=0)
            waits = (before * alone.layer_forward_us for before in ahead)
            works = (num * own * alone.layer_us for own in layers)
            each = (wait + work for wait, work in zip(waits, works, strict=False))
            return max([num * slowest, *each])
        through = alone.compute_us / size + alone.compute_us * (size - 1) / (size * turns)
        return (num - 1) * slowest + max(through, slowest)

    def _gathers(self, choice: Choice) -> int:
        """Return the elements gathered in a step at stage 3.

        In forward all, in backward those of all layers but one, which may still be gathered.
        """
        parallel = choice.plan.parallel
        layers = self.family.layers // parallel.pipeline - parallel.interleave
        again = self.family.layer_numel * max(layers, 0) // parallel.tensor
        return choice.accumulation * (self.family.numel // parallel.num_dividing + again)

    def _state_copies(self, choice: Choice, prices: Roofline, ranks: int) -> float:
        """Return the least time to move gradients off, parameters up, or states from disk."""
        offload = choice.plan.offload
        part = self.family.trained_numel // (ranks * choice.plan.parallel.num_dividing)
        if offload.optimizer == "none":
            return 0.0
        half = 2 * part  # of no format of fewer bytes
        if offload.optimizer == "cpu":
            return max(prices.copy(lane, half).us for lane in (Lane.D2H, Lane.H2D))
        states = part * (4 + self.family.state_bytes)
        return max(prices.copy(lane, states).us for lane in (Lane.NVME, Lane.TO_NVME))

    # -- memory -----------------------------------------------------------------------------
    def _peak_bytes(self, choice: Choice, alone: Alone) -> float:
        """Return the persistent bytes plus the peak of activations, or plus all gradients."""
        plan, parallel = choice.plan, choice.plan.parallel
        ranks, copies = plan.axis_sizes(self.world_size)
        numel = self.family.numel / parallel.num_dividing
        trained = self.family.trained_numel / parallel.num_dividing
        master, item = ITEM_BYTES[plan.precision.master], ITEM_BYTES[plan.precision.compute]
        is_away = plan.offload.optimizer != "none"
        lasting = 0.0
        if not is_away:
            lasting = (master * numel + self.family.state_bytes * trained) / ranks
        elif plan.offload.parameters == "none":
            lasting = item * numel / ranks
        is_own_copy = ranks == 1 and item == master and not is_away
        if plan.stage < 3 and not is_own_copy:
            lasting += item * numel - (item * numel / ranks if is_away else 0)
        layer = self.family.layer_numel / parallel.tensor
        gathered = item * layer if plan.stage == 3 and ranks > 1 else 0
        if plan.tiling != "off":
            gathered = 0
        if parallel.pipeline > 1:
            return lasting + gathered + self._in_pipeline(choice, alone, trained, ranks * copies)
        in_forward = max(alone.activation_bytes, 0.0) + gathered
        stands = plan.update == "step" and not is_away
        return lasting + max(in_forward, master * trained / ranks if stands else 0.0)

    def _in_pipeline(self, choice: Choice, alone: Alone, trained: float, ranks: int) -> float:
        """Return what a rank holds of gradients, and of micro-batches that are under way.

        The rank at position p of P has P - p micro-batches under way, or all that there are; with
        gpipe all. With whole gradients summed, those of a stage are there until the last
        micro-batch.
        """
        plan, num = choice.plan, choice.accumulation
        size = plan.parallel.pipeline
        layers = enumerate(self.family.layers_of_ranks(plan.parallel))
        has_all = plan.parallel.schedule == "gpipe"
        most = max(
            ((num if has_all else min(num, size - rank)) * own for rank, own in layers), default=0
        )
        saved = most * alone.layer_bytes
        sums = plan.parallel.accumulate == "whole" and num > 1 and ranks > 1
        return saved + (ITEM_BYTES[plan.precision.master] * trained if sums else 0.0)


def _most_held(program: Planned) -> float:
    """Return the peak of the bytes of activations."""
    change: Counter[int] = Counter()
    for storage in lifetimes(program, keeps_results=False).storages:
        if storage.category is Category.ACTIVATIONS and storage.slot < 0:
            change[storage.birth] += storage.nbytes
            change[storage.death + 1] -= storage.nbytes
    return max(accumulate(change[time] for time in sorted(change)), default=0)


def _with_values_us(spans: Sequence[Span]) -> float:
    """Return the time of a micro-batch's compute and of its waits for values of other ranks.

    Launches count as nothing: those of several micro-batches fill each other's waits.
    """
    free = [replace(s.task, us=0.0) if s.task.lane is Lane.HOST else s.task for s in spans]
    lanes = (Lane.COMPUTE, Lane.VALUES)
    own = (s for s in timeline(free).spans if s.task.graph != "step" and s.task.lane in lanes)
    return max((s.end_us for s in own), default=0.0)
