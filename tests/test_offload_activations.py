"""Activations that wait on the host: the bits of the run in which they stay, in less memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import Measured, measure
from models import CASES
from pool import Pool
from test_graph_calls import interpret
from torch import Tensor
from training import loss_of

import zerofx
from zerofx.codegen.emit import render
from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.machine import CPU_GLOO

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
SMALL = replace(CPU_GLOO, offload_min_bytes=0)  # the models of the tests are tiny
FINE = {"kernels": "aten", "bucket_bytes": 2000, "persist_below": 200}
ALL = {"activations": {"*": "offload"}}
MIXED = {"activations": {"blocks.0": "recompute", "blocks.*": "offload"}}
TIER = {"offload": {"activations": "cpu"}}
STEPS = 3


def compiled(case: str, plan: dict[str, Any]) -> zerofx.CompiledModule:
    """Compile a case; what is released, and what has left, is NaN."""
    model = zerofx.compile(CASES[case].make(), {**FINE, **plan}, machine=SMALL)
    model._engine.slots.poison = model._engine.host.poison = True
    return model


def batch_loss(model: Any, case: str, step: int) -> Tensor:
    args, kwargs = CASES[case].batch(10 * step + int(os.environ.get("RANK", "0")))
    return loss_of(model(*args, **kwargs))


def gradients(model: Any) -> list[Tensor]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [(g.to_local() if hasattr(g, "to_local") else g).clone() for g in grads]


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
    assert host.moved["d2h"].nbytes == host.moved["h2d"].nbytes
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


@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks(pool: Pool, stage: int) -> None:
    for found in pool.run(2, differing, "gpt", [ALL, MIXED, TIER], {"stage": stage}):
        assert not found


@pytest.mark.parametrize("case", ["convnet", "gpt-dropout", "adapters", "branches", "lstm"])
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


# -- calls in any order -------------------------------------------------------------------------
def two_live(model: Any) -> None:
    first, second = batch_loss(model, "gpt", 0), batch_loss(model, "gpt", 1)
    first.backward()
    second.backward()


def two_live_last_first(model: Any) -> None:
    first, second = batch_loss(model, "gpt", 0), batch_loss(model, "gpt", 1)
    second.backward()
    first.backward()


def retained(model: Any) -> None:
    first = batch_loss(model, "gpt", 0)
    first.backward(retain_graph=True)
    model.zero_grad()
    batch_loss(model, "gpt", 5)
    first.backward()
    batch_loss(model, "gpt", 1).backward()


def forward_alone(model: Any) -> None:
    first = batch_loss(model, "gpt", 0)
    batch_loss(model, "gpt", 7)
    first.backward()
    model.eval()
    with torch.no_grad():
        batch_loss(model, "gpt", 6)
    model.train()
    batch_loss(model, "gpt", 1).backward()


def fault_in_backward(model: Any) -> None:
    engine = model._engine
    with contextlib.suppress(ZeroDivisionError):
        engine.reload = _fails_at(4, engine.host.reload)
        batch_loss(model, "gpt", 4).backward()
    engine.reload = engine.host.reload
    model.zero_grad()
    two_live(model)


def fault_in_forward(model: Any) -> None:
    engine = model._engine
    with contextlib.suppress(ZeroDivisionError):
        engine.offload = _fails_at(4, engine.host.offload)
        batch_loss(model, "gpt", 4)
    engine.offload = engine.host.offload
    two_live(model)


def _fails_at(count: int, call: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    calls: list[None] = []

    def wrapped(x: Tensor) -> Any:
        calls.append(None)
        return 1 / 0 if len(calls) == count else call(x)

    return wrapped


SEQUENCES = [two_live, two_live_last_first, retained, forward_alone, fault_in_backward,
             fault_in_forward]  # fmt: skip


def run_sequences(stage: int) -> list[str]:
    """Return the sequences that leave other gradients than two calls, one after the other."""
    reference = compiled("gpt", {"stage": stage})
    for step in range(2):
        batch_loss(reference, "gpt", step).backward()
    expected, found = gradients(reference), []
    model = compiled("gpt", {"stage": stage, **ALL})
    for sequence in SEQUENCES:
        model.zero_grad()
        sequence(model)
        host = model._engine.host
        if not all(map(torch.equal, gradients(model), expected)) or host.num_lent:
            found.append(f"{sequence.__name__}: {host.num_lent} places lent")
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_sequences(pool: Pool, stage: int) -> None:
    assert not run_sequences(stage)
    for found in pool.run(2, run_sequences, stage):
        assert not found


def test_a_call_has_places_of_its_own() -> None:
    model = compiled("gpt", ALL)
    host = model._engine.host
    batch_loss(model, "gpt", 0).backward()
    once, count = host.nbytes, host.moved["d2h"].calls
    first = batch_loss(model, "gpt", 0)
    assert (host.num_lent, host.nbytes) == (count, once), "places are made once"
    second = batch_loss(model, "gpt", 1)
    assert (host.num_lent, host.nbytes) == (2 * count, 2 * once)
    first.backward(retain_graph=True)
    assert host.num_lent == 2 * count
    del first
    second.backward()
    assert (host.num_lent, host.nbytes) == (0, 2 * once)


def test_what_has_left_is_garbage() -> None:
    """The poison is real: a backward that read what left forward in place would see NaN."""
    model = compiled("gpt", ALL)
    seen = []
    launch = model._engine.offload

    def offload(x: Tensor) -> Any:
        seen.append(x)
        return launch(x)

    model._engine.offload = offload
    batch_loss(model, "gpt", 0).backward()
    floats = [x for x in seen if x.is_floating_point()]
    assert len(floats) > 10 and all(x.isnan().all() for x in floats)


def test_graphs_run_as_the_emitted_schedule_does() -> None:
    found = []
    for by_graphs in (False, True):
        model = compiled("gpt", {"stage": 3, **MIXED})
        batch_loss(model, "gpt", 0)
        if by_graphs:
            interpret(model)
        for step in range(2):
            batch_loss(model, "gpt", step).backward()
        found.append(gradients(model))
        assert model._engine.host.num_lent == 0
    assert all(map(torch.equal, *found))


# -- memory and bytes ---------------------------------------------------------------------------
LARGE = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 1024}


def check(kept: Measured, left: Measured) -> None:
    """The peak falls as predicted, and every byte goes down and comes up once."""
    assert abs(left.predicted_bytes / left.peak_bytes - 1) < 0.02
    lower, expected = (k - v for k, v in [
        (kept.peak_bytes, left.peak_bytes), (kept.predicted_bytes, left.predicted_bytes)
    ])  # fmt: skip
    assert abs(lower - expected) < 0.02 * kept.peak_bytes
    assert lower > 0.4 * left.host_bytes > 0  # two of four blocks are back at the peak
    assert left.moved == left.predicted_moved
    assert left.moved["d2h"] == left.moved["h2d"]
    assert left.host_bytes == left.predicted_host_bytes == left.moved["d2h"][1]
    assert left.sent == left.predicted_sent == kept.sent


@pytest.mark.parametrize("stage", [0, 3])
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
    model = zerofx.compile(_measured_model(), {**plan, **TIER})
    tokens = torch.zeros(4, 64, dtype=torch.int64)
    model(tokens, tokens).backward()
    assert model.programs[0].memory().peak_bytes <= 12 << 20
    with pytest.raises(PlanError, match="memory_budget: GPT needs"):
        zerofx.compile(_measured_model(), plan)(tokens, tokens)


def _measured_model() -> Any:
    from measure import MODELS

    return MODELS["gpt"](None)


def test_a_host_budget_too_small_is_refused() -> None:
    model = zerofx.compile(CASES["gpt"].make(), {**ALL, "host_budget": "1KiB"}, machine=SMALL)
    with pytest.raises(PlanError, match=r"host_budget: GPT would hold 36\.9 KiB \(\d+ bytes\)"):
        batch_loss(model, "gpt", 0)


# -- files --------------------------------------------------------------------------------------
def test_an_emitted_program_is_read_back(tmp_path: Path) -> None:
    model = compiled("gpt", {"stage": 3, **MIXED})
    batch_loss(model, "gpt", 0)
    program = model.programs[0]
    loaded = zerofx.load_program(program.emit(tmp_path / "program"))
    for name in ("forward", "backward"):
        targets = [[n.target for n in p.graph(name).nodes] for p in (program, loaded)]
        assert [t for t in targets[0] if t in ops.ALL] == [t for t in targets[1] if t in ops.ALL]
    assert loaded.memory().memory.host_bytes == program.memory().memory.host_bytes
    mine, again = (
        [row for row in render(p)["schedule.py"].splitlines() if "rt.offload" in row or
         "rt.reload" in row] for p in (program, loaded)
    )  # fmt: skip
    assert mine == again and len(mine) > 20


def test_the_views_know_lanes_and_host() -> None:
    model = compiled("gpt", {"stage": 3, **ALL})
    batch_loss(model, "gpt", 0)
    program = model.programs[0]
    schedule, memory, dump = str(program.schedule()), program.memory(), program.dump()
    assert "to host" in schedule and "D2H v0 >" in schedule and "H2D v0 <" in schedule
    count = sum(n.target is ops.offload for n in program.graph("forward").nodes)
    assert f"from its host  {count} copies" in str(memory) and "host memory" in str(memory)
    assert memory.to_dict()["host_bytes"] == memory.memory.host_bytes > 0
    assert memory.to_dict()["traffic"]["d2h"]["bytes"] == memory.memory.host_bytes
    assert "zfx.offload(" in dump and "zfx.reload(" in dump
    assert "offload v" in program.dump(level="regions")


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
