"""Programs that begin with ATen regions, until compiled ones take the place of all of them.

The graphs decide what forward saves and what it launches, so that both forms of a program agree on
that, and with other ranks whichever form these run. A call goes on to its backward with the form
that it began with.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zerofx.errors import ProgramError, as_sentence
from zerofx.runtime.regions.background import compilers
from zerofx.runtime.regions.contest import Both, in_faster_form
from zerofx.runtime.regions.load import Later, with_regions

log = logging.getLogger("zerofx")

Busy = Callable[[str], contextlib.AbstractContextManager[Any]]
_LOOK_S = 1.0  # between looks for what another rank has compiled that was given up here


class Swap:
    """The compiled functions of a program that runs on ATen: `take` returns them once they `exist`.

    functions: those of its schedule. busy: returns within what a load may keep other ranks waiting.
    compares: whether a region that is faster on ATen goes on so.
    regions: those that take part in this comparison, by name, once they exist.
    """

    def __init__(
        self,
        later: Later,
        functions: Sequence[Callable[..., Any] | None],
        label: str,
        busy: Busy,
        compares: bool = True,
    ) -> None:
        self._later, self._functions, self._busy = later, functions, busy
        self.label = label
        self.regions: dict[str, Both] = {}
        self._compares = compares
        self._made: list[Callable[..., Any] | None] | None = None
        self._batch = compilers().ask_for(label, later.modules, later.units)
        self._is_off = False
        self._looked = 0.0

    @property
    def state(self) -> str:
        """What is compiled so far, for users."""
        if self._made is not None:
            return "compiled, and not on all ranks"
        lost = " (given up)" if self._is_off or self._batch.is_lost else ""
        return f"{self._batch}{lost}"

    def exists(self) -> bool:
        """Tell whether the compiled functions are there; they are loaded as soon as they may be."""
        if self._made is not None:
            return True
        if self._is_off or not self._is_over():
            return False
        try:
            with self._busy(f"loading the compiled regions of {self.label}"):
                regions = self._later.compiled()
        except ProgramError as error:
            self._is_off = True
            log.warning("%s goes on with ATen regions: %s", self.label, as_sentence(error))
            return False
        if self._compares:
            plain = vars(self._later.plain)
            regions = in_faster_form(regions, plain, self._later.artifacts())
            self.regions = {n: region for n, region in regions.items() if isinstance(region, Both)}
        self._made = with_regions(self._functions, self._later, regions)
        return True

    def take(self) -> list[Callable[..., Any] | None]:
        """Return the functions that call compiled regions, in the order of those given."""
        assert self._made is not None, "the compiled functions do not exist yet"
        return self._made

    def drop(self) -> None:
        """Compile no more for this program, which no call finds any more."""
        if self._made is None:
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
        from 1, from which on they do. state: how many are compiled, while "auto" waits for that;
        then how many are being timed in both forms. on_aten: those that are faster on ATen, and run
        so.
    """

    program: str
    form: str
    since: int = 1
    state: str = ""
    on_aten: tuple[str, ...] = ()

    def __str__(self) -> str:
        rest = f", {self.state}" if self.state else ""
        if self.on_aten:
            rest = f", but ATen where that is faster: {', '.join(self.on_aten)}{rest}"
        return f"{self.program}: {self.form} since call {self.since}{rest}"
