"""Cases of `benchmarks.gpu`: models, how each system trains them, and the targets."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

from zerofx.tools.demo.gpt import GPTConfig

MEMORY_TOLERANCE = 0.05  # of a predicted peak, in both directions
# Of a loss, relative. Two orders of the same bf16 sums differ by its last bit: 8 bits of a loss.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


@dataclass(frozen=True)
class Target:
    """A bound on a value: `<=` or `>=`."""

    sign: str
    bound: float

    def is_met(self, value: float) -> bool:
        return (operator.le if self.sign == "<=" else operator.ge)(value, self.bound)

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:.2f}"


@dataclass(frozen=True)
class Comparison:
    """One ratio of two systems, taken in each round: `over`'s value divided by `under`'s.

    key: "step_s", or "peak_bytes", which has no rounds.
    system: the one of the two that the row belongs to.
    """

    key: str
    over: str
    under: str
    system: str
    target: Target | None = None

    @property
    def measure(self) -> str:
        what = {"step_s": "step time", "peak_bytes": "peak"}[self.key]
        return f"{what}, {self.over} / {self.under}"


@dataclass(frozen=True)
class Setup:
    """How a system trains: the wrapper, and for zerofx the fields of its plan."""

    kind: str
    plan: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One model, trained by several systems in turn.

    reference: the system whose losses the others must reproduce within `loss_tolerance`, relative.
    takes_batch: whether --batch applies to this model.
    """

    model: GPTConfig
    steps: int
    precision: str
    systems: dict[str, Setup]
    comparisons: tuple[Comparison, ...]
    reference: str
    batch: int = 4
    takes_batch: bool = True

    @property
    def loss_tolerance(self) -> float:
        return LOSS_TOLERANCE[self.precision]

    def tiny(self) -> Case:
        """Return the case at a size that a rehearsal on a CPU runs quickly."""
        model = replace(self.model, width=32, heads=2, seq=16, vocab=97)
        model = replace(model, layers=min(self.model.layers, 2))
        return replace(self, model=model, batch=2, steps=1)


def _times_as_fast(system: str, peer: str, at_least: float | None = None) -> Comparison:
    """Compare step times: the peer's divided by the system's."""
    target = None if at_least is None else Target(">=", at_least)
    return Comparison("step_s", peer, system, system, target)


def _share(key: str, system: str, peer: str, at_most: float | None = None) -> Comparison:
    """Compare a figure: the system's divided by the peer's."""
    target = None if at_most is None else Target("<=", at_most)
    return Comparison(key, system, peer, system, target)


CASES = {
    "small": Case(
        GPTConfig(layers=4, width=128, heads=4, seq=128),
        steps=100,
        precision="fp32",
        systems={
            "torch.compile": Setup("torch.compile"),
            "zerofx": Setup("zerofx"),
            "zerofx-graph": Setup("zerofx", {"cuda_graph": True}),
        },
        comparisons=(
            _times_as_fast("zerofx-graph", "torch.compile", at_least=1.5),
            _times_as_fast("zerofx", "torch.compile"),
        ),
        reference="torch.compile",
        takes_batch=False,
    ),
    # No blocks, so that the loss head is compared alone, except for one norm.
    "loss-head": Case(
        GPTConfig(layers=0, width=2048, heads=16, seq=1024, vocab=50304),
        steps=5,
        precision="bf16",
        systems={
            "zerofx-bitwise": Setup("zerofx", {"numerics": "bitwise"}),
            "zerofx-fast": Setup("zerofx", {"numerics": "fast"}),
        },
        comparisons=(
            _share("peak_bytes", "zerofx-fast", "zerofx-bitwise", at_most=1.0),
            _share("step_s", "zerofx-fast", "zerofx-bitwise"),
        ),
        reference="zerofx-bitwise",
    ),
    "gpt": Case(
        GPTConfig(layers=24, width=2048, heads=16, seq=1024, vocab=50304),
        steps=4,
        precision="bf16",
        systems={
            "torch.compile": Setup("torch.compile"),
            "fsdp2": Setup("fsdp2"),
            "zerofx": Setup("zerofx", {"numerics": "fast"}),
        },
        comparisons=(
            _share("step_s", "zerofx", "torch.compile", at_most=1.0),
            _share("step_s", "zerofx", "fsdp2", at_most=1.0),
        ),
        reference="torch.compile",
    ),
}


def case_named(name: str, batch: int | None, rehearse: bool) -> Case:
    """Return a case as configured by the command line."""
    case = CASES[name].tiny() if rehearse else CASES[name]
    return replace(case, batch=batch) if batch and case.takes_batch else case
