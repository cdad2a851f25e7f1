"""Recognition of checkpoints: the library that wrote the files at a path, and their reader."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from zerofx import schema
from zerofx.errors import SnapshotError, as_sentence
from zerofx.schema import FormError
from zerofx.snapshot.sources import tensor_files, torch_files, zero_files
from zerofx.snapshot.sources.chunk_files import PARTS, ChunkSource
from zerofx.snapshot.sources.source import OpenCheckpoint
from zerofx.snapshot.sources.tensor_files import TensorSource
from zerofx.snapshot.sources.torch_files import TorchSource
from zerofx.snapshot.sources.zero_files import UniversalSource, ZeroSource
from zerofx.snapshot.target import INDEX

# Files that name the folder to read: DeepSpeed's, and Megatron's, which has a number.
_ITERATION = "latest_checkpointed_iteration.txt"
_POINTERS = ("latest", "latest_universal", _ITERATION)
_MOST_POINTER_BYTES = 4096
_NUMBER = re.compile(r"\d{1,12}")


def open_source(path: Path, wanted: Collection[str]) -> OpenCheckpoint:
    """Open the checkpoint at a path.

    wanted: the names that the model's tensors should have in it.

    Raises:
        SnapshotError: the path holds no supported format, or a file is damaged.
        Replaced: the files were replaced while they were opened.
    """
    kind, folder = recognise(path) or (TensorSource, path)
    return kind(folder, wanted)


def recognise(path: Path) -> tuple[type[OpenCheckpoint], Path] | None:
    """Return the reader of the files at a path and the folder to read; None for other formats.

    Raises:
        SnapshotError: a file there names a folder that does not exist.
    """
    if not path.is_dir():
        return _of_file(path)
    pointed = _pointed(path)
    return _of_folder(path if pointed is None else pointed)


def _of_file(path: Path) -> tuple[type[OpenCheckpoint], Path] | None:
    if path.name.endswith((tensor_files.SUFFIX, tensor_files.INDEX)):
        return TensorSource, path
    if path.name.endswith(torch_files.SUFFIXES):
        return TorchSource, path
    return None


def _pointed(path: Path) -> Path | None:
    """Return the folder that a pointer file names."""
    for name in _POINTERS:
        pointer = path / name
        if pointer.is_dir():  # the link that zerofx.save(step=...) makes
            return pointer
        if not os.path.lexists(pointer):
            continue
        try:
            said = schema.read_text(pointer, _MOST_POINTER_BYTES).strip()
            schema.file_name(said, "the name in it")
        except (OSError, FormError) as error:
            raise SnapshotError(f"{pointer}: {as_sentence(error)}") from error
        is_number = name == _ITERATION and _NUMBER.fullmatch(said)
        folder = path / (f"iter_{int(said):07d}" if is_number else said)
        if not folder.is_dir():
            raise SnapshotError(f"{pointer} names {folder.name}, which is not there.")
        return folder
    return None


def _of_folder(path: Path) -> tuple[type[OpenCheckpoint], Path] | None:
    names = os.listdir(path)
    if _has_params(path):
        return UniversalSource, path
    if zero_files.is_zero_folder(names):
        return ZeroSource, path
    if INDEX in names or any((path / name / INDEX).is_file() for name in PARTS):
        return ChunkSource, path
    if any(name.endswith((tensor_files.SUFFIX, tensor_files.INDEX)) for name in names):
        return TensorSource, path
    if torch_files.weights_in(path) or any(name.endswith(torch_files.INDEX) for name in names):
        return TorchSource, path
    return None


def _has_params(path: Path) -> bool:
    """Return whether a folder is a universal folder of DeepSpeed."""
    with contextlib.suppress(NotADirectoryError, FileNotFoundError):
        return any(
            (path / zero_files.UNIVERSAL / name / "fp32.pt").is_file()
            for name in os.listdir(path / zero_files.UNIVERSAL)
        )
    return False
