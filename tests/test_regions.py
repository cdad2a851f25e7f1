"""Compiled regions: what Inductor has nothing to make of, and the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.runtime.regions import CompileCount


class FlatTokens(nn.Module):
    """Its first region only views the token ids, as GPT-2's does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids.view(-1, ids.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Doubled(nn.Module):
    """Its first region is simplified away: a product with one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * 1).square().mean()


@pytest.mark.parametrize("make", [FlatTokens, Doubled])
def test_a_region_of_views_alone_runs_as_it_stands(
    make: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    plain = make()
    x = torch.randint(0, 97, (2, 16)) if make is FlatTokens else torch.randn(2, 4)
    plain(x).backward()
    for start in range(2):
        torch.manual_seed(0)
        before = CompileCount.compiled
        model = zerofx.compile(make(), zerofx.Plan(stage=3))
        model(x).backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
        assert (CompileCount.compiled == before) == (start == 1)
