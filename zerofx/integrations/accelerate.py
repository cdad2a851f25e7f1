"""accelerate on zerofx: `from zerofx.integrations import accelerate`.

    accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    model, optimizer, loader = accelerate.prepare(
        accelerator, model, optimizer, loader, plan=zerofx.Plan(stage=3)
    )

The rest of the loop stays as it is: `accumulate`, `backward`, `clip_grad_norm_`, `gather`,
`save_state` and `load_state` are the accelerator's own. A model that zerofx.compile returned may
also be passed to `accelerator.prepare` itself; then only `save_state` needs this module.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend, convert_outputs_to_fp32
from torch import nn
from torch.torch_version import TorchVersion

import zerofx
from zerofx.api import PlanLike
from zerofx.errors import ArgumentError, PlanError
from zerofx.hardware import Hardware
from zerofx.model.module import CompiledModule
from zerofx.plan.fields import Patterns, covers, load_mapping, nearest
from zerofx.plan.parts import Precision
from zerofx.plan.plan import Plan, as_plan

log = logging.getLogger("zerofx")

_SNAPSHOT = "zerofx"  # the key of a state dict that is in a snapshot instead


def check_version(library: str, found: str, least: str, below: str) -> None:
    """Raise an ArgumentError unless a library is of a supported version."""
    if not least <= TorchVersion(found) < below:
        raise ArgumentError(
            f"{library} {found} is not supported. Supported versions are {least} and later, below "
            f"{below}. Install one of them: pip install '{library}>={least},<{below}'."
        )


check_version("accelerate", accelerate.__version__, "1.15", "2")


# -- The loop---------------------------------------------------------------------------------------


def prepare(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any = None,
    *others: Any,
    plan: PlanLike = None,
    hardware: Hardware | str | os.PathLike[str] | None = None,
) -> Any:
    """Compile a model for an accelerator's loop, and prepare the loop's other objects.

    model: a plain model, or the result of zerofx.compile, which keeps its own plan.
    optimizer: an optimizer over the parameters of the model.
    others: data loaders, schedulers and other arguments of `accelerator.prepare`.
    plan, hardware: as for zerofx.compile. The accelerator's own switches are set in the plan.

    Returns:
        All of them, in this order, as `accelerator.prepare` returns them.

    Raises:
        PlanError: a switch of the accelerator is not supported, or contradicts the plan.
    """
    if isinstance(model, CompiledModule):
        check_compiled(model, plan, plan_of(accelerator, model._zerofx.plan))
    else:
        found = plan_of(accelerator, plan)
        model = compile_for(accelerator, model, found, optimizer, hardware)
    given = () if optimizer is None else (_with_snapshot(accelerator, model, optimizer),)
    if accelerator.num_processes == 1 < model._zerofx.world.size:
        log.warning(
            "accelerate takes each of the %d ranks for a job of its own, so that every rank gets "
            "all samples and is the main process. On CPUs, set ACCELERATE_USE_CPU=1 in the "
            "environment, or make Accelerator(cpu=True).",
            model._zerofx.world.size,
        )
    # The model itself is not registered: save_state would gather all of it on every host.
    prepared = accelerator.prepare(*given, *others) if given or others else ()
    if len(given) + len(others) == 1:
        prepared = (prepared,)
    return model if not prepared else (model, *prepared)


def check_compiled(model: CompiledModule, plan: PlanLike, wanted: Plan) -> None:
    """Raise a PlanError if a compiled model's plan differs from the one that switches require."""
    own = model._zerofx.plan
    if plan is not None and as_plan(plan) != own:
        raise PlanError(
            "plan was given for a model that is already compiled. Give the plan to zerofx.compile."
        )
    fields = wanted.to_dict()
    for name, value in own.to_dict().items():
        if fields[name] != value:
            raise PlanError(
                f"the model was compiled with Plan({name}={value!r}), but the arguments mean "
                f"{fields[name]!r}. Compile it with Plan({name}={fields[name]!r}), or change them."
            )


def compile_for(
    accelerator: Accelerator,
    model: nn.Module,
    plan: Plan,
    optimizer: Any = None,
    hardware: Hardware | str | os.PathLike[str] | None = None,
) -> Any:
    """Compile a model whose calls run under the accelerator's autocast, if it has one.

    Parameters are gathered in the dtype of `mixed_precision` if operators take them in it. Autocast
    decides as it does without zerofx, so rounding is the same as in the library.
    """
    if accelerator.native_amp and plan.precision.modules is None:
        plan = replace(plan, precision=replace(plan.precision, modules=_wide(model)))
    compiled: Any = zerofx.compile(
        model, plan, optimizer=optimizer, device=accelerator.device, hardware=hardware
    )
    if accelerator.native_amp:
        forward = compiled.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with accelerator.autocast():
                return forward(*args, **kwargs)

        compiled.forward = convert_outputs_to_fp32(run)
    return compiled


