"""A transformers Llama on 2 and 4 ranks, compared with torch's own parallelism over FSDP2.

    python -m benchmarks.parallel                                  # ATen, eager against eager
    python -m benchmarks.parallel --kernels inductor --axes tensor
    python -m benchmarks.parallel --axes deepspeed                 # where DeepSpeed is installed

tensor, sequence (2 ranks): both cut the same layers, embedding and head included: zerofx with the
    model's own plan, torch with `parallelize_module`.
pipeline (2 ranks): both have the same layers on each rank and run 1F1B, torch with
    `torch.distributed.pipelining` over halves that were written by hand.
tensor-data, sequence-data, pipeline-data (4 ranks): the same with two data ranks, where torch's
    modules are wrapped by `fully_shard`. zerofx is at stage 3. In pipelines parameters stay
    gathered during a step: `reshard_after_forward=False`, and stage 2.
deepspeed (2 ranks): DeepSpeed's pipeline engine instead of torch's, over the same halves, layer by
    layer.

Both run in the same processes and take turns, one step each; ratios are medians over the turns.
On fewer cores than ranks, read the CPU-seconds. torch's foreach optimizers do not accept plain
parameters next to cut ones, so both step with the for-loop implementation. Peaks are measured in
separate processes, with zerofx's prediction, on the rank that has more. Losses must agree to 1e-4
before anything counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
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
WORLDS = {
    "tensor": 2, "sequence": 2, "pipeline": 2,
    "tensor-data": 4, "sequence-data": 4, "pipeline-data": 4, "deepspeed": 2,
}  # fmt: skip
BY_DEFAULT = [axis for axis in WORLDS if axis != "deepspeed"]


def llama(width: int, layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
            num_attention_heads=8, num_key_value_heads=8, vocab_size=VOCAB, use_cache=False,
        )
    )  # fmt: skip


def by_torch(model: Any, mesh: DeviceMesh, is_sequence: bool) -> nn.Module:
    """Cut the layers according to transformers' plan for Llama, and norms along the sequence."""
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    columns += ["mlp.gate_proj", "mlp.up_proj"]
    part: Any = Shard(1) if is_sequence else Replicate()
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[name] = RowwiseParallel(output_layouts=part)
    if is_sequence:
        plan |= {"input_layernorm": SequenceParallel()}
        plan |= {"post_attention_layernorm": SequenceParallel()}
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": part},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan["mlp"] = PrepareModuleInput(
            input_layouts=(part,), desired_input_layouts=(Replicate(),)
        )
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    table = RowwiseParallel(input_layouts=Replicate(), output_layouts=part)
    inner: dict[str, Any] = {"embed_tokens": table}
    if is_sequence:
        inner["norm"] = SequenceParallel()
    parallelize_module(model.model, mesh, inner)
    head = ColwiseParallel(input_layouts=part, output_layouts=Replicate())
    parallelize_module(model, mesh, {"lm_head": head})
    return model  # type: ignore[no-any-return]


def shard(model: nn.Module, layers: Any, mesh: DeviceMesh, is_freed: bool) -> None:
    """Wrap each layer and the rest by FSDP2; is_freed: backward gathers them again."""
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=is_freed)
    fully_shard(model, mesh=mesh, reshard_after_forward=is_freed)


class Half(nn.Module):
    """One pipeline stage of a Llama, as written by a user of torch.distributed.pipelining."""

    def __init__(self, model: Any, position: int) -> None:
        super().__init__()
        inner, count = model.model, len(model.model.layers)
        middle = starts(model)
        own = range(middle) if position == 0 else range(middle, count)
        self.embed = inner.embed_tokens if position == 0 else None
        self.layers = nn.ModuleList(inner.layers[i] for i in own)
        self.norm: Any = inner.norm if position == 1 else None
        self.head: Any = model.lm_head if position == 1 else None
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


