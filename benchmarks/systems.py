"""What is compared: a name -> how to wrap the same model so that it trains.

Each system gets the same seed, weights, data, optimizer and loop; only the wrapping differs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofx.demo.gpt import GPT, GPTConfig

BASELINE = "fsdp2"
SEED = 0
LR = 1e-4  # small, so that rounding cannot drive equal trainings apart in a long run
# glibc told to keep its heap: freed blocks are used again instead of unmapped and faulted anew
KEEP_HEAP = {
    "MALLOC_TOP_PAD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_MMAP_THRESHOLD_": str(2**34),
}


@dataclass(frozen=True)
class System:
    """How to make a system: `wrap` takes the plain model; `env` is that of its processes."""

    wrap: Callable[[GPT], nn.Module]
    env: dict[str, str] = field(default_factory=dict)
    communicates: bool = True


def ddp(model: GPT) -> nn.Module:
    """Data parallel as torch has it, gradients in place in its buckets (its faster setting)."""
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp2(model: GPT) -> nn.Module:
    """Shard every block and the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def compiled(stage: int, kernels: str) -> Callable[[GPT], nn.Module]:
    """Return how to compile the model at a stage."""

    def wrap(model: GPT) -> nn.Module:
        import zerofx  # here, so that the peers' processes stay free of it

        return zerofx.compile(model, zerofx.Plan(stage=stage, kernels=kernels), device="cpu")

    return wrap


SYSTEMS: dict[str, System] = {
    "fsdp2": System(fsdp2),
    "fsdp2-heap": System(fsdp2, KEEP_HEAP),
    "ddp": System(ddp),
    "ddp-heap": System(ddp, KEEP_HEAP),
    "nocomm": System(lambda model: model, communicates=False),
    **{
        f"zerofx-{stage}{suffix}": System(compiled(stage, kernels))
        for kernels, suffix in (("inductor", ""), ("aten", "-aten"))
        for stage in (3, 2, 1, 0)
    },
}


def add_options(parser: argparse.ArgumentParser, systems: list[str]) -> None:
    """Add the options that choose systems and their ranks."""
    known = f"all, or of {', '.join(SYSTEMS)}; {BASELINE} always runs"
    parser.add_argument("--systems", default=",".join(systems), help=known)
    parser.add_argument("--ranks", type=int, default=2, help="processes of each system")


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the names of the chosen systems, the baseline first."""
    wanted = list(SYSTEMS) if options.systems == "all" else options.systems.split(",")
    unknown = set(wanted) - set(SYSTEMS)
    if unknown:
        raise SystemExit(
            f"--systems: unknown {', '.join(sorted(unknown))}; known {', '.join(SYSTEMS)}"
        )
    return list(dict.fromkeys([BASELINE, *wanted]))


class Trainer:
    """One rank of one system: the model, fused AdamW, and a step."""

    def __init__(self, system: str, config: GPTConfig) -> None:
        torch.set_num_threads(1)
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if SYSTEMS[system].communicates:
            dist.init_process_group("gloo")
        torch.manual_seed(SEED)
        self.model = SYSTEMS[system].wrap(GPT(config))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def step(self, x: Tensor, y: Tensor) -> float:
        """Train one step and return the loss."""
        loss = self.model(x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()
