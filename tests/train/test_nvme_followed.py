"""Copies that follow updates over NVMe: not while backward reads them; states of what is within."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zerofx
from zerofx.runtime.tiers.host_updates import HostUpdates

FINE = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 0}


class ReadLate(nn.Module):
    """A weight whose gradient is whole before backward last reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.b, self.c = (nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(self.e(x), self.a.weight.detach())
        hidden = torch.relu(self.b(torch.tanh(self.c(hidden))))
        return self.a(hidden).pow(2).mean() * 1000


def trained(plan: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = zerofx.compile(ReadLate(), {**FINE, **plan})
    optimizer = zerofx.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(3):
        loss = model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


@pytest.mark.parametrize(
    ("stage", "optimizer"), [(0, "none"), (1, "none"), (1, "nvme"), (3, "nvme")]
)
def test_an_update_stands_behind_reads_of_copies(
    stage: int, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each update is over before backward goes on."""
    launch = HostUpdates.launch

    def at_once(self: HostUpdates, bucket: int, update: Any, at_most: int | None = None) -> None:
        launch(self, bucket, update, at_most)
        self._launched[bucket].exception()

    monkeypatch.setattr(HostUpdates, "launch", at_once)
    plan: dict[str, Any] = {"stage": stage, "update": "in-backward"}
    if optimizer == "nvme":
        plan["offload"] = {"optimizer": "nvme", "path": str(tmp_path)}
    losses, state = trained(plan)
    expected_losses, expected = trained({"stage": stage})
    assert losses == expected_losses
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_states_of_an_outer_module_and_unions_are_plain(tmp_path: Path) -> None:
    plan = {**FINE, "offload": {"optimizer": "nvme", "path": str(tmp_path)}}
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    inner = zerofx.compile(tied, plan)
    outer = nn.ModuleDict({"inner": inner})
    state, into = outer.state_dict(), {}
    inner.state_dict(destination=into)
    union = inner.state_dict() | {"more": 1}
    whole = dict(state)
    optimizer = zerofx.optim.SGD(inner.parameters(), lr=1.0)
    inner(torch.ones(2, 4)).sum().backward()
    before = {name: value.clone() for name, value in whole.items()}
    optimizer.step()
    assert all(type(v) is Tensor for v in (*whole.values(), *into.values()))
    assert all(torch.equal(whole[name], before[name]) for name in before)
    assert union["more"] == 1 and union["0.weight"] is union["1.weight"]
