"""What zerofx raises: user mistakes are ZerofxError subclasses, our own bugs fail an assert.

Each class is also the built-in exception that eager PyTorch, or Python, raises in the same place,
so that `except` clauses written for plain training keep working (docs/errors.md has the table).
Every class keeps what it carries when it is pickled, as when a data loader or a launcher hands it
from one process to another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


class ZerofxError(Exception):
    """Base of every error a user can cause: what, where, both numbers, and what to do."""


class PlanError(ZerofxError, ValueError):
    """A plan field is unknown, out of range, or contradicts another."""


class ArgumentError(ZerofxError, TypeError):
    """A function of zerofx was given an argument that is unknown, misplaced, or of a wrong type."""


class UnpricedError(PlanError):
    """A hardware lacks what a plan's schedule uses, so that no time of it is known."""


class BudgetError(PlanError):
    """No choice meets the memory budget; `least_bytes` is the smallest one that can be met."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes

    def __reduce__(self) -> tuple[Callable[..., BudgetError], tuple[str, int]]:
        return type(self), (str(self), self.least_bytes)


class CaptureError(ZerofxError, RuntimeError):
    """The model's forward cannot be captured as a static graph.

    `like` makes it the built-in kind of another error as well. `torch_error` is what tracing
    raised, with its whole traceback, or None.
    """

    torch_error: BaseException | None = None

    @staticmethod
    def like(error: BaseException, message: str) -> CaptureError:
        """Return a CaptureError that is also of the built-in kind of `error`.

        So a forward whose shapes do not fit raises compiled what it raises in eager.
        """
        return _capture_error(next((k for k in _KINDS if isinstance(error, k)), None), message)

    def __reduce__(self) -> tuple[Callable[..., CaptureError], tuple[Any, str]]:
        # torch_error stays behind: frames cannot be pickled
        return _capture_error, (next((k for k in _KINDS if isinstance(self, k)), None), str(self))


# A base comes after what is derived from it. RuntimeError is what every CaptureError is.
_KINDS = (
    NotImplementedError, ValueError, TypeError, IndexError, KeyError, AttributeError,
    AssertionError, ArithmeticError,
)  # fmt: skip


# KeyError's __str__ would show the message as a literal
_BODY = {"__module__": __name__, "__str__": Exception.__str__}
_CAPTURE_ERRORS: dict[type[Exception], type[CaptureError]] = {
    builtin: type("CaptureError", (CaptureError, builtin), _BODY) for builtin in _KINDS
}


def _capture_error(builtin: type[Exception] | None, message: str) -> CaptureError:
    return (CaptureError if builtin is None else _CAPTURE_ERRORS[builtin])(message)


class ProgramError(ZerofxError, RuntimeError):
    """A program (emitted, edited or rewritten) breaks an invariant; carries ten lines of dump."""


class ShardError(ZerofxError, RuntimeError):
    """A sharded parameter was used, rebound or updated in a way that would be silently wrong."""


class GradientError(ZerofxError, RuntimeError):
    """A backward was asked for that the program does not compute."""


class DesyncError(ZerofxError, RuntimeError):
    """Ranks disagree about what runs next, or one did not arrive in time."""


class OptimizerError(ZerofxError, ValueError):
    """A zerofx optimizer cannot train the parameters or groups that it was given."""


class SnapshotError(ZerofxError, RuntimeError):
    """A save or load is refused: truncated, foreign, half-written, or of another model."""


class NoSnapshotError(SnapshotError, FileNotFoundError):
    """There is nothing at the path of a snapshot."""


class NonFiniteError(ZerofxError, RuntimeError):
    """Plan(debug=True) found the op that made the first NaN."""


class TargetError(ZerofxError, ValueError):
    """A command line names a model that is not there, or something that is no model."""


class DoctorError(ZerofxError, RuntimeError):
    """The installation lacks something that the command needs."""


class NvmeError(ZerofxError, OSError):
    """A transfer to or from disk failed, or a path or file cannot serve as the NVMe tier.

    `errno` is that of the operating system, None if the fault is another (damaged data, say).
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)  # of one argument: two would be taken for errno and its text
        self.errno = errno

    def __reduce__(self) -> tuple[Callable[..., NvmeError], tuple[Any, ...]]:
        return type(self), (str(self), self.errno)


class TrialError(ZerofxError, RuntimeError):
    """The ranks of `zerofx verify --run` could not train."""


class RecordingError(ZerofxError, RuntimeError):
    """A recording cannot be made, read, or shown beside this program."""


# a line of its log, with the path by which it was started
_TORCHRUNS = re.compile(r"[DIWEF]\d{4} .*torch/distributed/(elastic|run)")


def last_words(stderr: str, num_lines: int) -> str:
    """Return the last lines that failed ranks wrote, indented, without what torchrun adds."""
    said, torchrun = stderr, "torch.distributed.elastic.multiprocessing.errors"
    if torchrun in stderr:
        ours = stderr[: stderr.index(torchrun)]
        said = ours.rpartition("Traceback (most recent call last)")[0]
    lines = [line for line in said.splitlines() if not _TORCHRUNS.match(line)]
    return "\n".join(f"  {line}" for line in (lines or stderr.splitlines())[-num_lines:])
