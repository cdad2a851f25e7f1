"""pipeline.py: the moves of a pipeline's rank are text, which is proved and runs as edited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.codegen.moves import read_moves, render_moves
from zerofx.errors import PlanError, ProgramError
from zerofx.ir.program import Planned
from zerofx.ir.verify import verify_stages
from zerofx.model.programs import Steps

ONE_BY_ONE = {"pipeline": 2, "micro_batches": 3}
INTERLEAVED = {"pipeline": 2, "schedule": "interleaved", "interleave": 2, "micro_batches": 4}
ZERO_BUBBLE = {"pipeline": 2, "schedule": "zero-bubble", "micro_batches": 3}


class Skipping(nn.Module):
    """Its last lines read what its first one makes, which therefore skips stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        return (x + first).square().mean()


def stages(parallel: dict[str, object]) -> list[Planned]:
    captured = zerofx.capture(Skipping(), (torch.randn(2, 4),))
    plan = zerofx.Plan(stage=3, kernels="aten", parallel=parallel)
    num = plan.parallel.num_stages
    return [zerofx.rewrite(captured, plan, 4, position=p) for p in range(num)]


@pytest.mark.parametrize(
    "parallel",
    [ONE_BY_ONE, INTERLEAVED, ZERO_BUBBLE],
    ids=["1f1b", "interleaved", "zero-bubble"],
)
def test_stages_are_written_and_read_back(parallel: dict[str, object], tmp_path: Path) -> None:
    found = stages(parallel)
    written = [program.emit(tmp_path / str(i)) for i, program in enumerate(found)]
    assert [(d / "pipeline.py").exists() for d in written] == [i < 2 for i in range(len(found))]
    loaded = [zerofx.load_program(directory) for directory in written]
    verify_stages(loaded)
    verify_stages([loaded[0], *found[1:]])
    for before, after in zip(found, loaded, strict=True):
        assert after.stage.wires == before.stage.wires
        assert after.layout.own_buckets == before.layout.own_buckets
        assert render_moves(after) == render_moves(before)


def line(text: str, start: str) -> str:
    [found] = [x for x in text.splitlines(keepends=True) if x.strip().startswith(start)]
    return found


def without(start: str) -> Callable[[str], str]:
    return lambda text: text.replace(line(text, start), "")


def swapped(a: str, b: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        one, other = line(text, a), line(text, b)
        return text.replace(one, "?").replace(other, one).replace("?", other)

    return edit


F = "rt.forward(stage=0, micro_batch={})".format
B = "rt.backward(stage=0, micro_batch={}".format
SEND = 'rt.send("tanh", micro_batch={}, source=0, target=1)'.format


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (swapped(F(0), F(1)), "forward of micro-batch 0|sends|comes before the forward"),
        (without(SEND(1)), "send of tanh of micro-batch 1 from stage 0 to stage 1 is missing"),
        (swapped(SEND(0), SEND(1)), "comes before the forward that makes it"),
        (without(F(2)), "comes before the forward|its forward has not run"),
        (swapped(B(0), B(1)), "has not been begun to be received"),
        (lambda text: text.replace(", reduces=True", ""), "no backward of stage 0 reduces"),
        (
            lambda text: text.replace(B(1) + ")", B(1) + ", reduces=True)"),
            "gradients of stage 0 are reduced already",
        ),
        (lambda text: text.replace('"tanh"', '"tanh_7"', 1), "no value tanh_7 goes from stage 0"),
        (lambda text: text.replace(F(1), F(5)), "there are 3 micro-batches, counted from 0"),
        (lambda text: text.replace("rt.forward", "rt.foward", 1), "pipeline.py:.*AttributeError"),
        (lambda text: text.replace("MICRO_BATCHES = 3", ""), "MICRO_BATCHES or step is missing"),
    ],
)
def test_wrong_edits_are_refused(edit: Callable[[str], str], said: str, tmp_path: Path) -> None:
    directory = stages(ONE_BY_ONE)[0].emit(tmp_path / "stage")
    path = directory / "pipeline.py"
    before = path.read_text()
    path.write_text(edit(before))
    assert path.read_text() != before
    with pytest.raises(ProgramError, match=said) as caught:
        zerofx.load_program(directory)
    assert "pipeline.py" in str(caught.value)


GIVES = "rt.backward_input(stage=1, micro_batch={})".format
W = "rt.backward_weights(stage=1, micro_batch={}".format


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            swapped(GIVES(0), W(0)),
            "backward_weights of .* 0 .*: its backward_input has not",
        ),
        (without(W(1)), "backward_weights of micro-batch 1 in stage 1 is missing"),
        (without(GIVES(1)), "comes before the backward that makes it"),
        (lambda text: text.replace(W(1), W(0)), "backward_weights of .* 0 .*: it runs twice"),
        (lambda text: text.replace(GIVES(1), GIVES(0)), "backward_input of .* 0 .*: it runs twice"),
        (lambda text: text.replace(", reduces=True", ""), "no backward of stage 1 reduces"),
        (
            lambda text: text.replace(W(1) + ")", W(1) + ", reduces=True)"),
            "gradients of stage 1 are reduced already",
        ),
        (
            lambda text: text.replace(GIVES(0), GIVES(0).replace("_input", "")),
            "backward of micro-batch 0 .*: the schedule has forward, backward_input, backward_wei",
        ),
        (
            swapped(W(0), "rt.forward(stage=1, micro_batch=2)"),
            "3 micro-batches would be under way there, 2 others of them waiting for gradients of "
            "weights, and memory is counted for 2",
        ),
    ],
)
def test_wrong_edits_of_zero_bubble_are_refused(
    edit: Callable[[str], str], said: str, tmp_path: Path
) -> None:
    directory = stages(ZERO_BUBBLE)[1].emit(tmp_path / "stage")
    path = directory / "pipeline.py"
    before = path.read_text()
    path.write_text(edit(before))
    assert path.read_text() != before
    with pytest.raises(ProgramError, match=said):
        zerofx.load_program(directory)


