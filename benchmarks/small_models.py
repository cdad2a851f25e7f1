"""Eight small models of other kinds than text, and their batches, for benchmarks in one process.

Each forward takes (x, y) and returns the loss. The networks are those of their papers and of
PyTorch's examples, written here at sizes whose steps take tens of milliseconds on one core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerofx.tools.demo.gpt import GPT, GPTConfig


class Basic(nn.Module):
    """A basic block of a ResNet (He et al. 2015)."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or width != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        h += x if self.downsample is None else self.downsample(x)
        return self.relu(h)


class ResNet18(nn.Module):
    """ResNet-18 with its first layers for images of 224 x 224, for 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)]
        layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        width = 64
        for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            layers += [Basic(width, out, stride), Basic(out, out, 1)]
            width = out
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), y)


class UNet(nn.Module):
    """A U-Net of three levels (Ronneberger et al. 2015), with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 64)
        self.down = nn.ModuleList(
            self._double(a, b) for a, b in zip((3, *widths[:-1]), widths, strict=True)
        )
        self.middle = self._double(64, 128)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths))
        self.join = nn.ModuleList(self._double(2 * w, w) for w in reversed(widths))
        self.head = nn.Conv2d(16, 2, 1)

    @staticmethod
    def _double(width: int, out: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for a in (width, out):
            layers += [nn.Conv2d(a, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = []
        for level in self.down:
            kept.append(level(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        return F.cross_entropy(self.head(x), y)


class TextLSTM(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        self.lstm = nn.LSTM(128, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(x))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class ViT(nn.Module):
    """A vision transformer of four layers of torch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 128, 8, 8)
        self.first = nn.Parameter(torch.zeros(1, 1, 128))
        self.places = nn.Parameter(torch.randn(1, 65, 128) * 0.02)
        layer = nn.TransformerEncoderLayer(
            128, 4, 512, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return F.cross_entropy(self.head(self.body(x)[:, 0]), y)


class VAE(nn.Module):
    """A convolutional variational autoencoder (Kingma and Welling 2013)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 4, 2, 1), nn.ReLU(),
            nn.Flatten(),
        )  # fmt: skip
        self.mean, self.spread = nn.Linear(64 * 49, 20), nn.Linear(64 * 49, 20)
        self.decoder = nn.Sequential(
            nn.Linear(20, 64 * 49), nn.ReLU(), nn.Unflatten(1, (64, 7, 7)),
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.encoder(x)
        mean, spread = self.mean(h), self.spread(h)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        error = F.binary_cross_entropy_with_logits(self.decoder(code), y, reduction="sum")
        return (error - 0.5 * (1 + spread - mean.square() - spread.exp()).sum()) / len(x)


class SuperResolution(nn.Module):
    """The sub-pixel network of PyTorch's super_resolution example (Shi et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 64, 5, 1, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(),
            nn.Conv2d(64, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 9, 3, 1, 1), nn.PixelShuffle(3),
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), y)


class Mnist(nn.Module):
    """The network of PyTorch's mnist example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.nll_loss(F.log_softmax(self.fc2(self.dropout2(x)), 1), y)


def _images(samples: int, channels: int, side: int) -> Callable[[], tuple[Tensor, Tensor]]:
    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(samples, channels, side, side), torch.randint(0, 10, (samples,))

    return batch


def _tokens(samples: int, length: int) -> Callable[[], tuple[Tensor, Tensor]]:
    def batch() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, 256, (samples, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


def _masks() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 64, 64), torch.randint(0, 2, (2, 64, 64))


def _digits() -> tuple[Tensor, Tensor]:
    x = torch.rand(32, 1, 28, 28)
    return x, x.clone()


def _pictures() -> tuple[Tensor, Tensor]:
    return torch.rand(4, 1, 32, 32), torch.rand(4, 1, 96, 96)


@dataclass(frozen=True)
class Small:
    """A model's constructor, and one that draws its batch."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]


SMALL = {
    "gpt": Small(lambda: GPT(GPTConfig(layers=8, width=384, heads=6, seq=64)), _tokens(2, 64)),
    "resnet18": Small(ResNet18, _images(4, 3, 64)),
    "unet": Small(UNet, _masks),
    "lstm": Small(TextLSTM, _tokens(8, 64)),
    "vit": Small(ViT, _images(8, 3, 64)),
    "vae": Small(VAE, _digits),
    "super_resolution": Small(SuperResolution, _pictures),
    "mnist": Small(Mnist, _images(32, 1, 28)),
}
