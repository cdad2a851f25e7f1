"""Frozen weights with trained low-rank adapters: only the adapters' gradients are reduced.

$ torchrun --standalone --nproc-per-node 2 examples/lora.py
step  0  loss 0.41
step 20  loss 0.36
step 40  loss 0.34
8 of 16 tensors trained
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import zerofx


class Adapter(nn.Module):
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
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data = torch.Generator().manual_seed(rank := int(os.environ.get("RANK", "0")))
    for step in range(41):
        x = torch.randn(32, 64, generator=data)
        loss = model(x, torch.tanh(x.roll(1, 1)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:2d}  loss {loss.item():.2f}")
    if rank == 0:
        print(f"{sum(p.requires_grad for p in model.parameters())} of 16 tensors trained")


if __name__ == "__main__":
    main()
