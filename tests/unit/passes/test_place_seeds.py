"""Layers are recognised in the graph, whatever they are called: the same cuts, results and sums."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from odd_models import Block, Language, Split, Turned, sequential
from tensor_models import MODELS, batch
from test_place import captured, check, sent
from torch import Tensor, nn

import zerofx
from zerofx.api import make_layout
from zerofx.hardware import hardware_for
from zerofx.ir.program import Planned
from zerofx.ir.verify import verify
from zerofx.passes.order import Setting
from zerofx.passes.pipeline import run
from zerofx.plan.parts import Parallel
from zerofx.plan.plan import Plan

TENSOR = Plan(parallel={"tensor": 2}, kernels="aten")
MLP = {"two.0": "colwise", "two.3": "rowwise"}
HEADS = {"one.a": "colwise", "one.b": "colwise", "one.c": "colwise", "one.d": "rowwise"}
STYLES: dict[str, dict[str, str]] = {
    "nano": {"one.alpha": "colwise/3", "one.beta": "rowwise", **MLP},
    "mini": HEADS | MLP,
    "neox": {"one.first": "colwise", "one.second": "rowwise",
             "two.both": "colwise/2", "two.back": "rowwise"},
    "gated": HEADS | {"two.p": "colwise", "two.q": "colwise", "two.r": "rowwise"},
    "pairs": {"0.many": "colwise/3", "0.end.0": "rowwise", "1.1": "colwise", "1.4": "rowwise"},
    "turned": {"one.alpha": "colwise/3", "one.beta": "rowwise"},
}  # fmt: skip


def cuts(model: nn.Module, plan: Plan = TENSOR) -> dict[str, str]:
    """Return how a model's parameters are cut when it is compiled, before it is called."""
    layout = make_layout(model, plan, 2, hardware_for("cpu", None))
    pieces = [p for bucket in layout.buckets for p in bucket.params]
    return {p.owner: str(p.part.cut) for p in pieces if p.part is not None}


def planned(model: nn.Module, given: dict[str, Tensor], plan: Plan = TENSOR) -> Planned:
    program = zerofx.capture(model, (), given, outputs="loss")
    return run(program, Setting(plan, 2, hardware_for("cpu", None)))


@pytest.mark.parametrize("name", STYLES)
def test_layers_are_recognised_in_the_graph(name: str) -> None:
    """Each block alike, from the call that is made and from one that is made up."""
    model, program = captured(name)
    expected = {f"pile.{k}.{n}": style for k in (0, 1) for n, style in STYLES[name].items()}
    if hasattr(model, "words"):
        expected |= {"tokens": "rowwise", "words": "colwise"}
    found = {n.rpartition(".")[0]: p.style for n, p in program.params.items() if p.style}
    assert found == expected
    made = planned(model, batch(name))
    verify(made)
    held = {n: str(p.part.cut) for n, p in made.params.items() if p.part is not None}
    assert held == cuts(model) and held


@pytest.mark.parametrize("name", STYLES)
def test_every_value_is_that_of_the_whole_graph(name: str) -> None:
    """And each layer sends what one of Megatron-LM does, if both halves of it are cut."""
    made = sent(check(name, Parallel(tensor=2)))
    counts = Counter({key: n for key, n in made.items() if key[0].startswith("pile.1")})
    halves = 1 if name == "turned" else 2
    for phase in ("forward", "backward"):
        assert sum(n for key, n in counts.items() if key[1] == phase) == halves, counts


@pytest.mark.parametrize("name", ["nano", "pairs"])
def test_with_sequences(name: str) -> None:
    check(name, Parallel(tensor=2, sequence=True))


