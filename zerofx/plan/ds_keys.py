"""Every key of DeepSpeed's ds_config.json, and its verdict under zerofx.

`KEYS` is the table of docs/from-deepspeed.md. Parameters of optimizers and schedulers are listed by
type. Names and defaults are those of DeepSpeed 0.19; older names are in `ALIASES`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from zerofx.errors import PlanError
from zerofx.plan.fields import Reader, one_of, refuse

# -- Reading values: as in pydantic, "1" and 2e8 are accepted as whole numbers ---------------------


def _number(least: float, most: float = math.inf) -> Reader:
    def read(where: str, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not least <= number <= most or math.isinf(number):
            limit = "" if math.isinf(most) else f" to {most:g}"
            start = "" if math.isinf(least) else f" from {least:g}"
            raise refuse(where, value, f"are numbers{start}{limit}")
        return number

    return read


def _count(least: int, most: int = 2**62) -> Reader:
    number = _number(least, most)

    def read(where: str, value: Any) -> int:
        try:
            found = number(where, value)
        except PlanError:
            found = math.nan
        if not found.is_integer():
            limit = "" if most == 2**62 else f" to {most}"
            raise refuse(where, value, f"are whole numbers from {least}{limit}")
        return int(found)

    return read


def _switch(where: str, value: Any) -> bool:
    if value in ("true", "True", "false", "False"):
        return str(value).lower() == "true"
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise refuse(where, value, "are true and false")


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refuse(where, value, "is a string")
    return value


def anything(where: str, value: Any) -> Any:
    return value


def _word(*words: str) -> Reader:
    choose = one_of(*words)
    return lambda where, value: choose(where, value.lower() if isinstance(value, str) else value)


def _betas(where: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise refuse(where, value, "are two numbers from 0 to 1")
    first, second = (_number(0, 1)(where, each) for each in value)
    if 1.0 in (first, second):
        raise refuse(where, value, "are two numbers below 1")
    return first, second


def _per_group(reader: Reader) -> Reader:
    """Accept one value, or a list with one value per parameter group."""

    def read(where: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and value:
            return [reader(where, each) for each in value]
        return reader(where, value)

    return read


# -- The verdict on a key --------------------------------------------------------------------------

VERDICTS = ("honoured", "translated", "ignored", "refused", "unknown")


@dataclass(frozen=True)
class KeyRule:
    """The verdict on a key, which its value or another key may override.

    read: converts the value to its stored form, or raises a PlanError.
    harmless: values of a refused key that have no effect.
    is_warned: whether to warn about an ignored key that is on.
    """

    verdict: str
    why: str
    read: Reader = anything
    harmless: tuple[Any, ...] = ()
    is_warned: bool = False


_dtype = _word("fp32", "bf16", "fp16")
_scheduled = KeyRule("ignored", "zerofx schedules all communication ahead of time")
_pools = KeyRule("ignored", "zerofx sizes its own buffers. See Plan.host_budget")
_timed = KeyRule("ignored", "zerofx.record(model) measures steps, call by call")
FEATURE = KeyRule("refused", "zerofx has nothing for it. Turn it off or remove it")


def _axis(name: str) -> KeyRule:
    return KeyRule(
        "refused",
        f'zerofx.compile(model, Plan(parallel={{"{name}": 2}})) divides models, in a loop without '
        "DeepSpeed's engine. Turn it off or remove it",
    )


_quantized_nontrainable = KeyRule(
    "refused",
    "zerofx codes the gathers of trained and frozen weights alike: use zero_quantized_weights",
    _switch,
    harmless=(False,),
)


def _quantized(field: str) -> KeyRule:
    return KeyRule("translated", f'{field}, with numerics="fast"', _switch)


_elements = _count(0)
_section = KeyRule("honoured", "")

# Sections whose keys have their own rules; `optimizer.params` and `scheduler.params` depend on the
# type (OPTIMIZERS, SCHEDULERS).
KEYS: dict[str, KeyRule] = {
    "train_batch_size": KeyRule("honoured", "checked: micro x accumulation x ranks", _count(1)),
    "train_micro_batch_size_per_gpu": KeyRule(
        "honoured", "samples per rank of one forward", _count(1)
    ),
    "gradient_accumulation_steps": KeyRule(
        "honoured", "the engine steps after this many backwards", _count(1)
    ),
    "managed_gradient_accumulation": KeyRule(
        "honoured", "false: each step() is a boundary", _switch
    ),
    "gradient_clipping": KeyRule("honoured", "norm of all gradients; 0 is off", _number(0)),
    "steps_per_print": KeyRule("honoured", "rank 0 prints step, skipped and lr", _count(1)),
    "dataloader_drop_last": KeyRule("honoured", "for the loader of training_data=", _switch),
    "communication_data_type": KeyRule("translated", "precision.reduce", _dtype),
    "data_types.grad_accum_dtype": KeyRule(
        "translated", "precision.reduce, unless communication_data_type is given", _dtype
    ),
    "data_types.param_dtype": KeyRule(
        "refused", "bf16.enabled or fp16.enabled sets it. Remove it", _dtype
    ),
    "data_types.buffer_dtype": KeyRule("refused", "buffers keep their formats. Remove it", _dtype),
    "seq_parallel_communication_data_type": KeyRule(
        "ignored", "a plan that is read from a ds_config divides no sequences"
    ),
    "prescale_gradients": KeyRule("ignored", "the same mean, up to rounding", _switch),
    "gradient_predivide_factor": KeyRule("ignored", "the same mean, up to rounding", _number(0)),
    "gradient_allreduce_op": KeyRule(
        "refused",
        'zerofx takes the mean over ranks. Use "mean", and multiply the loss by the ranks',
        _word("mean", "avg", "sum"),
        harmless=("mean", "avg"),
    ),
    "sparse_gradients": KeyRule("translated", "sparse_gradients, of all tables", _switch),
    "disable_allgather": _scheduled,
    "bf16.enabled": KeyRule(
        "translated", 'precision="bf16"; gradients are summed in fp32 by default', _switch
    ),
    "bf16.bf16_master_weights_and_grads": KeyRule(
        "translated", 'precision.master and reduce "bf16"', _switch
    ),
    "bf16.bf16_optimizer_states": KeyRule(
        "translated", "states have the format of the master weights", _switch
    ),
    "bf16.immediate_grad_update": KeyRule("ignored", "gradients land in their shards at once"),
    "bf16.check_grad_overflow": KeyRule(
        "ignored", "a bf16 step is never skipped; clipping shows an infinite norm"
    ),
    "fp16.enabled": KeyRule(
        "translated", 'precision="fp16" with its loss scale, reduced in fp16 by default', _switch
    ),
    "fp16.loss_scale": KeyRule(
        "translated", "precision.loss_scale; 0 is dynamic", _number(0, 2.0**127)
    ),
    "fp16.initial_scale_power": KeyRule(
        "translated", "precision.loss_scale.initial", _count(0, 127)
    ),
    "fp16.loss_scale_window": KeyRule(
        "translated", "precision.loss_scale.growth_interval", _count(1)
    ),
    "fp16.hysteresis": KeyRule("translated", "precision.loss_scale.hysteresis", _count(1)),
    "fp16.min_loss_scale": KeyRule(
        "translated", "precision.loss_scale.minimum", _number(1e-30, 2.0**127)
    ),
    "fp16.consecutive_hysteresis": KeyRule(
        "refused",
        "zerofx refills the hysteresis when the scale rises. Set it to false",
        _switch,
        harmless=(False,),
    ),
    "fp16.auto_cast": KeyRule("ignored", "inputs are always cast", _switch),
    "fp16.fp16_master_weights_and_grads": KeyRule(
        "refused",
        "master weights are in fp32 with fp16 compute. Set it to false",
        _switch,
        harmless=(False,),
    ),
    "amp": KeyRule("refused", 'this is apex. Use "bf16" or "fp16": {"enabled": true}'),
    "torch_autocast.enabled": KeyRule(
        "honoured", "the engine calls the model under torch.autocast", _switch
    ),
    "torch_autocast.dtype": KeyRule(
        "honoured", "of the autocast", _word("bf16", "bfloat16", "torch.bfloat16")
    ),
    "torch_autocast.lower_precision_safe_modules": KeyRule(
        "ignored", "communication has the plan's precision"
    ),
    "zero_optimization.stage": KeyRule("translated", "stage", _count(0, 3)),
    "zero_optimization.reduce_bucket_size": KeyRule(
        "translated", "bucket_bytes: elements there, bytes here", _elements
    ),
    "zero_optimization.stage3_prefetch_bucket_size": KeyRule(
        "translated", "bounds bucket_bytes at stage 3, where a bucket is also gathered", _elements
    ),
    "zero_optimization.stage3_param_persistence_threshold": KeyRule(
        "translated", "persist_below: elements there, bytes here", _elements
    ),
    "zero_optimization.mics_shard_size": KeyRule("translated", "shard_axis_size", _count(-1)),
    "zero_optimization.zero_hpz_partition_size": KeyRule(
        "translated", "secondary_shard_size", _count(0)
    ),
    "zero_optimization.offload_optimizer.device": KeyRule(
        "translated", "offload.optimizer", _word("none", "cpu", "nvme")
    ),
    "zero_optimization.offload_optimizer.nvme_path": KeyRule("translated", "offload.path", _text),
    "zero_optimization.offload_optimizer.ratio": KeyRule(
        "translated", "offload.device_fraction = 1 - ratio", _number(0, 1)
    ),
    "zero_optimization.offload_param.device": KeyRule(
        "translated",
        "offload.parameters; trained parameters are in the tier of their optimizer",
        _word("none", "cpu", "nvme"),
    ),
    "zero_optimization.offload_param.nvme_path": KeyRule("translated", "offload.path", _text),
    "zero_optimization.cpu_offload": KeyRule("translated", 'offload.optimizer="cpu"', _switch),
    "zero_optimization.cpu_offload_param": KeyRule(
        "translated", 'offload.parameters="cpu"', _switch
    ),
    **{
        f"zero_optimization.{tier}.{name}": _pools
        for tier in ("offload_optimizer", "offload_param")
        for name in (
            "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read",
            "pipeline_write", "pipeline", "fast_init", "super_offload", "cpuadam_cores_perc",
        )
    },
    **{
        f"zero_optimization.{name}": _pools
        for name in ("sub_group_size", "cpu_offload_use_pin_memory")
    },
    **{
        f"zero_optimization.{name}": KeyRule(
            "ignored", "Plan.memory_budget and prefetch decide which parameters stay gathered"
        )
        for name in (
            "stage3_max_live_parameters", "stage3_max_reuse_distance", "allgather_bucket_size",
            "allgather_size", "stage3_model_persistence_threshold",
        )
    },
    **{
        f"zero_optimization.{name}": KeyRule(
            "ignored", "model.state_dict() and zerofx.export always have full weights"
        )
        for name in (
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        )
    },
    **{
        f"zero_optimization.{name}": _scheduled
        for name in (
            "overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions",
            "round_robin_gradients", "ignore_unused_parameters", "memory_efficient_linear",
            "use_multi_rank_bucket_allreduce", "stage3_module_granularity_threshold",
            "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
            "legacy_stage1", "override_module_apply", "log_trace_cache_warnings", "leaf_module",
            "enable_sanity_checks",
        )
    },
    "zero_optimization.mics_hierarchical_params_gather": KeyRule(
        "ignored", "Plan(hierarchical_size=...) does this, and needs the number of ranks per node"
    ),
    **{
        f"zero_optimization.{name}": KeyRule(
            "ignored", "zerofx.load takes any world size and stage, with all states"
        )
        for name in (
            "load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint",
            "save_muon_momentum_buffer_in_memory",
        )
    },
    "zero_optimization.zero_quantized_weights": _quantized("quantized_weights"),
    "zero_optimization.zero_quantized_nontrainable_weights": _quantized_nontrainable,
    "zero_optimization.zero_quantized_gradients": _quantized("quantized_gradients"),
    "zero_optimization.zeropp_loco_param": FEATURE,
    "zero_optimization.zenflow": FEATURE,
    "activation_checkpointing.cpu_checkpointing": KeyRule(
        "translated", 'offload.activations="cpu"', _switch
    ),
    "activation_checkpointing.partition_activations": KeyRule(
        "ignored", "each rank of an mpu's group saves its own activations, uncut", _switch
    ),
    **{
        f"activation_checkpointing.{name}": KeyRule(
            "ignored", 'Plan(activations="recompute") recomputes them, without calls in the model'
        )
        for name in (
            "number_checkpoints", "contiguous_memory_optimization", "profile",
            "synchronize_checkpoint_boundary",
        )
    },
    "optimizer.type": KeyRule("honoured", "", _text),
    "optimizer.legacy_fusion": KeyRule("ignored", "steps are always over flat runs", _switch),
    "scheduler.type": KeyRule("honoured", "", _text),
    "zero_allow_untested_optimizer": KeyRule("ignored", "any optimizer is allowed"),
    "zero_force_ds_cpu_optimizer": KeyRule("ignored", "any optimizer steps on the host"),
    "tensorboard.enabled": KeyRule("honoured", "by torch.utils.tensorboard", _switch),
    "csv_monitor.enabled": KeyRule("honoured", "one file per value, as DeepSpeed's", _switch),
    "wandb.enabled": KeyRule("honoured", "by the wandb package", _switch),
    **{
        f"{monitor}.{name}": KeyRule("honoured", f"of {monitor}", _text)
        for monitor, names in (
            ("tensorboard", ("output_path", "job_name")),
            ("csv_monitor", ("output_path", "job_name")),
            ("wandb", ("project", "group", "team")),
        )
        for name in names
    },
    "comet": KeyRule("ignored", "use tensorboard, wandb or csv_monitor", is_warned=True),
    "wall_clock_breakdown": _timed,
    "memory_breakdown": _timed,
    "flops_profiler": _timed,
    "comms_logger": _timed,
    "timers": _timed,
    "checkpoint": KeyRule(
        "ignored", "snapshots are zerofx's own: on a shared directory, checked, of any world size"
    ),
    "elasticity": KeyRule(
        "ignored",
        "batch sizes do not follow the number of ranks. Write all three. zerofx.load accepts any "
        "world size",
        is_warned=True,
    ),
    "sparse_attention": KeyRule(
        "ignored",
        "DeepSpeed's engine does not apply it either; model code that needs it must bring its own "
        "attention",
        is_warned=True,
    ),
    "aio": KeyRule("ignored", "zerofx.nvme chooses its own request sizes"),
    "compile": KeyRule("ignored", "zerofx compiles the model"),
    "graph_harvesting": KeyRule("ignored", "see Plan(cuda_graph=True)"),
    "autotuning": KeyRule("ignored", "zerofx search finds plans"),
    "dump_state": KeyRule("ignored", "print(engine.module) and program.dump() show the state"),
    "log_level": KeyRule("ignored", 'see logging.getLogger("zerofx")'),
    "vocabulary_size": KeyRule("ignored", "DeepSpeed only warns about it"),
    "nebula": KeyRule("ignored", "zerofx.save(background=True) saves while training goes on"),
    "datastates": KeyRule("ignored", "zerofx.save(background=True) saves while training goes on"),
    "use_data_before_expert_parallelism": KeyRule(
        "ignored", 'experts are cut over the tensor axis: Plan(parallel={"tensor": 2})'
    ),
    "data_parallel_size": KeyRule(
        "ignored", "all ranks are data-parallel, or those of the mpu's data group"
    ),
    "sequence_parallel_size": KeyRule(
        "refused",
        'Plan(parallel={"context": 2}) of zerofx.compile divides sequences. Set it to 1',
        _count(1),
        harmless=(1,),
    ),
    **dict.fromkeys(
        (
            "data_efficiency", "curriculum_learning", "random_ltd", "progressive_layer_drop",
            "eigenvalue", "compression_training", "quantize_training", "weight_quantization",
            "hybrid_engine", "data_sampling",
        ),
        FEATURE,
    ),
    "pipeline": _axis("pipeline"),
    "tensor_parallel": _axis("tensor"),
    "expert_parallel": _axis("tensor"),
}  # fmt: skip

# Other names of the same keys: from before 0.4, or without the prefix that pydantic makes optional.
ALIASES = {
    "bfloat16": "bf16",
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (
            "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters",
            "model_persistence_threshold", "max_reuse_distance", "module_granularity_threshold",
            "gather_16bit_weights_on_model_save", "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
}  # fmt: skip

SECTIONS = {key.rpartition(".")[0] for key in KEYS if "." in key} | {"optimizer", "scheduler"}
SECTIONS |= {"optimizer.params", "scheduler.params"}  # whose keys depend on the type

# -- Optimizers and schedulers by type: the parameters that each accepts ---------------------------

_rate = _number(0)
_ADAM: dict[str, Reader] = {
    "lr": _rate, "betas": _betas, "eps": _rate, "weight_decay": _rate, "bias_correction": _switch,
    "amsgrad": _switch, "adam_w_mode": _switch, "torch_adam": _switch,
    "fp32_optimizer_states": _switch, "max_grad_norm": _rate,
}  # fmt: skip
_LAMB: dict[str, Reader] = {
    "lr": _rate, "betas": _betas, "eps": _rate, "weight_decay": _rate, "bias_correction": _switch,
    "max_coeff": _rate, "min_coeff": _rate, "max_grad_norm": _rate, "amsgrad": _switch,
    "eps_inside_sqrt": _switch,
}  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Reader]] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lamb": _LAMB,
    "lion": {"lr": _rate, "betas": _betas, "weight_decay": _rate, "max_grad_norm": _rate},
    "sgd": {
        "lr": _rate, "momentum": _rate, "dampening": _rate, "weight_decay": _rate,
        "nesterov": _switch, "max_grad_norm": _rate,
    },
}  # fmt: skip
# The torch.optim classes that update element by element; DeepSpeed looks them up by these names.
TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
)  # fmt: skip
BY_LOWER_NAME = {name.lower(): name for name in TORCH_OPTIMIZERS}
OTHER_OPTIMIZERS = {
    **dict.fromkeys(
        ("onebitadam", "onebitlamb", "zerooneadam"), "gradients are not sent in one bit. Use Adam"
    ),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "give optimizer= one of the mup package"),
    "muon": "give optimizer= torch.optim.Muon or a list of optimizers to zerofx.compile",
}
_EACH_RATE = _per_group(_rate)
_WARMUP: dict[str, Reader] = {
    "warmup_min_lr": _EACH_RATE, "warmup_max_lr": _EACH_RATE, "warmup_num_steps": _count(0),
    "warmup_type": _word("log", "linear"), "last_batch_iteration": _count(-1),
}  # fmt: skip
SCHEDULERS: dict[str, dict[str, Reader]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {"total_num_steps": _count(1), **_WARMUP},
    "WarmupCosineLR": {
        "total_num_steps": _count(1), "warmup_min_ratio": _rate, "warmup_num_steps": _count(0),
        "cos_min_ratio": _rate, "warmup_type": _word("log", "linear"),
        "last_batch_iteration": _count(-1),
    },
    "OneCycle": {
        "cycle_min_lr": _rate, "cycle_max_lr": _rate, "decay_lr_rate": _rate,
        "cycle_first_step_size": _count(1), "cycle_second_step_size": _count(0),
        "cycle_first_stair_count": _count(0), "cycle_second_stair_count": _count(0),
        "decay_step_size": _count(0), "cycle_momentum": _switch, "cycle_min_mom": _number(0, 0.999),
        "cycle_max_mom": _number(0, 0.999), "decay_mom_rate": _rate,
        "last_batch_iteration": _count(-1),
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": _EACH_RATE, "lr_range_test_step_size": _count(1),
        "lr_range_test_step_rate": _rate, "lr_range_test_staircase": _switch,
        "last_batch_iteration": _count(-1),
    },
}  # fmt: skip
NEEDED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
TORCH_SCHEDULERS = (
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR",
)  # fmt: skip
