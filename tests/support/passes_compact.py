"""Programs in a line a statement, and passes run one by one: what the tests of passes share.

gather 0          launch of bucket 0's all-gather     region 2 layers.0   compute
wait gather 0     its wait                            grads 0             a gradient buffer
view 0: w, b      its parameters                      pack 0: w           gradients packed
release 0                                             reduce 0, store 0
reload 0          bucket 0's shard on its way         copy 0              where a copy stays there
release shard 0   its copy given back                 offload 0           its gradient's way back
"""

from __future__ import annotations

from functools import cache

import op_sets
from oracle_cases import Choice, captured
from torch import fx

from zerofx import ops
from zerofx.ir.meta import info
from zerofx.ir.program import Planned, Program
from zerofx.passes.base import Pass
from zerofx.passes.order import build

_WORDS = {
    ops.all_gather: "gather",
    ops.refresh: "refresh",
    ops.resident: "resident",
    ops.release: "release",
    ops.grad_buffer: "grads",
    ops.reduce_scatter: "reduce",
    ops.all_reduce: "all-reduce",
    ops.hand_over: "hand over",
    ops.store_grad: "store",
    ops.update: "update",
    ops.reload_shard: "reload",
    ops.refresh_shard: "copy",
    ops.offload_grad: "offload",
}


def order(program: Planned, graph: str, views: bool = False) -> list[str]:
    """Return a graph's statements in order; `views` also lists which parameters are looked at."""
    rows: list[str] = []
    for node in program.graph(graph).nodes:
        row = _row(program, node, views)
        is_region = row is not None and row.startswith("region")
        if row is None or (is_region and rows and rows[-1].split()[:2] == row.split()[:2]):
            continue
        if row.startswith("view") and rows and rows[-1].split(":")[0] == row.split(":")[0]:
            rows[-1] += f", {info(node).name}"
            continue
        rows.append(row)
    return rows


def _row(program: Planned, node: fx.Node, views: bool) -> str | None:
    where = info(node)
    if where.region is not None:
        return f"region {where.region} {where.unit}".rstrip()
    if node.target is ops.release and node.args[0].args[0].target in op_sets.RELOADS:  # type: ignore[union-attr]
        is_shard = any(u.target is ops.all_gather for u in node.args[0].users)  # type: ignore[union-attr]
        return f"release {'shard ' if is_shard else ''}{where.index}"
    if node.target in _WORDS:
        return f"{_WORDS[node.target]} {where.index}"  # type: ignore[index]
    if node.target is ops.wait:
        launch = node.args[0]
        return f"wait {_WORDS[launch.target]} {where.index}"  # type: ignore[union-attr, index]
    if node.target is ops.param_view and views:
        return f"view {info(node.args[0]).index}: {where.name}"  # type: ignore[arg-type]
    if node.target is ops.pack:
        return f"pack {where.index}: {', '.join(_packed(program, node))}"
    if node.target is ops.sync_buffers:
        return f"sync {len(node.args[0])}"  # type: ignore[arg-type]
    return None


def _packed(program: Planned, pack: fx.Node) -> list[str]:
    bucket = program.layout.buckets[info(pack).index]
    places = {p.offset: p.name for p in bucket.params}
    return [places[offset] for offset in pack.args[2]]  # type: ignore[index, union-attr]


def before(case: str, choice: Choice, name: str) -> Planned:
    """Return a fresh copy of the program that the pass `name` of the pipeline is given."""
    return _behind(
        case, choice, [p.name for p in build(choice.setting()).passes].index(name)
    ).clone()


def final(case: str, choice: Choice) -> Planned:
    """Return a fresh copy of the program behind the last pass."""
    return _behind(case, choice, len(build(choice.setting()).passes)).clone()


@cache
def _behind(case: str, choice: Choice, count: int) -> Planned:
    """Return the program behind the first `count` passes, without the runner's checks."""
    if count == 0:
        program = captured(case, choice.units, choice.dtype).planned().clone()
        setting = choice.setting()
        program.plan, program.hardware = setting.plan, setting.hardware
        return program
    return run(_behind(case, choice, count - 1), build(choice.setting()).passes[count - 1])


def pass_named(choice: Choice, name: str) -> Pass:
    """Return the pipeline's own pass of that name."""
    return next(p for p in build(choice.setting()).passes if p.name == name)


def run(program: Program, made: Pass) -> Planned:
    """Run a pass on a copy of a program, without the runner's checks."""
    after = program.planned().clone()
    made.run(after)
    after.facts |= made.provides
    for gm in after.graphs.values():
        gm.graph.lint()
    return after
