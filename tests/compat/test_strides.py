"""Strides: fake kernels name those that run, and regions keep those they were captured with."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import WIDE
from pool import Pool
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map
from training import train_cell

import zerofx
from zerofx.compat.strides import _RULES, TrueStrides, has_strides, keep_strides
from zerofx.runtime.regions.load import following

aten = torch.ops.aten
SHAPE = (2, 4, 3, 6)
ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (0, 2, 3, 1), (3, 2, 1, 0)]
DENSE = [(0, 1, 2, 3), (0, 2, 3, 1)]  # contiguous or channels last: autograd gives it nothing else


def laid(order: tuple[int, ...]) -> Tensor:
    """Return a tensor of SHAPE whose dimensions lie in memory in this order."""
    return torch.rand([SHAPE[d] for d in order]).permute([order.index(d) for d in range(4)])


def channels() -> Tensor:
    return torch.ones(SHAPE[1])


# -- fake kernels ---------------------------------------------------------------------------------
# One call of each operator whose fake kernel is corrected, from two tensors of any strides.
CALLS: dict[Any, Callable[[Tensor, Tensor], Any]] = {
    aten._log_softmax_backward_data.default: lambda g, x: (g, x, 1, torch.float32),
    aten.binary_cross_entropy.default: lambda g, x: (g, x, None, 0),
    aten.elu_backward.default: lambda g, x: (g, 1, 1, 1, False, x),
    aten.floor_divide.default: lambda g, x: (g, x),
    aten.glu_backward.default: lambda g, x: (g[:, :2], x, 1),
    aten.hardsigmoid_backward.default: lambda g, x: (g, x),
    aten.hardswish_backward.default: lambda g, x: (g, x),
    aten.hardtanh_backward.default: lambda g, x: (g, x, 0, 1),
    aten.huber_loss_backward.default: lambda g, x: (g.sum(), g, x, 1, 1.0),
    aten.log_sigmoid_forward.default: lambda g, x: (x,),
    aten.logit_backward.default: lambda g, x: (g, x, 0.1),
    aten.mse_loss_backward.default: lambda g, x: (g, x, x, 0),
    aten.native_batch_norm.default: lambda g, x: (
        x, *[channels() for _ in range(4)], True, 0.1, 0.1,
    ),
    aten._native_batch_norm_legit.default: lambda g, x: (
        x, *[channels() for _ in range(4)], True, 0.1, 0.1,
    ),
    aten._native_batch_norm_legit.no_stats: lambda g, x: (
        x, channels(), channels(), True, 0.1, 0.1,
    ),
    aten._native_batch_norm_legit_functional.default: lambda g, x: (
        x, *[channels() for _ in range(4)], True, 0.1, 0.1,
    ),
    aten.native_batch_norm_backward.default: lambda g, x: (
        g, x, *[channels() for _ in range(5)], True, 0.1, [True] * 3,
    ),
    aten.native_group_norm_backward.default: lambda g, x: (
        g, x, torch.ones(2, 2), torch.ones(2, 2), channels(), 2, 4, 18, 2, [True] * 3,
    ),
    aten.native_layer_norm_backward.default: lambda g, x: (
        g, x, [6], torch.ones(2, 4, 3, 1), torch.ones(2, 4, 3, 1), torch.ones(6), torch.ones(6),
        [True] * 3,
    ),
    aten.reflection_pad2d_backward.default: lambda g, x: (
        torch.ones(2, 4, 5, 8), x, [1, 1, 1, 1],
    ),
    aten.roll.default: lambda g, x: (x, [1], [1]),
    aten.smooth_l1_loss_backward.default: lambda g, x: (g.sum(), g, x, 1, 1.0),
    aten.softplus_backward.default: lambda g, x: (g, x, 1, 20),
    aten.xlogy.Tensor: lambda g, x: (g, x),
}  # fmt: skip


def faked(value: Any) -> Any:
    return torch.empty_strided(value.shape, value.stride()) if torch.is_tensor(value) else value


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_fake_strides_are_the_operators(op: Any) -> None:
    """Whatever the strides of the arguments, the fake results have those of the real ones."""
    orders = DENSE if op is aten.native_group_norm_backward.default else ORDERS
    for first, second in itertools.product(orders, repeat=2):
        args = CALLS[op](laid(first), laid(second))
        with torch.no_grad():
            ran = tree_leaves(op(*args))
        with TrueStrides():
            said = tree_leaves(op(*tree_map(faked, args)))
        for real, fake in zip(ran, said, strict=True):
            assert real.shape == fake.shape
            assert has_strides(fake, real.stride()), (first, second, real.stride(), fake.stride())


def test_every_corrected_operator_is_compared() -> None:
    assert set(CALLS) == set(_RULES)


# -- models on ATen -------------------------------------------------------------------------------
class Gated(nn.Module):
    """A gate over transposed features, as gated delta nets have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        decay = F.softplus(self.gate(x).transpose(1, 2)).contiguous()
        return self.out(decay.cumsum(-1).transpose(1, 2)).square().mean()


