"""The base class of passes: frozen dataclasses whose fields are their options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from zerofx.errors import PlanError
from zerofx.ir.program import Fact as Fact
from zerofx.ir.program import Planned
from zerofx.plan.fields import nearest


@dataclass(frozen=True)
class Report:
    """The result of a pass. `changed=False` means that no node changed; the runner checks it."""

    changed: bool
    summary: str = ""


@dataclass(frozen=True)
class Pass(ABC):
    """A rewrite of a program. Its options are its fields, bound when the pass is built."""

    name: ClassVar[str]
    keeps_bits: ClassVar[bool] = True
    requires: ClassVar[frozenset[Fact]] = frozenset()
    provides: ClassVar[frozenset[Fact]] = frozenset()
    conflicts: ClassVar[frozenset[Fact]] = frozenset()

    @abstractmethod
    def run(self, program: Planned) -> Report: ...

    def options(self) -> dict[str, object]:
        """Return the options that the pass displays; by default all of its fields."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def shown(self) -> dict[str, str]:
        """Return the options as text."""
        return {k: _show(v) for k, v in self.options().items()}

    def spec(self) -> str:
        """Return the pass as text that the CLI can parse: `prefetch-gathers{distance=2}`."""
        options = ",".join(f"{k}={v}" for k, v in self.shown().items())
        return f"{self.name}{{{options}}}" if options else self.name

    def with_options(self, given: Mapping[str, str]) -> Pass:
        """Return a copy of the pass with the options that a spec gives.

        Numbers, strings, true, false and none can be changed. An option that displays a part of the
        plan can only be repeated; change it in the plan.

        Raises:
            PlanError: the pass has no such option, or the value is invalid for it; the message
                names both.
        """
        shown = self.shown()
        kinds = {f.name: str(f.type) for f in fields(self)}
        changes: dict[str, object] = {}
        for key, text in given.items():
            if key not in shown:
                known = nearest(key, shown) if shown else ". It has none."
                raise PlanError(f"{self.name} has no option {key!r}{known}")
            if text == shown[key]:
                continue
            if key not in kinds or not set(kinds[key].split(" | ")) <= _PLAIN:
                raise PlanError(
                    f"{self.name}: {key} is {shown[key]} by the plan, and {text} in the pipeline. "
                    "Change it in the plan (--set), or leave it out of the pipeline."
                )
            changes[key] = _parse(f"{self.name}: {key}", text, kinds[key])
        return replace(self, **changes)  # type: ignore[arg-type]


_PLAIN = {"int", "bool", "float", "str", "None"}
_WORDS: dict[str, object] = {"true": True, "false": False, "none": None}


def _parse(what: str, text: str, kind: str) -> object:
    """Parse the value of an option; it must be of the field's type."""
    kinds = kind.split(" | ")
    if text in _WORDS and type(_WORDS[text]).__name__.replace("NoneType", "None") in kinds:
        return _WORDS[text]
    for number in (int, float):
        if number.__name__ in kinds:
            try:
                return number(text)
            except ValueError:
                continue
    if "str" not in kinds:
        raise PlanError(f"{what} is {text!r}. It takes {kind.replace(' | ', ' or ')}.")
    return text


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
