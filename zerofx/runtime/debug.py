"""The NaN finder of Plan(debug=True): names the first op that makes a NaN, with the user's line."""

from __future__ import annotations

import linecache
import sys
from types import FunctionType, ModuleType
from typing import Any

import torch

from zerofx.compat.graphs import OpNamespace
from zerofx.errors import NonFiniteError


class _Checked:
    """Stands for `aten` in a region: runs each op and looks for NaN in what it returns."""

    def __init__(self, target: Any, region: str) -> None:
        self._target, self._region = target, region

    def __getattr__(self, name: str) -> _Checked:
        return _Checked(getattr(self._target, name), self._region)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = self._target(*args, **kwargs)
        made = results if isinstance(results, (tuple, list)) else (results,)
        if any(_has_nan(r) for r in made) and not any(_has_nan(a) for a in args):
            self._report(sys._getframe(1).f_code.co_filename, sys._getframe(1).f_lineno)
        return results

    def _report(self, filename: str, line: int) -> None:
        text = linecache.getline(filename, line).strip()
        raise NonFiniteError(
            f"{self._region}: NaN first appears in {self._target} from inputs without one, at\n"
            f"  {filename}:{line}\n  {text}\n"
            "(the comment names the module and your line); set debug=False to train through it"
        )


def _has_nan(value: Any) -> bool:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_float and bool(value.isnan().any())


def checked(module: ModuleType, name: str) -> FunctionType:
    """Return the module's region with every op watched; the source and its lines stay the same."""
    function = getattr(module, name)
    watched = {
        key: _Checked(value, name) if isinstance(value, OpNamespace) else value
        for key, value in function.__globals__.items()
    }
    return FunctionType(function.__code__, watched, name)
