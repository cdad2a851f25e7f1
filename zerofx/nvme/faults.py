"""Disk faults in words: file, offset, bytes, what they hold, and the fix."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import NamedTuple

from zerofx.errors import NvmeError, as_sentence
from zerofx.plan.sizes import format_bytes

_ELSEWHERE = "or choose another path"
WAYS_OUT = {
    errno.ENOSPC: f"Free space on that file system, {_ELSEWHERE}",
    errno.EDQUOT: f"Raise the disk quota, {_ELSEWHERE}",
    errno.EFBIG: f"Raise the limit on file sizes (ulimit -f), {_ELSEWHERE}",
    errno.EIO: f"The device reports a fault. See the kernel's log, {_ELSEWHERE}",
    errno.EROFS: f"Remount the file system writable, {_ELSEWHERE}",
    errno.EACCES: f"Give this user the rights to it, {_ELSEWHERE}",
    errno.EPERM: f"Give this user the rights to it, {_ELSEWHERE}",
    errno.ENOENT: "Give a path that exists",
    errno.ENOTDIR: "Give a path whose folders exist",
    errno.EISDIR: "Give the path of a file",
    errno.EMFILE: "Raise the limit on open files (ulimit -n), or close some",
    errno.ENOLCK: f"File locks are needed. Mount the file system with them, {_ELSEWHERE}",
    errno.EOPNOTSUPP: "Choose another path",
}
_OTHERWISE = f"See the kernel's log, {_ELSEWHERE}"


def sized(nbytes: int) -> str:
    """Format bytes rounded and exactly: `1.5 KiB (1536 bytes)`; below 1 KiB only exactly."""
    return f"{nbytes} bytes" if nbytes < 1024 else f"{format_bytes(nbytes)} ({nbytes} bytes)"


def reason(error: OSError) -> str:
    """Format an operating system error, such as `No space left on device (ENOSPC)`."""
    if error.errno is None:
        return str(error)
    return f"{os.strerror(error.errno)} ({errno.errorcode.get(error.errno, error.errno)})"


def way_out(error: OSError) -> str:
    """Return the fix for an error of the operating system."""
    return as_sentence(WAYS_OUT.get(error.errno or 0, _OTHERWISE))


def path_error(doing: str, path: str | os.PathLike[str], error: OSError) -> NvmeError:
    """Return the error for an operation on a whole file or folder."""
    text = f"{doing} {os.fspath(path)}: {reason(error)}. {way_out(error)}"
    return NvmeError(text, error.errno)


class Stretch(NamedTuple):
    """A byte range of a file, as named by an error."""

    path: str
    offset: int
    nbytes: int
    label: str

    def __str__(self) -> str:
        whose = f" of {self.label}" if self.label else ""
        return f"{self.path}, {sized(self.nbytes)}{whose} at offset {self.offset}"


@dataclass(frozen=True)
class Fault:
    """The reason why a request failed; every waiter gets a new exception made from it."""

    text: str
    cause: BaseException | None = None

    def error(self) -> NvmeError:
        """Return a new exception with its cause."""
        error = NvmeError(self.text, getattr(self.cause, "errno", None))
        error.__cause__ = self.cause
        return error


class EndOfFile(Exception):
    """A read reached the end of its file, or a write made no progress; `at` is the offset."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class Damaged(Exception):
    """Data do not match the checksum that was taken when they were written; carries the text."""


def fault_of(is_write: bool, where: Stretch, error: BaseException) -> Fault:
    """Return the fault for a transfer that raised `error`."""
    doing = "write" if is_write else "read"
    if isinstance(error, Damaged):
        return Fault(f"{doing} of {where}: {as_sentence(error)}")
    if isinstance(error, EndOfFile):
        if is_write:
            text = f"the file system accepts no bytes at offset {error.at}. {_OTHERWISE}."
        else:
            text = (
                f"the file ends at offset {error.at}. Another process truncated it, or these bytes "
                "were never written. Write them first."
            )
        return Fault(f"{doing} of {where}: {text}")
    if isinstance(error, OSError):
        return Fault(f"{doing} of {where}: {reason(error)}. {way_out(error)}", error)
    return Fault(f"{doing} of {where}: {type(error).__name__}: {as_sentence(error)}", error)
