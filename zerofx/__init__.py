"""zerofx: compile any nn.Module into a statically scheduled, sharded training program.

The compiler's packages live inside this one: zerofx.capture, zerofx.passes, zerofx.codegen,
zerofx.runtime. Names are imported on first use, so that an emitted module, which needs
`zerofx.runtime` alone, does not load the compiler.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from zerofx.process import paused_collector
from zerofx.versions import check_torch

if TYPE_CHECKING:
    from zerofx import capture as capture
    from zerofx import nvme as nvme
    from zerofx import optim as optim
    from zerofx.api import compile as compile
    from zerofx.api import load_program as load_program
    from zerofx.api import rewrite as rewrite
    from zerofx.hardware import Hardware as Hardware
    from zerofx.hardware import Machine as Machine
    from zerofx.model.full_state import full_state_dict as full_state_dict
    from zerofx.model.full_state import iter_state_dict as iter_state_dict
    from zerofx.model.module import CompiledModule as CompiledModule
    from zerofx.model.whole import full_tensor as full_tensor
    from zerofx.model.whole import whole as whole
    from zerofx.plan.plan import Offload as Offload
    from zerofx.plan.plan import Plan as Plan
    from zerofx.plan.plan import Precision as Precision
    from zerofx.runtime.preemption import Preemption as Preemption
    from zerofx.snapshot import Rescue as Rescue
    from zerofx.snapshot import export as export
    from zerofx.snapshot import full_optimizer_state_dict as full_optimizer_state_dict
    from zerofx.snapshot import load as load
    from zerofx.snapshot import load_full_optimizer_state_dict as load_full_optimizer_state_dict
    from zerofx.snapshot import load_weights as load_weights
    from zerofx.snapshot import resume as resume
    from zerofx.snapshot import save as save
    from zerofx.tools.meter import meter as meter
    from zerofx.tools.predict import predict as predict
    from zerofx.tools.progress import progress as progress
    from zerofx.tools.record.record import record as record
    from zerofx.tools.search import search as search

__version__ = "0.1.0"

if sys.argv[1:] != ["--version"]:  # of the command line, which tells the versions of both
    check_torch(__version__)

_HOME = {
    "compile": "zerofx.api",
    "load_program": "zerofx.api",
    "rewrite": "zerofx.api",
    "Hardware": "zerofx.hardware",
    "Machine": "zerofx.hardware",
    "CompiledModule": "zerofx.model.module",
    "full_state_dict": "zerofx.model.full_state",
    "iter_state_dict": "zerofx.model.full_state",
    "full_tensor": "zerofx.model.whole",
    "whole": "zerofx.model.whole",
    "Plan": "zerofx.plan.plan",
    "Preemption": "zerofx.runtime.preemption",
    "Precision": "zerofx.plan.plan",
    "Offload": "zerofx.plan.plan",
    "meter": "zerofx.tools.meter",
    "predict": "zerofx.tools.predict",
    "progress": "zerofx.tools.progress",
    "record": "zerofx.tools.record.record",
    "search": "zerofx.tools.search",
    "Rescue": "zerofx.snapshot",
    "save": "zerofx.snapshot",
    "load": "zerofx.snapshot",
    "resume": "zerofx.snapshot",
    "load_weights": "zerofx.snapshot",
    "full_optimizer_state_dict": "zerofx.snapshot",
    "load_full_optimizer_state_dict": "zerofx.snapshot",
    "export": "zerofx.snapshot",
}

__all__ = sorted([*_HOME, "capture", "nvme", "optim"])


def __getattr__(name: str) -> Any:
    if name == "capture":  # a package that can be called: zerofx.capture(model, args, kwargs)
        return _imported("zerofx.capture")
    if name in ("nvme", "optim"):
        return _imported(f"zerofx.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'zerofx' has no attribute {name!r}")
    value = getattr(_imported(home), name)
    globals()[name] = value
    return value


def _imported(name: str) -> Any:
    if name in sys.modules:
        return sys.modules[name]
    with paused_collector(are_old=True):  # a third of the imports' time was spent in the collector
        return importlib.import_module(name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
