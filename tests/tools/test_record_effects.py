"""zerofx.record changes nothing: what is left behind, broken off or refused."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

import pytest
import torch
from record_cases import ATEN, train
from stack import Stack
from torch import nn

import zerofx
from zerofx.errors import RecordingError


def test_nothing_is_left_behind() -> None:
    train(1, False)
    hooks = sys.modules["torch.optim.optimizer"]
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    before = [dict(getattr(hooks, name)) for name in names]  # zerofx has its own there
    _, model, _ = train(2, True)
    run = next(iter(model._programs.bound.values())).executable
    for function in (run.forward, run.backward):
        assert isinstance(function, FunctionType) and "schedule.py" in function.__code__.co_filename
        own = function.__globals__
        assert all(own[name] is region for name, region in vars(own["regions"]).items())
    assert model._programs.on_bound is None
    assert [dict(getattr(hooks, name)) for name in names] == before


def test_an_exception_ends_the_recording() -> None:
    _, model, _ = train(1, False)
    executable = next(iter(model._programs.bound.values())).executable
    before = executable.forward, executable.backward
    with pytest.raises(KeyError), zerofx.record(model):
        model(torch.randn(8, 16))
        raise KeyError("mine")
    assert (executable.forward, executable.backward) == before and model._programs.on_bound is None


def test_a_broken_step_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, _ = train(1, False)
    with zerofx.record(model, warmup=0) as recording:
        for k in range(3):
            loss = model(torch.randn(8, 16))
            with monkeypatch.context() as patch:
                if k == 1:
                    patch.setattr(model._engine.store.grads, "take", None)  # as gradients come
                    with pytest.raises(TypeError):
                        loss.backward()
                else:
                    loss.backward()
    assert len(recording.programs[0].steps_us) == 2


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: nn.Linear(2, 2), "was given a Linear that is not compiled"),
        (lambda: zerofx.compile(Stack(), ATEN), "0 steps ran in the block, of which warmup=1"),
    ],
)
def test_refusals(model: Any, text: str) -> None:
    with pytest.raises(RecordingError, match=text), zerofx.record(model()):
        pass


def test_blocks_do_not_nest() -> None:
    _, model, _ = train(1, False)
    with (
        pytest.raises(RecordingError, match="records this model already"),
        zerofx.record(model, warmup=0),
        zerofx.record(model),
    ):
        pass
