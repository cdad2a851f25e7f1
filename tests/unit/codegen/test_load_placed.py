"""Programs whose values are cut over ranks come back from their text, with their placements."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from placed_edits import joined_twice, launched_later, waited_for_at_once
from tensor_models import MODELS, batch
from test_load import shape_of

import zerofx
from zerofx.codegen.emit import render
from zerofx.codegen.load import check_wires
from zerofx.codegen.placed_calls import NAME
from zerofx.errors import ProgramError
from zerofx.hardware import hardware_for
from zerofx.ir.program import FORWARD, Planned
from zerofx.ir.verify import verify, verify_stages
from zerofx.passes.order import Setting
from zerofx.passes.pipeline import run
from zerofx.plan.plan import Plan

RING = {"attention": "ring"}
SEQUENCE = {"tensor": 2, "sequence": True}


def planned(name: str, parallel: dict[str, Any], world: int, **more: Any) -> Planned:
    torch.manual_seed(0)
    program = zerofx.capture(MODELS[name](), (), batch(name), outputs="loss")
    plan = Plan(**{"parallel": parallel, "kernels": "aten", "stage": 3} | more)
    return run(program, Setting(plan, world, hardware_for("cpu", None)))


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a fresh copy of a directory, which is emitted once."""
    folder = tmp_path_factory.mktemp("emitted")
    whole = {"placements": {"wte": "whole", "head": "whole"}}  # edits are of the blocks
    plans: dict[str, Any] = {"blocks": {"tensor": 2} | whole, "sequence": SEQUENCE | whole}

    def copy(name: str) -> Path:
        first = folder / name
        if not first.exists():
            planned("blocks", plans[name], 2).emit(first)
        number = len(list(folder.iterdir()))
        return Path(shutil.copytree(first, folder / f"{name}-{number}"))

    return copy


def comes_back(program: Planned, folder: Path) -> Planned:
    """Load an emitted program, and compare it node for node; constants come first in files."""
    for gm in program.graphs.values():
        first = next(node for node in gm.graph.nodes if node.op != "placeholder")
        for node in [n for n in gm.graph.nodes if n.op == "get_attr" and n is not first]:
            first.prepend(node)
    program.emit(folder)
    loaded = zerofx.load_program(folder)
    if "ring" not in program.plan.parallel.attention:  # whose results are taken out in any order
        for mine, theirs in zip(_calls(loaded), _calls(program), strict=True):
            assert mine == theirs
    held = {n: replace(p, positions=(0,)) for n, p in program.params.items()}
    assert loaded.params == held and loaded.layout == program.layout
    assert loaded.stage == program.stage and loaded.outputs == program.outputs
    before, after = render(program), render(loaded)
    for name in before:
        if name not in ("schedule.py", "fingerprint.json"):  # lines of user code are not in these
            assert after[name] == before[name], name
    said = [re.findall(r"rt\.(\w+)\(", text["schedule.py"]) for text in (before, after)]
    assert said[0] == said[1]
    return loaded


def _calls(program: Planned) -> list[tuple[Any, ...]]:
    """Return what nodes are, without whether the user's line is known; regions in their order."""
    found = []
    for graph in shape_of(program).values():
        numbers: dict[int | None, int] = {}
        for *what, region, is_random, phase, _ in graph:
            order = numbers.setdefault(region, len(numbers))
            found.append((*what, order, is_random, phase))
    return found


