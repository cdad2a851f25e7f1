"""A small DCGAN learns to draw discs: two compiled models, each with an optimizer and snapshots.

Each rank has its own images and noise. The second run goes on from the snapshots of the first.

$ torchrun --standalone --nproc-per-node 2 examples/gan.py run 6
epoch 6  64 samples with 1 times the ink of the images
$ python examples/gan.py run 10
epoch 10  64 samples with 1 times the ink of the images
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import zerofx


def discs(num):  # images [num, 1, 16, 16] of one disc each, 1 in ink, and -1 around it
    (x, y), at = torch.randint(5, 11, (2, num, 1, 1, 1)), torch.arange(16)
    return ((at - x) ** 2 + (at[:, None] - y) ** 2 < 12) * 2.0 - 1


def main(folder, last):
    torch.manual_seed(0)
    up, down, norm = nn.ConvTranspose2d, nn.Conv2d, nn.BatchNorm2d
    draw = [up(16, 64, 4), norm(64), nn.ReLU(), up(64, 32, 4, 2, 1), norm(32), nn.ReLU()]
    judge = [down(1, 32, 4, 2, 1), nn.LeakyReLU(0.2), down(32, 64, 4, 2, 1), nn.LeakyReLU(0.2)]
    draw, judge = [*draw, up(32, 1, 4, 2, 1), nn.Tanh()], [*judge, down(64, 1, 4)]
    images, plan = discs(512), zerofx.Plan(stage=3, kernels="aten")
    both = painter, critic = [zerofx.compile(nn.Sequential(*net), plan) for net in (draw, judge)]
    paints, judges = (torch.optim.Adam(net.parameters(), 1e-3, (0.5, 0.99)) for net in both)
    begun = zerofx.resume(f"{folder}/painter", painter, paints) or {"epoch": 0}
    zerofx.resume(f"{folder}/critic", critic, judges)
    world, rank = painter.zerofx.data_world, painter.zerofx.data_rank
    sampler = DistributedSampler(images, world, rank)
    for epoch in range(begun["epoch"], last):
        sampler.set_epoch(epoch)
        noise = torch.Generator().manual_seed(epoch * world + rank)
        for real in DataLoader(images, 32 // world, sampler=sampler):
            fake = painter(torch.randn(len(real), 16, 1, 1, generator=noise))
            judges.zero_grad()  # also of what the painter's loss left there
            (F.softplus(-critic(real)) + F.softplus(critic(fake.detach()))).mean().backward()
            judges.step()
            paints.zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            paints.step()
    zerofx.save(f"{folder}/painter", painter, paints, {"epoch": last}, step=last)
    zerofx.save(f"{folder}/critic", critic, judges, step=last)
    with zerofx.whole(painter), torch.no_grad():  # on all ranks
        ink = (painter.eval()(torch.randn(64, 16, 1, 1)) > 0).sum() / (images[:64] > 0).sum()
    if rank == 0:
        print(f"epoch {last}  64 samples with {ink:.0f} times the ink of the images")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
