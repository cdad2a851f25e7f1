"""open-attention: which calls are opened, what masks say, and what is told of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from zerofx.ir.meta import info, value
from zerofx.ir.program import JOINT, Planned
from zerofx.passes import open_attention
from zerofx.passes.open_attention import Masks, OpenAttention
from zerofx.plan.parts import Parallel

RING = Parallel(context=2, attention="ring")
LENGTH = 16


class Attends(nn.Module):
    """One layer. how: what is given to attention. kept: the heads of keys and values."""

    def __init__(self, how: str, kept: int = 4) -> None:
        super().__init__()
        self.how, self.kept = how, kept
        self.mix = nn.Linear(12, 8 * (4 + 2 * kept))

    def mask(self, x: Tensor) -> Tensor | None:
        at = torch.arange(x.shape[1])
        ahead = at[None] > at[:, None]
        return {
            "causal": None, "none": None,
            "written": torch.zeros(ahead.shape).masked_fill(ahead, float("-inf")),
            "lowest": torch.zeros(ahead.shape).masked_fill(ahead, torch.finfo(torch.float32).min),
            "wide": (~ahead)[None, None].expand(2, 1, -1, -1),
            "open": torch.ones_like(ahead),
            "window": ~ahead & (at[None] > at[:, None] - 3),
            "leaky": torch.zeros(ahead.shape).masked_fill(ahead, -9.0),
            "first": torch.full((1, len(at)), float("-inf")).index_fill(1, at[:1], 0.0),
            "given": x[:, None, :, :1] > x[:, None, :, 0][:, :, None],
            "bias": torch.where(ahead, float("-inf"), (at[None] - at[:, None]).float()),
        }[self.how]  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        each = self.mix(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        q, k, v = each.split([4, self.kept, self.kept], 1)
        if self.kept < 4:
            k, v = (
                y[:, :, None].expand(-1, -1, 4 // self.kept, -1, -1).reshape(2, 4, -1, 8)
                for y in (k, v)
            )
        is_causal = self.how == "causal"
        made = F.scaled_dot_product_attention(q, k, v, self.mask(x), is_causal=is_causal)
        return made.transpose(1, 2).flatten(2)


def captured(how: str, kept: int = 4, length: int = LENGTH) -> Planned:
    torch.manual_seed(0)
    x = torch.randn(2, length, 12, requires_grad=True)
    return zerofx.capture(Attends(how, kept), (x,), differentiate="all").planned().clone()


def opened(how: str, kept: int = 4, length: int = LENGTH) -> tuple[Planned, list[Any]]:
    """Return a program behind the pass, and the calls of attention in it."""
    program = captured(how, kept, length)
    OpenAttention(RING).run(program)
    program.graph(JOINT).lint()
    return program, [n for n in program.graph(JOINT).nodes if "attention" in str(n.target)]


@pytest.mark.parametrize(
    ("how", "causal"),
    [
        ("causal", True), ("none", False), ("written", True), ("lowest", True), ("wide", True),
        ("open", False),
    ],
)  # fmt: skip
def test_known_masks_are_not_made(how: str, causal: bool) -> None:
    program, calls = opened(how)
    assert [n.target for n in calls] == [zerofx.ops.attention, zerofx.ops.attention_backward]
    assert [n.args[-2] for n in calls] == [causal] * 2
    assert [n.args[-1] for n in calls] == pytest.approx([8**-0.5] * 2)
    values = [value(n) for n in program.graph(JOINT).nodes]
    squares = [v for v in values if isinstance(v, Tensor) and v.shape[-2:] == (LENGTH, LENGTH)]
    assert not squares


@pytest.mark.parametrize(
    ("how", "reason", "rows"),
    [
        ("window", "a mask is neither causal nor without effect", LENGTH),
        ("leaky", "a mask is neither causal nor without effect", LENGTH),
        ("first", "a mask is neither causal nor without effect", 1),
        ("bias", "a mask is neither causal nor without effect", LENGTH),
        ("given", "a mask depends on", LENGTH),
    ],
)
def test_other_masks_become_operands(
    how: str, reason: str, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    _, calls = opened(how)
    assert [n.target for n in calls] == [zerofx.ops.attention, zerofx.ops.attention_backward]
    assert [n.args[-3] for n in calls] == [False] * 2
    assert calls[0].args[-1] is calls[1].args[-1]
    assert value(calls[0].args[-1]).shape[-2:] == (rows, LENGTH)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    assert reason in OpenAttention(RING).run(captured(how)).summary


class Twice(nn.Module):
    """Two layers, each of which writes the same mask; or a third one another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(3))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            at = torch.arange(x.shape[1])
            seen = (at <= at[:, None]) & kept[:, None, None].bool()
            if number == 2:
                seen = seen & (at > at[:, None] - 3)
            q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in layer(x).chunk(3, -1))
            made = F.scaled_dot_product_attention(q, k, v, seen)
            x = x + made.transpose(1, 2).flatten(2)
        return x


