"""Files of torch.save, read without running the code that their pickles refer to.

`torch.load(weights_only=True)` refuses a file that contains an unknown class, such as the loss
scaler in each of DeepSpeed's files. Here, every class that torch does not know is replaced by an
`Inert` stand-in, which stores its arguments and does nothing, so that the rest can be read. Tensors
are loaded to meta, which reads no values, and become entries that know their place in the file.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from zerofx import schema
from zerofx.compat.checkpoint import storage_offset
from zerofx.errors import SnapshotError, as_sentence
from zerofx.schema import DAMAGE, Form, FormError
from zerofx.snapshot.held import HeldFiles
from zerofx.snapshot.sources.source import Entry, OpenCheckpoint, StoredTensor, read_whole

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
INDEX = ".bin.index.json"
_MOST_PICKLE_BYTES = 1 << 28
_MOST_INDEX_BYTES = 1 << 30
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the beginning of files by torch < 1.6
_HEADER_BYTES = 30  # of a record, before its name
_DEEP = 64  # the deepest nesting of containers that is read
_WEIGHT_MAP = schema.record({"weight_map": schema.mapping(schema.text(), schema.file_name)})
# The keys under which a file of a whole training state may hold its weights.
_HOLDERS = ("module", "model", "state_dict", "model_state_dict")


class Inert:
    """A stand-in for an object of an unknown class: it stores its arguments and does nothing."""

    path = ""  # the dotted path of the class

    def __new__(cls, *args: Any) -> Inert:
        self = super().__new__(cls)
        self.__dict__.update(args=args, state=None)
        return self

    def __init__(self, *args: Any) -> None:
        """Accept any arguments."""

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


def stand_in(path: str) -> type[Inert]:
    """Return an inert class for this dotted path."""
    return type(path.rpartition(".")[2], (Inert,), {"path": path})


@dataclass(frozen=True)
class TorchFile:
    """The content of a file, with an `Entry` in place of every tensor.

    saved_as: the name under which it was saved, without suffix; "archive" if torch.save was not
        given a path.
    """

    content: Any
    saved_as: str


class _Window(io.RawIOBase):
    """Bytes start:start + length of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(origin + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self._length - self._at, 0)]
        self._file.seek(self._start + self._at)
        got: int = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += got
        return got


def read_torch_file(
    held: HeldFiles, name: str, start: int = 0, length: int | None = None
) -> TorchFile:
    """Return the content of bytes start:start + length of a file, which torch.save wrote.

    By default, the whole file is read.

    Raises:
        OSError: the file cannot be opened.
        SnapshotError: it is truncated, damaged, or not such a file; names it.
    """
    total = held.num_bytes(name)
    length = total if length is None else length
    path = held.path(name)
    if start + length > total:
        raise SnapshotError(f"{path} is cut short: {start + length} bytes are needed of {total}.")
    window: Any = _Window(held.stream(name), start, length)
    try:
        records, saved_as = _records(window)
        window.seek(0)
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(window)
        window.seek(0)
        classes: list[Any] = [(stand_in(path), path) for path in unknown]
        with torch.serialization.safe_globals(classes):
            found = torch.load(window, map_location="meta", weights_only=True)
        describer = _Describer(held, path, start, records)
        return TorchFile(describer.described(found), saved_as)
    except zipfile.BadZipFile as error:
        held.stream(name).seek(start)
        why = f"it is no archive ({error}), and has {length} bytes"
        if held.stream(name).read(len(_OLD)) == _OLD:
            why = "torch before 1.6 wrote it: load it with torch.load, and torch.save it again"
        raise SnapshotError(f"{path} is no file of torch.save, or is cut short: {why}.") from error
    except FormError as error:
        raise SnapshotError(f"{path} is damaged: {as_sentence(error)}") from error
    except DAMAGE as error:
        why = _last_words(error)
        raise SnapshotError(
            f"{path} is damaged, or no file of torch.save: {as_sentence(why)}"
        ) from error


