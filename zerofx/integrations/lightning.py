"""Lightning strategies on zerofx: `strategy="zerofx"` for its Trainer and for Fabric.

    import zerofx.integrations.lightning  # registers both names

    trainer = lightning.Trainer(strategy="zerofx", devices=8)  # stage 3
    trainer = lightning.Trainer(strategy=ZeroFXStrategy(plan={"stage": 2}), devices=8)
    fabric = lightning.Fabric(strategy=ZeroFXFabricStrategy(plan="plan.yaml"), devices=8)

The module stays as it is: `training_step`, `self.log`, metrics and hooks run as written. Each call
of the module, or of a part of it that has parameters, runs a program. Launchers and the process
group are those of Lightning's DDP. docs/lightning.md lists the differences.
"""

from __future__ import annotations

import importlib.metadata
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

import zerofx
from zerofx.api import PlanLike
from zerofx.errors import ArgumentError, OptimizerError, PlanError, SnapshotError
from zerofx.hardware import Hardware
from zerofx.model.module import CompiledModule
from zerofx.plan.plan import as_plan
from zerofx.tools.meter import Meter

_OLDEST = (2, 6)


def _check_version() -> None:
    """Raise unless Lightning is installed, in a version that this file supports.

    Raises:
        ImportError: names the installed version, and what to install.
    """
    wanted = ".".join(map(str, _OLDEST))
    try:
        version = importlib.metadata.version("lightning")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            "zerofx.integrations.lightning needs the package lightning, which is not installed. "
            f"Run pip install 'lightning>={wanted}'. (pytorch_lightning is a different package. "
            "Import lightning.pytorch instead.)."
        ) from None
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ImportError(
            f"lightning {version} is installed. zerofx.integrations.lightning needs {wanted} or "
            f"newer. Run pip install 'lightning>={wanted}'."
        )


_check_version()

from lightning.fabric.strategies import (  # noqa: E402
    STRATEGY_REGISTRY,
)
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy  # noqa: E402
from lightning.fabric.strategies.strategy import _BackwardSyncControl  # noqa: E402
from lightning.pytorch import Callback, Trainer  # noqa: E402
from lightning.pytorch.plugins.io import TorchCheckpointIO  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402
from lightning.pytorch.utilities.data import extract_batch_size  # noqa: E402
from torchmetrics import Metric  # noqa: E402

# -- Shared by both strategies----------------------------------------------------------------------


