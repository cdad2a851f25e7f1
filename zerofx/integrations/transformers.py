"""transformers' Trainer on zerofx: `from zerofx.integrations.transformers import Trainer`.

    trainer = Trainer(model, args, train_dataset=data, plan=zerofx.Plan(stage=3))
    trainer.train(resume_from_checkpoint=True)

It is transformers' own Trainer. Its model is compiled when training or evaluation begins, and its
checkpoints contain a snapshot of `zerofx.save` instead of optimizer.pt. For other trainers there is
a mixin: `class MyTrainer(TrainerMixin, SFTTrainer)`.

The unmodified Trainer accepts a compiled model too. It only cannot save optimizer states, which it
would do on one rank only: on several ranks it requires save_only_model=True.
docs/from-transformers.md lists the arguments and how zerofx treats them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import zerofx
from zerofx.api import PlanLike
from zerofx.errors import ArgumentError, PlanError
from zerofx.hardware import Hardware
from zerofx.integrations import accelerate, deepspeed
from zerofx.model.module import CompiledModule
from zerofx.plan.ds_config import DsConfig, read_ds_config
from zerofx.plan.plan import Plan, as_plan

accelerate.check_version("transformers", transformers.__version__, "5.20", "6")

_SNAPSHOT = "zerofx"  # the folder in a checkpoint


# -- Arguments -------------------------------------------------------------------------------------


@dataclass
class ArgumentsMixin:
    """TrainingArguments with a plan; `deepspeed` and `fsdp` also become plans.

    plan: a file with a zerofx.Plan, or its fields.
    """

    plan: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "A YAML or JSON file, or the fields, of a zerofx.Plan."}
    )

    def __post_init__(self) -> None:
        for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
            if os.environ.get(name, "false").lower() in ("true", "1"):
                raise PlanError(
                    f"{name} is set, so this is `accelerate launch` with a deepspeed or FSDP "
                    "section. Launch with torchrun, and give plan_from_config('config.yaml') of "
                    "zerofx.integrations.accelerate as the plan."
                )
        self.ds_config: Any = getattr(self, "deepspeed", None)
        self.fsdp_plan = _plan_of_fsdp(self)
        self.deepspeed: Any = None
        self.fsdp: Any = None
        given = [self.plan, self.ds_config, self.fsdp_plan]
        if sum(each is not None for each in given) > 1:
            raise PlanError(
                "TrainingArguments has more than one of plan, deepspeed and fsdp. Give one of them."
            )
        super().__post_init__()  # type: ignore[misc]


def _plan_of_fsdp(args: Any) -> Plan | None:
    """Return the plan of `fsdp` and `fsdp_config`, or None without them."""
    switch, section = getattr(args, "fsdp", None), getattr(args, "fsdp_config", None)
    if not switch or str(switch).lower() == "false":
        return None
    if isinstance(section, str):
        section = accelerate.load_mapping(Path(section), "fsdp_config")
    config = {str(name).removeprefix("fsdp_"): value for name, value in (section or {}).items()}
    if str(switch).lower() != "true":  # the old form, "full_shard auto_wrap offload"
        for word in switch.split() if isinstance(switch, str) else map(str, switch):
            if word == "offload":
                config["cpu_offload"] = True
            elif word != "auto_wrap":
                config["reshard_after_forward"] = word
    return accelerate.plan_from_fsdp(config)


@dataclass
class TrainingArguments(ArgumentsMixin, transformers.TrainingArguments):
    """transformers.TrainingArguments with a plan; `deepspeed` and `fsdp` become plans."""


@dataclass
class Seq2SeqTrainingArguments(ArgumentsMixin, transformers.Seq2SeqTrainingArguments):
    """transformers.Seq2SeqTrainingArguments with a plan; see `TrainingArguments`."""


# -- Trainers --------------------------------------------------------------------------------------


class TrainerMixin:
    """Makes a Trainer compile its model with zerofx, and save and load on all ranks.

    plan, hardware: as for zerofx.compile. The plan may be in the arguments instead. The Trainer's
        switches are set in it (`bf16`, `activation_checkpointing`, ...).

    Raises:
        PlanError: an argument is not supported, or contradicts the plan; names it.
    """

    def __init__(
        self: Any,
        *args: Any,
        plan: PlanLike = None,
        hardware: Hardware | str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        given: Any = kwargs.get("args", args[1] if len(args) > 1 else None)
        if given is not None:
            check_arguments(given)
        super().__init__(*args, **kwargs)
        self.hardware = hardware
        self.ds_config = _read_ds_config(self.args, self.model, self.args.max_steps)
        self.plan = self._plan_of_arguments(plan)
        if isinstance(self.model, CompiledModule):
            accelerate.check_compiled(self.model, plan, self.plan)

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """Whether transformers sharded the model and cannot save its optimizer: always false."""
        return False

    @is_distributed_loading_by_transformers.setter
    def is_distributed_loading_by_transformers(self, value: bool) -> None:
        """Ignore the value that a compiled model sets for a Trainer that does not know zerofx."""

    def _plan_of_arguments(self: Any, plan: PlanLike) -> Plan:
        args = self.args
        plans = {
            "plan": plan,
            "args.plan": getattr(args, "plan", None),
            "args.deepspeed": self.ds_config and self.ds_config.plan,
            "args.fsdp": getattr(args, "fsdp_plan", None),
        }
        there = {name: value for name, value in plans.items() if value is not None}
        if len(there) > 1:
            raise PlanError(f"{' and '.join(there)} are given. Give one plan.")
        (found,) = there.values() if there else (None,)
        if found is None and isinstance(self.model, CompiledModule):
            found = self.model._zerofx.plan
        result = accelerate.plan_of(self.accelerator, as_plan(found))
        for name, options in _CHECKPOINTING.items():
            if getattr(args, name, None):
                result = _with_recomputation(result, getattr(args, options) or {})
        if result.update == "in-backward":
            for name, neutral in (("max_grad_norm", 0), ("gradient_accumulation_steps", 1)):
                if getattr(args, name) != neutral:
                    raise PlanError(
                        f"TrainingArguments.{name} = {getattr(args, name)} contradicts "
                        f"Plan(update='in-backward'). Set it to {neutral}, or use update='step'."
                    )
        return result

    # -- the model and its optimizer ------------------------------------------------------------
    def create_optimizer(self: Any, model: Any = None) -> Any:
        """Create the optimizer of a ds_config, if it has one; otherwise the Trainer's own."""
        chosen = self.ds_config and self.ds_config.optimizer
        if self.optimizer is None and chosen:
            params = [p for p in (model or self.model).parameters() if p.requires_grad]
            self.optimizer = deepspeed.make_optimizer(chosen, params)
            return self.optimizer
        return super().create_optimizer(model)  # type: ignore[misc]

    def create_scheduler(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the scheduler of a ds_config, if it has one; otherwise the Trainer's own."""
        found = _read_ds_config(self.args, self.model, num_training_steps)
        if self.lr_scheduler is None and found is not None and found.scheduler is not None:
            inner = getattr(self.optimizer, "optimizer", self.optimizer)
            self.lr_scheduler = deepspeed.make_scheduler(found.scheduler, optimizer or inner)
            self._created_lr_scheduler = True
            return self.lr_scheduler
        return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]

    def _wrap_model(self: Any, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Compile the model where the Trainer would wrap it; its optimizer exists by then."""
        if isinstance(model, CompiledModule):
            return model
        return accelerate.compile_for(
            self.accelerator, model, self.plan, self.optimizer, self.hardware
        )

    # -- checkpoints ----------------------------------------------------------------------------
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the full weights with `save_pretrained`; all ranks call it, rank 0 writes."""
        if not isinstance(self.model, CompiledModule):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        state = zerofx.full_state_dict(self.model, rank0_only=not self.args.save_on_each_node)
        self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        folder = Path(output_dir)
        zerofx.save(folder / _SNAPSHOT, self.model, _inner(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        if not (Path(resume_from_checkpoint) / _SNAPSHOT).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        """Load a checkpoint of this trainer, or of transformers' own."""
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if not (folder / _SNAPSHOT).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        zerofx.load(folder / _SNAPSHOT, self.model, _inner(self.optimizer))
        self.lr_scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))

    def _load_best_model(self: Any) -> None:
        """Load the weights of the best checkpoint, from its snapshot if it has one."""
        snapshot = Path(self.state.best_model_checkpoint) / _SNAPSHOT
        if snapshot.is_dir():
            zerofx.load(snapshot, self.model)
        else:
            super()._load_best_model()  # type: ignore[misc]


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers.Trainer on zerofx: Trainer(model, args, ..., plan=zerofx.Plan(stage=3))."""


class Seq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """transformers.Seq2SeqTrainer on zerofx; see `TrainerMixin`."""


# -- The Trainer's switches ------------------------------------------------------------------------


def check_arguments(args: Any) -> None:
    """Raise a PlanError for the first of the Trainer's arguments that is not supported."""
    for name, is_refused, why in _REFUSED:
        value = getattr(args, name, None)
        if is_refused(value):
            raise PlanError(f"TrainingArguments.{name} = {value!r} is not supported. {why}")


_MOVE = "Take TrainingArguments from zerofx.integrations.transformers, which convert it to a plan."
_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("deepspeed", bool, _MOVE),
    ("fsdp", bool, _MOVE),
    ("bf16_full_eval", bool, "Leave it out: evaluation computes in the plan's precision."),
    ("fp16_full_eval", bool, "Leave it out: evaluation computes in the plan's precision."),
    (
        "auto_find_batch_size",
        bool,
        "A rank that runs out of memory leaves the others waiting. Give "
        "per_device_train_batch_size. `zerofx memory` reports what fits.",
    ),
    ("parallelism_config", bool, "All ranks are data-parallel. See Plan(shard_axis_size=...)."),
    ("debug", lambda v: "underflow_overflow" in map(str, _plain(v)), "Use Plan(debug=True)"),
    ("n_gpu", lambda v: (v or 0) > 1, "Launch one process per GPU with torchrun."),
    (
        "optim",
        lambda v: any(part in str(_plain(v)) for part in ("lomo", "layerwise")),
        "It updates parameters in hooks. Plan(update='in-backward') does that for zerofx.optim.",
    ),
)


