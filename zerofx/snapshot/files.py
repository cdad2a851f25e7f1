"""The files of a snapshot: where they are written, how they are published, what proves them whole.

    run/                        the published snapshot
      zerofx.json               the manifest, written last: names, shapes, and every file's checksum
      .metadata, __0_0.distcp   what torch.distributed.checkpoint wrote
      values.pt                 what is no tensor: optimizer options, step counts, the user's extra
    .run.saving-1f3a90c2/       being written; never read, removed by the next save
    .run.new/                   complete, about to be published
    .run.old/                   the one before, until the new one is published

Publishing is three renames: saving -> new, run -> old, new -> run. A directory that stands under
its own name is always whole; where an interrupted save left none, `locate` reads .new, else .old,
and the next save puts it back first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX

from zerofx.errors import SnapshotError

log = logging.getLogger("zerofx")

MANIFEST = "zerofx.json"
VALUES = "values.pt"
FORMAT, VERSION = "zerofx snapshot", 1
_PIECE_BYTES = 1 << 20


def place(folder: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a snapshot; through a link, of what it points to."""
    return Path(os.path.realpath(folder))


def _beside(folder: Path, role: str) -> Path:
    return folder.parent / f".{folder.name}.{role}"


def locate(folder: Path) -> Path:
    """Return where the snapshot of this name is to be read, after an interrupted save too.

    Raises:
        SnapshotError: there is none.
    """
    if os.path.lexists(folder):
        return folder
    for role in ("new", "old"):
        left = _beside(folder, role)
        if (left / MANIFEST).exists():
            log.warning("%s: a save was interrupted while publishing; reading %s", folder, left)
            return left
    raise SnapshotError(f"{folder}: no such directory")


# -- writing ----------------------------------------------------------------------------------
def check_place(folder: Path) -> None:
    """Raise unless a snapshot may be published here: what is in the way is one, or is empty."""
    if folder.is_dir():
        if (folder / MANIFEST).exists() or not any(folder.iterdir()):
            return
        raise SnapshotError(
            f"{folder} holds other files and no {MANIFEST}; a save replaces the whole directory, "
            "so give it one of its own"
        )
    if os.path.lexists(folder):
        raise SnapshotError(f"{folder} is a file; give a directory")


def begin(folder: Path) -> Path:
    """Tidy up after interrupted saves and return a new hidden directory to write into."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(folder):
        for role in ("new", "old"):
            left = _beside(folder, role)
            if (left / MANIFEST).exists():
                os.rename(left, folder)
                break
    for left in (_beside(folder, "new"), _beside(folder, "old")):
        discard(left)
    for left in folder.parent.glob(f".{_escaped(folder.name)}.saving-*"):
        discard(left)
    made = _beside(folder, f"saving-{secrets.token_hex(4)}")
    made.mkdir()
    return made


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def discard(folder: Path) -> None:
    """Remove a directory that nobody reads any more; only log where that fails."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s: could not be removed (%s)", folder, error)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file and see it on disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """See a file that is written on disk, or of a directory its entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(written: Path, folder: Path) -> None:
    """Put a complete directory in the place of `folder`."""
    sync_file(written)
    new, old = _beside(folder, "new"), _beside(folder, "old")
    os.rename(written, new)
    try:
        if os.path.lexists(folder):
            os.rename(folder, old)
        os.rename(new, folder)
    except OSError:
        if os.path.lexists(old) and not os.path.lexists(folder):
            os.rename(old, folder)
        discard(new)
        raise
    sync_file(folder.parent)
    discard(old)


# -- what proves a snapshot whole -----------------------------------------------------------------
def checksum(path: Path) -> list[Any]:
    """Return [size in bytes, sha256] of a file."""
    digest, num_bytes = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            num_bytes += len(piece)
    return [num_bytes, digest.hexdigest()]


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest, which makes the directory a snapshot."""
    body = {"format": FORMAT, "version": VERSION, **facts}
    text = json.dumps({**body, "checksum": _digest(body)}, indent=1, sort_keys=True)
    write_file(folder / MANIFEST, text.encode())


def identity(manifest: Mapping[str, Any]) -> str:
    """Return what tells one save from any other."""
    return _digest(manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a snapshot.

    Raises:
        SnapshotError: there is none, it is damaged, or this version does not read it.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise SnapshotError(f"{folder} is a file; a snapshot is a directory")
    if not path.exists():
        raise SnapshotError(f"{_what_lies_in(folder)}; a snapshot of zerofx.save has a {MANIFEST}")
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise SnapshotError(f"{path}: truncated or damaged ({error})") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise SnapshotError(f"{path}: not the manifest of a zerofx snapshot")
    if found.get("version") != VERSION:
        raise SnapshotError(
            f"{path}: format {found.get('version')}, and this zerofx reads format {VERSION}"
        )
    if found.pop("checksum", None) != _digest(found):
        raise SnapshotError(f"{path}: its contents do not match its checksum: damaged or edited")
    return found


def _what_lies_in(folder: Path) -> str:
    if (folder / ".metadata").exists():
        return f"{folder} was written by torch.distributed.checkpoint alone"
    if any(folder.glob("*.distcp")):
        return f"{folder} is half-written"
    return f"{folder} is not a snapshot"


def check_files(folder: Path, files: Mapping[str, Any], share: int, shares: int) -> None:
    """Raise unless all files have their sizes and checksums.

    Of the large ones, which ranks divide among them, only the share-th of `shares` are summed.

    Raises:
        SnapshotError: names the file, with both sizes.
    """
    for name, (num_bytes, _) in files.items():
        path = folder / name
        if not path.is_file():
            raise SnapshotError(f"{path}: missing")
        found = path.stat().st_size
        if found != num_bytes:
            raise SnapshotError(
                f"{path}: {'truncated' if found < num_bytes else 'damaged'}: {found} bytes of "
                f"{num_bytes}"
            )
    large = sorted(name for name in files if name.endswith(DEFAULT_SUFFIX))
    for name in [*files.keys() - set(large), *large[share::shares]]:
        if checksum(folder / name) != files[name]:
            raise SnapshotError(f"{folder / name}: damaged: its checksum differs")


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