def _wide(model: nn.Module) -> Patterns | None:
    """Return the parameters that autocast leaves in fp32, as patterns of their names.

    They are those of embeddings, of modules without a matrix (norms), and of modules that contain
    other modules (class tokens, positions). A tied parameter is included if it is so in one place.
    """
    wide: set[str] = set()
    named = list(model.named_modules(remove_duplicate=False))
    for path, module in named:
        own = dict(module.named_parameters(recurse=False))
        is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        is_around = any(next(child.parameters(), None) is not None for child in module.children())
        if is_embedding or is_around or all(p.dim() < 2 for p in own.values()):
            wide |= {f"{path}.{key}" if path else key for key in own}
    params = dict(model.named_parameters(remove_duplicate=False))
    shared = {id(params[name]) for name in wide}
    wide = {name for name, param in params.items() if id(param) in shared}
    found: dict[str, str] = {}
    for name in sorted(wide):
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)  # one pattern for all layers
        if any(covers(pattern, other) for other in params.keys() - wide):
            pattern = name
        found[pattern] = "fp32"
    return Patterns(found) if found else None


class _Optimizer(AcceleratedOptimizer):
    """An accelerator's optimizer; `save_state` saves the snapshot's path instead of its state."""

    snapshot: str | None = None  # path of the next state_dict, once it has been saved there

    def state_dict(self) -> dict[str, Any]:
        if self.snapshot is None:
            return super().state_dict()
        saved, self.snapshot = self.snapshot, None
        return {_SNAPSHOT: saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if state_dict.keys() != {_SNAPSHOT}:
            super().load_state_dict(state_dict)


def _with_snapshot(accelerator: Accelerator, model: Any, optimizer: Any) -> _Optimizer:
    """Return the optimizer as the accelerator keeps it, saved and loaded with the model."""
    number = len(accelerator._optimizers)
    name = _SNAPSHOT if number == 0 else f"{_SNAPSHOT}_{number}"
    made = _Optimizer(optimizer, device_placement=False, scaler=accelerator.scaler)
    made._is_accelerate_prepared = True  # accelerator.prepare then leaves it alone

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        zerofx.save(Path(folder) / name, model, optimizer)
        made.snapshot = name

    def load(models: list[Any], folder: str) -> None:
        if (Path(folder) / name).is_dir():
            zerofx.load(Path(folder) / name, model, optimizer)
        # Accelerate's own, of a run without zerofx: load_state restores the optimizer's state.
        else:
            ending = "" if number == 0 else f"_{number}"
            zerofx.load_weights(model, Path(folder) / f"model{ending}.safetensors")

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return made


# -- The accelerator's switches --------------------------------------------------------------------


def plan_of(accelerator: Accelerator, plan: PlanLike = None) -> Plan:
    """Return a plan in which the accelerator's switches are set.

    Raises:
        PlanError: one of them is not supported, or contradicts the plan; names it.
    """
    found = as_plan(plan)
    kind = accelerator.distributed_type
    if kind in _OTHERS:
        raise PlanError(
            f"Accelerator.distributed_type = {kind.name}, but zerofx shards the model. "
            f"{_OTHERS[kind]}"
        )
    if accelerator.parallelism_config is not None:
        raise PlanError(
            "Accelerator.parallelism_config is not supported: all ranks are data-parallel. Leave "
            "it out. Plan(shard_axis_size=...) shards within groups of ranks."
        )
    found = with_precision(found, accelerator.mixed_precision, accelerator.scaler)
    _check_dynamo(accelerator.state.dynamo_plugin, found)
    return _with_ddp(found, accelerator.ddp_handler)


_FROM_FILE = "plan=plan_from_config('config.yaml')"
_OTHERS: dict[Any, str] = {
    DistributedType.DEEPSPEED: f"Launch with torchrun, and give {_FROM_FILE}.",
    DistributedType.FSDP: f"Launch with torchrun, and give {_FROM_FILE}.",
    DistributedType.MEGATRON_LM: "Launch with torchrun.",
    DistributedType.XLA: "Run on CPUs or CUDA GPUs.",
}


def with_precision(plan: Plan, mixed: str, scaler: Any = None) -> Plan:
    """Return a plan that computes in the precision of `mixed_precision`: "no", "bf16" or "fp16"."""
    if mixed in ("no", None):
        return plan
    if mixed not in ("bf16", "fp16"):
        raise PlanError(
            f"mixed_precision = {mixed!r} is not supported. Use 'bf16', 'fp16' or 'no'."
        )
    if plan.precision == Precision():
        precision: Any = mixed
        if mixed == "fp16" and scaler is not None:  # the library scales the loss itself
            precision = {"compute": "fp16", "reduce": "fp16", "loss_scale": "external"}
        return replace(plan, precision=Precision.read("precision", precision))
    if plan.precision.compute != mixed:
        raise PlanError(
            f"mixed_precision = {mixed!r} contradicts "
            f"Plan(precision={plan.precision.to_plain()!r}). Change one of them, or leave out "
            "mixed_precision."
        )
    if mixed == "fp16" and scaler is not None and plan.precision.loss_scale != "external":
        raise PlanError(
            "mixed_precision = 'fp16' brings a GradScaler, so Plan.precision.loss_scale must be "
            "'external'. Set it, or leave out mixed_precision."
        )
    return plan


def _check_dynamo(plugin: Any, plan: Plan) -> None:
    """Raise unless zerofx's own compilation satisfies the torch.compile settings."""
    if plugin is None or plugin.backend == DynamoBackend.NO:
        return
    if plugin.backend != DynamoBackend.INDUCTOR:
        raise PlanError(
            f"torch_compile with the backend {plugin.backend.value.lower()!r} is not supported: "
            "zerofx compiles the model with Inductor. Leave torch_compile out."
        )
    if plugin.mode not in (None, "default"):
        raise PlanError(
            f"torch_compile with mode = {plugin.mode!r} is not supported. Leave the mode out. "
            "Plan(cuda_graph=True) replays graphs on one GPU."
        )
    if plan.kernels == "aten":
        raise PlanError(
            f"torch_compile contradicts Plan(kernels={plan.kernels!r}). Leave one of them out."
        )


def _with_ddp(plan: Plan, handler: Any) -> Plan:
    """Return a plan with DistributedDataParallel's options, as far as they change results."""
    if handler is None:
        return plan
    hook = getattr(handler.comm_hook, "value", handler.comm_hook)
    if str(hook) != "no":
        raise PlanError(
            f"DistributedDataParallelKwargs.comm_hook = {hook!r} is not supported: it changes the "
            "gradients. Leave it out. Plan(precision={'reduce': ...}) sets the dtype of gradients."
        )
    if not handler.broadcast_buffers:
        plan = replace(plan, buffers="local")
    if plan.bucket_bytes is None and handler.bucket_cap_mb != 25:  # DDP's own default
        plan = replace(plan, bucket_bytes=handler.bucket_cap_mb << 20)
    return plan


# -- accelerate's configuration file ---------------------------------------------------------------


def plan_from_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    auto: Any = None,
    hidden_size: int | None = None,
) -> Plan:
    """Build the plan of an `accelerate config` file, from its deepspeed or FSDP section.

    Launch with torchrun, which sets numbers of processes and machines, addresses and ports.

    source: the path of a YAML or JSON file, or its contents.
    auto, hidden_size: the values for "auto" in a ds_config file; see Plan.from_ds_config.

    Raises:
        PlanError: names a key that is unknown or not supported.
    """
    if isinstance(source, Mapping):
        config = dict(source)
    else:
        config = dict(load_mapping(Path(source), "accelerate config"))
    for name, value in config.items():
        if name in _UNSUPPORTED and value:
            raise PlanError(f"accelerate config: {name} is not supported. {_UNSUPPORTED[name]}")
        if name not in (*_SECTIONS, *_UNSUPPORTED, *_LAUNCHER):
            known = [*_SECTIONS, *_UNSUPPORTED, *_LAUNCHER]
            raise PlanError(f"accelerate config: {name} is unknown{nearest(str(name), known)}")
    mixed = str(config.get("mixed_precision", "no")).lower()
    if section := config.get("deepspeed_config"):
        return _of_deepspeed(section, mixed, auto, hidden_size)
    if section := config.get("fsdp_config"):
        return with_precision(plan_from_fsdp(section), mixed)
    kind = str(config.get("distributed_type", "NO")).upper()
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise PlanError(
            f"accelerate config: distributed_type = {kind} has no section of its own. Give "
            "deepspeed_config or fsdp_config, or use MULTI_GPU."
        )
    return with_precision(Plan(stage=0), mixed)  # it is DistributedDataParallel


