"""What a step of zerofx.optim allocates: no temporary as large as a bucket, and 8-bit states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_cases import ours
from pool import Pool
from torch import Tensor, nn

import zerofx
from zerofx.tools.demo.measure import PeakMemory

WIDTH = 1024  # a unit of 4 MiB


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def peaks(names: list[str]) -> dict[str, tuple[int, int]]:
    """Return what a step with clipping adds to what is live, and the bytes of a bucket's shard."""
    found = {}
    for name in names:
        with PeakMemory(torch.device("cpu")) as memory:
            model = zerofx.compile(Wide(), {"kernels": "aten", "stage": 3})
            optimizer = ours(name, model.parameters(), max_grad_norm=1e-3)
            for _ in range(3):
                model(torch.ones(4, WIDTH)).backward()
                with memory.step():
                    pass
                with memory.step():
                    optimizer.step()
                optimizer.zero_grad()
        store = model._engine.store
        smallest = min(s.nbytes for s in store.shards)
        before, within = (p.high_bytes for p in memory.steps[-2:])
        found[name] = within - before, smallest
    return found


@pytest.mark.parametrize(("world", "names"), [(1, ["lion", "lamb"]), (2, ["adamw", "lamb"])])
def test_no_temporary_is_as_large_as_a_bucket(pool: Pool, world: int, names: list[str]) -> None:
    for found in pool.run(world, peaks, names):
        for name, (added, bucket) in found.items():
            assert bucket >= 2 << 20
            assert added < bucket / 2, (name, added, bucket)


def test_peaks_see_a_temporary_of_a_buckets_size() -> None:
    """The meter above is no proof unless it shows what must not be there."""
    big: Any = torch.zeros(WIDTH, WIDTH)
    with PeakMemory(torch.device("cpu")) as memory:
        with memory.step():
            pass
        with memory.step():
            big.add_(torch.ones(WIDTH, WIDTH).mul(2.0))
    before, within = (p.high_bytes for p in memory.steps)
    assert within - before >= big.nbytes
