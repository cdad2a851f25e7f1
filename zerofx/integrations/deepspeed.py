"""DeepSpeed's interface on zerofx: `from zerofx.integrations import deepspeed`.

    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, training_data=data, config="ds_config.json"
    )
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

DeepSpeed itself is not needed. The engine supports the keys that `zerofx.plan.ds_config` lists as
honoured; checkpoints are zerofx snapshots. docs/from-deepspeed.md lists the differences.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import logging
import math
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import zerofx
from zerofx import optim
from zerofx.comm.groups import StartUp
from zerofx.errors import ArgumentError, GradientError, OptimizerError, PlanError, as_sentence
from zerofx.hardware import Hardware
from zerofx.integrations.schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from zerofx.layout.slices import HOW_TO_MARK, marks_of
from zerofx.model.module import CompiledModule
from zerofx.plan.ds_config import Chosen, DsConfig, read_ds_config
from zerofx.plan.plan import Plan

log = logging.getLogger("zerofx")
_ENGINES: list[weakref.ref[DeepSpeedEngine]] = []  # in the same order on all ranks

_SCHEDULES: dict[str, Callable[..., Any]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


# -- Monitors: rank 0 writes the same values that DeepSpeed writes ---------------------------------


Event = tuple[str, float, int]


class _Monitor:
    """Writers of (name, value, samples) events: those that a ds_config enables."""

    def __init__(self, monitors: Mapping[str, Mapping[str, Any]]) -> None:
        self._csv: Path | None = None
        self._board: Any = None
        self._wandb: Any = None
        if options := monitors.get("csv_monitor"):
            self._csv = _folder(options)
            self._csv.mkdir(parents=True, exist_ok=True)
        if options := monitors.get("tensorboard"):
            with _needs("tensorboard"):
                from torch.utils.tensorboard import SummaryWriter
            self._board = SummaryWriter(log_dir=str(_folder(options)))
        if options := monitors.get("wandb"):
            with _needs("wandb"):
                import wandb
            wandb.init(
                project=options.get("project", "deepspeed"), group=options.get("group"),
                entity=options.get("team"),
            )  # fmt: skip
            self._wandb = wandb

    def write_events(self, events: Iterable[Event]) -> None:
        """Write the values of one step."""
        for name, value, samples in events:
            if self._csv is not None:
                path = self._csv / f"{name.replace('/', '_').replace(' ', '_')}.csv"
                is_new = not path.exists()
                with path.open("a", encoding="utf-8", newline="") as file:
                    writer = csv.writer(file)
                    if is_new:
                        writer.writerow(["step", name.rpartition("/")[2]])
                    writer.writerow([samples, value])
            if self._board is not None:
                self._board.add_scalar(name, value, samples)
            if self._wandb is not None:
                self._wandb.log({name: value}, step=samples)
        if self._board is not None:
            self._board.flush()


def _folder(options: Mapping[str, Any]) -> Path:
    return Path(options.get("output_path", "")) / options.get("job_name", "DeepSpeedJobName")


@contextlib.contextmanager
def _needs(package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise PlanError(
            f"ds_config: {package}.enabled = True needs the package {package}, which is not "
            "installed. Install it, or set it to false."
        ) from error


# -- The engine ------------------------------------------------------------------------------------


class DeepSpeedEngine(nn.Module):
    """DeepSpeed's engine over a compiled model: forward, backward and step of micro-batches.

    module: the compiled model.
    global_steps: updates, including skipped ones.
    micro_steps: calls of `step`.
    skipped_steps: updates that were skipped because of fp16 overflows.
    global_samples: samples of all ranks.
    """

    def __init__(
        self,
        module: CompiledModule,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Any,
        config: DsConfig,
        sizes: tuple[int, int, int],
        collate_fn: Callable[..., Any] | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.ds_config, self.collate_fn = config, collate_fn
        self.training_dataloader: Any = None
        own = module._zerofx
        self.device = own.device
        self.world_size = self.dp_world_size = own.world.size
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.global_rank))
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self._train, self._micro, self._accumulation = sizes
        self._boundary: bool | None = None
        self._is_stepping = self._is_applied = self._in_no_sync = False
        self._norm: Tensor | None = None
        self._losses: list[Tensor] = []
        self._num_backwards = 0  # since the last step
        is_first = self.global_rank == 0
        self.monitor = _Monitor(config.monitors) if is_first and config.monitors else None
        _ENGINES[:] = [*(each for each in _ENGINES if each() is not None), weakref.ref(self)]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model if the engine has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    # -- queries of a script -------------------------------------------------------------------
    def train_batch_size(self) -> int:
        """Return the number of samples per update, over all ranks."""
        return self._train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples per forward on one rank."""
        return self._micro

    def gradient_accumulation_steps(self) -> int:
        """Return the number of backwards per update."""
        return self._accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return all three batch sizes."""
        return self._train, self._micro, self._accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per update by changing the number of backwards."""
        of_one = self._micro * self.world_size
        if train_batch_size < of_one or train_batch_size % of_one:
            raise ArgumentError(
                f"train_batch_size = {train_batch_size} is not a multiple of {self._micro} samples "
                f"on {self.world_size} ranks. Give a multiple."
            )
        self._train, self._accumulation = train_batch_size, train_batch_size // of_one

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward, and with them those per update."""
        self._micro = micro_batch_size
        self._train = micro_batch_size * self._accumulation * self.world_size

    def gradient_clipping(self) -> float:
        """Return the norm at which gradients are clipped; 0 means off."""
        return self.ds_config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """Return the stage."""
        return self.module._zerofx.plan.stage

    def zero_optimization(self) -> bool:
        """Return whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def fp16_enabled(self) -> bool:
        """Return whether the model computes in fp16."""
        return self.module._zerofx.plan.precision.compute == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Return whether the model computes in bf16."""
        return self.module._zerofx.plan.precision.compute == "bf16"

    def loss_scale(self) -> float:
        """Return the scale of the next backward; 1 without fp16."""
        scaler = self.module._zerofx.loss_scale
        return 1.0 if scaler is None else scaler.scale

    def steps_per_print(self) -> int | None:
        """Return the number of updates after which rank 0 prints a line."""
        return self.ds_config.steps_per_print

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self._optimizer().param_groups]

    def get_mom(self) -> list[Any]:
        """Return the betas, or the momentum, of each parameter group."""
        groups = self._optimizer().param_groups
        return [group.get("betas", group.get("momentum", 0)) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients before clipping, at the last update."""
        return None if self._norm is None else float(self._norm)

    def was_step_applied(self) -> bool:
        """Return whether the last `step` changed the parameters."""
        return self._is_applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step` is an update."""
        if self._boundary is not None:
            return self._boundary
        if not self.ds_config.is_managed:
            return self._is_stepping
        return (self.micro_steps + 1) % self._accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next backward and `step` end an update, instead of counting."""
        if not self.ds_config.is_managed:
            raise GradientError(
                "set_gradient_accumulation_boundary contradicts managed_gradient_accumulation = "
                "false, under which each step() is a boundary. Leave out the call."
            )
        self._boundary = is_boundary

    def _optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise OptimizerError(
                "the engine has no optimizer. Give initialize(optimizer=...), or an optimizer in "
                "the ds_config."
            )
        return self.optimizer

    # -- a step ---------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        if self.ds_config.autocast:
            with torch.autocast(self.device.type, torch.bfloat16):
                return self.module(*args, **kwargs)
        return self.module(*args, **kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Run the backward of one micro-batch; return the loss divided by the backwards per update.

        Gradients are reduced in the last backward, if the stage permits waiting.
        """
        self._optimizer()
        self._num_backwards += 1
        if self.monitor is not None:
            self._losses.append(loss.detach())
        scaled = loss / self._accumulation if scale_wrt_gas else loss
        is_last = self.is_gradient_accumulation_boundary() or not self.ds_config.is_managed
        waits = self._in_no_sync or not is_last
        with self.module._zerofx.no_sync() if waits else contextlib.nullcontext():
            scaled.backward(retain_graph=retain_graph)
        return scaled

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sum gradients on this rank until a backward outside the block; `step` inside raises."""
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count a micro-batch; at a boundary clip, update, and step the scheduler."""
        if self._in_no_sync:
            raise GradientError(
                "engine.step() was called inside engine.no_sync(). Call it after the block."
            )
        self._optimizer()
        self._is_stepping, self._is_applied = True, False
        if self.is_gradient_accumulation_boundary():
            self._update(lr_kwargs or {})
        self._is_stepping = False
        self.micro_steps += 1

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        optimizer, scaler = self._optimizer(), self.module._zerofx.loss_scale
        skipped = scaler.num_skipped if scaler is not None else 0
        params = [p for group in optimizer.param_groups for p in group["params"]]
        params = [p for p in params if p.grad is not None]
        if params:
            clipping = self.ds_config.gradient_clipping or math.inf
            self._norm = nn.utils.clip_grad_norm_(params, clipping)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._is_applied = scaler is None or scaler.num_skipped == skipped
        self.skipped_steps += not self._is_applied
        if self._is_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        backwards = self._accumulation if self.ds_config.is_managed else self._num_backwards
        self.global_samples += self._micro * self.world_size * backwards
        self._num_backwards = 0
        self._report()

    def _report(self) -> None:
        every = self.ds_config.steps_per_print
        if self.global_rank == 0 and every and self.global_steps % every == 0:
            sys.stderr.write(
                f"zerofx: step={self.global_steps}, skipped={self.skipped_steps}, "
                f"lr={self.get_lr()}, mom={self.get_mom()}\n"
            )
        if self.monitor is None:
            return
        at = self.global_samples
        events: list[Event] = [("Train/Samples/lr", float(self.get_lr()[0]), at)]
        if self._losses:
            mean = float(torch.stack(self._losses).float().mean())
            events.insert(0, ("Train/Samples/train_loss", mean, at))
            self._losses.clear()
        if self.module._zerofx.loss_scale is not None:
            events.append(("Train/Samples/loss_scale", self.loss_scale(), at))
        self.monitor.write_events(events)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.module.zero_grad(set_to_none)

    # -- data -----------------------------------------------------------------------------------
    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return a loader of this rank's micro-batches; ranks share a map-style dataset.

        For route "train", the order is shuffled. Call `loader.sampler.set_epoch(n)` for a different
        order in each epoch.
        """
        is_stream = isinstance(dataset, IterableDataset)
        if data_sampler is None and not is_stream:
            data_sampler = DistributedSampler(
                dataset, self.world_size, self.global_rank, shuffle=route == "train"
            )
        return DataLoader(
            dataset,
            batch_size=batch_size or self._micro,
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda",
            drop_last=self.ds_config.drop_last,
        )

    # -- checkpoints ----------------------------------------------------------------------------
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a snapshot to `save_dir/tag`, and name it in `save_dir/latest`; call on all ranks.

        tag: default global_step<n>.
        client_state: rank 0's; numbers, strings, tensors, containers.
        """
        if exclude_frozen_parameters:
            raise ArgumentError(
                "save_checkpoint(exclude_frozen_parameters=True): a snapshot has all parameters. "
                "Leave it out, or save the trained ones with save_16bit_model."
            )
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        scheduler = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        counts = {each: getattr(self, each) for each in _COUNTS}
        extra = {"engine": counts, "scheduler": scheduler, "client": dict(client_state or {})}
        zerofx.save(Path(save_dir) / name, self.module, self.optimizer, extra)
        if save_latest and self.global_rank == 0:
            being_written = Path(save_dir) / ".latest"
            being_written.write_text(name, encoding="utf-8")
            being_written.replace(Path(save_dir) / "latest")
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of `save_checkpoint`, ours or DeepSpeed's, at any world size and stage.

        This is a collective call.

        Returns:
            The path and the client state; (None, None), with a warning, if there is no `latest`.
        """
        if not load_module_strict or custom_load_fn is not None:
            name = "custom_load_fn" if load_module_strict else "load_module_strict=False"
            raise ArgumentError(
                f"load_checkpoint({name}): a snapshot contains exactly this model. Leave it out. "
                "zerofx.load_weights(strict=False) loads parts of a model."
            )
        latest = Path(load_dir) / "latest"
        if tag is None:
            if not latest.is_file():
                warnings.warn(f"{latest} does not exist, so nothing is loaded.", stacklevel=2)
                return None, None
            tag = latest.read_text(encoding="utf-8").strip()
        path = Path(load_dir) / str(tag)
        with_states = load_optimizer_states and not load_module_only
        extra = zerofx.load(path, self.module, self.optimizer if with_states else None)
        if "global_steps" in extra:  # written by DeepSpeed
            counts = {name: extra.pop(name) for name in _COUNTS if name in extra}
            scheduler = extra.pop("lr_scheduler", None)
            extra = {"engine": counts, "scheduler": scheduler, "client": extra}
        if "engine" not in extra:
            return str(path), extra  # a snapshot of another loop
        if not load_module_only:
            vars(self).update(extra["engine"])
            if load_lr_scheduler_states and self.lr_scheduler is not None and extra["scheduler"]:
                self.lr_scheduler.load_state_dict(extra["scheduler"])
        return str(path), extra["client"]

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the whole weights with `torch.save`, in the dtype that the model computes in."""
        state = zerofx.full_state_dict(self.module)
        if self.global_rank == 0:
            name = self.module._zerofx.plan.precision.compute
            dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name)
            frozen = {n for n, p in self.module.named_parameters() if not p.requires_grad}
            kept = {
                key: value.to(dtype) if dtype and value.is_floating_point() else value
                for key, value in state.items()
                if not (exclude_frozen_parameters and key in frozen)
            }
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(kept, Path(save_dir) / save_filename)
        return True

    save_fp16_model = save_16bit_model


# Not micro_steps: gradients of a partial update are not saved, so the update starts over.
_COUNTS = ("global_steps", "global_samples", "skipped_steps")


# -- initialize ------------------------------------------------------------------------------------


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | DsConfig | None = None,
    mesh_param: Any = None,
    config_params: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    plan: Plan | Mapping[str, Any] | None = None,
    hardware: Hardware | str | os.PathLike[str] | None = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer | None, DataLoader[Any] | None, Any]:
    """Compile a model by a ds_config; return engine, optimizer, data loader and scheduler.

    args: has `deepspeed_config`, the path of the config, if `config` is not given.
    optimizer: an optimizer, or a function of `model_parameters`; replaces the config's.
    model_parameters: the parameters or groups that the config's optimizer updates. All by default.
    training_data: a dataset, for a loader of micro-batches.
    lr_scheduler: a scheduler, or a function of the optimizer; replaces the config's.
    config, config_params: a path, its contents, or the result of `read_ds_config`.
    plan: a Plan that replaces the config's, or fields to set in it: `{"kernels": "aten"}`.
    hardware: as for `zerofx.compile`.
    mpu: Megatron's parallel state; the model is sharded over its data-parallel group. If it slices
        the model over several ranks, slices are marked as docs/from-megatron.md says.
    distributed_port, dist_init_required: ignored; zerofx.compile creates a process group if needed.

    Raises:
        ArgumentError: there is no model or config, or two configs; `mpu` divides the model into
            pipeline stages or sequences, or slices it and no parameter is marked; `mesh_param` is
            given.
        PlanError: names every key of the config that is refused.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is of type {type(model).__name__}. Give initialize(model=...).")
    if mesh_param is not None:
        raise ArgumentError(
            "mesh_param was given, but a ds_config has no sequence axis here. Leave it out, and "
            'divide sequences with zerofx.compile(model, Plan(parallel={"context": 2})).'
        )
    mesh = None if mpu is None else _mesh_of(mpu, model)
    found = _config(args, config, config_params)
    found.warn()
    world_size = dist.get_world_size() if dist.is_initialized() else _from_environment()
    sizes = found.batch.on(world_size if mesh is None else mesh.size())
    if isinstance(plan, Mapping):
        plan = Plan.from_dict({**found.plan.to_dict(), **plan})
    params = model_parameters
    if params is None:
        params = [p for p in model.parameters() if p.requires_grad]
    made: Any = optimizer
    if optimizer is None and found.optimizer is not None:
        made = make_optimizer(found.optimizer, params)
    elif callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        made = optimizer(params)
    compiled = zerofx.compile(
        model, plan or found.plan, optimizer=made, hardware=hardware, mesh=mesh
    )
    if lr_scheduler is None and found.scheduler is not None and made is not None:
        lr_scheduler = make_scheduler(found.scheduler, made)
    elif callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        lr_scheduler = lr_scheduler(made)
    engine = DeepSpeedEngine(compiled, made, lr_scheduler, found, sizes, collate_fn)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, made, engine.training_dataloader, lr_scheduler


def _mesh_of(mpu: Any, model: nn.Module) -> DeviceMesh | None:
    """Return the mesh of the data-parallel group of an mpu object; None for a single process.

    If the mpu slices the model, the mesh is part of one that has the axis of the slices too. All
    ranks make this call.

    Raises:
        ArgumentError: it has no such group, divides the model in another way, or slices a model
            without marks.
    """
    for name, axis in _DIVIDING.items():
        size = getattr(mpu, name, lambda: 1)()
        if size != 1:
            raise ArgumentError(
                f"mpu.{name}() is {size}: the model is divided over {size} ranks in a way that "
                "zerofx does not take from a model. Give a model that is not divided, and let "
                f'zerofx do it: zerofx.compile(model, Plan(parallel={{"{axis}": {size}}})).'
            )
    if not hasattr(mpu, "get_data_parallel_group"):
        raise ArgumentError(
            f"mpu is of type {type(mpu).__name__} and has no get_data_parallel_group(). Give "
            "Megatron's parallel state, or leave mpu out."
        )
    slicing = next((name for name in _SLICES if getattr(mpu, f"{name}_world_size", int)() > 1), "")
    if slicing and not marks_of(model).cuts:
        size = getattr(mpu, f"{slicing}_world_size")()
        raise ArgumentError(
            f"mpu.{slicing}_world_size() is {size}, and no parameter of {type(model).__name__} is "
            f"marked as a slice. {HOW_TO_MARK}."
        )
    if not dist.is_initialized():
        return None
    kind = "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
    data = mpu.get_data_parallel_group()
    if not slicing:
        return DeviceMesh.from_group(data, kind)
    grid = _grid(data, getattr(mpu, f"{slicing}_group")())
    return DeviceMesh(kind, grid, mesh_dim_names=("data", "tensor"))["data"]


def _grid(data: Any, tensor: Any) -> list[list[int]]:
    """Return all ranks as rows of those that share each layer, one row per data rank.

    Raises:
        ArgumentError: the groups of all ranks do not form such a grid; names one.
    """
    mine = dist.get_process_group_ranks(data), dist.get_process_group_ranks(tensor)
    found: list[tuple[list[int], list[int]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    grid = [found[rank][1] for rank in found[0][0]]
    columns = [[row[i] for row in grid] for i in range(len(grid[0]))]
    expected = {
        rank: (column, row) for row in grid for rank, column in zip(row, columns, strict=True)
    }
    for rank, groups in enumerate(found):
        if expected.get(rank) != groups:
            raise ArgumentError(
                f"rank {rank} has the data-parallel group {groups[0]} and the model-parallel group "
                f"{groups[1]} in mpu, and rank 0 has {found[0][0]} and {found[0][1]}. Give an mpu "
                "whose groups are the rows and the columns of one grid of all ranks."
            )
    return grid


# The functions of an mpu object, by the names of Megatron-LM and DeepSpeed, of the ranks that have
# slices of each layer: each name has a group and a world size.
_SLICES = ("get_tensor_model_parallel", "get_slice_parallel", "get_model_parallel")
# How many ranks an mpu object divides the model over in other ways, and the axis of a plan that
# does the same.
_DIVIDING = {
    "get_pipe_parallel_world_size": "pipeline",
    "get_pipeline_model_parallel_world_size": "pipeline",
    "get_context_parallel_world_size": "context",
    "get_sequence_parallel_world_size": "context",
}


def _config(args: Any, config: Any, config_params: Any) -> DsConfig:
    """Return the one config that was given, in one of three places."""
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    there = {name: value for name, value in given.items() if value is not None}
    if len(there) != 1:
        said = f"{' and '.join(there)} are given" if there else "there is no config"
        raise ArgumentError(f"{said}. Give one: initialize(config=...) or --deepspeed_config.")
    (value,) = there.values()
    return value if isinstance(value, DsConfig) else read_ds_config(value)


def _from_environment() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() else 1  # zerofx.compile reports what is wrong with it


def make_optimizer(chosen: Chosen, params: Any) -> torch.optim.Optimizer:
    """Create the optimizer that a ds_config names, over parameters or groups."""
    own = chosen.kind if chosen.kind in optim.__all__ else None
    kind = getattr(optim, own) if own else getattr(torch.optim, chosen.kind)
    return _made(kind, "optimizer", chosen, params)


def make_scheduler(chosen: Chosen, optimizer: torch.optim.Optimizer) -> Any:
    """Create the scheduler that a ds_config names."""
    kind = _SCHEDULES.get(chosen.kind) or getattr(torch.optim.lr_scheduler, chosen.kind)
    return _made(kind, "scheduler", chosen, optimizer)


def _made(kind: Callable[..., Any], section: str, chosen: Chosen, over: Any) -> Any:
    try:
        return kind(over, **chosen.params)
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"ds_config: {section}.params = {dict(chosen.params)!r} do not fit {chosen.kind}: "
            f"{as_sentence(error)} Correct them."
        ) from error


def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
    """Create the default process group from torchrun's variables, if there is none yet."""
    if not dist.is_initialized():
        with StartUp() as start:
            start.initialise(None)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config, and their old names, to a parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name in ("deepspeed", "deepscale"):
        group.add_argument(f"--{name}", action="store_true", help="for the script itself to read")
        group.add_argument(f"--{name}_config", type=str, help="path of a ds_config.json")
    return parser


# -- deepspeed.zero --------------------------------------------------------------------------------


class Init(contextlib.AbstractContextManager[None]):
    """Context for building a model; it does nothing, since `initialize` shards the model at once.

    A model that does not fit the host is built on meta instead: `remote_device="meta"`. Its modules
    are then initialised one by one, by their own `reset_parameters`.
    """

    def __init__(
        self, module: Any = None, remote_device: str | None = None, enabled: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        is_meta = enabled and remote_device == "meta"
        self._device = torch.device("meta") if is_meta else contextlib.nullcontext()

    def __enter__(self) -> None:
        self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._device.__exit__(*error)


@contextlib.contextmanager
def GatheredParameters(
    params: Any,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Make parameters whole inside the block, on all ranks; read them from their modules.

    params: a parameter, several, or a module. Parameters outside an engine's model are whole
        anyway.
    modifier_rank: 0 keeps rank 0's writes; None is for reading.
    """
    if modifier_rank not in (None, 0):
        raise ArgumentError(
            f"GatheredParameters(modifier_rank={modifier_rank}): zerofx keeps the values that rank "
            "0 writes. Give 0, or None to read."
        )
    modules = _modules_of(params) if enabled else []
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(zerofx.whole(module, write_back=modifier_rank == 0))
        yield


def _modules_of(params: Any) -> list[nn.Module]:
    """Return the smallest modules that hold parameters: one per model."""
    if isinstance(params, nn.Module):
        return [params]
    wanted = {id(p) for p in ([params] if isinstance(params, Tensor) else params)}
    found: list[nn.Module] = []
    for engine in [each for ref in _ENGINES if (each := ref()) is not None]:
        held = [n for n, p in engine.module.named_parameters() if id(p) in wanted]
        if held:
            shared = os.path.commonpath([f"/{name.replace('.', '/')}" for name in held])
            owner = shared if len(held) > 1 else os.path.dirname(shared)
            found.append(engine.module.get_submodule(owner.strip("/").replace("/", ".")))
    return found


zero = SimpleNamespace(Init=Init, GatheredParameters=GatheredParameters)
