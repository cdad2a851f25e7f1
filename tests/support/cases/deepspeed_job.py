"""One rank of a script written for DeepSpeed: `deepspeed_job.py WHICH STAGE OUT`.

WHICH is deepspeed (the real one, on CPU) or zerofx. AdamW, clipping, accumulation of 2 and
WarmupDecayLR; 10 updates, a save after 6 of them, and a second engine that goes on from there.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

which, stage, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if which == "deepspeed":
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    for op in deepspeed.ops.__compatible_ops__:  # none is compiled: gloo and torch serve
        deepspeed.ops.__compatible_ops__[op] = False
    extra: dict[str, Any] = {}
else:
    from zerofx.integrations import deepspeed  # type: ignore[no-redef]

    extra = {"plan": {"kernels": "aten"}}

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1,
                   "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 4,
                   "total_num_steps": 20},
    },
}  # fmt: skip
UPDATES, SAVED = 10, 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).tril()
        x = x + self.out(scores.softmax(-1) @ v)
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class TinyGPT(nn.Module):
    def __init__(self, vocabulary: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def begun() -> Any:
    torch.manual_seed(0)
    model = TinyGPT()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG, **extra
    )
    assert engine.train_batch_size() == 4 * 2 * int(os.environ["WORLD_SIZE"])
    return engine


def update(engine: Any, number: int) -> dict[str, Any]:
    losses = []
    for micro in range(engine.gradient_accumulation_steps()):
        seed = (number * 2 + micro) * 100 + engine.global_rank
        ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(seed))
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert engine.was_step_applied()
    norm = engine.get_global_grad_norm()
    return {"losses": losses, "norm": float(norm), "lr": engine.get_lr()[0]}


engine = begun()
found = []
for number in range(UPDATES):
    found.append(update(engine, number))
    if number == SAVED - 1:
        engine.save_checkpoint(f"{out}/{which}{stage}", client_state={"number": number})
again = begun()
path, client = again.load_checkpoint(f"{out}/{which}{stage}")
resumed = [update(again, number) for number in range(client["number"] + 1, UPDATES)]
counts = [again.global_steps, again.micro_steps, again.skipped_steps, again.global_samples]
if engine.global_rank == 0:
    with open(f"{out}/{which}{stage}.json", "w", encoding="utf-8") as file:
        json.dump({"updates": found, "resumed": resumed, "counts": counts}, file)
