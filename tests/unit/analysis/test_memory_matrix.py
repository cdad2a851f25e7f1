"""Predicted and measured peaks of some cells of the matrix."""

from __future__ import annotations

import os

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from benchmarks.measured import train
from benchmarks.memory_cells import CHOICES, Cell, cover, run
from benchmarks.memory_matrix import COUNT, PROMISED, error_of, host_error

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
QUICK = [
    Cell("gpt", 3, 2, "recompute", "pattern", "aten", layers=1),
    Cell("gpt", 0, 2, "keep", "off", "aten", layers=1),
    Cell("gpt", 3, 1, "auto", "off", "aten", layers=2),
    Cell("gpt2", 1, 2, "half", "off", "aten", layers=1),
    Cell("llama", 2, 1, "recompute", "off", "aten", layers=1),
    Cell("llama", 3, 1, "keep", "off", "aten", "states-nvme", layers=1),
    Cell("gpt", 3, 2, "keep", "pattern", "aten", "all-nvme", layers=2),
    Cell("bert", 3, 1, "offload", "off", "aten", layers=1),
    Cell("vit", 3, 1, "half", "off", "aten", layers=1),
    Cell("resnet", 3, 1, "recompute", "off", "aten", layers=1),
]


FEWEST = 40  # cells with every pair of choices; python -m benchmarks.memory_matrix runs COUNT


def check(pool: Pool, cell: Cell, timeout_s: float = 120.0) -> None:
    if cell.model != "gpt":
        pytest.importorskip("transformers")
    for answer in pool.run(cell.world, run, cell, timeout_s=timeout_s):
        error = error_of(answer["predicted_bytes"], answer["low_bytes"], answer["high_bytes"])
        assert abs(error) <= PROMISED, answer
        away = host_error(answer["predicted_host_bytes"], answer["host_bytes"])
        assert abs(away) <= PROMISED, answer
        assert answer["host_bytes"] > 0 or cell.offload == "none"
        assert answer["high_bytes"] > 2**20  # small costs of the loop are no part of the answer
        if answer["budget_bytes"] is not None and cell.kernels == "aten":
            assert answer["low_bytes"] <= answer["budget_bytes"]


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_some_cells(pool: Pool, cell: Cell) -> None:
    check(pool, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", cover(FEWEST)[::2], ids=str)
def test_most_pairs(pool: Pool, cell: Cell) -> None:
    check(pool, cell, timeout_s=900.0)


class Gated(nn.Module):
    """A recurrent cell, whose gates are parts of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        for step in x:
            state = self.cell(step, state)
        return self.head(state).pow(2).mean()


def test_gates_share_their_products_memory() -> None:
    def loss(model: nn.Module, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return model(torch.randn(4, 512, 64, generator=generator))

    found = train(Gated, loss, {"stage": 3, "kernels": "aten"})
    (program,) = found.model.programs
    predicted = program.memory(keeps_results=False).peak_bytes
    assert abs(error_of(predicted, found.peak.low_bytes, found.peak.high_bytes)) <= PROMISED


def test_every_pair_of_choices_is_in_the_matrix() -> None:
    cells = cover(COUNT)
    assert len(set(cells)) == COUNT >= 60
    for name, values in CHOICES.items():
        assert {getattr(cell, name) for cell in cells} == set(values)


def test_the_error_is_the_distance_from_what_was_measured() -> None:
    assert error_of(105, 90, 100) == pytest.approx(0.05)
    assert error_of(95, 90, 100) == 0.0
    assert error_of(81, 90, 100) == pytest.approx(-0.1)
