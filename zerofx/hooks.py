"""Notice module hooks that come or go after compile: they are part of what a program captured."""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class HookWatch:
    """Gives the hooks of a module tree a version number, at the cost of one comparison a call.

    Every new hook takes a handle from one counter, so the tree is searched only when that counter
    moved; known hooks are looked at each time, since a removal leaves no trace.
    """

    def __init__(self, model: nn.Module) -> None:
        self._dicts = [getattr(m, kind) for m in model.modules() for kind in _KINDS]
        self._seen = -1
        self._occupied: list[dict] = []
        self._hooks: tuple[tuple[int, ...], ...] = ()
        self._versions: dict[tuple[tuple[int, ...], ...], int] = {}
        self._version = 0

    def version(self) -> int:
        """Return a number that is equal for equal sets of hooks."""
        if RemovableHandle.next_id == self._seen and not self._occupied:
            return self._version
        if RemovableHandle.next_id != self._seen:
            self._occupied = [d for d in self._dicts if d]
            self._seen = RemovableHandle.next_id
        hooks = tuple(tuple(d) for d in self._occupied if d)
        if hooks != self._hooks or not self._versions:
            self._hooks = hooks
            self._version = self._versions.setdefault(hooks, len(self._versions))
        return self._version
