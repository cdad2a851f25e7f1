"""The tasks of one step: every region, transfer and update of a finished program, priced."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from zerofx.analysis.memory.micro import micros
from zerofx.analysis.time.task import Price as Price
from zerofx.analysis.time.task import Prices as Prices
from zerofx.analysis.time.task import Task as Task
from zerofx.analysis.time.task import TaskList
from zerofx.analysis.time.task_steps import step_tasks
from zerofx.analysis.time.task_walk import Walk
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.repeats import is_numbered
from zerofx.ir.text import without_numbers


def tasks(program: Planned, prices: Prices, clips: bool = False) -> tuple[Task, ...]:
    """Return what a rank does in one step of a program: all micro-batches, then the optimizer.

    clips: the loop clips the global norm before the step.

    Raises:
        PlanError: the program's loop cannot be, see `micros`.
    """
    loop = program.loop
    micros(program, loop.accumulation, loop.no_sync)
    found = TaskList(prices)
    walk = Walk(program, found)
    for micro in range(loop.accumulation if BACKWARD in program.graphs else 1):
        found.micro = micro
        for graph in (FORWARD, BACKWARD):
            if graph in program.graphs:
                walk.run(graph)
    found.micro = 0
    if program.is_training and BACKWARD in program.graphs:
        step_tasks(program, found, walk.stored, clips)
    return _with_layers(found.found)


def _with_layers(found: list[Task]) -> tuple[Task, ...]:
    """Number the tasks of units that have others like them."""
    units = {t.unit for t in found if is_numbered(t.unit)}
    alike = Counter(map(without_numbers, units))
    number = {
        unit: int("".join(c if c.isdigit() else " " for c in unit).split()[0])
        for unit in units
        if alike[without_numbers(unit)] > 1
    }
    return tuple(replace(t, layer=number.get(t.unit)) for t in found)
