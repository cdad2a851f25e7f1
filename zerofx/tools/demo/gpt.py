"""A byte-level GPT in plain torch: the model of the demo and of the benchmarks.

Nothing here knows of zerofx. Every module initialises itself in `reset_parameters`, so that a model
made on the meta device gets the same kind of weights when it is initialised unit by unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model: `seq` is the longest context, `vocab` 256 because a token is a byte."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    seq: int = 128
    vocab: int = 256
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"GPTConfig: width {self.width} is not a multiple of heads {self.heads}. "
                "Choose heads that divide it."
            )


class Linear(nn.Linear):
    """A linear layer whose weights start at a variance of 1 / in_features."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding of variance 1 / width at first, so that a tied head's logits are O(1)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)


class Attention(nn.Module):
    """Causal self-attention.

    Shapes: x, result [batch, time, width]; q, k, v [batch, heads, time, width / heads].
    """

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.heads = cfg.heads
        self.qkv = Linear(cfg.width, 3 * cfg.width)
        self.proj = Linear(cfg.width, cfg.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, time, width))


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(cfg.width, 4 * cfg.width)
        self.down = Linear(4 * cfg.width, cfg.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(cfg.width)
        self.attn = Attention(cfg)
        self.mlp_norm = nn.LayerNorm(cfg.width)
        self.mlp = MLP(cfg)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = Embedding(cfg.vocab, cfg.width)
        self.position = Embedding(cfg.seq, cfg.width)
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.width)
        self.head = Linear(cfg.width, cfg.vocab, bias=False)
        if cfg.tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy against `y`, or the logits where no `y` is given.

        Shapes: x, y int64 [batch, time]; logits [batch, time, vocab]; loss [].
        """
        place = torch.arange(x.shape[1], device=x.device)
        h = self.dropout(self.embed(x) + self.position(place))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        if y is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())  # also in bf16

    def num_parameters(self) -> int:
        """Count parameter elements, tied weights once."""
        return sum(p.numel() for p in self.parameters())


@torch.no_grad()
def generate(
    model: GPT,
    prompt: bytes,
    num_bytes: int,
    temperature: float = 0.8,
    generator: torch.Generator | None = None,
) -> bytes:
    """Continue `prompt` by `num_bytes` sampled bytes, the context sliding over the last `seq`.

    Raises:
        ValueError: the prompt is empty; there is nothing to continue.
    """
    if not prompt:
        raise ValueError("generate: the prompt is empty. Give at least one byte.")
    was_training = model.training
    model.eval()
    device = model.embed.weight.device
    tokens = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
    for _ in range(num_bytes):
        logits = model(tokens[:, -model.cfg.seq :])[:, -1] / temperature
        chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, chosen], dim=1)
    model.train(was_training)
    return bytes(tokens[0, len(prompt) :].tolist())
