"""Blocks of transformers in the ways that people write them, with names that say nothing."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Result(NamedTuple):
    """What a model returns, as those of transformers have it."""

    loss: Tensor


class Language(nn.Module):
    """A table, blocks and a head; the loss is inside."""

    def __init__(self, blocks: list[nn.Module], width: int = 32, length: int = 8) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(length, width)
        self.pile = nn.ModuleList(blocks)
        self.last, self.words = nn.LayerNorm(width), nn.Linear(width, 64, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        for block in self.pile:
            x = self.through(block, x)
        scores = self.words(self.last(x))
        if labels is None:
            return scores
        return Result(F.cross_entropy(scores.flatten(0, 1), labels.flatten()))

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Split(nn.Module):
    """nanoGPT's attention: one product, split in three, heads moved to the front, a fused call."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.width = heads, width

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.alpha(x).split(self.width, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.beta(y.transpose(1, 2).contiguous().view(b, t, c))


class Bare(nn.Module):
    """minGPT's attention: three products, bare products of heads under a mask, dropout."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.d, self.drop, self.heads = nn.Linear(width, width), nn.Dropout(dropout), heads
        self.register_buffer("past", torch.ones(8, 8).tril().view(1, 1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            layer(x).view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for layer in (self.a, self.b, self.c)
        )
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.past[:, :, :t, :t] == 0, float("-inf"))
        y = self.drop(F.softmax(scores, dim=-1)) @ v
        return self.d(y.transpose(1, 2).contiguous().view(b, t, c))


class Interleaved(nn.Module):
    """GPT-NeoX's attention: one product, whose outputs are q, k and v of one head after another."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        each = self.first(x).view(b, t, self.heads, 3 * c // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(*each.chunk(3, dim=-1), is_causal=True)
        return self.second(y.transpose(1, 2).reshape(b, t, c))


class Chunked(nn.Module):
    """lucidrains' attention: a norm inside, chunks, products by einsum, a Sequential at the end."""

    def __init__(self, width: int, heads: int, each: int) -> None:
        super().__init__()
        self.pre, self.heads, self.scale = nn.LayerNorm(width), heads, each**-0.5
        self.many = nn.Linear(width, 3 * heads * each, bias=False)
        self.end = nn.Sequential(nn.Linear(heads * each, width), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.many(self.pre(x)).chunk(3, dim=-1)
        )
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        y = torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1), v)
        return self.end(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Llama's MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.p, self.q, self.r = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(width, inner, bias=False),
            nn.Linear(inner, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.r(F.silu(self.p(x)) * self.q(x))


class Packed(nn.Module):
    """An MLP whose gate and values are one product."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.both, self.back = nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.both(x).chunk(2, dim=-1)
        return self.back(x * F.gelu(gate))


def sequential(width: int, inner: int, *, ahead: bool = False) -> nn.Sequential:
    norm = [nn.LayerNorm(width)] if ahead else []
    return nn.Sequential(
        *norm, nn.Linear(width, inner), nn.GELU(), nn.Dropout(0.0), nn.Linear(inner, width)
    )


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, mlp: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.one, self.two = mixer, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.one(self.n1(x))
        return x + self.two(self.n2(x))


class Pairs(Language):
    """lucidrains' blocks: lists of two modules, called by the model."""

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        attend, feed = block  # type: ignore[misc]
        x = attend(x) + x
        return feed(x) + x


class Turned(nn.Module):
    """An MLP whose hidden units are also mixed by something else."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up_there, self.down_there = nn.Linear(width, inner), nn.Linear(inner, width)
        self.side = nn.LayerNorm(inner)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up_there(x))
        return self.down_there(hidden) + self.side(hidden).mean(-1, keepdim=True)


ODD = {
    "nano": lambda: Language([Block(Split(32, 4), sequential(32, 64)) for _ in range(2)]),
    "mini": lambda: Language([Block(Bare(32, 4), sequential(32, 64)) for _ in range(2)]),
    "neox": lambda: Language([Block(Interleaved(32, 4), Packed(32, 64)) for _ in range(2)]),
    "gated": lambda: Language([Block(Bare(32, 4), Gated(32, 64)) for _ in range(2)]),
    "pairs": lambda: Pairs(
        [
            nn.ModuleList([Chunked(32, 4, 8), sequential(32, 64, ahead=True)])  # type: ignore[list-item]
            for _ in range(2)
        ]
    ),
    "turned": lambda: Language([Block(Split(32, 4), Turned(32, 64)) for _ in range(2)]),
}