def with_precision(plan: zerofx.Plan, plugin: Any) -> zerofx.Plan:
    """Return the plan that matches Lightning's precision.

    "bf16-mixed" and "16-mixed": parameters are gathered in that dtype too, while shards and
    optimizer states stay fp32, as under Lightning's FSDP. Its autocast stays around each step, and
    for fp16 its GradScaler. The "true" formats convert the module before it is compiled.

    Raises:
        PlanError: the plan has another precision, or zerofx does not support Lightning's.
    """
    name: Any = getattr(plugin, "precision", None)
    chosen = plan.precision
    wanted = {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(name, "fp32")
    if name not in ("32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"):
        raise PlanError(
            f"precision {name!r} ({type(plugin).__name__}) is not supported by the zerofx "
            "strategy. Use '32-true', '64-true', 'bf16-mixed', 'bf16-true', '16-mixed' or "
            "'16-true'."
        )
    if chosen.compute not in ("fp32", wanted) and name != "32-true":
        raise PlanError(
            f"precision={name!r} contradicts Plan(precision=...), which computes in "
            f"{chosen.compute}. Give one of them."
        )
    if name == "bf16-mixed":
        return replace(plan, precision=replace(chosen, compute="bf16"))
    if name == "16-mixed":
        if chosen.loss_scale not in (None, "external"):
            raise PlanError(
                "precision='16-mixed' scales the loss, and Plan.precision.loss_scale = "
                f"{chosen.loss_scale!r} would scale it again. Give loss_scale='external', or leave "
                "out precision='16-mixed'."
            )
        return replace(plan, precision=replace(chosen, compute="fp16", loss_scale="external"))
    return plan


class _Former:
    """The parameters that modules had before they were compiled, while something refers to them."""

    def __init__(self) -> None:
        self._params: list[tuple[weakref.ref[nn.Parameter], str]] = []

    def compile(
        self, module: nn.Module, plan: zerofx.Plan, optimizers: list[Optimizer] | None = None,
        **options: Any,
    ) -> CompiledModule:  # fmt: skip
        """Compile a module, and remember its parameters."""
        before = [(weakref.ref(p), name) for name, p in module.named_parameters()]
        for child in module.modules():
            if isinstance(child, Metric):  # its states are neither parameters nor buffers
                child.to(options["device"])
        compiled = zerofx.compile(module, plan, optimizer=optimizers, **options)
        kept = {id(p) for p in compiled.parameters()}
        self._params += [(ref, name) for ref, name in before if id(ref()) not in kept]
        return compiled

    def check(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise if an optimizer has one of them, because its steps would have no effect.

        Raises:
            OptimizerError: names the optimizer and the parameter.
        """
        held = {id(p): name for ref, name in self._params if (p := ref()) is not None}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if (name := held.get(id(param))) is not None:
                        raise OptimizerError(
                            f"{type(optimizer).__name__} still refers to the parameter {name} of "
                            "the module before it was compiled, so step() would have no effect. "
                            "Build it in configure_optimizers, or after fabric.setup_module."
                        )


def _empty_init(device: torch.device, empty_init: bool | None) -> AbstractContextManager[Any]:
    """Return the context for building a module: on meta if its values come from elsewhere."""
    return torch.device("meta") if empty_init else device


# -- Trainer ---------------------------------------------------------------------------------------


class ZeroFXStrategy(DDPStrategy):
    """Trains a LightningModule with zerofx: `Trainer(strategy=ZeroFXStrategy(plan=...))`.

    The module is compiled after `configure_model`, before `configure_optimizers`. A checkpoint is a
    folder, a snapshot of `zerofx.save`, which can be resumed at any world size and stage. Files of
    other strategies can be loaded too.

    plan: as for `zerofx.compile`. Default: stage 3.
    hardware: as for `zerofx.compile`.
    state_dict_type: "full" makes rank 0 write one file, as DDP does, with all values in its memory.
    others: as for Lightning's DDPStrategy.
    """

    strategy_name = "zerofx"

    def __init__(
        self,
        plan: PlanLike = None,
        hardware: Hardware | str | os.PathLike[str] | None = None,
        state_dict_type: str = "sharded",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices,
            cluster_environment=cluster_environment, checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin, process_group_backend=process_group_backend,
            timeout=timeout,
        )  # fmt: skip
        if state_dict_type not in ("sharded", "full"):
            raise ArgumentError(
                f"state_dict_type = {state_dict_type!r} is unknown. Give 'sharded' (a folder) or "
                "'full' (a file)."
            )
        self._plan, self._hardware = as_plan(plan), hardware
        self._state_dict_type = state_dict_type
        self._former = _Former()
        # By load_checkpoint: the snapshot had everything that Lightning restores.
        self._is_loaded = False

    # -- setup --------------------------------------------------------------------------------
    def setup(self, trainer: Trainer) -> None:
        """Compile the module, and create its optimizers over the shards."""
        self._check(trainer)
        self.accelerator.setup(trainer)
        module = self.precision_plugin.convert_module(self.lightning_module)
        if not isinstance(module, CompiledModule):
            plan = with_precision(self._plan, self.precision_plugin)
            module = self._former.compile(
                module, plan, device=self.root_device, hardware=self._hardware
            )
            module.to(self.root_device)  # nothing is moved: this sets `module.device`
        self.model = module
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._former.check(self.optimizers)
        self.setup_precision_plugin()

    def _check(self, trainer: Trainer) -> None:
        """Raise if a switch of the Trainer is not supported.

        Raises:
            ArgumentError: names it.
        """
        module, is_file = self.lightning_module, self._state_dict_type == "full"
        if not is_file and not isinstance(self.checkpoint_io, TorchCheckpointIO):
            raise ArgumentError(
                f"{type(self.checkpoint_io).__name__} writes checkpoints that are files. Leave it "
                "out, or give ZeroFXStrategy(state_dict_type='full')."
            )
        if self._layer_sync is not None:
            raise ArgumentError(
                "Trainer(sync_batchnorm=True) is not supported: zerofx captures no SyncBatchNorm. "
                "Leave it out. The statistics of batch norms are then those of rank 0, as under "
                "DDP."
            )
        if getattr(module, "_compiler_ctx", None) is not None:
            raise ArgumentError(
                f"{type(module).__name__} was given to torch.compile, but zerofx compiles it. Give "
                "the Trainer the module itself."
            )

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Sum gradients of micro-batches; the first backward outside reduces the sum."""
        return self.model._zerofx.no_sync()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build on meta if `empty_init`, so that no rank ever has the whole module."""
        device = _empty_init(self.root_device, empty_init)
        with device, self.precision_plugin.tensor_init_context():
            yield

    def teardown(self) -> None:
        """Leave the module on its device, because shards do not move."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- checkpoints ----------------------------------------------------------------------------
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing, as `save_checkpoint` saves shards; if "full", all values on rank 0."""
        if self._state_dict_type == "full":
            return zerofx.full_state_dict(self.model)
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return nothing, like `lightning_module_state_dict`."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self._state_dict_type == "full":
            return zerofx.full_optimizer_state_dict(self.model, optimizer)
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:  # fmt: skip
        """Save a snapshot, or a file if "full"; call on all ranks."""
        if self._state_dict_type == "full":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        _refuse("storage_options", storage_options)
        optimizers = self.optimizers if "optimizer_states" in checkpoint else None
        zerofx.save(filepath, self.model, optimizers, {_CHECKPOINT: checkpoint})

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a snapshot into module and optimizers, or read a file of another strategy."""
        self._is_loaded = os.path.isdir(checkpoint_path)
        if not self._is_loaded:
            return super().load_checkpoint(checkpoint_path, weights_only)
        is_fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        found = zerofx.load(checkpoint_path, self.model, self.optimizers if is_fitting else None)
        if _CHECKPOINT not in found:
            raise SnapshotError(
                f"{checkpoint_path} was not saved by Lightning's Trainer, so the state of its "
                "loops is unknown. Load it with zerofx.load in on_fit_start, without ckpt_path."
            )
        return found[_CHECKPOINT]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Cut a file's values to the shards; values of a snapshot are already loaded."""
        if not self._is_loaded:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Cut a file's states to the shards; states of a snapshot are already loaded."""
        if not self._is_loaded:
            states = checkpoint["optimizer_states"]
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("zerofx", cls, description="ZeRO by zerofx, stage 3")


_CHECKPOINT = "lightning"  # the key in a snapshot's `extra` of the Trainer's own values


def _refuse(name: str, value: object) -> None:
    if value is not None:
        raise ArgumentError(
            f"{name} is only for checkpoints that are files, and the zerofx strategy saves a "
            "folder. Leave it out."
        )


# -- Fabric ----------------------------------------------------------------------------------------


class ZeroFXFabricStrategy(FabricDDPStrategy):
    """Trains modules with zerofx in a custom loop: `Fabric(strategy=ZeroFXFabricStrategy())`.

    `fabric.setup(module, optimizer)` compiles the module, and makes the optimizer step its shards.
    `fabric.save` writes a folder, a snapshot of `zerofx.save`, of one module, its optimizers and
    other values. `fabric.load` reads it at any world size and stage, and also reads files of other
    strategies. `fabric.to_device` moves no module, because `setup` places its shards.

    plan, hardware: as for `zerofx.compile`. Default: stage 3.
    others: as for Lightning's DDPStrategy.
    """

    def __init__(
        self,
        plan: PlanLike = None,
        hardware: Hardware | str | os.PathLike[str] | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices,
            cluster_environment=cluster_environment, checkpoint_io=checkpoint_io,
            precision=precision, process_group_backend=process_group_backend, timeout=timeout,
        )  # fmt: skip
        self._plan, self._hardware = as_plan(plan), hardware
        self._backward_sync_control = _NoSync()
        self._former = _Former()

    # -- setup --------------------------------------------------------------------------------
    def setup_module(self, module: nn.Module) -> CompiledModule:
        """Compile a module; build its optimizers over the result."""
        return self.setup_module_and_optimizers(module, [])[0]

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[CompiledModule, list[Optimizer], Any]:
        """Compile a module, and make its optimizers step the shards."""
        plan = with_precision(self._plan, self.precision)
        compiled = self._former.compile(
            module, plan, list(optimizers) or None, device=self.root_device, hardware=self._hardware
        )
        return compiled, list(optimizers), scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer that steps shards.

        Raises:
            OptimizerError: it was built before its module was set up.
        """
        self._former.check([optimizer])
        return optimizer

    def module_to_device(self, module: nn.Module) -> None:
        """Move nothing, because `setup_module` places the shards."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Build on meta if `empty_init`, so that no rank ever has the whole module."""
        stack = ExitStack()
        stack.enter_context(_empty_init(self.root_device, empty_init))
        stack.enter_context(self.precision.module_init_context())
        return stack

    # -- checkpoints ----------------------------------------------------------------------------
    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save the compiled module of `state`, its optimizers, and all other values; on all ranks.

        Raises:
            ArgumentError: there are several compiled modules, or `filter` or `storage_options` is
                given.
        """
        _refuse("storage_options", storage_options)
        _refuse("filter", filter or None)
        parts = _Parts(state)
        zerofx.save(path, parts.module, parts.optimizers or None, parts.others())

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of `save_checkpoint`, or a file of another strategy, into `state`.

        Returns:
            The saved values that are not in `state`.
        """
        if not os.path.isdir(path):
            return super().load_checkpoint(path, state, strict, weights_only)
        if isinstance(state, CompiledModule):
            return zerofx.load(path, state)
        if not isinstance(state, Mapping) or not state:
            raise ArgumentError(
                f"fabric.load of {os.fspath(path)}, a snapshot, needs the state that was saved: "
                'fabric.load(path, {"model": model, "optimizer": optimizer}).'
            )
        parts = _Parts(state)
        return parts.fill(zerofx.load(path, parts.module, parts.optimizers or None), strict)


class _NoSync(_BackwardSyncControl):
    def no_backward_sync(
        self, module: CompiledModule, enabled: bool
    ) -> AbstractContextManager[Any]:
        """Sum gradients of micro-batches; the first backward outside reduces the sum."""
        return module._zerofx.no_sync() if enabled else nullcontext()


class _Parts:
    """The contents of a Fabric state: a compiled module, optimizers over its shards, other values.

    Raises:
        ArgumentError: it holds several compiled modules, or none.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        modules = {key: v for key, v in state.items() if isinstance(v, CompiledModule)}
        if len(modules) != 1:
            names = ", ".join(map(repr, modules)) or "none"
            raise ArgumentError(
                f"the state has {len(modules)} modules that were set up ({names}). Give one, with "
                "its optimizers, and save and load each in a folder of its own."
            )
        ((self._key, self.module),) = modules.items()
        held = {id(p) for p in self.module.parameters()}
        self._optimizers = {
            key: value
            for key, value in state.items()
            if isinstance(value, Optimizer)
            and any(id(p) in held for group in value.param_groups for p in group["params"])
        }
        self.optimizers = list(self._optimizers.values())
        known = {self._key, *self._optimizers}
        self._rest = {key: value for key, value in state.items() if key not in known}

    def others(self) -> dict[str, Any]:
        """Return all other values as they are saved."""
        return {k: v.state_dict() if _is_stateful(v) else v for k, v in self._rest.items()}

    def fill(self, found: dict[str, Any], strict: bool) -> dict[str, Any]:
        """Put saved values into the state; return those that are not in it.

        Raises:
            KeyError: a key of the state was not saved, and `strict` is set.
        """
        if strict and (missing := [key for key in self._rest if key not in found]):
            raise KeyError(
                f"the state's key {missing[0]!r} is not in the checkpoint. Leave it out, or give "
                "strict=False."
            )
        for key, value in self._rest.items():
            if key not in found:
                continue
            if _is_stateful(value):
                value.load_state_dict(found.pop(key))
            else:
                self._state[key] = found.pop(key)  # type: ignore[index]
        return found


def _is_stateful(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


# -- Live metrics ----------------------------------------------------------------------------------


class LightningMeter(Callback):
    """Sends the metrics of `zerofx.meter` to the Trainer's loggers: `Trainer(callbacks=[...])`.

    They are means since the last time, logged every `log_every_n_steps` steps, for TensorBoard,
    W&B, CSV or any other Lightning logger.

    hardware: gives the peak rate for MFU; without it there is no MFU.
    samples, tokens: functions that count those of a batch. By default Lightning's count, and the
        size of `input_ids`.
    """

    def __init__(
        self,
        hardware: Hardware | str | os.PathLike[str] | None = None,
        samples: Callable[[Any], int] | None = None,
        tokens: Callable[[Any], int] | None = None,
    ) -> None:
        self._hardware = hardware
        self._of_batch = samples or extract_batch_size, tokens or _input_ids
        self._meter: Meter | None = None
        self._logged = self._samples = self._tokens = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start counting."""
        compiled = (each for each in pl_module.modules() if isinstance(each, CompiledModule))
        self._meter = Meter(next(compiled, pl_module), self._hardware)
        self._logged, self._samples, self._tokens = trainer.global_step, 0, 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a batch, and log after each `log_every_n_steps`-th update."""
        assert self._meter is not None
        samples, tokens = self._of_batch
        self._samples += samples(batch)
        self._tokens += tokens(batch)
        if trainer.global_step - self._logged >= trainer.log_every_n_steps:
            self._logged = trainer.global_step
            numbers = self._meter.step(samples=self._samples, tokens=self._tokens)
            self._samples = self._tokens = 0
            for logger in trainer.loggers:
                logger.log_metrics(self._meter.loggable(numbers), step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Stop counting."""
        if self._meter is not None:
            self._meter.close()
            self._meter = None


def _input_ids(batch: Any) -> int:
    """Return the number of tokens of a batch made by transformers' collators, else 0."""
    return batch["input_ids"].numel() if isinstance(batch, Mapping) and "input_ids" in batch else 0


ZeroFXStrategy.register_strategies(StrategyRegistry)
STRATEGY_REGISTRY.register("zerofx", ZeroFXFabricStrategy, description="ZeRO by zerofx, stage 3")
