"""Longer programs made from short ones: node for node those of capture, or none."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from zerofx.capture import capture
from zerofx.hardware import load_hardware
from zerofx.ir.meta import info, value
from zerofx.ir.program import JOINT, Planned, Program
from zerofx.ir.verify_values import Numbering
from zerofx.passes.order import Setting
from zerofx.passes.pipeline import Proof, run
from zerofx.plan.plan import Plan
from zerofx.tools.demo.gpt import GPT, GPTConfig
from zerofx.tools.search.family import ModelFamily, _stacks
from zerofx.tools.search.lengthen import lengthened
from zerofx.tools.search.outcome import outcome
from zerofx.tools.search.space import Choice
from zerofx.tools.targets import Target

HARDWARE = load_hardware("dgx-h100")


def llama(**changed: Any) -> Target:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 13}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**(sizes | heads | changed))).train()
        ids = torch.zeros(2, 16, dtype=torch.long)
    return Target("llama", model, (), {"input_ids": ids, "labels": ids})


def gpt2(**changed: Any) -> Target:
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 13, "vocab_size": 64, "n_positions": 16}
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**(sizes | {"use_cache": False} | changed))).train()
        ids = torch.zeros(2, 16, dtype=torch.long)
    return Target("gpt2", model, (), {"input_ids": ids, "labels": ids})


def gpt() -> Target:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=13, width=32, heads=4, seq=16, vocab=64))
        ids = torch.zeros(2, 16, dtype=torch.long)
    return Target("gpt", model, (ids, ids), {})


class Captures(ModelFamily):
    """The family that captures each length."""

    def _lengthened(self, length: int, of: Any) -> Any:
        return None


def lines(program: Program) -> list[tuple[Any, ...]]:
    """Return what passes read of each node, in order; nodes by their positions."""
    nodes = list(program.graph(JOINT).nodes)
    at = {node: number for number, node in enumerate(nodes)}

    def read(node: fx.Node) -> Any:
        return f"node {at[node]}"

    return [
        (
            n.op, n.target if n.op == "call_function" else "", fx.node.map_arg(n.args, read),
            fx.node.map_arg(n.kwargs, read), form(value(n)), info(n),
        )
        for n in nodes
    ]  # fmt: skip


def form(val: Any) -> Any:
    if isinstance(val, Tensor):
        return tuple(val.shape), val.stride(), val.dtype
    return tuple(map(form, val)) if isinstance(val, (tuple, list)) else val


def digests(program: Program) -> dict[str, str]:
    return {k: out.digest for k, out in Numbering(program.planned()).outputs.items()}


def check_equal(made: Program | None, captured: Program) -> None:
    assert made is not None
    assert digests(made) == digests(captured)
    assert made.outputs == captured.outputs and made.buffers == captured.buffers
    assert list(made.params) == list(captured.params)
    for name, p in captured.params.items():
        own = made.params[name]
        assert own == p and (own.uses, own.style, own.layer) == (p.uses, p.style, p.layer)
    for mine, theirs in zip(lines(made), lines(captured), strict=True):
        assert mine == theirs


MODELS: dict[str, Any] = {
    "llama": (llama, "model.layers"),
    "tied": (lambda: llama(tie_word_embeddings=True), "model.layers"),
    "gpt2": (gpt2, "transformer.h"),
    "own": (gpt, "blocks"),
}


@functools.cache
def captured(name: str, length: int) -> Program:
    build, stack = MODELS[name]
    family = Captures(Plan(precision="bf16"), target=build())
    assert family.stack == stack
    return family._program(length, 2, "loss")


@pytest.mark.parametrize("name", MODELS)
def test_a_longer_program_is_that_of_capture(name: str) -> None:
    short, stack = captured(name, 6), MODELS[name][1]
    before = lines(short)
    check_equal(lengthened(short, stack, 10), captured(name, 10))
    assert lines(short) == before
    for length in (7, 4):  # an odd number of layers more, and fewer layers
        assert lengthened(short, stack, length) is None


PARALLEL: list[dict[str, Any]] = [
    {},
    {"tensor": 2},
    {"tensor": 2, "sequence": True},
    {"context": 2},
    {"context": 2, "attention": "ring"},
]


def placed(program: Program, parallel: dict[str, Any], **fields: Any) -> Planned:
    plan = Plan.from_dict({"precision": "bf16", "outputs": "loss", "parallel": parallel or "none"})
    plan = Plan.from_dict(plan.to_dict() | fields)
    return run(program, Setting(plan, 4, HARDWARE), "place", Proof.NONE)


@pytest.mark.parametrize(
    ("name", "parallel"), [("llama", p) for p in PARALLEL] + [("gpt2", p) for p in PARALLEL[:3]]
)
def test_a_longer_placed_program_is_that_of_its_passes(name: str, parallel: dict[str, Any]) -> None:
    stack = MODELS[name][1]
    tiles = {"tiling": {f"{stack}.*.mlp.up_proj": 4}} if name == "llama" and not parallel else {}
    made = lengthened(placed(captured(name, 6), parallel, **tiles), stack, 10)
    check_equal(made, placed(captured(name, 10), parallel, **tiles))


class Layer(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.linear(x).tanh()


class Stack(nn.Module):
    def __init__(self, scales: list[float], is_deep: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(scale) for scale in scales)
        self.is_deep = is_deep

    def forward(self, x: Tensor) -> Any:
        total = x.new_zeros(())
        for layer in self.layers:
            x = layer(x)
            if self.is_deep:
                total = total + x.mean()
        return total + x.mean()


class Returning(Stack):
    def forward(self, x: Tensor) -> Any:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return {"loss": x.mean(), "hidden": found}


class Adding(Stack):
    def forward(self, x: Tensor) -> Any:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return torch.stack(found).mean()


# Scales of six layers, and of ten that these become; None if they do not repeat.
STACKS: dict[str, tuple[list[float], list[float] | None]] = {
    "equal": ([1] * 6, [1] * 10),
    "alternating": ([1, 2] * 3, [1, 2] * 5),
    "others at both ends": ([3, 1, 1, 1, 1, 5], [3, *[1] * 8, 5]),
    "every third": ([1, 1, 2] * 2, None),
    "more and more": ([1, 2, 3, 4, 5, 6], None),
}


@pytest.mark.parametrize("is_deep", [False, True])
@pytest.mark.parametrize("name", STACKS)
def test_only_layers_that_repeat_are_repeated(name: str, is_deep: bool) -> None:
    """is_deep: each layer also adds to a total, which crosses next to the stream between layers."""
    given, longer = STACKS[name]
    x = torch.zeros(2, 8)
    made = lengthened(capture(Stack(given, is_deep), (x,)), "layers", 10)
    if longer is None:
        assert made is None
    else:
        check_equal(made, capture(Stack(longer, is_deep), (x,)))


@pytest.mark.parametrize(
    ("settings", "is_stack"),
    [
        ([{}] * 12, True),
        ([{"number": i, "rate": 0.1 * i} for i in range(12)], True),
        ([{"has_window": bool(i % 2)} for i in range(12)], True),
        ([{"has_window": i % 6 == 5} for i in range(12)], False),
        ([{"kind": "full" if i == 7 else "sliding"} for i in range(12)], False),
        ([{"width": 2**i} for i in range(12)], False),
    ],
    ids=["equal", "counted", "alternating", "each sixth", "one in the middle", "growing"],
)
def test_layers_with_other_settings_are_not_identical(
    settings: list[dict[str, Any]], is_stack: bool
) -> None:
    stack = Stack([1.0] * len(settings))
    for layer, own in zip(stack.layers, settings, strict=True):
        for name, setting in own.items():
            setattr(layer.linear, name, setting)
    assert list(_stacks(stack)) == (["layers"] if is_stack else [])


def test_layers_that_others_read_are_not_repeated() -> None:
    """What a model returns of each layer, or puts together after the last one."""
    for reads in (Returning, Adding):
        made = lengthened(capture(reads([1] * 6), (torch.zeros(2, 8),)), "layers", 10)
        assert made is None


CHOICES: list[dict[str, Any]] = [
    {"stage": 3, "activations": "recompute"},
    {"stage": 2, "parallel": {"tensor": 2, "sequence": True}},
    {"stage": 1, "parallel": {"pipeline": 2, "micro_batches": 4}},
]


@pytest.mark.parametrize("fields", CHOICES, ids=str)
def test_prices_are_those_of_captured_lengths(fields: dict[str, Any]) -> None:
    base = Plan(kernels="aten", precision="bf16", outputs="loss")
    target = llama(num_hidden_layers=24)
    plan = Plan.from_dict(base.to_dict() | fields)
    choice = Choice(plan, 2, 4, False)
    made, captured = ModelFamily(base, target=target), Captures(base, target=target)
    found = outcome(choice, made, HARDWARE, 8)
    assert found.figures == outcome(choice, captured, HARDWARE, 8).figures
    assert max(length for length, *_ in made._programs) == 6
    assert max(length for length, *_ in captured._programs) > 6
