"""The files of a snapshot: how they are verified and read.

    zerofx.json               the manifest, written last: names, shapes, and every file's checksum
    .metadata, __0_0.distcp   files of torch.distributed.checkpoint
    values.pt                 values that are not tensors: optimizer options, step counts, extra
    .zerofx                   the mark of a directory made by zerofx (snapshot/target.py)

A snapshot stays open while it is read (`OpenSnapshot`). Its manifest and its files are of one save,
even if the next one is published and this one is deleted meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX

from zerofx import schema
from zerofx.errors import NoSnapshotError, SnapshotError, as_sentence
from zerofx.schema import FormError
from zerofx.snapshot.held import HeldFiles, Replaced, is_stale
from zerofx.snapshot.target import INDEX, MANIFEST, MARK, VALUES, beside, place, write_file

log = logging.getLogger("zerofx")

FORMAT, VERSION = "zerofx snapshot", 1
_PIECE_BYTES = 1 << 20
_MOST_MANIFEST_BYTES = 1 << 30
_NAMES = schema.mapping(schema.text(), schema.text())
_MANIFEST = schema.record(
    {
        "files": schema.mapping(
            schema.file_name, schema.row(schema.integer(), schema.text("[0-9a-f]{64}"))
        ),
        "world_size": schema.integer(1, 1 << 31),
        "parameters": _NAMES,
        "buffers": _NAMES,
    },
    hosts=schema.integer(1, 1 << 31),
)
_LOOKS_S = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2)  # between attempts to find a missing name


# -- writing and verifying ------------------------------------------------------------------------
def checksum(path: Path) -> list[Any]:
    """Return [size in bytes, sha256] of a file."""
    with open(path, "rb") as file:
        return _checksum_of(file)


def _checksum_of(file: BinaryIO) -> list[Any]:
    digest, num_bytes = hashlib.sha256(), 0
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
        num_bytes += len(piece)
    return [num_bytes, digest.hexdigest()]


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest, which makes the directory a snapshot."""
    body = {"format": FORMAT, "version": VERSION, **facts}
    text = json.dumps({**body, "checksum": _digest(body)}, indent=1, sort_keys=True)
    write_file(folder / MANIFEST, text.encode())


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# -- reading --------------------------------------------------------------------------------------
def open_snapshot(name: Path) -> OpenSnapshot:
    """Open the snapshot of this name, even after an interrupted save.

    While a save publishes, the name is missing for a moment, and a link may be moved to another
    snapshot. A missing name is therefore looked for several times, within 0.1 s.

    Raises:
        SnapshotError: there is no snapshot, or it is damaged.
        Replaced: a save replaced it while it was opened.
    """
    for nap in _LOOKS_S:
        try:
            return OpenSnapshot(place(name))
        except OSError as error:
            if not (isinstance(error, FileNotFoundError) or is_stale(error)):
                raise
        time.sleep(nap)
    folder = place(name)
    for left in (beside(folder, "new"), beside(folder, "old")):
        if not (left / MANIFEST).exists():
            continue
        try:
            found = OpenSnapshot(left)
        except FileNotFoundError:
            raise Replaced(f"a save is publishing {folder}") from None
        log.warning("%s: a save was interrupted while publishing; reading %s.", folder, left)
        return found
    raise NoSnapshotError(f"{folder}: no such directory.")


def is_there(folder: Path) -> bool:
    """Return whether the name refers to something that `open_snapshot` would open or refuse."""
    left = (beside(place(folder), "new"), beside(place(folder), "old"))
    if any((each / MANIFEST).exists() for each in left):
        return True
    if folder.is_dir():
        return any(each.name in (MANIFEST, ".metadata", MARK) for each in folder.iterdir())
    return os.path.lexists(folder)


def is_own(folder: Path) -> bool:
    """Return whether zerofx.save has written here, or is about to publish here."""
    left = (beside(place(folder), "new"), beside(place(folder), "old"))
    if any((each / MANIFEST).exists() for each in left):
        return True
    return any((folder / name).exists() for name in (MANIFEST, VALUES, MARK))


@contextlib.contextmanager
def damaged_left_out(folder: Path) -> Iterator[None]:
    """Leave the block, with a warning, if a snapshot in it is damaged; silently if it is gone."""
    try:
        yield
    except (FileNotFoundError, Replaced):  # another save has removed it, or is publishing
        return
    except (SnapshotError, OSError) as error:
        log.warning("zerofx: %s is left out: %s", folder, as_sentence(error))


