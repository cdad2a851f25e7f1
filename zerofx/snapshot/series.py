"""Snapshots of one run in one directory: `run/step-000100`, `run/step-000200`, and `run/latest`.

    run/step-000100/     a snapshot like any other
    run/latest           a link to the snapshot that was saved last
    run/.series.lock     the lock of the writer (snapshot/target.py)

The newest snapshot is the one that was saved last, whatever its step: a run that went back to step
50 continues from there.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from pathlib import Path

from zerofx.errors import ArgumentError, SnapshotError
from zerofx.snapshot.target import MANIFEST, discard, is_ours, sync_file

LATEST = "latest"
LOCK = "series"  # run/.series.lock
_STEP = re.compile(r"step-(\d{6,})")
_MOST_BYTES = 1 << 28  # of a manifest


def check_options(step: object, keep: object, copies: object) -> None:
    """Check that these are a step, and numbers of snapshots and of copies to keep, or None.

    Raises:
        ArgumentError: names the parameter and its allowed values.
    """
    for name, value, least in (("step", step, 0), ("keep", keep, 1), ("copies", copies, 0)):
        if value is not None and (type(value) is not int or value < least):
            raise ArgumentError(
                f"zerofx.save was given {name}={value!r}. It must be a whole number of at least "
                f"{least}, or None."
            )
    if keep is not None and step is None:
        raise ArgumentError(
            f"zerofx.save was given keep={keep} and no step. Snapshots of several steps are kept "
            "side by side: give step= too, or leave keep out to replace the one snapshot."
        )
    if copies is not None and step is None:
        raise ArgumentError(
            f"zerofx.save was given copies={copies} and no step. On disks of several hosts, the "
            "last snapshot has to stay until all hosts have the next one: give step= too."
        )


def place_of(folder: Path, step: int) -> Path:
    """Return the path of the snapshot of a step."""
    return folder / f"step-{step:06d}"


def check_place(folder: Path) -> None:
    """Check that a directory may hold a series.

    Raises:
        SnapshotError: it is itself a snapshot, or a file.
    """
    if (folder / MANIFEST).exists():
        raise SnapshotError(
            f"{folder} is a snapshot that was saved without step=. Save this series to another "
            "directory, or move the snapshot away."
        )
    if os.path.lexists(folder) and not folder.is_dir():
        raise SnapshotError(f"{folder} is a file. Give a directory.")


def snapshots_in(folder: Path) -> list[Path]:
    """Return the snapshots of a series: first the one of `latest`, then by time, newest first."""
    try:
        with os.scandir(folder) as entries:
            found = [folder / e.name for e in entries if _STEP.fullmatch(e.name) and e.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [each for each in found if is_ours(each)]
    latest = folder / LATEST
    named = os.readlink(latest) if latest.is_symlink() else ""
    return sorted(found, key=lambda each: (each.name == named, saved_at(each)), reverse=True)


def saved_at(snapshot: Path) -> tuple[float, str]:
    """Return when a snapshot was saved, in seconds since 1970; 0 if it cannot be read."""
    path = snapshot / MANIFEST
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
        saved = found.get("saved") if isinstance(found, dict) else None
        at = path.stat().st_mtime
        if isinstance(saved, float) and math.isfinite(saved):
            at = saved
    except (OSError, ValueError, RecursionError):
        at = 0.0
    return at, snapshot.name


def move_latest(folder: Path, name: str) -> None:
    """Make `latest` refer to a snapshot, replacing the link atomically.

    Raises:
        SnapshotError: something other than a link has this name.
    """
    latest, new = folder / LATEST, folder / f".{LATEST}.{secrets.token_hex(4)}"
    if os.path.lexists(latest) and not latest.is_symlink():
        raise SnapshotError(f"{latest} is in the way: zerofx keeps a link there. Move it.")
    os.symlink(name, new)
    os.replace(new, latest)
    sync_file(folder)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` snapshots."""
    for old in snapshots_in(folder)[keep:]:
        discard(old)