_CHECKPOINTING = {
    "activation_checkpointing": "activation_checkpointing_kwargs",
    "gradient_checkpointing": "gradient_checkpointing_kwargs",  # before 5.23
}


def _plain(value: Any) -> Any:
    """Return the value of an enumeration, or the values of a list of them."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return getattr(value, "value", value if value is not None else "")


def _with_recomputation(plan: Plan, options: Mapping[str, Any]) -> Plan:
    """Return a plan that recomputes activations according to `activation_checkpointing`."""
    for name, value in options.items():
        if name == "every_n_layers" and value not in (None, 1):
            raise PlanError(
                f"activation_checkpointing_kwargs.every_n_layers = {value} is not supported. Use "
                "Plan(activations=<the fraction that is kept>), without activation_checkpointing."
            )
    if options.get("offload"):
        plan = replace(plan, offload=replace(plan.offload, activations="cpu"))
    return replace(plan, activations="recompute") if plan.activations == "keep" else plan


def _read_ds_config(args: Any, model: Any, num_training_steps: int) -> DsConfig | None:
    """Read the ds_config of `TrainingArguments(deepspeed=...)`, with "auto" filled in."""
    source = getattr(args, "ds_config", None)
    if source is None:
        return None
    config = getattr(model, "config", None)
    sizes = getattr(config, "hidden_size", None) or getattr(config, "hidden_sizes", None)
    hidden = max(sizes) if isinstance(sizes, (list, tuple)) else sizes
    steps = max(1, num_training_steps)
    found = read_ds_config(source, auto=args, hidden_size=hidden, num_training_steps=steps)
    found.warn()
    return found


# -- Loading and saving models---------------------------------------------------------------------


def from_pretrained(
    kind: Any,
    folder: str | os.PathLike[str],
    plan: PlanLike = None,
    *,
    device: torch.device | str | None = None,
    hardware: Hardware | str | os.PathLike[str] | None = None,
    **options: Any,
) -> Any:
    """Load a pretrained model straight into shards; a collective call.

    The model is built on meta, and each rank reads only its own shards from the files, so that no
    host ever holds the whole model. Weights are kept in fp32, as master weights;
    Plan(precision=...) sets the compute dtype.

    kind: an Auto class (`AutoModelForCausalLM`) or a model's class.
    folder: a directory with config.json and safetensors, as returned by
        huggingface_hub.snapshot_download, with the model's own parameter names.
    options: values to set in the config.

    Raises:
        SnapshotError: the files lack tensors of the model, or contain others; names the tensors.
    """
    if not Path(folder).is_dir():
        raise ArgumentError(
            f"{folder} is not a directory. Give one with config.json and safetensors, such as the "
            "result of huggingface_hub.snapshot_download(name)."
        )
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    with torch.device("meta"):
        model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    compiled: Any = zerofx.compile(model, plan, device=device, weights=folder, hardware=hardware)
    return compiled.eval()


def save_pretrained(model: Any, folder: str | os.PathLike[str]) -> None:
    """Write weights, config and generation config for `from_pretrained`; a collective call.

    Weights are gathered one bucket at a time, with the model's own parameter names, so that no host
    ever holds the whole model. `model.save_pretrained(folder, is_main_process=rank == 0)` works
    too, but needs memory for the whole model on every host.
    """
    if not isinstance(model, CompiledModule):
        raise ArgumentError(
            f"model is a plain {type(model).__name__}. Call model.save_pretrained(folder)."
        )
    zerofx.export(Path(folder), model)
    if model._zerofx.world.rank == 0:
        model.config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
