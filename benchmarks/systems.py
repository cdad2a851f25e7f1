"""What is compared: a name -> how to wrap the same model so that it trains.

Each system gets the same seed, weights, data, optimizer and loop; only the wrapping differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofx.demo.gpt import GPT, GPTConfig

BASELINE = "fsdp2"
SEED = 0
LR = 3e-4
GIB = str(2**30)
# glibc told to keep its heap: freed blocks are reused instead of being unmapped and faulted anew
KEEP_HEAP = {
    "MALLOC_TOP_PAD_": GIB,
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_MMAP_THRESHOLD_": str(2**34),
}


@dataclass(frozen=True)
class System:
    """How to make a system: `wrap` a plain model; `env` of its processes."""

    wrap: Callable[[GPT], nn.Module]
    env: dict[str, str] = field(default_factory=dict)
    communicates: bool = True


def plain(model: GPT) -> nn.Module:
    return model


def ddp(model: GPT) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp2(model: GPT) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def zerofx_stage(stage: int, kernels: str) -> Callable[[GPT], nn.Module]:
    def wrap(model: GPT) -> nn.Module:
        import zerofx  # here, so that the peers' processes stay free of it

        return zerofx.compile(model, zerofx.Plan(stage=stage, kernels=kernels))

    return wrap


SYSTEMS: dict[str, System] = {
    "fsdp2": System(fsdp2),
    "fsdp2-heap": System(fsdp2, KEEP_HEAP),
    "ddp": System(ddp),
    "ddp-heap": System(ddp, KEEP_HEAP),
    "nocomm": System(plain, communicates=False),
    **{
        f"zerofx-{stage}{suffix}": System(zerofx_stage(stage, kernels))
        for kernels, suffix in (("inductor", ""), ("aten", "-aten"))
        for stage in (3, 2, 1, 0)
    },
}


class Trainer:
    """One rank of one system: the model, fused AdamW, and a step."""

    def __init__(self, system: str, config: GPTConfig) -> None:
        torch.set_num_threads(1)
        chosen = SYSTEMS[system]
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if chosen.communicates:
            dist.init_process_group("gloo")
        torch.manual_seed(SEED)
        self.model = chosen.wrap(GPT(config))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.model(x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
