"""The user's lines: which frames are theirs, and a mark of the line on every traced node."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_paths()["stdlib"]

MODULE, LINE = "zfx_module", "zfx_line"


@lru_cache(maxsize=None)
def is_user_file(filename: str) -> bool:
    """Tell whether a file is neither torch's, nor this package's, nor the standard library's."""
    if filename.startswith((_TORCH, _HERE, "<")) or filename == str(Path(_HERE, "../compat.py")):
        return False
    return not filename.startswith(_STDLIB) or "site-packages" in filename


def line_text(filename: str, number: int) -> str:
    return f"{Path(filename).name}:{number}"


def user_line(frame: FrameType | None) -> str:
    """Return "file.py:12" of the innermost user frame from `frame` outwards, "" for none."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else line_text(frame.f_code.co_filename, frame.f_lineno)


def locate(trace: TracebackType | None) -> tuple[str, bool]:
    """Return the innermost user's line of a traceback, and whether the error was raised there."""
    where, is_own = "", False
    while trace is not None:
        code = trace.tb_frame.f_code
        is_call = code.co_name == "marked" and code.co_filename.startswith(_HERE)
        is_own = is_user_file(code.co_filename)
        if is_own:
            where = line_text(code.co_filename, trace.tb_lineno)
        is_own = is_own or is_call  # a forward called with wrong arguments
        trace = trace.tb_next
    return where, is_own


def forward_line(forward: Callable[..., Any]) -> str:
    """Return the line where a forward is defined."""
    code = getattr(getattr(forward, "__wrapped__", forward), "__code__", None)
    return "" if code is None else line_text(code.co_filename, code.co_firstlineno)


class LineMode(TorchFunctionMode):
    """Mark the nodes of every torch call with the user's line that made it.

    last_call: the name of the function called last, for errors.
    """

    last_call = ""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.last_call = getattr(func, "__name__", "")
        with fx_traceback.annotate({LINE: user_line(sys._getframe(1))}):
            return func(*args, **(kwargs or {}))


def find_line(run: Callable[[], Any], is_culprit: Callable[[FrameType, str, Any], bool]) -> str:
    """Run again under a profiler and return the user's line of the first event that fits.

    Only for error messages: the call that moved a generator or set an attribute has returned long
    before that is noticed.
    """
    found: list[str] = []

    def on_event(frame: FrameType, event: str, arg: Any) -> None:
        if not found and is_culprit(frame, event, arg):
            found.append(user_line(frame))

    old = sys.getprofile()
    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(old)
    return found[0] if found else ""
