"""Regions write pointwise results over operands that are read for the last time, and no others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.analysis.memory.liveness import lifetimes
from zerofx.codegen.emit import emit
from zerofx.compat.operators import in_place, out_of_place
from zerofx.errors import ProgramError
from zerofx.ir.program import Planned
from zerofx.runtime.regions.cache import _as_graph

aten = torch.ops.aten
Forward = Callable[[Tensor, Tensor], object]
PLAN = {"kernels": "aten"}


class Model(nn.Module):
    """A weight and any forward that reads it."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))
        self.of = forward

    def forward(self, x: Tensor) -> object:
        return self.of(x, self.weight)


X = torch.linspace(0, 1, 24).view(4, 6)
# The forward, and the operators in place that its region has.
CASES: dict[str, tuple[Forward, list[str]]] = {
    "a ReLU of a product": (lambda x, w: (x @ w).relu(), ["relu_"]),
    "the first of two summands": (lambda x, w: (x @ w) + x, ["add_"]),
    "the second of two summands": (lambda x, w: x + (x @ w), ["add_"]),
    "a scaled summand is not the second": (lambda x, w: torch.add(x, x @ w, alpha=2), []),
    "the second of a difference": (lambda x, w: x - (x @ w), []),
    "one after the other": (lambda x, w: ((x @ w) * 2 + 1).sigmoid(), ["mul_", "add_", "sigmoid_"]),
    "a view of all": (lambda x, w: (x @ w).view(2, 12).relu(), ["relu_"]),
    "a transposition": (lambda x, w: (x @ w).t().relu(), ["relu_"]),
    "a result of several": (lambda x, w: torch.max(x @ w, 1)[0].exp(), ["exp_"]),
    "an input": (lambda x, w: x.relu(), []),
    "a view of an input": (lambda x, w: x.view(-1).relu(), []),
    "a parameter": (lambda x, w: w.relu() @ x.t(), []),
    "a part": (lambda x, w: (x @ w)[:2].relu(), []),
    "an expanded value": (lambda x, w: (x @ w).sum(0).expand(4, 6).relu(), []),
    "a smaller operand": (lambda x, w: (x @ w).sum(0) + x, []),
    "another format": (lambda x, w: (x @ w).ge(0).logical_not(), ["logical_not_"]),
    "a comparison": (lambda x, w: (x @ w) > 0, []),
    "what is read later": (lambda x, w: (h := x @ w).relu() + h, ["add_"]),
    "what a view of it is read of later": (lambda x, w: (h := x @ w).relu() @ h.t(), []),
    "what is a result": (lambda x, w: (h := x @ w, h.relu()), []),
    "what a view of it is a result of": (lambda x, w: ((h := x @ w).t(), h.relu()), []),
    "itself transposed": (lambda x, w: (h := x.t() @ x @ w) + h.t(), []),
    "itself twice": (lambda x, w: (h := x @ w) + h, ["add_"]),
    "random numbers": (lambda x, w: nn.functional.dropout(x @ w, 0.0, True), []),
}


def planned(forward: Forward) -> Planned:
    with torch.no_grad():
        return zerofx.rewrite(zerofx.capture(Model(forward), (X,)), PLAN, 1)


def in_place_of(directory: Path) -> list[str]:
    return [
        name
        for path in sorted((directory / "regions").glob("*.py"))
        for name in re.findall(r"aten\.(\w+_)\.", path.read_text())
    ]


@pytest.mark.parametrize(("forward", "expected"), CASES.values(), ids=CASES)
def test_written_over(forward: Forward, expected: list[str], tmp_path: Path) -> None:
    program = planned(forward)
    directory = emit(program, tmp_path / "p")
    assert in_place_of(directory) == expected
    loaded = zerofx.load_program(directory)  # read back and proved
    assert in_place_of(emit(loaded, tmp_path / "again")) == expected
    made = {s.name for s in lifetimes(program).storages}
    names = {s.name for s in lifetimes(loaded).storages}
    assert len(made) == len(names)


@pytest.mark.parametrize("kernels", ["aten", "inductor"])
def test_results_and_gradients_are_those_of_eager(kernels: str) -> None:
    """All forwards in one model; inputs stay as they are."""

    def forward(x: Tensor, w: Tensor) -> object:
        made = [f(x, w) for f, _ in CASES.values()]
        flat = [t for each in made for t in (each if isinstance(each, tuple) else (each,))]
        return sum(t.float().sin().sum() for t in flat)

    plain = Model(forward)
    compiled = zerofx.compile(Model(forward), {"kernels": kernels}, device="cpu")
    x = X.clone()
    for model in (plain, compiled):
        model(x).backward()
    assert torch.equal(x, X)
    torch.testing.assert_close(compiled.weight.grad, plain.weight.grad, rtol=1e-6, atol=1e-6)


