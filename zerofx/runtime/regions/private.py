"""Private folders: code that this process runs is this user's, and no one else may write to it.

An existing folder is never changed. If others may write to it, zerofx creates and uses a folder
within it to which they cannot write.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from zerofx.errors import ProgramError

log = logging.getLogger("zerofx")

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_WAY_OUT = "Set ZEROFX_CACHE_DIR to a directory of your own."


def private_root(given: Path) -> Path:
    """Return a private folder of this user: the given one, or one within it.

    Raises:
        ProgramError: there is no such folder, and none can be created.
    """
    try:
        given.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = given.stat()
        if is_private(found):
            return given
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise ProgramError(
                f"the cache {given} may be written by any user (mode "
                f"{stat.S_IMODE(found.st_mode):o}), but this process would run code in it. "
                f"{_WAY_OUT}"
            )
        own = given / f"zerofx-{os.geteuid()}"
        own.mkdir(exist_ok=True, mode=0o700)
        found = own.lstat()
    except OSError as error:
        raise ProgramError(f"the cache {given}: {error.strerror}. {_WAY_OUT}") from error
    if not (is_private(found) and stat.S_ISDIR(found.st_mode)):
        raise ProgramError(f"the cache {own} {_whose(found)}. Remove it. {_WAY_OUT}")
    return own


def private_folder(folder: Path) -> Path:
    """Return a folder of a private root: create it if missing, refuse it if it is another user's.

    Raises:
        ProgramError: names the owner.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ProgramError(f"the cache {folder}: {error.strerror}. {_WAY_OUT}") from error
    if not (is_private(found) and stat.S_ISDIR(found.st_mode)):
        raise ProgramError(
            f"the cache {folder} {_whose(found)}, but this process would run code in it. Remove it."
        )
    return folder


def is_private(found: os.stat_result) -> bool:
    """Return whether a file belongs to this user, and no other user may write to it."""
    return found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE


def remove_foreign(paths: Iterable[Path]) -> bool:
    """Remove files of a private folder that others created or may write to; warn about each.

    Such files may date from a time when the folder was open to others. Return whether there were
    any.

    Raises:
        ProgramError: a file cannot be removed.
    """
    has_any = False
    for path in paths:
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        if is_private(found) and stat.S_ISREG(found.st_mode):
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ProgramError(
                f"{path} {_whose(found)}, but this process would run code in it. It cannot be "
                f"removed ({error.strerror}). {_WAY_OUT}"
            ) from error
        log.warning("%s %s. It was removed, and will be created again.", path, _whose(found))
        has_any = True
    return has_any


def _whose(found: os.stat_result) -> str:
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE:
        return f"may be written by other users (mode {stat.S_IMODE(found.st_mode):o})"
    return "is not a plain file or directory"
