"""Models that bring their own slices: linears and embeddings in the style of Megatron-LM's mpu.

Each parameter is drawn whole from the seed, and a rank keeps its part, as Megatron-LM initialises
on the CPU. With one rank the same classes are the plain model that tests compare with. Collectives
are calls of torch.distributed inside autograd functions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


class ModelParallel:
    """The group of ranks that share each layer; without one, a single process."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def part(self, whole: Tensor, dim: int, stride: int = 1) -> nn.Parameter:
        """Return this rank's part, marked as Megatron-LM marks it."""
        pieces = whole.chunk(stride * self.size, dim)[self.rank :: self.size]
        made = nn.Parameter(torch.cat(pieces, dim).clone())
        mark(made, dim, stride)
        return made


def mark(param: nn.Parameter, dim: int, stride: int = 1) -> None:
    param.tensor_model_parallel = True  # type: ignore[attr-defined]
    param.partition_dim, param.partition_stride = dim, stride  # type: ignore[attr-defined]


def _summed(x: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if group is not None:
        x = x.contiguous()
        dist.all_reduce(x, op=op, group=group)
    return x


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _summed(grad.clone(), ctx.group), None


class ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _summed(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The loss of each token from logits whose classes are divided over the ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, mp: ModelParallel) -> Tensor:
        largest = _summed(logits.max(-1).values, mp.group, dist.ReduceOp.MAX)
        logits = logits - largest[..., None]
        rows = logits.shape[-1]
        own = labels - mp.rank * rows
        outside = (own < 0) | (own >= rows)
        own = own.masked_fill(outside, 0)
        mine = logits.gather(-1, own[..., None])[..., 0].masked_fill(outside, 0.0)
        exp = logits.exp()
        both = _summed(torch.stack([mine, exp.sum(-1)]), mp.group)
        ctx.save_for_backward(exp / both[1][..., None], own, outside)
        return both[1].log() - both[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        soft, own, outside = ctx.saved_tensors
        hit = functional.one_hot(own, soft.shape[-1]) * ~outside[..., None]
        return (soft - hit) * grad[..., None], None, None


class ColumnParallelLinear(nn.Module):
    def __init__(
        self, mp: ModelParallel, inputs: int, outputs: int, stride: int = 1, bias: bool = True
    ) -> None:
        super().__init__()
        self.mp, self.bias = mp, None
        self.weight = mp.part(torch.randn(outputs, inputs) / inputs**0.5, 0, stride)
        if bias:
            self.bias = mp.part(torch.randn(outputs) / 8, 0, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(CopyToRegion.apply(x, self.mp.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, mp: ModelParallel, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mp = mp
        self.weight = mp.part(torch.randn(outputs, inputs) / inputs**0.5, 1)
        self.bias = nn.Parameter(torch.randn(outputs) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return ReduceFromRegion.apply(functional.linear(x, self.weight), self.mp.group) + self.bias


class VocabParallelEmbedding(nn.Module):
    def __init__(self, mp: ModelParallel, vocab: int, width: int) -> None:
        super().__init__()
        self.mp, self.first = mp, mp.rank * (vocab // mp.size)
        self.weight = mp.part(torch.randn(vocab, width) / 2, 0)

    def forward(self, ids: Tensor) -> Tensor:
        own = ids - self.first
        outside = (own < 0) | (own >= self.weight.shape[0])
        found = functional.embedding(own.masked_fill(outside, 0), self.weight)
        return ReduceFromRegion.apply(found.masked_fill(outside[..., None], 0.0), self.mp.group)


class Mlp(nn.Module):
    """Two layers; the first one's bias is a slice, the second one's is whole."""

    def __init__(self, mp: ModelParallel) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = ColumnParallelLinear(mp, 8, 16), RowParallelLinear(mp, 16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(self.up(x).relu()) - y).square().mean()


class Block(nn.Module):
    def __init__(self, mp: ModelParallel, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads // mp.size
        # No bias: the gradient of the keys' is nothing but rounding, which Adam would scale up.
        self.qkv = ColumnParallelLinear(mp, width, 3 * width, stride=3, bias=False)
        self.proj = RowParallelLinear(mp, width, width)
        self.up = ColumnParallelLinear(mp, width, 4 * width)
        self.down = RowParallelLinear(mp, 4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A GPT of two layers, with an embedding and a loss that are divided by the vocabulary."""

    def __init__(self, mp: ModelParallel, width: int = 16, heads: int = 4, vocab: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mp = mp
        self.embed, self.places = VocabParallelEmbedding(mp, vocab, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList([Block(mp, width, heads) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), ColumnParallelLinear(mp, width, vocab)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return VocabParallelCrossEntropy.apply(self.head(self.norm(x)), labels, self.mp).mean()


class Tied(Gpt):
    """The same with one weight for embedding and head, as Megatron-LM has by default."""

    def __init__(self, mp: ModelParallel) -> None:
        super().__init__(mp)
        self.head.weight = self.embed.weight


def batch_of(kind: type[nn.Module], samples: int = 8) -> tuple[Tensor, Tensor]:
    """Return a batch for all data ranks together."""
    draw = torch.Generator().manual_seed(1)
    if kind is Mlp:
        return torch.randn(samples, 8, generator=draw), torch.randn(samples, 8, generator=draw)
    ids = torch.randint(0, 32, (2, samples, 8), generator=draw)
    return ids[0], ids[1]