class Turned(nn.Module):
    """A layer that views values which the model computes once for all of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return self.linear(x) * angles.unsqueeze(0).cos() + x * angles.unsqueeze(0).sin()


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Turned() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.stack([torch.arange(6.0) * 0.1] * 4)
        for layer in self.layers:
            x = layer(x, angles)
        return x.square().mean()


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_views_of_what_other_regions_computed_are_not_written_over(
    activations: str, tmp_path: Path
) -> None:
    """The last view of shared angles in a layer is not their last: the next layers read them."""
    torch.manual_seed(0)
    plain, model = Turns(), Turns()
    model.load_state_dict(plain.state_dict())
    compiled = zerofx.compile(model, {**PLAN, "activations": activations}, device="cpu")
    losses = [m(X) for m in (plain, compiled)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)
    for (name, p), q in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-6, atol=1e-7, msg=name)
    (program,) = compiled.zerofx.programs
    directory = program.emit(tmp_path / "p")
    found = in_place_of(directory)
    assert "add_" in found and not {"cos_", "sin_"} & set(found)
    zerofx.load_program(directory)  # which refuses what writes over an argument


def test_memory_is_counted_once() -> None:
    def chain(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w) * 2 + 1).sigmoid().sum()

    nbytes = [s.nbytes for s in lifetimes(planned(chain)).storages]
    assert (
        nbytes.count(X.nbytes) == 2
    )  # the input, and the product with all that is written over it


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("aten.relu_.default", "aten.relu.default", ""),
        ("aten.relu_.default(mm)", "aten.mul_.Tensor(mm, 1)", "does not compute what was captured"),
        ("relu = aten.relu_.default(mm)", "relu = aten.relu_.default(mm); relu = mm", ""),
        (
            "relu = aten.relu_.default(mm)",
            "v = aten.t.default(mm); relu = aten.relu_.default(mm); relu = aten.t.default(v)",
            "written over through another view",
        ),
        ("aten.relu_.default(mm)", "aten.relu_.default(x0)", "relu_.default writes in place"),
        ("aten.relu_.default(mm)", "aten.copy_.default(mm, x0)", "copy_.default writes in place"),
    ],
)
def test_edits(tmp_path: Path, old: str, new: str, error: str) -> None:
    directory = emit(planned(lambda x, w: (x @ w).relu()), tmp_path / "p")
    (path,) = (directory / "regions").glob("*.py")
    text = re.sub(r"(?m)^    del .*\n", "", path.read_text())  # all values can be read to the end
    assert old in text
    path.write_text(text.replace(old, new))
    if not error:
        zerofx.load_program(directory)
        return
    with pytest.raises(ProgramError, match=error):
        zerofx.load_program(directory)


def test_a_compiler_gets_new_values() -> None:
    """A name whose value was written over has the new one, as where the region runs op by op."""
    scope = {"aten": aten}
    source = "def region(args):\n    x, = args\n    h = aten.mul.Tensor(x, 2)\n"
    exec(source + "    aten.add_.Tensor(h, 1)\n    return (h,)\n", scope)
    graph = _as_graph(scope["region"], 1)
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [
        aten.mul.Tensor, aten.add.Tensor,
    ]  # fmt: skip
    assert torch.equal(graph(X)[0], X * 2 + 1)


def test_pairs_of_operators() -> None:
    """Each operator in place computes the bits of its other form."""
    count = 0
    for packet in dir(aten):
        if not hasattr(getattr(aten, packet), "overloads"):
            continue
        for overload in getattr(aten, packet).overloads():
            target = getattr(getattr(aten, packet), overload)
            over = in_place(target)
            if over is None:
                assert out_of_place(target) is target or target._schema.is_mutable
                continue
            assert out_of_place(over) is target
            arguments = target._schema.arguments
            required = [a for a in arguments[1:] if not a.has_default_value() and not a.kwarg_only]
            if any(str(a.type) not in ("Tensor", "number", "float") for a in required):
                continue
            given = [torch.full((4, 6), 0.5) if str(a.type) == "Tensor" else 0.5 for a in required]
            try:
                expected = target(X.clone(), *given)
            except RuntimeError:
                continue  # of integers, or of another device: nothing to compare with
            if expected.dtype is not X.dtype:
                continue
            found = over(X.clone(), *given)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            count += 1
    assert count > 60
