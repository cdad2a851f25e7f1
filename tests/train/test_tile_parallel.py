"""Tiles of layers that are cut over ranks: trained and measured like one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from measure import ATEN, TOLERANCE, measure
from pool import Pool
from test_tensor_parallel import compare, make, plain, samples, slow, train

import zerofx

MLP = {"model.layers.*.mlp": 4, "lm_head": 2}
ALL = MLP | {"model.layers.*.self_attn": 2, "model.embed_tokens": 4}
OWN = {"gpt.blocks.*.attn.qkv": 6, "gpt.blocks.*.mlp": 2}
TENSOR = {"tensor": 2}
SEQUENCE = {"tensor": 2, "sequence": True}
HOST = {"optimizer": "cpu", "parameters": "cpu"}


@pytest.mark.parametrize(
    ("name", "ranks", "plan"),
    [
        ("llama", 2, {"stage": 3, "tiling": ALL, "offload": HOST, "parallel": TENSOR}),
        ("llama", 2, {"stage": 3, "tiling": MLP, "parallel": {"context": 2}}),
        slow("own", 2, {"stage": 3, "tiling": OWN, "offload": HOST, "parallel": SEQUENCE}),
        slow("own", 2, {"stage": 3, "tiling": OWN, "parallel": {"context": 2}}),
        slow("llama", 2, {"stage": 0, "tiling": ALL, "parallel": SEQUENCE}),
        slow("llama", 2, {"stage": 3, "tiling": ALL, "parallel": {"context": 2}}),
        slow("llama", 4, {"stage": 3, "tiling": ALL, "parallel": SEQUENCE}),
        slow("llama", 4, {"stage": 3, "tiling": ALL, "parallel": TENSOR, "kernels": "inductor"}),
        slow("own", 4, {"stage": 3, "tiling": OWN, "parallel": TENSOR}),
        slow("own", 4, {"stage": 3, "tiling": OWN, "parallel": TENSOR, "activations": "recompute"}),
        slow("llama", 4, {"stage": 3, "tiling": ALL, "parallel": {"context": 2, "tensor": 2}}),
    ],
)
def test_trains_like_one_process(pool: Pool, name: str, ranks: int, plan: dict[str, Any]) -> None:
    shared = {axis: n for axis, n in plan["parallel"].items() if axis != "sequence"}
    data = ranks
    for number in shared.values():
        data //= number
    expected = plain(name, "adamw", data)
    plan = plan | {"outputs": "loss"}
    for found in pool.run(ranks, train, name, "adamw", plan, timeout_s=400):
        compare(found, expected, 2e-5)


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        slow(2, {"tiling": {"blocks.*.mlp": 4}, "parallel": {"context": 2}}),
        slow(2, {"tiling": {"blocks.*.mlp": 4}, "offload": HOST, "parallel": TENSOR}),
        slow(4, {"tiling": {"blocks.*.mlp": 4, "blocks.*.attn": 3}, "parallel": SEQUENCE}),
    ],
)
def test_the_peak_is_as_predicted(pool: Pool, ranks: int, plan: dict[str, Any]) -> None:
    for found in pool.run(ranks, measure, "gpt", {**ATEN, **plan}, timeout_s=400):
        assert found.peak_bytes == pytest.approx(found.predicted_bytes, rel=TOLERANCE)


def saved(folder: str, plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train a step and save; return the whole parameters."""
    model, found = trained(plan)
    zerofx.save(folder, model, found)
    return dict(zerofx.full_state_dict(model, rank0_only=False))


def trained(plan: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = zerofx.compile(make("llama"), {"kernels": "aten", **plan})
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**samples("llama", 0, 0)).loss.backward()
    stepper.step()
    stepper.zero_grad()
    return model, stepper


def loaded(folder: str, plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Load into a model under another plan, whose own training went elsewhere."""
    model, stepper = trained(plan)
    stepper.step()
    zerofx.load(folder, model, stepper)
    return dict(zerofx.full_state_dict(model, rank0_only=False))


@pytest.mark.slow
def test_saved_tiles_are_loaded_under_other_plans(pool: Pool, tmp_path: Path) -> None:
    tiled = {"stage": 3, "tiling": ALL, "parallel": SEQUENCE}
    expected = pool.run(4, saved, str(tmp_path / "tiled"), tiled, timeout_s=400)[0]
    for ranks, plan in ((2, {"parallel": {"pipeline": 2}}), (4, tiled)):
        for found in pool.run(ranks, loaded, str(tmp_path / "tiled"), plan, timeout_s=400):
            for name, value in expected.items():
                assert torch.equal(found[name], value), name
