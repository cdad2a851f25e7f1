"""send-rows: reduce gradients of tables by the rows that were looked up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from zerofx import ops
from zerofx.ir.meta import info
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import is_reduction
from zerofx.ops.gradients import looked_up
from zerofx.passes.base import Fact, Pass, Report
from zerofx.policy import reduction

_BY_ROWS = {ops.reduce_scatter: ops.reduce_scatter_rows, ops.all_reduce: ops.all_reduce_rows}


@dataclass(frozen=True)
class SendRows(Pass):
    """Tell the reduction of each table which rows this backward has gradients for.

    How many distinct ones there are is known when it is launched. All ranks then choose what sends
    less, rows or the whole table; so sizes of batches do not matter here.
    """

    name: ClassVar[str] = "send-rows"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADS_REDUCED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.WAITS_SUNK})

    enabled: bool = False

    def run(self, program: Planned) -> Report:
        if not self.enabled:
            return Report(False, "off")
        if BACKWARD not in program.graphs or len(reduction.legs(program.layout.mesh)) != 1:
            return Report(False, "no reduction over one axis")
        tables = 0
        for launch in filter(is_reduction, program.graph(BACKWARD).nodes):
            bucket = program.layout.buckets[info(launch).index]
            is_table = len(bucket.params) == 1 and len(bucket.params[0].shape) == 2
            if not is_table or bucket.is_away or bucket.tile is not None:
                continue
            indices = _indices(launch)
            if indices:
                launch.target = _BY_ROWS[launch.target]  # type: ignore[index]
                launch.args = (*launch.args, indices)
                tables += 1
        return Report(tables > 0, f"{tables} tables by rows")


def _indices(launch: fx.Node) -> list[fx.Node]:
    """Return the indices of all rows of the gradient that a launch sends; none if unknown."""
    packed: Any = launch.args[0]
    (grad,) = packed.args[1]
    return looked_up(grad)
