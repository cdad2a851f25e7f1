"""Whether a region runs compiled or as ATen from the swap on: what took less time on this machine.

Compiled code is not always the faster one. Convolutions and matrix products are calls of the same
library in both forms, and ATen's vectorised loops around them may win. So the two forms of a region
take turns for some of its calls after the swap, and each call is timed. A region stays on ATen if
every rank found that it takes no longer there. The cache remembers the outcome beside the artifact,
and later runs do not measure again.

Layers over ranks compute some values on each rank and rely on their equality, so all ranks run the
same form in the same call: forms alternate with a region's calls, and what ranks have found travels
with the comparison that precedes each call of the program.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from zerofx.compat.direct import replace_file

ROUNDS, WARM_UP = 6, 1  # calls of each form that are timed, and calls of each before that
CALLS = 100  # of a program, after which a region that was called less often runs compiled

Region = Callable[[list[Any]], Any]
_ATEN, _COMPILED = "aten", "compiled"


def choice_file(artifact: Path) -> Path:
    """Return the path of the file that says which form of a region runs."""
    return artifact.with_suffix(".form")


def _recorded(artifact: Path) -> str:
    try:
        return choice_file(artifact).read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


class Both:
    """A region whose two forms take turns, the compiled one first."""

    def __init__(self, plain: Region, compiled: Region) -> None:
        self._forms = compiled, plain
        self._least_s = [math.inf, math.inf]
        self._calls = 0

    def __call__(self, args: list[Any]) -> Any:
        turn, self._calls = self._calls, self._calls + 1
        if turn >= 2 * (WARM_UP + ROUNDS):  # other regions, or other ranks, are not through
            return self._forms[0](args)
        which = turn % 2
        start = time.perf_counter()
        made = self._forms[which](args)
        if turn >= 2 * WARM_UP:
            self._least_s[which] = min(self._least_s[which], time.perf_counter() - start)
        return made

    @property
    def is_over(self) -> bool:
        return self._calls >= 2 * (WARM_UP + ROUNDS)

    @property
    def prefers_aten(self) -> bool:
        compiled_s, plain_s = self._least_s
        return self.is_over and plain_s <= compiled_s


class Contest:
    """The two forms of a program's regions, until one of them is chosen for each.

    plain, compiled: the forms, by the region's name. artifacts: the paths of the compiled regions
        that take part, by name; the others run compiled.
    """

    def __init__(
        self,
        plain: Mapping[str, Region],
        compiled: Mapping[str, Region],
        artifacts: Mapping[str, Path],
    ) -> None:
        self._plain, self._compiled, self._artifacts = plain, compiled, artifacts
        self._names = sorted(artifacts) if ROUNDS else []
        known = {name: _recorded(artifacts[name]) for name in self._names}
        self._on_aten = {name for name, form in known.items() if form == _ATEN}
        self._open = {name for name, form in known.items() if form not in (_ATEN, _COMPILED)}
        self._both: dict[str, Both] = {}
        self._first: int | None = None

    def said(self, calls: int, is_held: bool = False) -> str:
        """Return what this rank announces: which regions it has not decided on, and which are ATen.

        calls: those of the program before this one. is_held: announce that nothing is decided.
        """
        if self._first is None:
            return f"{self._mask(self._open):x}/{self._mask(self._on_aten):x}"
        is_late = calls - self._first >= CALLS
        found = {n for n, both in self._both.items() if is_held or not (both.is_over or is_late)}
        on_aten = {n for n, both in self._both.items() if both.prefers_aten}
        return f"{self._mask(found):x}/{self._mask(self._on_aten | on_aten):x}"

    def begin(self, calls: int, said: Collection[str]) -> dict[str, Region]:
        """Return the regions to run from now on, after so many calls and what all ranks said."""
        undecided, on_aten = self._joined(said)
        self._first = calls
        self._on_aten = on_aten
        self._both = {name: Both(self._plain[name], self._compiled[name]) for name in undecided}
        return {**self.regions(on_aten), **self._both}

    def chosen(self, said: Collection[str]) -> frozenset[str] | None:
        """Return the regions that run as ATen, by what all ranks said; None if it is not decided.

        What was measured is written to the cache.
        """
        undecided, on_aten = self._joined(said)
        if undecided:
            return None
        for name in (name for name, both in self._both.items() if both.is_over):
            form = _ATEN if name in on_aten else _COMPILED
            with contextlib.suppress(OSError):  # a full disk, say: the next run measures again
                replace_file(choice_file(self._artifacts[name]), form.encode())
        return frozenset(on_aten)

    def regions(self, on_aten: Collection[str]) -> dict[str, Region]:
        """Return all regions, those that are named as ATen."""
        return {**self._compiled, **{name: self._plain[name] for name in on_aten}}

    def _mask(self, names: Collection[str]) -> int:
        return sum(1 << i for i, name in enumerate(self._names) if name in names)

    def _joined(self, said: Collection[str]) -> tuple[set[str], set[str]]:
        """Return the regions that a rank has not decided on, and those that all have on ATen."""
        undecided, on_aten = 0, (1 << len(self._names)) - 1
        for each in said:
            first, second = (int(part, 16) for part in each.split("/"))
            undecided, on_aten = undecided | first, on_aten & second
        on_aten &= ~undecided
        pairs = list(enumerate(self._names))
        return {n for i, n in pairs if undecided >> i & 1}, {
            n for i, n in pairs if on_aten >> i & 1
        }
