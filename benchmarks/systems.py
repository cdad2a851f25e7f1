"""Systems to compare: a name -> how to wrap the same model for training.

Each system gets the same seed, weights, data, optimizer and loop; only the wrapper differs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import peers
from zerofx.tools.demo.gpt import GPT, GPTConfig

BASELINE = "fsdp2"
SEED = 0
LR = 1e-4  # small, so that rounding cannot make equal trainings diverge in a long run
# Tells glibc what zerofx tells it (zerofx/process.py): blocks up to 32 MiB come from a kept heap.
KEEP_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_MMAP_THRESHOLD_": str(2**25)}


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's AdamW, in one fused call."""
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def flat_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return zerofx's AdamW, with the same hyperparameters."""
    import zerofx  # imported here, so that the peers' processes do not import it

    return zerofx.optim.AdamW(model.parameters(), lr=LR)


@dataclass(frozen=True)
class System:
    """How to create a system: `wrap` takes the plain model; `env` is that of its processes.

    optimizer: takes the wrapped model; has `step` and `zero_grad`.
    baseline: the system to compare with, whose losses it must reproduce within `loss_tolerance`,
        relative.
    package: a peer's; it has its own environment.
    """

    wrap: Callable[[GPT], nn.Module]
    env: dict[str, str] = field(default_factory=dict)
    optimizer: Callable[[nn.Module], Any] = fused_adamw
    communicates: bool = True
    baseline: str = BASELINE
    loss_tolerance: float = 1e-4
    package: str | None = None


def ddp(model: GPT) -> nn.Module:
    """Wrap in torch's data parallelism, with gradients in place in its buckets (faster)."""
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp2(
    model: GPT, dtype: torch.dtype | None = None, device: str = "cpu", offloads: bool = False,
    recomputes: bool = False,
) -> nn.Module:  # fmt: skip
    """Shard every block and the root; `dtype` is the compute dtype, over fp32 weights.

    offloads: with its CPUOffloadPolicy; this does nothing on a CPU, where shards are on the host
        anyway.
    recomputes: backward recomputes each block (`torch.utils.checkpoint`).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )
    from torch.utils.checkpoint import checkpoint

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    reduce = None if dtype is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce)
    offload = CPUOffloadPolicy(pin_memory=device != "cpu") if offloads else OffloadPolicy()
    for block in model.blocks:
        if recomputes:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return model


def compiled(stage: int, **plan: Any) -> Callable[[GPT], nn.Module]:
    """Return a function that compiles the model at a stage."""

    def wrap(model: GPT) -> nn.Module:
        import zerofx  # imported here, so that the peers' processes do not import it

        fields = {"stage": stage, "kernels": "inductor", **plan}
        return zerofx.compile(model, fields, device="cpu")

    return wrap


def _in_bf16(wrap: Callable[[GPT], nn.Module], baseline: str = "fsdp2-bf16") -> System:
    """Return a bf16 system. Two orders of the same bf16 sums differ by its last bit (8 bits)."""
    return System(wrap, baseline=baseline, loss_tolerance=2e-2)


def _offloaded(tiers: dict[str, str], **plan: Any) -> System:
    return System(compiled(3, offload=tiers, **plan), optimizer=flat_adamw)


SYSTEMS: dict[str, System] = {
    "fsdp2": System(fsdp2),
    "fsdp2-heap": System(fsdp2, KEEP_HEAP),
    "ddp": System(ddp),
    "ddp-heap": System(ddp, KEEP_HEAP),
    "nocomm": System(lambda model: model, communicates=False),
    "fsdp2-bf16": _in_bf16(lambda model: fsdp2(model, torch.bfloat16)),
    "fsdp2-recompute": System(partial(fsdp2, recomputes=True), baseline="fsdp2-recompute"),
    "fsdp2-bf16-recompute": _in_bf16(
        partial(fsdp2, dtype=torch.bfloat16, recomputes=True), "fsdp2-bf16-recompute"
    ),
    "fsdp2-offload": System(partial(fsdp2, offloads=True)),
    "deepspeed-offload": System(
        partial(peers.deepspeed, lr=LR), optimizer=peers.engine, package="deepspeed"
    ),
    "torchao-offload": System(
        lambda model: model,
        optimizer=partial(peers.torchao, lr=LR),
        communicates=False,
        package="torchao",
    ),
    "zerofx-3-recompute": System(compiled(3, activations="recompute"), baseline="fsdp2-recompute"),
    "zerofx-3-bf16-recompute": _in_bf16(
        compiled(3, activations="recompute", precision="bf16"), "fsdp2-bf16-recompute"
    ),
    "zerofx-3-gloo": System(compiled(3), {"ZEROFX_TRANSPORT": "gloo"}),
    "zerofx-0-gloo": System(compiled(0), {"ZEROFX_TRANSPORT": "gloo"}),
    "zerofx-3-flat": System(compiled(3), optimizer=flat_adamw),
    "zerofx-3-host-states": _offloaded({"optimizer": "cpu"}),
    "zerofx-3-host": _offloaded({"optimizer": "cpu", "parameters": "cpu"}),
    "zerofx-3-host-in-backward": _offloaded(
        {"optimizer": "cpu", "parameters": "cpu"}, update="in-backward"
    ),
    **{
        f"zerofx-{stage}-bf16": _in_bf16(compiled(stage, precision="bf16"))
        for stage in (3, 2, 1, 0)
    },
    **{
        f"zerofx-{stage}{suffix}": System(compiled(stage, kernels=kernels))
        for kernels, suffix in (("inductor", ""), ("aten", "-aten"))
        for stage in (3, 2, 1, 0)
    },
}


def add_options(parser: argparse.ArgumentParser, systems: list[str]) -> None:
    """Add the options that choose systems and their ranks."""
    known = (
        f"default: all that need no environment of their own. Known: {', '.join(SYSTEMS)}; "
        "the system that one is compared with always runs"
    )
    parser.add_argument("--systems", default=",".join(systems), help=known)
    parser.add_argument("--ranks", type=int, default=2, help="processes of each system")


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the names of the chosen systems, their baselines first."""
    here = [name for name, system in SYSTEMS.items() if system.package is None]
    wanted = here if options.systems == "all" else options.systems.split(",")
    unknown = set(wanted) - set(SYSTEMS)
    if unknown:
        raise SystemExit(
            f"--systems: unknown {', '.join(sorted(unknown))}; known {', '.join(SYSTEMS)}"
        )
    return list(dict.fromkeys([*(SYSTEMS[name].baseline for name in wanted), *wanted]))


class Trainer:
    """One rank of one system: the model, fused AdamW, and a step."""

    def __init__(self, system: str, config: GPTConfig) -> None:
        torch.set_num_threads(1)
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if SYSTEMS[system].communicates:
            dist.init_process_group("gloo")
        torch.manual_seed(SEED)
        self.model = SYSTEMS[system].wrap(GPT(config))
        self.optimizer = SYSTEMS[system].optimizer(self.model)

    def step(self, x: Tensor, y: Tensor) -> float:
        """Train one step and return the loss."""
        loss = self.model(x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()
