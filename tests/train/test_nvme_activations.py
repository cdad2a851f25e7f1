"""Activations that wait on NVMe: the bits of the run in which they stay, through few host bytes."""

from __future__ import annotations

import gc
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import op_sets
import pytest
import torch
from graph_cases import interpret
from measure import measure
from offload_cases import ALL, MIXED, SMALL, batch_loss, compiled, gradients
from pool import Pool
from spill_cases import LateLane, on_late_lanes, spilling
from test_offload_activations import LARGE, differing, differing_unclipped
from test_offload_calls import SEQUENCES
from torch import Tensor, nn

import zerofx
from zerofx import ops
from zerofx.codegen.emit import render
from zerofx.errors import BudgetError, NvmeError
from zerofx.runtime.tiers import nvme_values

FAR = {"optimizer": "nvme", "parameters": "nvme"}


def unequal(folder: str, case: str, plans: list[dict[str, Any]], base: dict[str, Any]) -> list[str]:
    """Return the plans that do not train, from NVMe, as the base does with all on the device."""
    run = differing_unclipped if "update" in base else differing
    place = {"activations": "nvme", "path": folder}
    plans = [{**plan, "offload": {**plan.get("offload", {}), **place}} for plan in plans]
    return run(case, plans, base)


# -- the same bits ------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_one_rank(tmp_path: Path, stage: int) -> None:
    assert not unequal(str(tmp_path), "gpt", [MIXED], {"stage": stage})


def test_two_ranks(pool: Pool, tmp_path: Path) -> None:
    base = {"stage": 3, "precision": "bf16"}
    for found in pool.run(2, unequal, str(tmp_path), "gpt", [{"offload": FAR}], base):
        assert not found


@pytest.mark.slow
@pytest.mark.parametrize("case", ["convnet", "lstm", "gpt-dropout", "adapters", "branches"])
def test_other_models(tmp_path: Path, case: str) -> None:
    assert not unequal(str(tmp_path), case, [ALL], {"stage": 3})


@pytest.mark.slow
@pytest.mark.parametrize(
    "base",
    [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "precision": "bf16"},
     {"stage": 3, "update": "in-backward"}, {"stage": 3, "prefetch": 0},
     {"stage": 3, "prefetch": 3}, {"stage": 3, "memory_budget": "1MiB"},
     {"stage": 2, "kernels": "inductor"}],
    ids=str,
)  # fmt: skip
def test_everywhere(pool: Pool, tmp_path: Path, base: dict[str, Any]) -> None:
    plans: list[dict[str, Any]] = [{}, ALL, MIXED]
    if base["stage"]:
        plans += [{"offload": {"optimizer": tier}} for tier in ("cpu", "nvme")]
    if base["stage"] == 3:
        plans.append({"offload": FAR})
    for found in pool.run(2, unequal, str(tmp_path), "gpt", plans, base, timeout_s=600.0):
        assert not found


@pytest.mark.slow
@pytest.mark.parametrize("case", ["hf-gpt2", "hf-llama", "hf-bert", "hf-resnet"])
def test_foreign_models(tmp_path: Path, case: str) -> None:
    pytest.importorskip("transformers")
    assert not unequal(str(tmp_path), case, [ALL, {"activations": 0.5}], {"stage": 3})


# -- calls in any order -------------------------------------------------------------------------
def test_calls_in_any_order(tmp_path: Path) -> None:
    expected, model = kept(2), spilling({"stage": 3}, tmp_path)
    for sequence in SEQUENCES:
        model.zero_grad()
        sequence(model)
        engine = model._engine
        assert all(map(torch.equal, gradients(model), expected)), sequence.__name__
        assert engine.host.num_lent == engine.values.num_lent == 0, sequence.__name__


def test_a_call_has_places_of_its_own(tmp_path: Path) -> None:
    model = spilling({}, tmp_path)
    batch_loss(model, "gpt", 0).backward()
    values, host = model._engine.values, model._engine.host
    once, count = values.nbytes, host.moved["nvme_write"].calls
    first = batch_loss(model, "gpt", 0)
    assert (values.num_lent, values.nbytes, host.num_lent) == (count, once, 0)
    second = batch_loss(model, "gpt", 1)
    assert (values.num_lent, values.nbytes, host.num_lent) == (2 * count, 2 * once, 0)
    assert len(list(tmp_path.iterdir())) == 2
    first.backward(retain_graph=True)
    first.backward(retain_graph=True)
    assert values.num_lent == 2 * count
    del first  # its places are free without another backward
    assert values.num_lent == count
    second.backward()
    assert (values.num_lent, values.nbytes) == (0, 2 * once)
    del model, values, host, second
    gc.collect()
    assert not list(tmp_path.iterdir()), "the files go with the model"


def test_graphs_run_as_the_emitted_schedule_does(tmp_path: Path) -> None:
    found = []
    for by_graphs in (False, True):
        model = spilling({"stage": 3}, tmp_path)
        batch_loss(model, "gpt", 0)
        if by_graphs:
            interpret(model)
        for step in range(2):
            batch_loss(model, "gpt", step).backward()
        found.append(gradients(model))
        assert model._engine.values.num_lent == 0
    assert all(map(torch.equal, *found))


