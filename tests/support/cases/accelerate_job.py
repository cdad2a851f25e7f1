"""One rank of accelerate loops, as any script would write them.

    torchrun --nproc-per-node 2 accelerate_job.py OUT RUN [RUN ...]

A RUN is the JSON of a `Run`. Writes what each has logged to OUT/<name>.json.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader
from trainer_job import GLOBAL_BATCH, Tokens, gpt

import zerofx
from zerofx.errors import ShardError
from zerofx.integrations import accelerate


@dataclass
class Run:
    """kind: "plain" is DDP, "given" a compiled model, "ours" the integration's prepare.

    steps: from and to. Saves at 10 if it begins at 0; else goes on from the run `resume`.
    """

    name: str
    kind: str
    plan: dict[str, Any] = field(default_factory=dict)
    precision: str = "no"
    double: bool = False
    resume: str | None = None


def trained(run: Run, out: Path) -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=4, mixed_precision=run.precision
    )
    model, plan = gpt(), {"kernels": "aten", **run.plan}
    if run.double:
        model = model.double()
    if run.kind == "given":
        model = zerofx.compile(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    size = GLOBAL_BATCH // 4 // accelerator.num_processes
    loader = DataLoader(Tokens(640), batch_size=size)
    if run.kind == "ours":
        model, optimizer, loader = accelerate.prepare(
            accelerator, model, optimizer, loader, plan=plan
        )
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(schedule)
    step, logged = 0, []
    if run.resume is not None:
        accelerator.load_state(str(out / run.resume / "state"))
        step = 10
    batches = accelerator.skip_first_batches(loader, 4 * step)
    for number, batch in enumerate(batches):
        with accelerator.accumulate(model):
            ids = batch["input_ids"]  # as labels: batches of all sizes then weigh a token alike
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if (number + 1) % 4 == 0:
            schedule.step()
            step += 1
            mean = accelerator.gather(loss.detach()).mean()
            logged.append({"step": step, "loss": float(mean), "grad_norm": float(norm)})
            if step % 5 == 0:
                logged[-1]["eval_loss"] = evaluated(accelerator, model)
        if step == 10 and run.resume is None and run.kind != "given" and (number + 1) % 4 == 0:
            accelerator.save_state(str(out / run.name / "state"))
    if run.kind == "given":
        with pytest.raises(ShardError, match="save_state writes optimizers on rank 0 only"):
            accelerator.save_state(str(out / run.name / "state"))
        assert not [*(out / run.name / "state").iterdir()]
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, str(out / run.name))
    accelerator.free_memory()
    AcceleratorState._reset_state()  # the next run may have another precision
    return {"logged": logged, "weights": {name: value.tolist() for name, value in state.items()}}


@torch.no_grad()
def evaluated(accelerator: Accelerator, model: Any) -> float:
    """Return the mean loss over 32 rows, which the ranks share."""
    loader = accelerator.prepare(DataLoader(Tokens(32), batch_size=4))
    model.eval()
    losses = []
    for batch in loader:
        ids = batch["input_ids"]
        losses.append(accelerator.gather_for_metrics(model(input_ids=ids, labels=ids).loss[None]))
    model.train()
    return float(torch.cat(losses).double().mean())


def main(out: Path, runs: list[Run]) -> None:
    for run in runs:
        found = trained(run, out)
        if int(os.environ["RANK"]) == 0:
            (out / f"{run.name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Run(**json.loads(text)) for text in sys.argv[2:]])