@pytest.mark.parametrize(
    ("name", "parallel", "world"),
    [
        ("blocks", {"tensor": 2}, 2),
        ("blocks", SEQUENCE, 4),
        ("gpt2", {"tensor": 4, "sequence": True}, 4),
        ("blocks", {"tensor": 2, "context": 2}, 4),
        pytest.param("llama", SEQUENCE, 4, marks=pytest.mark.slow),
        pytest.param("t5", {"tensor": 2}, 2, marks=pytest.mark.slow),
        pytest.param("mixtral", {"tensor": 2}, 2, marks=pytest.mark.slow),
        ("mixture", {"tensor": 2, "placements": {"*.up": "experts", "*.down": "experts"}}, 2),
        pytest.param("mixtral", {"tensor": 2, "experts": True}, 4, marks=pytest.mark.slow),
        pytest.param("dropout", SEQUENCE, 2, marks=pytest.mark.slow),
        pytest.param("llama", {"context": 2}, 2, marks=pytest.mark.slow),
        pytest.param("grouped", {"context": 2} | RING, 4, marks=pytest.mark.slow),
        pytest.param("llama", {"tensor": 2, "context": 2} | RING, 4, marks=pytest.mark.slow),
        pytest.param("gpt2", SEQUENCE | {"context": 2}, 8, marks=pytest.mark.slow),
    ],
)
def test_what_was_emitted_comes_back(
    tmp_path: Path, name: str, parallel: dict[str, Any], world: int
) -> None:
    verify(comes_back(planned(name, parallel, world), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("context", "lies"), [(1, "S(1)"), (2, "S(1) of S(1)")])
def test_stages_of_a_pipeline_come_back(tmp_path: Path, context: int, lies: str) -> None:
    """Two stages over two ranks each, or four: what one sends is what the other receives."""
    torch.manual_seed(0)
    captured = zerofx.capture(MODELS["llama"](), (), batch("llama"), outputs="loss")
    parallel = SEQUENCE | {"pipeline": 2, "context": context}
    plan = Plan(parallel=parallel, kernels="aten", stage=1)
    loaded = []
    for position in range(2):
        program = zerofx.rewrite(captured, plan, 4 * context, position=position)
        made = comes_back(program, tmp_path / str(position))
        assert made.stage.wires and {str(w.lies) for w in made.stage.wires} == {lies}
        loaded.append(made)
    verify_stages(loaded)


@pytest.mark.parametrize("edit", [waited_for_at_once, launched_later], ids=lambda e: e.__name__)
def test_collectives_of_values_may_move(emitted: Any, edit: Any) -> None:
    directory = emitted("blocks")
    edit(directory, FORWARD)
    loaded = zerofx.load_program(directory)
    assert loaded.history[-1].summary == "edited: schedule.py"
    verify(loaded)


def left_out(text: str) -> str:
    value = text.partition("rt.reduce_values(")[2].partition(",")[0]
    text = text.replace("rt.wait(sum_0)", value, 1)
    rows = text.splitlines(keepends=True)
    gone = ("sum_0 = ", f"del {value}\n")
    first = [next(i for i, row in enumerate(rows) if row.strip("\n ").startswith(g.strip()))
             for g in gone]  # fmt: skip
    return "".join(row for i, row in enumerate(rows) if i not in first)


def read_as_a_sum(text: str) -> str:
    """Give the next region the summand, and wait for the sum, which nothing reads."""
    value = text.partition("rt.reduce_values(")[2].partition(",")[0]
    text = text.replace(f"    del {value}\n", "", 1)
    before, wait, after = text.partition("rt.wait(sum_0)")
    return before + wait + after.replace(f"{value}_sum", value, 1)


@pytest.mark.parametrize(
    ("name", "edit", "said"),
    [
        ("blocks", left_out, "cannot give|reads .* P"),
        ("blocks", joined_twice, "it takes summands"),
        ("blocks", read_as_a_sum, "cannot give|reads .* P"),
        (
            "blocks",
            lambda t: t.replace("axis='tensor'", "axis='shard'", 1),
            "over the axis 'shard'",
        ),
        ("sequence", lambda t: t.replace("dim=1, groups=1", "dim=0, groups=1", 1), r"\.py:\d+:"),
        ("sequence", lambda t: t.replace("dim=0, groups=2", "dim=0, groups=1", 1), "it gathers"),
    ],
    ids=["left out", "doubled", "summand read", "other axis", "other dim", "other groups"],
)
def test_wrong_collectives_are_refused(emitted: Any, name: str, edit: Any, said: str) -> None:
    """Each with the lines of the schedule around it."""
    directory = emitted(name)
    path = directory / "schedule.py"
    text = path.read_text()
    path.write_text(edit(text))
    assert path.read_text() != text
    with pytest.raises(ProgramError, match=said) as caught:
        zerofx.load_program(directory)
    assert re.search(r"(schedule|regions/\w+)\.py:\d+", str(caught.value))
    assert "\n> " in str(caught.value)


def changed(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / NAME
    said = json.loads(path.read_text())
    change(said)
    path.write_text(json.dumps(said))


def swap_groups(said: dict[str, Any]) -> None:
    """Say that a view of a part of one dimension is of another whole."""
    row = next(r for r in said["calls"] if r["call"] == "aten.mm.default")
    row["shape"][1] *= 2


def say_same(said: dict[str, Any]) -> None:
    row = next(r for r in said["calls"] if r["call"] == "aten.view.default" and not r["is_same"])
    row["is_same"] = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda said: said["calls"].clear(), "and nothing says how"),
        (swap_groups, "has shape"),
        (say_same, "is said to copy"),
        (lambda said: said["parts"].clear(), "schedule.py:|does not fit"),
        (lambda said: said.pop("wires"), "is damaged: wires is missing"),
        (lambda said: said["calls"][0].update(gives="S(x)"), r"is damaged: calls\[0\].gives"),
        (lambda said: said["calls"][0]["whole"].__setitem__(0, "aten.no.such"), "no operator here"),
        (lambda said: said["calls"][0].update(args={"self": {"what": 1}}), "nothing says how"),
    ],
    ids=["no calls", "shape", "same", "no parts", "no wires", "gives", "operator", "argument"],
)
def test_nothing_that_the_file_says_is_trusted(emitted: Any, change: Any, message: str) -> None:
    directory = emitted("blocks")
    changed(directory, change)
    with pytest.raises(ProgramError, match=message):
        zerofx.load_program(directory)


def test_a_stage_lies_as_the_others_send(tmp_path: Path) -> None:
    """One stage's proof takes what it is sent as given: only the other stages know how it lies."""
    captured = zerofx.capture(MODELS["blocks"](), (), batch("blocks"), outputs="loss")
    plan = Plan(parallel={"tensor": 2, "pipeline": 2}, kernels="aten", stage=1)
    program = zerofx.rewrite(captured, plan, 4, position=1)
    program.emit(tmp_path)
    check_wires(zerofx.load_program(tmp_path), program)
    file, text = tmp_path / NAME, tmp_path / "schedule.py"
    rows = json.loads(file.read_text())
    rows["wires"][0][0] = "P"
    file.write_text(json.dumps(rows))
    value = re.findall(r"(from_0_\w+) = inputs", text.read_text())[0]
    first = re.search(rf"^    args = \[.*{value}.*\n", text.read_text(), re.MULTILINE)
    assert first is not None
    summed = (
        f"    summed = rt.reduce_values({value}, axis='tensor')\n    del {value}\n"
        f"    {value} = rt.wait(summed)\n    del summed\n"
    )
    text.write_text(text.read_text().replace(first[0], summed + first[0], 1))
    edited = zerofx.load_program(tmp_path)
    with pytest.raises(ProgramError, match="lies as P in it, and as R in the model's other stages"):
        check_wires(edited, program)


def test_a_directory_without_the_file_is_refused(emitted: Any) -> None:
    directory = emitted("blocks")
    (directory / NAME).unlink()
    with pytest.raises(ProgramError, match=r"placements.json is missing. Restore it"):
        zerofx.load_program(directory)