def test_gradients_of_weights_may_come_earlier(tmp_path: Path) -> None:
    """It is what 1f1b does, and holds less; later ones would hold more than is counted."""
    directory = stages(ZERO_BUBBLE)[1].emit(tmp_path / "stage")
    path = directory / "pipeline.py"
    text = path.read_text()
    first, weights = line(text, GIVES(0)), line(text, W(0))
    path.write_text(text.replace(weights, "").replace(first, first + weights))
    program = zerofx.load_program(directory)
    found = read_moves(program, path.read_text())
    runs = [(m.verb, m.micro_batch) for m in found if m.hop is None]
    assert runs[:3] == [("forward", 0), ("backward_input", 0), ("backward_weights", 0)]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("yield rt.pause(args)", "rt.pause(args)", "backward gives a NoneType, and not the list"),
        ("yield rt.pause(args)", "return args", "is never reduced"),
        ("yield rt.pause(args)", "yield args\n    yield rt.pause(args)", "backward yields twice"),
    ],
)
def test_a_backward_that_does_not_pause_is_refused(
    before: str, after: str, said: str, tmp_path: Path
) -> None:
    directory = stages(ZERO_BUBBLE)[1].emit(tmp_path / "stage")
    path = directory / "schedule.py"
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))
    with pytest.raises(ProgramError, match=said):
        zerofx.load_program(directory)


def test_what_other_ranks_need_in_another_order_is_refused() -> None:
    """Each rank alone would be right; together they would receive each other's values wrongly."""
    program = stages(ONE_BY_ONE)[0]
    text = render_moves(program)
    sends = [x for x in text.splitlines(keepends=True) if "rt.send" in x and "micro_batch=1," in x]
    first, second = sends
    turned = text.replace(first + second, second + first)
    assert turned != text
    with pytest.raises(ProgramError, match=r"rank 1 of the pipeline would receive .* number 3"):
        read_moves(program, turned)


def test_more_micro_batches_under_way_than_memory_is_counted_for_are_refused() -> None:
    """1f1b keeps two under way in the first of two stages; gpipe's order would keep three."""
    program, *_ = stages(ONE_BY_ONE)
    other, *_ = stages({**ONE_BY_ONE, "schedule": "gpipe"})
    with pytest.raises(ProgramError, match="3 micro-batches would be under way there, and memory"):
        read_moves(program, render_moves(other))


def test_lines_may_be_moved_and_what_runs_is_the_file(tmp_path: Path) -> None:
    directory = stages(ONE_BY_ONE)[0].emit(tmp_path / "stage")
    path = directory / "pipeline.py"
    receive, forward = (x for x in (line(path.read_text(), F(1)), "    rt.is_edited = True\n"))
    path.write_text(path.read_text().replace(receive, forward + receive))
    program = zerofx.load_program(directory)

    class Runtime:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: self.calls.append(name)

    runtime = Runtime()
    Steps(program)(3)(runtime)
    assert runtime.is_edited is True
    assert runtime.calls.count("forward") == runtime.calls.count("backward") == 3
    with pytest.raises(PlanError, match="is for 3 micro-batches, and the batch is cut into 6"):
        Steps(program)(6)


# -- a loss that the caller computes ---------------------------------------------------------------
def outside() -> list[Planned]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    captured = zerofx.capture(model, (torch.randn(2, 4),))
    parallel = {"pipeline": 2, "schedule": "gpipe", "micro_batches": 3}
    plan = zerofx.Plan(stage=3, kernels="aten", parallel=parallel)
    return [zerofx.rewrite(captured, plan, 4, position=p) for p in range(2)]


def test_a_step_waits_for_the_caller_between_forward_and_backward(tmp_path: Path) -> None:
    for position, program in enumerate(outside()):
        text = render_moves(program)
        lines = [x.strip() for x in text.partition("def step(rt):")[2].splitlines() if x.strip()]
        before, after = lines[: lines.index("yield")], lines[lines.index("yield") + 1 :]
        assert sum(x.startswith("rt.forward(") for x in before) == 3
        assert sum(x.startswith("rt.backward(") for x in after) == 3
        assert not any(x.startswith("rt.backward(") for x in before)
        assert len(read_moves(program, text)) == len(lines) - 1
        directory = program.emit(tmp_path / str(position))
        assert render_moves(zerofx.load_program(directory)) == text


def moved_up(text: str) -> str:
    return text.replace("    yield\n", "").replace("    rt.", "    yield\n    rt.", 1)


def moved_down(text: str) -> str:
    return text.replace("    yield\n", "").rstrip("\n") + "\n    yield\n"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda text: text.replace("    yield\n", ""), "it has 0 times yield"),
        (
            lambda text: text.replace("    yield\n", "    yield\n    yield\n"),
            "it has 2 times yield",
        ),
        (moved_up, "of stage 0.* comes after yield|in stage 0: it comes after yield"),
        (moved_down, "it comes before yield, where the caller computes the loss"),
    ],
)
def test_a_wait_at_a_wrong_place_is_refused(edit: Callable[[str], str], said: str) -> None:
    program = outside()[0]
    with pytest.raises(ProgramError, match=said):
        read_moves(program, edit(render_moves(program)))


def test_a_step_whose_loss_is_inside_waits_for_nothing() -> None:
    program = stages(ONE_BY_ONE)[0]
    text = render_moves(program)
    with pytest.raises(ProgramError, match="it has a yield, but forward returns the loss"):
        read_moves(program, text + "    yield\n")
