"""Fit text to the width of the terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator

LEAST = 40  # columns; a narrower terminal gets lines of this length
_PART = re.compile(r"\s*\S+")


def columns() -> int | None:
    """Return the width that text must fit, or None if lines stay whole.

    It is the terminal's, or what COLUMNS says; a pipe or a file without COLUMNS gets whole lines.
    """
    if not os.environ.get("COLUMNS") and not sys.stdout.isatty():
        return None
    return max(LEAST, shutil.get_terminal_size().columns)


def fitted(text: str, width: int | None) -> str:
    """Wrap lines that are longer than `width`, at gaps between columns or at words.

    The rest of a line is indented under its beginning. Gaps wider than needed are narrowed first.
    """
    if width is None:
        return text
    return "\n".join(part for line in text.splitlines() for part in _fitted(line, width))


def _fitted(line: str, width: int) -> Iterator[str]:
    if len(line) <= width:
        yield line
        return
    indent = len(line) - len(line.lstrip())
    further = " " * (min(indent, width // 4) + 4)
    current = ""
    for part in _PART.findall(line):
        if current.strip() and len(current) + len(part) > width:
            yield current.rstrip()
            current, part = further, part.lstrip()
        current += part
        while len(current) > width:  # one word that is longer than a line
            yield current[:width]
            current = further + current[width:]
    if current.strip():
        yield current