class Transposed(nn.Module):
    """Norms over a transposed stream: layer norm's input gradient is contiguous on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(5, 5)
        self.norm, self.groups = nn.LayerNorm(8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).transpose(1, 2)
        h = self.groups(self.second(h.contiguous())).transpose(1, 2)
        return F.hardswish(h).reshape(-1, 8).square().mean()


class Copied(nn.Module):
    """Copies of inputs in another layout, which backward reads: they are the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 3), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, None].contiguous(memory_format=torch.channels_last)
        return self.conv(image).square().mean() + self.out(x.clone()).square().mean()


class Pooled(nn.Module):
    """A regression on pooled features; its loss divides by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5 * 8)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.conv(x[:, None].expand(-1, 3, -1, -1)).mean((2, 3))
        return F.mse_loss(self.head(pooled).view(-1, 5, 8), x)


def check_against_plain(make: type[nn.Module], rows: tuple[int, ...], kernels: str) -> None:
    """Train on batches of these many rows beside plain PyTorch; gradients agree, also in NaN."""
    torch.manual_seed(0)
    plain = make()
    model = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(stage=3, kernels=kernels))
    for count in rows:
        x = torch.randn(count, 5, 8)
        plain.zero_grad()
        model.zero_grad()
        wanted, found = plain(x), model(x)
        wanted.backward()
        found.backward()
        torch.testing.assert_close(found, wanted, equal_nan=True)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, equal_nan=True)


@pytest.mark.parametrize("make", [Gated, Transposed, Copied])
def test_strides_on_aten(make: type[nn.Module]) -> None:
    check_against_plain(make, (2,), "aten")


@pytest.mark.parametrize("make", [Gated, Pooled])
def test_no_rows(make: type[nn.Module]) -> None:
    """An empty batch between others gives eager's gradients: NaN where a mean is of nothing."""
    check_against_plain(make, (2, 0, 2), "aten")


@pytest.mark.slow
@pytest.mark.parametrize("make", [Gated, Transposed, Pooled])
def test_strides_and_no_rows_in_compiled_regions(make: type[nn.Module]) -> None:
    check_against_plain(make, (2, 0, 2), "inductor")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernels"), [*((name, "aten") for name in WIDE), (WIDE[0], "inductor")]
)
def test_architectures_train_as_plain(pool: Pool, name: str, kernels: str) -> None:
    plan, options = {"stage": 3, "kernels": kernels}, {"steps": 2}
    for report in pool.run(2, train_cell, name, plan, options, timeout_s=600):
        assert report.loss <= 1e-6, report
        assert report.model <= 1e-6, report
        assert max(report.tensors.values()) <= 2e-6, report


# -- regions --------------------------------------------------------------------------------------
def region_of(body: Callable[..., list[fx.Node]], *given: Tensor) -> tuple[fx.GraphModule, Any]:
    graph = fx.Graph()
    graph.output(tuple(body(graph, *[graph.placeholder(f"x{i}") for i in range(len(given))])))
    gm = fx.GraphModule(nn.Module(), graph)
    with TrueStrides():
        keep_strides(gm, [faked(x) for x in given])
    return gm, [n.target for n in gm.graph.nodes if n.op == "call_function"]


def test_views_copy_where_decomposing_changes_strides() -> None:
    """The gradient of a layer norm is contiguous; its decomposition follows the incoming one."""

    def body(graph: fx.Graph, g: fx.Node, x: fx.Node, mean: fx.Node) -> list[fx.Node]:
        args = (g, x, [6], mean, mean, None, None, [True, False, False])
        norm = graph.call_function(aten.native_layer_norm_backward.default, args)
        made = graph.call_function(operator.getitem, (norm, 0))
        flat = graph.call_function(aten.view.default, (made, [24, 6]))
        seen = graph.call_function(aten.view.default, (x, [144]))
        return [made, flat, seen]

    g, x = laid((0, 1, 3, 2)), laid((0, 1, 2, 3))
    mean = torch.ones(2, 4, 3, 1)
    gm, targets = region_of(body, g, x, mean)
    assert aten.reshape.default in targets
    assert targets.count(aten.view.default) == 1  # of an input, whose strides are known
    assert aten.clone.default in targets
    masks = [True, False, False]
    wanted = aten.native_layer_norm_backward(g, x, [6], mean, mean, None, None, masks)
    found = gm(g, x, mean)
    assert torch.equal(found[0], wanted[0])
    assert found[0].stride() == wanted[0].stride()


def test_nothing_is_copied_where_strides_agree() -> None:
    def body(graph: fx.Graph, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        total = graph.call_function(aten.mul.Tensor, (x, y))
        return [graph.call_function(aten.permute.default, (total, [0, 2, 1, 3]))]

    _, targets = region_of(body, laid((0, 2, 1, 3)), laid((0, 2, 1, 3)))
    assert targets == [aten.mul.Tensor, aten.permute.default]


def test_results_are_copied_into_place_only_if_they_differ() -> None:
    x = laid((0, 2, 1, 3))
    kept = following(lambda args: (args[0],), (x.stride(),))
    assert kept([x])[0] is x
    moved = following(lambda args: (args[0], args[0]), (x.contiguous().stride(), x.stride()))
    for _ in range(2):
        first, second = moved([x])
        assert first.is_contiguous()
        assert torch.equal(first, x)
        assert second is x
