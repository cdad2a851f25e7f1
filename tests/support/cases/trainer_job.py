"""One rank of a transformers.Trainer that trains and evaluates, as any script would write it.

    torchrun --nproc-per-node 2 trainer_job.py plain|compiled OUT

Writes what the Trainer logged, and what save_pretrained wrote, to OUT/plain.json or compiled.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import zerofx


class Tokens(Dataset[dict[str, Any]]):
    """Random tokens, and a column that the model does not take."""

    def __init__(self, num_rows: int) -> None:
        self._rows = torch.randint(64, (num_rows, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._rows[index], "labels": self._rows[index], "unused": "text"}


def main(kind: str, out: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if kind == "compiled":
        zerofx.compile(model, zerofx.Plan(stage=3, kernels="aten"))
    arguments = TrainingArguments(
        output_dir=str(out / kind), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3,
        gradient_accumulation_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=2,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Tokens(64), eval_dataset=Tokens(16))
    trainer.train()
    state, is_first = model.state_dict(), trainer.is_world_process_zero()
    folder = out / kind / "saved"
    model.save_pretrained(folder, is_main_process=is_first)
    if is_first:
        logged = [
            {k: round(v, 5) for k, v in entry.items() if k in ("loss", "eval_loss", "grad_norm")}
            for entry in trainer.state.log_history
        ]
        read = AutoModelForCausalLM.from_pretrained(folder)
        found = {
            "logged": logged,
            "labels": trainer.label_names,
            "architectures": read.config.architectures,
            "same": all(torch.equal(state[k], v) for k, v in read.state_dict().items()),
            "ranks": int(os.environ["WORLD_SIZE"]),
        }
        (out / f"{kind}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
