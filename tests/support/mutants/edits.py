"""How a test edits an emitted directory (tests/verify_cases.emitted) as a hand might."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

Edit = Callable[[Path], None]


class Source:
    """A file's statements (and the lines between them), to be changed and written back."""

    def __init__(self, directory: Path, name: str = "schedule.py") -> None:
        self.path = directory / name
        text = self.path.read_text()
        self.lines = text.split("\n")
        for node in sorted(_simple(ast.parse(text)), key=lambda n: -n.lineno):
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            self.lines[first:last] = ["\n".join(self.lines[first:last])]

    def write(self) -> None:
        self.path.write_text("\n".join(self.lines))

    def at(self, pattern: str, after: str = "def forward") -> int:
        """Return the position of the first that matches, behind the first with `after`."""
        first = next(i for i, line in enumerate(self.lines) if after in line)
        for i in range(first, len(self.lines)):
            if re.search(pattern, self.lines[i]):
                return i
        raise AssertionError(f"{self.path}: nothing matches {pattern}")

    def move(self, pattern: str, before: str, after: str = "def forward") -> None:
        """Move one statement to just before another."""
        line = self.lines.pop(self.at(pattern, after))
        self.lines.insert(self.at(before, after), line)

    def replace(self, pattern: str, new: str, after: str = "def forward") -> None:
        """Substitute within the first statement that matches."""
        i = self.at(pattern, after)
        self.lines[i] = re.sub(pattern, new, self.lines[i])


def _simple(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements that contain no others."""
    return [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and not getattr(n, "body", None)]


def edited(directory: Path, pattern: str, new: str, after: str = "def forward") -> None:
    source = Source(directory)
    source.replace(pattern, new, after)
    source.write()


def moved(directory: Path, pattern: str, before: str, after: str = "def forward") -> None:
    source = Source(directory)
    source.move(pattern, before, after)
    source.write()
