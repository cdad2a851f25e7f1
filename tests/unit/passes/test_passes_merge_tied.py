"""merge-tied: one placeholder and one gradient for every tied parameter."""

from __future__ import annotations

import torch
from oracle_cases import Choice, captured, captured_inference
from passes_compact import pass_named, run

from zerofx.ir.meta import Role, info
from zerofx.passes.merge_tied import MergeTied


def names(program: object, role: Role) -> list[str]:
    return [info(n).name for n in program.placeholders("joint", role)]  # type: ignore[attr-defined]


def gradients(program: object) -> list[str]:
    return [s.name for s in program.outputs["joint"] if s.role is Role.GRAD]  # type: ignore[attr-defined]


def test_two_names_become_one() -> None:
    before = captured("gpt")
    assert before.params["embed.weight"].aliases == ("head.weight",)
    assert {"embed.weight", "head.weight"} <= set(gradients(before))

    after = run(before, MergeTied())

    assert names(after, Role.PARAM) == [n for n in names(before, Role.PARAM) if n != "head.weight"]
    assert gradients(after) == [n for n in gradients(before) if n != "head.weight"]


def test_the_gradient_is_the_sum_of_both() -> None:
    after = run(captured("gpt"), MergeTied())
    at = next(i for i, s in enumerate(after.outputs["joint"]) if s.name == "embed.weight")
    total = after.results("joint")[at]
    assert total.target is torch.ops.aten.add.Tensor
    assert total.meta["val"].shape == (32, 16)


def test_nothing_tied_nothing_changed() -> None:
    program = captured("convnet")
    report = MergeTied().run(program.clone())
    assert not report.changed
    assert report.summary == "0 tied names merged"


def test_inference_programs_have_no_gradients_to_merge() -> None:
    before = captured_inference("gpt")
    after = run(before, MergeTied())
    tied = [n for n in after.placeholders("forward", Role.PARAM) if info(n).name == "embed.weight"]
    assert len(tied) == 1
    assert len(tied[0].users) == 2, "the embedding and the head read one placeholder"


def test_declared() -> None:
    assert pass_named(Choice(3), "merge-tied") == MergeTied()
