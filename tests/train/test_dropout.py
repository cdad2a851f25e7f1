"""Random draws: recompute equals keep bitwise, masks differ by rank, the state is shared."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from models import CASES
from torch import Tensor, nn

import zerofx

CASE = CASES["gpt-dropout"]


def _model(**plan: Any) -> zerofx.CompiledModule:
    return zerofx.compile(CASE.make(), {"kernels": "aten", **plan})


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if hasattr(grad, "to_local") else grad  # type: ignore[operator]


def run_policies(stage: int, kernels: str) -> dict[str, bool]:
    args, _ = CASE.batch(int(os.environ["RANK"]))
    found: dict[str, list[Tensor]] = {}
    for policy in ("keep", "recompute", 0.5):
        model = _model(stage=stage, activations=policy, kernels=kernels)
        torch.manual_seed(7)
        loss = model(*args)
        loss.backward()
        found[str(policy)] = [loss.detach(), *(_local(p.grad) for p in model.parameters())]
    return {
        name: all(torch.equal(a, b) for a, b in zip(found["keep"], values, strict=True))
        for name, values in found.items()
    }


@pytest.mark.parametrize("world", [1, 2])
def test_recompute_equals_keep_bitwise(pool: Any, world: int) -> None:
    for equal in pool.run(world, run_policies, 3, "aten"):
        assert equal == {"keep": True, "recompute": True, "0.5": True}


def run_same_batch() -> tuple[float, float, bytes]:
    """Every rank feeds the same batch twice from one seed."""
    model = _model(stage=3)
    args, _ = CASE.batch(0)
    torch.manual_seed(7)
    first = float(model(*args).detach())
    state = torch.get_rng_state().numpy().tobytes()
    torch.manual_seed(7)
    return first, float(model(*args).detach()), state


def test_masks_differ_by_rank_and_replay_from_the_state(pool: Any) -> None:
    (a, a_again, state_a), (b, b_again, state_b) = pool.run(2, run_same_batch)
    assert a == a_again and b == b_again, "one seed, one draw"
    assert a != b, "ranks must not drop the same elements"
    assert state_a == state_b, "what a save would hold is equal on all ranks"


def run_one_rank() -> tuple[float, float]:
    args, _ = CASE.batch(0)
    model, reference = _model(stage=3), CASE.make()
    torch.manual_seed(7)
    loss = model(*args)
    torch.manual_seed(7)
    return float(loss.detach()), float(reference(*args).detach())


def test_one_rank_draws_as_eager_does(pool: Any) -> None:
    ((mine, eager),) = pool.run(1, run_one_rank)
    assert mine == eager


class _Turned(nn.Module):
    """A dropout between a view and a transpose: on CPUs its gradient comes back transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.dropout(self.linear(x).view(2, 4, 2, 4))
        mixed = heads.transpose(1, 2).exp() @ torch.ones(4, 3)
        return mixed.square().sum() + heads.permute(3, 2, 1, 0).exp().sum()


def test_a_gradient_that_arrives_transposed() -> None:
    torch.manual_seed(0)
    model, x = _Turned(), torch.randn(2, 4, 8)
    plain = copy.deepcopy(model)
    compiled = zerofx.compile(model, {"kernels": "aten"})
    for run in (plain, compiled):
        torch.manual_seed(3)
        run(x).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
