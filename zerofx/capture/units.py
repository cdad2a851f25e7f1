"""Units: the modules whose parameters share collectives; by default one repeated block each."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from zerofx.compat.modules import own_parameters
from zerofx.errors import CaptureError
from zerofx.ir.names import find_unit_of_module

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_units(model: nn.Module, patterns: str | Sequence[str] = "auto") -> dict[str, str]:
    """Return the unit of every parameter, by name; a tied name has the unit of its first name.

    The blocks of a repeated container are units (a GPT's layers, the blocks of a ResNet's stages).
    The rest is grouped by the topmost modules that contain no unit: embedding, final norm, head.
    Parameters of a module that does contain units belong to the unit of the nearest such ancestor,
    "" for the root.

    patterns: names of modules to use as units instead (fnmatch, `blocks.*`).

    Raises:
        CaptureError: a pattern matches no module.
    """
    blocks = _repeated_blocks(model, "") if patterns == "auto" else _matching(model, patterns)
    units = set(blocks)
    # Without any repeated block, a wrapper would be one unit with nearly everything: split it.
    limit = None if blocks else sum(p.numel() for p in model.parameters()) // 2
    units.update(_topmost_without(model, "", units, limit))
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(param), name)
        found[name] = find_unit_of_module(first[id(param)].rpartition(".")[0], units)
    return found


def _matching(model: nn.Module, patterns: str | Sequence[str]) -> list[str]:
    """Return the outermost modules that match any of the patterns."""
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    names = [name for name, _ in model.named_modules() if name]
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise CaptureError(
                f"units: no module of {type(model).__name__} matches {pattern!r}. "
                f"Its modules are {', '.join(names[:8])}{' and others' if len(names) > 8 else ''}."
            )
    found: list[str] = []
    for name in names:
        is_inside = find_unit_of_module(name, found) != ""
        if not is_inside and any(fnmatchcase(name, p) for p in wanted):
            found.append(name)
    return found


def _children(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """Return the children that hold parameters, with their qualified names."""
    dot = f"{prefix}." if prefix else ""
    return [
        (dot + name, child)
        for name, child in module.named_children()
        if any(True for _ in child.parameters())
    ]


def _is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def _repeated_blocks(module: nn.Module, name: str) -> list[str]:
    """Return the blocks of the outermost containers that repeat a structure."""
    children = _children(module, name)
    if isinstance(module, CONTAINERS):
        blocks = [(n, m) for n, m in children if not _is_leaf(m)]
        if blocks and _is_repetition([m for _, m in blocks]):
            return [n for n, _ in blocks]
    return [unit for n, child in children for unit in _repeated_blocks(child, n)]


def _is_repetition(blocks: list[nn.Module]) -> bool:
    """Return whether a container's children are blocks, rather than stages that contain the blocks.

    Two children of identical structure are sufficient (transformer layers; their experts stay
    inside). Otherwise one repeated class is (a residual stage, whose first block has a projection),
    unless each child is mostly a container of blocks itself (the stages of a ResNet or a Swin).
    """
    shapes = [_structure(b) for b in blocks]
    if len(set(shapes)) < len(shapes):
        return True
    if len({type(b) for b in blocks}) > 1:
        return False
    return not all(_is_stage(b) for b in blocks)


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """Describe a module by its parameters' shapes and the classes that hold them."""
    classes = tuple((n, type(m)) for n, m in module.named_modules() if own_parameters(m))
    return classes, tuple((n, tuple(p.shape)) for n, p in module.named_parameters())


def _is_stage(module: nn.Module) -> bool:
    """Return whether a module is a wrapper around a container of blocks of one class."""
    if isinstance(module, CONTAINERS):
        return any(not _is_leaf(m) for _, m in _children(module, ""))
    children = _children(module, "")
    for _, child in children:
        blocks = [m for _, m in _children(child, "") if not _is_leaf(m)]
        if not isinstance(child, CONTAINERS) or not blocks:
            continue
        is_only = len(children) == 1 and len({type(b) for b in blocks}) == 1
        if is_only or len({_structure(b) for b in blocks}) < len(blocks):
            return True
    return False


def _topmost_without(
    module: nn.Module, name: str, units: set[str], max_numel: int | None
) -> list[str]:
    """Return the topmost modules that contain no unit; one of more than `max_numel` is split."""
    found: list[str] = []
    for child_name, child in _children(module, name):
        if child_name in units:
            continue
        inside = any(unit.startswith(f"{child_name}.") for unit in units)
        is_large = max_numel is not None and max_numel < sum(p.numel() for p in child.parameters())
        if inside or (is_large and _children(child, child_name)):
            found += _topmost_without(child, child_name, units, max_numel)
        else:
            found.append(child_name)
    return found