class Piece(nn.Module):
    """One layer of DeepSpeed's list: the embedding, a decoder layer, or the norm and the head."""

    def __init__(self, model: Any, index: int) -> None:
        super().__init__()
        inner, count = model.model, len(model.model.layers)
        self.embed = inner.embed_tokens if index == 0 else None
        self.layer = inner.layers[index - 1] if 1 <= index <= count else None
        self.norm: Any = inner.norm if index > count else None
        self.head: Any = model.lm_head if index > count else None
        self.rotary = inner.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            return self.embed(x)  # type: ignore[no-any-return]
        if self.layer is not None:
            places = torch.arange(x.shape[1])[None]
            table = self.rotary(x, places)
            out: Tensor = self.layer(x, position_ids=places, position_embeddings=table)
            return out
        found: Tensor = self.head(self.norm(x))
        return found


class ByZerofx:
    """zerofx's side of an axis."""

    def __init__(self, options: argparse.Namespace) -> None:
        axis, _, data = options.axis.partition("-")
        parallel: dict[str, Any] = {"tensor": 2, "sequence": axis == "sequence"}
        stage = 3 if data else 0
        if axis in ("pipeline", "deepspeed"):
            parallel = {"pipeline": 2, "micro_batches": options.rows}
            stage = 2 if data else 0
        plan = {"stage": stage, "kernels": options.kernels, "parallel": parallel}
        self.model: Any = zerofx.compile(llama(options.width, options.layers), plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.data_rank, self.options = self.model.zerofx.data_rank, options

    def step(self, number: int) -> float:
        ids = batch(self.options, number, self.data_rank)
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class ByTorch:
    """torch's tensor parallelism, with FSDP2 over the data ranks."""

    def __init__(self, options: argparse.Namespace) -> None:
        axis, _, data = options.axis.partition("-")
        mesh = init_device_mesh("cpu", (options.world // 2, 2), mesh_dim_names=("data", "tensor"))
        model: Any = llama(options.width, options.layers)
        self.model = by_torch(model, mesh["tensor"], axis == "sequence")
        if data:
            shard(self.model, model.model.layers, mesh["data"], True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.data_rank, self.options = mesh.get_local_rank("data"), options

    def step(self, number: int) -> float:
        ids = batch(self.options, number, self.data_rank)
        # positions are those of the whole sequence; the model would count those of its part
        places = torch.arange(ids.shape[1])[None]
        loss = self.model(input_ids=ids, labels=ids, position_ids=places).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class ByTorchPipeline:
    """torch's 1F1B over two halves, with FSDP2 over the data ranks."""

    def __init__(self, options: argparse.Namespace) -> None:
        sizes = (2, options.world // 2)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pipeline", "data"))
        self.group, self.place = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
        self.model: Any = Half(llama(options.width, options.layers), self.place)
        if "-data" in options.axis:
            shard(self.model, self.model.layers, mesh["data"], False)
        device = torch.device("cpu")
        stage = PipelineStage(self.model, self.place, 2, device, group=self.group)
        self.schedule = Schedule1F1B(stage, options.rows, loss_fn=next_token_loss)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.data_rank, self.options = mesh.get_local_rank("data"), options

    def step(self, number: int) -> float:
        ids = batch(self.options, number, self.data_rank)
        losses: list[Tensor] = []
        if self.place == 0:
            self.schedule.step(ids)
        else:
            self.schedule.step(target=ids, losses=losses)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.broadcast(mean, group=self.group, group_src=1)
        return float(mean)


class ByDeepSpeed:
    """DeepSpeed's pipeline engine over the same layers, cut where zerofx cuts."""

    def __init__(self, options: argparse.Namespace) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "LOCAL_SIZE": str(dist.get_world_size())}
        deepspeed: Any = importlib.import_module("deepspeed")
        pipe: Any = importlib.import_module("deepspeed.pipe")
        deepspeed.init_distributed("gloo", dist_init_required=False)
        model = llama(options.width, options.layers)
        first = starts(model) + 1
        pieces = [Piece(model, index) for index in range(options.layers + 2)]

        class Cut(pipe.PipelineModule):  # type: ignore[misc]
            def _partition_layers(self, method: str = "") -> None:
                self.parts = [0, first, len(pieces)]
                own = self._topo.get_coord(self.global_rank).pipe
                self._set_bounds(start=self.parts[own], stop=self.parts[own + 1])

        net = Cut(layers=pieces, num_stages=2, loss_fn=next_token_loss)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=False)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": options.rows,
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
        self.options = options

    def step(self, number: int) -> float:
        ids = batch(self.options, number, 0)
        rows = iter([(row, row) for row in ids.split(1)])
        return float(self.engine.train_batch(data_iter=rows))


PEERS = {"pipeline": ByTorchPipeline, "pipeline-data": ByTorchPipeline, "deepspeed": ByDeepSpeed}
NAMES = ("zerofx", "peer")


def trainee(system: str, options: argparse.Namespace) -> Any:
    """Return one of the two systems, with its optimizer."""
    return (ByZerofx if system == "zerofx" else PEERS.get(options.axis, ByTorch))(options)


def batch(options: argparse.Namespace, number: int, data_rank: int) -> Tensor:
    """Return the tokens that a data rank reads in a step."""
    draw = torch.Generator().manual_seed(1000 * number + data_rank)
    return torch.randint(0, VOCAB, (options.rows, options.length), generator=draw)


def compare(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Write the medians of both on rank 0."""
    join(rank, folder, "compare", options.world)
    row = turns.compare({n: trainee(n, options) for n in NAMES}, options.turns, AGREEMENT)
    if rank == 0:
        torch.save(row, f"{folder}/compared")
    dist.destroy_process_group()


def weigh(rank: int, system: str, options: argparse.Namespace, folder: str) -> None:
    """Write the peak of a step on each rank, and its prediction."""
    join(rank, folder, system, options.world)
    made, peak = turns.peak_bytes(lambda: trainee(system, options))
    predicted = 0
    if system == "zerofx":
        basis = "aten" if options.kernels == "aten" else "compiled"
        predicted = made.model.programs[0].memory(basis=basis).peak_bytes
    torch.save((peak, predicted), f"{folder}/{system}-{rank}.bytes")
    dist.destroy_process_group()


COLUMNS = [
    Column("kernels", "kernels"),
    Column("axis", "over"),
    Column("ranks", "ranks"),
    Column("wall_ms", "step ms", "{:.1f}"),
    Column("wall", "x peer", "{:.3f}"),
    Column("cpu", "CPU x", "{:.3f}"),
    Column("peak_mib", "peak MiB", "{:.1f}"),
    Column("peak", "x peer", "{:.3f}"),
    Column("predicted", "x predicted", "{:.4f}"),
]


def measured(options: argparse.Namespace) -> dict[str, Any]:
    ranks = range(options.world)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, (options, folder), len(ranks))  # type: ignore[no-untyped-call]
        for system in NAMES:
            mp.spawn(weigh, (system, options, folder), len(ranks))  # type: ignore[no-untyped-call]
        row: dict[str, Any] = torch.load(f"{folder}/compared")
        ours, predicted = max(torch.load(f"{folder}/zerofx-{rank}.bytes") for rank in ranks)
        theirs, _ = max(torch.load(f"{folder}/peer-{rank}.bytes") for rank in ranks)
    row |= {"kernels": options.kernels, "axis": options.axis, "ranks": options.world}
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
    parser.add_argument("--axes", default=BY_DEFAULT, nargs="+", choices=[*WORLDS])
    options = parser.parse_args()
    if "deepspeed" in options.axes and importlib.util.find_spec("deepspeed") is None:
        parser.error("--axes deepspeed: DeepSpeed is not installed here")
    cells = [vars(options) | {"axis": axis, "world": WORLDS[axis]} for axis in options.axes]
    finish("parallel", COLUMNS, [measured(argparse.Namespace(**cell)) for cell in cells], options)


if __name__ == "__main__":
    main()
