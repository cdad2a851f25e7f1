"""Edited directories train: adopted by a model on 2 real ranks, bit for bit as compiled."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from edits import Source
from edits_harmful import math_changed, released_before_its_last_reader
from edits_harmless import HARMLESS, prefetched_further, statements_split
from models import CASES
from pool import Pool
from torch import Tensor
from verify_cases import SMALL, emitted, program

import zerofx
from zerofx.errors import ProgramError

GPT = CASES["gpt"]


def compiled(**plan: Any) -> zerofx.CompiledModule:
    model = zerofx.compile(GPT.make(), {"stage": 3, **SMALL, **plan})
    model._engine.slots.poison = True
    return model


def train(model: zerofx.CompiledModule, optimizer: torch.optim.Optimizer, steps: range) -> None:
    rank = int(os.environ.get("RANK", "0"))
    for step in steps:
        args, _ = GPT.batch(10 * step + rank)
        model(*args).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(model: zerofx.CompiledModule) -> dict[str, Tensor]:
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(3))
    return model.state_dict()


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def start_weights() -> dict[str, Tensor]:
    return {name: p.detach() for name, p in GPT.make().named_parameters()}


# -- on the ranks -------------------------------------------------------------------------------
def run_edited(directories: list[str]) -> list[list[str]]:
    """Return, for each directory, which parameters differ after training with it."""
    base = compiled()
    base(*GPT.batch(0)[0])  # compiled once: its copies share the program
    expected = trained(copy.deepcopy(base))
    assert differences(expected, {**expected, **start_weights()}), "nothing was learnt"
    found = []
    for directory in directories:
        model = copy.deepcopy(base)
        model._engine.slots.poison = True
        model.adopt(directory)
        found.append(differences(trained(model), expected))
        assert [str(p.directory) for p in model.programs] == [str(Path(directory).resolve())]
    return found


def adopt_between_steps(directory: str, broken: str) -> None:
    """A refused directory changes nothing; an accepted one takes over from the next call."""
    model, other = compiled(), compiled()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    for m, optimizer in zip((model, other), optimizers, strict=True):
        train(m, optimizer, range(1))
    with pytest.raises(ProgramError, match="after its release"):
        model.adopt(broken)
    assert model.programs[0].directory is None
    model.adopt(directory)
    for m, optimizer in zip((model, other), optimizers, strict=True):
        train(m, optimizer, range(1, 3))
    assert not differences(model.state_dict(), other.state_dict())
    model.eval()
    with torch.no_grad():
        model(*GPT.batch(7)[0])
    assert [p.directory is not None for p in model.programs] == [True, False]


def adopt_a_program(directory: str) -> None:
    """A Program made by `rewrite` for another stage of the same layout is adopted as well."""
    ahead = program("gpt", 2, prefetch=3, memory_budget=1 << 30)
    model = compiled()
    model.adopt(ahead)
    assert not differences(trained(model), trained(compiled()))
    assert len(model.programs) == 1 and model.programs[0].plan == ahead.plan


def refuse_what_does_not_fit(directory: str) -> None:
    with pytest.raises(ProgramError, match=r"does not fit this model: .*bucket"):
        compiled(bucket_bytes=1 << 20).adopt(directory)
    with pytest.raises(ProgramError, match=r"it is for 4 ranks, this model runs on 2"):
        compiled().adopt(program("gpt", 4))
    with pytest.raises(ProgramError, match=r"shards over 2 ranks and replicates over 1, the model"):
        compiled(stage=0).adopt(directory)
    with pytest.raises(ProgramError, match="holds no emitted program"):
        compiled().adopt(directory + "/nowhere")


def changed_math(directory: str) -> None:
    """Other mathematics is refused unless it is meant, and then it is what runs."""
    model = compiled()
    with pytest.raises(ProgramError, match="does not compute what was captured"):
        model.adopt(directory)
    model.adopt(directory, allow_changed_math=True)
    assert differences(trained(model), trained(compiled()))


def run_compiled(directory: str) -> list[str]:
    """Edited regions are compiled by Inductor as any others."""
    model = compiled(kernels="inductor")
    model.adopt(directory)
    return differences(trained(model), trained(compiled(kernels="inductor")))


# -- the tests ----------------------------------------------------------------------------------
def test_ten_harmless_edits_train_as_before(pool: Pool, tmp_path: Path) -> None:
    names, directories = [], []
    for edit in HARMLESS:
        directory = emitted(tmp_path / edit.__name__)
        edit(directory)
        names.append(edit.__name__)
        directories.append(str(directory))
    assert len(names) >= 10
    for found in pool.run(2, run_edited, directories):
        assert dict(zip(names, found, strict=True)) == {name: [] for name in names}


def test_adopting_between_steps(pool: Pool, tmp_path: Path) -> None:
    directory, broken = emitted(tmp_path / "good"), emitted(tmp_path / "broken")
    prefetched_further(directory)
    released_before_its_last_reader(broken)
    pool.run(2, adopt_between_steps, str(directory), str(broken))


def test_adopting_a_program(pool: Pool) -> None:
    pool.run(2, adopt_a_program, "")


def test_what_does_not_fit_is_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, refuse_what_does_not_fit, str(emitted(tmp_path)))


def test_changed_math_runs_if_allowed(pool: Pool, tmp_path: Path) -> None:
    directory = emitted(tmp_path)
    math_changed(directory)
    pool.run(2, changed_math, str(directory))


@pytest.mark.slow
def test_edited_regions_are_compiled(pool: Pool, tmp_path: Path) -> None:
    directory = emitted(tmp_path, kernels="inductor")
    statements_split(directory)
    source = Source(directory, "regions/blocks_forward.py")
    source.lines = [line for line in source.lines if not line.startswith("    del ")]
    source.write()
    assert pool.run(2, run_compiled, str(directory), timeout_s=400) == [[], []]
