"""Plan(dynamic="auto"): one program for all sizes of what varies, each step as plain PyTorch's."""

from __future__ import annotations

import pytest
import torch
from pool import Pool
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


LENGTHS = ((12, 9), (20, 9), (7, 15), (31, 16), (10, 11))  # of each rank, step by step


def ranks_of_other_lengths(stage: int) -> int:
    """Train on each rank with texts of other lengths; return how many programs were compiled."""
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    plain, mine = GPT(SMALL), GPT(SMALL)
    mine.load_state_dict(plain.state_dict())
    model = compiled(mine, stage=stage)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for lengths in LENGTHS:
        batches = [torch.randint(0, 31, (2, length)) for length in lengths]
        model(batches[rank], batches[rank]).backward()
        (sum(plain(ids, ids) for ids in batches) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = zerofx.full_state_dict(model)
    for name, found in state.items():  # rank 0 has all, others none
        torch.testing.assert_close(found, plain.state_dict()[name], atol=1e-5, rtol=1e-5)
    return len(model.programs)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_train_on_texts_of_other_lengths(pool: Pool, stage: int) -> None:
    assert pool.run(2, ranks_of_other_lengths, stage) == [1, 1]
