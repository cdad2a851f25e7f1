"""A job that runs unattended: it saves regularly, and resumes by itself.

Kill a rank (`kill -9`), and torchrun restarts all ranks, which resume from the newest save. End
torchrun (`kill`, or a cluster that reclaims its machines), and they save within one step.

$ torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/long_run.py run
step 10  loss 10.600
step 20  loss 6.161
step 30  loss 4.116
step 40  loss 3.791
"""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import zerofx


def main(folder, steps=40):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    model = zerofx.compile(model, zerofx.Plan(stage=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    held_out = torch.randn(64, 16)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    preemption = zerofx.Preemption(model)

    extra = zerofx.resume(folder, model, optimizer)  # None at the first start
    if extra is not None:
        scheduler.load_state_dict(extra["scheduler"])
    for step in range(extra["step"] if extra else 0, steps):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        y = x.sum(1, keepdim=True)
        F.mse_loss(model(x[rank::world_size]), y[rank::world_size]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        is_over = preemption.is_requested()  # on all ranks at the same step
        if is_over or step % 5 == 4:
            values = {"step": step + 1, "scheduler": scheduler.state_dict()}
            zerofx.save(folder, model, optimizer, values, step=step + 1, keep=2, background=True)
        if is_over:
            break
        with torch.no_grad():
            loss = F.mse_loss(model(held_out), held_out.sum(1, keepdim=True)).item()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}  loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
