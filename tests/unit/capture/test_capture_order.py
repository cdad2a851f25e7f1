"""Loops over sets: torchrun's processes run them in different orders, and capture in one."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn

import zerofx
from zerofx.capture.capture import capture
from zerofx.capture.roles import loops_over_sets
from zerofx.errors import DesyncError
from zerofx.ir.program import JOINT
from zerofx.model.digest import describe_graph
from zerofx.tools.demo.gpt import GPT

ORDER: list[str] = []  # of the set in this process


class Kinds(nn.Module):
    """One table for each kind of layer, made in the order of a set, as in Gemma 3."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        for number, kind in enumerate(("far", "full", "near")):
            self.register_buffer(kind, torch.arange(6.0) * number)

    def forward(self, x: Tensor) -> Tensor:
        tables = {}
        for kind in sorted(set(ORDER), key=ORDER.index):
            steps = torch.arange(x.shape[0], dtype=torch.float32)[:, None]
            angles = steps * getattr(self, kind)
            tables[kind] = angles.sin() + angles.cos()
        for layer, kind in zip(self.layers, ("full", "near", "far"), strict=True):
            x = layer(x) * tables[kind] + F.dropout(x, 0.5, self.training)
        return x.sum()


def test_the_order_of_a_set_does_not_matter() -> None:
    found = []
    for order in itertools.permutations(("near", "full", "far")):
        ORDER[:] = order
        program = capture(Kinds(), (torch.zeros(4, 6),))
        names = [node.name for node in program.graph(JOINT).nodes]
        found.append((describe_graph(program), names))
        program.graph(JOINT).lint()
    assert all(each == found[0] for each in found)
    assert found[0][0].count("aten.arange") == 1  # the same for all kinds


def train(orders: Sequence[Sequence[str]], is_plain: bool) -> list[Tensor]:
    ORDER[:] = orders[0 if is_plain else torch.distributed.get_rank()]
    torch.manual_seed(0)
    model = Kinds()
    if not is_plain:
        model = zerofx.compile(model, {"kernels": "aten"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 6)
        model.eval()(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [v.clone() for v in model.state_dict().values()]


def test_ranks_with_different_orders_train(pool: Pool) -> None:
    orders = ("near", "full", "far"), ("far", "near", "full")
    expected = train(orders, True)
    for found in pool.run(2, train, orders, False):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_model_without_sets_keeps_its_order() -> None:
    assert loops_over_sets({Kinds: "forward"})
    plain = nn.Linear, nn.TransformerEncoderLayer, GPT
    assert not loops_over_sets(dict.fromkeys(plain, "forward"))


def train_as_traced(orders: Sequence[Sequence[str]]) -> str:
    """Return the error of ranks whose operators stay in the order in which they ran."""
    capturing: Any = sys.modules[capture.__module__]
    kept = capturing.loops_over_sets
    capturing.loops_over_sets = lambda methods: False
    try:
        train(orders, False)
    except DesyncError as error:
        return str(error)
    finally:
        capturing.loops_over_sets = kept
    return ""


def test_other_orders_are_refused_by_what_they_are(pool: Pool) -> None:
    for said in pool.run(2, train_as_traced, (("near", "full", "far"), ("far", "full", "near"))):
        assert "with the operators of rank 0 in another order" in said
        assert said.rstrip().endswith("PYTHONHASHSEED.")
