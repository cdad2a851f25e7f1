"""A compiled region's direct form: what of a graph allows one, and that it computes the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from zerofx.compat.direct import direct_of, load_direct, results_in_inputs, save_direct
from zerofx.compat.inductor import compile_region

aten = torch.ops.aten
SHAPE = ("float32", (4, 6), (6, 1), "cpu")


def graph_of(body: Callable[..., Any], num_inputs: int = 2) -> fx.GraphModule:
    """Return a graph that calls `body` on its placeholders and returns the tuple it makes."""
    graph = fx.Graph()
    given = [graph.placeholder(f"x{i}") for i in range(num_inputs)]
    graph.output(tuple(body(graph, *given)))
    return fx.GraphModule(torch.nn.Module(), graph)


def sums_and_views(graph: fx.Graph, x: fx.Node, y: fx.Node) -> list[fx.Node]:
    total = graph.call_function(aten.add.Tensor, (x, y))
    turned = graph.call_function(aten.t.default, (x,))
    product = graph.call_function(aten.mm.default, (total, turned))
    seen = graph.call_function(aten.view.default, (y, [24]))
    return [product, seen, x]


def test_results_in_inputs() -> None:
    """Views of inputs are found through chains; a copy is none."""
    assert results_in_inputs(graph_of(sums_and_views).graph) == [(1, 1, False), (2, 0, True)]


@pytest.mark.parametrize("op", [aten.add_.Tensor, aten.mul_.Tensor])
def test_no_direct_form_of_writes(op: Any) -> None:
    """A graph that writes to what it is given has no direct form."""
    gm = graph_of(lambda graph, x, y: [graph.call_function(op, (x, y))])
    assert results_in_inputs(gm.graph) is None


def test_no_direct_form_of_undecided_views() -> None:
    """Whether `reshape` copies is decided when it runs, so nobody knows what the result is."""
    gm = graph_of(lambda graph, x, y: [graph.call_function(aten.reshape.default, (x, [24]))])
    assert results_in_inputs(gm.graph) is None


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    path = str(tmp_path_factory.mktemp("regions") / "region.bin")
    return path, compile_region(graph_of(sums_and_views), (SHAPE, SHAPE), path)


def test_direct_form_computes_the_same(compiled: tuple[str, Any]) -> None:
    """Bits, strides and aliases are those of Inductor's own artifact; the list is emptied."""
    path, inductors = compiled
    direct = load_direct(path)
    assert direct is not None
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    args = [x, y]
    with torch.no_grad():
        found: list[Tensor] = list(direct(args))
        wanted: list[Tensor] = list(inductors([x, y]))
    assert args == []
    for made, other in zip(found, wanted, strict=True):
        assert torch.equal(made, other)
        assert made.stride() == other.stride()
    before = found[1]._version
    y.add_(1)
    assert torch.equal(found[1], y.view(-1))
    assert found[1]._version > before  # a view of it, not of its memory alone
    assert found[2] is x


def test_lost_kernel(compiled: tuple[str, Any], tmp_path: Path) -> None:
    """Without its libraries the direct form does not load, and Inductor's is taken."""
    path, _ = compiled
    form = json.loads(direct_of(path).read_text())
    assert form["kernels"], "the sum is a kernel of its own"
    form["kernels"] = dict.fromkeys(form["kernels"], "gone.so")
    (tmp_path / "region.json").write_text(json.dumps(form))
    assert load_direct(str(tmp_path / "region.bin")) is None
    assert load_direct(str(tmp_path / "never_made.bin")) is None


def test_unknown_name(compiled: tuple[str, Any], tmp_path: Path) -> None:
    """A source that no loaded module has, or whose call needs its object, is not taken apart."""
    source = "class Runner:\n    def call(self, args):\n        return self.partitions[0](args)\n"
    assert not save_direct(source, [], str(tmp_path / "x.bin"))
    assert list(tmp_path.iterdir()) == []
