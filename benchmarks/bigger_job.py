"""One training of a byte GPT in a process of its own, which may have a limit; prints JSON.

The model is created on meta and initialised unit by unit, so that it is never whole. Before any of
its parameters exists, the same call is planned on paper. The predicted peak is the memory that the
process holds at that point plus the device and host memory in the plan.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zerofx
from zerofx.tools.demo.gpt import GPT, GPTConfig

SEED, LR = 0, 1e-3


def status_bytes(key: str, pid: int | str = "self") -> int:
    """Return a figure of a process in bytes, "VmRSS" or "VmHWM"; 0 if the process has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def plan_of(folder: str | None, host_budget: int | None = None) -> zerofx.Plan:
    """Return the plan: everything on NVMe, or without a folder everything on the device."""
    offload = {"parameters": "nvme", "optimizer": "nvme", "path": folder} if folder else {}
    return zerofx.Plan(
        stage=3, update="in-backward", kernels="aten", offload=offload, host_budget=host_budget
    )


def tokens(config: GPTConfig, batch: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    text = torch.randint(0, config.vocab, (batch, config.seq + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def on_meta(config: GPTConfig) -> GPT:
    """Return the model without any memory for its parameters."""
    with torch.device("meta"):
        return GPT(config)


def on_paper(config: GPTConfig, batch: int, plan: zerofx.Plan) -> dict[str, int]:
    """Return the memory that a step will hold, in bytes by tier, before any parameter exists."""
    program = zerofx.capture(on_meta(config), tokens(config, batch, 0))
    found = zerofx.rewrite(program, plan).memory().memory
    return {
        "device_bytes": found.peak_bytes,
        "host_bytes": found.host_bytes,
        "nvme_bytes": found.nvme_bytes,
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Plan, train, and return losses with the bytes held and predicted.

    The memory that a limit leaves for the host is the plan's budget, so that the engine refuses to
    exceed it before the first step.
    """
    torch.set_num_threads(1)
    config, batch, limit = GPTConfig(**job["model"]), job["batch"], job["limit"]
    found: dict[str, Any] = on_paper(config, batch, plan_of(job["folder"]))
    found["before_bytes"] = status_bytes("VmRSS")
    budget = limit and max(limit - found["before_bytes"] - found["device_bytes"], 1)
    torch.manual_seed(SEED)
    plan = plan_of(job["folder"], budget if job["folder"] else None)
    model = zerofx.compile(on_meta(config), plan, device="cpu")
    optimizer = zerofx.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for step in range(job["steps"]):
        loss = model(*tokens(config, batch, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return found | {"losses": losses, "peak_bytes": status_bytes("VmHWM")}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
