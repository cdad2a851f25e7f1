"""Whether what a program holds in host memory fits the plan's `host_budget`."""

from __future__ import annotations

from collections import Counter

from zerofx.analysis.memory.memory import memory
from zerofx.errors import BudgetError
from zerofx.ir.program import Planned
from zerofx.plan.sizes import format_bytes

NAMES = 3  # of the largest holders that an error gives


def check_host_budget(program: Planned) -> None:
    """Refuse a program that holds more on the host than its plan allows.

    Nothing here can give way: what lives on the host does so for good.

    Raises:
        BudgetError: names both numbers and what takes most.
    """
    budget = program.plan.host_budget
    if budget is None:
        return
    report = memory(program)
    if report.host_bytes <= budget:
        return
    held: Counter[str] = Counter()
    for storage in report.on_host:
        held[storage.name.partition("_")[0]] += storage.nbytes
    largest = ", ".join(f"{name} {format_bytes(n)}" for name, n in held.most_common(NAMES))
    raise BudgetError(
        f"host_budget: {program.model_name} holds {format_bytes(report.host_bytes)} "
        f"({report.host_bytes} bytes) on the host a rank at stage {program.plan.stage} and world "
        f"{program.world_size} ({largest}), but the budget is {format_bytes(budget)}; raise it "
        "to that, which is the least, shard over more ranks, or let the tier 'nvme' hold more",
        report.host_bytes,
    )
