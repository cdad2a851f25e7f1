"""transformers' Trainer over zerofx beside the Trainer with DistributedDataParallel, on 2 ranks.

Three forms of it: a compiled model in the unmodified Trainer ("given"), the Trainer of
zerofx.integrations.transformers ("ours"), and plain transformers ("plain").
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from jobs import check_equal, error_of, launched, numbers

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SAVES = {"save_strategy": "steps", "save_steps": 5, "load_best_model_at_end": True}


@pytest.mark.slow
def test_trainers_train_as_with_distributed_data_parallel(tmp_path: Path) -> None:
    found = launched("trainer_job.py", 2, tmp_path, [
        {"name": "plain", "kind": "plain", "arguments": SAVES},
        {"name": "given", "kind": "given", "arguments": {**SAVES, "save_only_model": True}},
        {"name": "three", "kind": "ours", "arguments": SAVES},
        {"name": "one", "kind": "ours", "arguments": SAVES, "plan": {"stage": 1}, "before": True},
        {"name": "recompute", "kind": "ours",
         "arguments": {**SAVES, "gradient_checkpointing": True}},
    ])  # fmt: skip
    plain = found.pop("plain")
    assert len(numbers(plain, "loss")) == 20 and len(numbers(plain, "eval_loss")) == 4
    for name, each in found.items():
        check_equal(each, plain)
        assert each["labels"] == ["labels"] and each["same"], name
        assert each["architectures"] == ["GPT2LMHeadModel"]
        assert Path(each["best"]).name == Path(plain["best"]).name
    # The global batch is kept; evaluation of plain transformers differs with the number of ranks.
    alone = launched("trainer_job.py", 1, tmp_path, [
        {"name": "plain1", "kind": "plain", "resume": "plain"},
        {"name": "three-two", "kind": "ours", "plan": {"stage": 2}, "resume": "three"},
        {"name": "plain-three", "kind": "ours", "resume": "plain"},
        {"name": "alone", "kind": "ours", "arguments": SAVES},
    ])  # fmt: skip
    reference = alone.pop("plain1")
    for key, value in numbers(plain, "loss", "grad_norm").items():
        assert numbers(reference)[key] == pytest.approx(value, rel=1e-6), key
    for name in ("three-two", "plain-three"):
        late = {"logged": [e for e in alone[name]["logged"] if e["step"] > 10]}
        check_equal({**alone[name], **late}, reference, first=10)
    runs = [{"name": "alone-three", "kind": "ours", "resume": "alone"}]
    again = launched("trainer_job.py", 2, tmp_path, runs)["alone-three"]
    late = {"logged": [e for e in again["logged"] if e["step"] > 10]}
    check_equal({**again, **late}, plain, first=10)


@pytest.mark.slow
def test_rows_batched_by_length_train_alike_with_few_programs(tmp_path: Path) -> None:
    """Lengths of 6 to 16 tokens: transformers batches similar ones, and pads to multiples of 4."""
    varied = {"is_varied": True, "arguments": {"train_sampling_strategy": "group_by_length"}}
    found = launched("trainer_job.py", 2, tmp_path, [
        {"name": "plain", "kind": "plain", **varied},
        {"name": "given", "kind": "given", **varied},
        {"name": "ours", "kind": "ours", **varied},
    ])  # fmt: skip
    for name in ("given", "ours"):
        check_equal(found[name], found["plain"])
        assert 1 <= found[name]["programs"] <= 4


@pytest.mark.slow
def test_bf16_is_as_exact_as_that_of_the_library(tmp_path: Path) -> None:
    """Errors beside fp64 over two seeds, and a count of tokens that 8 bits cannot hold."""
    runs = []
    for seed in (1, 2):
        half = {"seed": seed, "eval_steps": 2, "bf16": True}
        exact = {"seed": seed, "eval_steps": 2}
        runs += [
            {"name": f"exact{seed}", "kind": "plain", "double": True, "arguments": exact},
            {"name": f"plain{seed}", "kind": "plain", "arguments": half},
            {"name": f"ours{seed}", "kind": "ours", "arguments": half},
        ]
    found = launched("trainer_job.py", 2, tmp_path, runs)
    for kind in ("loss", "eval_loss", "grad_norm"):
        mine, theirs = (
            math.hypot(*(error_of(found[f"{name}{s}"], found[f"exact{s}"], kind) for s in (1, 2)))
            for name in ("ours", "plain")
        )
        assert 0 < mine < 1.5 * theirs, kind


@pytest.mark.slow
def test_accelerate_loops_train_as_with_distributed_data_parallel(tmp_path: Path) -> None:
    found = launched("accelerate_job.py", 2, tmp_path, [
        {"name": "plain", "kind": "plain"},
        {"name": "given", "kind": "given"},
        {"name": "three", "kind": "ours"},
        {"name": "one", "kind": "ours", "plan": {"stage": 1}},
    ])  # fmt: skip
    plain = found.pop("plain")
    for each in found.values():
        check_equal(each, plain)
    alone = launched("accelerate_job.py", 1, tmp_path, [
        {"name": "three-two", "kind": "ours", "plan": {"stage": 2}, "resume": "three"},
        {"name": "plain-three", "kind": "ours", "resume": "plain"},
    ])  # fmt: skip
    for each in alone.values():
        check_equal(each, plain, first=10)
    found = launched("accelerate_job.py", 2, tmp_path, [
        {"name": "exact", "kind": "plain", "double": True},
        {"name": "half", "kind": "plain", "precision": "bf16"},
        {"name": "ours", "kind": "ours", "precision": "bf16"},
    ])  # fmt: skip
    for kind in ("loss", "eval_loss", "grad_norm"):
        mine, theirs = (error_of(found[n], found["exact"], kind) for n in ("ours", "half"))
        assert 0 < mine < 1.5 * theirs, kind


@pytest.mark.slow
def test_adapters_and_generation_in_trainers(tmp_path: Path) -> None:
    """LoRA by PEFT, with best checkpoints and reload; generation that ends at different steps."""
    pytest.importorskip("peft")
    forms = ("plain", "given", "ours")
    runs = [{"name": f"{model}-{form}", "kind": form, "model": model} for form in forms
            for model in ("lora", "t5")]  # fmt: skip
    found = launched("trainer_more_job.py", 2, tmp_path, runs)
    for model in ("lora", "t5"):
        plain = found[f"{model}-plain"]
        for form in ("given", "ours"):
            each = found[f"{model}-{form}"]
            assert numbers(each) == pytest.approx(numbers(plain), rel=1e-5)
            assert each["files"] == plain["files"] and each["reloaded"] < 1e-6
