"""What a pass is: a frozen dataclass whose fields are its options, run on a Program in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

from zerofx.ir.facts import Fact as Fact
from zerofx.ir.program import Program


@dataclass(frozen=True)
class Report:
    """What a pass did. `changed=False` means no node was touched; the runner checks it."""

    changed: bool
    summary: str = ""


@dataclass(frozen=True)
class Pass(ABC):
    """A rewrite of a program. Options are its fields, bound when it is built."""

    name: ClassVar[str]
    keeps_bits: ClassVar[bool] = True
    requires: ClassVar[frozenset[Fact]] = frozenset()
    provides: ClassVar[frozenset[Fact]] = frozenset()
    conflicts: ClassVar[frozenset[Fact]] = frozenset()

    @abstractmethod
    def run(self, program: Program) -> Report: ...

    def spec(self) -> str:
        """Return the pass as the CLI writes it: `prefetch-gathers{distance=2}`."""
        options = ",".join(f"{f.name}={_show(getattr(self, f.name))}" for f in fields(self))
        return f"{self.name}{{{options}}}" if options else self.name


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
