"""Frozen weights with trained low-rank adapters: only the adapters' gradients travel.

$ torchrun --standalone --nproc-per-node 2 examples/lora.py
step  0  loss 1.00
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import zerofx


class Adapter(nn.Module):
    """A frozen linear layer beside a trained product of two thin matrices."""

    def __init__(self, inner, rank=4):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Adapter(nn.Linear(64, 64)) for _ in range(4))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


def main():
    torch.manual_seed(0)
    model = zerofx.compile(Net(), zerofx.Plan(stage=3))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    rank = int(os.environ.get("RANK", "0"))
    data = torch.Generator().manual_seed(rank)
    for step in range(41):
        x = torch.randn(32, 64, generator=data)
        loss = model(x, torch.tanh(x.roll(1, 1)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:2d}  loss {loss.item():.2f}")
    if rank == 0:
        frozen = sum(p.grad is None for p in model.parameters() if not p.requires_grad)
        print(f"{len(trained)} tensors trained, {frozen} frozen without a gradient")


if __name__ == "__main__":
    main()
