"""Live numbers of a compiled model in the log of transformers' Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import zerofx


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
