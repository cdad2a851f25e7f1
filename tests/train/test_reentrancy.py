"""Calls in any order give what the same calls give one at a time, released slots poisoned."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from reentrancy_cases import GPT, loss_at, poisoned
from torch import Tensor

from zerofx.errors import GradientError


def _grads(model: Any) -> list[Tensor]:
    grads = [p.grad for p in model.parameters()]
    return [g.to_local() if hasattr(g, "to_local") else g for g in grads]


# -- each sequence must leave the gradients of micro-batches 0 and 1, summed ----------------------
def one_at_a_time(model: Any) -> None:
    loss_at(model, 0).backward()
    loss_at(model, 1).backward()


def first_in_first_out(model: Any) -> None:
    first, second = loss_at(model, 0), loss_at(model, 1)
    first.backward()
    second.backward()


def last_in_first_out(model: Any) -> None:
    first, second = loss_at(model, 0), loss_at(model, 1)
    second.backward()
    first.backward()


def summed(model: Any) -> None:
    (loss_at(model, 0) + loss_at(model, 1)).backward()


def eval_between(model: Any) -> None:
    first = loss_at(model, 0)
    model.eval()
    with torch.no_grad():
        loss_at(model, 5)
    model.train()
    first.backward()
    with torch.inference_mode():
        loss_at(model, 6)
    loss_at(model, 1).backward()


def forward_without_backward(model: Any) -> None:
    first = loss_at(model, 0)
    loss_at(model, 7)
    first.backward()
    loss_at(model, 1).backward()


def retained(model: Any) -> None:
    first = loss_at(model, 0)
    first.backward(retain_graph=True)
    model.zero_grad()
    first.backward()
    loss_at(model, 1).backward()


def zeroed_in_place(model: Any) -> None:
    loss_at(model, 3).backward()
    model.zero_grad(set_to_none=False)
    one_at_a_time(model)


def gradients_held_by_the_user(model: Any) -> None:
    loss_at(model, 3).backward()
    held = _grads(model)
    copies = [g.clone() for g in held]
    model.zero_grad()
    one_at_a_time(model)
    assert all(torch.equal(h, c) for h, c in zip(held, copies, strict=True))


def after_an_exception(model: Any) -> None:
    held = model._engine.store_grad
    with contextlib.suppress(RuntimeError):
        model._engine.store_grad = _fail
        loss_at(model, 4).backward()
    model._engine.store_grad = held
    model.zero_grad()
    one_at_a_time(model)


def _fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("a fault in the middle of backward")


SEQUENCES: dict[str, Callable[[Any], None]] = {
    f.__name__: f
    for f in (
        first_in_first_out, last_in_first_out, summed, eval_between, forward_without_backward,
        retained, zeroed_in_place, gradients_held_by_the_user, after_an_exception,
    )
}  # fmt: skip


def run_sequences(plan: dict[str, Any]) -> dict[str, bool]:
    reference = poisoned(**plan)
    one_at_a_time(reference)
    expected = _grads(reference)
    expected = [g.clone() for g in expected]
    equal = {}
    model = poisoned(**plan)
    for name, sequence in SEQUENCES.items():
        model.zero_grad()
        sequence(model)
        equal[name] = all(torch.equal(a, b) for a, b in zip(_grads(model), expected, strict=True))
    return equal


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "plan",
    [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3},
     {"stage": 3, "activations": "recompute"}, {"stage": 3, "memory_budget": "1GiB"}],
    ids=["0", "1", "2", "3", "3-recompute", "3-kept-gathered"],
)  # fmt: skip
def test_any_order_is_bitwise_alike(pool: Any, world: int, plan: dict[str, Any]) -> None:
    for equal in pool.run(world, run_sequences, plan):
        assert all(equal.values()), equal


# -- what the first call makes and keeps outlives the mode of that call ---------------------------
def run_after_first_call(plan: dict[str, Any], mode: str) -> list[Tensor]:
    model = poisoned(**plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if mode:
        with getattr(torch, mode)():
            loss_at(model, 6)
    for _ in range(2):
        optimizer.zero_grad()
        one_at_a_time(model)
        optimizer.step()
    return list(model.state_dict().values())


@pytest.mark.parametrize(
    "plan",
    [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3, "persist_below": 1 << 20},
     {"stage": 3, "persist_below": 0}],
    ids=["0", "1", "2", "3-persistent", "3"],
)  # fmt: skip
def test_a_first_call_for_inference(pool: Pool, plan: dict[str, Any]) -> None:
    expected = pool.run(2, run_after_first_call, plan, "")
    for mode in ("inference_mode", "no_grad"):
        for got, want in zip(pool.run(2, run_after_first_call, plan, mode), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# -- refusals, after which the model still trains -------------------------------------------------
def run_refusals(stage: int) -> list[str]:
    messages = []
    model = poisoned(stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def refused(action: Callable[[], Any]) -> None:
        with pytest.raises(GradientError) as caught:
            action()
        messages.append(str(caught.value))

    loss = loss_at(model, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    refused(loss.backward)
    loss = loss_at(model, 0)
    with warnings.catch_warnings():  # torch's own advice about create_graph, once a process
        warnings.simplefilter("ignore", UserWarning)
        refused(lambda: loss.backward(create_graph=True))
    loss = loss_at(model, 0)
    loss.backward()
    loss_again = loss_at(model, 0)
    loss_again.backward()
    args, _ = GPT.batch(1)
    tokens = args[0].clone()
    loss = model(tokens, args[1])
    tokens.zero_()
    refused(loss.backward)
    model.zero_grad()
    one_at_a_time(model)
    return messages


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_would_be_wrong_is_refused(pool: Any, stage: int) -> None:
    for messages in pool.run(2, run_refusals, stage):
        changed, double, in_place = messages
        assert "parameters were changed" in changed
        assert "create_graph=True" in double
        assert "changed in place" in in_place
