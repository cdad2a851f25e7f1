"""Open checkpoints: their tensors by name, each of which gives any range of its elements.

entry.read(start, stop)      # a tensor in one file, or joined from parts of several tensors
source.entries["fc.weight"]  # of an open checkpoint, whose files stay open until it is closed
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from zerofx.errors import SnapshotError, as_sentence
from zerofx.snapshot.held import HeldFiles, Replaced, is_stale

_AT_ONCE_BYTES = 8 << 20
_SECOND_LOOK_S = 0.1  # after a fault, before files are considered unchanged


class StoredTensor(Protocol):
    """One tensor of a checkpoint."""

    @property
    def path(self) -> Path:
        """The file that errors name."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def check(self, start: int, stop: int) -> None:
        """Check that the files contain the flat elements start:stop, without reading them."""

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, values) of the flat elements start:stop, part by part."""


def describe(stored: StoredTensor) -> str:
    """Return dtype and shape for error messages: `float32 [64, 16]`."""
    return f"{str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}"


def read_whole(stored: StoredTensor) -> Tensor:
    """Return the whole of a small tensor."""
    whole = torch.empty(math.prod(stored.shape), dtype=stored.dtype)
    for first, part in stored.read(0, len(whole)):
        whole[first : first + len(part)] = part
    return whole.view(stored.shape)


@dataclass(frozen=True)
class Entry:
    """One tensor in an open file: the file, the tensor's form, and the offset of its first byte.

    stride: set if rows are not consecutive; such a tensor is read whole.
    """

    held: HeldFiles
    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """The number of elements that the tensor spans in the file."""
        if self.stride is None or not math.prod(self.shape):
            return math.prod(self.shape)
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def end(self) -> int:
        """The offset after the tensor's last byte."""
        return self.offset + self.numel * self.dtype.itemsize

    def check(self, start: int, stop: int) -> None:
        """Check that the file extends to the tensor's end.

        Raises:
            SnapshotError: names the file and both offsets.
        """
        total = self.held.num_bytes(str(self.path))
        if self.end > total:
            raise SnapshotError(
                f"{self.path} is cut short: {self.name} ends at offset {self.end}, the file at "
                f"{total}."
            )

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, values) of the flat elements start:stop, part by part.

        Raises:
            SnapshotError: the file ends before; names it and the offset.
        """
        if self.stride is not None:
            if start < stop:
                flat = self._bytes(0, self.numel)
                yield start, flat.as_strided(self.shape, self.stride).reshape(-1)[start:stop]
            return
        step = max(_AT_ONCE_BYTES // self.dtype.itemsize, 1)
        for first in range(start, stop, step):
            yield first, self._bytes(first, min(first + step, stop))

    def _bytes(self, first: int, last: int) -> Tensor:
        """Return elements first:last as stored in the file."""
        file = self.held.stream(str(self.path))
        part = torch.empty(last - first, dtype=self.dtype)
        at = self.offset + first * self.dtype.itemsize
        file.seek(at)
        got = file.readinto(part.view(torch.uint8).numpy().data)  # type: ignore[attr-defined]
        if got != part.nbytes:
            raise SnapshotError(
                f"{self.path}: {self.name} should have {part.nbytes} bytes at offset {at}, "
                f"but only {got} are there."
            )
        return part


@dataclass(frozen=True)
class Joined:
    """One tensor whose flat elements are consecutive ranges of other tensors.

    parts: (tensor, first, last) of each range. Elements after the last one of the shape are
        padding.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[tuple[StoredTensor, int, int], ...]

    @staticmethod
    def of(parts: Collection[tuple[StoredTensor, int, int]], shape: Collection[int]) -> Joined:
        """Return the tensor that these ranges form."""
        first = next(iter(parts))[0]
        return Joined(first.path, first.dtype, tuple(shape), tuple(parts))

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[StoredTensor, int, int, int]]:
        """Yield (tensor, first, last, position that the tensor's element 0 would have)."""
        at = 0
        for stored, first, last in self.parts:
            a, b = max(start, at), min(stop, at + last - first)
            if a < b:
                yield stored, first + a - at, first + b - at, at - first
            at += last - first

    def check(self, start: int, stop: int) -> None:
        """Check that the files contain these elements."""
        for stored, first, last, _ in self._overlaps(start, stop):
            stored.check(first, last)

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, values) of the flat elements start:stop, part by part."""
        for stored, first, last, shift in self._overlaps(start, stop):
            for at, part in stored.read(first, last):
                yield at + shift, part


def slice_of(stored: StoredTensor, index: int) -> Joined:
    """Return one slice of a tensor along its first dimension.

    Raises:
        SnapshotError: there is no such slice.
    """
    if not stored.shape or not 0 <= index < stored.shape[0]:
        raise SnapshotError(f"{stored.path}: there is no slice {index} of {describe(stored)}.")
    inner = math.prod(stored.shape[1:])
    return Joined.of([(stored, index * inner, (index + 1) * inner)], stored.shape[1:])


@dataclass
class SavedOptimizer:
    """The optimizer of a checkpoint, by the names of its parameters there.

    tensors: states of a parameter's shape. values: states that are one number, such as steps.
    options: the options of the parameter's group. why_not: if there are no states, the reason.
    """

    tensors: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    why_not: str = ""


class OpenCheckpoint(ABC):
    """A checkpoint at a path, whose files are held open until `close`.

    entries: every tensor of the model by its name in the files.
    found: a description for messages: "DeepSpeed ZeRO-3 checkpoint of 2 ranks".
    optimizer, extra: the rest of the content; `extra` holds plain values.
    wanted: the names of the model's tensors, by which some formats find theirs.

    Raises:
        SnapshotError: there is no checkpoint, it is damaged, or a name occurs twice.
        Replaced: the files were replaced while they were opened.
    """

    found: str

    def __init__(self, path: Path, wanted: Collection[str] = ()) -> None:
        self._source, self._wanted = path, frozenset(wanted)
        self._held = HeldFiles()
        self.optimizer = SavedOptimizer()
        self.extra: dict[str, Any] = {}
        self._listed = self._listing()
        try:
            self.entries: Mapping[str, StoredTensor] = self._found()
            self.check_current()
        except (OSError, SnapshotError) as error:
            self._raise(error)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _found(self) -> Mapping[str, StoredTensor]:
        """Open the files; return every tensor of the model by name."""

    def _is_part(self, name: str) -> bool:
        """Return whether a file of the directory may hold tensors."""
        return True

    def _raise(self, error: OSError | SnapshotError) -> NoReturn:
        """Raise an error, or `Replaced` if an export in progress may have caused it."""
        try:
            time.sleep(_SECOND_LOOK_S)
            self.check_current()
        finally:
            self.close()
        if is_stale(error):
            raise Replaced(f"{self._source}: {error}") from error
        if isinstance(error, SnapshotError):
            raise error
        where = error.filename or self._source
        raise SnapshotError(f"{where}: {as_sentence(error.strerror or error)}") from error

    def close(self) -> None:
        """Close all files."""
        self._held.close()

    def check_current(self) -> None:
        """Check that the open files are still those at the path.

        An export removes the index before the first file of it and writes the index last. If the
        index is still there once all files are open, they are all of one export.

        Raises:
            Replaced: names what changed.
        """
        self._held.check_names()
        self.check_unwritten()
        if self._listing() != self._listed:
            raise Replaced(f"files came to {self._source} or went while it was read")

    def check_unwritten(self) -> None:
        """Raise `Replaced` if a file was written to since it was opened."""
        self._held.check_unwritten()

    def _listing(self) -> list[str]:
        """Return the names of the files in a directory that determine its tensors."""
        with contextlib.suppress(NotADirectoryError, FileNotFoundError):
            return sorted(name for name in os.listdir(self._source) if self._is_part(name))
        return []
