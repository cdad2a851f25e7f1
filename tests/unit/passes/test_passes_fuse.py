"""fuse: patterns become one node each, and the program computes what it did."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_cases import FOUND, both, captured, fused, names
from models import CASES
from passes_compact import run
from torch import Tensor, nn

import zerofx
from zerofx.errors import PlanError
from zerofx.ir.meta import info
from zerofx.ir.program import Planned
from zerofx.kernels import ops
from zerofx.passes.fuse import Fuse
from zerofx.passes.merge_tied import MergeTied

# A linear layer with bias and its loss; views of the weight left out.
HEAD_BEFORE = """
addmm _log_softmax nll_loss_forward getitem getitem nll_loss_backward detach detach
_log_softmax_backward_data mm mm sum view
"""
HEAD_EXPECTED = """
linear_cross_entropy getitem getitem linear_cross_entropy_backward getitem getitem getitem
"""


# -- a loss head -----------------------------------------------------------------------------------
class Head(nn.Module):
    """A linear layer and a loss of one's choice."""

    def __init__(self, loss: Callable[..., Tensor] = F.cross_entropy, bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 11, bias=bias)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return self.loss(self.fc(x), target)


def head(model: nn.Module, *shape: int) -> tuple[Planned, tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, 6, generator=generator).to(next(model.parameters()).dtype)
    args = (x, torch.randint(0, 11, shape, generator=generator))
    return zerofx.capture(model, args, {}), args


def test_before_and_expected() -> None:
    model = Head()
    x = torch.randn(4, 6).requires_grad_()
    args = (x, torch.arange(4))
    before = zerofx.capture(model, args, {})
    assert sorted(names(before)) == sorted(HEAD_BEFORE.split())
    after, summary = fused(before)
    assert summary == "1 linear-cross-entropy"
    assert names(after) == HEAD_EXPECTED.split()
    assert both(before, after, model, args, {}) < 1e-6


def test_nodes_keep_their_place() -> None:
    program, _ = fused(captured("gpt"))
    loss = next(n for n in program.graph("joint").nodes if n.target is ops.linear_cross_entropy)
    back = next(
        n for n in program.graph("joint").nodes if n.target is ops.linear_cross_entropy_backward
    )
    assert info(loss).line and info(loss).phase.value == "forward"
    assert info(back).module == "head" and info(back).phase.value == "backward"
    _, weight, bias, _, ignore_index, is_mean, smoothing = loss.args
    assert info(weight).name == "head.weight" and bias is None  # type: ignore[arg-type]
    assert (ignore_index, is_mean, smoothing) == (-100, True, 0.0)
    assert back.args[1:5] == loss.args[:4]


