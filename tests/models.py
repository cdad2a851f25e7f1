"""Small models that the tests share, each with a batch for every seed.

A case is a recipe, not a model: `CASES["gpt"].make()` gives a fresh module with the same weights
every time, and `.batch(rank)` one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerofx.demo.gpt import GPT, GPTConfig

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One model of the tests, by name.

    build: returns the module; run under a fixed seed.
    draw: returns (args, kwargs) of one micro-batch from a seeded generator.
    is_random: forward draws from the generator (dropout), so ranks differ even on equal batches.
    is_foreign: needs transformers.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    is_random: bool = False
    is_foreign: bool = False

    def make(self, seed: int = 0) -> nn.Module:
        """Return the model in training mode, every parameter moved off its special start value.

        Biases of 0 and norms of 1 would hide a mistake that swaps them.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build()
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(torch.randn_like(param), alpha=0.02)
        return model.train()

    def batch(self, seed: int) -> Batch:
        """Return (args, kwargs) of one micro-batch."""
        return self.draw(torch.Generator().manual_seed(seed))


def _tokens(generator: torch.Generator, vocab: int, shape: tuple[int, ...] = (2, 8)) -> Tensor:
    return torch.randint(0, vocab, shape, generator=generator)


# -- the project's own ----------------------------------------------------------------------------
def _gpt(dropout: float = 0.0, layers: int = 2, width: int = 16) -> GPT:
    return GPT(GPTConfig(layers=layers, width=width, heads=2, seq=8, vocab=32, dropout=dropout))


def _draw_text(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator, 32, (2, 9))
    return (tokens[:, :-1], tokens[:, 1:]), {}


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


def _draw_labelled(generator: torch.Generator) -> Batch:
    label = torch.randint(0, 4, (2,), generator=generator)
    return (_tokens(generator, 32, (2, 3)),), {"label": label}


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


def _draw_vectors(generator: torch.Generator) -> Batch:
    x = torch.randn(3, 12, generator=generator)
    return (x, torch.randn(3, 3, generator=generator)), {}


class Adapter(nn.Module):
    """A frozen linear layer beside a trained product of two thin matrices."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def _adapted() -> nn.Module:
    model = _gpt().requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv = Adapter(block.attn.qkv)  # type: ignore[union-attr, assignment]
    model.norm.requires_grad_(True)
    return model


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


def _draw_images(generator: torch.Generator) -> Batch:
    label = torch.randint(0, 5, (2,), generator=generator)
    return (torch.randn(2, 3, 6, 6, generator=generator), label), {}


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


def _draw_stage(generator: torch.Generator) -> Batch:
    x = torch.randn(3, 12, generator=generator).requires_grad_()
    return (x, torch.randn(3, 12, generator=generator)), {}


# -- unmodified transformers models, from small configs -------------------------------------------
_SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip


def _hf(model: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        made = getattr(transformers, config)(**fields)
        return getattr(transformers, model)(made)

    return build


def _draw_ids(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator, 32)
    return (), {"input_ids": tokens, "labels": tokens}


def _draw_cacheless_ids(generator: torch.Generator) -> Batch:
    args, kwargs = _draw_ids(generator)
    return args, {**kwargs, "use_cache": False}


def _draw_pixels(generator: torch.Generator) -> Batch:
    label = torch.randint(0, 2, (2,), generator=generator)
    return (), {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": label}


_ALL = [
    Case("gpt", _gpt, _draw_text),
    Case("gpt-dropout", lambda: _gpt(dropout=0.2), _draw_text, is_random=True),
    Case("lstm", LSTMClassifier, _draw_labelled),
    Case("binary", BinaryNet, _draw_vectors),
    Case("chain", Chain, _draw_vectors),
    Case("adapters", _adapted, _draw_text),
    Case("convnet", ConvNet, _draw_images),
    Case("branches", Branches, _draw_vectors, is_random=True),
    Case("stage", Stage, _draw_stage),
    Case(
        "hf-gpt2",
        _hf("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2, n_positions=16,
            vocab_size=32, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0,
            resid_pdrop=0.0),
        _draw_cacheless_ids,
        is_foreign=True,
    ),
    Case(
        "hf-llama",
        _hf("LlamaForCausalLM", "LlamaConfig", vocab_size=32, **_SMALL),
        _draw_cacheless_ids,
        is_foreign=True,
    ),
    Case(
        "hf-bert",
        _hf("BertForMaskedLM", "BertConfig", vocab_size=32, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, **_SMALL),
        _draw_ids,
        is_foreign=True,
    ),
    Case(
        "hf-vit",
        _hf("ViTForImageClassification", "ViTConfig", image_size=16, patch_size=8, **_SMALL),
        _draw_pixels,
        is_foreign=True,
    ),
    Case(
        "hf-resnet",
        _hf("ResNetForImageClassification", "ResNetConfig", embedding_size=4, hidden_sizes=[4, 8],
            depths=[2, 2], layer_type="basic", num_labels=2),
        _draw_pixels,
        is_foreign=True,
    ),
]  # fmt: skip

CASES = {case.name: case for case in _ALL}
OWN = [name for name, case in CASES.items() if not case.is_foreign]
FOREIGN = [name for name, case in CASES.items() if case.is_foreign]
