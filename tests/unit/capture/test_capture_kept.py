"""What tracing must keep: hooks, custom gradients, generators, buffers, ties, whole recurrences."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_check import Body, calls, check, vectors
from models import CASES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerofx
from zerofx.ir.meta import Role, info, value
from zerofx.kernels.recurrent import lstm_direction, recurrent


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 3


def with_hook(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: g * 2)
    return h.square().sum()


def with_inner_grad(m: Any, h: Tensor, x: Tensor) -> Tensor:
    point = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.fc(point).tanh().sum(), point, create_graph=True)
    return slope.square().sum() + h.sum()


def with_no_grad(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.abs().mean()
    return (h * scale + h.detach() * m.fc.bias).sum()


def with_autocast(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.fc(x)
    return (y.float() * h).sum()


def with_checkpoint(m: Any, h: Tensor, x: Tensor) -> Tensor:
    block = lambda v: F.dropout(F.gelu(m.fc(v)), 0.5, m.training)  # noqa: E731
    first = checkpoint(block, h, use_reentrant=False)
    return checkpoint(block, first, use_reentrant=True).sum()


def with_constants(m: Any, h: Tensor, x: Tensor) -> Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    mask = torch.ones(4, 4).tril()
    return (h @ mask * weights + torch.arange(4)).sum() * torch.tensor(0.5)


def with_indexing(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = h.clone()
    y[:, 0] = 0
    y[1] += 2
    return y.square().sum() + h.sort(-1)[0].cumsum(0).topk(2)[0].sum()


def with_distribution(m: Any, h: Tensor, x: Tensor) -> Tensor:
    normal = torch.distributions.Normal(h, 1.0)
    return -normal.log_prob(x).sum() + normal.rsample().sum()


def with_attention(m: Any, h: Tensor, x: Tensor) -> Tensor:
    q = h[None, None]
    return F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.3).sum()


def with_vmap(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * row.sum())(h).sum()


BODIES = [
    lambda m, h, x: Triple.apply(h * 5).mean(),
    with_hook,
    with_inner_grad,
    with_no_grad,
    with_autocast,
    with_checkpoint,
    with_constants,
    with_indexing,
    with_distribution,
    with_attention,
    with_vmap,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda b: getattr(b, "__name__", "lambda"))
def test_forward_that_needs_care(body: Callable[..., Any]) -> None:
    # Eager sums the gradients of a reentrant checkpoint in another order.
    program = check(Body(body), vectors(), tolerance=1e-7)
    assert all(
        re.match(r"(test_capture_kept|capture_check)\.py:\d", info(n).line) for n in calls(program)
    )


def test_whole_call_under_autocast() -> None:
    model = CASES["gpt"].make()
    args, _ = CASES["gpt"].batch(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = check(model, *args)
    assert any(value(n).dtype is torch.bfloat16 for n in calls(program) if "mm" in str(n.target))


def test_module_backward_hook() -> None:
    model = Body(lambda m, h, x: h.square().sum())
    model.fc.register_full_backward_hook(lambda _m, _into, out: (out[0].new_ones(3, 4) * 5,))
    check(model, vectors().requires_grad_())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_stay_whole(kind: type[nn.RNNBase], bidirectional: bool) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = kind(4, 5, 2, bidirectional=bidirectional, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            out, state = self.cells(x)
            return out.square().mean(), state

    model = Reader()
    program = check(model, torch.randn(2, 6, 4).requires_grad_(), tolerance=1e-6)
    is_lstm = kind is nn.LSTM and torch.backends.mkldnn.is_available()
    whole = [n for n in calls(program) if n.target is (lstm_direction if is_lstm else recurrent)]
    # One per layer, and in oneDNN per direction, whatever the number of steps.
    assert len(whole) == (4 if is_lstm and bidirectional else 2)
    assert model.cells._flat_weights[0] is model.cells.weight_ih_l0


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_recurrent_layer_with_projection_and_given_state() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(4, 5, proj_size=3, bias=False)
            self.start = nn.Parameter(torch.randn(1, 2, 3))

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            out, (h, c) = self.cells(x, (self.start, c))
            return out.sum() + (h.sum() * c).sum()

    check(Reader(), torch.randn(6, 2, 4), torch.randn(1, 2, 5).requires_grad_(), tolerance=1e-6)


def test_recurrent_dropout_draws_between_layers() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.GRU(4, 5, 3, dropout=0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.cells(x)[0].sum()

    program = zerofx.capture(Reader(), (torch.randn(6, 2, 4),))
    assert sum(info(n).is_random for n in calls(program)) == 2
    check(Reader().eval(), torch.randn(6, 2, 4), tolerance=1e-6)


# -- buffers, parameters, inputs ------------------------------------------------------------------
def test_buffers_updated_in_place_and_by_rebinding() -> None:
    def body(m: Any, h: Tensor, x: Tensor) -> Tensor:
        m.count.add_(1)
        m.count = m.count * 0.9 + h.detach().mean(0)
        return (h * m.count).sum()

    program = check(Body(body), vectors())
    roles = [(i.role, i.name) for i in program.outputs["joint"]]
    assert roles.count((Role.BUFFER_UPDATE, "count")) == 1


def test_names_of_one_buffer_are_one_placeholder() -> None:
    model = Body(lambda m, h, x: (h * m.count + m.twin).sum())
    model.register_buffer("twin", model.count)
    program = check(model, vectors())
    assert [info(n).name for n in program.placeholders("joint", Role.BUFFER)] == ["count"]
    assert program.buffers == ("count",)


def test_tied_unused_and_frozen_parameters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.unused = nn.Embedding(6, 4), nn.Linear(2, 2)
            self.frozen, self.head = nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.frozen(self.embed(x))).logsumexp(-1).mean()

    program = check(Model(), torch.tensor([[1, 2, 3]]))
    assert program.params["embed.weight"].aliases == ("head.weight",)
    assert "head.weight" not in program.params
    names = [info(n).name for n in program.placeholders("joint", Role.PARAM)]
    assert names == ["embed.weight", "frozen.weight", "frozen.bias", "head.weight"]
    graded = [i.name for i in program.outputs["joint"] if i.role is Role.GRAD]
    assert graded == ["embed.weight", "head.weight"]


def test_attributes_that_hold_parameters_follow_them() -> None:
    model = Body(lambda m, h, x: (h * m.alias * m.by_name["b"] + m.listed[0]).sum())
    model.__dict__.update(
        alias=model.fc.bias, by_name={"b": model.fc.bias}, listed=[model.count, 3]
    )
    check(model, vectors())


def test_input_changed_in_place() -> None:
    def body(m: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
        y.mul_(2)
        return (h * y).sum()

    program = check(Body(body), vectors(), vectors(1))
    updates = [i for i in program.outputs["joint"] if i.role is Role.INPUT_UPDATE]
    assert [(i.name, i.index) for i in updates] == [("args[1]", 1)]


def test_old_weight_norm_hook() -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 1))
    program = zerofx.capture(model, (vectors(),))
    graded = [i.name for i in program.outputs["joint"] if i.role is Role.GRAD]
    assert "0.weight_g" in graded
    model(vectors()).sum().backward()  # still usable


def test_what_the_user_compiled_is_traced_through() -> None:
    compiled = torch.compile(lambda v: (v * 2).tanh())
    model = Body(lambda m, h, x: compiled(h).sum())
    model.fc.compile()
    program = zerofx.capture(model, (vectors(),))
    assert torch.ops.aten.tanh.default in {n.target for n in calls(program)}
