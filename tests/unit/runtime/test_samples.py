"""A warning names data ranks that begin with the same samples."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zerofx.runtime import engine
from zerofx.runtime.engine import SamplesCheck


def rank(number: int, ranks: int = 2) -> SamplesCheck:
    world: Any = SimpleNamespace(
        data_size=ranks, data_rank=number, rank=number, others=(), device=torch.device("cpu")
    )
    return SamplesCheck(world, 1)


@pytest.mark.parametrize(("same", "ranks"), [(True, 2), (False, 2), (True, 1)])
def test_equal_first_batches_are_told_once(
    same: bool, ranks: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(engine, "default_store", lambda: store)
    caplog.set_level(logging.WARNING, "zerofx")
    first, second = rank(0, ranks), rank(1, ranks)
    batch = torch.arange(6.0)
    first.see("Net", [batch])
    first.see("Net", [batch + 5])  # data rank 1 has not begun
    second.see("Net", [batch if same else batch + 1])
    for step in range(3):
        first.see("Net", [batch + step])
        second.see("Net", [batch - step])
    told = [r.getMessage() for r in caplog.records if r.name == "zerofx"]
    assert len(told) == (same and ranks == 2)
    assert all("Net: data ranks 0 and 1 began with the same samples" in text for text in told)


@pytest.mark.parametrize("is_told", [True, False])
def test_accelerate_on_cpus_needs_a_switch(
    is_told: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(engine, "default_store", lambda: store)
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if is_told:
        monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    caplog.set_level(logging.WARNING, "zerofx")
    second, first = rank(1), rank(0)
    for each in (second, first, first):
        each.see("Net", [torch.ones(2)])
    (told,) = [r.getMessage() for r in caplog.records if r.name == "zerofx"]
    assert ("Accelerator(cpu=True)" in told) != is_told
