"""User lines: which frames belong to the user, and the source line on every traced node."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode

from zerofx.compat.tensors import assert_async
from zerofx.compat.tracing import DataDependentError, argument_tensors, is_outside_trace
from zerofx.errors import CaptureError
from zerofx.kernels.recurrent import is_recurrent, run_recurrent

_HERE = str(Path(__file__).parent)
_PACKAGE = str(Path(_HERE).parent)
_DEMO = str(Path(_PACKAGE) / "tools" / "demo")  # its models are captured like a user's
# Folders whose functions are between a user's line and torch's: tracing, and the runtime, which
# intercepts attribute assignments, including the user's, and has ops of its own.
_BETWEEN = tuple(
    str(Path(_PACKAGE) / name)
    for name in (
        "capture",
        "model",
        "runtime",
        "kernels",
        "comm",
        "nvme",
        "layout",
        "policy",
        "compat",
    )
)
_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_paths()["stdlib"]

MODULE, LINE = "zfx_module", "zfx_line"


@cache
def is_user_file(filename: str) -> bool:
    """Return whether a file belongs neither to torch nor to zerofx nor to the standard library."""
    if filename.startswith((_TORCH, *_BETWEEN, "<")):
        return False
    return not filename.startswith(_STDLIB) or "site-packages" in filename


def line_text(filename: str, number: int) -> str:
    return f"{Path(filename).name}:{number}"


def user_line(frame: FrameType | None) -> str:
    """Return "file.py:12" of the innermost user frame from `frame` outwards, or ""."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else line_text(frame.f_code.co_filename, frame.f_lineno)


@dataclass(frozen=True)
class Place:
    """The origin of an exception.

    line: the innermost user line, or "" if there is none.
    is_own: the model's own code raised it, or called forward with wrong arguments.
    calls: the functions that this line went through, outermost first.
    """

    line: str
    is_own: bool
    calls: tuple[str, ...]


def locate(trace: TracebackType | None) -> Place:
    """Find the user's line in a traceback."""
    line, is_own = "", False
    calls: list[str] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        is_user = is_user_file(code.co_filename)
        is_marked = code.co_name == "marked" and code.co_filename.startswith(_HERE)
        is_own = is_user or is_marked
        if is_user:
            line, calls = line_text(code.co_filename, trace.tb_lineno), []
        elif code.co_name == "__torch_function__":
            calls.append(getattr(trace.tb_frame.f_locals.get("func"), "__name__", ""))
        else:
            calls.append(code.co_name)
        trace = trace.tb_next
    return Place(line, is_own, tuple(calls))


def _is_model_frame(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return is_user_file(name) and (not name.startswith(_PACKAGE) or name.startswith(_DEMO))


def is_raised_by_model(trace: TracebackType | None) -> bool:
    """Return whether the innermost frame of a traceback belongs to the user's code."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _is_model_frame(trace.tb_frame)


def in_forward(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of torch and zerofx: the user's, innermost last."""
    frames = []
    while trace is not None:
        if _is_model_frame(trace.tb_frame):
            frames.append(trace)
        trace = trace.tb_next
    kept = None
    for each in reversed(frames):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def forward_line(forward: Callable[..., Any]) -> str:
    """Return the line where a forward is defined."""
    code = getattr(getattr(forward, "__wrapped__", forward), "__code__", None)
    return "" if code is None else line_text(code.co_filename, code.co_firstlineno)


def check_call(name: str, args: Any, kwargs: dict[str, Any], line: str) -> None:
    """Raise on a call that tracing would record incorrectly without an error.

    Raises:
        CaptureError: it draws from a generator of the model's own, or writes to a tensor
            that is neither an argument, nor registered, nor created by forward.
    """
    if kwargs.get("generator") is not None:
        raise CaptureError(
            f"capture: {name} draws from a generator of the model's own at {line}. Use torch's "
            "default generator, whose state a program saves and offsets by rank."
        )
    is_write = name.startswith(("__i", "__setitem__")) or (name[-1:] == "_" != name[-2:-1])
    target = args[0] if is_write and args else kwargs.get("out")
    if target is not None and is_outside_trace(target):
        raise CaptureError(
            f"capture: forward changes a tensor in place at {line} that is neither a buffer nor "
            "made by forward, which a program would not repeat. Register it with register_buffer."
        )


class LineMode(TorchFunctionMode):
    """A mode that marks the nodes of every torch call with the user line that made the call.

    check_outside: is called with the function, its arguments, and each of them that is a tensor
        from outside the trace.

    last_call: the name of the most recently called function, for errors.
    text_line: the line where a tensor was first formatted as text, or "".
    constants: tensors that forward reads and that are neither arguments nor registered, by id.
    seeded_at: the line of the first call under a seed that differs from the first call's, or "".
    checks: line -> (the assumed value of a tensor tested there, the message that the model raises
        otherwise).
    undecided: the line that tested the truth of a tensor that varies, or "".
    """

    last_call = ""
    text_line = ""
    seeded_at = ""
    undecided = ""

    def __init__(self, check_outside: Callable[[Any, Any, Tensor], None] | None = None) -> None:
        super().__init__()
        self._check_outside = check_outside
        self.checks: dict[str, tuple[bool, str]] = {}
        self.constants: dict[int, Tensor] = {}
        self._seed = torch.initial_seed()

    def show(self, tensor: Tensor) -> str:
        """Return a traced tensor as text without values, and record the user's line."""
        self.text_line = self.text_line or user_line(sys._getframe(1))
        return f"tensor(..., size={tuple(tensor.shape)}, dtype={tensor.dtype})"

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = self.last_call = getattr(func, "__name__", "")
        line = user_line(sys._getframe(1))
        check_call(name, args, kwargs or {}, line)
        for tensor in argument_tensors(args, {}):
            if is_outside_trace(tensor):
                if self._check_outside is not None:
                    self._check_outside(func, args, tensor)
                self.constants[id(tensor)] = tensor
        if torch.initial_seed() != self._seed:
            self.seeded_at = self.seeded_at or line or "a library's call"
        with fx_traceback.annotate({LINE: line}):
            if is_recurrent(func, args):
                return run_recurrent(name, args)
            try:
                return func(*args, **(kwargs or {}))
            except DataDependentError:
                is_truth = name == "__bool__" or (name == "item" and args[0].dtype is torch.bool)
                if is_truth and line in self.checks:
                    return self._taken(args[0], *self.checks[line])
                self.undecided = line if is_truth else ""
                raise

    def _taken(self, tensor: Tensor, value: bool, said: str) -> bool:
        """Assume that a tensor that varies is true, or false, and make the program assert it."""
        assert_async(tensor.bool() if value else tensor.logical_not(), said)
        return value


def find_line(run: Callable[[], Any], has_happened: Callable[[], bool]) -> str:
    """Rerun with line tracing, and return the user line after which a condition holds.

    Only for error messages: the call that moved a generator or set an attribute returned long
    before the change was noticed.
    """
    last, found = "", ""

    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal last, found
        if not found and has_happened():
            found = last
        if event == "line":
            last = line_text(frame.f_code.co_filename, frame.f_lineno)
        return on_line

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        return on_line if is_user_file(frame.f_code.co_filename) else None

    old = sys.gettrace()
    sys.settrace(on_call)
    try:
        run()
    finally:
        sys.settrace(old)
    return found
