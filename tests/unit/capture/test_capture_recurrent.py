"""The recurrent op: torch's own checks, and its backward where compiled code calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zerofx.kernels.recurrent import MODES, recurrent, recurrent_grads

LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


def arguments(mode: str, is_bidirectional: bool = True, has_biases: bool = True) -> tuple[Any, ...]:
    torch.manual_seed(0)
    layer = LAYERS[mode](3, 4, bidirectional=is_bidirectional, bias=has_biases)
    state = torch.randn(2 if is_bidirectional else 1, 2, 4)
    hidden = [state, state * 2] if mode == "lstm" else [state]
    weights = [w.detach() for w in layer._flat_weights]
    return torch.randn(5, 2, 3), hidden, weights, mode, has_biases, is_bidirectional


def with_grad(args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, hidden, weights, *how = args
    x, *rest = (t.clone().requires_grad_() for t in (x, *hidden, *weights))
    return x, rest[: len(hidden)], rest[len(hidden) :], *how


def eager(x: Tensor, hidden: Any, weights: Any, mode: str, biases: bool, both: bool) -> Any:
    state = (hidden,) if mode == "lstm" else tuple(hidden)
    return MODES[mode](x, *state, weights, biases, 1, 0.0, True, both, False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("is_bidirectional", "has_biases"), [(True, True), (False, False)])
def test_op_equals_torch(mode: str, is_bidirectional: bool, has_biases: bool) -> None:
    args = arguments(mode, is_bidirectional, has_biases)
    same_as_torch(args, exactly=False)
    torch.backends.mkldnn.set_flags(_enabled=False)  # flags() sets TF32 too, and warns of it
    try:
        same_as_torch(args, exactly=True)
    finally:
        torch.backends.mkldnn.set_flags(_enabled=True)


def same_as_torch(args: tuple[Any, ...], exactly: bool) -> None:
    """Compare values, exactly or to rounding, and gradients, to rounding.

    oneDNN computes an LSTM for inference, as the op's forward does, by other instructions than for
    training where the processor has AVX-512. ATen's own kernel is one for both.
    """
    rounding = {"rtol": 1e-6, "atol": 1e-7} if exactly else {"rtol": 1e-5, "atol": 2e-6}
    mine, theirs = with_grad(args), with_grad(args)
    got, expected = recurrent(*mine)[: len(args[1]) + 1], eager(*theirs)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b) or not exactly
        torch.testing.assert_close(a, b, **rounding)
    sum(o.square().sum() for o in got).backward()
    sum(o.square().sum() for o in expected).backward()
    for a, b in zip(
        (mine[0], *mine[1], *mine[2]), (theirs[0], *theirs[1], *theirs[2]), strict=True
    ):
        torch.testing.assert_close(a.grad, b.grad, **rounding)


@pytest.mark.parametrize("mode", MODES)
def test_op_passes_torchs_own_checks(mode: str) -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(recurrent, with_grad(arguments(mode)), test_utils=checks)


def test_backward_below_autograd() -> None:
    """Inductor's code calls ops with autograd's dispatch keys excluded."""
    args = arguments("gru")
    out, h, _ = recurrent(*args)
    grads = [torch.ones_like(out), torch.ones_like(h), torch.empty(0)]
    expected = recurrent_grads(grads, *args)
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        got = recurrent_grads(grads, *args)
    assert all(map(torch.equal, got, expected))
