"""Models with islands compared with FSDP2: step time, CPU seconds and peak memory of a rank.

    python -m benchmarks.islands                          # every model, 2 ranks, stage 3
    python -m benchmarks.islands --only packed --kernels inductor

Each model has blocks whose forward cannot be captured as a static graph. FSDP2 shards every block
and the root. Both run in the same processes and take turns, one step each; ratios are medians over
the turns. The peak is measured in separate processes. Before anything counts, both are compared
with each other: losses must agree to 1e-4.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from benchmarks import turns
from benchmarks.report import Column, finish
from benchmarks.turns import join

VOCAB, LAYERS, LENGTH = 256, 4, 32
AGREEMENT = 1e-4


# -- models ---------------------------------------------------------------------------------------
class Experts(nn.Module):
    """Top-1 experts, written by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(mlp(width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return out.view(x.shape)


class Packed(nn.Module):
    """An LSTM over sequences of different lengths."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.linspace(x.shape[1], x.shape[1] // 2, len(x)).long()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return out


def mlp(width: int, factor: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width)
    )


class Block(nn.Module):
    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Text(nn.Module):
    """Blocks over embedded tokens; every second one has the special part, if there is one.

    drops: whether blocks are dropped at random, on all ranks alike, as FSDP2 needs it.
    """

    def __init__(
        self, width: int, special: Callable[[int], nn.Module], drops: bool = False
    ) -> None:
        super().__init__()
        parts = [special(width) if i % 2 else mlp(width) for i in range(LAYERS)]
        self.drops, self.embed = drops, nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, part) for part in parts)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if not self.drops or torch.rand(()).item() > 0.2:
                x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "experts": partial(Text, special=Experts),
    "packed": partial(Text, special=Packed),
    "layer drop": partial(Text, special=mlp, drops=True),
}


def sharded(model: nn.Module, system: str, kernels: str) -> nn.Module:
    if system == "zerofx":
        return zerofx.compile(model, zerofx.Plan(stage=3, kernels=kernels))
    from torch.distributed.fsdp import fully_shard

    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    return fully_shard(model)  # type: ignore[return-value]


# -- one rank -------------------------------------------------------------------------------------
class Trainee:
    def __init__(self, name: str, system: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model: Any = sharded(MODELS[name](options.width), system, options.kernels)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.rows = options.rows

    def step(self, number: int) -> float:
        """Train one step; return its loss."""
        seed = number * dist.get_world_size() + dist.get_rank()
        draws = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, VOCAB, (self.rows, LENGTH), generator=draws)
        torch.manual_seed(number)  # layers are dropped alike
        loss = self.model(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def compare(rank: int, name: str, options: argparse.Namespace, folder: str) -> None:
    """Let both take turns; rank 0 writes the measurements."""
    join(rank, folder, "compare")
    trainees = {system: Trainee(name, system, options) for system in ("zerofx", "fsdp2")}
    row = turns.compare(trainees, options.turns, AGREEMENT)
    islands = trainees["zerofx"].model.zerofx.islands
    if rank == 0:
        inside = sum(island.share for island in islands)
        torch.save(row | {"islands": len(islands), "inside": inside}, f"{folder}/compared")
    dist.destroy_process_group()


def weigh(rank: int, name: str, system: str, options: argparse.Namespace, folder: str) -> None:
    """Write the peak of a step on rank 0."""
    join(rank, folder, system)
    _, peak = turns.peak_bytes(lambda: Trainee(name, system, options))
    if rank == 0:
        torch.save(peak, f"{folder}/{system}.bytes")
    dist.destroy_process_group()


# -- all of it ------------------------------------------------------------------------------------
COLUMNS = [
    Column("model", "model"),
    Column("kernels", "kernels"),
    Column("islands", "islands"),
    Column("inside", "of parameters", "{:.0%}"),
    Column("wall_ms", "step ms", "{:.1f}"),
    Column("wall", "x FSDP2", "{:.3f}"),
    Column("cpu", "CPU x", "{:.3f}"),
    Column("peak_mib", "peak MiB", "{:.1f}"),
    Column("peak", "x FSDP2", "{:.3f}"),
]


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, (name, options, folder), 2)  # type: ignore[no-untyped-call]
        for system in ("zerofx", "fsdp2"):
            mp.spawn(weigh, (name, system, options, folder), 2)  # type: ignore[no-untyped-call]
        row: dict[str, Any] = torch.load(f"{folder}/compared")
        ours, theirs = (torch.load(f"{folder}/{s}.bytes") for s in ("zerofx", "fsdp2"))
    row |= {"model": name, "kernels": options.kernels}
    return row | {"peak_mib": ours / 2**20, "peak": ours / theirs}


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only",
        default="",
        help="only models with one of these texts in their name, separated by commas",
    )
    parser.add_argument("--kernels", default="aten", choices=["inductor", "aten"])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    parts = [part for part in options.only.split(",") if part]
    names = [n for n in MODELS if not parts or any(part in n for part in parts)]
    finish("islands", COLUMNS, [measured(name, options) for name in names], options)


if __name__ == "__main__":
    main()
