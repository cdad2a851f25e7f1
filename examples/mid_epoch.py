"""Stop in the middle of an epoch, and resume with the remaining rows, on any number of ranks.

Needs torchdata. The loader's state fits the same number of ranks; otherwise rows are counted.

$ torchrun --standalone --nproc-per-node 2 examples/mid_epoch.py whole 12
step 12  loss 3.844
$ torchrun --standalone --nproc-per-node 2 examples/mid_epoch.py parts 6
step 6  loss 4.403
$ torchrun --standalone --nproc-per-node 2 examples/mid_epoch.py parts 9
step 9  loss 4.126
$ python examples/mid_epoch.py parts 12
step 12  loss 3.844
"""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import zerofx


def main(folder, last):
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    numbers = torch.arange(6240) ** 2 // 7 % 113
    rows = TensorDataset(numbers.view(96, 65))
    sampler = StatefulDistributedSampler(rows, world_size, rank, seed=1)
    loader = StatefulDataLoader(rows, 8 // world_size, sampler=sampler, num_workers=1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 128))
    model = zerofx.compile(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    extra = zerofx.resume(folder, model, optimizer) or {}
    seen = extra.get("seen", 0)  # rows of this epoch, over all ranks
    if extra.get("world_size") == world_size:
        loader.load_state_dict(extra["loader"])
    else:
        sampler.load_state_dict({"yielded": seen // world_size})
    for (row,) in loader:
        F.cross_entropy(model(row[:, :-1]).flatten(0, 1), row[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += 8
        if seen == 8 * last:
            break
    values = {"seen": seen, "world_size": world_size, "loader": loader.state_dict()}
    zerofx.save(folder, model, optimizer, values, step=last)
    with torch.no_grad():
        loss = F.cross_entropy(model(numbers[:-1]), numbers[1:])
    if rank == 0:
        print(f"step {last}  loss {loss:.3f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
