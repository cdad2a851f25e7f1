"""The passes as text: the purpose of each, and its effect on a program."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerofx.ir.program import Entry, Planned
from zerofx.plan.sizes import format_bytes
from zerofx.tools.room import room

NAMES = 48  # columns of a pass
PURPOSE = 100  # columns of a comment that says what a pass is for


@dataclass(frozen=True)
class PassesView:
    """The pipeline: (spec, purpose) of each pass; with a program, its history too.

    Without a program, `--pipeline` can read the text back: its specs are never wrapped.
    """

    passes: tuple[tuple[str, str], ...]
    history: tuple[Entry, ...] = ()

    @property
    def keeps_lines(self) -> bool:
        """Whether the text is meant to be read back, line by line."""
        return not self.history

    @classmethod
    def of(cls, passes: Sequence[Any], program: Planned | None = None) -> PassesView:
        """Describe passes by their spec and the first line of their docstring."""
        named = tuple((p.spec(), (type(p).__doc__ or "").strip().split("\n")[0]) for p in passes)
        return cls(named, tuple(program.history) if program else ())

    def __str__(self) -> str:
        if not self.history:
            return "\n".join(f"{spec}\n{_comment(what)}" for spec, what in self.passes)
        wide = room(NAMES, 34, 24)
        head = f"{'pass':<{wide}}{'nodes':>7}{'sent':>12}{'peak':>12}   effect"
        rows = [
            f"{f'{k:02d} ' + e.pass_spec:<{wide}.{wide - 1}}{e.num_nodes:>7}"
            f"{format_bytes(e.comm_bytes):>12}"
            f"{format_bytes(e.peak_bytes):>12}   {e.summary}"
            for k, e in enumerate(self.history)
        ]
        return "\n".join([head, *rows])

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        found: dict[str, Any] = {
            "passes": [{"spec": spec, "purpose": what} for spec, what in self.passes]
        }
        if self.history:
            found["history"] = [
                {"pass": e.pass_spec, "summary": e.summary, "nodes": e.num_nodes,
                 "comm_bytes": e.comm_bytes, "peak_bytes": e.peak_bytes}
                for e in self.history
            ]  # fmt: skip
        return found


def _comment(text: str) -> str:
    begin = "    # "
    return textwrap.fill(text, room(PURPOSE), initial_indent=begin, subsequent_indent=begin)
