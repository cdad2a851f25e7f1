"""transformers' Trainer, unmodified: it trains and evaluates a compiled model on 2 ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import zerofx

ROOT = Path(__file__).parents[2]
JOB = ROOT / "tests" / "support" / "cases" / "trainer_job.py"


def trained(kind: str, out: Path) -> Any:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*launch, str(JOB), kind, str(out)], capture_output=True, text=True, timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads((out / f"{kind}.json").read_text())


@pytest.mark.slow
def test_trainer_trains_as_with_distributed_data_parallel(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    plain, compiled = trained("plain", tmp_path), trained("compiled", tmp_path)
    assert sum("loss" in entry for entry in plain["logged"]) == 4
    assert sum("eval_loss" in entry for entry in plain["logged"]) == 2
    for mine, theirs in zip(compiled.pop("logged"), plain.pop("logged"), strict=True):
        assert mine == pytest.approx(theirs, abs=2e-5)
    assert compiled == plain
    assert plain["same"] and plain["ranks"] == 2 and plain["labels"] == ["labels"]


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        row = torch.arange(8) + index
        return {"input_ids": row, "labels": row}


def test_the_trainer_logs_the_meters_numbers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    import transformers

    from zerofx.integrations.trainer_meter import TrainerMeter

    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=8, vocab_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers and accelerate ask torch for old names
        model = zerofx.compile(transformers.GPT2LMHeadModel(config), {"kernels": "aten"})
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, logging_steps=2, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, include_num_input_tokens_seen=True, report_to="none",
            save_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=Rows())
        trainer.add_callback(TrainerMeter(trainer))
        trainer.train()
    history = trainer.state.log_history
    found = [each for each in history if "zerofx/tokens_per_s" in each]
    assert [each["step"] for each in found] == [2, 4] and sum("loss" in e for e in history) == 2
    for each in found:
        assert each["zerofx/samples_per_s"] * each["zerofx/seconds"] == pytest.approx(8)
        assert each["zerofx/tokens_per_s"] * each["zerofx/seconds"] == pytest.approx(64)
    assert model._engine.tally is None
