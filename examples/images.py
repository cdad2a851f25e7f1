"""A residual network learns to read 1,500 digits, and is tried on 297 others.

Needs scikit-learn, which has the images. Batch norms see each rank's own half of a batch; what
they remember is rank 0's. The loss is computed outside of the model.

$ torchrun --standalone --nproc-per-node 2 examples/images.py
step   0  right  10%
step 150  right  95%
"""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import zerofx


class Block(nn.Module):
    def __init__(self, inside, out, stride):
        super().__init__()
        self.into = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.norm, self.again = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.on = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.past = nn.Conv2d(inside, out, 1, stride)

    def forward(self, x):
        return F.relu(self.past(x) + self.again(self.on(F.relu(self.norm(self.into(x))))))


def main():
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # [1797, 1, 8, 8]
    kinds = torch.tensor(digits.target)
    model = nn.Sequential(
        Block(1, 16, 1), Block(16, 32, 2), Block(32, 64, 2), nn.Flatten(), nn.Linear(256, 10)
    )
    model = zerofx.compile(model, zerofx.Plan(stage=2, kernels="aten"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for step in range(151):
        model.train()
        at = torch.randint(1500, (64,), generator=torch.Generator().manual_seed(step))[rank::ranks]
        F.cross_entropy(model(images[at]), kinds[at]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 150 == 0:
            model.eval()
            with torch.no_grad():
                right = (model(images[1500:]).argmax(1) == kinds[1500:]).float().mean().item()
            if rank == 0:
                print(f"step {step:3d}  right {right:4.0%}")


if __name__ == "__main__":
    main()
