"""Notice module hooks that come or go after compile: they are part of what a program captured."""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from zerofx.compat.modules import global_module_hooks, hooks_of


class HookWatch:
    """Tells which hooks a module tree has, at the cost of one comparison a call where it has none.

    Every new hook takes a handle from one counter, so the tree is searched only when that counter
    moved; known hooks are looked at each time, since a removal leaves no trace. Handles are unique
    in a process and a deep copy keeps them, so that equal handles mean equal hooks there too.

    Hooks of all modules (`register_module_forward_hook` and the like) count as each module's; like
    any wrapper, the compiled model itself is one more module that they are called for.
    """

    def __init__(self, model: nn.Module) -> None:
        self._dicts = [hooks for m in model.modules() for hooks in hooks_of(m)]
        self._dicts += global_module_hooks()
        self._seen = -1
        self._occupied: list[dict] = []

    def handles(self) -> tuple[tuple[int, ...], ...]:
        """Return the handles of all hooks, in the order of their calls; () for none."""
        if RemovableHandle.next_id != self._seen:
            self._occupied = [d for d in self._dicts if d]
            self._seen = RemovableHandle.next_id
        if not self._occupied:
            return ()
        return tuple([tuple(d) for d in self._occupied if d])
