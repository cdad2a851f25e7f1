"""Activations that wait on the host: the bits of the run in which they stay, in less memory."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from measure import MODELS, Measured, measure
from models import CASES
from offload_cases import ALL, FINE, MIXED, SMALL, TIER, batch_loss, compiled, gradients
from pool import Pool
from torch import Tensor

import zerofx
from zerofx.errors import PlanError

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
STEPS = 3


# -- the same bits ------------------------------------------------------------------------------
def trained(case: str, plan: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Return what training leaves (losses, gradients, parameters), and how often values left."""
    torch.manual_seed(0)
    model = compiled(case, plan)
    optimizer = zerofx.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        for micro in range(2):
            loss = batch_loss(model, case, 2 * step + micro)
            (loss / 2).backward()
            found.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    host = model._engine.host
    assert host.num_lent == 0, "every value is back"
    shards_move = model._engine.store.is_away
    assert shards_move or host.moved["d2h"].nbytes == host.moved["h2d"].nbytes
    return found + list(model.state_dict().values()), host.moved["d2h"].calls


def differing(case: str, plans: list[dict[str, Any]], base: dict[str, Any]) -> list[str]:
    """Return the plans that do not train as the same plan with activations kept, bit for bit."""
    kept, none = trained(case, base)
    assert none == 0
    found = []
    for plan in plans:
        left, calls = trained(case, {**base, **plan})
        same = len(left) == len(kept) and all(map(torch.equal, left, kept))
        if not same or calls == 0:
            found.append(f"{plan}: {calls} copies, equal: {same}")
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank(stage: int) -> None:
    assert not differing("gpt", [ALL, MIXED, TIER], {"stage": stage})


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_two_ranks(pool: Pool, stage: int) -> None:
    for found in pool.run(2, differing, "gpt", [ALL, MIXED, TIER], {"stage": stage}):
        assert not found


@pytest.mark.parametrize(
    "case",
    [
        "convnet",
        "lstm",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt-dropout", "adapters", "branches")),
    ],
)
def test_other_models(case: str) -> None:
    assert not differing(case, [ALL], {"stage": 3})


@pytest.mark.parametrize(
    "base",
    [{"precision": "bf16"}, {"prefetch": 0}, {"prefetch": 3}, {"memory_budget": "1MiB"}],
    ids=str,
)
def test_beside_other_choices(base: dict[str, Any]) -> None:
    assert not differing("gpt", [ALL], {"stage": 3, **base})


@pytest.mark.slow
@pytest.mark.parametrize("case", ["hf-gpt2", "hf-llama", "hf-bert", "hf-vit", "hf-resnet"])
def test_foreign_models(case: str) -> None:
    pytest.importorskip("transformers")
    assert not differing(case, [ALL, {"activations": 0.5, **TIER}], {"stage": 3})


@pytest.mark.slow
@pytest.mark.parametrize(
    "base",
    [{"stage": 1}, {"stage": 2}, {"stage": 3, "precision": "bf16"},
     {"stage": 3, "update": "in-backward"}, {"stage": 3, "shard_axis_size": 1}],
    ids=str,
)  # fmt: skip
def test_two_ranks_everywhere(pool: Pool, base: dict[str, Any]) -> None:
    run = differing_unclipped if "update" in base else differing
    for found in pool.run(2, run, "gpt", [ALL, TIER], base):
        assert not found


def differing_unclipped(case: str, plans: list[dict[str, Any]], base: dict[str, Any]) -> list[str]:
    """As `differing`, for updates inside backward: no accumulation, no clipping."""

    def run(plan: dict[str, Any]) -> list[Tensor]:
        model = compiled(case, plan)
        optimizer = zerofx.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(STEPS):
            loss = batch_loss(model, case, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses + list(model.state_dict().values())

    kept = run(base)
    return [str(p) for p in plans if not all(map(torch.equal, run({**base, **p}), kept))]


@pytest.mark.slow
def test_compiled_by_inductor(pool: Pool) -> None:
    """fp32 regions give the same bits whatever stands between them."""
    base = {"stage": 3, "kernels": "inductor"}
    for found in pool.run(2, differing, "gpt", [ALL], base, timeout_s=300.0):
        assert not found


def test_debug_mode() -> None:
    """It poisons by itself, and its NaN finder sees none of what is read in time."""
    model = zerofx.compile(CASES["gpt"].make(), {"debug": True, **ALL}, machine=SMALL)
    assert model._engine.host.poison
    batch_loss(model, "gpt", 0).backward()
    kept = compiled("gpt", {})
    batch_loss(kept, "gpt", 0).backward()
    assert all(map(torch.equal, gradients(model), gradients(kept)))


# -- memory and bytes ---------------------------------------------------------------------------
LARGE = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 1024}


