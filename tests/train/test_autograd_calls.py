"""How a compiled call stands in autograd: writes, inputs, outputs, random draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zerofx
from zerofx.errors import GradientError


class Wide(nn.Module):
    """A linear layer on 3-d input (it saves a view), and a buffer that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) * self.scale).sum()


class Square(nn.Module):
    """Returns a view of what backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(1.0, 5.0).view(2, 2))

    def forward(self) -> tuple[Tensor, Tensor]:
        squared = self.p * self.p
        return (squared * squared).sum(), squared.view(-1)


class Echo(nn.Module):
    """Returns its input beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(x).square().mean(), x


class Spectrum(nn.Module):
    """Has a real and a complex output, each with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), torch.fft.fft(self.b(x))


def pair(make: Callable[[], nn.Module], **plan: Any) -> tuple[nn.Module, zerofx.CompiledModule]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    return models[0], zerofx.compile(models[1], {"kernels": "aten"} | plan)


def change_input(model: Any) -> Tensor:
    x = torch.ones(2, 5, 4)
    loss = model(x)
    x.zero_()
    return loss


def change_buffer(model: Any) -> Tensor:
    loss = model(torch.ones(2, 5, 4, requires_grad=True))
    model.scale.mul_(10)
    return loss


def change_output(model: Any) -> Tensor:
    loss, seen = model()
    with torch.no_grad():
        seen.zero_()
    return loss


@pytest.mark.parametrize("kernels", ["aten", "inductor"])
@pytest.mark.parametrize(
    ("make", "change", "what"),
    [
        (Wide, change_input, "input 0"),
        (Wide, change_buffer, "buffer scale"),
        (Square, change_output, "output 1"),
    ],
    ids=["input", "buffer", "output"],
)
def test_a_write_to_what_backward_needs_is_refused(
    make: Any, change: Any, what: str, kernels: str
) -> None:
    plain, model = pair(make, kernels=kernels)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        change(plain).backward()
    with pytest.raises(GradientError, match=f"{what}, which backward needs, was changed"):
        change(model).backward()


def test_an_output_can_be_written_to() -> None:
    """Of three dimensions, a linear layer's result is a view of its matrix product."""
    plain, model = pair(lambda: nn.Linear(4, 6))
    for module in (plain, model):
        out = module(torch.ones(2, 3, 4))
        out[..., :2] += 1
        out.pow(2).sum().backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("kind", ["grad", "inputs"])
def test_gradients_of_inputs_alone_leave_the_parameters_alone(kind: str) -> None:
    plain, model = pair(Wide)
    found = []
    for m in (plain, model):
        x = torch.ones(2, 5, 4, requires_grad=True)
        loss = m(x)
        if kind == "grad":
            found.append(torch.autograd.grad(loss, x)[0])
        else:
            loss.backward(inputs=[x])
            found.append(x.grad)
        assert all(p.grad is None for p in m.parameters())
    assert torch.equal(*found)
    model(torch.ones(2, 5, 4)).backward()
    plain(torch.ones(2, 5, 4)).backward()
    assert torch.equal(model.fc.weight.grad, plain.fc.weight.grad)


def adversarial_step() -> tuple[Tensor, bool, Tensor]:
    world_rank = torch.distributed.get_rank()
    _, model = pair(Wide, stage=3, persist_below=0)
    x = torch.full((2, 5, 4), 1.0 + world_rank, requires_grad=True)
    (found,) = torch.autograd.grad(model(x), x)
    untouched = all(p.grad is None for p in model.parameters())
    model(x.detach()).backward()
    return found, untouched, model.fc.weight.grad.full_tensor()


def test_gradients_of_inputs_alone_at_two_ranks(pool: Pool) -> None:
    plain, _ = pair(Wide)
    for rank in range(2):
        plain(torch.full((2, 5, 4), 1.0 + rank)).backward()
    for found, untouched, weight in pool.run(2, adversarial_step):
        assert untouched
        torch.testing.assert_close(found, (2 * plain.fc.weight).sum(0).expand(2, 5, 4))
        torch.testing.assert_close(weight, plain.fc.weight.grad / 2)


def test_a_returned_input_stays_the_users() -> None:
    plain, model = pair(Echo)
    for _ in range(2):
        x = torch.ones(2, 4)
        for m in (plain, model):
            loss, same = m(x)
            assert same is x and not x.requires_grad
            loss.backward()
    assert torch.equal(model.fc.weight.grad, plain.fc.weight.grad)


def test_a_returned_input_that_requires_grad_passes_its_gradient_on() -> None:
    plain, model = pair(Echo, differentiate="all")
    found = []
    for m in (plain, model):
        x = torch.ones(2, 4, requires_grad=True)
        loss, same = m(x)
        (loss + same.sum()).backward()
        assert x.is_leaf
        found.append(x.grad)
    assert torch.equal(*found)


def test_complex_outputs_are_differentiated() -> None:
    plain, model = pair(Spectrum, differentiate="all")
    for m in (plain, model):
        real, imaginary = m(torch.ones(2, 4))
        (real.sum() + imaginary.abs().sum()).backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.rand_like(grad)


class NoisyGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (Noisy.apply(x * self.p)).sum()


def noise_of_a_rank() -> tuple[Tensor, Tensor]:
    rank = torch.distributed.get_rank()
    model = zerofx.compile(NoisyGradient(), {"kernels": "aten"})
    x = torch.ones(4 + rank, 3, requires_grad=True)  # ranks draw different amounts
    torch.manual_seed(7)
    model(x).backward()
    return x.grad[0], torch.get_rng_state()


def test_backwards_draws_differ_by_rank_and_the_generators_stay_equal(pool: Pool) -> None:
    (left, left_state), (right, right_state) = pool.run(2, noise_of_a_rank)
    assert not torch.equal(left, right)
    assert torch.equal(left_state, right_state)
