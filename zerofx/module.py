"""CompiledModule: the nn.Module that a user trains; each signature compiles at its first call."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zerofx.capture import capture
from zerofx.capture.model_state import ModelState
from zerofx.capture.signature import Signature, describe_difference, signature_key
from zerofx.codegen.emit import fingerprint, render, write
from zerofx.codegen.load import load
from zerofx.codegen.load_fit import check_fits
from zerofx.errors import CaptureError, ShardError
from zerofx.hooks import HookWatch
from zerofx.ir.program import Program
from zerofx.ir.verify import verify
from zerofx.loading import bind, forward_slots
from zerofx.passes.pipeline import Setting, run
from zerofx.plan import as_plan
from zerofx.running import Bound
from zerofx.runtime.engine import Engine
from zerofx.runtime.regions import cache_dir, prepare_regions
from zerofx.runtime.shard_state import flat_state, full_state
from zerofx.runtime.shards import ShardStore

log = logging.getLogger("zerofx")
PROGRAM_LIMIT = 16
_Key = tuple[Signature, tuple[tuple[int, ...], ...]]  # the call, the handles of the hooks


class Programs(list[Program]):
    """The programs of a model; says why there is none yet."""

    def __getitem__(self, index: Any) -> Any:
        if not self:
            raise IndexError("no program yet: one is compiled at the first call of each signature")
        return super().__getitem__(index)


class CompiledModule(nn.Module):
    """A model over shards. Called as the model was, with the same outputs and training loop.

    Parameters, buffers and submodules are the model's own containers, so that names, `train()`,
    `load_state_dict()` and attribute access are unchanged; only what they hold is sharded.
    """

    def __init__(self, model: nn.Module, setting: Setting, engine: Engine) -> None:
        super().__init__()
        self.__dict__["_model"] = model
        for container in ("_parameters", "_buffers", "_modules"):
            self.__dict__[container] = model.__dict__[container]
        self.training = model.training
        self.__dict__["_non_persistent_buffers_set"] = model._non_persistent_buffers_set
        self._setting, self._engine = setting, engine
        self._state = ModelState(model)
        self._hooks = HookWatch(model)
        self._bound: dict[_Key, Bound] = {}
        self._known: dict[_Key, tuple[Program, Path]] = {}  # compiled by a model this is a copy of
        self._adopted: dict[str, Program] = {}  # signature -> what runs instead

    # -- calls ------------------------------------------------------------------------------
    @torch.compiler.disable  # it is compiled already: torch.compile runs it as it is
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; the first call of each signature compiles it."""
        self._engine.store.check_bindings()
        self._model.training = self.training
        key = signature_key(self._state, args, kwargs), self._hooks.handles()
        bound = self._bound.get(key)
        if bound is None:
            with self._engine.world.busy(f"compiling {type(self._model).__name__}"):
                bound = self._bound[key] = self._compile(key, args, kwargs)
        return bound(args, kwargs)

    def _compile(self, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        if key in self._known:
            return self._bind(*self._known[key])
        self._check_limit(key)
        plan = self._setting.plan
        prepare_regions(plan.kernels, self._engine.world.device)
        program = capture(
            self._model,
            args,
            kwargs,
            differentiate=plan.differentiate,
            outputs=plan.outputs,
            units=plan.units,
            device=self._engine.world.device,
        )
        program = run(program, self._setting)
        if program.signature in self._adopted:
            program = self._instead_of(program)
        directory = program.directory or _write(program)
        log.info("%s: program %s for world %d", program.model_name, directory, program.world_size)
        self._known[key] = program, directory
        return self._bind(program, directory)

    def adopt(
        self, program: Program | str | os.PathLike[str], *, allow_changed_math: bool = False
    ) -> Program:
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
        if isinstance(program, Program):
            program = replace(program, reference=None) if allow_changed_math else program
            verify(program)
        else:
            program = load_directory(program, allow_changed_math)
        check_fits(program, self._engine.layout, self._engine.world.size)
        self._adopted[program.signature] = program
        for key, (compiled, _) in list(self._known.items()):
            if compiled.signature == program.signature:
                mine = self._instead_of(compiled)
                self._known[key] = mine, mine.directory or _write(mine)
                self._bound.pop(key, None)  # bound anew by its next call
        return program

    def _instead_of(self, compiled: Program) -> Program:
        """Return the adopted program, called as the compiled one is."""
        return replace(self._adopted[compiled.signature], calling=compiled.calling)

    def _check_limit(self, key: _Key) -> None:
        if len(self._bound) < PROGRAM_LIMIT:
            return
        last = next(reversed(self._bound))
        raise CaptureError(
            f"{type(self._model).__name__} would need more than {PROGRAM_LIMIT} programs; what "
            f"varies: {describe_difference(key[0], last[0], self._state)}; pad it to a few values"
        )

    def _bind(self, program: Program, directory: Path) -> Bound:
        """Load an emitted directory and tie it to this model's shards and buffers."""
        self._engine.reserve(program.slots.get("bytes", []), forward_slots(program))
        return Bound(program, bind(program, directory, self._engine, self._buffers_of(program)))

    def _buffers_of(self, program: Program) -> Callable[[], dict[str, Tensor]]:
        owners = []
        for name in program.buffers:
            path, _, key = name.rpartition(".")
            owners.append((name, self._model.get_submodule(path)._buffers, key))
        return lambda: {name: held[key] for name, held, key in owners}

    # -- what users ask of it -----------------------------------------------------------------
    @property
    def programs(self) -> list[Program]:
        """One Program a signature, in the order of first calls; none before the first."""
        return Programs(b.program for b in self._bound.values())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sum gradients locally until the first backward outside, which reduces all of the sum.

        At stage 0, `p.grad` is the local sum meanwhile, as under DistributedDataParallel. At
        stage 1 it stands for the sum: it can be zeroed or set to None (by any `zero_grad`), which
        drops the sum, and anything else raises. At stages 2 and 3 whole gradients are never held:
        there each backward reduces into the shards, which is the same sum, and this changes
        nothing.
        """
        engine, before = self._engine, self._engine.no_sync
        engine.no_sync = self._setting.plan.stage <= 1 and engine.world.size > 1
        try:
            yield
        finally:
            engine.no_sync = before

    def refresh(self) -> None:
        """Gather every resident parameter anew at the next forward."""
        self._engine.forget_resident()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters, after taking in what was put in a parameter's place."""
        self._engine.store.check_bindings()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return full plain tensors under the model's own names, on the host, on every rank.

        A collective call: every rank must make it. One bucket is gathered at a time.
        """
        keep_vars = kwargs.pop("keep_vars", False)
        if keep_vars:
            raise ShardError("state_dict(keep_vars=True): full tensors are copies; leave it out")
        return self._named(self._model.state_dict(*args, keep_vars=True, **kwargs), full_state)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return what torch.distributed.checkpoint saves: this rank's pieces, and the buffers."""
        return dict(self._named(self._model.state_dict(keep_vars=True), flat_state))

    def _named(self, state: Any, values: Callable[[ShardStore], dict[str, Any]]) -> Any:
        """Put `values` (by canonical name) in place of the parameters in a state dict."""
        found = values(self._engine.store)
        names = {id(p): name for name, p in self._engine.store.params.items()}
        for key, value in state.items():
            if id(value) in names:
                state[key] = found[names[id(value)]]
            elif isinstance(value, Tensor):
                state[key] = value.detach().cpu()
        return state

    # -- what it refuses, by name ---------------------------------------------------------------
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompiledModule:
        """Run `to`, `half`, `cuda` and the like: accepted where they leave the shards as they are.

        Buffers take another dtype, upon which the next call compiles anew; nothing moves.
        """
        for bucket in self._engine.layout.buckets:
            before = torch.empty(0, dtype=bucket.dtype, device=self._engine.world.device)
            after = fn(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                raise ShardError(
                    f"a compiled model holds {before.dtype} shards on {before.device}; moving it "
                    f"to {after.dtype} on {after.device} would need another layout: convert the "
                    "model before zerofx.compile, or pass device="
                )
        self._convert_buffers(fn)
        return self

    def _convert_buffers(self, fn: Callable[[Tensor], Tensor]) -> None:
        made: dict[int, Tensor] = {}
        for path, module in self._model.named_modules():
            for key, buffer in module._buffers.items():
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
        for module in self._model.modules():
            for key, buffer in module._buffers.items():
                module._buffers[key] = made.get(id(buffer), buffer)

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ShardError("this model is compiled by zerofx already; drop the call of compile()")

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
        made = CompiledModule(model, self._setting, Engine(ShardStore.copy_of(store, model)))
        made._known, made._adopted = dict(self._known), dict(self._adopted)
        memo[id(self)] = made
        return made

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the model's own attributes on the model; what was compiled with the old is dropped.

        Programs have the values of attributes baked in, so the next call captures anew.
        """
        model = self.__dict__.get("_model")
        if model is None or name in self.__dict__ or hasattr(CompiledModule, name):
            return super().__setattr__(name, value)
        if not (name in model.__dict__ or hasattr(type(model), name)):
            return super().__setattr__(name, value)
        setattr(model, name, value)
        self._bound.clear()
        self._known.clear()

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


def _write(program: Program) -> Path:
    files = render(program)
    return write(files, cache_dir() / "programs" / fingerprint(files))


def load_directory(directory: str | os.PathLike[str], allow_changed_math: bool = False) -> Program:
    """Load an emitted directory with the plan that lies in it (`zerofx.load_program`)."""
    path = Path(directory) / "plan.yaml"
    return load(directory, as_plan(path) if path.is_file() else None, allow_changed_math)


def full_state_dict(model: CompiledModule, rank0_only: bool = True) -> OrderedDict[str, Any]:
    """Return the model's full state on rank 0 (empty elsewhere), or on every rank.

    A collective call: every rank must make it.
    """
    state = model._model.state_dict(keep_vars=True)
    world = model._engine.world
    if rank0_only and world.rank != 0:
        full_state(model._engine.store, rank0_only=True)
        return OrderedDict()
    found: OrderedDict[str, Any] = model._named(
        state, lambda store: full_state(store, rank0_only=rank0_only)
    )
    return found
