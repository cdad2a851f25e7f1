"""Calls in any order, graphs and files of programs whose activations wait on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import op_sets
import pytest
import torch
from graph_cases import interpret
from offload_cases import ALL, MIXED, batch_loss, compiled, gradients
from pool import Pool
from torch import Tensor

import zerofx
from zerofx import ops
from zerofx.codegen.emit import render


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


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
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


# -- files --------------------------------------------------------------------------------------
def test_an_emitted_program_is_read_back(tmp_path: Path) -> None:
    model = compiled("gpt", {"stage": 3, **MIXED})
    batch_loss(model, "gpt", 0)
    program = model.programs[0]
    loaded = zerofx.load_program(program.emit(tmp_path / "program"))
    for name in ("forward", "backward"):
        targets = [[n.target for n in p.graph(name).nodes] for p in (program, loaded)]
        assert [t for t in targets[0] if t in op_sets.ALL] == [
            t for t in targets[1] if t in op_sets.ALL
        ]
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
