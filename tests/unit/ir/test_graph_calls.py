"""Every graph is runnable as it stands: the ops' real bodies do what the emitted schedule does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_cases import interpret
from models import CASES
from torch import Tensor
from training import loss_of

import zerofx
from zerofx.ir.meta import Info, info, set_info

CASES_RUN = ["gpt", "convnet", "stage"]


def run_both(name: str, stage: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return what three steps leave, by the emitted schedule and by the graphs."""
    results = []
    for by_graphs in (False, True):
        torch.manual_seed(0)
        model = zerofx.compile(CASES[name].make(), {"stage": stage, "kernels": "aten"})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            args, kwargs = CASES[name].batch(step)
            loss = loss_of(model(*args, **kwargs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if by_graphs and step == 0:
                interpret(model)
        results.append([loss.detach(), *model.state_dict().values()])
    return results[0], results[1]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3])
@pytest.mark.parametrize("name", CASES_RUN)
def test_graphs_run_as_the_schedule_does(pool: Any, name: str, stage: int) -> None:
    for emitted, by_graphs in pool.run(2, run_both, name, stage):
        assert len(emitted) == len(by_graphs)
        assert all(torch.equal(a, b) for a, b in zip(emitted, by_graphs, strict=True))


def test_infos_are_changed_field_by_field() -> None:
    node = torch.fx.Graph().placeholder("x")
    assert info(node) == Info()
    first = set_info(node, unit="layers.0", index=3)
    second = set_info(node, index=4)
    assert first == Info(unit="layers.0", index=3)
    assert info(node) is second and second == Info(unit="layers.0", index=4)
    assert hash(second) == hash(Info(unit="layers.0", index=4))
    with pytest.raises(TypeError, match=r"no field units"):
        set_info(node, units="layers.0")
