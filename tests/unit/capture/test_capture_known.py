"""Values that a forward looks into although they never vary: computed while it is captured."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_check import Body, check, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerofx
from zerofx.errors import CaptureError, GradientError

ATEN = {"kernels": "aten"}


def written(m: Any, h: Tensor, x: Tensor) -> Tensor:
    mask = torch.zeros(4, 4)
    mask[0, 1] = 1.0
    mask.fill_diagonal_(2.0)
    return h @ mask if mask.sum() > 8 else h


def branch(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h if torch.triu(torch.ones(4, 4), 1).all() else h * 2


def drop_layers(m: Any, h: Tensor, x: Tensor) -> Tensor:
    skips = [bool(torch.rand([]) < 0.0), bool(torch.rand(()) >= 1.0), bool(torch.rand([]) > 1.0)]
    return h if any(skips) else h * 2


def in_own_context(m: Any, h: Tensor, x: Tensor) -> Tensor:
    def contexts() -> Any:
        return contextlib.nullcontext(), contextlib.nullcontext()

    return checkpoint(lambda t: m.fc(t).relu(), h, use_reentrant=False, context_fn=contexts)


KNOWN: dict[str, Callable[..., Any]] = {
    "written": written,
    "branch": branch,
    "drop_layers": drop_layers,
    "in_own_context": in_own_context,
    "item": lambda m, h, x: h * torch.linspace(0, 1, 4)[2].item(),
    "of_a_form": lambda m, h, x: h * torch.full_like(h, 0.5).max().item(),
    "tolist": lambda m, h, x: h.view(-1, *torch.tensor([[2, 2]]).tolist()[0]),
    "slice": lambda m, h, x: h[:, : torch.cumsum(torch.tensor([1, 2]), 0)[1]],
    "nonzero": lambda m, h, x: h[:, torch.nonzero(torch.tensor([1, 0, 1, 1])).flatten()],
    "mask": lambda m, h, x: h[~torch.eye(3, 4, dtype=torch.bool)].view(3, 3),
    "masked_select": lambda m, h, x: h.masked_select(torch.arange(4) > 1),
    "repeat": lambda m, h, x: h.repeat_interleave(torch.tensor([2, 0, 1]), 0),
    "inv": lambda m, h, x: torch.linalg.inv(h.T @ h + 4 * torch.eye(4)),
    "solve": lambda m, h, x: torch.linalg.solve(h.T @ h + 4 * torch.eye(4), x.T),
    "cholesky": lambda m, h, x: torch.linalg.cholesky(h.T @ h + 4 * torch.eye(4)),
}


@pytest.mark.parametrize("body", KNOWN.values(), ids=KNOWN)
def test_what_is_computed_from_constants_is_known(body: Callable[..., Any]) -> None:
    check(Body(body), vectors(), tolerance=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        lambda m, h, x: h if torch.rand([]) < 0.5 else h * 2,
        lambda m, h, x: h if torch.zeros_like(h).add(h).sum() > 0 else h * 2,
        lambda m, h, x: h if torch.empty(4).sum() > 0 else h * 2,
        lambda m, h, x: h if m.fc.weight.sum() > 0 else h * 2,
    ],
)
def test_what_varies_is_not_known(body: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match="control flow depends on a tensor's value"):
        zerofx.capture(Body(body), (vectors(),))


def test_a_check_of_linalg_is_part_of_the_program() -> None:
    def body(m: Any, h: Tensor, x: Tensor) -> Tensor:
        return torch.linalg.inv(x.T @ x) @ h.T

    model = zerofx.compile(Body(body), zerofx.Plan(**ATEN))
    model(torch.eye(4))
    with pytest.raises(RuntimeError, match="singular"):
        model(torch.zeros(4, 4))


# -- checks: control flow that raises --------------------------------------------------------------
def asserting(m: Any, h: Tensor, x: Tensor) -> Tensor:
    assert not torch.isnan(x).any(), "not a number"
    return h


def raising(m: Any, h: Tensor, x: Tensor) -> Tensor:
    for part in (x, h):
        if part.abs().max() > 1e6:
            raise ValueError(f"more than {1e6:.0f}")
    assert torch.isfinite(h).all().item()
    return h


def checking(m: Any, h: Tensor, x: Tensor) -> Tensor:
    torch._check_tensor_all(x < 1e6, lambda: "large")
    return h


@pytest.mark.parametrize(
    ("body", "bad", "said"),
    [
        (asserting, float("nan"), r"AssertionError: not a number \(test_capture_known.py"),
        (raising, 1e7, r"ValueError: more than 1000000 \(test_capture_known.py"),
        (checking, 1e7, "RuntimeError: a check of the model failed"),
    ],
)
def test_a_check_is_made_by_the_program(body: Any, bad: float, said: str) -> None:
    model = Body(body)
    check(model, vectors())
    zerofx.compile(model, zerofx.Plan(**ATEN))
    model(vectors())
    with pytest.raises(RuntimeError, match=said):
        model(torch.full((3, 4), bad))
    model(vectors())


# -- buffers ---------------------------------------------------------------------------------------
def by_buffer(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if m.count.sum() > 3 else h


def test_control_flow_on_a_buffer_follows_its_value(caplog: pytest.LogCaptureFixture) -> None:
    model = zerofx.compile(Body(by_buffer), zerofx.Plan(**ATEN))
    x = vectors()
    once = model(x)
    with caplog.at_level(logging.WARNING, "zerofx"):
        model.count.fill_(1.0)
        assert torch.equal(model(x), once * 2)
    assert "control flow depends on it" in caplog.text
    model.count = torch.zeros(4)
    assert torch.equal(model(x), once)
    model.load_state_dict(model.state_dict() | {"count": torch.ones(4)})
    assert torch.equal(model(x), once * 2)


def test_control_flow_on_a_buffer_that_forward_updates_is_refused() -> None:
    def body(m: Any, h: Tensor, x: Tensor) -> Tensor:
        m.count += 1
        return by_buffer(m, h, x)

    with pytest.raises(CaptureError, match=r"control flow depends .* at test_capture_known\.py"):
        zerofx.capture(Body(body), (vectors(),))


def test_averages_without_a_momentum() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    check(model, vectors(), tolerance=1e-6)
    model(vectors(1))
    check(model, vectors(2), tolerance=1e-6)
    check(model.eval(), vectors(3))


# -- the masks of nn.Transformer -------------------------------------------------------------------
class Encoder(nn.Module):
    """Two layers over a mask that forward makes, or that is given."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, mask=mask, src_key_padding_mask=pad)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)