# -- a device whose copies end late -------------------------------------------------------------
@cache
def kept(num_calls: int) -> list[Tensor]:
    """Return the gradients of a model that keeps all on the device."""
    model = compiled("gpt", {"stage": 3})
    for step in range(num_calls):
        batch_loss(model, "gpt", step).backward()
    return gradients(model)


def is_right(folder: Path) -> bool:
    """Say whether three calls on late lanes leave the right gradients."""
    model = spilling({"stage": 3, "prefetch": 2}, folder)
    lanes = on_late_lanes(model)
    for step in range(3):
        batch_loss(model, "gpt", step).backward()
    assert sum(lane.num_settled for lane in lanes) > 50
    return all(map(torch.equal, gradients(model), kept(3)))


def test_a_write_waits_for_its_copy_and_a_read_for_its_place(tmp_path: Path) -> None:
    assert is_right(tmp_path)


def test_without_that_wait_wrong_bytes_go(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(nvme_values, "_behind", lambda settled, submit: submit())
    monkeypatch.setattr(LateLane, "num_settled", 100)
    try:
        right = is_right(tmp_path)
    except NvmeError as error:  # changed under the write's hands, after its checksum was taken
        assert "has the checksum" in str(error)
        return
    assert not right


# -- memory and bytes ---------------------------------------------------------------------------
def test_host_and_files_hold_what_is_predicted(tmp_path: Path) -> None:
    """The host holds a few values' bytes: what passes through it is never there as a whole."""
    offload = {"activations": "nvme", "path": str(tmp_path)}
    found = measure("gpt", {"stage": 3, **LARGE, "offload": offload})
    assert found.moved == found.predicted_moved
    assert found.moved["nvme_write"] == found.moved["nvme_read"] == found.moved["d2h"]
    assert found.moved["d2h"] == found.moved["h2d"]
    assert found.host_bytes <= 1.05 * found.predicted_host_bytes
    assert found.predicted_host_bytes < 0.6 * found.moved["d2h"][1]
    assert abs(found.predicted_bytes / found.peak_bytes - 1) < 0.02


def planned(layers: int, **plan: Any) -> Any:
    """Return the memory of a stack of layers whose activations go to NVMe, without a run."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(layers)))
    captured = zerofx.capture(model, (torch.zeros(16, 8),), differentiate="all")
    offload = {"activations": "nvme", "path": "/nowhere"}
    plan |= {"differentiate": "all", "offload": offload}
    return zerofx.rewrite(captured, plan, 2, machine=SMALL).memory().memory


def test_deeper_models_hold_no_more_on_the_host() -> None:
    """What is predicted does not grow with the layers, but what lies in files does."""
    few, many = planned(6), planned(12)
    assert 0 < few.host_bytes == many.host_bytes < 0.6 * few.nvme_bytes
    assert many.nvme_bytes > 1.7 * few.nvme_bytes


def test_a_host_budget_counts_what_passes_through() -> None:
    needed = planned(6).host_bytes
    assert planned(6, host_budget=needed).nvme_bytes > needed
    with pytest.raises(BudgetError, match="let the tier 'nvme' hold more"):
        planned(6, host_budget=needed - 1)


# -- files --------------------------------------------------------------------------------------
def test_an_emitted_program_is_read_back(tmp_path: Path) -> None:
    model = spilling({"stage": 3}, tmp_path)
    batch_loss(model, "gpt", 0)
    program = model.programs[0]
    loaded = zerofx.load_program(program.emit(tmp_path / "program"))
    for name in ("forward", "backward"):
        targets = [[n.target for n in p.graph(name).nodes] for p in (program, loaded)]
        assert [t for t in targets[0] if t in op_sets.ALL] == [
            t for t in targets[1] if t in op_sets.ALL
        ]
    both = [p.memory().memory for p in (program, loaded)]
    assert both[0].nvme_bytes == both[1].nvme_bytes > 0
    mine, again = (
        [row for row in render(p)["schedule.py"].splitlines() if "rt.write" in row or
         "rt.read" in row] for p in (program, loaded)
    )  # fmt: skip
    assert mine == again and len(mine) > 20


@pytest.mark.slow
def test_an_emitted_program_runs_by_itself(tmp_path: Path) -> None:
    model = spilling({"stage": 3}, tmp_path)
    batch_loss(model, "gpt", 0)
    where = model.programs[0].emit(tmp_path / "program")
    command = [sys.executable, str(where / "schedule.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "backward reduced" in done.stdout


def test_the_views_know_the_lanes(tmp_path: Path) -> None:
    model = spilling({"stage": 3}, tmp_path)
    batch_loss(model, "gpt", 0)
    program = model.programs[0]
    schedule, memory, dump = str(program.schedule()), program.memory(), program.dump()
    assert "to nvme" in schedule and "WR v0 >" in schedule and "RD v0 <" in schedule
    count = sum(n.target is ops.write_out for n in program.graph("forward").nodes)
    assert f"to its nvme    {count} copies" in str(memory)
    assert f"from its nvme  {count} copies" in str(memory) and "files" in str(memory)
    assert "zfx.write_out(" in dump and "zfx.read_back(" in dump
