"""Forwards with masks, caches, checks and averages of their own, on two ranks."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn

import zerofx


class Encoder(nn.Module):
    """An encoder over a causal mask of its own, which remembers it and checks its input."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.mask: Tensor | None = None

    def forward(self, ids: Tensor, pad: Tensor) -> Tensor:
        if (ids >= 16).any():
            raise ValueError("no such token")
        self.length = ids.shape[1]
        if self.mask is None or len(self.mask) < self.length:
            self.mask = nn.Transformer.generate_square_subsequent_mask(self.length)
        mask = self.mask[: self.length, : self.length]
        hidden = self.layers(self.embed(ids), mask=mask, src_key_padding_mask=pad)
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def batch(step: int, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(16, (2, length), generator=torch.Generator().manual_seed(step))
    pad = torch.zeros(2, length).masked_fill(torch.arange(length) >= length - 1, float("-inf"))
    return ids, pad


def body(stage: int) -> None:
    torch.manual_seed(0)
    plain = Encoder()
    model = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(stage=stage, kernels="aten"))
    for step, length in enumerate((6, 4, 6)):
        ids, pad = batch(step, length)  # the same on both ranks
        for each in (plain, model):
            loss = each(ids, pad)
            loss.backward()
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
        assert model.length == length
    found = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert len(model.programs) == 2


def test_two_ranks_equal_plain_training(pool: Pool) -> None:
    pool.run(2, body, 3)