PAD = torch.zeros(2, 6).masked_fill(torch.arange(6) > 3, float("-inf"))


@pytest.mark.parametrize(
    ("mask", "pad"),
    [
        pytest.param(None, None, id="made", marks=pytest.mark.slow),
        pytest.param(None, PAD, id="made-padded"),
        pytest.param(CAUSAL, None, id="given", marks=pytest.mark.slow),
        pytest.param(CAUSAL, PAD, id="given-padded", marks=pytest.mark.slow),
    ],
)
def test_masks_of_an_encoder(mask: Tensor | None, pad: Tensor | None) -> None:
    check(Encoder(), torch.randn(2, 6, 8), mask, pad, tolerance=1e-5)


def test_a_given_mask_may_change_from_call_to_call() -> None:
    plain = Encoder()
    model = zerofx.compile(Encoder(), zerofx.Plan(**ATEN))
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 6, 8)
    for mask in (CAUSAL, torch.zeros(6, 6), CAUSAL.clone().fill_diagonal_(-1.0)):
        torch.testing.assert_close(model(x, mask), plain(x, mask))
    assert len(model.programs) == 1


# -- torch.func ------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch's own jvp
def test_torch_func_is_refused_around_a_model_and_captured_inside() -> None:
    model = zerofx.compile(Body(lambda m, h, x: h), zerofx.Plan(**ATEN))
    tries: list[Callable[[], Any]] = [
        lambda: torch.func.grad(lambda x: model(x).sum())(vectors()),
        lambda: torch.func.vmap(model)(vectors()),
        lambda: torch.func.jvp(model, (vectors(),), (vectors(1),)),
    ]
    for call in tries:
        with pytest.raises(GradientError, match="Use them inside forward"):
            call()
    check(Body(lambda m, h, x: torch.func.grad(lambda t: m.fc(t).pow(3).sum())(x)), vectors())
    check(Body(lambda m, h, x: torch.func.vmap(lambda t: m.fc(t).sum())(x)), vectors())
    check(Body(lambda m, h, x: torch.func.jvp(torch.sin, (h,), (x,))[1]), vectors())
