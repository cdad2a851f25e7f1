"""One rank of engine scripts, as any script for DeepSpeed would write them, and of a plain loop.

    torchrun --nproc-per-node 2 engine_job.py OUT RUN [RUN ...]

A RUN is the JSON of a `Run`. Writes what each has logged to OUT/<name>.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trainer_job import GLOBAL_BATCH, Tokens, gpt

UPDATES, SAVED, MICRO, LR, WARMUP = 20, 10, 4, 1e-2, 4
ROWS = GLOBAL_BATCH // MICRO  # of all ranks, in one micro-batch


@dataclass
class Run:
    """kind: "plain" is DDP without an engine, "theirs" is DeepSpeed, "ours" its interface here.

    config: replaces sections of the ds_config. Saves after 10 updates if it begins at 0; else it
    goes on from what the run `resume` has saved. double: weights in fp64.
    """

    name: str
    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    resume: str | None = None
    double: bool = False


def config_of(run: Run, world: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS // world,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1,
                       "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": LR, "warmup_num_steps": WARMUP,
                       "warmup_type": "linear", "total_num_steps": UPDATES},
        },
        **run.config,
    }  # fmt: skip


def rate(update: int) -> float:
    """Return the share of the rate at an update: DeepSpeed's first two have none."""
    at = max(0, update - 1)
    return min(at / WARMUP, (UPDATES - at) / (UPDATES - WARMUP))


class Plain:
    """The same updates with DistributedDataParallel, torch's AdamW and LambdaLR."""

    def __init__(self, double: bool) -> None:
        self._model = nn.parallel.DistributedDataParallel(gpt().double() if double else gpt())
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, rate)

    def update(self, micro_batches: list[Tensor]) -> tuple[list[Tensor], float, float]:
        losses = []
        for number, ids in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            with contextlib.nullcontext() if is_last else self._model.no_sync():
                loss = self._model(input_ids=ids, labels=ids).loss
                (loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), 0.5)
        lr = self._optimizer.param_groups[0]["lr"]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        return losses, float(norm), lr

    def evaluate(self, ids: Tensor) -> Tensor:
        self._model.eval()
        loss = self._model.module(input_ids=ids, labels=ids).loss
        self._model.train()
        return loss

    def weights(self) -> dict[str, Tensor]:
        return dict(self._model.module.state_dict())


class Engine:
    """A script for DeepSpeed."""

    def __init__(self, run: Run, out: Path) -> None:
        is_ours = run.kind == "ours"
        if is_ours:
            from zerofx.integrations import deepspeed
        else:
            os.environ["DS_ACCELERATOR"] = "cpu"
            import deepspeed  # type: ignore[no-redef]

            for op in deepspeed.ops.__compatible_ops__:  # none is compiled: gloo and torch serve
                deepspeed.ops.__compatible_ops__[op] = False
        model = gpt()
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(),
            config=config_of(run, dist.get_world_size()),
            **({"plan": {"kernels": "aten"}} if is_ours else {}),
        )  # fmt: skip
        self._is_ours = is_ours
        if run.resume is not None:
            _, client = self._engine.load_checkpoint(str(out / run.resume))
            assert client["update"] == self._engine.global_steps == SAVED

    def update(self, micro_batches: list[Tensor]) -> tuple[list[Tensor], float, float]:
        losses = []
        lr = self._engine.get_lr()[0]
        for ids in micro_batches:
            loss = self._engine(input_ids=ids, labels=ids).loss
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.detach())
        assert self._engine.was_step_applied()
        return losses, float(self._engine.get_global_grad_norm()), lr

    def evaluate(self, ids: Tensor) -> Tensor:
        self._engine.eval()
        loss = self._engine(input_ids=ids, labels=ids).loss
        self._engine.train()
        return loss

    def save(self, path: Path) -> None:
        self._engine.save_checkpoint(str(path), client_state={"update": SAVED})

    def counts(self) -> list[int]:
        own = self._engine
        return [own.global_steps, own.micro_steps, own.skipped_steps, own.global_samples]

    def weights(self) -> dict[str, Tensor]:
        if self._is_ours:
            return dict(self._engine.module.state_dict())
        return {}


def batches(first: int) -> Iterator[list[Tensor]]:
    """Yield this rank's rows of the micro-batches of each update from `first` on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = torch.stack([row["input_ids"] for row in Tokens(ROWS * MICRO * UPDATES)])
    for update in rows.split(ROWS * MICRO)[first:]:
        yield [micro.chunk(world)[rank] for micro in update.split(ROWS)]


def mean(values: list[Tensor]) -> float:
    """Return the mean over ranks, in fp64."""
    found = torch.stack([v.double() for v in values]).mean()
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def trained(run: Run, out: Path) -> dict[str, Any]:
    subject: Any = Plain(run.double) if run.kind == "plain" else Engine(run, out)
    held_out = torch.stack([row["input_ids"] for row in Tokens(32)])
    own = held_out.chunk(dist.get_world_size())[dist.get_rank()]
    logged = []
    first = SAVED if run.resume is not None else 0
    for step, micro_batches in enumerate(batches(first), start=first + 1):
        losses, norm, lr = subject.update(micro_batches)
        logged.append({"step": step, "loss": mean(losses), "grad_norm": norm, "lr": lr})
        if step % 5 == 0:
            with torch.no_grad():
                logged[-1]["eval_loss"] = mean([subject.evaluate(part) for part in own.split(4)])
        if step == SAVED and run.resume is None and run.kind != "plain":
            subject.save(out / run.name)
    weights = {name: value.tolist() for name, value in subject.weights().items()}
    found = {"logged": logged, "weights": weights}
    return found if run.kind == "plain" else {**found, "counts": subject.counts()}


def main(out: Path, runs: list[Run]) -> None:
    dist.init_process_group("gloo")
    for run in runs:
        found = trained(run, out)
        if dist.get_rank() == 0:
            (out / f"{run.name}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Run(**json.loads(text)) for text in sys.argv[2:]])
