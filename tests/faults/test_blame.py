"""What a call raises at runtime: eager PyTorch's exception, with the user's line and module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx

Fault = Callable[["Net", Tensor, Tensor], Tensor]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 10)

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.proj(h).flatten(0, 1), y.flatten())


class Net(nn.Module):
    """Two embeddings of one form, which share a region, and a head; `fault` in between."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(10, 8), nn.Embedding(10, 8)
        self.head = Head()
        self.register_buffer("shift", torch.tensor(1))
        self.fault = fault

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x).relu()
        h = h + self.second(y % 16).relu()
        return self.head(self.fault(self, h, y), y)


def nothing(m: Net, h: Tensor, y: Tensor) -> Tensor:
    return h


def gather(m: Net, h: Tensor, y: Tensor) -> Tensor:
    return h.gather(1, (y + m.shift)[..., None].expand(-1, -1, 8))


def select(m: Net, h: Tensor, y: Tensor) -> Tensor:
    return h.index_select(1, y[0])


def one_hot(m: Net, h: Tensor, y: Tensor) -> Tensor:
    return h + F.one_hot(y, 8)


def computed(m: Net, h: Tensor, y: Tensor) -> Tensor:
    return h + torch.zeros(3, 8)[h.detach().argmax(-1) * 0 + y]


ZERO = torch.zeros(2, 4, dtype=torch.long)
# fault, x, y, the function whose line is at fault, the module
FAULTS: list[tuple[Fault, int, int, Any, str]] = [
    (nothing, 10, 0, Net.forward, "first: aten.embedding"),
    (nothing, 0, 12, Net.forward, "second: aten.embedding"),
    (nothing, 0, 16, Head.forward, "head: aten.nll_loss_forward"),
    (gather, 0, 3, gather, "the model: aten.gather"),
    (select, 0, 5, select, "the model: aten.index_select"),
    (computed, 0, 4, computed, "the model"),
]
if not torch.__version__.startswith("2.11"):  # which captures no check of the classes
    FAULTS.append((one_hot, 0, 9, one_hot, "the model: aten._assert_async"))


def raised_by(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def check(kernels: str, fault: Fault, x: int, y: int, where: Any, module: str) -> None:
    call = ZERO + x, ZERO + y
    eager = raised_by(lambda: Net(fault)(*call))
    plan = {"kernels": kernels.removesuffix("-like")}
    compiled = zerofx.compile(Net(fault), plan, device="cpu")
    before = compiled(ZERO, ZERO)
    found = raised_by(lambda: compiled(*call))
    lines = inspect.getsourcelines(where)
    place = str(found).rpartition(" (")[2]
    number = int(place.partition(":")[2].partition(" ")[0])
    assert type(found) is type(eager)
    assert module in place and lines[1] < number < lines[1] + len(lines[0]), str(found)
    is_known = fault is not computed or kernels == "aten"  # else an index that is not there again
    assert (str(eager) in str(found)) is is_known, (str(found), str(eager))
    assert torch.equal(compiled(ZERO, ZERO), before)


IDS = [f"{m} {x} {y}" for _, x, y, _, m in FAULTS]


@pytest.mark.parametrize("case", FAULTS, ids=IDS)
def test_an_error_on_aten_has_the_line_and_the_module(case: Any) -> None:
    check("aten", *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAULTS, ids=IDS)
def test_an_error_of_a_compiled_kernel_is_that_of_eager(case: Any) -> None:
    check("inductor", *case)


def as_compiled(regions: Any) -> None:
    """Make a loaded schedule's regions raise what a kernel that Inductor compiled raises."""
    for name, region in vars(regions).items():

        def run(args: list[Tensor], region: Any = region) -> Any:
            try:
                return region(args)
            except (IndexError, RuntimeError):
                pass
            raise RuntimeError("kernel, /tmp/main.cpp:21, index out of bounds: 0 <= tmp2 < 10L")

        setattr(regions, name, run)


@pytest.mark.parametrize("case", [c for c in FAULTS if c[0] is not one_hot])
def test_a_check_that_says_little_is_run_again_on_aten(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = zerofx.runtime.load_regions

    def loaded(*args: Any) -> Any:
        regions = load(*args)
        as_compiled(regions)
        return regions

    monkeypatch.setattr("zerofx.runtime.load_regions", loaded)
    check("aten-like", *case)


@pytest.mark.parametrize("target", [10, -1])
def test_the_fused_loss_head_refuses_the_targets_that_eager_refuses(target: int) -> None:
    compiled = zerofx.compile(Head(), {"kernels": "aten", "numerics": "fast"}, device="cpu")
    h, y = torch.randn(2, 4, 8), ZERO.clone()
    y[0] = -100
    assert compiled(h, y).isfinite()
    assert "linear_cross_entropy" in compiled.programs[0].dump()
    wanted = rf"^Target {target} is out of bounds. \(.*test_blame.py:\d+ in "
    with pytest.raises(IndexError, match=wanted):
        compiled(h, ZERO + target)


def test_an_adopted_program_names_the_line(tmp_path: Any) -> None:
    compiled = zerofx.compile(Net(nothing), {"kernels": "aten"}, device="cpu")
    compiled(ZERO, ZERO)
    compiled.programs[0].emit(tmp_path / "mine")
    compiled.adopt(tmp_path / "mine")
    with pytest.raises(IndexError, match=r"\(test_blame.py:\d+ in second: aten.embedding\)"):
        compiled(ZERO, ZERO + 12)


@pytest.mark.parametrize("verb", ["unpack", "hand_over"])
def test_an_error_without_a_region_is_left_alone(verb: str) -> None:
    compiled = zerofx.compile(Net(nothing), {"kernels": "aten"}, device="cpu")
    compiled(ZERO, ZERO)

    def fail(*args: Any) -> None:
        raise ValueError("of the runtime")

    setattr(compiled._engine, verb, fail)
    with pytest.raises(ValueError, match=r"^of the runtime$"):
        compiled(ZERO, ZERO).backward()
