"""Reloading an emitted directory: as written, after harmless edits, refused after harmful ones."""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from edits import Edit, edited
from edits_harmful import HARMFUL, math_changed
from edits_harmless import HARMLESS
from torch import fx
from verify_cases import emitted, program

import zerofx
from zerofx import ops
from zerofx.codegen.emit import emit, render
from zerofx.errors import ProgramError
from zerofx.ir.graphs import COMMUTATIVE
from zerofx.ir.meta import Role, info
from zerofx.ir.program import BACKWARD, FORWARD, Planned, Unproved
from zerofx.plan.parts import Offload

CASES: list[tuple[str, int, bool, dict[str, Any]]] = [
    ("gpt", 2, True, {}),
    ("gpt", 4, True, {"shard_axis_size": 2, "activations": 0.5}),
    ("gpt", 2, True, {"memory_budget": 1 << 30, "prefetch": 2}),
    ("gpt", 1, True, {}),
    ("gpt", 2, False, {}),
    ("gpt-dropout", 2, True, {"stage": 1}),
    ("adapters", 2, True, {"stage": 2}),
    ("convnet", 2, True, {}),
    ("convnet", 2, False, {"stage": 0}),
    ("branches", 4, True, {"stage": 0}),
    ("stage", 2, True, {}),
    ("lstm", 2, True, {}),
    ("binary", 2, True, {"stage": 2}),
    ("gpt", 2, True, {"offload": Offload(optimizer="cpu", parameters="cpu"), "precision": "bf16"}),
    ("gpt", 2, True, {"offload": Offload(optimizer="cpu", device_fraction=0.3)}),
    ("gpt", 1, True, {"stage": 1, "offload": Offload(optimizer="cpu"), "update": "in-backward"}),
]


def shape_of(p: Planned) -> dict[str, list[tuple[Any, ...]]]:
    """Return a program's nodes without their names."""
    found = {}
    for name, gm in p.graphs.items():
        position = {n: i for i, n in enumerate(gm.graph.nodes)}
        found[name] = [
            (n.op, str(n.target) if n.op == "call_function" else "", *_plain(n, position))
            for n in gm.graph.nodes
        ]
    return found


def _plain(node: fx.Node, position: dict[fx.Node, int]) -> tuple[Any, ...]:
    where = info(node)
    args = fx.node.map_arg((node.args, node.kwargs), lambda n: f"#{position[n]}")
    if node.target in COMMUTATIVE and len(node.args) == 2:  # an operand that is written over: first
        args = sorted(map(str, args[0])), args[1]
    # equal regions are one file, so that a line may be that of another layer
    kept = (where.role, where.region, where.is_random, where.phase, bool(where.line))
    return (str(args) if node.op != "placeholder" else where.name, *kept)


@pytest.mark.parametrize(("case", "world", "is_training", "plan"), CASES, ids=str)
def test_what_was_emitted_comes_back(
    tmp_path: Path, case: str, world: int, is_training: bool, plan: dict[str, Any]
) -> None:
    """Node for node, with roles, regions, the user's lines, layout and calling convention."""
    p = program(case, world, is_training, **plan)
    loaded = zerofx.load_program(emit(p, tmp_path / "p"))
    assert shape_of(loaded) == shape_of(p)
    assert loaded.outputs == p.outputs and loaded.params == p.params
    assert loaded.layout == p.layout and loaded.slot_bytes == p.slot_bytes and loaded.plan == p.plan
    assert loaded.reference == p.reference and loaded.signature == p.signature
    assert loaded.calling.differentiable == p.calling.differentiable
    assert loaded.calling.output_names == p.calling.output_names
    for name, gm in loaded.graphs.items():
        for mine, theirs in zip(gm.graph.nodes, p.graph(name).nodes, strict=True):
            a, b = mine.meta.get("val"), theirs.meta.get("val")
            if isinstance(a, torch.Tensor):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), mine


