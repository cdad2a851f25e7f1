"""Safetensors files as they lie on disk: which tensors they hold, and parts of these read.

A file is 8 bytes with the length of its header, the header in JSON (name -> dtype, shape, and where
its bytes begin and end behind the header), and the tensors, dense and in rows.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerofx.errors import SnapshotError

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
_LENGTH_BYTES, _MOST_HEADER_BYTES = 8, 100 << 20  # safetensors' own limit
_AT_ONCE_BYTES = 8 << 20


@dataclass(frozen=True)
class Entry:
    """One tensor: in which file, of what kind, and from which byte of that on."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def describe(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, values) of the flat elements start:stop, a part at a time.

        Raises:
            SnapshotError: the file has ended before; names it and the offset.
        """
        size = self.dtype.itemsize
        step = max(_AT_ONCE_BYTES // size, 1)
        with open(self.path, "rb") as file:
            for first in range(start, stop, step):
                part = torch.empty(min(step, stop - first), dtype=self.dtype)
                at = self.offset + first * size
                file.seek(at)
                got = file.readinto(part.view(torch.uint8).numpy().data)
                if got != part.nbytes:
                    raise SnapshotError(
                        f"{self.path}: {self.name} should have {part.nbytes} bytes at offset {at}, "
                        f"but only {got} are there"
                    )
                yield first, part


def entries_of(source: str | os.PathLike[str]) -> dict[str, Entry]:
    """Return every tensor of a file, of the files of an index, or of a directory, by name.

    A directory has an index, or one or more safetensors files without one.

    Raises:
        SnapshotError: there is none, one is not whole, or a name is there twice.
    """
    path = Path(source)
    try:
        return _entries_of(path)
    except OSError as error:
        where = error.filename or path
        raise SnapshotError(f"{where}: {error.strerror or error}") from error


def _entries_of(path: Path) -> dict[str, Entry]:
    if path.name.endswith(INDEX):
        return _indexed(path)
    if not path.is_dir():
        return _entries(path)
    indexes = sorted(path.glob(f"*{INDEX}"))
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(indexes) > 1:
        names = ", ".join(i.name for i in indexes)
        raise SnapshotError(f"{path} has several indexes ({names}); give the path of one")
    if indexes:
        return _indexed(indexes[0])
    if not files:
        raise SnapshotError(f"{path}: no *{SUFFIX} file is there")
    found: dict[str, Entry] = {}
    for file in files:
        for name, entry in _entries(file).items():
            if name in found:
                raise SnapshotError(f"{name} is both in {found[name].path} and in {file}")
            found[name] = entry
    return found


def _indexed(path: Path) -> dict[str, Entry]:
    """Return the tensors that an index names, each from the file that it names."""
    where = _json(path.read_bytes(), path).get("weight_map")
    if not isinstance(where, dict):
        raise SnapshotError(f"{path} is no index of safetensors files: it has no weight_map")
    files = {name: _entries(path.parent / name) for name in sorted(set(where.values()))}
    absent = [name for name, file in where.items() if name not in files[file]]
    if absent:
        raise SnapshotError(f"{path}: {absent[0]} should be in {where[absent[0]]}, but is not")
    return {name: files[file][name] for name, file in where.items()}


def _entries(path: Path) -> dict[str, Entry]:
    """Return the tensors of one file, whose header is checked against the file's length."""
    with open(path, "rb") as file:
        total = os.fstat(file.fileno()).st_size
        start = file.read(_LENGTH_BYTES)
        length = struct.unpack("<Q", start)[0] if len(start) == _LENGTH_BYTES else total
        if length > min(total - _LENGTH_BYTES, _MOST_HEADER_BYTES):
            raise SnapshotError(f"{path} is no safetensors file, or is cut short: {total} bytes")
        header = _json(file.read(length), path)
    header.pop("__metadata__", None)
    behind = _LENGTH_BYTES + length
    return {name: _entry(path, name, value, behind, total) for name, value in header.items()}


def _entry(path: Path, name: str, value: Any, behind: int, total: int) -> Entry:
    try:
        dtype, shape = DTYPES[value["dtype"]], tuple(map(int, value["shape"]))
        begin, end = map(int, value["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"{path}: what it says of {name} cannot be read: {value}") from error
    if end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
        raise SnapshotError(f"{path}: {name} of {dtype} {list(shape)} has {end - begin} bytes")
    if behind + end > total:
        raise SnapshotError(
            f"{path} is cut short: {name} ends at offset {behind + end}, the file at {total}"
        )
    return Entry(path, name, dtype, shape, behind + begin)


def _json(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError as error:  # also what is no text
        raise SnapshotError(f"{path} is no safetensors file, or no index of some") from error
    if not isinstance(found, dict):
        raise SnapshotError(f"{path} is no safetensors file, or no index of some")
    return found
