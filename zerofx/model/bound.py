"""A program tied to a model: the user's call in, the user's result out."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zerofx.capture import trees
from zerofx.ir.program import Planned, Pool
from zerofx.runtime.step import Executable


class Bound:
    """Calls an executable with the user's arguments and rebuilds the user's result.

    slots: what its program needs.
    last_use: the number of its latest call, among those of all programs of the model.
    """

    def __init__(self, program: Planned, executable: Executable, slots: Pool) -> None:
        self.program, self.executable, self.slots = program, executable, slots
        self.last_use = -1
        calling = program.calling
        self._leaves = executable.contract.outputs
        self._num_outputs = calling.out_spec.num_leaves
        self._is_single = calling.out_spec.is_leaf() and self._leaves == (0,)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outs = self.executable(_leaves(args, kwargs))
        if self._is_single:
            return outs[0]
        calling = self.program.calling
        results: list[Any] = [calling.constants.get(i) for i in range(self._num_outputs)]
        for leaf, out in zip(self._leaves, outs, strict=True):
            results[leaf] = out
        return trees.unflatten(results, calling.out_spec)


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    flat = [*args, *kwargs.values()]
    if all(type(v) is Tensor for v in flat):
        return flat
    return trees.flatten((args, kwargs))[0]
