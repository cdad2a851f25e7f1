"""Errors: each is of the kind that eager raises, can be pickled, and ends at the user's line."""

from __future__ import annotations

import builtins
import copy
import errno
import pickle
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from zerofx import errors
from zerofx.errors import BudgetError, CaptureError, NvmeError, ZerofxError
from zerofx.nvme.faults import path_error

TABLE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text().split("##")[0]
CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ZerofxError) and kind is not ZerofxError
}


def documented() -> dict[str, str]:
    """Return the built-in kind of each class, as the table in docs/errors.md says."""
    found = {}
    for row in TABLE.splitlines():
        cells = row.split("|")
        if len(cells) == 5 and "Error`" in cells[1]:
            kind = cells[2].strip(" `")
            found |= dict.fromkeys(re.findall(r"`(\w+)`", cells[1].split(", a `")[0]), kind)
    return found


def make(kind: type[ZerofxError]) -> ZerofxError:
    given: dict[type, Any] = {BudgetError: ("m: 3 bytes", 3), NvmeError: ("m", errno.ENOSPC)}
    return kind(*given.get(kind, ("m",)))


def test_every_class_is_in_the_table_and_is_what_it_says() -> None:
    table = documented()
    assert table.keys() == CLASSES.keys()
    for name, kind in CLASSES.items():
        assert issubclass(kind, getattr(builtins, table[name])), name


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_errors_pass_between_processes_whole(name: str) -> None:
    error = make(CLASSES[name])
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error) and str(again) == str(error)
        for field in ("least_bytes", "errno"):
            assert getattr(again, field, None) == getattr(error, field, None)


def test_a_disk_that_is_full_is_told_by_errno() -> None:
    error = path_error("cannot write to", "/mnt", OSError(errno.ENOSPC, "full"))
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC
    assert str(error).startswith("cannot write to /mnt: No space left on device (ENOSPC)")


def test_a_snapshot_that_was_never_made_is_a_file_not_found(tmp_path: Path) -> None:
    model = zerofx.compile(nn.Linear(2, 2))
    with pytest.raises(FileNotFoundError, match="no such directory"):
        zerofx.load(tmp_path / "none", model)


class Faulty(nn.Module):
    """A model with a fault three calls deep."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.fc(x))

    def inner(self, h: Tensor) -> Tensor:
        return getattr(self, self.fault)(h)

    def branch(self, h: Tensor) -> Tensor:
        return h.sum() if h.sum() > 0 else h.mean()

    def item(self, h: Tensor) -> Tensor:
        return h.sum() * h.max().item()

    def numpy(self, h: Tensor) -> Tensor:
        return torch.as_tensor(h.detach().numpy()).sum()

    def missing(self, h: Tensor) -> Tensor:
        return self.nothing(h)

    def shape(self, h: Tensor) -> Tensor:
        return (h @ torch.ones(5, 2)).sum()

    def target(self, h: Tensor) -> Tensor:
        return F.cross_entropy(h, torch.zeros(7, dtype=torch.long))

    def dim(self, h: Tensor) -> Tensor:
        return h.sum(dim=7)

    def key(self, h: Tensor) -> Tensor:
        return {"a": h}["b"]

    def own(self, h: Tensor) -> Tensor:
        raise FileExistsError(errno.EEXIST, "there")


IN_EAGER = ["missing", "shape", "target", "dim", "key", "own"]


@pytest.mark.parametrize("fault", ["branch", "item", "numpy", *IN_EAGER])
def test_a_capture_error_ends_at_the_users_line(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = RuntimeError
    if fault in IN_EAGER:
        with pytest.raises(Exception) as plain:
            Faulty(fault)(torch.ones(2, 4))
        eager = plain.type
    islands = "auto" if fault in IN_EAGER else "refuse"
    model = zerofx.compile(Faulty(fault), zerofx.Plan(kernels="aten", islands=islands))
    with pytest.raises(eager) as caught:
        model(torch.ones(2, 4))
    frames = traceback.extract_tb(caught.tb)
    assert [f.name for f in frames[-3:]] == ["forward", "inner", fault]
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("\n") < 30 and "torch/_functorch" not in shown
    if isinstance(caught.value, CaptureError):
        assert caught.value.torch_error is not None
        again = pickle.loads(pickle.dumps(caught.value))
        assert isinstance(again, eager) and str(again) == str(caught.value)
    if fault == "branch":
        monkeypatch.setenv("ZEROFX_FULL_TRACEBACK", "1")
        with pytest.raises(CaptureError) as full:
            model(torch.ones(2, 4))
        assert full.value.__cause__ is full.value.torch_error
        assert "torch/_functorch" in "".join(traceback.format_exception(full.value))
