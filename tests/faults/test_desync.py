"""Ranks that differ: what may differ runs, what may not is named on every rank, nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
from models import CASES, Case

import zerofx
from zerofx.errors import DesyncError

GPT: Case = CASES["gpt"]
PLAN = {"stage": 3, "kernels": "aten", "bucket_bytes": 4096}


def _rank() -> int:
    return int(os.environ["RANK"])


def _step(model: Any, tokens: int = 8, seed: int = 0) -> None:
    text = torch.randint(0, 32, (2, tokens), generator=torch.Generator().manual_seed(seed))
    model(text, text).backward()


def run_other_lengths() -> list[float]:
    model = zerofx.compile(GPT.make(), PLAN)
    for step in range(3):
        _step(model, tokens=4 + 2 * _rank() + step % 2)
    return [float(p.grad.full_tensor().norm()) for p in model.parameters()]


def test_other_sequence_lengths_just_work(pool: Any) -> None:
    first, second = pool.run(2, run_other_lengths)
    assert first == second and all(n > 0 for n in first)


def run_odd_rank(what: str) -> str:
    """Rank 1 does something that rank 0 does not; both must raise, naming it."""
    plan = dict(PLAN, bucket_bytes=0) if what == "plan" and _rank() == 1 else PLAN
    with pytest.raises(DesyncError) as caught:
        model = zerofx.compile(GPT.make(), plan)
        _step(model)
        odd = _rank() == 1
        if what == "plan":
            _step(model)
        elif what == "missing batch":
            for _ in range(2 if odd else 3):
                _step(model)
            if odd:
                model._engine.world.leave("its loader ran out of batches")
                raise DesyncError("left")
        elif what == "state_dict" and odd:
            model.state_dict()
        elif what == "eval" and odd:
            with torch.no_grad():
                _step_forward(model)
        else:
            _step(model)
        _step(model)
    return str(caught.value)


def _step_forward(model: Any) -> None:
    text = torch.zeros(2, 8, dtype=torch.int64)
    model(text, text)


@pytest.mark.parametrize(
    ("what", "named"),
    [("plan", "bucket"), ("missing batch", "loader"), ("state_dict", "state_dict"),
     ("eval", "inference")],
)  # fmt: skip
def test_a_rank_that_does_something_else_is_named(pool: Any, what: str, named: str) -> None:
    messages = pool.run(2, run_odd_rank, what)
    assert named in messages[0], messages
    assert "rank" in messages[0]


def run_killed() -> str:
    model = zerofx.compile(GPT.make(), PLAN)
    _step(model)
    if _rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DesyncError) as caught:
        for _ in range(3):
            _step(model)
    return str(caught.value)


def test_a_killed_rank_is_named(pool: Any) -> None:
    message, _ = pool.run(2, run_killed, may_die=True)
    assert "rank 1" in message and "died" in message


def run_raises_alone(store_grad: bool) -> str:
    """Rank 0 raises in mid-backward, catches it, and is in no hurry to go on."""
    model = zerofx.compile(GPT.make(), PLAN)
    _step(model)
    if _rank() == 1:
        with pytest.raises(DesyncError) as caught:
            _step(model)
            _step(model)
        return str(caught.value)
    name = "store_grad" if store_grad else "pack"
    setattr(model._engine, name, _fail)
    with pytest.raises(ValueError, match="a fault"):
        _step(model)
    time.sleep(4)
    return ""


def _fail(*_: Any, **__: Any) -> None:
    raise ValueError("a fault")


@pytest.mark.parametrize("store_grad", [False, True], ids=["before", "after-a-launch"])
def test_a_rank_that_raises_in_backward_is_named_at_once(pool: Any, store_grad: bool) -> None:
    _, message = pool.run(2, run_raises_alone, store_grad)
    assert re.search(r"rank 0 \(process \d+ on .*\), last at backward of", message)
    assert "broken off by ValueError('a fault'), does not continue" in message


def run_slow_compile() -> int:
    """Rank 1 compiles for longer than the other is ready to wait."""
    os.environ["ZEROFX_TIMEOUT_S"] = "2"
    model = zerofx.compile(GPT.make(), PLAN)
    if _rank() == 1:
        compile_it = model._programs.compile

        def slowly(*args: Any) -> Any:
            time.sleep(5)
            return compile_it(*args)

        model._programs.compile = slowly
    _step(model)
    return len(model.programs)


def test_a_rank_that_compiles_is_waited_for(pool: Any) -> None:
    assert pool.run(2, run_slow_compile) == [1, 1]
