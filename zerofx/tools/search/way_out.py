"""For one plan that does not fit: the nearest that does, or the ranks that it takes."""

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

TRIED = 24  # plans that are priced at most
FIELDS = (*SEARCHED, "memory_budget")  # of a plan that may be changed
BATCH = "micro-batches"  # what a change of the loop is called beside the fields of a plan


@dataclass(frozen=True)
class WayOut:
    """What to change of a plan that does not fit.

    nearest: of the plans that were tried and fit, the one with the fewest changes; None: none did.
    closest: where there is none, the plan that misses least; ranks: the world that it fits, or 0.
    problem: why no other plan could be looked at.
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
        """Say it as text."""
        tried = f"{self.tried} plan{'s' if self.tried != 1 else ''} priced, {TRIED} at most"
        if self.problem:
            return [f"no other plan could be looked at: {self.problem}"]
        if self.nearest is not None:
            return [f"{written(self.nearest)} ({tried})", *_options(self.nearest.changed)]
        lines = [f"no plan that fits was found for this world ({tried})"]
        if self.closest is None:
            return [*lines, "take devices with more memory"]
        lines.append(f"closest is: {self.closest.choice.words()}")
        lines += [f"  {shortage}" for shortage in self.closest.shortages]
        return [*lines, more_ranks(self.ranks)]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
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
    """Return what to change of `plan`, which does not fit; its global batch stays what it is.

    target: the model of the captured program, where more of it than that is at hand: then fewer
        layers and smaller micro-batches are looked at. known: of the loop, as `forecast` takes it.
    """
    says(f"does not fit: looking for the nearest plan that does, {TRIED} at most", False)
    try:
        family = _family(target, captured, plan, known, says)
        return _way_out(family, Choice(plan, family.samples, *astuple(loop)), hardware, world_size)
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
        base = replace(plan, memory_budget=there)  # a budget that no device has is no help
    space = Space(
        hardware, world_size, samples * given.accumulation * world_size, base, frozenset(),
        family.tiled, plan.offload.path or NVME, samples,
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
    """Return the line that says how a command line asks for these plan fields."""
    fields = {name: value for name, value in changed.items() if name in FIELDS}
    said = " ".join(f"--set {shlex.quote(f'{n}={_flow(v)}')}" for n, v in fields.items())
    return [f"  {said}"] if said else []


def _flow(value: Any) -> str:
    """Write a value as YAML on one line."""
    return write_yaml(value, is_flow=True)
