"""One rank of TRL's SFTTrainer on a model of transformers, plain or compiled.

    torchrun --nproc-per-node 2 sft_job.py OUT RUN [RUN ...]

A RUN is the JSON of a `Run`. Writes what each has logged to OUT/<name>.json.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from trainer_job import characters
from transformers import GPT2Config, GPT2LMHeadModel

import zerofx
from zerofx.integrations import transformers as ours


class ShardedSFTTrainer(ours.TrainerMixin, trl.SFTTrainer):  # as in docs/from-transformers.md
    pass


@dataclass
class Run:
    """kind: "plain" or "ours". is_packed: TRL packs several rows into one."""

    name: str
    kind: str
    is_packed: bool


def trained(run: Run, out: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 32}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=1, eos_token_id=1))
    texts = [f"the {n} of {m} is a test" for n in ("cat", "dog", "ox", "emu") for m in "abcdefgh"]
    rows = [{"text": text} for text in texts]
    arguments = trl.SFTConfig(
        str(out / run.name), max_steps=10, logging_steps=1, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=1e-2, max_grad_norm=0.5, report_to=[],
        save_strategy="no", use_cpu=True, bf16=False, fp16=False, disable_tqdm=True, seed=1,
        gradient_checkpointing=False, max_length=32, packing=run.is_packed,
        packing_strategy="wrapped",
    )  # fmt: skip
    more: dict[str, Any] = {}
    cls: Any = trl.SFTTrainer
    if run.kind == "ours":
        cls, more = ShardedSFTTrainer, {
            "plan": zerofx.Plan(stage=3, kernels="aten", differentiate="all")
        }  # fmt: skip
    trainer = cls(
        model=model, args=arguments, processing_class=characters(),
        train_dataset=datasets.Dataset.from_list(rows), **more,
    )  # fmt: skip
    trainer.train()
    logged = [
        {name: entry[name] for name in ("step", "loss", "grad_norm")}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {"logged": logged, "weights": {name: value.tolist() for name, value in state.items()}}


def main(out: Path, runs: list[Run]) -> None:
    for run in runs:
        found = trained(run, out)
        if int(os.environ["RANK"]) == 0:
            (out / f"{run.name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Run(**json.loads(text)) for text in sys.argv[2:]])
