"""Start on 2 ranks at stage 3, and resume in one process at stage 1, with the same losses.

$ torchrun --standalone --nproc-per-node 2 examples/resume.py start
step 10  loss 10.600
step 20  loss 6.161
$ python examples/resume.py go-on
step 30  loss 4.116
step 40  loss 3.791
"""

import os
import sys
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import zerofx

FOLDER = f"{tempfile.gettempdir()}/zerofx-example-resume"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x, y):
        return F.mse_loss(self.layers(x), y)


def main(command):
    torch.manual_seed(0)
    model = zerofx.compile(Net(), zerofx.Plan(stage=3 if command == "start" else 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    held_out = torch.randn(64, 16)
    first = 0
    if command == "go-on":
        extra = zerofx.load(FOLDER, model, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
        first = extra["step"]
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    for step in range(first, first + 20):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        y = x.sum(1, keepdim=True)
        model(x[rank::world_size], y[rank::world_size]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():
            loss = model(held_out, held_out.sum(1, keepdim=True)).item()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}  loss {loss:.3f}")
    zerofx.save(FOLDER, model, optimizer, {"step": step + 1, "scheduler": scheduler.state_dict()})


if __name__ == "__main__":
    main(sys.argv[1])
