"""A compiled region's direct form: what of a graph allows one, and that it computes the same."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from zerofx.compat import direct as direct_forms
from zerofx.compat.direct import FORMAT, direct_of, load_direct, save_direct
from zerofx.compat.inductor import compile_region, load_artifact, wrapper_of
from zerofx.compat.operators import results_in_inputs

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


@pytest.fixture
def copied(compiled: tuple[str, Any], tmp_path: Path) -> str:
    """Return the artifact's path in a copy that a test may spoil."""
    shutil.copytree(Path(compiled[0]).parent, tmp_path / "copy")
    return str(tmp_path / "copy" / "region.bin")


def check_artifact(path: str) -> None:
    """Assert that what loads is Inductor's artifact, and that it computes the region."""
    assert load_direct(path) is None
    region = load_artifact(path)
    assert region is not None
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    args = [x, y]
    with torch.no_grad():
        torch.testing.assert_close(region(args)[0], (x + y) @ x.t())
    assert args == []


@pytest.mark.parametrize("change", ["gone", "other", "cut"])
def test_spoilt_kernel(copied: str, change: str) -> None:
    """Without the very libraries that it was written with, the artifact is loaded."""
    assert load_direct(copied) is not None
    (library,) = Path(copied).parent.glob("*.so")
    if change == "gone":
        library.unlink()
    else:  # a new file: the old one is mapped into this process
        content = library.read_bytes()
        library.unlink()
        library.write_bytes(content + b"\0" if change == "other" else content[:100])
    check_artifact(copied)


def other_format(whole: dict[str, Any]) -> str:
    return json.dumps(whole | {"format": FORMAT + 1})


def other_call(whole: dict[str, Any]) -> str:
    return json.dumps(whole | {"form": whole["form"].replace("extern_kernels", "no_kernels")})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda whole: "",
        lambda whole: "{}",
        lambda whole: "[]",
        lambda whole: "null",
        lambda whole: "\udcff",
        lambda whole: json.dumps(whole)[:-40],
        lambda whole: json.dumps(whole | {"form": None}),
        lambda whole: whole["form"],
        other_format,
        other_call,
    ],
)
def test_unreadable_direct_form(copied: str, spoil: Callable[[dict[str, Any]], str]) -> None:
    """A file that is empty, cut short, changed, or of another format is as good as none."""
    whole = json.loads(direct_of(copied).read_text())
    text = spoil(whole)
    assert text != json.dumps(whole)
    direct_of(copied).write_bytes(text.encode("utf-8", "surrogateescape"))
    check_artifact(copied)


def test_never_made(tmp_path: Path) -> None:
    """Where there is no direct form none is loaded."""
    assert load_direct(str(tmp_path / "never_made.bin")) is None


def test_unknown_name(compiled: tuple[str, Any], tmp_path: Path) -> None:
    """A source that no loaded module has, or whose call needs its object, is not taken apart."""
    source = "class Runner:\n    def call(self, args):\n        return self.partitions[0](args)\n"
    assert not save_direct(source, [], str(tmp_path / "x.bin"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("gone", ["nothing", "library", "module"])
def test_inductor_cache_tidied(
    copied: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """What somebody deletes of Inductor's own files while it compiles costs the direct form."""
    from torch._inductor.codecache import PyCodeCache

    source = Path(wrapper_of(copied)).read_text()
    real = direct_forms._generated_module(source)
    assert real is not None
    library = tmp_path / "kernel.so"
    shutil.copyfile(next(Path(copied).parent.glob("*.so")), library)
    kernel = direct_forms._kernel(library, direct_forms._digest(library.read_bytes()))
    module = ModuleType("generated")
    for name, value in vars(real).items():
        setattr(module, name, kernel if name.startswith("cpp_fused") else value)
    module.__file__ = str(tmp_path / "module.py")
    Path(module.__file__).write_text(source)
    monkeypatch.setattr(PyCodeCache, "modules", [module])
    if gone == "library":
        library.unlink()
    if gone == "module":
        Path(module.__file__).unlink()
    (tmp_path / "made").mkdir()
    assert save_direct(source, [], str(tmp_path / "made" / "x.bin")) == (gone == "nothing")
    assert any((tmp_path / "made").iterdir()) == (gone == "nothing")


# -- inputs are freed behind their last reader -----------------------------------------------------
WATCHED: list[weakref.ref[Tensor]] = []
ALIVE: list[list[bool]] = []


@pytest.fixture
def watching() -> Iterator[None]:
    """Define an op that notes which of the watched tensors live."""
    library = torch.library.Library("zerofx", "FRAGMENT")
    library.define("watch(Tensor x) -> Tensor")

    def watch(x: Tensor) -> Tensor:
        ALIVE.append([tensor() is not None for tensor in WATCHED])
        return x.clone()

    library.impl("watch", watch, "CPU")
    library.impl("watch", torch.empty_like, "Meta")
    yield
    library._destroy()


def watched(graph: fx.Graph, x: fx.Node, y: fx.Node) -> list[fx.Node]:
    product = graph.call_function(aten.mm.default, (x, y))
    seen = graph.call_function(torch.ops.zerofx.watch.default, (product,))
    return [seen, graph.call_function(aten.t.default, (x,))]


@pytest.mark.usefixtures("watching")
def test_inputs_are_freed(tmp_path: Path) -> None:
    """A region lets go of each input behind its last reader, save where a result looks into it."""
    path = str(tmp_path / "region.bin")
    square = ("float32", (8, 8), (8, 1), "cpu")
    forms = [compile_region(graph_of(watched), (square, square), path), load_direct(path)]
    direct_of(path).unlink()
    forms.append(load_artifact(path))
    for region in forms:
        assert region is not None
        ALIVE.clear()
        args = [torch.randn(8, 8), torch.randn(8, 8)]
        WATCHED[:] = [weakref.ref(tensor) for tensor in args]
        with torch.no_grad():
            region(args)
        assert ALIVE == [[True, False]]
