"""The recurrent op: torch's own checks, and its backward where compiled code calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zerofx.kernels.recurrent import (
    MODES,
    lstm_direction,
    recurrent,
    recurrent_grads,
    run_recurrent,
    workspace_of,
)

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


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("has_biases", [True, False])
@pytest.mark.parametrize("is_bidirectional", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_lstm_runs_onednns_kernel_once(
    has_biases: bool, is_bidirectional: bool, batch_first: bool
) -> None:
    """Values and gradients are eager's, bit for bit: backward reads forward's workspace."""
    torch.manual_seed(0)
    layer = nn.LSTM(
        3, 4, 2, bias=has_biases, bidirectional=is_bidirectional, batch_first=batch_first
    )
    x = torch.randn(5, 6, 3, requires_grad=True)
    rows = 4 if is_bidirectional else 2
    h, c = (torch.randn(rows, 5 if batch_first else 6, 4, requires_grad=True) for _ in range(2))
    how = (has_biases, 2, 0.0, True, is_bidirectional, batch_first)
    eager_output, (eager_h, eager_c) = layer(x, (h, c))
    mine = run_recurrent("lstm", (x, (h, c), layer._flat_weights, *how))
    theirs = eager_output, eager_h, eager_c
    leaves = [x, h, c, *layer.parameters()]
    found = []
    for results in (mine, theirs):
        loss = results[0].square().sum() + results[1].sum() + results[2].square().sum()
        found.append(torch.autograd.grad(loss, leaves))
    assert all(map(torch.equal, mine, theirs))
    assert all(map(torch.equal, *found))
    assert len({g.data_ptr() for g in found[0]}) == len(leaves)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("has_biases", [True, False])
def test_lstm_direction_passes_torchs_own_checks(has_biases: bool) -> None:
    x, (h, c), weights, *_ = with_grad(arguments("lstm", False, has_biases))
    h, c = (state[0].detach().requires_grad_() for state in (h, c))
    given = (x, h, c, weights, True, True, workspace_of(*x.shape, 4))
    # Parts of the workspace are never written, so that two runs cannot be compared by its values.
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(lstm_direction, given, test_utils=checks)