class Renamed:
    """Makes modules answer to the names in their code, while they are registered under others."""

    def __init__(self) -> None:
        self.kinds: dict[type, type] = {}
        self.names: dict[str, str] = {}

    def __call__(self, model: nn.Module) -> nn.Module:
        for module in list(model.modules()):
            for name in [n for n in module._modules if not n.isdigit()]:
                new = self.names.setdefault(name, f"x{len(self.names)}")
                module._modules = {
                    new if n == name else n: child for n, child in module._modules.items()
                }
            kind = type(module)
            if kind.__module__.startswith("transformers"):
                module.__class__ = self.kinds.setdefault(kind, self.kind(kind))
        return model

    def kind(self, kind: type) -> type:
        names = self.names

        def read(module: Any, name: str) -> Any:
            new = names.get(name, name)
            return nn.Module.__getattr__(module, new)

        return type(kind.__name__, (kind,), {"__getattr__": read, "tp_plan": {}})


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_renamed_models_are_cut_alike(name: str) -> None:
    torch.manual_seed(0)
    plain = cuts(MODELS[name]())
    rename = Renamed()
    model = rename(MODELS[name]())
    assert not any("proj" in n or "dense" in n for n, _ in model.named_modules())

    def told(owner: str) -> str:
        return ".".join(rename.names.get(part, part) for part in owner.split("."))

    expected = {told(n): cut for n, cut in plain.items()}
    assert cuts(model) == expected
    program = planned(model, batch(name))
    verify(program)
    held = {n: str(p.part.cut) for n, p in program.params.items() if p.part is not None}
    assert held == expected


def test_hidden_units_that_are_mixed_may_be_cut_by_the_plan() -> None:
    """Which costs a gather, and nothing else."""
    placements = {"*.up_there": "colwise", "*.down_there": "rowwise"}
    check("turned", Parallel(tensor=2, placements=Plan(
        parallel={"tensor": 2, "placements": placements}).parallel.placements))  # fmt: skip


class Told(nn.Module):
    """A block that needs more than hidden values, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mixer, self.calls = sequential(32, 64), Split(32, 4), [0]

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self.calls[0] += 1
        return x + self.inner(self.mixer(x) * scale)


class Pictures(nn.Module):
    """Takes an image, whose size only it knows."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.pile = nn.Conv2d(3, 32, 4, 4), nn.ModuleList([Told(), Told()])

    def forward(self, picture: Tensor) -> Tensor:
        x = self.patches(picture).flatten(2).transpose(1, 2)
        for block in self.pile:
            x = block(x, picture.mean())
        return x.mean()


def test_what_cannot_be_called_is_captured_in_parts() -> None:
    """Blocks of a model with other inputs than tokens, or modules in them; nothing is left."""
    model = Pictures()
    found = cuts(model)
    assert {n for n in found if n.endswith("weight")} == {
        f"pile.{k}.{n}.weight" for k in (0, 1)
        for n in ("inner.0", "inner.3", "mixer.alpha", "mixer.beta")
    }  # fmt: skip
    assert model.pile[0].calls == [0] and not cuts(model, Plan(kernels="aten"))
    assert all(type(p) is nn.Parameter for p in model.parameters())


class Wild(nn.Module):
    """A block whose layers cannot be told: a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.s, self.t, self.between = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.t(self.between(self.s(x)))


def test_a_block_that_is_not_recognised_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zerofx"):
        planned(Language([Wild(), Wild(), Block(Split(32, 4), Turned(32, 64))]), batch("nano"))
    told = [r.getMessage() for r in caplog.records if "no layer of" in r.getMessage()]
    assert len(told) == 1 and "no layer of pile.0, pile.1 is cut" in told[0]
    assert "'*.s': 'colwise'" in told[0] and "'*.t': 'rowwise'" in told[0]


def test_names_and_plans_come_first() -> None:
    """Layers that names tell keep the styles of their names, and only the others are matched."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
            self.x, self.y = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            x = x + self.proj(q.tanh() * k + v)
            return x + self.y(self.x(x).relu())

    program = zerofx.capture(Language([Half()]), (), batch("nano"), outputs="loss")
    found = {n.rpartition(".")[0]: p.style for n, p in program.params.items() if p.style}
    assert found == {
        "pile.0.qkv": "colwise/3", "pile.0.proj": "rowwise", "pile.0.x": "colwise",
        "pile.0.y": "rowwise", "tokens": "rowwise", "words": "colwise",
    }  # fmt: skip
    llama = zerofx.capture(MODELS["llama"](), (), batch("llama"), outputs="loss")
    assert sum(p.style != "" for p in llama.params.values()) == 2 * 7 + 2
