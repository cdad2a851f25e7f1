"""zerofx.optim through our own Triton kernels: interpreted on the CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_cases import distance, ours, theirs
from shard_cases import build, deliver, gradients, small_model, wholes
from torch import Tensor

import zerofx
from zerofx.comm.world import World
from zerofx.kernels.launch import use_triton

STEPS = 4
CLIP = 0.3
NAMES = ["adamw", "adam", "lamb", "lamb-bert"]


def expected(name: str, steps: int = STEPS) -> dict[str, Tensor]:
    model = small_model()
    optimizer = theirs(name, model.parameters())
    for step in range(steps):
        for key, grad in gradients(model, step).items():
            model.get_parameter(key).grad = grad
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return wholes(model)


def check_interpreted(name: str) -> None:
    assert use_triton(torch.device("cpu"))
    model = small_model()
    store = build(model, World.single())  # its buckets hold padding, and several parameters a run
    optimizer = ours(name, model.parameters(), max_grad_norm=CLIP)
    for step in range(STEPS):
        deliver(store, gradients(model, step))
        optimizer.step()
        optimizer.zero_grad()
    assert distance(wholes(model), expected(name)) <= 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_interpreted(interpreted: Callable[..., Any], name: str) -> None:
    interpreted(check_interpreted, name)


def step_coded(bits: int, device: str = "cpu") -> dict[str, Tensor]:
    model = small_model().to(device)
    optimizer = zerofx.optim.AdamW(model.parameters(), lr=0.01, state_bits=bits)
    for step in range(STEPS):
        for key, grad in gradients(model, step).items():
            model.get_parameter(key).grad = grad.to(device)
        optimizer.step()
        optimizer.zero_grad()
    return {k: v.cpu() for k, v in wholes(model).items()}


def test_interpreted_with_8_bit_states(interpreted: Callable[..., Any]) -> None:
    """The kernels search the code book where the CPU takes roots: neighbouring codes at most."""
    assert distance(interpreted(step_coded, 8), step_coded(8)) <= 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NAMES, "amsgrad", "momentum", "lion"])
def test_on_cuda(name: str) -> None:
    model = small_model().cuda()
    optimizer = ours(name, model.parameters(), max_grad_norm=CLIP)
    for step in range(STEPS):
        for key, grad in gradients(model, step).items():
            model.get_parameter(key).grad = grad.cuda()
        optimizer.step()
        optimizer.zero_grad()
    assert distance({k: v.cpu() for k, v in wholes(model).items()}, expected(name)) <= 1e-6


@pytest.mark.gpu
def test_8_bit_states_on_cuda() -> None:
    assert distance(step_coded(8, "cuda"), step_coded(8)) <= 2e-3
