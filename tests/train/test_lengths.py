"""Plan(dynamic="auto"): one program for all sizes of what varies, each step as plain PyTorch's."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import zerofx
from zerofx.tools.demo.gpt import GPT, GPTConfig

SMALL = GPTConfig(vocab=31, seq=32, width=16, layers=2, heads=2)


def compiled(model, **fields):
    return zerofx.compile(model, zerofx.Plan(kernels="aten", dynamic="auto", **fields))


def grads_of(model, plain, args):
    """Return the loss and gradients of both from the same state; the gradients are dropped."""
    found = []
    for each in (model, plain):
        loss = each(*args)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        loss.backward()
        named = {k: p.grad for k, p in each.named_parameters()}
        grads = {k: g if type(g) is torch.Tensor else g.full_tensor() for k, g in named.items()}
        found.append((loss.detach(), {k: g.clone() for k, g in grads.items()}))
        for p in each.parameters():
            p.grad = None
    return found


def check_equal(model, plain, args):
    (loss, grads), (wanted, wanted_grads) = grads_of(model, plain, args)
    torch.testing.assert_close(loss, wanted, atol=1e-6, rtol=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted_grads[name], atol=1e-6, rtol=1e-6, msg=name)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.relu(self.a(x))).square().mean()


def test_a_second_value_makes_a_dimension_free_and_a_third_compiles_nothing():
    torch.manual_seed(0)
    plain = MLP()
    model = compiled(MLP())
    model.load_state_dict(plain.state_dict())
    for rows in (5, 7, 9, 5, 31):
        check_equal(model, plain, (torch.randn(rows, 6),))
    assert len(model.programs) == 1
    assert [str(d) for s in model.programs[0].sizes.symbols for d in s.dims] == ["x.shape[0]"]


def test_padded_text_takes_two_programs_and_a_smaller_last_batch_none():
    torch.manual_seed(0)
    plain = GPT(SMALL)
    model = compiled(GPT(SMALL))
    model.load_state_dict(plain.state_dict())
    shapes = [(4, 12), (4, 20), (4, 9), (3, 20), (4, 32), (2, 11), (4, 16)]
    for rows, length in shapes:
        ids = torch.randint(0, 31, (rows, length))
        check_equal(model, plain, (ids, ids))
    assert len(model.programs) == 1
    symbols = model.programs[0].sizes.symbols
    assert [len(s.dims) for s in symbols] == [2, 2]
