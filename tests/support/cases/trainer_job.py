"""One rank of transformers.Trainers that train and evaluate, as any script would write them.

    torchrun --nproc-per-node 2 trainer_job.py OUT RUN [RUN ...]

A RUN is the JSON of a `Run`. Writes what each has logged to OUT/<name>.json.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

import zerofx
from zerofx.integrations import transformers as ours

GLOBAL_BATCH = 32
KEPT = ("loss", "eval_loss", "grad_norm", "learning_rate")


@dataclass
class Run:
    """name: of its folder. kind: "plain" is DDP, "given" a compiled model, "ours" our Trainer.

    resume: the folder of another run, whose checkpoint at `save_steps` it goes on from.
    """

    name: str
    kind: str
    plan: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    resume: str | None = None
    is_best: bool = False
    before: bool = False  # evaluate before training
    double: bool = False  # weights in fp64
    is_varied: bool = False  # rows of 6 to 16 tokens, batched by length and padded to 4, 8, ...


class Tokens(Dataset[dict[str, Any]]):
    """Random tokens, masked labels, different in number, and a column that no model takes.

    is_cut: rows end where their labels do.
    """

    def __init__(self, num_rows: int, is_cut: bool = False) -> None:
        self._is_cut = is_cut
        generator = torch.Generator().manual_seed(1)
        self._rows = torch.randint(3, 64, (num_rows, 16), generator=generator)
        self._ends = torch.randint(6, 16, (num_rows,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._is_cut:
            row = self._rows[index][: self._ends[index]]
            return {"input_ids": row, "labels": row.clone()}
        labels = self._rows[index].clone()
        labels[self._ends[index] :] = -100
        return {"input_ids": self._rows[index], "labels": labels, "unused": "text"}


def gpt() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=1,
        eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def characters() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters."""
    text = "abcdefghijklmnopqrstuvwxyz "
    table = {c: i for i, c in enumerate(["<pad>", "<end>", "?", *text])}
    made = Tokenizer(models.WordLevel(table, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")


def arguments_of(run: Run, out: Path) -> dict[str, Any]:
    """Return arguments with one global batch at any number of ranks."""
    world = int(os.environ["WORLD_SIZE"])
    return {
        "output_dir": str(out / run.name), "max_steps": 20, "learning_rate": 1e-2,
        "per_device_train_batch_size": GLOBAL_BATCH // 4 // world,
        "gradient_accumulation_steps": 4, "logging_steps": 1, "eval_strategy": "steps",
        "eval_steps": 5, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "seed": 0, "max_grad_norm": 0.5, **run.arguments,
    }  # fmt: skip


def trained(run: Run, out: Path) -> dict[str, Any]:
    model: Any = gpt().double() if run.double else gpt()
    plan = {"kernels": "aten", **run.plan}
    theirs: Any = transformers
    mine: Any = ours
    library: Any = mine if run.kind == "ours" else theirs
    extra: dict[str, Any] = {"plan": plan} if run.kind == "ours" else {}
    if run.kind == "given":
        zerofx.compile(model, plan)
    arguments = library.TrainingArguments(**arguments_of(run, out))
    data, held_out = Tokens(1024, run.is_varied), Tokens(64, run.is_varied)
    if run.is_varied:
        extra["data_collator"] = transformers.DataCollatorForSeq2Seq(
            characters(), pad_to_multiple_of=4
        )
    trainer = library.Trainer(model, arguments, train_dataset=data, eval_dataset=held_out, **extra)
    found: dict[str, Any] = {"labels": trainer.label_names}
    if run.before:
        found["before"] = trainer.evaluate()["eval_loss"]
    checkpoint = None if run.resume is None else str(out / run.resume / "checkpoint-10")
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    state: dict[str, Tensor] = model.state_dict()
    if trainer.is_world_process_zero():
        found["logged"] = [
            {"step": entry["step"], **{k: v for k, v in entry.items() if k in KEPT}}
            for entry in trainer.state.log_history
        ]
        read = AutoModelForCausalLM.from_pretrained(out / run.name)
        found["architectures"] = read.config.architectures
        found["same"] = all(torch.equal(state[k], v) for k, v in read.state_dict().items())
        found["best"] = trainer.state.best_model_checkpoint
        found["programs"] = len(model.programs) if run.kind != "plain" else 0
        found["weights"] = {name: value.tolist() for name, value in state.items()}
    return found


def main(out: Path, runs: list[Run]) -> None:
    for run in runs:
        found = trained(run, out)
        if int(os.environ["RANK"]) == 0:
            (out / f"{run.name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Run(**json.loads(text)) for text in sys.argv[2:]])
