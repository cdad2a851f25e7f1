"""Start on 2 ranks at stage 3, go on in one process at stage 1: the run does not notice.

$ torchrun --standalone --nproc-per-node 2 examples/resume.py start
step 10  loss 0.0000
$ python examples/resume.py go-on
step 20  loss 0.0000
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import zerofx

FOLDER = Path(tempfile.gettempdir(), "zerofx-example-resume")
BATCH = 32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x, y):
        return F.mse_loss(self.layers(x), y)


def main(command):
    torch.manual_seed(0)
    model = zerofx.compile(Net(), zerofx.Plan(stage=3 if command == "start" else 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    first = 0
    if command == "go-on":
        extra = zerofx.load(FOLDER, model, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
        first = extra["step"]
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    for step in range(first, first + 20):
        x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
        y = x.sum(1, keepdim=True)
        model(x[rank::world_size], y[rank::world_size]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 10 == 9:
            with torch.no_grad():
                loss = model(x, y)
            if rank == 0:
                print(f"step {step + 1}  loss {loss.item():.5f}")
    extra = {"step": first + 20, "scheduler": scheduler.state_dict()}
    zerofx.save(FOLDER, model, optimizer, extra)


if __name__ == "__main__":
    main(sys.argv[1])
