"""Lower bounds of a choice before any pass runs for it: bytes and time of every schedule.

Memory is at least the persistent bytes plus the peak of activations; a step takes at least the time
of its longest lane. Compute and activations are those of the same model on one rank without
sharding, found once per shape of micro-batch. The rest are closed forms in the parameters.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from zerofx.analysis.memory.memory import Memory
from zerofx.analysis.memory.storage import Category
from zerofx.analysis.time.forecast import forecast
from zerofx.analysis.time.prices import Roofline
from zerofx.analysis.time.steps import Lane
from zerofx.hardware import Hardware
from zerofx.ir.program import Loop, Planned
from zerofx.layout.buckets import Mesh
from zerofx.layout.tiers import Tier
from zerofx.passes.order import Setting
from zerofx.plan.plan import Plan
from zerofx.policy import reduction
from zerofx.tools.search.family import Family
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


@dataclass(frozen=True)
class Bound:
    """Lower bounds of a choice; `lane` is the one with the longest time."""

    step_us: float
    peak_bytes: float
    lane: str


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
        if not self._rates_grow and choice.samples != self.plainest.samples:
            return Bound(0.0, self._peak_bytes(choice, NOTHING), "compute")
        most = self._of_one_rank(self.plainest)
        part = choice.samples / self.plainest.samples
        return self._bound(choice, Alone(most.compute_us * part, 0.0, 0.0, most.launches_us))

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
        return Bound(lanes[lane], self._peak_bytes(choice, alone), lane)

    def _of_one_rank(self, choice: Choice) -> Alone:
        plan = choice.plan
        key = choice.samples, plan.activations, plan.offload.activations
        if key not in self._alone:
            offload = {"activations": plan.offload.activations, "path": plan.offload.path}
            if plan.offload.activations != "nvme":
                del offload["path"]
            bare = Plan.from_dict(plan.to_dict() | ALONE | {"offload": offload})
            self.hardware.check_format(plan.precision.compute)
            programs = self.family.finished(
                choice.samples, Setting(bare, 1, self.hardware, loop=Loop()), key
            )
            found = [self._alone_in(program) for program in programs]
            columns = zip(*found, strict=True)
            self._alone[key] = Alone(*map(self.family.extrapolated, columns))
        return self._alone[key]

    def _alone_in(self, program: Planned) -> tuple[float, float, float, float]:
        found = forecast(program, self.hardware)
        spans = found.timeline.spans
        compute = sum(s.task.us for s in spans if s.task.kind in ("region", "pack"))
        copies = max(found.timeline.busy_us[lane] for lane in BESIDE)
        launches = found.timeline.busy_us[Lane.HOST]
        return compute, _most_held(found.memory), copies, launches

    # -- time -------------------------------------------------------------------------------
    def _lanes(self, choice: Choice, alone: Alone) -> dict[str, float]:
        """Return the least time of each lane; the device computes, updates and waits in one."""
        plan, times = choice.plan, choice.accumulation
        prices = Roofline.of(plan, self.hardware, self.world_size)
        ranks, copies = plan.axis_sizes(self.world_size)
        numel, item = self.family.numel, ITEM_BYTES[plan.precision.compute]
        trained = self.family.trained_numel
        tier = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}[plan.offload.optimizer]
        update = prices.update(Tier.HOST if tier is Tier.NVME else tier, trained // ranks).us
        compute = times * alone.compute_us
        is_beside = plan.update == "in-backward" and tier is not Tier.DEVICE
        lanes = {
            "compute": compute if is_beside else compute + update,
            "launches": times * alone.launches_us,
            "host update": update if is_beside else 0.0,
            "copies": times * alone.copies_us + self._state_copies(choice, prices, ranks),
        }
        if ranks > 1:
            gathered = item * (self._gathers(choice) if plan.stage == 3 else numel)
            lanes["gather"] = prices.collective("all_gather", int(gathered), ranks, 1).us
        reduced = trained * ITEM_BYTES[plan.precision.reduce]
        reduces = 1 if choice.no_sync else times
        for leg in reduction.legs(Mesh.of(shard=ranks, replicate=copies)):
            each = prices.collective(leg.kind, reduced, leg.size, leg.stride).us
            lanes["reduce"] = lanes.get("reduce", 0.0) + reduces * each
            reduced //= leg.num_slices
        return lanes

    def _gathers(self, choice: Choice) -> int:
        """Return the elements gathered in a step at stage 3.

        In forward all, in backward those of all layers but one, which may still be gathered.
        """
        again = self.family.layer_numel * max(self.family.layers - 1, 0)
        return choice.accumulation * (self.family.numel + again)

    def _state_copies(self, choice: Choice, prices: Roofline, ranks: int) -> float:
        """Return the least time to move gradients off, parameters up, or states from disk."""
        offload, part = choice.plan.offload, self.family.trained_numel // ranks
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
        plan = choice.plan
        ranks, _ = plan.axis_sizes(self.world_size)
        numel, trained = self.family.numel, self.family.trained_numel
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
        gathered = item * self.family.layer_numel if plan.stage == 3 and ranks > 1 else 0
        if plan.tiling != "off":
            gathered = 0
        in_forward = max(alone.activation_bytes, 0.0) + gathered
        stands = plan.update == "step" and not is_away
        return lasting + max(in_forward, master * trained / ranks if stands else 0.0)


def _most_held(memory: Memory) -> float:
    """Return the peak of the bytes of activations."""
    change: Counter[int] = Counter()
    for storage in memory.storages:
        if storage.category is Category.ACTIVATIONS:
            change[storage.birth] += storage.nbytes
            change[storage.death + 1] -= storage.nbytes
    return max(accumulate(change[time] for time in sorted(change)), default=0)
