"""The switches of transformers and accelerate: each is in the plan, or refused by name.

Training beside DistributedDataParallel is in test_trainer.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn

import zerofx
from zerofx.errors import ArgumentError, PlanError, ShardError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries

ATEN: dict[str, Any] = {"kernels": "aten"}


def accelerator(**options: Any) -> Any:
    """Return what plan_of asks of an Accelerator."""
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType

    handler = DistributedDataParallelKwargs(**options.pop("ddp", {}))
    plugin = SimpleNamespace(backend=options.pop("backend", None), mode=options.pop("mode", None))
    return SimpleNamespace(**{
        "distributed_type": DistributedType.MULTI_CPU, "parallelism_config": None,
        "mixed_precision": "no", "scaler": None, "ddp_handler": handler, "native_amp": False,
        "state": SimpleNamespace(dynamo_plugin=plugin if plugin.backend else None), **options,
    })  # fmt: skip


def test_switches_of_an_accelerator_are_in_the_plan() -> None:
    from accelerate.utils import DynamoBackend

    from zerofx.integrations.accelerate import plan_of

    assert plan_of(accelerator(), {"stage": 2}) == zerofx.Plan(stage=2)
    assert plan_of(accelerator(mixed_precision="bf16")).precision.compute == "bf16"
    assert plan_of(accelerator(mixed_precision="fp16")).precision.is_scaled
    scaled = plan_of(accelerator(mixed_precision="fp16", scaler=object()))
    assert scaled.precision.loss_scale == "external"
    assert plan_of(accelerator(ddp={"broadcast_buffers": False})).buffers == "local"
    assert plan_of(accelerator(ddp={"bucket_cap_mb": 2})).bucket_bytes == 2 << 20
    assert plan_of(accelerator(backend=DynamoBackend.INDUCTOR)) == zerofx.Plan()  # compiles anyway


@pytest.mark.parametrize(
    ("options", "plan", "said"),
    [
        ({"mixed_precision": "fp8"}, {}, "mixed_precision = 'fp8' is not supported"),
        ({"mixed_precision": "bf16"}, {"precision": "fp16"}, "contradicts Plan"),
        ({"mixed_precision": "fp16", "scaler": 1}, {"precision": "fp16"}, "must be 'external'"),
        ({"parallelism_config": 1}, {}, "parallelism_config is not supported"),
        ({"ddp": {"comm_hook": "fp16"}}, {}, "comm_hook = 'fp16' is not supported"),
        ({"distributed_type": "DEEPSPEED"}, {}, "distributed_type = DEEPSPEED"),
        ({"backend": "EAGER"}, {}, "backend 'eager' is not supported"),
        ({"backend": "INDUCTOR", "mode": "max-autotune"}, {}, "mode = 'max-autotune'"),
        ({"backend": "INDUCTOR"}, ATEN, "contradicts Plan.kernels='aten'"),
    ],
)
def test_switches_that_cannot_be_honoured(
    options: dict[str, Any], plan: dict[str, Any], said: str
) -> None:
    from accelerate.utils import DistributedType, DynamoBackend
    from accelerate.utils.dataclasses import DDPCommunicationHookType

    from zerofx.integrations.accelerate import plan_of

    kinds = {"distributed_type": DistributedType, "backend": DynamoBackend}
    given = {k: kinds[k][v] if k in kinds else v for k, v in options.items()}
    if "ddp" in given:
        given["ddp"] = {"comm_hook": DDPCommunicationHookType(given["ddp"]["comm_hook"])}
    with pytest.raises(PlanError, match=said):
        plan_of(accelerator(**given), plan)


def test_a_configuration_file_of_accelerate(tmp_path: Path) -> None:
    from zerofx.integrations.accelerate import plan_from_config

    launcher = {"num_processes": 2, "machine_rank": 0, "distributed_type": "FSDP"}
    section = {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True}
    found = plan_from_config({**launcher, "fsdp_config": section, "mixed_precision": "bf16"})
    assert (found.stage, found.precision.compute) == (2, "bf16")
    assert found.offload.tiers["optimizer"] == "cpu"
    path = tmp_path / "config.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"
        "  zero_stage: 3\n  offload_optimizer_device: cpu\n  offload_param_device: none\n"
        "  gradient_clipping: 1.0\n  zero3_init_flag: true\n"
    )
    found = plan_from_config(path)
    assert (found.stage, found.precision.compute) == (3, "bf16")
    assert found.offload.tiers["optimizer"] == "cpu"
    assert plan_from_config({"distributed_type": "MULTI_GPU"}).stage == 0
    for config, said in (
        ({"fsdp_config": {"fsdp_reshard": True}}, "fsdp_config: reshard is unknown. Did you mean"),
        ({"fsdp_config": {"fsdp_reshard_after_forward": "HYBRID_SHARD"}}, "shard_axis_size"),
        ({"deepspeed_config": {"zero_stag": 3}}, "deepspeed_config.zero_stag is unknown. Did you"),
        ({"megatron_lm_config": {"a": 1}}, "megatron_lm_config is not supported"),
        ({"distributed_type": "TPU"}, "distributed_type = TPU"),
        ({"mixed_precison": "bf16"}, "mixed_precison is unknown. Did you mean 'mixed_precision'"),
    ):
        with pytest.raises(PlanError, match=said):
            plan_from_config(config)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"bf16_full_eval": True}, "bf16_full_eval = True is not supported"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size = True is not supported"),
        ({"optim": "galore_adamw_layerwise"}, "optim = .* is not supported"),
        ({"debug": "underflow_overflow"}, "debug = .* is not supported. Use Plan.debug=True"),
        ({"torch_compile_backend": "eager"}, "backend 'eager' is not supported"),
        (
            {
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"every_n_layers": 2},
            },
            "every_n_layers = 2 is not supported",
        ),
    ],
)
def test_arguments_that_cannot_be_honoured(
    arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    import transformers

    from zerofx.integrations.transformers import Trainer

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), report_to="none", use_cpu=True, **arguments
    )
    with pytest.raises(PlanError, match=said):
        Trainer(nn.Linear(2, 2), args, train_dataset=[{"x": 1}])


def test_configs_of_other_libraries_in_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer_job import gpt

    from zerofx.integrations.transformers import Trainer, TrainingArguments

    def trainer(**options: Any) -> Any:
        args = TrainingArguments(
            output_dir=str(tmp_path), report_to="none", use_cpu=True, max_steps=4, **options
        )
        return Trainer(gpt(), args, train_dataset=[{"input_ids": [1]}])

    config = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "Lamb", "params": {"lr": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2},
        },
        "gradient_clipping": "auto",
    }  # fmt: skip
    made = trainer(deepspeed=config, learning_rate=3e-3, warmup_steps=2)
    assert made.plan.stage == 2 and made.plan.bucket_bytes == 32**2 * 4
    made.create_optimizer_and_scheduler(4)
    assert type(made.optimizer) is zerofx.optim.Lamb
    assert made.lr_scheduler.total_num_steps == 4
    fsdp = trainer(fsdp=True, fsdp_config={"reshard_after_forward": True, "version": 2})
    assert fsdp.plan.stage == 3 and not fsdp.is_fsdp_enabled
    halfway = trainer(fsdp="shard_grad_op offload").plan
    assert halfway.stage == 2 and halfway.offload.tiers["parameters"] == "none"
    recomputed = trainer(plan={"stage": 1}, activation_checkpointing=True, bf16=True).plan
    assert (recomputed.activations, recomputed.precision.compute) == ("recompute", "bf16")
    with pytest.raises(PlanError, match="more than one of plan, deepspeed and fsdp"):
        trainer(plan={"stage": 1}, deepspeed=config)
    with pytest.raises(PlanError, match=r"max_grad_norm = 1.0 contradicts Plan\(update='in-back"):
        trainer(plan={"update": "in-backward"})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(PlanError, match=r"ACCELERATE_USE_FSDP is set.*Launch with torchrun"):
        trainer()


def test_a_compiled_model_in_other_hands(tmp_path: Path) -> None:
    """Switches that would be passed over, and another plan than the model's, are named."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from trainer_job import gpt
    from transformers import TrainingArguments

    from zerofx.integrations.transformers import Trainer

    model = zerofx.compile(gpt(), ATEN)
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(PlanError, match="plan was given for a model that is already compiled"):
        Trainer(model, args, train_dataset=[{"x": 1}], plan={"stage": 1})
    assert Trainer(model, args, train_dataset=[{"x": 1}]).plan == model.zerofx.plan
    AcceleratorState._reset_state()
    try:
        with pytest.raises(PlanError, match=r"mixed_precision = 'bf16' .* has no effect on a mo"):
            Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    finally:
        AcceleratorState._reset_state()


