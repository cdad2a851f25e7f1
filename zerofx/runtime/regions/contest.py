"""Whether a region runs compiled or as ATen from the swap on: what took less time on this machine.

Compiled code is not always the faster one. Convolutions and matrix products are calls of the same
library in both forms, and ATen's vectorised loops around them may win. So the two forms of a region
take turns in its first calls after the swap, which are timed; from then on it runs in the faster
one. The cache remembers this beside the artifact, and later runs do not measure again.

Each rank decides for itself. Ranks may call different programs, and of the same program their
samples differ, so nothing relies on equal bits. Where ranks compute the same values from the same
samples (layers over ranks), nothing is compared, and all regions run compiled.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zerofx.compat.direct import replace_file

ROUNDS, WARM_UP = 6, 1  # calls of each form that are timed, and calls of each before that

Region = Callable[[list[Any]], Any]
_COMPILED, _ATEN = 0, 1  # positions of the forms
_NAMES = ("compiled", "aten")
_ORDER = (_COMPILED, _ATEN, _ATEN, _COMPILED)  # equal layers, called in turn, have each form alike


def choice_file(artifact: Path) -> Path:
    """Return the path of the file that says which form of a region runs."""
    return artifact.with_suffix(".form")


def _recorded(artifact: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # not there, say, or not to be read
        return _NAMES.index(choice_file(artifact).read_text(encoding="utf-8"))
    return None


class Both:
    """A region in the form that is faster, once some calls have told which one that is."""

    def __init__(self, compiled: Region, plain: Region, artifact: Path) -> None:
        self._forms, self._artifact = (compiled, plain), artifact
        self._least_s = [math.inf, math.inf]
        self._calls = 0
        self._chosen: Region | None = None
        known = _recorded(artifact)
        if known is not None:
            self._chosen = self._forms[known]

    def __call__(self, args: list[Any]) -> Any:
        if self._chosen is not None:
            return self._chosen(args)
        which = _ORDER[self._calls % len(_ORDER)]
        start = time.perf_counter()
        made = self._forms[which](args)
        taken_s = time.perf_counter() - start
        self._calls += 1
        if self._calls > 2 * WARM_UP:
            self._least_s[which] = min(self._least_s[which], taken_s)
        if self._calls == 2 * (WARM_UP + ROUNDS):
            self._choose()
        return made

    @property
    def is_chosen(self) -> bool:
        return self._chosen is not None

    @property
    def is_aten(self) -> bool:
        """Whether ATen was chosen."""
        return self._chosen is self._forms[_ATEN]

    def _choose(self) -> None:
        compiled_s, plain_s = self._least_s
        which = _ATEN if plain_s <= compiled_s else _COMPILED
        self._chosen = self._forms[which]
        with contextlib.suppress(OSError):  # a full disk, say: the next run measures again
            replace_file(choice_file(self._artifact), _NAMES[which].encode())


def in_faster_form(
    compiled: Mapping[str, Region], plain: Mapping[str, Region], artifacts: Mapping[str, Path]
) -> dict[str, Region]:
    """Return regions that find out which of their forms is faster.

    artifacts: those of the regions that take part; the others run compiled.
    """
    taking_part = artifacts if ROUNDS else {}
    return {
        name: Both(region, plain[name], taking_part[name]) if name in taking_part else region
        for name, region in compiled.items()
    }
