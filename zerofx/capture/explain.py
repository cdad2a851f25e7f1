"""Turn what tracing raises into a CaptureError with the user's line and the way out.

Its traceback ends at that line. With ZEROFX_FULL_TRACEBACK=1 the frames of torch and zerofx are
shown as well, and the error that tracing raised.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from zerofx.capture.lines import LineMode, in_forward, is_raised_by_model, locate
from zerofx.compat.tracing import DataDependentError, DynamicShapeError
from zerofx.errors import CaptureError

# Name of the torch function that read a value: (what the model did, the way out).
_READS = {
    "item": (
        ".item() reads a tensor's value",
        "keep it a tensor, or return it and call .item() outside the model",
    ),
    "tolist": (
        ".tolist() reads a tensor's values",
        "keep them a tensor, or pass the list as an argument",
    ),
    "numpy": ("a tensor is handed to NumPy", "use torch functions, or do it outside the model"),
    "__bool__": (
        "Python control flow depends on a tensor's value",
        "use torch.where, or decide by an argument of the call",
    ),
    "__index__": (
        "a tensor's value is used as an index or a size",
        "derive it from a shape, or pass it as an argument",
    ),
    "__getitem__": (
        "a tensor is indexed by another tensor's value",
        "use torch.index_select or torch.gather, which keep the index a tensor",
    ),
    "__int__": ("int() reads a tensor's value", "keep it a tensor, or pass it as an argument"),
    "__float__": ("float() reads a tensor's value", "keep it a tensor, or pass it as an argument"),
    "__contains__": (
        "Python control flow depends on a tensor's values",
        "use torch.isin, or decide by an argument of the call",
    ),
}
_UNKNOWN_READ = ("a tensor's value is read", "keep it a tensor, or do it outside the model")


@contextlib.contextmanager
def explained(lines: LineMode) -> Iterator[None]:
    """Raise a CaptureError for what tracing raises.

    An exception of the model's own code passes as it is, as it would in eager.
    """
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        found = explain(error, lines)
        if found is None:
            raise
        found.torch_error = error
        if shows_all():
            raise found from error
        raise found.with_traceback(in_forward(error.__traceback__)) from None


def shows_all() -> bool:
    """Tell whether the user asked for whole tracebacks."""
    return os.environ.get("ZEROFX_FULL_TRACEBACK", "0") not in ("", "0")


def shorten(error: Exception) -> None:
    """Leave only the user's frames in the traceback of an error that a capture raised.

    Such are CaptureErrors and what the model's own code raised; others stay as they are.
    """
    is_own = isinstance(error, CaptureError) or is_raised_by_model(error.__traceback__)
    if is_own and not shows_all():
        error.__traceback__ = in_forward(error.__traceback__)


def explain(error: Exception, lines: LineMode) -> CaptureError | None:
    """Return the CaptureError that `error` amounts to, None for one of the model's own code."""
    last_call = lines.last_call
    place = locate(error.__traceback__)
    at = f" at {place.line}" if place.line else ""
    if place.is_own and not isinstance(error, (DataDependentError, DynamicShapeError)):
        return None
    if isinstance(error, DataDependentError) or last_call == "numpy":
        reads = [c for c in (*place.calls, last_call) if c in _READS]
        what, way = _READS[reads[0]] if reads else _UNKNOWN_READ
        return CaptureError(f"capture: {what}{at}, which no static graph can follow; {way}")
    if isinstance(error, DynamicShapeError):
        call = "indexing by a mask" if last_call == "__getitem__" else f"{last_call}()"
        return CaptureError(
            f"capture: the shape of the result of {call}{at} depends on the data; use a mask with "
            "torch.where, or a size that is fixed in advance"
        )
    first = (str(error).strip().splitlines() or [""])[0]
    said = f"capture: forward failed{at}: {type(error).__name__}: {first}"
    return CaptureError.like(error, said)
