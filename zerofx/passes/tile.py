"""tile: execute large layers tile by tile, each tile of the weight gathered and reduced alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zerofx.errors import PlanError
from zerofx.ir.graphs import set_results
from zerofx.ir.meta import OutputInfo, Role, info, set_info, value
from zerofx.ir.program import JOINT, ParamInfo, Planned
from zerofx.layout.buckets import Layout
from zerofx.layout.tiles import tiles_of
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.tiled_weight import NotTiled, TiledWeight
from zerofx.passes.tiling import choose_tiles, describe, tile_info, with_tiles
from zerofx.plan.plan import Plan


@dataclass(frozen=True)
class Tile(Pass):
    """Replace a weight by tiles of its rows, and each product with it by one a tile.

    y = x W^T + b becomes cat_i(x W_i^T + b_i), and dx = dy W becomes sum_i dy_i W_i; the gradient
    of W_i is dy_i^T x. Each tile is a parameter of its own to all later passes, with a gather, a
    release and a reduction of its own, so that k tiles lower to 1/k what is gathered at a time. To
    the user the weight stays one parameter. The sum over tiles rounds differently from one product
    does: like fuse, this comes before the reference that all else is proved against.

    Under "auto" a weight that something else than a linear or an embedding layer reads is put
    together from its tiles for that; under a pattern this is refused.

    Raises:
        PlanError: see choose_tiles; or something else reads a weight that a pattern names.

    Source: ZeRO-Infinity (arXiv 2104.07857), section 5.1.3, memory-centric tiling.
    """

    name: ClassVar[str] = "tile"
    keeps_bits: ClassVar[bool] = False
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CAPTURED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED, Fact.SPLIT})

    plan: Plan
    world_size: int
    layout: Layout | None = None

    def run(self, program: Planned) -> Report:
        params = list(program.params.values())
        counts = (
            self.layout.tiles
            if self.layout is not None
            else choose_tiles(params, self.plan, self.world_size)
        )
        for name, count in counts.items():
            _tile(program, program.params[name], count, is_asked_for=self.plan.tiling != "auto")
        program.params = {p.name: p for p in with_tiles(params, counts)}
        summary = describe(program.params.values(), self.plan, self.world_size)
        return Report(bool(counts), summary)

    def options(self) -> dict[str, object]:
        tiling = self.plan.tiling
        return {"tiling": tiling if isinstance(tiling, str) else dict(tiling)}


def _tile(program: Planned, param: ParamInfo, count: int, is_asked_for: bool) -> None:
    """Replace one parameter in every graph, and its gradient in the results."""
    infos = [tile_info(param, tile) for tile in tiles_of(param.name, param.shape, count)]
    for name in program.graphs:
        weights = [w for w in program.placeholders(name, Role.PARAM) if info(w).name == param.name]
        for weight in weights:
            tiled = TiledWeight(weight, _placeholders(weight, infos), _gradient(program, param))
            try:
                tiled.find()
            except NotTiled as error:
                if is_asked_for:
                    raise _refusal(param, count, error) from None
                gradients = tiled.join()
            else:
                gradients = tiled.rewrite()
            if name == JOINT:
                _replace_gradient(program, param.name, infos, gradients)
            tiled.erase()


def _placeholders(weight: fx.Node, infos: list[ParamInfo]) -> list[fx.Node]:
    """Put a placeholder for each tile behind the whole weight's."""
    graph, last, made = weight.graph, weight, []
    for number, part in enumerate(infos):
        with graph.inserting_after(last):
            last = graph.placeholder(f"{weight.name}_tile_{number}")
        last.meta["val"] = value(weight).new_empty(part.shape)
        set_info(last, role=Role.PARAM, name=part.name, unit=part.unit)
        made.append(last)
    return made


def _gradient(program: Planned, param: ParamInfo) -> fx.Node | None:
    """Return the gradient of a parameter, None where it has none."""
    if JOINT not in program.graphs:
        return None
    pairs = zip(program.outputs[JOINT], program.results(JOINT), strict=True)
    return next((n for s, n in pairs if s.role is Role.GRAD and s.name == param.name), None)


def _replace_gradient(
    program: Planned, name: str, infos: list[ParamInfo], gradients: list[fx.Node | None]
) -> None:
    outputs, results = [], []
    for spec, node in zip(program.outputs[JOINT], program.results(JOINT), strict=True):
        if spec.role is Role.GRAD and spec.name == name:
            outputs += [OutputInfo(Role.GRAD, part.name) for part in infos]
            results += gradients
        else:
            outputs.append(spec)
            results.append(node)
    program.outputs[JOINT] = tuple(outputs)
    set_results(program.graph(JOINT), results)


def _refusal(param: ParamInfo, count: int, error: NotTiled) -> PlanError:
    where = info(error.node).line
    at = f" at {where}" if where else ""
    return PlanError(
        f"Plan.tiling asks for {count} tiles of {param.name} {list(param.shape)}, but "
        f"{error.node.target}{at} reads it or its gradient, and only the products and lookups of "
        "linear and embedding layers run tile by tile; leave it out of the patterns"
    )
