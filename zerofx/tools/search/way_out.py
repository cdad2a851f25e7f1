"""Suggestions for a plan that does not fit: the nearest plan that fits, or more ranks."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from zerofx.analysis.time.forecast import available_bytes
from zerofx.errors import ZerofxError
from zerofx.hardware import Hardware
from zerofx.ir.program import Loop, Program
from zerofx.plan.fields import write_yaml
from zerofx.plan.plan import Plan
from zerofx.policy.schedules import expected_micro_batches
from zerofx.tools.search.bounds import Bounds
from zerofx.tools.search.engine import Search
from zerofx.tools.search.family import Family, FamilyOfOne, ModelFamily, Says
from zerofx.tools.search.nearest import (
    Nearest,
    differing,
    more_ranks,
    nearest,
    ranks_needed,
    written,
)
from zerofx.tools.search.outcome import Outcome
from zerofx.tools.search.space import NVME, SEARCHED, Choice, Space
from zerofx.tools.targets import Target
from zerofx.tools.words import counted

TRIED = 24  # plans that are priced at most
FIELDS = (*SEARCHED, "memory_budget")  # of a plan that may be changed
BATCH = "micro-batches"  # the name of a change of the loop, next to the fields of a plan


@dataclass(frozen=True)
class WayOut:
    """The suggestion for a plan that does not fit.

    nearest: the plan with the fewest changes of those that were tried and fit, or None.
    closest: if there is none, the plan that lacks the fewest bytes; ranks: the world that it fits,
        or 0. problem: the reason why no other plan could be tried.
    """

    tried: int
    nearest: Nearest | None = None
    closest: Outcome | None = None
    ranks: int = 0
    problem: str = ""

    @property
    def plan(self) -> Plan | None:
        """The nearest plan that fits."""
        return self.nearest.outcome.choice.plan if self.nearest else None

    def lines(self) -> list[str]:
        """Return it as text."""
        tried = f"{counted(self.tried, 'plan')} priced, {TRIED} at most"
        if self.problem:
            return [f"no other plan could be tried: {self.problem}"]
        if self.nearest is not None:
            return [f"{written(self.nearest)} ({tried})", *_options(self.nearest.changed)]
        lines = [f"no plan that fits was found for this world ({tried})"]
        if self.closest is None:
            return [*lines, "use devices with more memory"]
        lines.append(f"the closest plan: {self.closest.choice.words()}")
        lines += [f"  {shortage}" for shortage in self.closest.shortages]
        return [*lines, more_ranks(self.ranks)]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        found: dict[str, Any] = {"tried": self.tried, "nearest": None, "ranks": self.ranks or None}
        found |= {"problem": self.problem} if self.problem else {}
        if self.nearest is not None:
            found["nearest"] = self.nearest.outcome.to_dict() | {"changed": self.nearest.changed}
        if self.closest is not None:
            missing = {s.tier: s.missing_bytes for s in self.closest.shortages}
            found["closest"] = self.closest.to_dict() | {"missing_bytes": missing}
        return found


def way_out(
    target: Target | None, captured: Program, plan: Plan, hardware: Hardware, world_size: int,
    loop: Loop, known: Mapping[str, Any], says: Says,
) -> WayOut:  # fmt: skip
    """Return the suggestion for `plan`, which does not fit; the global batch stays the same.

    target: the model of the captured program, if it is at hand: then fewer layers and smaller
        micro-batches can be captured. known: options of the loop, as `forecast` takes them.
    """
    says(f"does not fit: looking for the nearest plan that does, {TRIED} at most", False)
    try:
        family = _family(target, captured, plan, known, says)
        given = Choice(plan, family.samples, *astuple(loop))
        axes = plan.parallel
        if axes.pipeline > 1:
            num = expected_micro_batches(axes.micro_batches, axes.pipeline)
            given = replace(given, accumulation=num * loop.accumulation, no_sync=False)
        return _way_out(family, given, hardware, world_size)
    except ZerofxError as error:
        return WayOut(0, problem=str(error))


def _family(
    target: Target | None, captured: Program, plan: Plan, known: Mapping[str, Any], says: Says
) -> Family:
    if target is None:
        return FamilyOfOne(plan, known, says, program=captured)
    family = ModelFamily(plan, known, says, target=target)
    family.begin_with(captured)
    return family


def _way_out(family: Family, given: Choice, hardware: Hardware, world_size: int) -> WayOut:
    plan, samples, there = given.plan, given.samples, available_bytes(hardware)
    base = plan
    if plan.memory_budget is not None and plan.memory_budget > there:
        base = replace(plan, memory_budget=there)  # a budget larger than a device does not help
    ranks = world_size // plan.parallel.num_shared
    is_cut = plan.parallel.is_used
    space = Space(
        hardware, world_size, samples * given.accumulation * ranks, base,
        frozenset() if is_cut else frozenset({"parallel"}),
        family.tiled, plan.offload.path or NVME, samples,
        family.units if plan.parallel.pipeline > 1 else 0, family.tokens > 0,
        plan.parallel.pipeline == 1 or family.has_loss,
    )  # fmt: skip
    bounds = Bounds(family, hardware, world_size, space.plainest)
    search = Search(family, space, bounds, says=family.says)

    def changes(choice: Choice) -> dict[str, Any]:
        found = differing(plan, choice, FIELDS)
        if choice.samples != samples:
            found[BATCH] = f"{choice.accumulation} of {choice.samples} samples"
        if choice.no_sync != given.no_sync and given.accumulation > 1:
            found["no_sync"] = choice.no_sync
        return found

    found = nearest(search, [c for c in space.choices() if changes(c)], changes, TRIED)
    tried = len(search.priced)
    if found is not None:
        return WayOut(tried, found)
    closest = min(search.priced.values(), key=lambda o: o.missing_bytes, default=None)
    closest = closest or search.price(given)
    return WayOut(tried, None, closest, 0 if closest is None else ranks_needed(search, closest))


def _options(changed: Mapping[str, Any]) -> list[str]:
    """Return the options of a command line that set these plan fields."""
    fields = {name: value for name, value in changed.items() if name in FIELDS}
    said = " ".join(f"--set {shlex.quote(f'{n}={_flow(v)}')}" for n, v in fields.items())
    return [f"  {said}"] if said else []


def _flow(value: Any) -> str:
    """Write a value as YAML on one line."""
    return write_yaml(value, is_flow=True)
