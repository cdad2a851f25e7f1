"""ds_config.json: the snippets that people start from, whole key sets of real users, and a fuzz."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerofx.errors import PlanError
from zerofx.plan.ds_config import DsConfig, read_ds_config
from zerofx.plan.ds_keys import (
    ALIASES,
    KEYS,
    OPTIMIZERS,
    SCHEDULERS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
    VERDICTS,
)
from zerofx.plan.plan import Plan

BATCH: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4}


def verdicts(found: DsConfig) -> dict[str, str]:
    return {row.key: row.verdict for row in found.rows}


# -- Snippets: DeepSpeed's own tutorials -----------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        ({}, {"stage": 0}),
        ({"zero_optimization": True}, {"stage": 1}),
        ({"zero_optimization": False}, {"stage": 0}),
        ({"zero_optimization": {"stage": 2}}, {"stage": 2}),
        ({"zero_optimization": {"stage": "3"}}, {"stage": 3}),
        ({"bf16": {"enabled": True}}, {"stage": 0, "precision": "bf16"}),
        ({"bfloat16": {"enabled": True}}, {"stage": 0, "precision": "bf16"}),
        (
            {"bf16": {"enabled": True}, "communication_data_type": "bf16"},
            {"stage": 0, "precision": {"compute": "bf16", "reduce": "bf16"}},
        ),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            {"stage": 0, "precision": {"compute": "bf16", "reduce": "bf16", "master": "bf16"}},
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12,
                      "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2}},
            {"stage": 0, "precision": {
                "compute": "fp16", "reduce": "fp16",
                "loss_scale": {"initial": 4096, "growth_interval": 500, "hysteresis": 3,
                               "minimum": 2}}},
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 128},
             "data_types": {"grad_accum_dtype": "fp32"}},
            {"stage": 0, "precision": {"compute": "fp16", "reduce": "fp32", "loss_scale": 128}},
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_param":
                                   {"device": "cpu"}, "reduce_bucket_size": 2e8}},
            {"stage": 2, "offload": {"optimizer": "cpu"}, "bucket_bytes": 800_000_000},
        ),
        (
            {"zero_optimization": {
                "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/n",
                                                  "ratio": 0.75},
                "offload_param": {"device": "nvme", "nvme_path": "/n"}, "mics_shard_size": 8,
                "stage3_param_persistence_threshold": 1e5, "reduce_bucket_size": 5e8},
             "bf16": {"enabled": True}},
            {"stage": 3, "precision": "bf16", "shard_axis_size": 8, "persist_below": 200_000,
             "bucket_bytes": 100_000_000, "offload": {
                 "optimizer": "nvme", "parameters": "nvme", "path": "/n",
                 "device_fraction": 0.25}},
        ),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            {"stage": 0, "offload": {"activations": "cpu"}},
        ),
    ],
)  # fmt: skip
def test_sections_become_fields_of_the_plan(config: Any, plan: dict[str, Any]) -> None:
    assert Plan.from_ds_config(config) == Plan(**plan)


def test_lamb_of_the_bert_tutorial() -> None:
    params = {"lr": 11e-3, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3,
              "min_coeff": 0.01, "max_grad_norm": 1.0}  # fmt: skip
    found = read_ds_config({"optimizer": {"type": "Lamb", "params": params}})
    assert found.optimizer is not None and found.optimizer.kind == "Lamb"
    assert found.gradient_clipping == params.pop("max_grad_norm")
    assert found.optimizer.params == params
    assert verdicts(found)["optimizer.params.max_grad_norm"] == "translated"


@pytest.mark.parametrize(
    ("params", "kind", "made"),
    [
        ({}, "AdamW", {"lr": 1e-3, "weight_decay": 0.0}),
        ({"adam_w_mode": False, "weight_decay": 0.1}, "Adam", {"lr": 1e-3, "weight_decay": 0.1}),
        ({"torch_adam": True}, "AdamW", {"lr": 1e-3}),  # torch's own decay
        (
            {"bias_correction": False, "betas": [0.8, 0.9]},
            "Lamb",
            {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.8, 0.9), "bias_correction": False,
             "min_coeff": 1.0, "max_coeff": 1.0},
        ),
    ],
)  # fmt: skip
def test_adam_decays_as_deepspeeds(params: Any, kind: str, made: dict[str, Any]) -> None:
    found = read_ds_config({"optimizer": {"type": "Adam", "params": params}}).optimizer
    assert found is not None and (found.kind, found.params) == (kind, made)


def test_one_cycle_and_the_default_of_clipping() -> None:
    params = {"cycle_min_lr": 1e-4, "cycle_max_lr": 4e-3, "cycle_first_step_size": 1e3}
    found = read_ds_config({"scheduler": {"type": "OneCycle", "params": params}})
    assert found.scheduler is not None and found.scheduler.params == params
    assert found.gradient_clipping == 1.0 and found.rows[-1].key == "gradient_clipping"
    assert read_ds_config({"gradient_clipping": 0}).gradient_clipping == 0.0


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"curriculum_learning": {"enabled": True}, "amp": {"enabled": True}},
         ["curriculum_learning = ", "amp"]),
        (
            {"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
            ["zero_quantized_nontrainable_weights"],
        ),
        ({"gradient_allreduce_op": "sum"}, ["gradient_allreduce_op = 'sum'", "mean"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["fp16.enabled", "bf16.enabled"]),
        ({"fp16": {"enabled": True, "min_loss_scale": 2**20}}, ["fp16.min_loss_scale"]),
        ({"fp16": {"enabled": "yes"}}, ["fp16.enabled = 'yes'", "true and false"]),
        ({"zero_optimization": {"stage": 4}}, ["zero_optimization.stage = 4"]),
        ({"zero_optimization": [2]}, ["zero_optimization = [2]", "mapping"]),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            ["zero_optimization.offload_param.device", "nvme_path"],
        ),
        ({"optimizer": {"params": {"lr": 1}}}, ["optimizer =", "no type"]),
        ({"optimizer": {"type": "OneBitAdam"}}, ["optimizer.type = 'OneBitAdam'"]),
        ({"optimizer": {"type": "Adam", "params": {"momentum": 1}}}, ["params.momentum = 1"]),
        ({"optimizer": {"type": "Adam", "params": {"lr": "x"}}}, ["optimizer.params.lr = 'x'"]),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, ["total_num_steps"]),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, ["train_batch_size = 10"]),
        ({"train_batch_size": "auto"}, ["train_batch_size = 'auto'", "TrainingArguments"]),
        (
            {"gradient_clipping": 1, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 2}}},
            ["optimizer.params.max_grad_norm = 2", "gradient_clipping = 1"],
        ),
    ],
)  # fmt: skip
def test_refused_keys_are_named(config: Any, names: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_ds_config(config)
    for name in names:
        assert name in str(caught.value)


def test_unknown_keys_warn_with_the_nearest_name() -> None:
    config = {"max_grad_norm": 1, "zero_optimization": {"stage3_param_persitance_threshold": 1e5}}
    with pytest.warns(UserWarning, match="gradient_clipping") as caught:
        Plan.from_ds_config(config)
    assert "stage3_param_persistence_threshold" in str(caught[0].message)


@pytest.mark.parametrize(
    ("given", "world", "sizes"),
    [
        ({"train_batch_size": 32}, 4, (32, 8, 1)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 4, (32, 4, 2)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, 4, (32, 2, 4)),
        ({"train_micro_batch_size_per_gpu": 2}, 4, (8, 2, 1)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 16}, 4, None),
        ({"gradient_accumulation_steps": 2}, 4, None),
    ],
)
def test_batch_sizes_of_a_world(given: Any, world: int, sizes: Any) -> None:
    batch = read_ds_config(given).batch
    if sizes is not None:
        assert batch.on(world) == sizes
    else:
        with pytest.raises(PlanError, match="train_micro_batch_size_per_gpu"):
            batch.on(world)


# -- "auto" ----------------------------------------------------------------------------------------

AUTO: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "overlap_comm": "auto",
    },
    "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {
        "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
        "total_num_steps": "auto"}},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "world_size": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8,
    "max_grad_norm": 0.5, "learning_rate": 3e-5, "adam_beta1": 0.9, "adam_beta2": 0.95,
    "adam_epsilon": 1e-7, "weight_decay": 0.1, "fp16": False, "bf16": True, "warmup_steps": 5,
    "max_steps": 100,
}  # fmt: skip


@pytest.mark.parametrize("auto", [ARGUMENTS, SimpleNamespace(**ARGUMENTS)])
def test_auto_is_filled_as_by_transformers(auto: Any) -> None:
    found = read_ds_config(AUTO, auto=auto, hidden_size=64)
    sizes = {"bucket_bytes": int(0.9 * 64**2) * 2, "persist_below": 640 * 2}
    assert found.plan == Plan(stage=3, precision="bf16", **sizes)
    assert found.batch.on(2) == (64, 4, 8) and found.gradient_clipping == 0.5
    assert found.optimizer is not None and found.scheduler is not None
    assert found.optimizer.params == {
        "lr": 3e-5, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1}  # fmt: skip
    assert found.scheduler.params == {
        "warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 5, "total_num_steps": 100,
    }  # fmt: skip


def test_auto_without_arguments() -> None:
    with pytest.raises(PlanError) as caught:
        read_ds_config(AUTO)
    for key in ("train_batch_size", "bf16.enabled", "optimizer.params.lr", "total_num_steps"):
        assert key in str(caught.value)
    assert "bucket_size" not in str(caught.value)
    sizes = {"zero_optimization": AUTO["zero_optimization"]}
    assert read_ds_config(sizes).plan == Plan(stage=3)  # the hardware's own


def test_values_beside_auto_must_be_those_of_the_arguments() -> None:
    config = {**AUTO, "gradient_clipping": 1.0}
    with pytest.raises(PlanError, match=r"gradient_clipping = 1\.0: contradicts max_grad_norm"):
        read_ds_config(config, auto=ARGUMENTS)
    by_key = {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}
    found = read_ds_config(by_key, auto={"optimizer.params.lr": 0.5}).optimizer
    assert found is not None and found.params == {"lr": 0.5}


def test_auto_from_transformers_itself(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        str(tmp_path), bf16=True, use_cpu=True, learning_rate=3e-5, max_steps=100, warmup_steps=5
    )
    found = read_ds_config(AUTO, auto=arguments, hidden_size=64)
    assert found.plan.precision.compute == "bf16" and found.scheduler is not None
    assert found.scheduler.params["warmup_num_steps"] == 5


# -- What real users have: key sets of public repositories, with numbers as they are there ---------

_ADAM_AUTO = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
_PLAIN2 = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8,
           "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8,
           "contiguous_gradients": True}  # fmt: skip
_SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
          "min_loss_scale": 1}  # fmt: skip
USERS: dict[str, tuple[dict[str, Any], dict[str, Any] | str]] = {
    "aqlaboratory/openfold": (
        {"fp16": {"enabled": False, "min_loss_scale": 1},
         "amp": {"enabled": False, "opt_level": "O2"}, "bfloat16": {"enabled": True},
         "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"},
                               "contiguous_gradients": True},
         "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False,
                                      "profile": False},
         "gradient_clipping": 0.1, "zero_force_ds_cpu_optimizer": False},
        {"stage": 2, "precision": "bf16", "offload": {"optimizer": "cpu"}},
    ),
    "CarperAI/trlx": (
        {"gradient_clipping": 1.0, "gradient_accumulation_steps": 1, "train_batch_size": "auto",
         "train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": False},
         "bf16": {"enabled": False},
         "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"},
                               "offload_optimizer": {"device": "cpu"},
                               "allgather_partitions": True, "allgather_bucket_size": 5e8,
                               "contiguous_gradients": True}},
        {"stage": 2, "offload": {"optimizer": "cpu"}},
    ),
    "CSCfi/pytorch-ddp-examples": (
        {"train_batch_size": 400, "steps_per_print": 2000,
         "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8,
                                                  "weight_decay": 3e-7}},
         "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001,
                                                      "warmup_num_steps": 1000}},
         "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False},
        {"stage": 0},
    ),
    "catid/cifar10deepspeed": (
        {"_read_the_docs": "https://...", "train_micro_batch_size_per_gpu": 256,
         "gradient_accumulation_steps": 1, "gradient_clipping": 5.0, "prescale_gradients": False,
         "steps_per_print": 100, "wall_clock_breakdown": False,
         "comms_logger": {"enabled": True, "verbose": False, "prof_all": False, "debug": False},
         "tensorboard": {"enabled": False, "output_path": "logs", "job_name": "c"},
         "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.999],
                                                   "eps": 1e-8, "weight_decay": 3e-7}},
         "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 4e-3}},
         "fp16": {"enabled": True, **_SCALE}, "zero_optimization": {**_PLAIN2, "stage": 0},
         "checkpoint": {"use_node_local_storage": True}},
        {"stage": 0, "bucket_bytes": 400_000_000, "precision": {
            "compute": "fp16", "reduce": "fp16",
            "loss_scale": {"growth_interval": 1000, "hysteresis": 2}}},
    ),
    "ExaSearch/Megatron-DeepSpeed": (
        {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1,
         "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0, "prescale_gradients": False,
         "fp16": {"enabled": True, **_SCALE, "initial_scale_power": 12},
         "wall_clock_breakdown": True},
        {"stage": 1, "precision": {"compute": "fp16", "reduce": "fp16", "loss_scale": {
            "initial": 4096, "growth_interval": 1000, "hysteresis": 2}}},
    ),
    "AndreSoble/PerformerDualEncoder": (
        {"train_batch_size": 20000, "train_micro_batch_size_per_gpu": 20,
         "gradient_accumulation_steps": 100, "steps_per_print": 100, "max_grad_norm": 0.5,
         "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.99, 0.999],
                                                  "eps": 1e-8}},
         "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01,
                                                      "warmup_num_steps": 100}},
         "wall_clock_breakdown": False},
        {"stage": 0},
    ),
    "FSoft-AI4Code/RepoHyper": (
        {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1,
         "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 5e-4}},
         "zero_optimization": {**_PLAIN2, "stage": 3, "offload_optimizer": {
             "device": "cpu", "pin_memory": True}},
         "gradient_accumulation_steps": 1, "steps_per_print": 1e5},
        {"stage": 3, "offload": {"optimizer": "cpu"}, "bucket_bytes": 200_000_000},
    ),
    "allenai/feb": (
        {"zero_optimization": {**_PLAIN2, "offload_optimizer": {"device": "cpu",
                                                                "pin_memory": True}},
         "train_micro_batch_size_per_gpu": 1,
         "optimizer": {"type": "Adam", "params": {"adam_w_mode": True, "lr": 3e-5}},
         "scheduler": {"type": "WarmupLR", "params": {
             "warmup_min_lr": 3e-5, "warmup_max_lr": 3e-5, "warmup_num_steps": 0}}},
        {"stage": 2, "offload": {"optimizer": "cpu"}, "bucket_bytes": 800_000_000},
    ),
    "cofe-ai/fast-gector": (
        {"train_batch_size": 256, "gradient_accumulation_steps": 2,
         "optimizer": {"type": "Adam", "params": {"lr": 1e-5}, "eps": 1e-8, "weight_decay": 1e-2},
         "gradient_clipping": 1.0, "fp16": {"enabled": False},
         "amp": {"enabled": True, "opt_level": "O1", "loss_scale": "dynamic"}},
        "amp",
    ),
    "Entropy-xcy/bitnet158": (
        {"fp16": {"enabled": True, "loss_scale": 1.0},
         "optimizer": {"type": "Adam", "params": {"lr": "auto", "weight_decay": "auto"}},
         "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
         "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": "auto"},
        {"stage": 2, "offload": {"optimizer": "cpu"},
         "precision": {"compute": "fp16", "reduce": "fp16", "loss_scale": 1.0}},
    ),
    "wenet-e2e/wesr": (
        {"fp16": {"enabled": "auto", **_SCALE}, "bf16": {"enabled": "auto"},
         "optimizer": {"type": "AdamW", "params": _ADAM_AUTO},
         "scheduler": {"type": "WarmupLR", "params": {
             "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 2500}},
         "zero_optimization": {
             "stage": 3, "offload_optimizer": {"device": "none", "pin_memory": True},
             "offload_param": {"device": "none", "pin_memory": True}, "overlap_comm": True,
             "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_scatter": True,
             "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
             "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
             "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
         "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
         "steps_per_print": 100, "train_batch_size": "auto",
         "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False},
        {"stage": 3, "precision": "bf16", "bucket_bytes": 7372, "persist_below": 1280},
    ),
    "dwanev/gpt-neo-fine-tuning-example2": (
        {"fp16": {"enabled": "auto", **_SCALE},
         "zero_optimization": {
             "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
             "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True,
             "contiguous_gradients": True, "sub_group_size": 1e14, "reduce_bucket_size": "1",
             "stage3_prefetch_bucket_size": "10", "stage3_param_persistence_threshold": "0",
             "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
             "stage3_gather_fp16_weights_on_model_save": True},
         "optimizer": {"type": "AdamW", "params": _ADAM_AUTO},
         "scheduler": {"type": "WarmupLR", "params": {
             "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
         "gradient_clipping": "auto", "steps_per_print": 2000, "wall_clock_breakdown": False},
        {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}, "bucket_bytes": 4,
         "persist_below": 0},
    ),
    "artidoro/qlora": (
        {"zero_optimization": _PLAIN2, "gradient_accumulation_steps": "auto",
         "gradient_clipping": "auto", "steps_per_print": 2000, "train_batch_size": "auto",
         "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False},
        {"stage": 2, "bucket_bytes": 800_000_000},
    ),
    "DannyMeb/BERT-Parallelism-Efficiency": (
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
         "gradient_accumulation_steps": 2,
         "pipeline": {"pipeline_parallel_size": 4, "schedule": "1F1B", "chunks": 2},
         "zero_optimization": {"stage": 2, "contiguous_gradients": True,
                               "reduce_bucket_size": 50000000,
                               "stage3_prefetch_bucket_size": 5000000,
                               "stage3_param_persistence_threshold": 1000000,
                               "overlap_comm": True},
         "fp16": {"enabled": True}},
        "pipeline",
    ),
    "JiwenJ/Deepspeed_Slurm": (
        {"tensorboard": {"enabled": True, "output_path": "/out", "job_name": "Phi3"},
         "wandb": {"enabled": True, "project": "Phi3"}, "bf16": {"enabled": True},
         "zero_optimization": {
             "stage": 3, "overlap_comm": True, "reduce_scatter": True,
             "reduce_bucket_size": "auto", "contiguous_gradients": True,
             "stage3_gather_16bit_weights_on_model_save": False,
             "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
             "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
             "zero_hpz_partition_size": 8, "offload_optimizer": {"device": "none"},
             "offload_param": {"device": "none"}},
         "gradient_clipping": "auto", "train_batch_size": "auto",
         "train_micro_batch_size_per_gpu": "auto", "steps_per_print": 2000000},
        {"stage": 3, "precision": "bf16", "bucket_bytes": 7372, "persist_below": 1280,
         "secondary_shard_size": 8},
    ),
    "KimGyunYeop/UnitLinearAtt": (
        {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 32,
         "optimizer": {"type": "Adam", "params": {"lr": 0.0001}},
         "scheduler": {"type": "WarmupDecayLR", "params": {
             "warmup_min_lr": 0, "warmup_max_lr": 6e-4, "warmup_num_steps": 24000,
             "total_num_steps": 500000}},
         "gradient_clipping": 5.0,
         "zero_optimization": {**_PLAIN2, "offload_optimizer": {
             "device": "cpu", "pin_memory": True, "fast_init": False}},
         "steps_per_print": 2000, "zero_allow_untested_optimizer": True,
         "wall_clock_breakdown": False},
        {"stage": 2, "offload": {"optimizer": "cpu"}, "bucket_bytes": 800_000_000},
    ),
    "DeepSpeedExamples, bing_bert with Lamb": (
        {"train_batch_size": 65536, "train_micro_batch_size_per_gpu": 64, "steps_per_print": 100,
         "prescale_gradients": False,
         "optimizer": {"type": "Lamb", "params": {
             "lr": 11e-3, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3,
             "min_coeff": 0.01}},
         "gradient_clipping": 1.0, "wall_clock_breakdown": False,
         "fp16": {"enabled": True, "loss_scale": 0},
         "sparse_attention": {"mode": "fixed", "block": 16}},
        {"stage": 0, "precision": {"compute": "fp16", "reduce": "fp16", "loss_scale": {
            "growth_interval": 1000, "hysteresis": 2}}},
    ),
    "DeepSpeedExamples, BingBertSquad": (
        {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 6, "steps_per_print": 10,
         "optimizer": {"type": "Adam", "params": {
             "lr": 3e-5, "max_grad_norm": 1.0, "weight_decay": 0.0, "bias_correction": False}},
         "fp16": {"enabled": True}},
        {"stage": 0, "precision": {"compute": "fp16", "reduce": "fp16", "loss_scale": {
            "growth_interval": 1000, "hysteresis": 2}}},
    ),
    "DeepSpeedExamples, Megatron-LM": (
        {"train_batch_size": 16, "gradient_accumulation_steps": 1, "steps_per_print": 1,
         "zero_optimization": True,
         "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "max_grad_norm": 1.0}},
         "fp16": {"enabled": True, **_SCALE}},
        {"stage": 1, "precision": {"compute": "fp16", "reduce": "fp16", "loss_scale": {
            "growth_interval": 1000, "hysteresis": 2}}},
    ),
    "DeepSpeedExamples, Megatron-LM on NVMe": (
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
         "steps_per_print": 1,
         "zero_optimization": {
             "stage": 3, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e8,
             "stage3_param_persitance_threshold": 1e5, "stage3_prefetch_bucket_size": 5e7,
             "contiguous_gradients": True, "overlap_comm": True, "reduce_bucket_size": 90000000,
             "sub_group_size": 1e8,
             "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4,
                                   "pipeline_read": False, "pipeline_write": False,
                                   "pin_memory": True},
             "offload_param": {"device": "nvme", "nvme_path": "/nvme", "max_in_cpu": 1,
                               "pin_memory": True}},
         "gradient_clipping": 1.0, "fp16": {"enabled": True, **_SCALE, "loss_scale": 1024},
         "wall_clock_breakdown": True, "zero_allow_untested_optimizer": False,
         "aio": {"block_size": 1048576, "queue_depth": 16, "single_submit": False,
                 "overlap_events": True, "thread_count": 2}},
        {"stage": 3, "bucket_bytes": 100_000_000,
         "offload": {"optimizer": "nvme", "parameters": "nvme", "path": "/nvme"},
         "precision": {"compute": "fp16", "reduce": "fp16", "loss_scale": 1024}},
    ),
    "DeepSpeedExamples, ZeroQuant": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 32, "steps_per_print": 200,
         "zero_optimization": {"stage": 0}, "fp16": {"enabled": False}, "gradient_clipping": 1.0,
         "prescale_gradients": True, "wall_clock_breakdown": False,
         "compression_training": {
             "layer_reduction": {"enabled": False, "keep_number_layer": 5},
             "weight_quantization": {"shared_parameters": {"enabled": True}}}},
        "compression_training",
    ),
}  # fmt: skip
UNKNOWN = {
    "catid/cifar10deepspeed": {"_read_the_docs"},
    "AndreSoble/PerformerDualEncoder": {"max_grad_norm"},
    "DeepSpeedExamples, Megatron-LM on NVMe": {
        "zero_optimization.stage3_param_persitance_threshold"
    },
}
# What a user passes to the Trainer beside a config with "auto".
BESIDE: dict[str, dict[str, Any]] = {
    "CarperAI/trlx": {"gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "bf16": False},
    "Entropy-xcy/bitnet158": {"fp16": True, "bf16": False},
    "dwanev/gpt-neo-fine-tuning-example2": {"bf16": False},
    "DannyMeb/BERT-Parallelism-Efficiency": {"gradient_accumulation_steps": 2, "fp16": True},
    "wenet-e2e/wesr": {"warmup_steps": 2500},
}


@pytest.mark.parametrize("name", USERS)
def test_configs_of_users(name: str, tmp_path: Path) -> None:
    config, plan = USERS[name]
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    is_auto = '"auto"' in path.read_text(encoding="utf-8")
    auto = {**ARGUMENTS, **BESIDE.get(name, {})} if is_auto else None
    if isinstance(plan, str):
        with pytest.raises(PlanError, match=plan):
            read_ds_config(path, auto=auto, hidden_size=64)
        return
    found = read_ds_config(path, auto=auto, hidden_size=64)
    assert found.plan == Plan(**plan)
    assert {row.key for row in found.rows if row.verdict == "unknown"} == UNKNOWN.get(name, set())
    written = set(_leaves(config))
    assert written <= {row.key for row in found.rows}, "every key has a row"
    assert all(row.verdict in VERDICTS and row.why for row in found.rows)
    assert all(row.key in str(found) for row in found.rows)


def _leaves(config: dict[str, Any], prefix: str = "") -> Any:
    for key, value in config.items():
        sections = {k.rpartition(".")[0] for k in KEYS} | {"optimizer", "optimizer.params"}
        name = f"{prefix}{key}"
        is_section = ALIASES.get(name, name) in sections | {"scheduler", "scheduler.params"}
        if isinstance(value, dict) and is_section:
            yield from _leaves(value, f"{name}.")
        else:
            yield name


# -- Fuzz: a plan, or an error that names a key of the config --------------------------------------

VALUES: list[Any] = [
    True, False, None, 0, 1, 2, 3, -1, 7, 1e9, 2e8, 0.5, float("nan"), float("inf"), -float("inf"),
    10**400, "auto", "cpu", "nvme", "none", "bf16", "fp32", "sum", "1e5", "", "/tmp/x", "log", [],
    [0.9, 0.999], [1, 2, 3], {}, {"enabled": True}, {"enabled": "auto"}, {"a": {"enabled": False}},
    "Adam", "AdamW", "Lamb", "SGD", "WarmupLR", "OneCycle", "StepLR", "\N{SNOWMAN}",
]  # fmt: skip


def _any_config(draw: random.Random) -> dict[str, Any]:
    """Return a config of known keys, wrong names and sections, with any values."""
    config: dict[str, Any] = {}
    for key in draw.sample(sorted(KEYS), draw.randint(0, 12)):
        *sections, name = key.split(".")
        place: Any = config
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                break
        else:
            place[name if draw.random() < 0.95 else name[:-1]] = draw.choice(VALUES)
    for section, kinds in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        if draw.random() < 0.5:
            kind = draw.choice(sorted(kinds))
            names = [*kinds[kind], "lr", "other"]
            chosen = draw.sample(names, draw.randint(0, 4))
            config[section] = {"type": kind, "params": {n: draw.choice(VALUES) for n in chosen}}
    if draw.random() < 0.2:
        config[draw.choice(["optimizer", "zero_optimization", "fp16", "x"])] = draw.choice(VALUES)
    if draw.random() < 0.4:
        config["zero_optimization"] = {**_PLAIN2, "stage": draw.randint(0, 3)}
    return config


def _paths(config: dict[str, Any], prefix: str = "") -> Any:
    """Yield the full name of every key and section."""
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")


def _names_a_key(message: str, config: dict[str, Any]) -> bool:
    """Return whether a message has the full name of a key, or of one that a section lacks."""
    paths = set(_paths(config))
    words = [word.rstrip(".") for word in re.findall(r"[\w.]+", message)]
    return any(word in paths or word.rpartition(".")[0] in paths for word in words)


@pytest.mark.parametrize("num", [400, pytest.param(5000, marks=pytest.mark.slow)])
def test_any_config_gives_a_plan_or_names_a_key(num: int) -> None:
    draw = random.Random(20)
    plans = 0
    for _ in range(num):
        config = _any_config(draw)
        auto = ARGUMENTS if draw.random() < 0.5 else None
        try:
            found = read_ds_config(config, auto=auto)
        except PlanError as error:
            assert _names_a_key(str(error), config), (config, str(error))
        else:
            plans += 1
            assert found.plan == Plan.from_dict(found.plan.to_dict())
            assert {row.verdict for row in found.rows} <= set(VERDICTS) - {"refused"}
    assert plans > num / 20


@pytest.mark.parametrize("source", [3, None, [1], b"{}", "", "/no/such/file.json"])
def test_what_is_no_config_is_refused(source: Any) -> None:
    with pytest.raises(PlanError, match="ds_config"):
        read_ds_config(source)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "existing file"), ("{", "not JSON"), ("[1]", "list"), ('{"a": 1, "a": 2}', "twice")],
)
def test_files_that_are_no_config(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=said):
        read_ds_config(path)


# -- docs/from-deepspeed.md ------------------------------------------------------------------------

PAGE = Path(__file__).parents[3] / "docs" / "from-deepspeed.md"


def documented() -> str:
    """Return the table of all keys: one row for keys of a section that share a rule."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for key, rule in KEYS.items():
        section, _, name = key.rpartition(".")
        rows.setdefault((section, rule.verdict, rule.why), []).append(name)
    lines = ["| keys | verdict | what becomes of it |", "|---|---|---|"]
    for (section, verdict, why), names in rows.items():
        listed = ", ".join(f"`{name}`" for name in names)
        start = f"`{section}`: " if section else ""
        lines.append(f"| {start}{listed} | {verdict} | {why or 'see below'} |")
    lines += ["", "| type | parameters |", "|---|---|"]
    for kinds in (OPTIMIZERS, SCHEDULERS):
        for kind, known in kinds.items():
            lines.append(f"| `{kind}` | {', '.join(f'`{name}`' for name in known)} |")
    others = ", ".join(f"`{name}`" for name in (*TORCH_OPTIMIZERS, *TORCH_SCHEDULERS))
    lines.append(f"| {others} | those of torch |")
    return "\n".join(lines) + "\n"


def test_every_key_is_documented() -> None:
    text = PAGE.read_text(encoding="utf-8")
    start = text.index("<!-- keys:")
    start = text.index("\n", start) + 1
    if os.environ.get("ZEROFX_UPDATE_GOLDENS"):
        PAGE.write_text(f"{text[:start]}\n{documented()}", encoding="utf-8")
    assert documented() in PAGE.read_text(encoding="utf-8"), "see the comment above the table"


def test_types_are_those_of_torch() -> None:
    assert all(hasattr(torch.optim, name) for name in TORCH_OPTIMIZERS)
    assert all(hasattr(torch.optim.lr_scheduler, name) for name in TORCH_SCHEDULERS)
