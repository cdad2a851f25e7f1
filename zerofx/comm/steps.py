"""The optimizer steps that a rank has taken since its last agreement, for comparison by all ranks.

Steps are announced with the next call, so that comparing them needs no message of its own. A rank
that steps with other options, more often or not at all is named before its parameters are next
gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

_MANNER = frozenset({"foreach", "fused", "capturable"})  # how a step is computed, not its result


class StepLog:
    """The steps over one world's parameters since the last agreement."""

    def __init__(self) -> None:
        self._since: list[str] = []
        self._last: tuple[Any, str] = ((), "")

    def note(self, optimizer: Optimizer) -> None:
        """Record a step that has just been made."""
        options = options_of(optimizer)
        if options != self._last[0]:  # they change only if something schedules them
            self._last = options, _text(options)
        self._since.append(self._last[1])

    def take(self) -> str:
        """Return the steps since the last call as readable "name=value" items, and forget them."""
        if not self._since:
            return ""
        since, self._since = self._since, []
        return f"optimizer steps={len(since)};{';'.join(dict.fromkeys(since))}"


def options_of(optimizer: Optimizer) -> tuple[Any, ...]:
    """Return an optimizer's class, and the values of its options in each parameter group.

    Options are those with defaults in the constructor; other keys of groups belong to the user. The
    implementation of a step (`foreach`, `fused`, `capturable`) may differ between ranks.
    """
    names = [name for name in optimizer.defaults if name not in _MANNER]
    groups = [
        tuple([_plain(group.get(name)) for name in names]) for group in optimizer.param_groups
    ]
    return type(optimizer).__name__, tuple(names), tuple(groups)


def describe(optimizers: Sequence[Optimizer]) -> str:
    """Return the options as readable "name=value" items; several optimizers are numbered."""
    if len(optimizers) == 1:
        return _text(options_of(optimizers[0]))
    texts = [_text(options_of(each)).split(";") for each in optimizers]
    items = [f"optimizers[{i}].{item}" for i, text in enumerate(texts) for item in text]
    return ";".join(items) or "optimizer=None"


def _plain(value: Any) -> Any:
    """Return the value of an option; for a tensor on a device only "tensor", as reading waits."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else "tensor"
    if isinstance(value, (tuple, list)):
        return tuple([_plain(v) for v in value])
    is_simple = value is None or isinstance(value, (bool, int, float, str))
    return value if is_simple else type(value).__name__


def _text(options: tuple[Any, ...]) -> str:
    kind, names, groups = options
    items = [f"optimizer={kind}", f"param_groups={len(groups)}"]
    for i, values in enumerate(groups):
        where = f"param_groups[{i}]." if len(groups) > 1 else ""
        pairs = zip(names, values, strict=True)
        items += [f"{where}{name}={value}" for name, value in pairs]
    return ";".join(items)
