"""Explanations: turn an exception of tracing into a CaptureError with the user's line and the fix.

The traceback ends at that line. With ZEROFX_FULL_TRACEBACK=1 it also shows the frames of torch and
zerofx, and the original error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from zerofx.capture.lines import LineMode, in_forward, is_raised_by_model, locate
from zerofx.compat.tracing import DataDependentError, DynamicShapeError
from zerofx.errors import CaptureError, as_sentence

# Name of the torch function that read a value: (what the model did, the fix).
_READS = {
    "item": (
        ".item() reads a tensor's value",
        "Keep it a tensor, or return it and call .item() outside the model",
    ),
    "tolist": (
        ".tolist() reads a tensor's values",
        "Keep them a tensor, or pass the list as an argument",
    ),
    "numpy": ("a tensor is handed to NumPy", "Use torch functions, or do it outside the model"),
    "__bool__": (
        "Python control flow depends on a tensor's value",
        "Use torch.where, or decide by an argument of the call",
    ),
    "__index__": (
        "a tensor's value is used as an index or a size",
        "Derive it from a shape, or pass it as an argument",
    ),
    "__getitem__": (
        "a tensor is indexed by another tensor's value",
        "Use torch.index_select or torch.gather, which keep the index a tensor",
    ),
    "__int__": ("int() reads a tensor's value", "Keep it a tensor, or pass it as an argument"),
    "__float__": ("float() reads a tensor's value", "Keep it a tensor, or pass it as an argument"),
    "__complex__": (
        "complex() reads a tensor's value",
        "Keep it a tensor, or pass it as an argument",
    ),
    "equal": (
        "torch.equal() reads the values of tensors",
        "Use torch.eq(a, b).all(), and torch.where for what depends on it",
    ),
    "allclose": (
        "torch.allclose() reads the values of tensors",
        "Use torch.isclose(a, b).all(), and torch.where for what depends on it",
    ),
    "__format__": (
        "a tensor's value is formatted as text",
        "Format its shape, or return it and print it outside the model",
    ),
    "__array__": ("a tensor is handed to NumPy", "Use torch functions, or do it outside the model"),
    "tensor": (
        "torch.tensor() reads the values of tensors",
        "Use torch.stack or torch.cat, which keep them tensors",
    ),
    "__deepcopy__": ("a tensor is deep-copied", "Use .clone()"),
    "save": ("a tensor is saved", "Return it and save it outside the model"),
    "data_ptr": (
        "data_ptr() asks for a tensor's memory",
        "Wrap the kernel that needs it as a torch.library.custom_op with a fake",
    ),
    "backward": (
        "forward calls backward()",
        "Use torch.autograd.grad, or call backward() on what the model returns",
    ),
    "__contains__": (
        "Python control flow depends on a tensor's values",
        "Use torch.isin, or decide by an argument of the call",
    ),
}
_SIZES = ("arange", "empty", "full", "linspace", "ones", "rand", "randn", "zeros")
_READS |= {
    name: (f"a tensor's value is a size for torch.{name}()", _READS["__index__"][1])
    for name in _SIZES
}
# Messages of tracers for functions that ask a tensor for values or memory that it does not have.
_NO_VALUES = (
    "unsupported format string passed to",
    "its data is not allocated yet",
    "Cannot access data pointer of Tensor",
    "invalid python storage",
    ".numpy() is not supported for",
    "Cannot backprop through mirrored meta",
)
_UNKNOWN_READ = ("a tensor's value is read", "Keep it a tensor, or do it outside the model")


@contextlib.contextmanager
def explained(lines: LineMode) -> Iterator[None]:
    """Convert exceptions of tracing to CaptureErrors.

    An exception of the model's own code is raised unchanged, as in eager mode.
    """
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        found = explain(error, lines)
        if found is None:
            error.args = tuple(map(_without_tracers, error.args))
            raise
        found.torch_error = error
        if shows_all():
            raise found from error
        raise found.with_traceback(in_forward(error.__traceback__)) from None


def _without_tracers(said: Any) -> Any:
    """Replace the tracers' class names by the user's in a message that Python itself composed."""
    return said.replace("FunctionalTensor", "Tensor") if isinstance(said, str) else said


def shows_all() -> bool:
    """Return whether the user asked for full tracebacks."""
    return os.environ.get("ZEROFX_FULL_TRACEBACK", "0") not in ("", "0")


def shorten(error: Exception) -> None:
    """Reduce the traceback of an error raised during capture to the user's frames.

    This applies to CaptureErrors and to exceptions of the model's own code; others are unchanged.
    """
    is_own = isinstance(error, CaptureError) or is_raised_by_model(error.__traceback__)
    if is_own and not shows_all():
        error.__traceback__ = in_forward(error.__traceback__)


def explain(error: Exception, lines: LineMode) -> CaptureError | None:
    """Return the CaptureError that explains `error`, or None for the model's own errors."""
    last_call = lines.last_call
    place = locate(error.__traceback__)
    at = f" at {place.line}" if place.line else ""
    if place.is_own and not isinstance(error, (DataDependentError, DynamicShapeError)):
        return None
    reads = [c for c in (*place.calls, last_call) if c in _READS]
    has_no_values = bool(reads) and any(said in str(error) for said in _NO_VALUES)
    if isinstance(error, DataDependentError) or last_call == "numpy" or has_no_values:
        what, way = _READS[reads[0]] if reads else _UNKNOWN_READ
        way = _way_for_experts(error.__traceback__) or way
        return CaptureError(
            f"capture: {what}{at}, which no static graph can follow. {as_sentence(way)}"
        )
    if isinstance(error, DynamicShapeError):
        call = "indexing by a mask" if last_call == "__getitem__" else f"{last_call}()"
        way = _way_for_experts(error.__traceback__) or (
            "Use a mask with torch.where, or a size that is fixed in advance"
        )
        return CaptureError(
            f"capture: the shape of the result of {call}{at} depends on the data. "
            f"{as_sentence(way)}"
        )
    first = (str(error).strip().splitlines() or [""])[0]
    said = f"capture: forward failed{at}: {type(error).__name__}: {as_sentence(first)}"
    return CaptureError.like(error, said)


def _way_for_experts(trace: TracebackType | None) -> str:
    """Return the fix if a loop over experts of transformers failed, otherwise ""."""
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        config = getattr(module, "config", None)
        is_loop = getattr(config, "_experts_implementation", None) == "eager"
        if is_loop and hasattr(module, "has_gate"):  # set by transformers' decorator of experts
            return (
                'Call model.set_experts_implementation("grouped_mm") before compile, which '
                "computes the same in shapes that are known in advance"
            )
        trace = trace.tb_next
    return ""
