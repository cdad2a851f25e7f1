"""zerofx: compile any nn.Module into a statically scheduled, sharded training program.

The compiler's packages live inside this one: zerofx.capture, zerofx.passes, zerofx.codegen,
zerofx.runtime. Names are imported on first use, so that an emitted module, which needs
`zerofx.runtime` alone, does not load the compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofx.api import CompiledModule, capture, compile, load_program, rewrite
    from zerofx.plan import Offload, Plan, Precision

__version__ = "0.1.0"

_HOME = {
    "CompiledModule": "zerofx.api",
    "capture": "zerofx.api",
    "compile": "zerofx.api",
    "load_program": "zerofx.api",
    "rewrite": "zerofx.api",
    "Plan": "zerofx.plan",
    "Precision": "zerofx.plan",
    "Offload": "zerofx.plan",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'zerofx' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value  # importing zerofx.capture binds the package here: take it back
    return value
