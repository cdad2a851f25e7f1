"""A transformers Llama on two ranks, compared with torch's own tensor and pipeline parallelism.

    python -m benchmarks.parallel                      # ATen, eager against eager
    python -m benchmarks.parallel --kernels inductor

tensor, sequence: both cut the same layers, embedding and head included: zerofx with the model's own
    plan, torch with `parallelize_module`. pipeline: both have half of the layers on each rank and
    run 1F1B, torch with `torch.distributed.pipelining` over halves that were written by hand.

Both run in the same processes and take turns, one step each; ratios are medians over the turns.
torch's foreach optimizers do not accept plain parameters next to cut ones, so both step with the
for-loop implementation. Peaks are measured in separate processes, with zerofx's prediction, on the
rank that has more. Losses must agree to 1e-4 before anything counts.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import zerofx
from benchmarks import turns
from benchmarks.report import Column, finish
from benchmarks.turns import join
from zerofx.capture.capture import describe_params
from zerofx.capture.units import find_units
from zerofx.passes.cut_stages import unit_positions

AGREEMENT, VOCAB = 1e-4, 4096
AXES = ("tensor", "sequence", "pipeline")


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
    """Cut the layers according to transformers' plan for Llama."""
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


class Half(nn.Module):
    """One pipeline stage of a Llama, as written by a user of torch.distributed.pipelining."""

    def __init__(self, model: Any, position: int) -> None:
        super().__init__()
        inner, count = model.model, len(model.model.layers)
        middle = starts(model)
        own = range(middle) if position == 0 else range(middle, count)
        self.embed = inner.embed_tokens if position == 0 else None
        self.layers = nn.ModuleList(inner.layers[i] for i in own)
        self.norm, self.head = (inner.norm, model.lm_head) if position == 1 else (None, None)
        self.rotary = inner.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        places = torch.arange(x.shape[1])[None]
        table = self.rotary(x, places)
        for layer in self.layers:
            x = layer(x, position_ids=places, position_embeddings=table)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def starts(model: nn.Module) -> int:
    """Return the first layer of the second stage in zerofx's division."""
    plan = zerofx.Plan(parallel={"pipeline": 2})
    params = describe_params(model, find_units(model), {n: p.dtype for n, p in _named(model)})
    positions = unit_positions(params.values(), plan.parallel)
    return sum(unit.startswith("model.layers.") and not at for unit, at in positions.items())


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the loss of transformers' causal language models."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Trainee:
    """One of the two systems, with its optimizer."""

    def __init__(self, system: str, options: argparse.Namespace) -> None:
        model, self.rank = llama(options.width, options.layers), dist.get_rank()
        self.schedule: Any = None
        if system == "zerofx":
            parallel: dict[str, Any] = {"tensor": 2, "sequence": options.axis == "sequence"}
            if options.axis == "pipeline":
                parallel = {"pipeline": 2, "micro_batches": options.rows}
            plan = {"stage": 0, "kernels": options.kernels, "parallel": parallel}
            self.model: Any = zerofx.compile(model, plan)
        elif options.axis == "pipeline":
            self.model = Half(model, self.rank)
            stage = PipelineStage(self.model, self.rank, 2, torch.device("cpu"))
            self.schedule = Schedule1F1B(stage, options.rows, loss_fn=next_token_loss)
        else:
            self.model = by_torch(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.rows, self.length = options.rows, options.length

    def step(self, number: int) -> float:
        draw = torch.Generator().manual_seed(number)
        ids: Tensor = torch.randint(0, VOCAB, (self.rows, self.length), generator=draw)
        if self.schedule is not None:
            loss = self._scheduled(ids)
        else:
            found = self.model(input_ids=ids, labels=ids).loss
            found.backward()
            loss = float(found)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _scheduled(self, ids: Tensor) -> float:
        """Run torch's schedule; return the mean loss, which only its last stage has."""
        losses: list[Tensor] = []
        if self.rank == 0:
            self.schedule.step(ids)
        else:
            self.schedule.step(target=ids, losses=losses)
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.broadcast(mean, 1)
        return float(mean)


def compare(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Write the medians of both on rank 0."""
    join(rank, folder, "compare")
    trainees = {system: Trainee(system, options) for system in ("zerofx", "torch")}
    row = turns.compare(trainees, options.turns, AGREEMENT)
    if rank == 0:
        torch.save(row, f"{folder}/compared")
    dist.destroy_process_group()


def weigh(rank: int, system: str, options: argparse.Namespace, folder: str) -> None:
    """Write the peak of a step on each rank, and its prediction."""
    join(rank, folder, system)
    trainee, peak = turns.peak_bytes(lambda: Trainee(system, options))
    predicted = 0
    if system == "zerofx":
        basis = "aten" if options.kernels == "aten" else "compiled"
        predicted = trainee.model.programs[0].memory(basis=basis).peak_bytes
    torch.save((peak, predicted), f"{folder}/{system}-{rank}.bytes")
    dist.destroy_process_group()


COLUMNS = [
    Column("kernels", "kernels"),
    Column("axis", "over"),
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
        ours, predicted = max(torch.load(f"{folder}/zerofx-{rank}.bytes") for rank in range(2))
        theirs, _ = max(torch.load(f"{folder}/torch-{rank}.bytes") for rank in range(2))
    row |= {"kernels": options.kernels, "axis": options.axis}
    row |= {"peak_mib": ours / 2**20, "peak": ours / theirs, "predicted": ours / predicted}
    return row


def main() -> None:
    """Measure each kind of parallelism, show it and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", default="aten", choices=["inductor", "aten"])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--axes", default=list(AXES), nargs="+", choices=AXES)
    options = parser.parse_args()
    given = vars(options)
    rows = [measured(argparse.Namespace(**given | {"axis": axis})) for axis in options.axes]
    finish("parallel", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
