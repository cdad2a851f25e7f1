"""The versions of torch that zerofx supports, which its import checks.

Without the check, a name that another version lacks fails far inside a compile.
"""

from __future__ import annotations

import logging
import re
import sys
from importlib import metadata

from zerofx.errors import TorchVersionError

log = logging.getLogger("zerofx")

LEAST, BELOW = "2.11", "2.14"  # as in pyproject.toml, which a test compares


def check_torch(own: str) -> None:
    """Refuse a torch that is older than the supported ones, and warn of one that is newer.

    own: the version of zerofx. A torch whose version cannot be told is accepted.

    Raises:
        TorchVersionError: torch is too old.
    """
    found = _installed()
    release = _release(found)
    if not release:
        return
    fix = f"pip install 'torch>={LEAST},<{BELOW}'"
    if release < _release(LEAST):
        raise TorchVersionError(
            f"torch {found} is too old for zerofx {own}. Supported versions are {LEAST} and later, "
            f"below {BELOW}. Install one of them: {fix}."
        )
    if release >= _release(BELOW):
        log.warning(
            "zerofx: torch %s is newer than what zerofx %s supports, which is %s and later, below "
            "%s. It may fail anywhere. Install one of these: %s.", found, own, LEAST, BELOW, fix,
        )  # fmt: skip


def _installed() -> str:
    """Return the version of torch without importing it; "" if it is unknown."""
    if "torch" in sys.modules:
        return str(getattr(sys.modules["torch"], "__version__", ""))
    try:
        return metadata.version("torch") or ""
    except metadata.PackageNotFoundError:
        return ""


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, such as 2.13.0+cpu or 2.14.0.dev20260901."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