def _last_words(error: BaseException) -> str:
    """Return the reason that torch.load gives, without its advice about `weights_only`."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith("Check the documentation")]
    return told[-1].removeprefix("WeightsUnpickler error: ") if told else type(error).__name__


def _records(window: Any) -> tuple[dict[int, int], str]:
    """Return the size in bytes of every record by its offset, and the archive's name.

    Raises:
        BadZipFile: the file is not an archive.
        FormError: the archive was not written by torch.save.
    """
    found: dict[int, int] = {}
    with zipfile.ZipFile(window) as archive:
        infos = archive.infolist()
        saved_as = infos[0].filename.partition("/")[0] if infos else ""
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise FormError(f"{info.filename} is compressed, which torch.save never does")
            window.seek(info.header_offset)
            header = window.read(_HEADER_BYTES)
            if len(header) != _HEADER_BYTES:
                raise FormError(f"{info.filename} lies outside of it")
            name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
            found[info.header_offset + _HEADER_BYTES + name_bytes + extra_bytes] = info.file_size
            part = info.filename.partition("/")[2]
            if part == "data.pkl" and info.file_size > _MOST_PICKLE_BYTES:
                raise FormError(f"{info.filename} has {info.file_size} bytes")
            if part == "byteorder" and archive.read(info) != b"little":
                raise FormError("it was written on a machine with another order of bytes")
    return found, saved_as


@dataclass(frozen=True)
class _Describer:
    """Replaces every tensor of one file by an entry."""

    held: HeldFiles
    path: Path
    start: int
    records: Mapping[int, int]

    def described(self, value: Any, name: str = "", depth: int = 0) -> Any:
        """Return nested values; `name` is the path to them in the file."""
        if depth > _DEEP:
            raise FormError("it is nested too deep")
        if isinstance(value, Tensor):
            return self._entry(value, name or "its tensor")
        if isinstance(value, dict):
            parts = value.items()
            return {k: self.described(v, f"{name}.{k}" if name else str(k), depth + 1)
                    for k, v in parts}  # fmt: skip
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            found = [self.described(v, f"{name}[{n}]", depth + 1) for n, v in enumerate(value)]
            return found if isinstance(value, list) else tuple(found)
        if isinstance(value, Inert):
            value.__setstate__(self.described(value.state, name, depth + 1))
        return value

    def _entry(self, tensor: Tensor, name: str) -> Entry:
        if tensor.layout is not torch.strided or tensor.device.type != "meta":
            raise FormError(f"{name} is a {type(tensor).__name__}, and not dense")
        offset, size = storage_offset(tensor), tensor.dtype.itemsize
        entry = Entry(
            self.held, self.path, name, tensor.dtype, tuple(tensor.shape),
            self.start + offset + int(tensor.storage_offset()) * size,
            None if tensor.is_contiguous() else tuple(tensor.stride()),
        )  # fmt: skip
        if entry.end - self.start - offset > self.records.get(offset, -1):
            raise FormError(f"{name} of {list(tensor.shape)} does not lie within a record")
        return entry


# -- checking and simplifying the content ----------------------------------------------------------
def tensor(value: Any, where: str) -> None:
    """Accept tensors of a file; a form of zerofx.schema."""
    if not isinstance(value, Entry):
        raise schema.refuse(where, value, "a tensor")


def checked(file: TorchFile, form: Form, path: Path, what: str) -> Any:
    """Return a file's content if it has a form.

    Raises:
        SnapshotError: it does not; names the file, the field, and the expected kind of file.
    """
    try:
        return schema.check(file.content, form)
    except FormError as error:
        raise SnapshotError(f"{path} is no {what}: {as_sentence(error)}") from error


def plain(value: Any) -> Any:
    """Return nested values with small tensors read, and without objects of unknown classes."""
    if isinstance(value, Entry):
        return read_whole(value)
    if isinstance(value, dict):
        parts = {key: plain(part) for key, part in value.items() if not isinstance(part, Inert)}
        return {key: part for key, part in parts.items() if not isinstance(key, Inert)}
    if type(value) in (list, tuple):
        return type(value)(plain(part) for part in value if not isinstance(part, Inert))
    return value


class TorchSource(OpenCheckpoint):
    """One torch.save file with weights by name, or a directory of Hugging Face's `.bin` files."""

    found = "files of torch.save"

    def _is_part(self, name: str) -> bool:
        return name.endswith((INDEX, *SUFFIXES))

    def _found(self) -> dict[str, StoredTensor]:
        if not self._source.is_dir():
            return self._entries(self._source)
        indexes = sorted(self._source.glob(f"*{INDEX}"))
        if not indexes:
            (file,) = weights_in(self._source)
            return self._entries(file)
        text = self._held.stream(str(indexes[0])).read(_MOST_INDEX_BYTES)
        try:
            where = schema.check(schema.parse_json(text), _WEIGHT_MAP)["weight_map"]
        except FormError as error:
            raise SnapshotError(f"{indexes[0]}: {as_sentence(error)}") from error
        files = {name: self._entries(self._source / name) for name in sorted(set(where.values()))}
        absent = [name for name, file in where.items() if name not in files[file]]
        if absent:
            raise SnapshotError(f"{indexes[0]}: {absent[0]} is not in {where[absent[0]]}.")
        return {name: files[file][name] for name, file in where.items()}

    def _entries(self, path: Path) -> dict[str, StoredTensor]:
        content = read_torch_file(self._held, str(path)).content
        for key in _HOLDERS:
            if isinstance(content, dict) and isinstance(content.get(key), dict):
                content = content[key]
        if not isinstance(content, dict):
            raise SnapshotError(f"{path} has a {type(content).__name__}, and no weights by name.")
        return {n: v for n, v in content.items() if isinstance(n, str) and isinstance(v, Entry)}


def weights_in(folder: Path) -> Collection[Path]:
    """Return the single weights file of Hugging Face's libraries in a directory, if any."""
    names = ("pytorch_model.bin", "adapter_model.bin")
    return [folder / name for name in names if (folder / name).is_file()][:1]
