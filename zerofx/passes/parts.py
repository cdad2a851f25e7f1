"""Parts of parameters: what a rank of the tensor axis holds of each, for passes and the layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from zerofx.ir.program import ParamInfo
from zerofx.layout.buckets import Layout
from zerofx.layout.placements import Part
from zerofx.layout.styles import EXPERTS, cut_of, divides_experts, part_of
from zerofx.plan.fields import Patterns
from zerofx.plan.parts import Parallel


def with_parts(params: Iterable[ParamInfo], parallel: Parallel) -> list[ParamInfo]:
    """Return the parameters as one rank of the tensor axis holds them, according to their style.

    The slices of a model that brings its own are cut already.
    """
    if parallel.brings_slices:
        return list(params)
    return [_with_part(p, parallel) for p in params]


def with_styles_of(layout: Layout, params: Mapping[str, ParamInfo]) -> dict[str, ParamInfo]:
    """Return the parameters with the styles by which a layout has cut them.

    A model's layout is made before its first call, so that it may cut less than a graph shows.
    """
    if layout.mesh.along("tensor") == 1:
        return dict(params)
    parts = {piece.owner: piece.owner_part for b in layout.buckets for piece in b.params}
    return {name: _in_style_of(parts.get(name), param) for name, param in params.items()}


def _in_style_of(part: Part | None, param: ParamInfo) -> ParamInfo:
    if part is None:
        return replace(param, style="", is_stack=False)
    if divides_experts(part):
        return replace(param, style=EXPERTS, is_stack=False)
    outputs = part.cut.dim if param.outputs < 0 else param.outputs
    kind = "colwise" if part.cut.dim == outputs else "rowwise"
    style = f"{kind}/{part.cut.groups}"
    return replace(param, style=style, outputs=outputs, is_stack=False)


def _with_part(param: ParamInfo, parallel: Parallel) -> ParamInfo:
    if param.tile is not None:  # cut like the parameter that it is a tile of
        tiled = param.tile.own_part
        return param if tiled is None else replace(param, shape=tiled.local, part=tiled)
    style = param.style
    if parallel.experts and param.is_stack and param.shape[0] % parallel.tensor == 0:
        style = EXPERTS
    if isinstance(parallel.placements, Patterns):
        own = (param.name, *param.aliases)
        names = [*own, *(name.rpartition(".")[0] for name in own)]
        style = next((s for n in names if (s := parallel.placements.match(n))), style)
    part = part_of(param.shape, cut_of(style, param.shape, param.outputs), parallel.tensor)
    return param if part is None else replace(param, shape=part.local, part=part)
