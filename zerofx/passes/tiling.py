"""Tile counts: the number of tiles of each parameter, decided before capture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from zerofx.errors import PlanError
from zerofx.ir.program import ParamInfo
from zerofx.layout.build import align_numel
from zerofx.layout.tiles import Tile, tiles_of
from zerofx.plan.fields import Patterns, covers, nearest
from zerofx.plan.plan import Plan
from zerofx.plan.sizes import format_bytes

# The share of the budget, after shards, gradients and states, that a tile may use under
# tiling="auto": two gathers and two reductions are in flight at once, and activations need room
# too.
MOST = 64  # tiles per weight under "auto": each has collectives of its own
AUTO_SHARE = 1 / 8
STATE_BYTES = 8  # AdamW's fp32 states per element, as in predictions


def choose_tiles(params: Iterable[ParamInfo], plan: Plan, world_size: int) -> dict[str, int]:
    """Return the number of tiles of each parameter that has more than one.

    Parameters whose tiling saves no memory stay whole: see `gains`.

    params: each as a rank holds it, so that a part of one is what is tiled.

    Raises:
        PlanError: a pattern matches no weight of a layer, or a parameter cannot be cut into the
            requested number of tiles; the message gives the parameter, both numbers and the nearest
            possible number.
    """
    params = [p for p in params if p.tile is None]
    wanted: Mapping[str, int] = {}
    if isinstance(plan.tiling, Patterns):
        wanted = _named(params, plan.tiling)
    shard_size, _ = plan.axis_sizes(world_size)
    gaining = {p.name: p for p in params if gains(p, plan, shard_size)}
    if plan.tiling == "auto":
        return _chosen(params, plan, shard_size) if gaining else {}
    found = {name: count for name, count in wanted.items() if name in gaining}
    for name, count in found.items():
        _check(gaining[name], count, shard_size)
    return {name: count for name, count in found.items() if count > 1}


def gains(param: ParamInfo, plan: Plan, shard_size: int) -> bool:
    """Return whether tiling a parameter lowers device memory: its tiles come and go one by one.

    This is the case at stage 3 if the rest of the parameter is on other ranks, or all of it is off
    the device. Otherwise the gathered parameter is resident, or the shard itself is: on one rank,
    the part that `device_fraction` keeps on the device.
    """
    is_away = _is_away(param, plan) and not plan.offload.device_fraction
    return plan.stage == 3 and (shard_size > 1 or is_away)


def _is_away(param: ParamInfo, plan: Plan) -> bool:
    """Return whether gathers read a parameter from off the device, where it has no device copy."""
    offload = plan.offload
    return offload.parameters != "none" and not (
        param.requires_grad and offload.optimizer == "none"
    )


def with_tiles(params: Iterable[ParamInfo], counts: Mapping[str, int]) -> list[ParamInfo]:
    """Return the parameters, each as a rank holds it, with each tiled one replaced by its tiles."""
    found: list[ParamInfo] = []
    for p in params:
        found += [
            replace(tile_info(p, tile), shape=tile.local, part=tile.own_part)
            for tile in tiles_of_param(p, counts.get(p.name, 0))
        ]
        if p.name not in counts:
            found.append(p)
    return found


def tiles_of_param(param: ParamInfo, count: int) -> list[Tile]:
    """Return the tiles of a parameter, which is described as a rank holds it."""
    whole = param.shape if param.part is None else param.part.shape
    return tiles_of(param.name, whole, count, param.part)


def tile_info(param: ParamInfo, tile: Tile) -> ParamInfo:
    """Return a tile as a parameter of its own, alone in its unit, and whole on every rank."""
    return replace(
        param, name=tile.part_name, shape=tile.whole, unit=tile.unit, tile=tile, part=None
    )


# -- by name ------------------------------------------------------------------------------------
def _named(params: Sequence[ParamInfo], patterns: Patterns) -> dict[str, int]:
    """Return the number of tiles that the plan asks for, by parameter."""
    for pattern in patterns:
        covered = [p for p in params if covers(pattern, p.name)]
        if not covered:
            raise PlanError(
                f"Plan.tiling names {pattern!r}, which covers no parameter"
                f"{nearest(pattern, [p.name for p in params])}"
            )
        if not any(len(p.shape) == 2 for p in covered):
            first = covered[0]
            raise PlanError(
                f"Plan.tiling names {pattern!r}, which covers {first.name} of shape "
                f"{list(first.shape)} and no matrix. Only the weights of linear and embedding "
                "layers are tiled."
            )
    matches = [(p, patterns.match(p.name)) for p in params if len(p.shape) == 2]
    matrices = [(p, int(count)) for p, count in matches if count is not None]
    for p, count in matrices:
        if p.aliases and count > 1:
            raise PlanError(
                f"Plan.tiling: {p.name} is tied to {', '.join(p.aliases)}, and a weight that "
                "layers share is not tiled. Leave it out of the patterns, or untie it."
            )
    return {p.name: count for p, count in matrices}


def _check(param: ParamInfo, count: int, shard_size: int) -> None:
    if _is_cut_evenly(param, count, shard_size):
        return
    possible = list(_possible(param, shard_size))
    step = shard_size * _align(param)
    way_out = "It cannot be tiled on so many ranks. Leave it out of the patterns."
    if possible:
        best = min(possible, key=lambda k: (abs(k - count), k))
        way_out = f"The nearest valid number is {best}."
    cut = param.part
    of = (
        f"{list(param.shape)}" if cut is None else f"{list(cut.shape)} ({list(cut.local)} per rank)"
    )
    groups = f" of one of its {cut.cut.groups} groups" if _num_groups(param) > 1 and cut else ""
    raise PlanError(
        f"Plan.tiling cuts {param.name} {of} into {count} tiles, but a tile must have whole "
        f"rows{groups} and a multiple of {step} elements ({shard_size} ranks, each aligned to "
        f"{_align(param)}). {way_out}"
    )


def _num_groups(param: ParamInfo) -> int:
    """Return the number of groups of rows that the tensor axis cuts one by one."""
    return param.part.cut.groups if param.part is not None and param.part.cut.dim == 0 else 1


def _align(param: ParamInfo) -> int:
    # the narrowest format that the plan may reduce or compute in
    return align_numel(min(param.dtype.itemsize, param.compute_dtype.itemsize, 2))


def _is_cut_evenly(param: ParamInfo, count: int, shard_size: int) -> bool:
    rows = param.shape[0]
    numel = math.prod(param.shape)
    is_of_groups = count % _num_groups(param) == 0
    return is_of_groups and rows % count == 0 and numel // count % (shard_size * _align(param)) == 0


def _possible(param: ParamInfo, shard_size: int) -> Iterator[int]:
    """Yield every number of tiles above 1 that a parameter can be cut into, ascending."""
    rows = param.shape[0]
    divisors = (k for k in range(2, rows + 1) if rows % k == 0)
    return (k for k in divisors if _is_cut_evenly(param, k, shard_size))


# -- by budget ----------------------------------------------------------------------------------
def tile_budget(params: Iterable[ParamInfo], plan: Plan, shard_size: int) -> int:
    """Return the bytes that one tile may use under tiling="auto", gathered and as a gradient."""
    assert plan.memory_budget is not None
    standing = sum(_standing_bytes(p, plan) for p in params) / shard_size
    return max(0, int((plan.memory_budget - standing) * AUTO_SHARE))


def _standing_bytes(param: ParamInfo, plan: Plan) -> float:
    """Return the device bytes of a parameter, its gradient and its states between uses.

    State that is kept off the device leaves a device copy to gather from, unless parameters are off
    the device too.
    """
    copy = 0 if _is_away(param, plan) else param.compute_dtype.itemsize
    stays, each = 1.0, float(param.dtype.itemsize)
    if not param.requires_grad:
        stays = float(plan.offload.parameters == "none")
    else:
        each += param.dtype.itemsize + STATE_BYTES
        if plan.offload.optimizer != "none":
            stays = plan.offload.device_fraction
    return math.prod(param.shape) * (stays * each + (1 - stays) * copy)


def working_bytes(param: ParamInfo) -> int:
    """Return the bytes of a gathered parameter, including its gradient if it has one."""
    return math.prod(param.shape) * param.compute_dtype.itemsize * (1 + param.requires_grad)


def _chosen(params: Sequence[ParamInfo], plan: Plan, shard_size: int) -> dict[str, int]:
    """Return, for each layer weight above the share, the fewest tiles that fit into the share.

    If no number fits, the result is the largest possible one, up to `MOST`: no number of tiles
    meets a budget that the resident tensors exceed already. Weights that several layers share stay
    whole.
    """
    limit = tile_budget(params, plan, shard_size)
    found = {}
    for p in params:
        is_small = working_bytes(p) <= limit
        if not p.layer or p.aliases or is_small or not gains(p, plan, shard_size):
            continue
        possible = [k for k in _possible(p, shard_size) if k <= MOST]
        fitting = (k for k in possible if working_bytes(p) <= limit * k)
        if possible:
            found[p.name] = next(fitting, possible[-1])
    return found


def describe(params: Iterable[ParamInfo], plan: Plan, world_size: int) -> str:
    """Describe in one line what was tiled, and by which rule."""
    params = list(params)
    tiled = {p.tile.name: p for p in params if p.tile is not None}
    shard_size, _ = plan.axis_sizes(world_size)
    if plan.tiling == "off":
        return "nothing asked for"
    if not any(gains(p, plan, shard_size) for p in params):
        return f"nothing to gain: parameters are not gathered at stage {plan.stage} on {shard_size}"
    text = ", ".join(
        f"{name} in {p.tile.count} tiles of {format_bytes(working_bytes(p))}"
        for name, p in tiled.items()
        if p.tile is not None
    )
    if plan.tiling == "auto":
        limit = format_bytes(tile_budget(params, plan, shard_size))
        text = f"{text or 'nothing'} (a tile and its gradient may take {limit})"
    return text
