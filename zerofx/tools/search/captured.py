"""A program that was captured already, as a family of one: all its layers, at its micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from zerofx.analysis.time.forecast import batch
from zerofx.errors import TargetError
from zerofx.ir.program import Program
from zerofx.tools.search.family import Family


@dataclass
class FamilyOfOne(Family):
    """The family of one captured program, which is not captured again."""

    target: Any  # a Program

    @property
    def program(self) -> Program:
        return self.target

    @property
    def name(self) -> str:
        return self.program.model_name

    @cached_property
    def stack(self) -> str:
        return ""

    @cached_property
    def layers(self) -> int:
        return 0

    @cached_property
    def samples(self) -> int:
        return batch(self.program)[0]

    @cached_property
    def tokens(self) -> int:
        return batch(self.program)[1] // self.samples

    @cached_property
    def trained_numel(self) -> int:
        return sum(prod(p.shape) for p in self.program.params.values() if p.requires_grad)

    @cached_property
    def numel(self) -> int:
        return sum(prod(p.shape) for p in self.program.params.values())

    def _program(self, length: int, samples: int) -> Program:
        if samples != self.samples:
            raise TargetError(f"{self.name} was captured for {self.samples} samples, not {samples}")
        return self.program
