"""Snapshots that an older zerofx wrote still load, whole, and training goes on as it did then."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from older_snapshots import KINDS, SAVED_STEPS, build, later_steps, made_odd, odd_values, train
from torch.distributed.tensor import DTensor

import zerofx

FOLDER = Path(__file__).parents[2] / "snapshots" / "52b680f"
ODD = FOLDER / "odd-shapes"


def load_and_go_on(kind: str, changes: dict[str, Any]) -> tuple[Any, Any, Any]:
    import torch.distributed as dist

    model, optimizer = build(kind, **changes)
    extra = zerofx.load(FOLDER / kind, model, optimizer)
    saved = copy.deepcopy(zerofx.full_state_dict(model, rank0_only=False))
    train(model, optimizer, later_steps(), dist.get_rank())
    return extra, saved, zerofx.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("torch-adamw", 3),
        ("flat-adamw-bf16", 1),
        pytest.param("torch-adamw", 1, marks=pytest.mark.slow),
        pytest.param("flat-adamw-bf16", 3, marks=pytest.mark.slow),
    ],
)
def test_loads_at_the_world_that_wrote_it(pool: Any, kind: str, stage: int) -> None:
    expected = torch.load(FOLDER / f"{kind}.pt")
    for extra, saved, later in pool.run(2, load_and_go_on, kind, {"stage": stage}):
        assert extra == {"step": SAVED_STEPS}
        assert saved.keys() == expected["saved"].keys()
        for name, value in expected["saved"].items():
            assert torch.equal(saved[name], value), name
        for name, value in expected["later"].items():
            torch.testing.assert_close(later[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_loads_in_one_process(kind: str) -> None:
    expected = torch.load(FOLDER / f"{kind}.pt")["saved"]
    model, optimizer = build(kind)
    assert zerofx.load(FOLDER / kind, model, optimizer) == {"step": SAVED_STEPS}
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def load_flat(stage: int) -> None:
    model, optimizer = made_odd(stage)
    assert zerofx.load(ODD, model, optimizer) == {"epoch": 7}
    for number, param in enumerate(model.parameters()):
        for key, value in {"": param, **optimizer.state[param]}.items():
            if key != "step":
                full = value.full_tensor() if isinstance(value, DTensor) else value
                expected = odd_values(param.shape, number, key)
                assert torch.equal(full.detach(), expected), (number, key)
    assert model.norm.running_mean.tolist() == [1.0, 2.0, 3.0]
    held = {"model": model.sharded_state_dict(flat=True)}
    del held["model"]["again.weight"]  # tied: zerofx.save writes it once
    dcp.load(held, checkpoint_id=ODD)  # the form that dcp.save(sharded_state_dict()) gave then


@pytest.mark.parametrize(
    ("size", "stage"), [(1, 3), (2, 3), pytest.param(2, 0, marks=pytest.mark.slow)]
)
def test_snapshots_of_flat_tensors_load(pool: Any, size: int, stage: int) -> None:
    pool.run(size, load_flat, stage)
