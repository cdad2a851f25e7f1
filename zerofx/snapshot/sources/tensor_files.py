"""Safetensors files: the tensors that they hold, and reading parts of them.

A file is 8 bytes with the length of its header, the header in JSON (name -> dtype, shape, begin and
end of its bytes after the header), and the tensors, dense and in row-major order.
"""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import torch

from zerofx import schema
from zerofx.errors import SnapshotError, as_sentence
from zerofx.schema import Form, FormError
from zerofx.snapshot.sources.source import Entry, OpenCheckpoint

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
_NUMBERED = re.compile(rf"(.*)-(\d{{5}})-of-(\d{{5}}){re.escape(SUFFIX)}")


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


class TensorSource(OpenCheckpoint):
    """A file, the files of an index, or a directory that contains either.

    A directory has an index, or one or more safetensors files without one.
    """

    found = "safetensors files"

    def _is_part(self, name: str) -> bool:
        return name.endswith((INDEX, SUFFIX))

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
            raise SnapshotError(f"{path} has several indexes ({names}). Give the path of one.")
        if indexes:
            return self._indexed(indexes[0])
        if not files:
            raise SnapshotError(
                f"{path}: no *{SUFFIX} file is there. Give a directory that has them, one such "
                f"file, a *{INDEX}, or a checkpoint of another kind (docs/checkpoints.md)."
            )
        _check_numbers(files)
        found: dict[str, Entry] = {}
        for file in files:
            for name, entry in self._entries(file).items():
                if name in found:
                    raise SnapshotError(f"{name} is both in {found[name].path} and in {file}.")
                found[name] = entry
        return found

    def _indexed(self, path: Path) -> dict[str, Entry]:
        """Return the tensors that an index names, each from the file given there."""
        file, total = self._held.stream(str(path)), self._held.num_bytes(str(path))
        if total > _MOST_INDEX_BYTES:
            raise SnapshotError(f"{path} is no index of safetensors files: {total} bytes.")
        where = _json(file.read(), path, _INDEX, "no index of safetensors files")["weight_map"]
        files = {name: self._entries(path.parent / name) for name in sorted(set(where.values()))}
        absent = [name for name, file in where.items() if name not in files[file]]
        if absent:
            raise SnapshotError(f"{path}: {absent[0]} should be in {where[absent[0]]}, but is not.")
        return {name: files[file][name] for name, file in where.items()}

    def _entries(self, path: Path) -> dict[str, Entry]:
        """Return the tensors of one file, after checking its header against the file's length."""
        file, total = self._held.stream(str(path)), self._held.num_bytes(str(path))
        start = file.read(_LENGTH_BYTES)
        length = struct.unpack("<Q", start)[0] if len(start) == _LENGTH_BYTES else total
        if length > min(total - _LENGTH_BYTES, _MOST_HEADER_BYTES):
            raise SnapshotError(f"{path} is no safetensors file, or is cut short: {total} bytes.")
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
            raise SnapshotError(f"{path}: {name} of {dtype} {list(shape)} has {end - begin} bytes.")
        return Entry(self._held, path, name, dtype, shape, behind + begin)


def _check_tiling(path: Path, entries: dict[str, Entry], behind: int, total: int) -> None:
    """Check that tensors fill the file from the end of the header, without gaps or overlaps."""
    at, before = behind, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].end)):
        if entry.end > total:
            raise SnapshotError(
                f"{path} is cut short: {name} ends at offset {entry.end}, the file at {total}."
            )
        if entry.offset != at:
            raise SnapshotError(
                f"{path}: {name} begins at offset {entry.offset}, and {before} ends at {at}. Every "
                "byte of a safetensors file belongs to one tensor."
            )
        at, before = entry.end, name
    if at != total:
        raise SnapshotError(f"{path}: the tensors end at offset {at}, the file at {total}.")


def _check_numbers(files: list[Path]) -> None:
    """Check that numbered files without an index ("-00001-of-00003") are complete.

    An export that is in progress, or was interrupted, has written only some of them.
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
                "An export was interrupted there: export again."
            )


def _json(raw: bytes, path: Path, form: Form, what: str = "no safetensors file") -> dict[str, Any]:
    """Return the content of JSON of a given form; `what` begins the error for anything else."""
    try:
        return schema.check(schema.parse_json(raw), form)  # type: ignore[no-any-return]
    except FormError as error:
        raise SnapshotError(f"{path} is {what}, or is damaged: {as_sentence(error)}") from error


def _checked(value: Any, form: Form, path: Path, where: str = "") -> None:
    try:
        schema.check(value, form, where)
    except FormError as error:
        raise SnapshotError(f"{path}: {as_sentence(error)}") from error
