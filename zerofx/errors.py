"""What zerofx raises: user mistakes are ZerofxError subclasses, our own bugs fail an assert."""

from __future__ import annotations

import re


class ZerofxError(Exception):
    """Base of every error a user can cause: what, where, both numbers, and what to do."""


class PlanError(ZerofxError, ValueError):
    """A plan field is unknown, out of range, or contradicts another."""


class UnpricedError(PlanError):
    """A hardware lacks what a plan's schedule uses, so that no time of it is known."""


class BudgetError(PlanError):
    """No choice meets the memory budget; `least_bytes` is the smallest one that can be met."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class CaptureError(ZerofxError):
    """The model's forward cannot be captured as a static graph."""


class ProgramError(ZerofxError):
    """A program (emitted, edited or rewritten) breaks an invariant; carries ten lines of dump."""


class ShardError(ZerofxError):
    """A sharded parameter was used, rebound or updated in a way that would be silently wrong."""


class GradientError(ZerofxError):
    """A backward was asked for that the program does not compute."""


class DesyncError(ZerofxError):
    """Ranks disagree about what runs next, or one did not arrive in time."""


class OptimizerError(ZerofxError, ValueError):
    """A zerofx optimizer cannot train the parameters or groups that it was given."""


class SnapshotError(ZerofxError):
    """A save or load is refused: truncated, foreign, half-written, or of another model."""


class NonFiniteError(ZerofxError):
    """Plan(debug=True) found the op that made the first NaN."""


class TargetError(ZerofxError):
    """A command line names a model that is not there, or something that is no model."""


class DoctorError(ZerofxError):
    """The installation lacks something that the command needs."""


class NvmeError(ZerofxError):
    """A transfer to or from disk failed, or a path or file cannot serve as the NVMe tier."""


class TrialError(ZerofxError):
    """The ranks of `zerofx verify --run` could not train."""


class RecordingError(ZerofxError):
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
