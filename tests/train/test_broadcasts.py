"""Broadcast views: redone where they are read, never saved nor handed from region to region."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.capture import capture
from zerofx.ir.graphs import is_broadcast
from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import BACKWARD, FORWARD, Planned


class Half(nn.Module):
    """Multiplies what it is given by its own, which repeats along the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x)).unsqueeze(1).expand(-1, 3, -1)


class Repeats(nn.Module):
    """As key and value heads are repeated: a view is read by another unit, and by backward."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = Half(), Half()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.keys(x)
        queries = self.mix(x).view(-1, 1, 8) * torch.arange(1.0, 4.0).view(1, 3, 1)
        return (keys * queries * self.values(x)).square().mean() + torch.sin(keys).mean()


def program(activations: Any) -> Planned:
    captured = capture(Repeats(), (torch.zeros(4, 8),))
    plan = {"activations": activations, "bucket_bytes": 0, "persist_below": 0}
    return zerofx.rewrite(captured, plan, 2)


@pytest.mark.parametrize("activations", ["keep", "recompute", 0.5, {"keys": "recompute"}], ids=str)
def test_none_is_saved_or_crosses_regions(activations: Any) -> None:
    found = program(activations)
    views = 0
    for name in (FORWARD, BACKWARD):
        for node in found.graph(name).nodes:
            val = value(node)
            if not isinstance(val, Tensor):
                continue
            if node.op == "placeholder" and info(node).role is Role.SAVED:
                steps = zip(val.stride(), val.shape, strict=True)
                assert not any(step == 0 and size > 1 for step, size in steps), node
            if is_broadcast(node):
                views += 1
                regions = {info(user).region for user in node.users}
                assert regions == {info(node).region}, (node, regions)
    assert views >= 4, "they are still there, in each region that reads them"
