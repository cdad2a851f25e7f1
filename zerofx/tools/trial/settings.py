"""Settings and report of a trial: plain values that processes exchange as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofx.tools.words import counted

TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}  # of a tensor's norm, by compute format


@dataclass(frozen=True)
class Settings:
    """A model, a plan and a loop.

    model: as on the command line. plan: its fields. batch, seq: of an `hf:` model's call.
    accumulation, no_sync: backward passes per step, and whether all but the last run under
        no_sync(). same_batch: every rank and step gets the example call itself, not a variation.
    tolerance: the largest relative error of equal tensors; None: by the plan's precision.
    """

    model: str
    plan: dict[str, Any]
    world: int = 1
    steps: int = 3
    batch: int = 1
    seq: int = 128
    accumulation: int = 1
    no_sync: bool = False
    same_batch: bool = False
    tolerance: float | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Settings:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Difference:
    """One tensor, or the loss, compared with plain training.

    kind: loss, gradient, parameter or buffer. error: the norm of the difference, relative to that
    of the tensor. at: the element with the largest difference, `got` here, `expected` there.
    """

    kind: str
    name: str
    step: int
    error: float
    at: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.at))}]" if self.at else ""
        return (
            f"{self.kind} {self.name}{place} in step {self.step} is {self.got:.9g}; plain "
            f"training has {self.expected:.9g} (relative error of the tensor: {self.error:.1e})"
        )


@dataclass(frozen=True)
class Trial:
    """The report of a trial.

    compared: number of tensors of each kind. largest: kind -> the one with the largest error.
    first: the first that differs by more than the tolerance, in the order of the training.
    islands: modules that ran eagerly, "blocks.1, 25 % of the parameters: why", innermost first.
    """

    world: int
    steps: int
    device: str
    tolerance: float
    compared: dict[str, int] = field(default_factory=dict)
    largest: dict[str, Difference] = field(default_factory=dict)
    first: Difference | None = None
    islands: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        ranks = f"{counted(self.world, 'rank')} ({self.device})"
        steps = counted(self.steps, "step")
        head = f"{steps} on {ranks}, compared with plain training in one process, with SGD:"
        rows = [
            f"  {kind:<10}{self.compared[kind]:>6} compared, largest relative error "
            f"{worst.error:.1e} ({worst.name})"
            for kind, worst in self.largest.items()
        ]
        end = f"  equal within {self.tolerance:.0e}" if self.is_equal else f"DIFFERS: {self.first}"
        eager = [f"  not proved, since it runs eagerly: {island}" for island in self.islands]
        return "\n".join([head, *rows, *eager, end])

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {**dataclasses.asdict(self), "is_equal": self.is_equal}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Trial:
        """Return the report that `to_dict` describes."""
        found = {k: v for k, v in found.items() if k != "is_equal"}
        largest = {kind: _difference(d) for kind, d in found.pop("largest").items()}
        first = found.pop("first")
        return cls(**found, largest=largest, first=_difference(first) if first else None)


def _difference(found: dict[str, Any]) -> Difference:
    return Difference(**{**found, "at": tuple(found["at"])})
