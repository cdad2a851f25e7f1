"""Snapshots of one run in one directory: `run/step-000100`, `run/step-000200`, and `run/latest`.

    run/step-000100/     a snapshot like any other
    run/latest           a link to the snapshot that was saved last
    run/.series.lock     the lock of the writer (snapshot/target.py)

The newest snapshot is the one that was saved last, whatever its step: a run that went back to step
50 continues from there.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import math
import os
import re
import secrets
import time
import weakref
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from zerofx.errors import ArgumentError, SnapshotError
from zerofx.model.module import CompiledModule
from zerofx.snapshot import files, state
from zerofx.snapshot.held import Replaced
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


def home_of(folder: Path) -> Path:
    """Return the series of a snapshot, or `folder` itself if that is not the snapshot of a step."""
    return folder.parent if _STEP.fullmatch(folder.name) else folder


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


# -- of one model: a save never replaces or removes the snapshots of another -----------------------
# Two models are the same if their parameters have the same names and shapes. Class, dtype, plan,
# world size and buffers may differ. Of live models that are alike, as the two generators of a
# CycleGAN are, those that have saved or loaded a directory own it.


_WAY_OUT = (
    "Give each model a folder of its own, for example run/generator and run/discriminator, or "
    "remove the old snapshot if it is no longer needed."
)
# Of each directory, in this process: the models that have saved or loaded it, and the last save.
_USERS: dict[Path, list[weakref.ref[CompiledModule]]] = {}
_SAVED: dict[Path, float] = {}


def check_owner(folder: Path, model: CompiledModule, facts: Mapping[str, Any]) -> None:
    """Check that a save of this model to `folder` is beside and over snapshots of its own.

    facts: what the manifest will say of the model.

    Raises:
        SnapshotError: a snapshot there is of another model; names both, and what differs.
    """
    home, found = home_of(folder), [folder] if (folder / MANIFEST).exists() else []
    if home != folder:
        found += [each for each in snapshots_in(home) if each != folder]
    for each in found:
        _check_one(each, facts)
    if not found:
        _USERS.pop(home, None)
        _SAVED.pop(home, None)
    elif _is_of_another(home, model):
        raise SnapshotError(
            f"{found[0]} is a snapshot of another {facts['model']} of this process, whose "
            f"parameters have the same names and shapes. A save of this one would replace it or "
            f"be taken for it. {_WAY_OUT}"
        )


def remember(folder: Path, model: CompiledModule, is_saved: bool = False) -> None:
    """Note that a model has loaded this snapshot or series, or is about to publish it."""
    home = home_of(folder)
    users = _USERS.setdefault(home, [])
    if not any(user() is model for user in users):
        users.append(weakref.ref(model))
    if is_saved:
        _SAVED[home] = time.monotonic()


def _is_of_another(home: Path, model: CompiledModule) -> bool:
    """Return whether a live model has used a directory, and this one has not.

    A model that was compiled after the last save is the successor of those before, as when the
    cells of a notebook run again.
    """
    users, made = _USERS.get(home, []), model._zerofx.engine.store.made
    if any(user() is model for user in users) or made > _SAVED.get(home, -math.inf):
        return False
    if any(user() is not None for user in users):
        gc.collect()  # models have cycles
    return any(user() is not None for user in users)


def _check_one(snapshot: Path, facts: Mapping[str, Any]) -> None:
    try:
        found = os.stat(snapshot / MANIFEST)
        if _model_digest_of(snapshot, found.st_ino, found.st_mtime_ns) == _model_digest(facts):
            return
        saved = _manifest(snapshot)
    except (SnapshotError, Replaced, OSError):
        return  # what cannot be read is no one's
    differences = _differences(saved, facts)
    if differences:
        raise SnapshotError(
            f"{snapshot} is a snapshot of another model: {_called(saved)} is saved there, this is "
            f"{_called(facts)}, and {state.few(differences)}. {_WAY_OUT}"
        )


def _differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return how the parameters differ. One that is a buffer of the other model is ignored there.

    A plan's `ignored_params` moves parameters to the buffers.
    """
    names = sorted({*saved["parameters"], *here["parameters"]})
    old, new = ({**each["buffers"], **each["parameters"]} for each in (saved, here))
    texts = []
    for name in names:
        if name not in new:
            texts.append(f"{name} is only in the snapshot")
        elif name not in old:
            texts.append(f"{name} is only in this model")
        elif _shape(old[name]) != _shape(new[name]):
            shapes = f"{_shape(old[name])} in the snapshot and {_shape(new[name])} in this model"
            texts.append(f"{name} is {shapes}")
    return texts


def _called(facts: Mapping[str, Any]) -> str:
    kind, count = facts.get("model"), len(facts["parameters"])
    named = kind if isinstance(kind, str) else "a model"  # older snapshots do not name the class
    return f"{named} with {count} parameter{'' if count == 1 else 's'}"


def _shape(text: str) -> str:
    """Return the shape in a description such as "float32 [64, 16]"."""
    return text.partition(" ")[2]


def _manifest(snapshot: Path) -> dict[str, Any]:
    with closing(files.OpenSnapshot(snapshot)) as opened:
        return opened.manifest


@functools.lru_cache(maxsize=1024)
def _model_digest_of(snapshot: Path, inode: int, changed_ns: int) -> str:
    """Return the digest of a snapshot's model; it is read once, not at every save."""
    return _model_digest(_manifest(snapshot))


def _model_digest(facts: Mapping[str, Any]) -> str:
    shapes = sorted((name, _shape(text)) for name, text in facts["parameters"].items())
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
