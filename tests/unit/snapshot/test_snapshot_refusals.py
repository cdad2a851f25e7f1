"""What load refuses of sound saves, by name, and what save refuses before it writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_cases import Harm, other_run, refused, tree
from torch import nn

import zerofx
from zerofx.errors import ArgumentError, SnapshotError


@pytest.fixture(scope="module")
def live() -> tuple[Any, Any]:
    return other_run()


# -- other models ---------------------------------------------------------------------------------
def linear(make: Callable[[], nn.Module], kind: Any = torch.optim.SGD, groups: int = 1) -> Any:
    model = zerofx.compile(make(), {"kernels": "aten"})
    params = list(model.parameters())
    sets = [params] if groups == 1 else [params[:1], params[1:]]
    return model, kind([{"params": p} for p in sets], lr=0.1)


def with_buffer() -> nn.Module:
    model = nn.Linear(3, 4)
    model.register_buffer("mean", torch.zeros(4))
    return model


@pytest.mark.parametrize(
    ("other", "texts"),
    [
        (lambda: nn.Linear(3, 5), ["weight is float32 [4, 3] in the save and float32 [5, 3]"]),
        (lambda: nn.Linear(3, 4).double(), ["bias is float32 [4] in the save and float64 [4]"]),
        (lambda: nn.Linear(3, 4, bias=False), ["bias is only in the save"]),
        (
            lambda: nn.Sequential(nn.Linear(3, 4)),
            ["0.bias is only in the model", "; weight is"],
        ),
        (with_buffer, ["buffers mean is only in the model"]),
    ],
)
def test_another_model(tmp_path: Path, other: Any, texts: list[str]) -> None:
    zerofx.save(tmp_path / "save", *linear(lambda: nn.Linear(3, 4)))
    refused(tmp_path / "save", linear(other), "the save is of another model", *texts)


def test_another_optimizer(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Linear(3, 4)

    zerofx.save(tmp_path / "save", *linear(make))
    refused(
        tmp_path / "save",
        linear(make, torch.optim.AdamW),
        "has the state of SGD, but AdamW was given",
    )
    refused(tmp_path / "save", linear(make, groups=2), "SGD has 2 groups, but the save has 1")
    model, _ = linear(make)
    some = torch.optim.SGD([model.weight], lr=0.1)
    refused(tmp_path / "save", (model, some), "group 0 of SGD has other parameters", "bias")
    zerofx.save(tmp_path / "save", model)
    refused(tmp_path / "save", linear(make), "was saved without an optimizer")


# -- what save refuses ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"a": {"fine": 1, "scheduler": lambda step: step}}, "extra['a']['scheduler'] is a funct"),
        ({"list": [1, Harm(Path("x"))]}, "extra['list'][1] is a Harm"),
        ([1, 2], "extra is a list. Give a dict"),
    ],
)
def test_extra_that_would_run_code(tmp_path: Path, live: Any, extra: Any, text: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        zerofx.save(tmp_path / "save", *live, extra=extra)
    assert text in str(caught.value)
    assert tree(tmp_path) == []


def test_a_directory_of_something_else(tmp_path: Path, live: Any) -> None:
    home = tmp_path / "home"
    home.mkdir()
    zerofx.save(home, *live)  # an empty one is fine
    (home / "zerofx.json").unlink()
    with pytest.raises(SnapshotError, match=r"holds other files and no zerofx\.json"):
        zerofx.save(home, *live)
    assert len(tree(home)) == 4
    with pytest.raises(SnapshotError, match=r"is a file. Give a directory"):
        zerofx.save(home / "values.pt", *live)


def test_not_ours(tmp_path: Path, live: Any) -> None:
    with pytest.raises(SnapshotError, match="this is a plain Linear"):
        zerofx.save(tmp_path / "save", nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(SnapshotError, match="this is a plain Linear"):
        zerofx.load(tmp_path / "save", nn.Linear(2, 2))  # type: ignore[arg-type]
    several: Any
    for several in ([live[0], live[0]], {"gen": live[0]}):
        with pytest.raises(ArgumentError, match="once for each model, with a folder of its own"):
            zerofx.save(tmp_path / "save", several, [live[1], live[1]])
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(2, 3))])
    with pytest.raises(SnapshotError, match=r"shape \[2, 3\] that is not the model's"):
        zerofx.save(tmp_path / "save", live[0], stranger)
    assert tree(tmp_path) == []


def test_a_wrapper_is_refused_with_the_optimizer_that_it_holds(
    tmp_path: Path, live: tuple[Any, Any]
) -> None:
    class Scheduled:
        def __init__(self, optimizer: Any) -> None:
            self.steps, self._optimizer = 0, optimizer

    model, optimizer = live
    with pytest.raises(
        ArgumentError, match=r"of type Scheduled, .* one in \._optimizer: pass that"
    ):
        zerofx.save(tmp_path / "run", model, Scheduled(optimizer))
    with pytest.raises(ArgumentError, match=r"of type int, not an optimizer\. Call zerofx\.save"):
        zerofx.save(tmp_path / "run", model, 3)
