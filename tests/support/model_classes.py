"""The modules of models.py that are the tests' own, each with one thing easy to get wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LSTMClassifier(nn.Module):
    """A bidirectional LSTM over token embeddings, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.lstm = nn.LSTM(8, 8, bidirectional=True, batch_first=True)
        self.classify = nn.Linear(16, 4)

    def forward(self, tokens: Tensor, label: Tensor) -> dict[str, Tensor]:
        states, _ = self.lstm(self.embed(tokens))
        logits = self.classify(states[:, -1])
        return {"loss": F.cross_entropy(logits, label), "logits": logits}


class Sign(torch.autograd.Function):
    """The sign of x, whose gradient is passed straight through where |x| <= 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1.0)


class BinaryNet(nn.Module):
    """Linear layers with binary weights: the gradient of sign() is zero unless passed through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(F.linear(x, Sign.apply(layer.weight), layer.bias))
        return F.mse_loss(self.head(x), y)


class Layer(nn.Module):
    """A linear layer and a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    """Four equal layers between two uses of one code: the plainest model with units."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Linear(3, 12, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.code(y) + x
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(F.linear(x, self.code.weight.t()), y)


class Adapter(nn.Module):
    """A frozen linear layer beside a trained product of two thin matrices."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


class ConvNet(nn.Module):
    """Convolutions with batch statistics, a residual, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Conv2d(4, 4, 3, padding=1)
        self.body_norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        self.unused = nn.Parameter(torch.zeros(7))

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(image)))
        x = F.relu(x + self.body_norm(self.body(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), label)


class Branches(nn.Module):
    """Two dropouts of one shape that do not depend on each other, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(12, 12)
        self.right = nn.Linear(12, 12)
        self.join = nn.Linear(12, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        left, right = torch.tanh(self.left(x)), torch.tanh(self.right(x))
        left = F.dropout(left, 0.3, self.training)
        right = F.dropout(right, 0.3, self.training)
        out = self.join(left * right + x)
        return {"loss": F.mse_loss(out, y), "parts": (left, [right, 3]), "out": out}


class Stage(nn.Module):
    """A part of a larger model: no loss, inputs that require grad, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12))
        self.gate = nn.Linear(12, 12)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layers(x)
        return out, torch.sigmoid(self.gate(out)) * y
