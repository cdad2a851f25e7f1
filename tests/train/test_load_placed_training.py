"""Edited programs whose values are cut over ranks train the same bits as the compiled ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from placed_edits import joined_twice, launched_later, waited_for_at_once
from pool import Pool
from tensor_models import MODELS, batch
from torch import Tensor

import zerofx
from zerofx.errors import ProgramError
from zerofx.ir.program import BACKWARD, FORWARD

RECEIVE = "    rt.receive("


def trained(model: zerofx.CompiledModule, name: str) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        model(**batch(name, seed=10 * step + model.zerofx.data_rank)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(zerofx.full_state_dict(model, rank0_only=False))


def adopts(folder: str, name: str, plan: dict[str, Any]) -> list[list[str]]:
    """Return what differs after training as emitted, and with edits that keep the meaning."""
    torch.manual_seed(0)
    base = zerofx.compile(MODELS[name](), {"kernels": "aten", **plan})
    own = base.zerofx
    base(**batch(name, seed=own.data_rank))
    start = {k: v.clone() for k, v in zerofx.full_state_dict(base, rank0_only=False).items()}
    expected = trained(copy.deepcopy(base), name)
    assert any(not torch.equal(v, start[k]) for k, v in expected.items()), "nothing was learnt"
    found = []
    for number, edit in enumerate((None, waited_for_at_once, launched_later)):
        directory = base.programs[0].emit(f"{folder}/{number}-{own.world.rank}")
        if edit is not None:
            edit(directory, FORWARD if edit is launched_later else BACKWARD)
        path = directory / "pipeline.py"
        if edit is not None and path.exists():  # all that is received first
            head, step, lines = path.read_text().partition("def step(rt):\n")
            moves = sorted(lines.splitlines(True), key=lambda row: not row.startswith(RECEIVE))
            path.write_text(head + step + "".join(moves))
        model = copy.deepcopy(base)
        model.zerofx.adopt(directory)
        made = trained(model, name)
        assert [str(p.directory) for p in model.programs] == [str(directory.resolve())]
        found.append([k for k, v in expected.items() if not torch.equal(made[k], v)])
    path = directory / "schedule.py"
    if not plan["parallel"].get("sequence"):
        path.write_text(joined_twice(path.read_text()))
        with pytest.raises(ProgramError, match="it takes summands"):
            base.zerofx.adopt(directory)
    return found


@pytest.mark.parametrize(
    ("name", "ranks", "plan"),
    [
        ("blocks", 2, {"stage": 3, "parallel": {"tensor": 2}}),
        pytest.param(
            "gpt2", 4, {"stage": 3, "parallel": {"tensor": 2, "sequence": True}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama", 4, {"stage": 1, "parallel": {"tensor": 4}}, marks=pytest.mark.slow
        ),
        pytest.param(
            "llama", 4, {"stage": 1, "parallel": {"tensor": 2, "pipeline": 2, "micro_batches": 2}},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_moved_collectives_train_the_same_bits(
    pool: Pool, tmp_path: Path, name: str, ranks: int, plan: dict[str, Any]
) -> None:
    for found in pool.run(ranks, adopts, str(tmp_path), name, plan):
        assert found == [[], [], []]
