"""Tasks made by hand, and prices that are easy to add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from zerofx.analysis.time.steps import Lane
from zerofx.analysis.time.tasks import Price, Task
from zerofx.layout.tiers import Tier


def task(index: int, lane: Lane, us: float, *needs: int) -> Task:
    """Return a task of `us` microseconds, a tenth less to a tenth more."""
    return Task(
        index, f"t{index}", lane, "region", "forward", "", -1, -1, 0, 0.0, "", None, needs,
        0.9 * us, us, 1.1 * us,
    )  # fmt: skip


def price(us: float, nbytes: int = 0, calls: int = 1) -> Price:
    return Price(0.9 * us, us, 1.1 * us, nbytes, 0.0, calls)


@dataclass
class FlatPrices:
    """A region takes 100 us, a transfer 10, everything else 1."""

    is_inline: bool = False
    beside_us: float = 0.0

    def region(self, nodes: Sequence[fx.Node]) -> Price:
        return price(100)

    def launch(self, calls: int) -> Price:
        return price(0.0, calls=calls)

    def call(self, graph: str, regions: int, ranks: int) -> Price:
        return price(1)

    def touch(self, nbytes: int, tier: Tier = Tier.DEVICE) -> Price:
        return price(1, nbytes)

    def collective(self, kind: str, nbytes: int, ranks: int, stride: int) -> Price:
        return price(10, nbytes)

    def exchange(self, kind: str, nbytes: int, ranks: int, stride: int) -> Price:
        return price(30, nbytes)

    def beside(self, kind: str, nbytes: int, ranks: int) -> Price:
        return price(self.beside_us)

    def arrival(self, nbytes: int, ranks: int) -> Price:
        return price(1, nbytes)

    def copy(self, lane: Lane, nbytes: int) -> Price:
        return price(10, nbytes)

    def update(self, tier: Tier, numel: int) -> Price:
        return price(5, 28 * numel)
