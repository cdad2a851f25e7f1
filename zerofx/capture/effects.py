"""Side effects of a forward, which a program would not repeat: found, undone and refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from zerofx.capture.lines import find_line
from zerofx.errors import CaptureError

Run = Callable[[], Any]


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

    def has_moved(self) -> bool:
        return random.getstate() != self._python_state or self._read_numpy() != self._numpy_state

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


def refuse_host_random(moved: str, generators: HostGenerators, run: Run) -> CaptureError:
    """Return the error for a forward that drew from a host generator, with the line."""
    where = find_line(run, generators.has_moved)
    generators.restore()
    return CaptureError(
        f"capture: forward draws from {moved}{at_line(where)}, whose value would be baked into "
        "the program; use torch's random functions, or pass the number as an argument"
    )


class Modes:
    """Torch's global modes, as they stood; a forward must leave them so."""

    def __init__(self) -> None:
        self._before = self._read()

    @staticmethod
    def _read() -> dict[str, Any]:
        return {
            "the default dtype": torch.get_default_dtype(),
            "grad mode": torch.is_grad_enabled(),
            "CPU autocast": torch.is_autocast_enabled("cpu"),
            "CUDA autocast": torch.is_autocast_enabled("cuda"),
            "the choice of deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "the seed of torch's generator": torch.initial_seed(),
        }

    def has_changed(self) -> bool:
        return self._read() != self._before

    def restore(self) -> str:
        """Put them back; return what had changed, or "". (The seed is the tracer's to restore.)"""
        before, after = self._before, self._read()
        changed = [name for name in before if before[name] != after[name]]
        if not changed:
            return ""
        dtype, grad, on_cpu, on_cuda, is_deterministic, _ = before.values()
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_autocast_enabled("cpu", on_cpu)
        torch.set_autocast_enabled("cuda", on_cuda)
        torch.use_deterministic_algorithms(is_deterministic)
        return f"{changed[0]} ({before[changed[0]]} -> {after[changed[0]]})"


def refuse_mode(changed: str, run: Run) -> CaptureError:
    """Return the error for a forward that left a global mode changed, with the line."""
    where = find_line(run, Modes().has_changed)
    return CaptureError(
        f"capture: forward changes {changed}{at_line(where)} and leaves it so, which a program "
        "would not repeat; use the context manager form, or set it outside the model"
    )


def at_line(where: str) -> str:
    return f" at {where}" if where else ""
