"""Programs that begin with ATen regions, until compiled ones take their place in one call.

The graphs decide what forward saves and what it launches, so that both forms of a program agree on
that, and with other ranks whichever form these run. A call goes on to its backward with the form
that it began with.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from zerofx.errors import ProgramError, as_sentence
from zerofx.runtime.regions.background import compilers
from zerofx.runtime.regions.contest import Contest
from zerofx.runtime.regions.load import Later, with_regions

log = logging.getLogger("zerofx")

Busy = Callable[[str], contextlib.AbstractContextManager[Any]]
NOT_YET = "not yet"  # what a rank announces that has no compiled regions
_LOOK_S = 1.0  # between looks for what another rank has compiled that was given up here


Functions = list[Callable[..., Any] | None]


class Swap:
    """The compiled functions of a program that runs on ATen, from when on, and which regions stay.

    Ranks announce before each call what they `said`, and pass on what all of them did: `begin`
    returns the functions to run once the compiled ones `exist` on each rank, and `decide` those to
    run in the end.

    functions: those of its schedule. busy: returns within what a load may keep other ranks waiting.
    """

    def __init__(
        self, later: Later, functions: Sequence[Callable[..., Any] | None], label: str, busy: Busy
    ) -> None:
        self._later, self._functions, self._busy = later, functions, busy
        self.label = label
        self.has_begun = False
        self._contest: Contest | None = None
        self._batch = compilers().ask_for(label, later.modules, later.units)
        self._is_off = False
        self._looked = 0.0

    @property
    def state(self) -> str:
        """What is compiled so far, for users."""
        if self.has_begun:
            return "comparing both forms"
        if self._contest is not None:
            return "compiled, and not on all ranks"
        lost = " (given up)" if self._is_off or self._batch.is_lost else ""
        return f"{self._batch}{lost}"

    def said(self, calls: int, is_held: bool) -> str:
        """Return what this rank announces before a call, after so many others.

        is_held: the forms that run now shall stay.
        """
        if not self.has_begun and (is_held or not self.exists()):
            return NOT_YET
        assert self._contest is not None, "exists() creates it"
        return self._contest.said(calls, is_held)

    def exists(self) -> bool:
        """Tell whether the compiled functions are there; they are loaded as soon as they may be."""
        if self._contest is not None:
            return True
        if self._is_off or not self._is_over():
            return False
        try:
            with self._busy(f"loading the compiled regions of {self.label}"):
                compiled = self._later.compiled()
        except ProgramError as error:
            self._is_off = True
            log.warning("%s goes on with ATen regions: %s", self.label, as_sentence(error))
            return False
        self._contest = Contest(vars(self._later.plain), compiled, self._later.artifacts())
        return True

    def begin(self, calls: int, said: Collection[str] = ()) -> Functions:
        """Return the functions to run after so many calls: each of them calls compiled regions.

        said: what the ranks announced. Without it, all regions are compiled ones, and stay.
        """
        assert self._contest is not None, "the compiled functions do not exist yet"
        self.has_begun = True
        regions = self._contest.begin(calls, said) if said else self._contest.regions(())
        return with_regions(self._functions, self._later, regions)

    def decide(self, said: Collection[str]) -> tuple[frozenset[str], Functions] | None:
        """Return the regions that stay on ATen, and the functions to run, once ranks agree."""
        assert self._contest is not None, "it has begun"
        on_aten = self._contest.chosen(said)
        if on_aten is None:
            return None
        regions = self._contest.regions(on_aten)
        return on_aten, with_regions(self._functions, self._later, regions)

    def drop(self) -> None:
        """Compile no more for this program, which no call finds any more."""
        if self._contest is None:
            self._is_off = True
            compilers().drop(self._batch)

    def _is_over(self) -> bool:
        if not self._batch.is_lost:
            return self._batch.is_over
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return False
        self._looked = now
        return self._batch.is_over


@dataclass(frozen=True)
class Running:
    """What the regions of a program run as: `model.zerofx.kernels`.

    program: its name and kind. form: "aten" or "inductor". since: the number of its call, counted
        from 1, from which on they do. state: what "auto" waits for: how many are compiled, or that
        their two forms are compared. on_aten: the regions that stay on ATen, which is faster there.
    """

    program: str
    form: str
    since: int = 1
    state: str = ""
    on_aten: tuple[str, ...] = ()

    def __str__(self) -> str:
        rest = f", {self.state}" if self.state else ""
        if self.on_aten:
            rest += f", but ATen where that is faster: {', '.join(self.on_aten)}"
        return f"{self.program}: {self.form} since call {self.since}{rest}"
