"""Each thing a static graph cannot hold: refused by name and line, and the model left as it was."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from capture_check import check, snapshot
from torch import Tensor, nn

import zerofx
from zerofx.errors import CaptureError

OUTSIDE = nn.Parameter(torch.ones(4))


class Culprit(nn.Module):
    """A linear layer, and the fault: a function of (module, the layer's result, the input)."""

    def __init__(self, fault: Callable[..., Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.embed = nn.Embedding(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.seen, self.by_name = 0, [1], {"a": 1}
        self.last: Any = None
        self.memory = torch.zeros(4)
        self.own = (self.fc.bias,)
        self.rng = np.random.default_rng(0)
        self.python_rng = random.Random(0)
        self.generator = torch.Generator()
        self.fault = fault

    def forward(self, x: Tensor) -> Any:
        return self.fault(self, self.fc(x), x)


def count(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.calls += 1
    return h.sum()


def print_in_graph(m: Any, h: Tensor, x: Tensor) -> Tensor:
    torch.ops.aten._print("seen")
    return h.sum()


def keep(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.last = h.detach()
    return h.sum()


def remember(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.seen.append(2)
    return h.sum()


def file(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.by_name[len(m.by_name)] = 2
    return h.sum()


def write(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.memory.add_(1)
    return (h * m.memory).sum()


def write_part(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.memory[0].add_(1)
    return (h * m.memory).sum()


def add_module(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.late = nn.Identity()
    return h.sum()


def add_buffer(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.register_buffer("late", torch.zeros(2))
    return h.sum()


def add_hook(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.fc.register_forward_hook(lambda module, args, result: 2 * result)
    return h.sum()


def rebind(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.fc.weight = nn.Parameter(torch.zeros(4, 4))
    return h.sum()


def rebind_in_graph(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.mean = m.mean + h.mean(0)
    return h.sum()


def clamp_weight(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.fc.weight.data.clamp_(-1, 1)
    return h.sum()


def set_dtype(m: Any, h: Tensor, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return h.sum()


def set_grad(m: Any, h: Tensor, x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    return h.sum()


def seed(m: Any, h: Tensor, x: Tensor) -> Tensor:
    torch.manual_seed(11)
    return h.sum() * torch.rand(())


def branch(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if h.sum() > 0:
        return h.sum()
    return h.mean()


def skip_layer(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h.sum() if torch.rand([]) < 0.5 else h.mean()


def packed(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence(h[None], torch.tensor([3]), batch_first=True).data


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * grad.sum().item()


FAULTS: list[tuple[Callable[..., Any], str]] = [
    (lambda m, h, x: h * h.sum().item(), r"\.item\(\) reads a tensor's value at"),
    (lambda m, h, x: h * h.sum(0).tolist()[0], r"\.tolist\(\) reads a tensor's values at"),
    (lambda m, h, x: h.sum() + h.detach().numpy().sum(), "a tensor is handed to NumPy at"),
    (lambda m, h, x: h * int(x.sum()), r"int\(\) reads a tensor's value at"),
    (lambda m, h, x: h.sum() * range(3)[x.argmax()], "used as an index or a size at"),
    (lambda m, h, x: h.sum() if 3 in x.long() else h, "control flow depends on a tensor's values"),
    (lambda m, h, x: ReadsInBackward.apply(h).sum(), "a tensor's value is read at"),
    (lambda m, h, x: f"{h.mean():.2f}" and h.sum(), "a tensor's value is formatted as text at"),
    (lambda m, h, x: h.sum() * complex(x.sum()).real, r"complex\(\) reads a tensor's value at"),
    (lambda m, h, x: np.asarray(h.detach()).sum() + h.sum(), "a tensor is handed to NumPy at"),
    (
        lambda m, h, x: h.sum() if torch.equal(h, x) else h,
        r"torch\.equal\(\) reads the values .* at",
    ),
    (
        lambda m, h, x: h.sum() + torch.zeros(x.long().sum()).sum(),
        r"a size for torch\.zeros\(\) at",
    ),
    (
        lambda m, h, x: torch.tensor([h.mean(), h.std()]).sum(),
        r"torch\.tensor\(\) reads .* Use torch\.st",
    ),
    (lambda m, h, x: copy.deepcopy(h.detach()).sum() + h.sum(), "a tensor is deep-copied at"),
    (lambda m, h, x: h.sum().backward() or h.sum(), r"forward calls backward\(\) at"),
    (branch, "control flow depends on a tensor's value at"),
    (skip_layer, "control flow depends on a tensor's value at"),
    (lambda m, h, x: h[x > 0].sum(), "indexing by a mask at"),
    (lambda m, h, x: h.sum() + torch.nonzero(x).sum(), r"nonzero\(\) at"),
    (lambda m, h, x: h.sum() * torch.unique(x).numel(), r"unique\(\) at"),
    (packed, r"_pack_padded_sequence\(\) at"),
    (lambda m, h, x: (h * random.random()).sum(), "draws from Python's random generator at"),
    (lambda m, h, x: (h * np.random.rand()).sum(), "draws from NumPy's random generator at"),
    (lambda m, h, x: (h * m.rng.random()).sum(), "changes the attribute rng at"),
    (lambda m, h, x: (h * m.python_rng.random()).sum(), "changes the attribute python_rng at"),
    (lambda m, h, x: h.sum() * torch.rand(4, generator=m.generator).sum(), "a generator of the"),
    (count, "changes the attribute calls at"),
    (keep, "changes the attribute last at"),
    (remember, "changes the attribute seen at"),
    (file, "changes the attribute by_name at"),
    (write, "changes a tensor in place at .* Register it with register_buffer"),
    (write_part, "changes a tensor in place at .* Register it with register_buffer"),
    (add_module, "changes the attribute late at"),
    (add_hook, r"changes the attribute fc\._forward_hooks at"),
    (add_buffer, "registers late at"),
    (rebind, r"rebinds fc\.weight at"),
    (rebind_in_graph, "rebinds mean at"),
    (clamp_weight, r"changes the parameter fc\.weight in place at"),
    (set_dtype, r"changes the default dtype \(torch.float32 -> torch.float64\) at"),
    (set_grad, r"changes grad mode \(True -> False\) at"),
    (seed, "changes the seed of torch's generator .* at"),
    (lambda m, h, x: (h * OUTSIDE).sum(), r"shape \[4\] at .* is no parameter of the model"),
    (lambda m, h, x: (h * m.own[0]).sum(), r"shape \[4\] at .* is no parameter of the model"),
    (
        lambda m, h, x: F.embedding(x.argmax(-1), m.embed.weight, sparse=True),
        r"gradient of embed\.weight is sparse",
    ),
    (lambda m, h, x: (h @ torch.ones(3, 3)).sum(), "forward failed at .*same reduction dim"),
    (print_in_graph, r"aten::_print at .* has an effect|aten\._print.* at .* has an effect"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[m for _, m in FAULTS])
def test_fault_is_named_and_undone(fault: Callable[..., Any], message: str) -> None:
    model = Culprit(fault)
    x = torch.randn(3, 4)
    before, numpy_state = snapshot(model), np.random.get_state()[1].tolist()
    draws = model.rng.bit_generator.state, model.python_rng.getstate()
    with pytest.raises(CaptureError, match=message) as caught:
        zerofx.capture(model, (x,))
    in_backward = "ReadsInBackward" in fault.__code__.co_names
    code = ReadsInBackward.backward.__code__ if in_backward else fault.__code__
    lines = [n for _, _, n in code.co_lines() if n is not None]
    named = re.search(r" test_capture_errors\.py:(\d+)", str(caught.value))
    assert named is not None and min(lines) <= int(named[1]) <= max(lines), str(caught.value)
    assert snapshot(model) == before
    assert np.random.get_state()[1].tolist() == numpy_state
    assert (model.rng.bit_generator.state, model.python_rng.getstate()) == draws
    assert not model.memory.any()
    model.fault = lambda m, h, x: h.sum()
    check(model, torch.randn(3, 4))


# -- the model's own exceptions, and calls --------------------------------------------------------
def test_an_error_of_the_model_passes_unchanged() -> None:
    def fault(m: Any, h: Tensor, x: Tensor) -> Tensor:
        raise KeyError("the model's own")

    with pytest.raises(KeyError, match="the model's own"):
        zerofx.capture(Culprit(fault), (torch.randn(3, 4),))


def test_what_python_says_of_a_tensor_names_no_class_of_the_tracer() -> None:
    with pytest.raises(TypeError, match=r"^type Tensor doesn't define __round__ method$"):
        zerofx.capture(Culprit(lambda m, h, x: h.sum() * round(x.sum())), (torch.randn(3, 4),))


def test_a_tensor_that_is_printed_has_no_values_and_is_warned_of(capsys: Any) -> None:
    def fault(m: Any, h: Tensor, x: Tensor) -> Tensor:
        print(f"h is {h}", x)
        return h.sum()

    line = fault.__code__.co_firstlineno + 1
    with pytest.warns(UserWarning, match=f"into text .* at test_capture_errors.py:{line}. "):
        zerofx.capture(Culprit(fault), (torch.randn(3, 4),))
    shown = "tensor(..., size=(3, 4), dtype=torch.float32)"
    assert f"h is {shown} {shown}\n" in capsys.readouterr().out


def test_wrong_arguments_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        zerofx.capture(Culprit(count), ())


# -- arguments ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((np.zeros(4),), "argument x is a ndarray"),
        (({"a": [{1, 2}]},), r"argument x\.a\[0\] is a set"),
        (
            (SimpleNamespace(ids=[torch.ones(2)]),),
            r"x is a SimpleNamespace that holds tensors \(ids\)",
        ),
        ((nn.Linear(2, 2),), "x is a Linear that holds tensors"),
        ((torch.eye(4).to_sparse(),), "argument x is a tensor of kind sparse_coo"),
    ],
)
def test_argument_that_is_refused(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        zerofx.capture(Culprit(count), args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_absent_device_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(CaptureError, match=r"device cuda is not available\. To plan for GPUs"):
        zerofx.capture(model, (torch.randn(1, 2),), device="cuda")


def test_packed_sequence_is_refused() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    with pytest.raises(CaptureError, match=r"PackedSequence.*Pass the padded tensor"):
        zerofx.capture(nn.LSTM(4, 4), (packed,))


# -- modules --------------------------------------------------------------------------------------
def test_sparse_embeddings_are_captured_and_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 1))
    tokens = torch.tensor([1, 2])
    zerofx.capture(model, (tokens,))
    assert model[0].sparse
    with torch.no_grad():
        check(model, tokens)


def test_wrapped_modules_are_refused() -> None:
    with pytest.raises(CaptureError, match="inner is a DataParallel"):
        model = nn.Sequential()
        model.add_module("inner", nn.DataParallel(nn.Linear(2, 2)))
        zerofx.capture(model, (torch.randn(1, 2),))
    with pytest.raises(CaptureError, match="the model is a OptimizedModule"):
        zerofx.capture(torch.compile(nn.Linear(2, 2)), (torch.randn(1, 2),))


def test_lazy_parameters_and_gradient_hooks_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"0\.weight has no shape yet"):
        zerofx.capture(nn.Sequential(nn.LazyLinear(3)), (torch.randn(1, 2),))
    with pytest.raises(CaptureError, match=r"0.weight has no shape yet"):
        zerofx.compile(nn.Sequential(nn.LazyLinear(3)))
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda g: g * 2)
    with pytest.raises(CaptureError, match="weight has a gradient hook"):
        zerofx.capture(model, (torch.randn(1, 2),))