LOSSES: dict[str, Callable[..., Any]] = {
    "sum": lambda x, t: F.cross_entropy(x, t, reduction="sum", ignore_index=3),
    "wide": lambda x, t: F.cross_entropy(x.float(), t),
    "nll": lambda x, t: F.nll_loss(F.log_softmax(x, dim=-1), t),
    "tokens": lambda x, t: F.cross_entropy(x.view(-1, 11), t.view(-1)),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "smoothed": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "weighted": lambda x, t: F.cross_entropy(x, t, weight=torch.ones(11)),
    "each": lambda x, t: F.cross_entropy(x, t, reduction="none").sum(),
    "returned": lambda x, t: {"loss": F.cross_entropy(x, t), "logits": x},
    "read": lambda x, t: F.cross_entropy(x, t) + x.square().mean(),
    "scaled": lambda x, t: F.cross_entropy(x / 2, t),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_found(name: str, dtype: torch.dtype, bias: bool) -> None:
    model = Head(LOSSES[name], bias).to(dtype)
    before, args = head(model, *((2, 5) if name == "tokens" else (10,)))
    after, summary = fused(before)
    assert summary == "1 linear-cross-entropy"
    assert both(before, after, model, args, {}) < (1e-6 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("name", OTHERS)
def test_losses_that_are_none(name: str) -> None:
    before, _ = head(Head(OTHERS[name]), 10)
    after, summary = fused(before)
    assert summary == "no pattern found"
    assert names(after) == names(before)


def test_doubles_are_left_alone() -> None:
    before, _ = head(Head().double(), 10)
    assert fused(before)[1] == "no pattern found"


@pytest.mark.parametrize("frozen", ["weight", "bias", "hidden"])
def test_only_gradients_that_are_wanted(frozen: str) -> None:
    model = Head()
    if frozen != "hidden":
        getattr(model.fc, frozen).requires_grad_(False)
    x = torch.randn(4, 6).requires_grad_(frozen != "hidden")
    before = zerofx.capture(model, (x, torch.arange(4)), {})
    after, summary = fused(before)
    assert summary == "1 linear-cross-entropy"
    back = next(
        n for n in after.graph("joint").nodes if n.target is ops.linear_cross_entropy_backward
    )
    assert back.args[6:8] == (frozen != "hidden", True)
    assert both(before, after, model, (x, torch.arange(4)), {}) < 1e-6


# -- norms -----------------------------------------------------------------------------------------
def residuals(program: Planned, target: Any) -> Counter[bool]:
    nodes = program.graph("joint").nodes
    return Counter(n.args[1] is not None for n in nodes if n.target is target)


def test_a_residual_sum_goes_with_the_norm_of_its_unit() -> None:
    """In each of two layers the second norm; the first one's sum is the layer before's."""
    llama, _ = fused(captured("hf-llama"))
    assert residuals(llama, ops.rms_norm) == {True: 2, False: 3}
    gpt, _ = fused(captured("gpt"))
    assert residuals(gpt, ops.layer_norm) == {True: 2, False: 3}


def test_the_residual_streams_gradient_goes_through_the_backward() -> None:
    """All but the last norm, behind which the stream ends, add to what comes from behind."""
    for case, target in (("hf-llama", ops.rms_norm_backward), ("gpt", ops.layer_norm_backward)):
        program, _ = fused(captured(case))
        backwards = [n for n in program.graph("joint").nodes if n.target is target]
        sums = [n.args[-1] is not None for n in backwards]
        assert sums == [False, True, True, True, True]


class Norms(nn.Module):
    """torch's own RMSNorm, its input a gradient's source or not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.fc(x))).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_rms_norm(dtype: torch.dtype) -> None:
    model = Norms().to(dtype)
    with torch.no_grad():
        model.norm.weight.mul_(1.3)
    x = torch.randn(5, 8).to(dtype)
    before = zerofx.capture(model, (x,), {})
    after, summary = fused(before)
    assert summary == "1 rms-norm"
    assert both(before, after, model, (x,), {}) < (1e-6 if dtype is torch.float32 else 2e-2)


# -- pointwise -------------------------------------------------------------------------------------
class Gated(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor], keep: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 16)
        self.activation, self.keep = activation, keep

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc(x).chunk(2, -1)
        act = self.activation(gate)
        return (act * up).square().mean() + (act.mean() if self.keep else 0)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activations(name: str) -> None:
    model, args = Gated(ACTIVATIONS[name]), (torch.randn(5, 6),)
    before = zerofx.capture(model, args, {})
    after, summary = fused(before)
    assert summary == "1 gated-activation"
    node = next(n for n in after.graph("joint").nodes if n.target is ops.gated_activation)
    assert node.args[2] == name
    assert both(before, after, model, args, {}) < 1e-6


def test_an_activation_that_is_read_elsewhere_stays() -> None:
    before = zerofx.capture(Gated(F.silu, keep=True), (torch.randn(5, 6),), {})
    assert fused(before)[1] == "no pattern found"


# -- the pass --------------------------------------------------------------------------------------
def test_patterns_are_named() -> None:
    program = captured("hf-llama")
    assert fused(program, "rms-norm+gated-activation")[1] == "5 rms-norm, 2 gated-activation"
    assert Fuse("rms-norm").spec() == "fuse{patterns=rms-norm}"
    with pytest.raises(PlanError, match=r"fuse: no pattern is named 'rmsnorm'.*rms-norm"):
        Fuse("rmsnorm")


def test_tied_weights_are_merged_behind() -> None:
    """The head's gradient, now a result of the fused node, is summed with the embedding's."""
    after = run(fused(captured("gpt"))[0], MergeTied())
    at = next(i for i, s in enumerate(after.outputs["joint"]) if s.name == "embed.weight")
    total = after.results("joint")[at]
    assert total.target is torch.ops.aten.add.Tensor
    sources = {behind_views(a).target for a in total.args}
    assert sources == {
        ops.linear_cross_entropy_backward, torch.ops.aten.embedding_dense_backward.default,
    }  # fmt: skip


def test_the_order_with_merge_tied_is_free() -> None:
    after, summary = fused(run(captured("gpt"), MergeTied()))
    assert summary == FOUND["gpt"]
    one, other = run(fused(captured("gpt"))[0], MergeTied()), after
    assert sorted(names(one)) == sorted(names(other))
    args, kwargs = CASES["gpt"].batch(0)
    assert both(one, other, CASES["gpt"].make(), args, kwargs) == 0.0


def behind_views(node: torch.fx.Node) -> torch.fx.Node:
    while node.target in (torch.ops.aten.t.default, operator.getitem):
        node = node.args[0]
    return node


def test_nothing_found_is_nothing_changed() -> None:
    program = captured("chain").planned().clone()
    before = str(program.graph("joint"))
    assert not Fuse().run(program).changed
    assert str(program.graph("joint")) == before
