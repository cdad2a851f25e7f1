"""The model, the loop and the plans behind tests/snapshots/: what an older zerofx wrote.

    torchrun --standalone --nproc-per-node 2 tests/support/older_snapshots.py \\
        tests/snapshots/52b680f

was run at that commit. Each kind has a folder that `zerofx.save` wrote after `SAVED_STEPS` steps,
and a file with the full state at that moment (`saved`) and after `LATER_STEPS` more (`later`). The
folder `odd-shapes` has parameters of 0 to 4 dimensions with known values.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx

SAVED_STEPS, LATER_STEPS = 3, 2
KINDS: dict[str, dict[str, Any]] = {
    "torch-adamw": {"stage": 3, "kernels": "aten"},
    "flat-adamw-bf16": {"stage": 2, "kernels": "aten", "precision": "bf16"},
}


def build(kind: str, **changes: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return the compiled model of a kind and its optimizer."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 10), nn.GELU(), nn.BatchNorm1d(10), nn.Linear(10, 3)
    plain = nn.Sequential(nn.Embedding(13, 6), nn.LayerNorm(6), *layers)
    model = zerofx.compile(plain, zerofx.Plan(**KINDS[kind] | changes), device="cpu")
    adamw: Any = torch.optim.AdamW if kind.startswith("torch") else zerofx.optim.AdamW
    return model, adamw(model.parameters(), lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    """Run some steps of one rank's data."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(0, 13, (8,), generator=generator)
        labels = torch.randint(0, 3, (8,), generator=generator)
        nn.functional.cross_entropy(model(tokens).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def later_steps() -> range:
    """Return the steps after the save."""
    return range(SAVED_STEPS, SAVED_STEPS + LATER_STEPS)


class OddShapes(nn.Module):
    """Parameters of 0, 1, 2 and 4 dimensions, tied ones and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.0))
        self.conv = nn.Conv2d(2, 3, (3, 5))
        self.inside = nn.Linear(3, 7)
        self.outside = nn.Linear(7, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.again = nn.Linear(3, 7, bias=False)
        self.again.weight = self.inside.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).mean((2, 3)))
        return (self.outside(self.inside(y) + self.again(y)) * self.scale).pow(2).mean()


def made_odd(stage: int) -> tuple[Any, Any]:
    """Return a compiled OddShapes and an AdamW with states."""
    torch.manual_seed(0)
    model = zerofx.compile(OddShapes(), {"stage": stage, "kernels": "aten"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 2, 4, 6)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def odd_values(shape: torch.Size, number: int, key: str) -> Tensor:
    """Return what the snapshot has of parameter `number`, or of a state of it."""
    base = {"": 0, "exp_avg": 1, "exp_avg_sq": 2}[key]
    return (torch.arange(shape.numel()) + 1000 * number + 300 * base).float().view(shape)


def fill_odd(model: Any, optimizer: Any) -> None:
    """Give parameters, states and buffers their values."""
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(odd_values(param.shape, number, ""))
            for key in ("exp_avg", "exp_avg_sq"):
                optimizer.state[param][key].copy_(odd_values(param.shape, number, key))
        model.norm.running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))


def main(folder: Path) -> None:
    """Write every kind."""
    for kind in KINDS:
        model, optimizer = build(kind)
        rank = dist.get_rank()
        train(model, optimizer, range(SAVED_STEPS), rank)
        zerofx.save(folder / kind, model, optimizer, extra={"step": SAVED_STEPS})
        saved = copy.deepcopy(zerofx.full_state_dict(model))  # buffers are the model's own
        train(model, optimizer, later_steps(), rank)
        later = zerofx.full_state_dict(model)
        if rank == 0:
            torch.save({"saved": saved, "later": later}, folder / f"{kind}.pt")
    model, optimizer = made_odd(stage=3)
    fill_odd(model, optimizer)
    zerofx.save(folder / "odd-shapes", model, optimizer, extra={"epoch": 7})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