class OpenSnapshot:
    """An open snapshot: its directory, its manifest and its files, all of one save.

    Raises:
        FileNotFoundError: there is no directory of this name.
        SnapshotError: the manifest is missing, damaged, or of a version that cannot be read.
        Replaced: a save replaced it while it was opened.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.files = HeldFiles(folder)
        except NotADirectoryError as error:
            raise SnapshotError(f"{folder} is a file. A snapshot is a directory.") from error
        try:
            with self.watched():
                self.manifest = self._read_manifest()
                if len(self.manifest["files"]) < self.files.most_open:
                    self._hold_all()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all files."""
        self.files.close()

    @property
    def identity(self) -> str:
        """A digest that identifies this save."""
        return _digest(self.manifest)

    @property
    def is_spread(self) -> bool:
        """Whether its files are spread over disks of hosts, so that some may be missing here."""
        return "hosts" in self.manifest

    def held(self) -> frozenset[str]:
        """Return the names of the files that are here with the right size."""
        found = {MANIFEST}
        for name, (num_bytes, _) in self.manifest["files"].items():
            with contextlib.suppress(FileNotFoundError, SnapshotError):
                if self.files.num_bytes(name) == num_bytes:
                    found.add(name)
        return frozenset(found)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Raise `Replaced` if reading within the block fails because of a later save.

        For example, a file is missing if the next save was published and has deleted it.
        """
        try:
            yield
            self.files.check_unwritten()
        except (SnapshotError, OSError, RuntimeError, ValueError, EOFError) as error:
            if is_stale(error) or not self.files.is_folder(self.folder):
                raise Replaced(f"a save replaced {self.folder} ({error})") from error
            raise

    def _read_manifest(self) -> dict[str, Any]:
        path = self.folder / MANIFEST
        try:
            num_bytes = self.files.num_bytes(MANIFEST)
            if num_bytes > _MOST_MANIFEST_BYTES:
                raise SnapshotError(f"{path}: {num_bytes} bytes are too many for a manifest.")
            text = self.files.stream(MANIFEST).read()
        except FileNotFoundError:
            raise SnapshotError(
                f"{_what_lies_in(self.folder)}. A snapshot of zerofx.save has a {MANIFEST}."
            ) from None
        try:
            found = schema.parse_json(text)
        except FormError as error:
            raise SnapshotError(f"{path}: truncated or damaged ({error}).") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise SnapshotError(f"{path}: not the manifest of a zerofx snapshot.")
        if found.get("version") != VERSION:
            raise SnapshotError(
                f"{path}: format {found.get('version')}, but this zerofx reads format {VERSION}."
            )
        if found.pop("checksum", None) != _digest(found):
            raise SnapshotError(
                f"{path}: its contents do not match its checksum: damaged or edited."
            )
        try:
            schema.check(found, _MANIFEST)
            for name in (INDEX, VALUES):
                if name not in found["files"]:
                    raise FormError(f"files.{name} is missing")
        except FormError as error:
            raise SnapshotError(f"{path}: {error}, so it is damaged or edited.") from error
        return found

    def _hold_all(self) -> None:
        """Open all files, so that no later save can delete them; `check` reports missing ones."""
        for name in self.manifest["files"]:
            with contextlib.suppress(FileNotFoundError):
                self.files.stream(name)

    def check(self, share: int, shares: int, needed: frozenset[str] | None = None) -> None:
        """Check the sizes and checksums of all files, or of those that are needed on this host.

        Large files are divided among the ranks: only the share-th of `shares` are verified here.

        Raises:
            SnapshotError: names the file, with both sizes.
        """
        files = self.manifest["files"]
        if needed is not None:
            files = {name: files[name] for name in files if name in needed}
        for name, (num_bytes, _) in files.items():
            path = self.folder / name
            try:
                found = self.files.num_bytes(name)
            except FileNotFoundError:
                raise SnapshotError(f"{path}: missing.") from None
            if found != num_bytes:
                raise SnapshotError(
                    f"{path}: {'truncated' if found < num_bytes else 'damaged'}: {found} bytes of "
                    f"{num_bytes}."
                )
        large = sorted(name for name in files if name.endswith(DEFAULT_SUFFIX))
        for name in [*files.keys() - set(large), *large[share::shares]]:
            if _checksum_of(self.files.stream(name)) != files[name]:
                raise SnapshotError(f"{self.folder / name}: damaged: its checksum differs.")

    def damaged(self, names: set[str], share: int, shares: int) -> set[str]:
        """Return which of these files are damaged; only the share-th of `shares` are verified."""
        found = set()
        for name in sorted(names)[share::shares]:
            if name in self.manifest["files"]:
                try:
                    seen = _checksum_of(self.files.stream(name))
                except (OSError, SnapshotError):
                    seen = []
                found |= {name} if seen != self.manifest["files"][name] else set()
        return found


def _what_lies_in(folder: Path) -> str:
    if (folder / ".metadata").exists():
        return f"{folder} was written by torch.distributed.checkpoint alone"
    if any(folder.glob("*.distcp")):
        return f"{folder} is half-written"
    return f"{folder} is not a snapshot"
