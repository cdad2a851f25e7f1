"""Capture: nn.Module -> Program (graphs with roles), and the key of a call.

The package is callable: `zerofx.capture(model, args, kwargs)` is `capture.capture`.
"""

import sys
from types import ModuleType
from typing import Any

from zerofx.capture.capture import capture
from zerofx.capture.model_state import ModelState
from zerofx.capture.signature import Signature, describe_difference, signature_key
from zerofx.capture.units import find_unit_of_module, find_units

__all__ = [
    "ModelState",
    "Signature",
    "capture",
    "describe_difference",
    "find_unit_of_module",
    "find_units",
    "signature_key",
]


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return capture(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
