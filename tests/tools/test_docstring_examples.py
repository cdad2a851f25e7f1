"""Each public name has an example in its docstring, and each example runs as it is printed."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx

# Names that are modules: the object in them that is called, or whose use they show.
WITHIN = {"capture": "capture.capture", "nvme": "nvme.File"}
SLOW = {"search", "Machine"}  # a hundred plans; Hardware by its former name
PLAIN = {"capture", "rewrite"}  # `model` in their examples is not compiled

MODEL = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, (torch.zeros(8, 16),), {}
"""


class MyModel(nn.Module):
    """The reader's own model: it returns its loss, and can generate."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(x)).flatten(0, 1), y.flatten())

    def generate(self, tokens: Tensor, num: int) -> Tensor:
        for _ in range(num):
            following = self.head(self.embed(tokens[:, -1])).argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens


def documented(name: str) -> Any:
    """Return the object whose docstring has the example of a public name."""
    found: Any = zerofx
    for part in WITHIN.get(name, name).split("."):
        found = getattr(found, part)
    return found


def example(name: str) -> str:
    """Return the code of an example; "" if there is none."""
    doc = inspect.getdoc(documented(name)) or ""
    _, _, rest = doc.partition("Example:\n")
    code = textwrap.dedent(re.split(r"\n(?=\S)", rest)[0])
    return re.sub(r"^(?:>>>|\.\.\.) ?", "", code, flags=re.M)


class Given:
    """What examples take as given: a compiled model and all that a training loop has."""

    def __init__(self, is_plain: bool) -> None:
        torch.manual_seed(0)
        self.batches = [torch.randint(16, (2, 4, 5)) for _ in range(12)]
        self.x, self.y = self.batches[0]
        self.model: Any = MyModel()
        if not is_plain:
            self.model = zerofx.compile(self.model, zerofx.Plan(kernels="aten"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if not is_plain:
            self.train(self.batches[0])

    def train(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def names(self) -> dict[str, Any]:
        return {
            "MyModel": MyModel, "model": self.model, "optimizer": self.optimizer,
            "x": self.x, "y": self.y, "tokens": self.x, "targets": self.y, "args": (self.x, self.y),
            "loader": self.batches, "train": self.train, "rank": 0, "prompt": self.x,
            "path": "file.bin", "torch": torch, "zerofx": zerofx, "itertools": itertools,
            "copy": copy, "dataclasses": dataclasses, "Path": Path, "safetensors": safetensors,
        }  # fmt: skip


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], Given]]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    yield Given


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in zerofx.__all__],
)
def test_the_example_runs(name: str, given: Callable[[bool], Given]) -> None:
    code = example(name)
    assert ("load_hardware" if documented(name) is zerofx.Hardware else f"zerofx.{name}") in code
    # Nothing is compiled here: that Inductor trains alike is for the tests of training.
    code = code.replace("zerofx.Plan(stage=3))", "zerofx.Plan(stage=3, kernels='aten'))")
    exec(compile(code, f"the example of zerofx.{name}", "exec"), given(name in PLAIN).names())