def test_emitting_what_was_loaded_gives_the_same_regions(tmp_path: Path) -> None:
    """Unchanged files compile to nothing new: their text is that of the first emission."""
    p = program()
    loaded = zerofx.load_program(emit(p, tmp_path / "p"))
    before, after = render(p), render(loaded)
    assert {k: v for k, v in after.items() if "regions" in k} == {
        k: v for k, v in before.items() if "regions" in k
    }


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu")])
def test_the_caller_s_modes_do_not_matter(tmp_path: Path, mode: Any) -> None:
    directory = emitted(tmp_path)
    expected = shape_of(zerofx.load_program(directory))
    with mode():
        assert shape_of(zerofx.load_program(directory)) == expected


@pytest.mark.parametrize("edit", HARMLESS, ids=lambda e: e.__name__)
def test_a_harmless_edit_loads(tmp_path: Path, edit: Edit) -> None:
    directory = emitted(tmp_path)
    edit(directory)
    loaded = zerofx.load_program(directory)
    assert loaded.history[-1].summary in (
        "edited: schedule.py",
        "edited: regions/blocks_forward.py",
    )


@pytest.mark.parametrize(("edit", "message"), HARMFUL, ids=lambda e: getattr(e, "__name__", ""))
def test_a_harmful_edit_is_refused(tmp_path: Path, edit: Edit, message: str) -> None:
    """With the invariant, and the lines of the file around the fault."""
    directory = emitted(tmp_path)
    edit(directory)
    with pytest.raises(ProgramError) as caught:
        zerofx.load_program(directory)
    text = str(caught.value)
    assert re.search(message, text), text
    marked = [line for line in text.split("\n") if line.startswith(">")]
    assert len(marked) == 1, text
    number, source = re.fullmatch(r"> +(\d+)  (.*)", marked[0]).groups()  # type: ignore[union-attr]
    named = re.search(r"^(.*\.py):(\d+):$", text, re.M)
    assert named is not None and named[2] == number
    lines = Path(named[1]).read_text().split("\n")
    assert lines[int(number) - 1] == source
    assert lines[max(0, int(number) - 2)] in text, "the lines around are shown"


def test_the_fault_is_shown_where_it_is(tmp_path: Path) -> None:
    """A released parameter: the marked line is the region call that reads it."""
    directory = emitted(tmp_path)
    HARMFUL[0][0](directory)
    with pytest.raises(ProgramError, match=r">\s+\d+\s+\) = blocks_forward\(args\)  # blocks.0\n"):
        zerofx.load_program(directory)


def test_changed_math_can_be_allowed(tmp_path: Path) -> None:
    directory = emitted(tmp_path)
    math_changed(directory)
    loaded = zerofx.load_program(directory, allow_changed_math=True)
    assert loaded.reference is Unproved.GIVEN_UP and loaded.signature == program().signature
    edited(directory, r"(rt.release\(full_2, slot=)\d", r"\g<1>1")
    with pytest.raises(ProgramError, match="gives back slot 1"):
        zerofx.load_program(directory, allow_changed_math=True)


