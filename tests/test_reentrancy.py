"""Calls in any order give what the same calls give one at a time, released slots poisoned."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES
from pool import Pool
from torch import Tensor

import zerofx
from zerofx.errors import GradientError

GPT = CASES["gpt"]


def _model(stage: int, **plan: Any) -> zerofx.CompiledModule:
    fields = {"stage": stage, "kernels": "aten", "bucket_bytes": 4096, **plan}
    model = zerofx.compile(GPT.make(), fields)
    model._engine.slots.poison = True
    return model


def _loss(model: Any, step: int) -> Tensor:
    args, _ = GPT.batch(10 * step + int(os.environ.get("RANK", "0")))
    return model(*args)


def _grads(model: Any) -> list[Tensor]:
    grads = [p.grad for p in model.parameters()]
    return [g.to_local() if hasattr(g, "to_local") else g for g in grads]


# -- each sequence must leave the gradients of micro-batches 0 and 1, summed ----------------------
def one_at_a_time(model: Any) -> None:
    _loss(model, 0).backward()
    _loss(model, 1).backward()


def first_in_first_out(model: Any) -> None:
    first, second = _loss(model, 0), _loss(model, 1)
    first.backward()
    second.backward()


def last_in_first_out(model: Any) -> None:
    first, second = _loss(model, 0), _loss(model, 1)
    second.backward()
    first.backward()


def summed(model: Any) -> None:
    (_loss(model, 0) + _loss(model, 1)).backward()


def eval_between(model: Any) -> None:
    first = _loss(model, 0)
    model.eval()
    with torch.no_grad():
        _loss(model, 5)
    model.train()
    first.backward()
    with torch.inference_mode():
        _loss(model, 6)
    _loss(model, 1).backward()


def forward_without_backward(model: Any) -> None:
    first = _loss(model, 0)
    _loss(model, 7)
    first.backward()
    _loss(model, 1).backward()


def retained(model: Any) -> None:
    first = _loss(model, 0)
    first.backward(retain_graph=True)
    model.zero_grad()
    first.backward()
    _loss(model, 1).backward()


def zeroed_in_place(model: Any) -> None:
    _loss(model, 3).backward()
    model.zero_grad(set_to_none=False)
    one_at_a_time(model)


def gradients_held_by_the_user(model: Any) -> None:
    _loss(model, 3).backward()
    held = _grads(model)
    copies = [g.clone() for g in held]
    model.zero_grad()
    one_at_a_time(model)
    assert all(torch.equal(h, c) for h, c in zip(held, copies, strict=True))


def after_an_exception(model: Any) -> None:
    held = model._engine.store_grad
    with contextlib.suppress(RuntimeError):
        model._engine.store_grad = _fail
        _loss(model, 4).backward()
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
    reference = _model(**plan)
    one_at_a_time(reference)
    expected = _grads(reference)
    expected = [g.clone() for g in expected]
    equal = {}
    model = _model(**plan)
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
    model = _model(**plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if mode:
        with getattr(torch, mode)():
            _loss(model, 6)
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
    model = _model(stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def refused(action: Callable[[], Any]) -> None:
        with pytest.raises(GradientError) as caught:
            action()
        messages.append(str(caught.value))

    loss = _loss(model, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    refused(loss.backward)
    loss = _loss(model, 0)
    with warnings.catch_warnings():  # torch's own advice about create_graph, once a process
        warnings.simplefilter("ignore", UserWarning)
        refused(lambda: loss.backward(create_graph=True))
    loss = _loss(model, 0)
    loss.backward()
    loss_again = _loss(model, 0)
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


# -- stages 1 and 2 see every kind of update ------------------------------------------------------
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
    model = _model(stage)
    _same_batch()
    try:
        reference = GPT.make()
        for _ in range(3):
            for one in (model, reference):
                _loss(one, 0).backward()
                _update(kind, one)
                one.zero_grad()
        with torch.no_grad():
            mine, theirs = _loss(model, 0), _loss(reference, 0)
        return float((mine - theirs).abs() / theirs)
    finally:
        os.environ["RANK"] = rank
        _locals.clear()


# -- memory between steps -------------------------------------------------------------------------
def run_rest() -> tuple[list[int], list[int], bool]:
    """Return gradient bytes while set, then in the next forward, and whether one is kept."""
    from zerofx.demo.gpt import GPT as Model
    from zerofx.demo.gpt import GPTConfig

    model = zerofx.compile(
        Model(GPTConfig(layers=2, width=256, heads=2, seq=8)), {"stage": 3, "kernels": "aten"}
    )
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    shards = model._engine.store._grads

    def held() -> list[int]:
        return [s.flat.untyped_storage().nbytes() for s in shards.values()]

    model(tokens, tokens).backward()
    first = held()
    kept = model.blocks[0].mlp.up.weight.grad.to_local()
    before = kept.clone()
    model.zero_grad()
    model(tokens, tokens)
    return first, held(), torch.equal(kept, before)


def test_idle_gradients_are_freed_unless_held(pool: Any) -> None:
    for first, later, is_kept in pool.run(2, run_rest):
        assert is_kept, "what the user holds stays as it was"
        assert sum(later) < sum(first)
        assert 0 in later and max(later) > 0, later
