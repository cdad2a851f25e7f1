"""Gradients of a large embedding table, by rows and whole, on 2 ranks: bytes and step time.

    python -m benchmarks.table_rows [--rounds 8]

Both models run in the same processes and take turns, one step each; ratios are medians over the
turns. Their weights must be equal at the end.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import zerofx
from benchmarks.report import Column, finish

WARMUP = 3


class Reader(nn.Module):
    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(height, width)
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.table(x).mean(1))).square().mean()


class Trainee:
    def __init__(self, by_rows: bool, stage: int, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        model = Reader(options.height, options.width)
        plan = {"stage": stage, "kernels": "aten", "sparse_gradients": by_rows}
        self.model = zerofx.compile(model, plan)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x: Tensor) -> tuple[float, int]:
        """Return seconds, and bytes that this rank sent."""
        counters = self.model.zerofx.world.counters.values()
        dist.barrier()
        before, began = sum(c.sent_bytes for c in counters), time.perf_counter()
        self.model(x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - began, sum(c.sent_bytes for c in counters) - before


def run(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Write the rows of the table on rank 0."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    draws, rows = torch.Generator().manual_seed(rank), []
    for stage in (0, 1):
        both = {by_rows: Trainee(by_rows, stage, options) for by_rows in (False, True)}
        for tokens in options.tokens:
            found: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
            for _ in range(WARMUP + options.rounds):
                x = torch.randint(options.height, (tokens // 16, 16), generator=draws)
                for by_rows, trainee in both.items():
                    found[by_rows].append(trainee.step(x))
            whole, by_row = (found[by_rows][WARMUP:] for by_rows in (False, True))
            seconds = [statistics.median(s for s, _ in each) for each in (whole, by_row)]
            ratios = [b[0] / a[0] for a, b in zip(whole, by_row, strict=True)]
            rows.append({
                "stage": stage, "tokens": tokens, "whole_mib": whole[-1][1] / 2**20,
                "rows_mib": by_row[-1][1] / 2**20, "whole_ms": seconds[0] * 1e3,
                "rows_ms": seconds[1] * 1e3, "ratio": statistics.median(ratios),
            })  # fmt: skip
        states = [zerofx.full_state_dict(each.model, rank0_only=False) for each in both.values()]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    if rank == 0:
        torch.save(rows, f"{folder}/rows")
    dist.destroy_process_group()


COLUMNS = [
    Column("stage", "stage"),
    Column("tokens", "tokens per rank"),
    Column("whole_mib", "whole MiB", "{:.2f}"),
    Column("rows_mib", "by rows MiB", "{:.2f}"),
    Column("whole_ms", "whole ms", "{:.1f}"),
    Column("rows_ms", "by rows ms", "{:.1f}"),
    Column("ratio", "x whole", "{:.2f}"),
]


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--height", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (options, folder), 2)  # type: ignore[no-untyped-call]
        rows = torch.load(f"{folder}/rows")
    finish("table_rows", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
