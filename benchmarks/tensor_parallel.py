"""A Llama of transformers whose layers two ranks share, against torch's own tensor parallelism.

    python -m benchmarks.tensor_parallel                      # ATen, eager against eager
    python -m benchmarks.tensor_parallel --kernels inductor

Both cut the same layers, embedding and head included: zerofx by the model's own plan, torch by
`parallelize_module`. They live in the same processes and take turns, a step each; ratios are
medians over the turns. torch's foreach optimizers do not take plain parameters next to cut ones, so
that both step by the loop. Peaks are measured in processes of their own, next to what zerofx
predicts. Losses must agree to 1e-4 before anything counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import zerofx
from benchmarks.report import Column, finish
from zerofx.tools.demo.measure import PeakMemory

WARMUP, AGREEMENT, VOCAB = 3, 1e-4, 4096


def llama(width: int, layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
            num_attention_heads=8, num_key_value_heads=8, vocab_size=VOCAB, use_cache=False,
        )
    )  # fmt: skip


def by_torch(model: Any) -> nn.Module:
    """Cut the layers as transformers' plan for Llama says."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    columns += ["mlp.gate_proj", "mlp.up_proj"]
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    whole: Any = {"input_layouts": Replicate()}
    parallelize_module(model.model, mesh, {"embed_tokens": RowwiseParallel(**whole)})
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    return model  # type: ignore[no-any-return]


class Trainee:
    """One of the two, with its optimizer."""

    def __init__(self, system: str, options: argparse.Namespace) -> None:
        model = llama(options.width, options.layers)
        if system == "zerofx":
            parallel = {"tensor": 2, "sequence": options.sequence}
            plan = {"stage": 0, "kernels": options.kernels, "parallel": parallel}
            self.model: Any = zerofx.compile(model, plan)
        else:
            self.model = by_torch(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.rows, self.length = options.rows, options.length

    def step(self, number: int) -> float:
        draw = torch.Generator().manual_seed(number)
        ids: Tensor = torch.randint(0, VOCAB, (self.rows, self.length), generator=draw)
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def compare(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Leave the medians of both on rank 0."""
    _join(rank, folder, "compare")
    systems = "zerofx", "torch"
    trainees = {system: Trainee(system, options) for system in systems}
    taken: dict[str, list[tuple[float, float]]] = {system: [] for system in systems}
    for number in range(WARMUP + options.turns):
        losses = {}
        for system in systems if number % 2 else reversed(systems):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            losses[system] = trainees[system].step(number)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if number >= WARMUP:
                taken[system].append((wall, cpu))
        if abs(losses["zerofx"] - losses["torch"]) > AGREEMENT * abs(losses["torch"]):
            raise ValueError(f"step {number} has the losses {losses}")
    if rank == 0:
        pairs = list(zip(taken["zerofx"], taken["torch"], strict=True))
        torch.save({
            "wall_ms": 1e3 * statistics.median(ours[0] for ours, _ in pairs),
            "wall": statistics.median(ours[0] / theirs[0] for ours, theirs in pairs),
            "cpu": statistics.median(ours[1] / theirs[1] for ours, theirs in pairs),
        }, f"{folder}/compared")  # fmt: skip
    dist.destroy_process_group()


def weigh(rank: int, system: str, options: argparse.Namespace, folder: str) -> None:
    """Leave the peak of a step on rank 0, and what was predicted of it."""
    _join(rank, folder, system)
    with PeakMemory(torch.device("cpu")) as memory:
        trainee = Trainee(system, options)
        for number in range(WARMUP):
            trainee.step(number)
        with memory.step():
            trainee.step(WARMUP)
    predicted = 0
    if system == "zerofx":
        basis = "aten" if options.kernels == "aten" else "compiled"
        predicted = trainee.model.programs[0].memory(basis=basis).peak_bytes
    if rank == 0:
        torch.save((memory.steps[0].high_bytes, predicted), f"{folder}/{system}.bytes")
    dist.destroy_process_group()


def _join(rank: int, folder: str, job: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/{job}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


COLUMNS = [
    Column("kernels", "kernels"),
    Column("sequence", "sequence cut"),
    Column("wall_ms", "step ms", "{:.1f}"),
    Column("wall", "x torch", "{:.3f}"),
    Column("cpu", "CPU x", "{:.3f}"),
    Column("peak_mib", "peak MiB", "{:.1f}"),
    Column("peak", "x torch", "{:.3f}"),
    Column("predicted", "x predicted", "{:.4f}"),
]


def measured(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, (options, folder), 2)  # type: ignore[no-untyped-call]
        for system in ("zerofx", "torch"):
            mp.spawn(weigh, (system, options, folder), 2)  # type: ignore[no-untyped-call]
        row: dict[str, Any] = torch.load(f"{folder}/compared")
        ours, predicted = torch.load(f"{folder}/zerofx.bytes")
        theirs, _ = torch.load(f"{folder}/torch.bytes")
    row |= {"kernels": options.kernels, "sequence": options.sequence}
    row |= {"peak_mib": ours / 2**20, "peak": ours / theirs, "predicted": ours / predicted}
    return row


def main() -> None:
    """Measure with and without the sequence cut, show it and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", default="aten", choices=["inductor", "aten"])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    rows = []
    for sequence in (False, True):
        options.sequence = sequence
        rows.append(measured(options))
    finish("tensor_parallel", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
