"""Safetensors files as they lie on disk: which tensors they hold, and parts of these read.

A file is 8 bytes with the length of its header, the header in JSON (name -> dtype, shape, and where
its bytes begin and end behind the header), and the tensors, dense and in rows.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from zerofx import schema
from zerofx.errors import SnapshotError
from zerofx.schema import Form, FormError
from zerofx.snapshot.held import HeldFiles, Replaced, is_stale

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
_MOST_INDEX_BYTES = 1 << 30
_LENGTH_BYTES, _MOST_HEADER_BYTES = 8, 100 << 20  # safetensors' own limit
_AT_ONCE_BYTES = 8 << 20
_NUMBERED = re.compile(rf"(.*)-(\d{{5}})-of-(\d{{5}}){re.escape(SUFFIX)}")
_SECOND_LOOK_S = 0.1  # after a fault, before files are found to be unchanged


_ENTRY = schema.record(
    {
        "dtype": schema.one_of(DTYPES),
        "shape": schema.sequence(schema.integer(), most=64),
        "data_offsets": schema.row(schema.integer(), schema.integer()),
    }
)
_HEADER = schema.mapping(schema.text(), _ENTRY)
_METADATA = schema.optional(schema.mapping(schema.text(), schema.text()))
_INDEX = schema.record({"weight_map": schema.mapping(schema.text(), schema.file_name)})


@dataclass(frozen=True)
class Entry:
    """One tensor: in which open file, of what kind, and from which byte of that on."""

    held: HeldFiles
    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def describe(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, values) of the flat elements start:stop, a part at a time.

        Raises:
            SnapshotError: the file has ended before; names it and the offset.
        """
        size = self.dtype.itemsize
        step = max(_AT_ONCE_BYTES // size, 1)
        file = self.held.stream(str(self.path))
        for first in range(start, stop, step):
            part = torch.empty(min(step, stop - first), dtype=self.dtype)
            at = self.offset + first * size
            file.seek(at)
            got = file.readinto(part.view(torch.uint8).numpy().data)  # type: ignore[attr-defined]
            if got != part.nbytes:
                raise SnapshotError(
                    f"{self.path}: {self.name} should have {part.nbytes} bytes at offset {at}, "
                    f"but only {got} are there"
                )
            yield first, part


class TensorSource:
    """A file, the files of an index, or a directory that has either, held open until `close`.

    A directory has an index, or one or more safetensors files without one.

    Raises:
        SnapshotError: there is none, one is not whole, or a name is there twice.
        Replaced: an export replaced the files while they were opened.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self._source = Path(source)
        self._held = HeldFiles()
        self._listed = self._listing()
        try:
            self.entries: dict[str, Entry] = self._found()  # every tensor by name
            self.check_current()
        except (OSError, SnapshotError) as error:
            self._raise(error)
        except BaseException:
            self.close()
            raise

    def _raise(self, error: OSError | SnapshotError) -> NoReturn:
        """Raise an error, or `Replaced` if it may come of an export that is under way."""
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
        raise SnapshotError(f"{where}: {error.strerror or error}") from error

    def close(self) -> None:
        """Let go of all files."""
        self._held.close()

    def check_current(self) -> None:
        """Raise unless the files that are open are still the ones there.

        An export removes the index before the first file of it and writes the index last: if the
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
        """Return the names of files in a directory on which its tensors depend."""
        with contextlib.suppress(NotADirectoryError, FileNotFoundError):
            return sorted(n for n in os.listdir(self._source) if n.endswith((INDEX, SUFFIX)))
        return []

    def _found(self) -> dict[str, Entry]:
        path = self._source
        if path.name.endswith(INDEX):
            return self._indexed(path)
        if not path.is_dir():
            return self._entries(path)
        indexes = sorted(path.glob(f"*{INDEX}"))
        files = sorted(path.glob(f"*{SUFFIX}"))
        if len(indexes) > 1:
            names = ", ".join(i.name for i in indexes)
            raise SnapshotError(f"{path} has several indexes ({names}); give the path of one")
        if indexes:
            return self._indexed(indexes[0])
        if not files:
            raise SnapshotError(
                f"{path}: no *{SUFFIX} file is there; give a directory that has them, one such "
                f"file, or a *{INDEX}"
            )
        _check_numbers(files)
        found: dict[str, Entry] = {}
        for file in files:
            for name, entry in self._entries(file).items():
                if name in found:
                    raise SnapshotError(f"{name} is both in {found[name].path} and in {file}")
                found[name] = entry
        return found

    def _indexed(self, path: Path) -> dict[str, Entry]:
        """Return the tensors that an index names, each from the file that it names."""
        file, total = self._held.stream(str(path)), self._held.num_bytes(str(path))
        if total > _MOST_INDEX_BYTES:
            raise SnapshotError(f"{path} is no index of safetensors files: {total} bytes")
        where = _json(file.read(), path, _INDEX, "no index of safetensors files")["weight_map"]
        files = {name: self._entries(path.parent / name) for name in sorted(set(where.values()))}
        absent = [name for name, file in where.items() if name not in files[file]]
        if absent:
            raise SnapshotError(f"{path}: {absent[0]} should be in {where[absent[0]]}, but is not")
        return {name: files[file][name] for name, file in where.items()}

    def _entries(self, path: Path) -> dict[str, Entry]:
        """Return the tensors of one file, whose header is checked against the file's length."""
        file, total = self._held.stream(str(path)), self._held.num_bytes(str(path))
        start = file.read(_LENGTH_BYTES)
        length = struct.unpack("<Q", start)[0] if len(start) == _LENGTH_BYTES else total
        if length > min(total - _LENGTH_BYTES, _MOST_HEADER_BYTES):
            raise SnapshotError(f"{path} is no safetensors file, or is cut short: {total} bytes")
        header = _json(file.read(length), path, schema.mapping(schema.text(), schema.anything))
        metadata = header.pop("__metadata__", None)
        _checked(metadata, _METADATA, path, where="__metadata__")
        _checked(header, _HEADER, path)
        behind = _LENGTH_BYTES + length
        found = {n: self._entry(path, n, value, behind) for n, value in header.items()}
        _check_tiling(path, found, behind, total)
        return found

    def _entry(self, path: Path, name: str, value: Any, behind: int) -> Entry:
        dtype, shape = DTYPES[value["dtype"]], tuple(value["shape"])
        begin, end = value["data_offsets"]
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise SnapshotError(f"{path}: {name} of {dtype} {list(shape)} has {end - begin} bytes")
        return Entry(self._held, path, name, dtype, shape, behind + begin)


def _check_tiling(path: Path, entries: dict[str, Entry], behind: int, total: int) -> None:
    """Raise unless tensors follow each other from the header's end to the file's."""
    at, before = behind, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].end)):
        if entry.end > total:
            raise SnapshotError(
                f"{path} is cut short: {name} ends at offset {entry.end}, the file at {total}"
            )
        if entry.offset != at:
            raise SnapshotError(
                f"{path}: {name} begins at offset {entry.offset}, and {before} ends at {at}. Every "
                "byte of a safetensors file belongs to one tensor"
            )
        at, before = entry.end, name
    if at != total:
        raise SnapshotError(f"{path}: the tensors end at offset {at}, the file at {total}")


def _check_numbers(files: list[Path]) -> None:
    """Raise unless of numbered files without an index ("-00001-of-00003") all are there.

    An export that is under way, or was interrupted, has written some of them.
    """
    found: dict[tuple[str, int], int] = {}
    for file in files:
        numbered = _NUMBERED.fullmatch(file.name)
        if numbered:
            key = numbered[1], int(numbered[3])
            found[key] = found.get(key, 0) + 1
    for (stem, count), have in found.items():
        if have != count:
            raise SnapshotError(
                f"{files[0].parent} has {have} of {count} files {stem}-*{SUFFIX} and no index. "
                "An export was interrupted there: export again"
            )


def _json(raw: bytes, path: Path, form: Form, what: str = "no safetensors file") -> dict[str, Any]:
    """Return what JSON says of a form; `what` begins the error for anything else."""
    try:
        return schema.check(schema.parse_json(raw), form)  # type: ignore[no-any-return]
    except FormError as error:
        raise SnapshotError(f"{path} is {what}, or is damaged: {error}") from error


def _checked(value: Any, form: Form, path: Path, where: str = "") -> None:
    try:
        schema.check(value, form, where)
    except FormError as error:
        raise SnapshotError(f"{path}: {error}") from error
