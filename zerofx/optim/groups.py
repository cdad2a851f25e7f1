"""Arguments of optimizers: parameter groups by name, and checks of common options.

A group takes the parameters that its patterns cover:

    zerofx.optim.AdamW([
        {"params": model.named_parameters(), "names": ["*.bias", "*norm*"], "weight_decay": 0.0},
        {"params": model.named_parameters()},
    ])

`names` is one pattern or a list: shell wildcards over whole names, where `*` also matches dots. The
name of a module (`blocks.0`) covers everything in it. A group takes parameters that no group before
it has taken; without `names` it takes all that are left.
"""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from zerofx.errors import OptimizerError
from zerofx.plan.fields import covers


def resolve_groups(params: Any) -> Any:
    """Return `params` in torch.optim's form, with "names" replaced by the parameters they cover.

    Raises:
        OptimizerError: a pattern covers none of its group's parameters, or they have no names.
    """
    if isinstance(params, Tensor):
        return params  # torch.optim raises its own error for it
    groups = list(params)
    if not any(isinstance(g, dict) and "names" in g for g in groups):
        return groups
    taken: set[int] = set()
    found = []
    for number, group in enumerate(groups):
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        is_named = "names" in group or all(isinstance(m, tuple) for m in members)
        names = group.get("names", "*")
        chosen = _chosen(number, members, names, taken) if is_named else members
        taken |= {id(m[1] if isinstance(m, tuple) else m) for m in chosen}
        found.append({**{k: v for k, v in group.items() if k != "names"}, "params": chosen})
    return found


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or covers(pattern, name)


def _chosen(number: int, members: list[Any], names: Any, taken: set[int]) -> list[Any]:
    if not all(isinstance(m, tuple) for m in members):
        raise OptimizerError(
            f'group {number} chooses by "names", so its "params" must have names. Give '
            "model.named_parameters()."
        )
    patterns = [names] if isinstance(names, str) else list(names)
    known = [name for name, _ in members]
    for pattern in patterns:
        if not any(_names(pattern, name) for name in known):
            near = difflib.get_close_matches(pattern, known, 3, 0.0)
            raise OptimizerError(
                f"group {number}: {pattern!r} names none of the {len(known)} parameters. The "
                f"nearest are {', '.join(near)}."
            )
    chosen = [
        (name, p)
        for name, p in members
        if id(p) not in taken and any(_names(pattern, name) for pattern in patterns)
    ]
    if not chosen:
        raise OptimizerError(
            f"group {number}: all parameters that {patterns} name are in earlier groups. Give "
            "the narrower patterns first, or drop the group."
        )
    return chosen


# -- options ---------------------------------------------------------------------------------------
def check_adam_options(
    lr: float | Tensor, betas: tuple[float, float], weight_decay: float, eps: float = 0.0
) -> None:
    """Check options as torch.optim does: rates, decay, eps and betas.

    Raises:
        ValueError: a rate, decay or eps is negative, or a beta is not in [0, 1); the message is
            that of torch.optim.
    """
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}.")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}.")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}.")
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}.")
