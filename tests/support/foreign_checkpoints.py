"""The models behind tests/snapshots/deepspeed-0.19.5 and megatron-core-0.16.1, and their writers.

    DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 \\
        tests/support/foreign_checkpoints.py tests/snapshots/deepspeed-0.19.5 deepspeed
    torchrun --standalone --nproc-per-node 2 \\
        tests/support/foreign_checkpoints.py tests/snapshots/megatron-core-0.16.1 megatron

were run with these libraries themselves next to torch 2.13, on the CPU. Of DeepSpeed there is a
folder `zero<stage>` for each stage, as `save_checkpoint` leaves it after `SAVED_STEPS` steps; what
`ds_to_universal` makes of stages 1 and 3; and `later.pt` with the losses of the next steps under
DeepSpeed and its weights after them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SAVED_STEPS, LATER_STEPS = 3, 2
WORLD, BATCH = 2, 4
ADAMW = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8}
DECAYS = (0.1, 0.0)  # of the two groups


class Net(nn.Module):
    """Tied embeddings, a frozen layer, a buffer, odd sizes, two groups of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.fixed = nn.Linear(9, 5, bias=False).requires_grad_(False)
        self.down = nn.Linear(5, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 1.5))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.up(self.embed(tokens))).tanh()
        x = self.down(self.fixed(x)) * self.scale.sum()
        return nn.functional.cross_entropy(self.head(x), labels)


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return matrices, which decay, and vectors, which do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": DECAYS[0]},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": DECAYS[1]},
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), **ADAMW)  # type: ignore[arg-type]


def batch(step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
    """Return a rank's share of a step's data."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 13, (WORLD * BATCH,), generator=generator)
    labels = torch.randint(0, 13, (WORLD * BATCH,), generator=generator)
    return tokens.chunk(world)[rank], labels.chunk(world)[rank]


def later_steps() -> range:
    """Return the steps after the save."""
    return range(SAVED_STEPS, SAVED_STEPS + LATER_STEPS)


# -- written with DeepSpeed ------------------------------------------------------------------------
def write(folder: Path, stage: int, **config: Any) -> None:
    import deepspeed

    model = build()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups(model),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
            **config,
        },
    )
    rank = dist.get_rank()

    def step(number: int) -> Tensor:
        loss = engine(*batch(number, rank, WORLD))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        return mean / WORLD

    for number in range(SAVED_STEPS):
        step(number)
    engine.save_checkpoint(str(folder), client_state={"epoch": 7})
    losses = [step(number) for number in later_steps()]
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if rank == 0:
        (folder / "zero_to_fp32.py").unlink()  # a copy of DeepSpeed's own script
        torch.save({"losses": torch.stack(losses), "state": state}, folder / "later.pt")
    dist.barrier()


def convert(folder: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    tag = (folder / "latest").read_text()
    target = folder.with_name(folder.name.replace("zero", "universal"))
    ds_to_universal.main(
        SimpleNamespace(
            input_folder=str(folder / tag), output_folder=str(target / f"{tag}_universal"),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
            inject_missing_state=True,
        )
    )  # fmt: skip


# -- written with Megatron -------------------------------------------------------------------------
class Layers(nn.Module):
    """What Megatron cuts and stacks: layers, a matrix that is cut by columns, a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 8, bias=False) for _ in range(2))
        self.out = nn.Linear(10, 6)


def in_megatron(name: str) -> str | tuple[str, int]:
    """Return what Megatron calls a parameter of `Layers`; layers are slices of one tensor."""
    if name.startswith("layers."):
        return "decoder.layers.mlp.linear_fc1.weight", int(name.split(".")[1])
    return {"out.weight": "output_layer.weight", "out.bias": "decoder.final_layernorm.bias"}[name]


def layers_state(scale: float = 1.0) -> dict[str, Tensor]:
    """Return the values of `Layers` that were saved; states are these times a number."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: param.shape for name, param in Layers().named_parameters()}
    return {name: torch.randn(s, generator=generator) * scale for name, s in shapes.items()}


SCALES = {"": 1.0, "fp32_param": 1.0, "exp_avg": 0.1, "exp_avg_sq": 0.01}


def write_megatron(folder: Path) -> None:
    """Write what a tensor-parallel job of two ranks would, by Megatron's own library."""
    torch.cuda.synchronize = lambda *_: None  # it takes a GPU for granted
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [{"lr": 0.1, "step": 3, "betas": (0.9, 0.95), "params": [0, 1, 2, 3]}]
    saved: dict[str, Any] = {
        "iteration": 3, "args": SimpleNamespace(lr=0.1),
        "optimizer": {"optimizer": {"param_groups": groups}},
    }  # fmt: skip
    for key, scale in SCALES.items():
        front = f"optimizer.state.{key}." if key else ""
        for name, value in layers_state(scale).items():
            found = in_megatron(name)
            if isinstance(found, tuple):
                cut = {"prepend_axis_num": 1}
                places: Any = ((0, found[1], 2), (1, rank, world))
                part, kept = value.chunk(world)[rank], f"{front}{found[0]}"
            else:
                cut, kept, is_cut = {}, f"{front}{found}", value.ndim > 1
                places = ((1, rank, world),) if is_cut else ()
                part = value.chunk(world, 1)[rank] if is_cut else value
                cut = {} if is_cut else {"replica_id": rank}
            part = part.contiguous().clone()
            part = part if key else part.bfloat16()
            saved[f"{key}{name}"] = ShardedTensor.from_rank_offsets(kept, part, *places, **cut)
    target = folder / "iter_0000003"
    target.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(saved, str(target))
    (folder / "latest_checkpointed_iteration.txt").write_text("3")


def write_deepspeed(folder: Path, has_more: bool) -> None:
    import deepspeed

    for op in deepspeed.ops.__compatible_ops__:  # none is compiled: gloo and torch serve
        deepspeed.ops.__compatible_ops__[op] = False
    deepspeed.init_distributed("gloo")
    for stage in (1, 2, 3):
        write(folder / f"zero{stage}", stage)
        if stage != 2 and dist.get_rank() == 0:
            convert(folder / f"zero{stage}")
    if has_more:  # what is tried by hand
        write(folder / "bf16", 1, bf16={"enabled": True})
        write(folder / "bf16-3", 3, bf16={"enabled": True})
        for name, zero in VARIANTS.items():
            write(folder / name, zero["stage"], zero_optimization=zero)


VARIANTS: dict[str, dict[str, Any]] = {
    "elastic": {"stage": 2, "elastic_checkpoint": True},
    "round-robin": {"stage": 2, "round_robin_gradients": True},
    "sub-groups": {"stage": 3, "sub_group_size": 40, "stage3_param_persistence_threshold": 0},
}


if __name__ == "__main__":
    out, which = Path(sys.argv[1]), sys.argv[2]
    if which == "megatron":
        dist.init_process_group("gloo")
        write_megatron(out)
    else:
        write_deepspeed(out, which == "more")
    dist.destroy_process_group()
