"""CompiledModule: the nn.Module that a user trains; each signature compiles at its first call."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zerofx.capture.explain import shorten
from zerofx.capture.signature import signature_key
from zerofx.comm.world import World
from zerofx.compat.callers import applied, is_called_by, is_called_by_checkpoint, reducer_of
from zerofx.compat.modules import (
    global_module_hooks,
    hooks_of,
    load_own_state,
    own_buffers,
    share_containers,
)
from zerofx.errors import GradientError, PlanError, ShardError
from zerofx.ir.program import Planned
from zerofx.model.full_state import sharded_state_of, state_of
from zerofx.model.programs import Programs, ProgramTable, load_directory
from zerofx.passes.order import Setting
from zerofx.plan.parts import LossScale
from zerofx.plan.plan import Plan
from zerofx.policy import reduction
from zerofx.runtime.engine import Engine
from zerofx.runtime.loss_scale import LossScaler, ScaleRule
from zerofx.runtime.store.shards import ShardStore

# -- Notice module hooks that come or go after compile: they are part of what a program captured ---


class HookWatch:
    """Tells which hooks a module tree has, at the cost of one comparison a call where it has none.

    Every new hook takes a handle from one counter, so the tree is searched only when that counter
    moved; known hooks are looked at each time, since a removal leaves no trace. Handles are unique
    in a process and a deep copy keeps them, so that equal handles mean equal hooks there too.

    Hooks of all modules (`register_module_forward_hook` and the like) count as each module's; like
    any wrapper, the compiled model itself is one more module that they are called for.
    """

    def __init__(self, model: nn.Module) -> None:
        self._dicts = [hooks for m in model.modules() for hooks in hooks_of(m)]
        self._dicts += global_module_hooks()
        self._seen = -1
        self._occupied: list[dict] = []

    def handles(self) -> tuple[tuple[int, ...], ...]:
        """Return the handles of all hooks, in the order of their calls; () for none."""
        if RemovableHandle.next_id != self._seen:
            self._occupied = [d for d in self._dicts if d]
            self._seen = RemovableHandle.next_id
        if not self._occupied:
            return ()
        return tuple([tuple(d) for d in self._occupied if d])


# -- `to`, `half`, `cuda` and the like: what of them a compiled model can follow -------------------


def check_shards_stay(engine: Engine, fn: Callable[[Tensor], Tensor]) -> None:
    """Refuse a conversion that would give the shards another dtype or device.

    Raises:
        ShardError: `fn` moves or casts a tensor like the shards; the message names both.
    """
    for bucket in engine.layout.buckets:
        before = torch.empty(0, dtype=bucket.dtype, device=engine.world.device)
        after = fn(before)
        if (after.dtype, after.device) != (before.dtype, before.device):
            raise ShardError(
                f"a compiled model holds {before.dtype} shards on {before.device}; moving it "
                f"to {after.dtype} on {after.device} would need another layout: convert the "
                "model before zerofx.compile, or pass device="
            )


def convert_buffers(model: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Give buffers another dtype; a buffer held in several places stays one.

    Raises:
        ShardError: a buffer would move to another device; nothing was converted.
    """
    made: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for key, buffer in own_buffers(module).items():
            if buffer is None:
                continue
            after = fn(torch.empty(0, dtype=buffer.dtype, device=buffer.device))
            if after.device != buffer.device:
                raise ShardError(
                    f"{path or 'the model'}: buffer {key} lies on {buffer.device} and cannot "
                    f"move to {after.device}; pass device= to zerofx.compile"
                )
            if after.dtype != buffer.dtype:
                made.setdefault(id(buffer), fn(buffer))
    for module in model.modules():
        for key, buffer in own_buffers(module).items():
            own_buffers(module)[key] = made.get(id(buffer), buffer)


# -- From a plan's loss scale to the scaler that runs ----------------------------------------------


def make_scaler(plan: Plan, world: World) -> LossScaler | None:
    """Return the scaler that a plan asks for, None where nothing is scaled here."""
    asked = plan.precision.loss_scale
    if not plan.precision.is_scaled:
        return None
    assert isinstance(asked, LossScale)
    if world.other_axes:
        raise PlanError(
            f"Plan(precision='fp16') skips a step whose gradients overflow. The ranks along the "
            f"mesh axes {world.other_axes} would not skip it too, since the model is compiled over "
            "a slice of that mesh. Compute in bf16."
        )
    return LossScaler(rule_of(asked), world.device)


def rule_of(asked: LossScale) -> ScaleRule:
    """Return a plan's loss scale as the runtime, which knows no plans, takes it."""
    return ScaleRule(
        initial=asked.initial,
        growth_interval=asked.growth_interval if asked.dynamic else 0,
        growth=asked.growth,
        backoff=asked.backoff,
        minimum=asked.minimum,
        hysteresis=asked.hysteresis,
    )


