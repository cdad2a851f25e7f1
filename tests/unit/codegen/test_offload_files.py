"""Emitted programs whose shards live on the host: read back, edited by hand, run by themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from edits import edited, moved
from graph_cases import interpret
from models import CASES
from offload_cases import batch_loss, compiled, gradients
from pool import Pool
from torch import Tensor
from verify_cases import program

import zerofx
from zerofx.codegen.emit import emit, render
from zerofx.errors import ProgramError
from zerofx.plan.parts import Offload

BOTH = Offload(optimizer="cpu", parameters="cpu")
OPTIMIZER = Offload(optimizer="cpu")
CHOICES = [
    {"offload": BOTH},
    pytest.param({"offload": OPTIMIZER}, marks=pytest.mark.slow),
    pytest.param({"offload": OPTIMIZER, "stage": 1}, marks=pytest.mark.slow),
]


def emitted(tmp_path: Path, **plan: Any) -> Path:
    return emit(program("gpt", **{"offload": BOTH, **plan}), tmp_path / "program")


def test_the_text_comes_back(tmp_path: Path) -> None:
    first, again = (
        [row for row in render(p)["schedule.py"].splitlines() if "(rt, " in row or "rt." in row]
        for p in (program("gpt", offload=BOTH), zerofx.load_program(emitted(tmp_path)))
    )
    moves = [row for row in first if "rt.offload_grad(" in row or "rt.reload_shard(" in row]
    assert len(moves) == 10
    assert [row for row in again if "pack" not in row] == [r for r in first if "pack" not in r]


# -- edits --------------------------------------------------------------------------------------
def test_a_reload_may_be_launched_elsewhere(tmp_path: Path) -> None:
    directory = emitted(tmp_path)
    edited(directory, r"(reload_3 = .*slot=)\d", r"\g<1>-1")
    edited(directory, r"(rt.release\(shard_3, slot=)\d", r"\g<1>-1")
    moved(directory, "reload_3 = ", "gather_0 = ")
    zerofx.load_program(directory)


HARM = [
    (("rt.release(shard_2", "full_2 = rt.wait"), "still sends it. Move the release after"),
    (("gather_2 = ", "shard_2 = rt.wait"), "before|not defined|shard_2"),
]


@pytest.mark.parametrize(("move", "message"), HARM, ids=["release", "gather"])
def test_an_early_move_is_refused(tmp_path: Path, move: tuple[str, str], message: str) -> None:
    directory = emitted(tmp_path)
    what, before = (text.replace("(", r"\(") for text in move)
    moved(directory, what, before)
    with pytest.raises(ProgramError, match=message):
        zerofx.load_program(directory)


EDITS = [
    ("def forward", r"all_gather\(shard_2,", "all_gather(shards[2],", "it is kept off the device"),
    ("def forward", r"all_gather\(shard_2,", "all_gather(shard_3,", "reads|sends|shard_3"),
    ("def forward", r"all_gather\(shard_2,", "all_gather(reload_2,", "not waited for"),
    ("def forward", r"reload_shard\(shards\[2\]", "reload_shard(shards[3]", "not its shard"),
    ("def backward", r"offload_grad\(reduced_2,", "offload_grad(reduced_3,", "bucket"),
]


@pytest.mark.parametrize(("where", "pattern", "new", "message"), EDITS, ids=lambda v: str(v)[:24])
def test_a_harmful_edit_is_refused(
    tmp_path: Path, where: str, pattern: str, new: str, message: str
) -> None:
    directory = emitted(tmp_path)
    edited(directory, pattern, new, where)
    with pytest.raises(ProgramError, match=message):
        zerofx.load_program(directory)


# -- runs ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("plan", CHOICES)
def test_the_schedule_runs_standalone(tmp_path: Path, plan: dict[str, Any]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(zerofx.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(emitted(tmp_path, **plan) / "schedule.py")],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "forward returned []" in done.stdout and "backward reduced" in done.stdout


def trained(plan: dict[str, Any], by_graphs: bool = False, adopted: bool = False) -> list[Tensor]:
    """Return what three steps leave, from the emitted schedule, its graphs, or a read directory."""
    model = compiled("gpt", plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch_loss(model, "gpt", 0)
    if by_graphs:
        interpret(model)
    if adopted:
        directory = os.environ["ZEROFX_TEST_PROGRAM"] + os.environ.get("RANK", "0")
        model.adopt(str(model.programs[0].emit(directory)))
    found = []
    for step in range(3):
        batch_loss(model, "gpt", step).backward()
        found += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return found + list(model.state_dict().values())


@pytest.mark.parametrize("plan", CHOICES)
def test_graphs_run_as_the_emitted_schedule_does(plan: dict[str, Any]) -> None:
    first, second = (trained(plan, by_graphs=g) for g in (False, True))
    assert all(map(torch.equal, first, second))


def train_adopted(directory: str) -> bool:
    os.environ["ZEROFX_TEST_PROGRAM"] = directory
    return all(
        map(torch.equal, trained({"offload": BOTH}), trained({"offload": BOTH}, adopted=True))
    )


def test_a_read_program_trains_as_the_compiled_one(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, train_adopted, str(tmp_path / "rank")) == [True, True]


def test_a_program_for_other_homes_is_refused() -> None:
    """The layouts are equal but for where the buckets live."""
    model = zerofx.compile(CASES["gpt"].make(), {"offload": OPTIMIZER, "kernels": "aten"})
    batch_loss(model, "gpt", 0)
    other = zerofx.compile(CASES["gpt"].make(), {"kernels": "aten"})
    message = r"bucket 0 \(\S+\) lives on the host and is gathered from the device, the model's on "
    with pytest.raises(ProgramError, match=message + "the device and from the device"):
        other.adopt(model.programs[0])
