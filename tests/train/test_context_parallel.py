"""Sequences cut over ranks: unmodified models of transformers train as one plain process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tensor_models import MODELS, batch
from test_tensor_parallel import compare, make, plain, slow, train
from torch import Tensor

import zerofx
from zerofx.errors import ShardError
from zerofx.plan.plan import Plan

CONTEXT = {"context": 2, "attention": "heads"}


@pytest.mark.parametrize(
    ("name", "ranks", "plan"),
    [
        ("llama", 2, {"stage": 3}),
        ("gpt2", 2, {"stage": 0}),
        slow("bert", 2, {"stage": 2}),
        slow("llama", 2, {"stage": 1}),
        slow("llama", 2, {"stage": 0, "activations": "recompute"}),
        slow("gpt2", 2, {"stage": 3, "activations": "recompute"}),
        slow("gpt2", 2, {"stage": 1, "kernels": "inductor"}),
        slow("bert", 2, {"stage": 3}),
        slow("t5", 2, {"stage": 3}),
        slow("grouped", 2, {"stage": 2}),
        slow("llama", 4, {"stage": 3}),
        slow("llama", 4, {"stage": 0}),
        slow("bert", 4, {"stage": 1}),
        slow("gpt2", 4, {"stage": 2, "shard_axis_size": 2}),
        slow("llama", 4, {"stage": 3, "parallel": {"context": 4}}),
    ],
)
def test_models_train_alike(pool: Pool, name: str, ranks: int, plan: dict[str, Any]) -> None:
    plan = {"parallel": CONTEXT, **plan}
    for optimizer, tolerance in (("sgd", 2e-6), ("adamw", 1e-5)):
        expected = plain(name, optimizer, ranks // plan["parallel"]["context"])
        for found in pool.run(ranks, train, name, optimizer, plan):
            compare(found, expected, tolerance)
