"""no_sync: gradients wait on their rank, are reduced later and never lost, or are dropped whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zerofx
from zerofx.errors import DesyncError, GradientError


class Ways(nn.Module):
    """Two layers of which a call uses one; each has a unit of its own, so a bucket or not."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(33, 3, bias=False)
        self.b = nn.Linear(33, 3, bias=False)

    def forward(self, x: Tensor, way: str) -> Tensor:
        return (self.a if way == "a" else self.b)(x).sum()


def _model(stage: int, bucket_bytes: int = 1 << 20) -> zerofx.CompiledModule:
    torch.manual_seed(0)
    plan = {"stage": stage, "kernels": "aten", "bucket_bytes": bucket_bytes}
    return zerofx.compile(Ways(), plan)


def _run(model: Any, way: str, factor: float = 1.0) -> None:
    rank = int(os.environ["RANK"])
    model(torch.full((1, 33), float(factor * (rank + 1))), way).backward()


def _grads(model: Any) -> list[float | None]:
    """Return the one value that fills each gradient: the mean of ranks 1 and 2 is 1.5."""
    found: list[float | None] = []
    for param in (model.a.weight, model.b.weight):
        if param.grad is None:
            found.append(None)
            continue
        whole = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
        assert bool((whole == whole.flatten()[0]).all())
        found.append(float(whole.flatten()[0]))
    return found


def other_branch(model: Any) -> None:
    with model.no_sync():
        _run(model, "a")
        _run(model, "a")
    _run(model, "b")


def added_to_reduced(model: Any) -> None:
    _run(model, "a")
    with model.no_sync():
        _run(model, "a")
        _run(model, "b", 2)
    _run(model, "b")


def cleared_by_optimizer(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.no_sync():
        _run(model, "a", 100)
    optimizer.zero_grad()
    _run(model, "a")


def zeroed_by_optimizer(model: Any) -> None:
    for foreach in (True, False):
        _run(model, "a", 50)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=foreach)
        with model.no_sync():
            _run(model, "a", 100)
            _run(model, "b", 100)
        optimizer.zero_grad(set_to_none=False)
    _run(model, "a")


def cleared_by_model(model: Any) -> None:
    with model.no_sync():
        _run(model, "b", 100)
    model.zero_grad()
    _run(model, "a")


def cleared_one_of_two(model: Any) -> None:
    optimizer = torch.optim.SGD([model.a.weight], lr=1.0)
    with model.no_sync():
        _run(model, "a", 100)
        _run(model, "b")
        optimizer.zero_grad()
        _run(model, "a")
    _run(model, "b")


def cleared_and_summed_again(model: Any) -> None:
    with model.no_sync():
        _run(model, "a", 100)
        model.a.weight.grad = None
        _run(model, "a")
    _run(model, "a")


def input_gradients_between(model: Any) -> None:
    with model.no_sync():
        _run(model, "a")
    x = torch.ones(1, 33, requires_grad=True)
    torch.autograd.grad(model(x, "b"), x)
    _run(model, "b")


SEQUENCES: dict[Callable[[Any], None], list[float | None]] = {
    other_branch: [3.0, 1.5],
    added_to_reduced: [3.0, 4.5],
    cleared_by_optimizer: [1.5, None],
    zeroed_by_optimizer: [1.5, 0.0],
    cleared_by_model: [1.5, None],
    cleared_one_of_two: [1.5, 3.0],
    cleared_and_summed_again: [3.0, None],
    input_gradients_between: [1.5, 1.5],
}


def run_sequences(stage: int, bucket_bytes: int) -> dict[str, list[float | None]]:
    found = {}
    for sequence in SEQUENCES:
        model = _model(stage, bucket_bytes)
        for _ in range(2):  # also with all buffers made
            model.zero_grad()
            sequence(model)
        found[sequence.__name__] = _grads(model)
    return found


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20], ids=["two buckets", "one bucket"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sums_are_reduced_or_dropped(pool: Pool, stage: int, bucket_bytes: int) -> None:
    for found in pool.run(2, run_sequences, stage, bucket_bytes):
        assert found == {f.__name__: want for f, want in SEQUENCES.items()}


@pytest.mark.parametrize("stage", [0, 1])
def test_one_process_needs_no_sum(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for sequence in SEQUENCES:
        model = _model(stage)
        sequence(model)
        found = [g and 1.5 * g for g in _grads(model)]
        assert found == SEQUENCES[sequence], sequence.__name__


# -- what p.grad is meanwhile ---------------------------------------------------------------------
def look_meanwhile(stage: int) -> Any:
    model = _model(stage)
    with model.no_sync():
        _run(model, "a")
    if stage == 0:
        return float(model.a.weight.grad[0, 0]), model.b.weight.grad
    weight = model.a.weight
    actions: list[Callable[[], Any]] = [
        torch.optim.SGD(model.parameters(), lr=1.0).step,
        torch.optim.AdamW(model.parameters(), fused=True).step,
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        weight.grad.norm,
        weight.grad.full_tensor,
        lambda: weight.grad.to_local().sum(),
        lambda: weight.grad.mul_(2),
    ]
    before = model.state_dict()
    messages = []
    for action in actions:
        with pytest.raises(GradientError) as caught:
            action()
        messages.append(str(caught.value))
    _run(model, "a")
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return messages, _grads(model)


def test_p_grad_is_the_local_sum_or_unreadable(pool: Pool) -> None:
    assert pool.run(2, look_meanwhile, 0) == [(1.0, None), (2.0, None)]
    for messages, grads in pool.run(2, look_meanwhile, 1):
        assert grads == [3.0, None]
        for message in messages:
            assert message.startswith("a.weight: ") and "outside no_sync" in message


# -- loads, and ranks that differ -----------------------------------------------------------------
def load_between(folder: str, stage: int) -> list[float | None]:
    model = _model(stage)
    zerofx.save(folder, model)
    with model.no_sync():
        _run(model, "a", 100)
    zerofx.load(folder, model)
    _run(model, "a")
    return _grads(model)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_load_drops_the_sum(pool: Pool, tmp_path: Path, stage: int) -> None:
    for grads in pool.run(2, load_between, str(tmp_path / "snapshot"), stage):
        assert grads == [1.5, None]


def clear_on_rank_0(stage: int) -> str:
    model = _model(stage, 1)
    with model.no_sync():
        _run(model, "a")
    if os.environ["RANK"] == "0":
        model.zero_grad()
    with pytest.raises(DesyncError) as caught:
        _run(model, "b")
        _run(model, "b")
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_rank_that_clears_alone_is_named(pool: Pool, stage: int) -> None:
    for text in pool.run(2, clear_on_rank_0, stage):
        assert ("adds to gradients=", "reduction of the sums of no_sync")[stage] in text