_SECTIONS = (
    "mixed_precision", "deepspeed_config", "fsdp_config", "distributed_type", "dynamo_config",
)  # fmt: skip
_UNSUPPORTED = {
    "megatron_lm_config": "All ranks are data-parallel.",
    "parallelism_config": "All ranks are data-parallel.",
    "fp8_config": "Use mixed_precision: bf16.",
}
_LAUNCHER = (
    *("compute_environment", "num_processes", "num_machines", "machine_rank", "main_process_ip"),
    *("main_process_port", "main_training_function", "rdzv_backend", "same_network", "gpu_ids"),
    *("use_cpu", "debug", "downcast_bf16", "tpu_use_cluster", "tpu_use_sudo", "tpu_env", "fsdp"),
    *("enable_cpu_affinity", "mpirun_config", "ipex_config", "tpu_name", "tpu_zone", "commands"),
    *("command_file", "num_cpu_threads_per_process"),
)
_ZERO = "zero_optimization"
_DEEPSPEED: dict[str, str | None] = {
    "zero_stage": f"{_ZERO}.stage",
    "offload_optimizer_device": f"{_ZERO}.offload_optimizer.device",
    "offload_optimizer_nvme_path": f"{_ZERO}.offload_optimizer.nvme_path",
    "offload_param_device": f"{_ZERO}.offload_param.device",
    "offload_param_nvme_path": f"{_ZERO}.offload_param.nvme_path",
    "gradient_clipping": "gradient_clipping",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    # Models are built on meta by choice, full weights can always be saved, torchrun launches.
    **dict.fromkeys(("zero3_init_flag", "zero3_save_16bit_model", "deepspeed_config_file")),
    **dict.fromkeys(("deepspeed_multinode_launcher", "deepspeed_hostfile")),
    **dict.fromkeys(("deepspeed_exclusion_filter", "deepspeed_inclusion_filter")),
    **dict.fromkeys(("deepspeed_moe_layer_cls_names",)),
}