def test_layers_share_the_masks_that_are_alike() -> None:
    given = torch.randn(2, LENGTH, 8, requires_grad=True), torch.ones(2, LENGTH)
    program = zerofx.capture(Twice(), given, differentiate="all").planned().clone()
    OpenAttention(RING).run(program)
    calls = [n for n in program.graph(JOINT).nodes if "zerofx.attention" in str(n.target)]
    read = [n.args[-1] for n in calls]
    assert len(calls) == 6 and len(set(read)) == 2
    assert read[0] is read[1] and read[1] is not read[2]


@pytest.mark.parametrize("how", ["causal", "written"])
def test_dropped_weights_stay_and_are_told(how: str, caplog: pytest.LogCaptureFixture) -> None:
    program = captured(how)
    for node in program.graph(JOINT).nodes:
        if "attention" in str(node.target) and "backward" not in str(node.target):
            node.args = (*node.args[:3], 0.5, *node.args[4:])
    OpenAttention(RING).run(program)
    calls = [n for n in program.graph(JOINT).nodes if "attention" in str(n.target)]
    assert calls and not any(str(n.target).startswith("zerofx") for n in calls)
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "it drops weights at random" in told and "test_passes_open_attention.py" in told


def test_sequences_that_do_not_divide_stay(caplog: pytest.LogCaptureFixture) -> None:
    _, calls = opened("causal", length=6)
    assert not any(str(n.target).startswith("zerofx") for n in calls)
    assert "6 queries and 6 keys do not divide into 4 chunks" in caplog.text


@pytest.mark.parametrize("kept", [1, 2])
def test_keys_are_given_as_they_were_before_they_were_repeated(kept: int) -> None:
    program, (forward, backward) = opened("causal", kept)
    assert [value(n).shape[1] for n in forward.args[:3]] == [4, kept, kept]
    assert [v.shape[1] for v in value(backward)] == [4, kept, kept]
    values = [value(n) for n in program.graph(JOINT).nodes]
    assert not any(isinstance(v, Tensor) and v.dim() == 5 for v in values)


def test_gradients_that_are_read_before_their_sum_keep_the_repeats() -> None:
    x = torch.randn(2, LENGTH, 12, requires_grad=True)
    program = zerofx.capture(Attends("causal", 2), (x,), differentiate="all").planned().clone()
    graph = program.graph(JOINT)
    backward = next(n for n in graph.nodes if "cpu_backward" in str(n.target))
    item = next(n for n in backward.users if n.args[1] == 1)
    with graph.inserting_after(item):
        other = graph.call_function(torch.ops.aten.neg.default, (item,))
    other.meta = dict(item.meta)
    graph.output_node().args = ((*program.results(JOINT), other),)
    OpenAttention(RING).run(program)
    calls = [n for n in graph.nodes if "attention" in str(n.target)]
    assert [value(n).shape[1] for n in calls[0].args[:3]] == [4, 4, 4]


def test_without_a_ring_nothing_changes() -> None:
    x = torch.randn(2, LENGTH, 12, requires_grad=True)
    program = zerofx.capture(Attends("causal"), (x,), differentiate="all").planned().clone()
    before = str(program.graph(JOINT))
    for parallel in (Parallel(), Parallel(context=2), Parallel(tensor=2)):
        assert not OpenAttention(parallel).run(program).changed
    assert str(program.graph(JOINT)) == before


def test_masks_are_evaluated_by_stretches_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong in one row is found, and none of the values in between is ever whole."""
    x = torch.randn(2, LENGTH, 12, requires_grad=True)
    found = {}
    for how in ("wide", "window"):
        program = zerofx.capture(Attends(how), (x,), differentiate="all").planned()
        node = next(n for n in program.graph(JOINT).nodes if "attention" in str(n.target))
        monkeypatch.setattr(open_attention, "MOST_ELEMENTS", 2 * LENGTH)
        masks = Masks(program.graphs[JOINT])
        found[how] = masks.says(node.kwargs["attn_mask"])
        assert all(whole.numel() <= 2 * LENGTH for whole in masks.wholes.values())
        assert masks.says(node.kwargs["attn_mask"]) == found[how] and len(masks.known) == 1
    assert found == {"wide": True, "window": "a mask is neither causal nor without effect"}
    monkeypatch.setattr(open_attention, "MOST_ELEMENTS", LENGTH // 2)
    masks = Masks(program.graphs[JOINT])
    assert masks.says(node.kwargs["attn_mask"]) == f"a mask has {LENGTH} elements in each row"


def test_new_calls_know_their_lines() -> None:
    _, calls = opened("written", 2)
    assert all("test_passes_open_attention.py" in info(n).line for n in calls[:1])
    assert [info(n).phase.value for n in calls] == ["forward", "backward"]
