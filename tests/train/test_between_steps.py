"""Between steps: stages 1 and 2 see every kind of update, and idle gradients are freed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from reentrancy_cases import GPT, loss_at, poisoned

import zerofx


# -- every kind of update is seen -----------------------------------------------------------------
def _update(kind: str, model: Any) -> None:
    params = list(model.parameters())
    if kind == "data":
        for p in params:
            p.data.add_(p.grad, alpha=-0.1)
        return
    if kind == "cached-local":
        _step_through_cached_locals(params)
        return
    options = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
    torch.optim.SGD(params, lr=0.1, **options[kind]).step()  # type: ignore[arg-type]


_locals: list[torch.nn.Parameter] = []


def _step_through_cached_locals(params: list[Any]) -> None:
    """Step with a fused optimizer, which moves no version, over aliases taken once."""
    if not hasattr(params[0], "to_local"):
        torch.optim.SGD(params, lr=0.1).step()
        return
    if not _locals:
        _locals.extend(torch.nn.Parameter(p.to_local()) for p in params)
    for alias, param in zip(_locals, params, strict=True):
        alias.grad = param.grad.to_local()
    torch.optim.SGD(_locals, lr=0.1, fused=True).step()


def _same_batch() -> None:
    os.environ["RANK"] = "0"


@pytest.mark.parametrize("kind", ["fused", "foreach", "loop", "data", "cached-local"])
@pytest.mark.parametrize("stage", [1, 2])
def test_every_update_is_seen(pool: Any, stage: int, kind: str) -> None:
    for gap in pool.run(2, run_equal_updates, stage, kind):
        assert gap <= 1e-6


def run_equal_updates(stage: int, kind: str) -> float:
    """All ranks draw rank 0's batch, so that one plain process is the reference."""
    rank = os.environ["RANK"]
    model = poisoned(stage)
    _same_batch()
    try:
        reference = GPT.make()
        for _ in range(3):
            for one in (model, reference):
                loss_at(one, 0).backward()
                _update(kind, one)
                one.zero_grad()
        with torch.no_grad():
            mine, theirs = loss_at(model, 0), loss_at(reference, 0)
        return float((mine - theirs).abs() / theirs)
    finally:
        os.environ["RANK"] = rank
        _locals.clear()


# -- memory between steps -------------------------------------------------------------------------
def run_rest() -> tuple[list[int], list[int], bool]:
    """Return gradient bytes while set, then after zero_grad, and whether one is kept."""
    from zerofx.tools.demo.gpt import GPT as Model
    from zerofx.tools.demo.gpt import GPTConfig

    model = zerofx.compile(
        Model(GPTConfig(layers=2, width=256, heads=2, seq=8)), {"stage": 3, "kernels": "aten"}
    )
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    shards = model._engine.store.grads.shards

    def held() -> list[int]:
        return [s.flat.untyped_storage().nbytes() for s in shards.values()]

    model(tokens, tokens).backward()
    first = held()
    kept = model.blocks[0].mlp.up.weight.grad.to_local()
    before = kept.clone()
    model.zero_grad()
    later = held()
    model(tokens, tokens)
    assert held() == later
    return first, later, torch.equal(kept, before)


def test_idle_gradients_are_freed_unless_held(pool: Any) -> None:
    for first, later, is_kept in pool.run(2, run_rest):
        assert is_kept, "what the user holds stays as it was"
        assert sum(later) < sum(first)
        assert 0 in later and max(later) > 0, later