class _OfSeveral:
    """A compiled model as `prepare` sees it on one of several ranks."""

    def __init__(self, model: Any, ranks: int) -> None:
        self._zerofx = SimpleNamespace(plan=model.zerofx.plan, world=SimpleNamespace(size=ranks))


@pytest.mark.parametrize(("ranks", "processes"), [(2, 1), (2, 2), (1, 1)])
def test_ranks_that_accelerate_does_not_know_are_named(
    ranks: int, processes: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zerofx.integrations import accelerate as sharded

    monkeypatch.setattr(sharded, "CompiledModule", _OfSeveral)
    model: Any = _OfSeveral(zerofx.compile(nn.Linear(2, 2), ATEN), ranks)
    found = sharded.prepare(accelerator(num_processes=processes), model)
    assert found is model
    assert ("make Accelerator(cpu=True)" in caplog.text) == (ranks != processes)


def test_versions_are_checked() -> None:
    from zerofx.integrations.accelerate import check_version

    check_version("transformers", "5.23.0.dev0", "5.20", "6")
    for version in ("4.57.1", "6.0.0"):
        with pytest.raises(ArgumentError, match=f"transformers {version} is not supported"):
            check_version("transformers", version, "5.20", "6")


def asked_by_libraries() -> None:
    """A sharded model says what it is: saved by all ranks, and generating on all ranks.

    Parameters that are read whole take no part in training.
    """
    from trainer_job import gpt
    from transformers.distributed.fsdp import is_fsdp_managed_module

    model: Any = zerofx.compile(gpt(), ATEN)
    assert model.is_distributed_loading_by_transformers
    assert is_fsdp_managed_module(model) and not model._is_fsdp_managed_module
    whole = model.transformer.wpe.weight.full_tensor()
    with pytest.raises(ShardError, match=r"wpe\.weight got a gradient through full_tensor\(\)"):
        whole.square().sum().backward()
    with torch.no_grad():
        assert not model.transformer.wpe.weight.full_tensor().requires_grad


def test_a_sharded_model_tells_libraries_so(pool: Pool) -> None:
    pool.run(2, asked_by_libraries)


def test_what_autocast_leaves_wide_is_gathered_wide() -> None:
    from trainer_job import gpt

    from zerofx.integrations.accelerate import _wide

    found = _wide(gpt())
    norms = {f"transformer.h.*.ln_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}
    tied = {"transformer.wte.weight", "lm_head.weight", "transformer.wpe.weight"}
    assert found is not None
    assert found.keys() == norms | tied | {"transformer.ln_f.weight", "transformer.ln_f.bias"}


def test_pretrained_models_in_and_out(tmp_path: Path) -> None:
    import transformers
    from trainer_job import gpt

    from zerofx.integrations.transformers import from_pretrained, save_pretrained

    plain = gpt()
    plain.generation_config.max_new_tokens = 3
    plain.save_pretrained(tmp_path / "plain")
    model = from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "plain", ATEN)
    assert model.generation_config.max_new_tokens == 3 and not model.training
    save_pretrained(model, tmp_path / "again")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert read.generation_config.max_new_tokens == 3
    for (name, mine), theirs in zip(read.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    with pytest.raises(ArgumentError, match=r"not a directory. Give one with config\.json"):
        from_pretrained(transformers.GPT2LMHeadModel, "gpt2")
    with pytest.raises(ArgumentError, match="model is a plain GPT2LMHeadModel"):
        save_pretrained(plain, tmp_path)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().square().sum() / count


@pytest.mark.parametrize("autocast", [False, True])
def test_counts_and_sums_stay_wide_in_bf16(autocast: bool) -> None:
    """transformers divides its loss by a count of tokens, which 8 bits of mantissa cannot hold."""
    model = zerofx.compile(Scaled(8, 8), {**ATEN, "precision": "bf16"})
    x, count = torch.ones(2, 8), torch.tensor(375.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert float(model(x, count) * 375) == pytest.approx(float(model(x, torch.tensor(1.0))))
