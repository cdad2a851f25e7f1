"""cast: keep parameters in the master format, whatever format the graph computes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zerofx.errors import PlanError
from zerofx.ir.program import Planned
from zerofx.layout.buckets import LOW_OR_SINGLE
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.placement import compute_dtype, module_dtypes, with_master
from zerofx.plan.fields import Patterns
from zerofx.plan.plan import Precision


@dataclass(frozen=True)
class Cast(Pass):
    """Declare the storage format of each parameter; gathers then cast the shard before sending it.

    The graph itself was captured in the compute format. Only then do the model's own casts take
    effect: a norm's `x.float()` leaves no node in an fp32 graph. The pass rewrites nothing else.
    Buckets take their formats from this declaration, and `dtype=` on a gather, a gradient buffer
    and a store_grad marks the points where a value changes format.

    Raises:
        PlanError: the program was captured for another compute format.
    """

    name: ClassVar[str] = "cast"
    keeps_bits: ClassVar[bool] = False
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CAPTURED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED, Fact.BUCKETS_ASSIGNED})

    precision: Precision

    def run(self, program: Planned) -> Report:
        wanted = compute_dtype(self.precision)
        if program.compute_dtype is not wanted:
            raise PlanError(
                f"Plan.precision computes in {wanted or 'the parameters own format'}, but this "
                f"program was captured in {program.compute_dtype or 'that'}. Capture it with "
                f"zerofx.capture(model, args, compute_dtype={wanted})."
            )
        modules = module_dtypes(self.precision) or Patterns({})
        for name, param in program.params.items():
            chosen = modules.match(name)
            if chosen not in (None, param.compute_dtype) and param.dtype in LOW_OR_SINGLE:
                raise PlanError(
                    f"Plan.precision.modules computes with {name} in {chosen}, but this program "
                    f"was captured with it in {param.compute_dtype}. Capture it with "
                    "zerofx.capture(model, args, module_dtypes={...})."
                )
        params = with_master(program.params.values(), self.precision)
        changed = sum(p.dtype is not program.params[p.name].dtype for p in params)
        num = sum(p.dtype is not p.compute_dtype for p in params)
        program.params = {p.name: p for p in params}
        return Report(changed > 0, f"{num} of {len(params)} parameters are cast when gathered")

    def options(self) -> dict[str, object]:
        p = self.precision
        given: dict[str, object] = {"compute": p.compute, "reduce": p.reduce, "master": p.master}
        return given | ({} if p.modules is None else {"modules": dict(p.modules)})
