"""Emitted programs in the cache: written by compiles, read when bound, pruned by age and size.

Their code is executed. A program's directory is therefore private to this user, and contains
exactly the files that were just written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
import time
from pathlib import Path

from zerofx.codegen.emit import fingerprint, render, write
from zerofx.ir.program import Planned
from zerofx.runtime.regions.keys import cache_dir
from zerofx.runtime.regions.private import is_private, private_folder, remove_foreign

log = logging.getLogger("zerofx")

KEPT_DAYS, KEPT_BYTES = 30, 1 << 30
_DAY_S = 86_400
# With a leading dot: left by a process that died while writing.
_OURS = re.compile(r"\.?[0-9a-f]{16}(\..+)?")
_STAMP = ".pruned"


def write_to_cache(program: Planned) -> Path:
    """Write a program's files to the cache and return their directory."""
    files = render(program)
    folder = private_folder(cache_dir() / "programs")
    target = folder / fingerprint(files)
    with contextlib.suppress(FileNotFoundError):
        found = target.lstat()
        if not (is_private(found) and stat.S_ISDIR(found.st_mode)):
            _remove(target)
            log.warning("%s can be written by other users. It was removed.", target)
    write(files, target)
    for path in target.rglob("*"):
        if not path.is_dir() and str(path.relative_to(target)) not in files:
            path.unlink(missing_ok=True)
            log.warning("%s does not belong to this program. It was removed.", path)
    prune(folder)
    return target


def prune(folder: Path) -> None:
    """Once a day, remove programs not compiled for `KEPT_DAYS`, or in excess of `KEPT_BYTES`.

    The oldest are removed first, and none that is younger than a day. A running job that needs a
    removed program again writes it again.
    """
    stamp, now = folder / _STAMP, time.time()
    remove_foreign([stamp])
    with contextlib.suppress(FileNotFoundError):
        if now - stamp.stat().st_mtime < _DAY_S:
            return
    stamp.touch(mode=0o600)
    found = []
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):
                found.append((now - path.lstat().st_mtime, path))
    total = 0
    for age_s, path in sorted(found):
        total += _num_bytes(path)
        if age_s > KEPT_DAYS * _DAY_S or (total > KEPT_BYTES and age_s > _DAY_S):
            _remove(path)


def _num_bytes(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