def _of_deepspeed(section: Mapping[str, Any], mixed: str, auto: Any, hidden: int | None) -> Plan:
    if file := section.get("deepspeed_config_file"):
        return Plan.from_ds_config(file, auto=auto, hidden_size=hidden)
    config: dict[str, Any] = {_ZERO: {}}
    for name, value in section.items():
        if name not in _DEEPSPEED:
            known = nearest(str(name), _DEEPSPEED)
            raise PlanError(f"accelerate config: deepspeed_config.{name} is unknown{known}")
        path = _DEEPSPEED[name]
        if path is None or value in (None, "none", "None"):
            continue
        *inner, last = path.split(".")
        place = config
        for each in inner:
            place = place.setdefault(each, {})
        place[last] = value
    config[_ZERO].setdefault("stage", 2)  # accelerate's default
    if mixed != "no":
        config[mixed] = {"enabled": True}
    return Plan.from_ds_config(config)


def plan_from_fsdp(section: Mapping[str, Any]) -> Plan:
    """Build the plan equivalent to accelerate's or transformers' `fsdp_config`.

    Raises:
        PlanError: names a key that is unknown or not supported.
    """
    config = {str(name).removeprefix("fsdp_"): value for name, value in section.items()}
    fields: dict[str, Any] = {"stage": 3}
    for name, value in config.items():
        if name in _FSDP:
            fields |= _FSDP[name](value)
        elif name not in _SCHEDULED:
            known = nearest(name, [*_FSDP, *_SCHEDULED])
            raise PlanError(f"fsdp_config: {name} is unknown{known}")
    if "offload" in fields and fields["stage"] < 3:  # parameters are whole on the device
        fields["offload"] = {"optimizer": "cpu"}
    return Plan(**fields)


def _stage(value: Any) -> dict[str, Any]:
    name = str(value).lower()
    if name not in _STAGES:
        raise PlanError(
            f"fsdp_config: {value!r} is not a supported sharding strategy. Use one of "
            f"{sorted(_STAGES)}. For hybrid sharding, use Plan(shard_axis_size=<ranks per group>)."
        )
    return {"stage": _STAGES[name]}


# By transformers' and accelerate's names, old and new; FSDP1 numbers its strategies.
_STAGES = {
    "true": 3, "full_shard": 3, "1": 3,
    "false": 2, "shard_grad_op": 2, "2": 2,
    "no_shard": 0, "3": 0,
}  # fmt: skip


def _is_on(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def _offload(value: Any) -> dict[str, Any]:
    return {"offload": {"parameters": "cpu", "optimizer": "cpu"}} if _is_on(value) else {}


def _refuse_xla(value: Any) -> dict[str, Any]:
    if _is_on(value):
        raise PlanError("fsdp_config: xla is not supported. Run on CPUs or CUDA GPUs.")
    return {}


_FSDP: dict[str, Callable[[Any], dict[str, Any]]] = {
    "reshard_after_forward": _stage,
    "sharding_strategy": _stage,
    "offload_params": _offload,
    "cpu_offload": _offload,
    "activation_checkpointing": lambda value: {"activations": "recompute"} if _is_on(value) else {},
    "xla": _refuse_xla,
    "xla_fsdp_v2": _refuse_xla,
}
# Options that zerofx decides itself: it finds units, schedules everything, and can save full
# weights.
_SCHEDULED = (
    *("version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params"),
    *("backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "limit_all_gathers"),
    *("use_orig_params", "sync_module_states", "cpu_ram_efficient_loading", "state_dict_type"),
    *("xla_fsdp_settings", "xla_fsdp_grad_ckpt"),
)
