"""Your own model with three changed lines: the import, the compile, and the optimizer.

$ torchrun --standalone --nproc-per-node 2 examples/own_model.py
step  0  loss 1.20
step 10  loss 0.95
step 20  loss 0.83
rank 0 holds 1,152 of 2,275 parameters; the state dict has 8
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import zerofx


class Classifier(nn.Module):
    """A plain module that does not know zerofx."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 3)

    def forward(self, x, label):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(self.norm(x)), label)


def main():
    torch.manual_seed(0)
    model = zerofx.compile(Classifier(), zerofx.Plan(stage=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank = int(os.environ.get("RANK", "0"))
    data = torch.Generator().manual_seed(rank)
    for step in range(21):
        label = torch.randint(0, 3, (64,), generator=data)
        x = torch.randn(64, 32, generator=data) + F.one_hot(label, 32)
        loss = model(x, label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:2d}  loss {loss.item():.2f}")
    state = model.state_dict()  # a collective: every rank calls it
    if rank == 0:
        mine = sum(p.to_local().numel() for p in model.parameters())
        total = sum(p.numel() for p in model.parameters())
        print(f"rank 0 holds {mine:,} of {total:,} parameters; the state dict has {len(state)}")


if __name__ == "__main__":
    main()
