"""Errors of zerofx: user mistakes raise ZerofxError subclasses, our own bugs fail an assert.

Each class is also the built-in exception that eager PyTorch, or Python, raises in the same place,
so that `except` clauses written for plain training keep working (docs/errors.md has the table).
Every class keeps its attributes when it is pickled, for example when a data loader or a launcher
passes it from one process to another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def as_sentence(text: object) -> str:
    """Return a text of any origin, such as another error's, with a full stop at its end."""
    said = str(text).rstrip()
    return said if said.endswith((".", "?", "!")) else f"{said}."


class ZerofxError(Exception):
    """Base of every error a user can cause; says what, where, both numbers, and how to fix it."""


class PlanError(ZerofxError, ValueError):
    """A plan field is unknown, out of range, or contradicts another."""


class ArgumentError(ZerofxError, TypeError):
    """A zerofx function was given an argument that is unknown, misplaced, or of a wrong type."""


class TorchVersionError(ZerofxError, ImportError):
    """The installed torch is older than the ones that zerofx supports."""


class UnpricedError(PlanError):
    """A hardware description lacks a figure that is needed to predict the time of a schedule."""


class BudgetError(PlanError):
    """No choice meets the memory budget; `least_bytes` is the smallest one that can be met."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes

    def __reduce__(self) -> tuple[Callable[..., BudgetError], tuple[str, int]]:
        return type(self), (str(self), self.least_bytes)


class CaptureError(ZerofxError, RuntimeError):
    """The model's forward cannot be captured as a static graph.

    `like` makes it an instance of another error's built-in class as well. `torch_error` is the
    exception that tracing raised, with its whole traceback, or None. `is_final` means that the
    forward must not run eagerly either.
    """

    torch_error: BaseException | None = None
    is_final = False

    @staticmethod
    def like(error: BaseException, message: str) -> CaptureError:
        """Return a CaptureError that is also an instance of the built-in class of `error`.

        A forward whose shapes do not fit then raises the same class compiled as in eager PyTorch.
        """
        return _capture_error(next((k for k in _KINDS if isinstance(error, k)), None), message)

    def __reduce__(self) -> tuple[Callable[..., CaptureError], tuple[Any, str]]:
        # torch_error is dropped: its frames cannot be pickled
        return _capture_error, (next((k for k in _KINDS if isinstance(self, k)), None), str(self))


# Subclasses precede their bases. RuntimeError is missing: every CaptureError is one.
_KINDS = (
    NotImplementedError, ValueError, TypeError, IndexError, KeyError, AttributeError,
    AssertionError, ArithmeticError,
)  # fmt: skip


# KeyError.__str__ would show the repr of the message
_BODY = {"__module__": __name__, "__str__": Exception.__str__}
_CAPTURE_ERRORS: dict[type[Exception], type[CaptureError]] = {
    builtin: type("CaptureError", (CaptureError, builtin), _BODY) for builtin in _KINDS
}


def _capture_error(builtin: type[Exception] | None, message: str) -> CaptureError:
    return (CaptureError if builtin is None else _CAPTURE_ERRORS[builtin])(message)


class ProgramError(ZerofxError, RuntimeError):
    """A program (emitted, edited or rewritten) breaks an invariant; shows ten lines of its dump."""


class ShardError(ZerofxError, RuntimeError):
    """A sharded parameter was used, rebound or updated in a way that would give wrong results."""


class GradientError(ZerofxError, RuntimeError):
    """A backward was requested that the program does not compute."""


class DesyncError(ZerofxError, RuntimeError):
    """Ranks disagree about what runs next, or one did not arrive in time."""


class OptimizerError(ZerofxError, ValueError):
    """A zerofx optimizer cannot train the parameters or groups it was given."""


class SnapshotError(ZerofxError, RuntimeError):
    """A save or load is refused: the files are truncated, foreign, unfinished, or do not fit."""


class NoSnapshotError(SnapshotError, FileNotFoundError):
    """No snapshot exists at the given path."""


class NonFiniteError(ZerofxError, RuntimeError):
    """A NaN or infinity appeared; Plan(debug=True) found the op that produced the first one."""


class TargetError(ZerofxError, ValueError):
    """A command line names a model that does not exist, or an object that is not a model."""


class DoctorError(ZerofxError, RuntimeError):
    """The installation lacks something that a command needs."""


class NvmeError(ZerofxError, OSError):
    """A transfer to or from disk failed, or a path or file cannot serve as the NVMe tier.

    `errno` is the operating system's error number, or None for other faults (e.g. damaged data).
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)  # OSError reads two arguments as errno and its text
        self.errno = errno

    def __reduce__(self) -> tuple[Callable[..., NvmeError], tuple[Any, ...]]:
        return type(self), (str(self), self.errno)


class TrialError(ZerofxError, RuntimeError):
    """The ranks of `zerofx verify --run` failed to train."""


class RecordingError(ZerofxError, RuntimeError):
    """A recording cannot be made, read, or compared with this program."""


# a log line of torchrun, identified by the path of the module that wrote it
_TORCHRUNS = re.compile(r"[DIWEF]\d{4} .*torch/distributed/(elastic|run)")


def last_words(stderr: str, num_lines: int) -> str:
    """Return the last lines that failed ranks wrote, indented, without torchrun's own output."""
    said, torchrun = stderr, "torch.distributed.elastic.multiprocessing.errors"
    if torchrun in stderr:
        ours = stderr[: stderr.index(torchrun)]
        said = ours.rpartition("Traceback (most recent call last)")[0]
    lines = [line for line in said.splitlines() if not _TORCHRUNS.match(line)]
    return "\n".join(f"  {line}" for line in (lines or stderr.splitlines())[-num_lines:])
