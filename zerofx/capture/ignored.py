"""Ignored parameters: those that zerofx leaves to the user, and that programs take as inputs.

They stay the plain parameters of their modules: not sharded, moved, gathered or reduced. A program
takes them as further tensors of each call, so that autograd reaches them as it reaches any input:
it gives each rank's own gradient to `p.grad`, and runs their hooks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from zerofx.capture.original import Entry
from zerofx.compat.modules import own_parameters
from zerofx.errors import PlanError
from zerofx.plan.fields import covers

KEYWORD = "ignored_params"  # of a call, which has them by name


def find_ignored(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return all names of the parameters that a plan ignores.

    A tied parameter is ignored if a pattern covers one of its names.

    Raises:
        PlanError: a pattern covers no parameter.
    """
    if not patterns:
        return ()
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(covers(pattern, name) for name, _ in named):
            raise PlanError(
                f"Plan.ignored_params: {pattern!r} covers no parameter of {type(model).__name__}. "
                f"Its parameters are {', '.join(name for name, _ in named[:8])}"
                f"{', ...' if len(named) > 8 else ''}"
            )
    chosen = {id(p) for name, p in named if any(covers(pattern, name) for pattern in patterns)}
    return tuple(name for name, param in named if id(param) in chosen)


def ignored_of(model: nn.Module, names: Collection[str], entry: Entry) -> dict[str, nn.Parameter]:
    """Return the ignored parameters that a function may read, as they are now, by first name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, module in entry.modules(model).items():
        for key, param in own_parameters(module).items():
            name = f"{path}.{key}" if path else key
            if param is not None and name in names:
                found.setdefault(id(param), (name, param))
    return dict(found.values())


def with_ignored(kwargs: Mapping[str, Any], params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return the keywords of a call that a program takes: the user's, and these parameters."""
    return {**kwargs, KEYWORD: dict(params)} if params else dict(kwargs)
