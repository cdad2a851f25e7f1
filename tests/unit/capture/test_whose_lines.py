"""Whose code a frame is of: the user's, the demo's, torch's or zerofx's own."""

from __future__ import annotations

from pathlib import Path

import torch

from zerofx.capture import capture, lines
from zerofx.comm import world
from zerofx.ir.meta import info
from zerofx.ir.program import JOINT
from zerofx.kernels import recurrent
from zerofx.model import programs
from zerofx.runtime import engine
from zerofx.tools import targets
from zerofx.tools.demo import gpt


def test_what_is_between_the_user_and_torch_is_no_user_file() -> None:
    folders = [Path(name) for name in (*lines._BETWEEN, lines._DEMO)]
    assert [folder for folder in folders if not folder.is_dir()] == []
    for module in (lines, recurrent, world, engine, torch):
        assert not lines.is_user_file(str(module.__file__))
    assert lines.is_user_file(__file__) and lines.is_user_file(str(gpt.__file__))


def test_the_demo_raises_as_a_model_does_and_the_compiler_does_not() -> None:
    for source, is_model in ((__file__, True), (gpt.__file__, True), (programs.__file__, False)):
        try:
            exec(compile("1 / 0", str(source), "exec"))
        except ZeroDivisionError as error:
            assert lines.is_raised_by_model(error.__traceback__) is is_model, source


def test_nodes_of_a_recurrent_layer_have_the_line_of_the_model() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = torch.nn.GRU(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0].sum()

    graph = capture(Model(), (torch.randn(2, 3, 4),), {}).graph(JOINT)
    found = {info(n).line for n in graph.nodes if n.op == "call_function"} - {""}
    assert {line.partition(":")[0] for line in found} == {Path(__file__).name}


def test_a_command_line_model_is_the_users_and_the_package_is_not() -> None:
    assert targets._is_own(__file__)
    assert not any(targets._is_own(str(m.__file__)) for m in (programs, engine, targets, torch))
