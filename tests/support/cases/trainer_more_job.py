"""One rank of Trainers with an adapter of PEFT, and of Trainers that generate.

    torchrun --nproc-per-node 2 trainer_more_job.py OUT RUN [RUN ...]

A RUN is the JSON of a `Run`. Writes what each has logged to OUT/<name>.json.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from trainer_job import KEPT, Tokens, gpt

import zerofx
from zerofx.integrations import transformers as ours

ATEN = {"kernels": "aten"}
PROMPT = torch.arange(3, 11).view(1, 8)


@dataclass
class Run:
    """kind: "plain" is DDP, "given" a compiled model, "ours" our Trainer. model: lora or t5."""

    name: str
    kind: str
    model: str


def lora(base: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True
    )
    return peft.get_peft_model(base, config)


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, pad_token_id=0,
        eos_token_id=5, decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)  # far from uniform logits, so that some sequences end early
    model.generation_config.max_new_tokens = 12
    return model


def generated(predictions: Any) -> dict[str, float]:
    tokens = np.where(predictions.predictions > 0, predictions.predictions, 0)
    return {"length": float((tokens > 0).sum()), "sum": float(tokens.sum())}


def trained(run: Run, out: Path) -> dict[str, Any]:
    is_t5 = run.model == "t5"
    model = t5() if is_t5 else lora(gpt())
    if run.kind == "given":
        zerofx.compile(model, ATEN)
    library: Any = ours if run.kind == "ours" else transformers
    prefix = "Seq2Seq" if is_t5 else ""
    options: dict[str, Any] = {"predict_with_generate": True} if is_t5 else {}
    arguments = getattr(library, f"{prefix}TrainingArguments")(
        output_dir=str(out / run.name), max_steps=4, per_device_train_batch_size=4,
        learning_rate=1e-2, logging_steps=1, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        save_only_model=run.kind == "given", per_device_eval_batch_size=2, report_to="none",
        disable_tqdm=True, use_cpu=True, seed=0, **options,
    )  # fmt: skip
    more: dict[str, Any] = {"plan": ATEN} if run.kind == "ours" else {}
    trainer = getattr(library, f"{prefix}Trainer")(
        model, arguments, train_dataset=Tokens(64), eval_dataset=Tokens(10),
        compute_metrics=generated if is_t5 else None, **more,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # plainly rank 0 saves alone
    kept = (*KEPT, "eval_length", "eval_sum")
    found = {
        "logged": [
            {"step": entry["step"], **{k: v for k, v in entry.items() if k in kept}}
            for entry in trainer.state.log_history
        ],
        "files": sorted(p.name for p in (out / run.name).iterdir() if p.is_file()),
    }
    mine = model(**inputs(is_t5)).logits.detach()
    if is_t5:
        read: Any = transformers.T5ForConditionalGeneration.from_pretrained(out / run.name)
    else:
        read = peft.PeftModel.from_pretrained(gpt(), out / run.name)
    found["reloaded"] = float((read(**inputs(is_t5)).logits - mine).abs().max())
    return found


def inputs(is_t5: bool) -> dict[str, Any]:
    return {"input_ids": PROMPT, **({"labels": PROMPT} if is_t5 else {})}


def main(out: Path, runs: list[Run]) -> None:
    for run in runs:
        found = trained(run, out)
        if int(os.environ["RANK"]) == 0:
            (out / f"{run.name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Run(**json.loads(text)) for text in sys.argv[2:]])