def check(kept: Measured, left: Measured) -> None:
    """The peak falls as predicted, and every byte goes down and comes up once."""
    assert abs(left.predicted_bytes / left.peak_bytes - 1) < 0.02
    lower, expected = (k - v for k, v in [
        (kept.peak_bytes, left.peak_bytes), (kept.predicted_bytes, left.predicted_bytes)
    ])  # fmt: skip
    assert abs(lower - expected) < 0.02 * kept.peak_bytes
    assert lower > 0.35 * left.host_bytes > 0  # two of four blocks are back at the peak, and more
    assert left.moved == left.predicted_moved
    assert left.moved["d2h"] == left.moved["h2d"]
    assert left.host_bytes == left.predicted_host_bytes == left.moved["d2h"][1]
    assert left.sent == left.predicted_sent == kept.sent


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_the_peak_is_lower_by_what_left(stage: int) -> None:
    kept = measure("gpt", {"stage": stage, **LARGE})
    check(kept, measure("gpt", {"stage": stage, **LARGE, **TIER}))


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_the_peak_of_two_ranks(pool: Pool, stage: int) -> None:
    plan = {"stage": stage, **LARGE}
    kept = pool.run(2, measure, "gpt", plan)
    left = pool.run(2, measure, "gpt", {**plan, "activations": {"blocks.*": "offload"}})
    for pair in zip(kept, left, strict=True):
        check(*pair)


def test_a_budget_is_met_with_offload_alone() -> None:
    """What a budget leaves behind the offload goes into kept parameters; without it none fits."""
    plan = {"stage": 3, **LARGE, "memory_budget": "12MiB"}
    model = zerofx.compile(MODELS["gpt"](None), {**plan, **TIER})
    tokens = torch.zeros(4, 64, dtype=torch.int64)
    model(tokens, tokens).backward()
    assert model.programs[0].memory(basis="compiled", keeps_results=True).peak_bytes <= 12 << 20
    with pytest.raises(PlanError, match="memory_budget: GPT needs"):
        zerofx.compile(MODELS["gpt"](None), plan)(tokens, tokens)


def test_a_host_budget_too_small_is_refused() -> None:
    model = zerofx.compile(CASES["gpt"].make(), {**ALL, "host_budget": "1KiB"}, machine=SMALL)
    with pytest.raises(PlanError, match=r"host_budget: GPT would hold 36\.9 KiB \(\d+ bytes\)"):
        batch_loss(model, "gpt", 0)


# -- a GPU --------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 3])
def test_on_cuda(stage: int) -> None:
    plan = {"stage": stage, **LARGE}
    kept = measure("gpt", plan, "cuda:0")
    left = measure("gpt", {**plan, "activations": {"blocks.*": "offload"}}, "cuda:0")
    assert left.peak_bytes < kept.peak_bytes
    assert abs(left.predicted_bytes / left.peak_bytes - 1) < 0.05
    assert left.moved == left.predicted_moved


@pytest.mark.gpu
def test_the_same_bits_on_cuda() -> None:
    found = []
    for plan in ({}, ALL):
        model = zerofx.compile(CASES["gpt"].make(), {**FINE, **plan}, device="cuda:0",
                               machine=replace(SMALL, device_type="cuda"))  # fmt: skip
        model._engine.host.poison = True
        for step in range(3):
            args, _ = CASES["gpt"].batch(step)
            model(*(a.cuda() for a in args)).backward()
        found.append(gradients(model))
    assert all(map(torch.equal, *found))