# -- CompiledModule: the nn.Module that a user trains; each signature compiles at its first call ---


class CompiledModule(nn.Module):
    """A model over shards. Called as the model was, with the same outputs and training loop.

    Parameters, buffers and submodules are the model's own containers, so that names, `train()`,
    `load_state_dict()` and attribute access are unchanged; only what they hold is sharded.
    """

    def __init__(self, model: nn.Module, setting: Setting, engine: Engine) -> None:
        super().__init__()
        self.__dict__["_model"] = model
        share_containers(self, model)
        self.training = model.training
        # Past __setattr__, which would set what the model calls by the same name.
        self.__dict__["_setting"], self.__dict__["_engine"] = setting, engine
        self.__dict__["_programs"] = ProgramTable(model, setting, engine)
        self.__dict__["_hooks"] = HookWatch(model)

    # -- calls ------------------------------------------------------------------------------
    @torch.compiler.disable  # it is compiled already: torch.compile runs it as it is
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; the first call of each signature compiles it."""
        self._engine.store.check_bindings()
        if wrapper := reducer_of(self._engine.store.params.values()):
            raise self._is_parallel(wrapper)
        self._model.training = self.training
        key = signature_key(self._programs.state, args, kwargs), self._hooks.handles()
        try:
            program = self._programs.find(key, args, kwargs)
        except Exception as error:
            shorten(error)
            raise error  # not a bare raise, which Python 3.10 gives the traceback from before
        return program(args, kwargs)

    def adopt(
        self, program: Planned | str | os.PathLike[str], *, allow_changed_math: bool = False
    ) -> Planned:
        """Run a program, such as an emitted directory edited by hand, in place of the compiled one.

        It takes over the calls of its own signature (the same inputs, parameters and captured
        mathematics, as fingerprint.json says): those compiled already at once, others at their
        first call. What runs is the directory itself; later edits need another `adopt`. Every
        rank must adopt the same program: other collectives than on other ranks raise at the call.

        program: the directory, or a Program from `load_program` or `rewrite`.
        allow_changed_math: as in `load_program`.

        Raises:
            ProgramError: it is broken, or made for other ranks or another layout; nothing changed.
        """
        if not isinstance(program, Planned):
            program = load_directory(program, allow_changed_math)
        return self._programs.adopt(program, allow_changed_math)

    # -- what users ask of it -----------------------------------------------------------------
    @property
    def programs(self) -> list[Planned]:
        """The programs that are ready to run, one per signature, in the order of first calls.

        None before the first call, and at most Plan.max_programs. One that was given up for others
        is the last once its call has come back.
        """
        return Programs(b.program for b in self._programs.bound.values())

    @property
    def loss_scale(self) -> LossScaler | None:
        """The scale of fp16 gradients and how many steps were skipped; None without scaling."""
        return self._engine.gradients.scaler

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sum gradients locally until the first backward outside, which reduces all of the sum.

        At stage 0, `p.grad` is the local sum meanwhile, as under DistributedDataParallel. At
        stage 1 it stands for the sum: it can be zeroed or set to None (by any `zero_grad`), which
        drops the sum, and anything else raises. At stages 2 and 3, and where the optimizer is
        offloaded, whole gradients are never held: there each backward reduces into the shards,
        which is the same sum, and this changes nothing.

        Raises:
            GradientError: the plan updates parameters inside every backward.
        """
        if self._engine.store.updates is not None:
            raise GradientError(
                "no_sync() puts off the reduction of gradients, but Plan(update='in-backward') "
                "updates the parameters inside every backward; use Plan(update='step') to "
                "accumulate"
            )
        gradients, before = self._engine.gradients, self._engine.gradients.no_sync
        gradients.no_sync = reduction.is_put_off(self._engine.layout, self._setting.plan.stage)
        try:
            yield
        finally:
            gradients.no_sync = before

    def refresh(self) -> None:
        """Gather every resident parameter again at the next forward; wait for delayed updates."""
        self._engine.store.settle()
        self._engine.forget_resident()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return names and parameters, after taking in what was put in a parameter's place."""
        if names := applied(self):
            raise self._is_parallel(names[0])
        self._engine.store.settle()
        self._engine.store.check_bindings()
        return super().named_parameters(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load as the model did; updates that are under way come first."""
        self._engine.store.settle()
        found = super().load_state_dict(*args, **kwargs)
        if not found.missing_keys:
            self._engine.store.ledger.half_made = None
        return found

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load what the model itself holds as it does: with its hooks and its own extra state."""
        load_own_state(self, self._model, state_dict, prefix, *args)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return full plain tensors under the model's own names, on the host, on every rank.

        A collective call: every rank must make it. One bucket is gathered at a time. Where
        something lives on NVMe, each value is gathered when it is read (see `LazyState`).

        To torch.distributed.checkpoint (`get_model_state_dict`, or the model given to its `save`
        and `load`) it is `sharded_state_dict()`, so that no rank holds the whole model.
        """
        if is_called_by_checkpoint() and not (args or kwargs):
            return self.sharded_state_dict()
        return state_of(self, *args, **kwargs)

    def sharded_state_dict(self, *, flat: bool = False) -> dict[str, Any]:
        """Return what torch.distributed.checkpoint saves: this rank's shards, and the buffers.

        Tensors share memory with the model, so that `dcp.load` fills it in place. In a folder they
        have the model's own names and shapes: any world size and stage, FSDP2 and plain modules
        load them, and this loads theirs. On one rank or at stage 0 parameters are plain tensors.

        flat: give every parameter as a flat tensor instead, as zerofx 0.1.0 saved it; to load what
            `dcp.save(model.sharded_state_dict())` of that version wrote.
        """
        return sharded_state_of(self, flat)

    # -- what it refuses, by name ---------------------------------------------------------------
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompiledModule:
        """Run `to`, `half`, `cuda` and the like: accepted where they leave the shards as they are.

        Buffers take another dtype, so the next call compiles again; nothing moves.
        """
        check_shards_stay(self._engine, fn)
        convert_buffers(self._model, fn)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ShardError("this model is compiled by zerofx already; drop the call of compile()")

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """What DistributedDataParallel looks for first in a module that it is to wrap."""
        if is_called_by("torch.nn.parallel"):
            raise self._is_parallel("DistributedDataParallel")
        raise AttributeError("_ddp_params_and_buffers_to_ignore")

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """A mark that FullyShardedDataParallel and fully_shard put on what they are to shard."""
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> None:
        raise self._is_parallel("FullyShardedDataParallel (or fully_shard)")

    @property
    def _distribute_module_applied(self) -> bool:
        """A mark by which distribute_module tells what it has distributed already."""
        if is_called_by("torch.distributed.tensor"):
            raise self._is_parallel("distribute_module")
        return False

    def _is_parallel(self, wrapper: str) -> ShardError:
        plan, size = self._setting.plan, self._engine.world.size
        return ShardError(
            f"{wrapper} is applied to a {type(self._model).__name__} that zerofx.compile made "
            f"data-parallel already (stage {plan.stage}, {size} ranks); drop {wrapper}, and train "
            "the compiled model as it is"
        )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters, but not to DataParallel, which would copy them to other GPUs."""
        if is_called_by("torch.nn.parallel.replicate"):
            raise self._is_parallel("DataParallel")
        return super().parameters(recurse)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardError(
            "a compiled model cannot be pickled (it is one rank's part of a running program); "
            "save with zerofx.save(dir, model, optimizer) or torch.save(model.state_dict(), ...)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """Return an independent model over shards of its own; the compiled programs are shared.

        As with any deepcopy of parameters, gradients stay behind: every p.grad is None.
        """
        store = self._engine.store
        for param in store.params.values():
            blank = torch.empty(param.shape, dtype=param.dtype, device="meta")
            memo[id(param)] = nn.Parameter(blank, param.requires_grad)
        model = copy.deepcopy(self._model, memo)
        scaler = make_scaler(self._setting.plan, store.world)
        if self.loss_scale is not None and scaler is not None:
            scaler.load_state_dict(self.loss_scale.state_dict())
        store.ledger.pending.join()
        copied = ShardStore.copy_of(store, model)
        poison, delayed = self._engine.slots.poison, self._setting.plan.offload.delayed
        engine = Engine(copied, scaler, poison, delayed)
        made = CompiledModule(model, self._setting, engine)
        made.__dict__["_programs"] = ProgramTable(model, self._setting, engine, self._programs)
        memo[id(self)] = made
        return made

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the model's own attributes on the model; what was compiled with the old is dropped.

        Programs have the values of attributes baked in, so the next call captures again.
        """
        model = self.__dict__.get("_model")
        if model is None or name in self.__dict__ or hasattr(CompiledModule, name):
            return super().__setattr__(name, value)
        is_new = not (name in model.__dict__ or hasattr(type(model), name))
        if is_new and isinstance(value, (nn.Module, Tensor)):
            return super().__setattr__(name, value)
        setattr(model, name, value)
        if not is_new:
            self._programs.drop()

    def __delattr__(self, name: str) -> None:
        model = self.__dict__["_model"]
        if name in model.__dict__ and name not in self.__dict__:
            return delattr(model, name)
        super().__delattr__(name)

    def __getitem__(self, index: Any) -> Any:
        """Return a part of a model that is a container, such as nn.Sequential."""
        return self._model[index]

    def __len__(self) -> int:
        return len(self._model)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        plan, world = self._setting.plan, self._engine.world
        return f"CompiledModule(stage={plan.stage}, world={world.size}, {self._model!r})"
