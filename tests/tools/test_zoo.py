"""The zoo: what it finds equal, what it counts, and a handful of its models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.zoo.examine import Call, examine
from benchmarks.zoo.run import PARTS, Part, counted, examined


class Case:
    """A linear layer, to which compiled training adds `fault`."""

    group = model = "linear"

    def __init__(self, fault: float = 0.0) -> None:
        self.fault = fault

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return Faulty(self.fault)

    def batch(self, seed: int) -> Call:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(4, 3, generator=generator, requires_grad=True),), {}


class Faulty(nn.Module):
    def __init__(self, fault: float) -> None:
        super().__init__()
        self.fc, self.fault = nn.Linear(3, 2), fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + (self.fault if torch.compiler.is_compiling() else 0.0)


def test_a_difference_is_found_and_named() -> None:
    assert examine(Case(), "aten")["verdict"] == "equal"
    outcome = examine(Case(1e-3), "aten")
    assert outcome["verdict"] == "different" and "step" in outcome["detail"]


def row(verdict: str, islands: int | None = None, inside: float | None = None) -> dict[str, Any]:
    return {"verdict": verdict, "islands": islands, "inside": inside}


def test_the_table_counts_models_that_train_plainly() -> None:
    rows = [row("equal", 0, 0.0), row("rounding", 2, 0.5), row("refused"), row("no plain run")]
    found = counted("some", rows)
    assert (found["models"], found["whole"], found["with_islands"], found["inside"]) == (
        3,
        1,
        1,
        0.5,
    )
    assert (found["refused"], found["no_plain_run"], found["failed"]) == (1, 1, 0)


def test_a_sample_is_spread_and_a_missing_package_named() -> None:
    part = Part("some", lambda: list(range(10)), (("no_such_package", "it"),), sample=4)
    assert part.chosen() == [0, 2, 5, 7]
    assert (
        "no_such_package cannot be imported" in part.missing()
        and "pip install it" in part.missing()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "model"),
    [
        ("transformers", "GPT2LMHeadModel"),
        ("transformers", "ConditionalDetrForObjectDetection"),
        ("transformers on 2 ranks", "T5ForConditionalGeneration"),
        ("transformers with default kernels", "T5ForConditionalGeneration"),
    ],
)
def test_models_of_the_zoo_are_equal(part: str, model: str) -> None:
    chosen = next(p for p in PARTS if p.name == part)
    case = next(case for case in chosen.cases() if case.model == model)
    outcome = examined(chosen, case, 280)
    assert outcome["verdict"] in ("equal", "rounding"), outcome
