"""Compile a model of three blocks for four ranks, without training it, and emit the result.

The command line takes its `build`: `zerofx schedule examples/blocks.py:build --world 4`.

$ python examples/blocks.py emitted
fingerprint.json plan.yaml regions schedule.py
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import zerofx


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.fc(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width=1024, depth=3, classes=10):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), y)


def build():
    """Return the module, and the arguments and keyword arguments of an example call."""
    return Net(), (torch.randn(32, 1024), torch.randint(10, (32,))), {}


def main(folder):
    model, args, kwargs = build()
    captured = zerofx.capture(model, args, kwargs)
    program = zerofx.rewrite(captured, zerofx.Plan(), world_size=4)
    emitted = program.emit(folder)
    print(*sorted(path.name for path in emitted.iterdir()))


if __name__ == "__main__":
    main(sys.argv[1])
