"""Side effects of a forward, which a program would not repeat: found, undone and refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from zerofx import compat
from zerofx.capture.lines import find_line
from zerofx.errors import CaptureError

Modes = dict[str, Any]
Run = Callable[[], Any]

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class HostGenerators:
    """Python's and NumPy's global random generators, as they stood."""

    def __init__(self) -> None:
        self._numpy = sys.modules.get("numpy")
        self._python_state = random.getstate()
        self._numpy_state = self._read_numpy()

    def _read_numpy(self) -> Any:
        if self._numpy is None:
            return None
        kind, key, *rest = self._numpy.random.get_state()
        return kind, key.tobytes(), *rest

    def restore(self) -> str:
        """Put both back; return the name of the one that had moved, or ""."""
        moved = ""
        if random.getstate() != self._python_state:
            random.setstate(self._python_state)
            moved = "Python's random generator"
        if self._numpy is not None and self._read_numpy() != self._numpy_state:
            kind, key, *rest = self._numpy_state
            words = self._numpy.frombuffer(key, dtype=self._numpy.uint32)
            self._numpy.random.set_state((kind, words, *rest))
            moved = "NumPy's random generator"
        return moved


def refuse_host_random(moved: str, run: Run) -> CaptureError:
    """Return the error for a forward that drew from a host generator, with the line."""

    def is_draw(_: FrameType, event: str, arg: Any) -> bool:
        owner = getattr(arg, "__self__", None) if event == "c_call" else None
        is_numpy = type(owner).__module__.startswith("numpy.random")
        return isinstance(owner, random.Random) or is_numpy

    where = find_line(run, is_draw)
    return CaptureError(
        f"capture: forward draws from {moved}{_at(where)}, whose value would be baked into the "
        "program; use torch's random functions, or pass the number as an argument"
    )


def read_modes() -> Modes:
    """Return torch's global modes that a forward may change by mistake."""
    return {
        "the default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "CPU autocast": torch.is_autocast_enabled("cpu"),
        "CUDA autocast": torch.is_autocast_enabled("cuda"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the seed of torch's generator": torch.initial_seed(),
    }


def check_modes(before: Modes) -> None:
    """Put back the modes that changed since `before`.

    Raises:
        CaptureError: one did; it names it.
    """
    after = read_modes()
    changed = [name for name in before if before[name] != after[name]]
    if not changed:
        return
    torch.set_default_dtype(before["the default dtype"])
    torch.set_grad_enabled(before["grad mode"])
    torch.set_autocast_enabled("cpu", before["CPU autocast"])
    torch.set_autocast_enabled("cuda", before["CUDA autocast"])
    torch.use_deterministic_algorithms(before["deterministic algorithms"])
    raise CaptureError(
        f"capture: forward changes {changed[0]} ({before[changed[0]]} -> {after[changed[0]]}) and "
        "leaves it so, which a program would not repeat; use the context manager form, or set it "
        "outside the model"
    )


def changed_attribute(
    module: nn.Module, before: dict[str, tuple[Any, Any]], ignored: frozenset[str]
) -> str | None:
    """Return the name of an attribute of the module that is not as it was, or None.

    before: (value, its shallow copy if it is a container) by name.
    """
    now = module.__dict__
    for name in [*before, *(n for n in now if n not in before)]:
        if name in ignored:
            continue
        if name not in now or name not in before:
            return name
        value, content = before[name]
        if not _same(value, now[name]) or (content is not None and not _same(content, now[name])):
            return name
    return None


def _same(old: Any, new: Any) -> bool:
    """Compare attribute values: plain ones and containers of them by value, the rest by identity."""
    if old is new and not isinstance(old, (list, dict, set)):
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, _PLAIN):
        return bool(old == new)
    if isinstance(old, (list, tuple)):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, dict):
        return list(old) == list(new) and all(map(_same, old.values(), new.values()))
    if isinstance(old, set):
        return len(old) == len(new) and all(v in new for v in old)
    return False


def recomputed_attributes(module: nn.Module) -> frozenset[str]:
    """Return the attributes that a forward sets anew each time before it reads them.

    `nn.LSTM` keeps its flat weights; the hook forms of weight and spectral norm their product.
    """
    names: set[str] = set()
    if isinstance(module, nn.RNNBase):
        names |= {"_flat_weights", "_flat_weight_refs"}
    for hook in compat.forward_pre_hooks(module):
        if isinstance(hook, compat.NORM_HOOKS):
            names.add(hook.name)
    return frozenset(names)


def refuse_attribute(name: str, module: nn.Module, attribute: str, run: Run) -> CaptureError:
    """Return the error for a forward that changed an attribute of a module, with the line."""
    container = module.__dict__.get(attribute)

    def is_write(frame: FrameType, event: str, arg: Any) -> bool:
        if event == "c_call":
            return isinstance(container, (list, dict, set)) and arg.__self__ is container
        is_setter = event == "call" and frame.f_code is nn.Module.__setattr__.__code__
        local = frame.f_locals
        return is_setter and local.get("self") is module and local.get("name") == attribute

    where = find_line(run, is_write)
    path = f"{name}.{attribute}" if name else attribute
    kind = "buffer" if isinstance(container, Tensor) else "tensor"
    return CaptureError(
        f"capture: forward changes the attribute {path}{_at(where)}, which a program would not "
        f"repeat (its present value would be baked in); return the value, or make it a {kind}"
    )


def _at(where: str) -> str:
    return f" at {where}" if where else ""
