"""Models with islands compared with FSDP2: step time, CPU seconds and peak memory of a rank.

    python -m benchmarks.islands                          # every model, 2 ranks, stage 3
    python -m benchmarks.islands --only packed --kernels inductor

Each model has parts whose forward cannot be captured as a static graph. FSDP2 shards every block
and the root. Both run in the same processes and take turns, one step each; ratios are medians over
the turns. The peak is measured in separate processes. Before anything counts, both are compared
with each other: losses must agree to 1e-4. A wav2vec2 that drops layers is not among them: under
FSDP transformers runs the dropped layers and keeps their results, so that it is another model.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
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


Batch = Callable[[int, torch.Generator], dict[str, Any]]  # rows and a generator -> arguments


@dataclass(frozen=True)
class Case:
    """A model, its batches, and the modules that FSDP2 shards by themselves.

    make: takes the width. lists: names of module lists whose members FSDP2 shards, or of modules.
    needs: a package that may be missing, and how to install it.
    """

    make: Callable[[int], nn.Module]
    batch: Batch
    lists: tuple[str, ...] = ("blocks",)
    needs: tuple[str, str] = ("torch", "torch")


def ids(rows: int, draws: torch.Generator) -> dict[str, Any]:
    return {"ids": torch.randint(0, VOCAB, (rows, LENGTH), generator=draws)}


def detr(width: int) -> nn.Module:
    """DETR with its loss: boxes are matched to queries by an assignment problem."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1],
        layer_type="basic", out_features=["stage4"],
    )  # fmt: skip
    return DetrForObjectDetection(DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, d_model=width, num_queries=20,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, dropout=0.0, num_labels=10,
    ))  # fmt: skip


def pictures(rows: int, draws: torch.Generator) -> dict[str, Any]:
    labels = []
    for _ in range(rows):
        count = int(torch.randint(1, 5, (), generator=draws))
        corners = torch.rand(count, 4, generator=draws)
        classes = torch.randint(0, 10, (count,), generator=draws)
        labels.append({"class_labels": classes, "boxes": 0.25 + corners / 4})
    return {"pixel_values": torch.randn(rows, 3, 128, 128, generator=draws), "labels": labels}


class Graphs(nn.Module):
    """A graph convolutional network of PyG over a graph with another number of edges each time."""

    def __init__(self, width: int) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.blocks = nn.ModuleList(GCNConv(width, width) for _ in range(LAYERS))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, edges: Tensor, classes: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.relu(block(x, edges))
        return F.cross_entropy(self.head(x), classes)


def graphs(width: int, rows: int, draws: torch.Generator) -> dict[str, Any]:
    nodes = 64 * rows
    count = int(torch.randint(4 * nodes, 8 * nodes, (), generator=draws))
    return {
        "x": torch.randn(nodes, width, generator=draws),
        "edges": torch.randint(0, nodes, (2, count), generator=draws),
        "classes": torch.randint(0, 10, (nodes,), generator=draws),
    }


def cases(width: int) -> dict[str, Case]:
    pillow = "PIL", "'zerofx[test]' pillow"  # transformers' loss of DETR needs it
    return {
        "experts": Case(partial(Text, special=Experts), ids),
        "packed": Case(partial(Text, special=Packed), ids),
        "layer drop": Case(partial(Text, special=mlp, drops=True), ids),
        "DETR": Case(
            detr, pictures, ("model.encoder.layers", "model.decoder.layers", "model.backbone"),
            pillow,
        ),
        "GCN": Case(
            Graphs, partial(graphs, width), needs=("torch_geometric", "torch_geometric")
        ),
    }  # fmt: skip


def sharded(
    model: nn.Module, lists: tuple[str, ...], system: str, plan: dict[str, Any]
) -> nn.Module:
    if system == "zerofx":
        return zerofx.compile(model, plan)
    from torch.distributed.fsdp import fully_shard

    for name in lists:
        part = model.get_submodule(name)
        for block in part.children() if isinstance(part, nn.ModuleList) else [part]:
            fully_shard(block)
    return fully_shard(model)  # type: ignore[return-value]


# -- one rank -------------------------------------------------------------------------------------
class Trainee:
    def __init__(self, name: str, system: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        case = cases(options.width)[name]
        model = case.make(options.width).train()
        plan = {"stage": 3, "kernels": options.kernels, "bucket_bytes": options.bucket_bytes}
        self.model: Any = sharded(model, case.lists, system, plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch, self.rows = case.batch, options.rows

    def step(self, number: int) -> float:
        """Train one step; return its loss."""
        seed = number * dist.get_world_size() + dist.get_rank()
        draws = torch.Generator().manual_seed(seed)
        given = self.batch(self.rows, draws)
        torch.manual_seed(number)  # layers are dropped alike
        np.random.seed(number)
        result = self.model(**given)
        loss: Tensor = result if isinstance(result, Tensor) else result.loss
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
    parser.add_argument("--bucket-bytes", type=int, help="Plan.bucket_bytes")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    parts = [part for part in options.only.split(",") if part]
    rows = []
    for name, case in cases(options.width).items():
        package, install = case.needs
        if parts and not any(part in name for part in parts):
            continue
        if importlib.util.find_spec(package) is None:
            print(f"{name}: left out, since {package} is not installed: pip install {install}")
            continue
        rows.append(measured(name, options))
    finish("islands", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