# -- tensors that forward holds -----------------------------------------------------------------
class Holding(torch.nn.Module):
    """Reads tensors that are neither parameters nor buffers: made in forward, and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.plain = torch.randn(16, 16).t()  # base64, and transposed
        self.odd = torch.tensor([float("nan"), float("inf"), -0.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * torch.tensor([1.0, 2.0]).repeat(8) @ self.plain
        return x[torch.tensor([2, 0])].pow(2).sum() + torch.where(self.odd > 0, 1.0, 0.0).sum()


def test_constants_are_emitted_and_come_back(tmp_path: Path) -> None:
    plain, x = Holding(), torch.randn(4, 16)
    model = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(kernels="aten"))
    losses = [model(x), plain(x)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    grads = [m.linear.weight.grad for m in (model, plain)]
    assert torch.equal(*grads)
    directory = model.programs[0].emit(tmp_path / "p")
    text = (directory / "constants.py").read_text()
    assert "zfx.constant([1.0, 2.0], 'float32', (2,), (1,), 'cpu')" in text
    loaded = zerofx.load_program(directory)
    assert loaded.signature == model.programs[0].signature
    assert (emit(loaded, tmp_path / "q") / "constants.py").read_text() == text
    (directory / "constants.py").write_text(text.replace("[1.0, 2.0]", "[1.0, 3.0]"))
    with pytest.raises(
        ProgramError, match=r"does not compute what was captured: .*. Edited: const"
    ):
        zerofx.load_program(directory)


# -- files --------------------------------------------------------------------------------------
def test_a_directory_without_a_program(tmp_path: Path) -> None:
    with pytest.raises(
        ProgramError, match=r"holds no emitted program: fingerprint.json is missing"
    ):
        zerofx.load_program(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["schedule.py", "regions/blocks_forward.py", "plan.yaml"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    directory = emitted(tmp_path)
    (directory / name).unlink()
    with pytest.raises(ProgramError, match=rf"{name} is missing. Restore it, or write"):
        zerofx.load_program(directory)


@pytest.mark.parametrize(("keep", "message"), [
    (0.5, r"schedule.py:\d+|no function backward"),
    (0.0, "has no function forward: it is truncated"),
])  # fmt: skip
def test_a_truncated_schedule(tmp_path: Path, keep: float, message: str) -> None:
    path = emitted(tmp_path) / "schedule.py"
    text = path.read_text()
    path.write_text(text[: int(len(text) * keep)])
    with pytest.raises(ProgramError, match=message):
        zerofx.load_program(path.parent)


def test_a_truncated_region(tmp_path: Path) -> None:
    path = emitted(tmp_path) / "regions" / "blocks_forward.py"
    path.write_text(path.read_text()[:200])
    with pytest.raises(ProgramError, match=r"blocks_forward.py(:\d+: | has no function)"):
        zerofx.load_program(path.parents[1])


def test_a_truncated_fingerprint(tmp_path: Path) -> None:
    path = emitted(tmp_path) / "fingerprint.json"
    path.write_text(path.read_text()[:500])
    with pytest.raises(ProgramError, match=r"cannot be read: it is truncated or not JSON"):
        zerofx.load_program(path.parent)


@pytest.mark.parametrize(("change", "message"), [
    ({"format": 99}, r"is of format 99. This zerofx reads \d+. Emit the program again"),
    ({"layout": None}, r"fingerprint.json is damaged: layout is missing"),
])  # fmt: skip
def test_a_foreign_fingerprint(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = emitted(tmp_path) / "fingerprint.json"
    facts = json.loads(path.read_text())
    facts = {k: v for k, v in {**facts, **change}.items() if v is not None}
    path.write_text(json.dumps(facts))
    with pytest.raises(ProgramError, match=message):
        zerofx.load_program(path.parent)


def test_versions_and_edited_plans_are_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = emitted(tmp_path)
    path = directory / "fingerprint.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "torch": "1.0.0"}))
    (directory / "plan.yaml").write_text((directory / "plan.yaml").read_text() + "# mine\n")
    with caplog.at_level(logging.WARNING, "zerofx"):
        zerofx.load_program(directory)
    assert "was emitted with torch 1.0.0" in caplog.text
    assert "plan.yaml was edited, but the schedule is not regenerated" in caplog.text


def test_an_edit_within_the_same_second_is_seen(tmp_path: Path) -> None:
    """No cached bytecode stands between the file and what is loaded."""
    directory = emitted(tmp_path)
    zerofx.load_program(directory)
    edited(directory, r"(rt.release\(full_2, slot=)0", r"\g<1>1")
    with pytest.raises(ProgramError, match="gives back slot 1"):
        zerofx.load_program(directory)
    assert not list(directory.rglob("__pycache__"))


def test_an_edited_schedule_has_other_collectives_only_if_it_says_so(tmp_path: Path) -> None:
    directory = emitted(tmp_path)
    edited(directory, r"(gather_2 = .*slot=)\d", r"\g<1>-1")
    edited(directory, r"(rt.release\(full_2, slot=)\d", r"\g<1>-1")
    loaded = zerofx.load_program(directory)
    launch = next(
        n for n in loaded.graph(FORWARD).nodes if n.target is ops.all_gather and n.args[1] == 2
    )
    assert len(launch.args) == 3, "a slot was given up"
    assert [info(n).index for n in loaded.placeholders(BACKWARD, Role.SAVED)] == list(
        range(len(loaded.placeholders(BACKWARD, Role.SAVED)))
    )
