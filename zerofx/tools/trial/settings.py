"""What a trial runs, and what it found: plain values, which go between processes as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}  # of a tensor's norm, by compute format


@dataclass(frozen=True)
class Settings:
    """A model, a plan and a loop.

    model: as a command line names it. plan: its fields. batch, seq: of an `hf:` model's call.
    accumulation, no_sync: backwards a step, and whether all but the last run under no_sync.
    same_batch: every rank and step gets the example call as it is, instead of a variation of it.
    tolerance: the relative error from which on a tensor differs; None: by the plan's precision.
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
    """One tensor, or the loss, beside what plain training has.

    kind: loss, gradient, parameter or buffer. error: the norm of the difference, relative to that
    of the tensor. at: the element that is furthest off, `got` here and `expected` there.
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
            f"{self.kind} {self.name}{place} in step {self.step}: {self.got:.9g} where plain "
            f"training has {self.expected:.9g} (relative error of the whole {self.error:.1e})"
        )


@dataclass(frozen=True)
class Trial:
    """What a trial found.

    compared: how many tensors of each kind. largest: kind -> the one that is furthest off.
    first: the first that differs by more than the tolerance, in the order of the training.
    islands: what ran eagerly, "blocks.1, 25 % of the parameters: why", innermost first.
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
        ranks = f"{self.world} rank{'s' * (self.world > 1)} ({self.device})"
        head = f"{self.steps} steps on {ranks} beside plain training in one process, with SGD:"
        rows = [
            f"  {kind:<10}{self.compared[kind]:>6} compared, largest relative error "
            f"{worst.error:.1e} ({worst.name})"
            for kind, worst in self.largest.items()
        ]
        end = f"  equal within {self.tolerance:.0e}" if self.is_equal else f"DIFFERS: {self.first}"
        eager = [f"  unproved inside, since it runs eagerly: {island}" for island in self.islands]
        return "\n".join([head, *rows, *eager, end])

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return {**dataclasses.asdict(self), "is_equal": self.is_equal}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Trial:
        """Return what `to_dict` was taken of."""
        found = {k: v for k, v in found.items() if k != "is_equal"}
        largest = {kind: _difference(d) for kind, d in found.pop("largest").items()}
        first = found.pop("first")
        return cls(**found, largest=largest, first=_difference(first) if first else None)


def _difference(found: dict[str, Any]) -> Difference:
    return Difference(**{**found, "at": tuple(found["at"])})
