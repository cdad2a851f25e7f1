"""Fake values that are looked up are those that the ops' own rules give."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx import ops
from zerofx.compat.graphs import FakeTensorMode
from zerofx.ir import graphs as fakes
from zerofx.ir.graphs import fake_value
from zerofx.ir.meta import value
from zerofx.ir.program import Planned
from zerofx.tools.demo.gpt import GPT, GPTConfig

aten = torch.ops.aten
AWAY = {"parameters": "nvme", "optimizer": "nvme", "activations": "nvme", "path": "/nvme"}
PLANS: dict[str, dict[str, Any]] = {
    "tiled": {
        "stage": 3,
        "precision": "fp16",
        "tiling": {"blocks.*.mlp": 2},
        "activations": "recompute",
    },
    "away": {"stage": 3, "precision": "fp16", "offload": AWAY},
    "stage 2": {"stage": 2, "precision": "fp16"},
}


def form(val: Any) -> Any:
    if isinstance(val, (list, tuple)):
        return [form(v) for v in val]
    if not isinstance(val, Tensor):
        return val
    return type(val), val.shape, val.stride(), val.storage_offset(), val.dtype, val.device


def gpt() -> Planned:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=3, width=64))
        tokens = torch.zeros(2, 64, dtype=torch.long)
    return zerofx.capture(model, (tokens, tokens), compute_dtype=torch.float16)


@pytest.mark.parametrize("name", PLANS)
def test_every_value_of_a_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked up or made for each call alone: all nodes have values of the same form."""
    captured = gpt()
    found = zerofx.rewrite(captured, PLANS[name], 4)
    monkeypatch.setattr(fakes, "known_values", lambda mode: {})
    alone = zerofx.rewrite(captured, PLANS[name], 4)
    for graph in alone.graphs:
        pairs = zip(found.graph(graph).nodes, alone.graph(graph).nodes, strict=True)
        for one, other in pairs:
            assert one.name == other.name
            assert form(value(one)) == form(value(other)), one.name


def calls() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    with FakeTensorMode():
        x = torch.zeros(8, 4)
        half = torch.zeros(8, 4, dtype=torch.float16)
        flat = torch.zeros(64)
    return {
        "plain": (aten.mm.default, (x, x.t()), {}),
        "other shape": (aten.mm.default, (x[:4], x.t()), {}),
        "other strides": (aten.clone.default, (x.t(),), {}),
        "contiguous": (aten.clone.default, (x,), {}),
        "other format": (aten.clone.default, (half,), {}),
        "an offset": (aten.slice.Tensor, (x, 0, 2, 4), {}),
        "another": (aten.slice.Tensor, (x, 0, 4, 6), {}),
        "of an offset": (aten.alias.default, (x[2:4],), {}),
        "of none": (aten.alias.default, (x[:2],), {}),
        "one and True": (aten.sum.dim_IntList, (x, [1], True), {}),
        "one and 1": (aten.sum.dim_IntList, (x, [1], False), {}),
        "named": (aten.sum.dim_IntList, (x, [1], False), {"dtype": torch.float64}),
        "gather": (ops.all_gather, (flat, 0, 256), {}),
        "a longer gather": (ops.all_gather, (flat, 0, 512), {}),
        "a gather in fp16": (ops.all_gather, (flat, 0, 256), {"dtype": torch.float16}),
        "a copy on the host": (ops.offload, (x,), {}),
        "a look": (ops.param_view, (flat, 0, [4, 4]), {}),
        "another look": (ops.param_view, (flat, 16, [4, 4]), {}),
        "nothing": (ops.release, (flat,), {}),
    }


def test_calls_are_told_apart_by_form() -> None:
    """Each twice, so that both what is made and what is looked up are compared."""
    for name, (target, values, named) in [*calls().items(), *calls().items()]:
        found = fake_value(target, values, named, target)
        assert form(found) == form(target(*values, **named)), name


def test_calls_of_other_buckets_share_a_value() -> None:
    with FakeTensorMode():
        shard = torch.zeros(64)
    made = [fake_value(ops.all_gather, (shard, k, 256), {}, ops.all_gather) for k in range(3)]
    assert made[0] is made[1] is made[2]


def test_values_go_with_their_program() -> None:
    """Nothing keeps them, nor their mode, when a program is gone (torch keeps the last mode)."""

    def work() -> tuple[weakref.ref, weakref.ref]:
        program = zerofx.capture(nn.Linear(4, 4), (torch.zeros(2, 4),))
        done = zerofx.rewrite(program, {"stage": 3}, 2)
        node = next(n for n in done.graph("forward").nodes if n.target is ops.all_gather)
        return weakref.ref(value(node)), weakref.ref(value(node).fake_mode)

    (made, mode), _ = work(), work()
    gc.collect()
    assert made() is None
    assert mode() is None
