"""CompiledModule: the user's own model, run by programs; each signature compiles at its first call.

`zerofx.compile` returns the same object that it was given, and makes its class a subclass of the
user's own, as FSDP2 does. So `isinstance`, the signature of `forward`, methods such as `generate`
or `save_pretrained`, indexing, and everything else that a library expects of a model work as
before. A method that calls `self(...)` runs the programs. A wrapper would have to imitate all of
that, name by name.

zerofx keeps its state in one object, in one attribute of the model (`Namespace`). The user's code
runs at capture only, while the model has its original class (`zerofx.capture.original`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NoReturn, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from zerofx.capture.original import MODEL, SLOT, original, set_class
from zerofx.compat.callers import (
    applied,
    asking,
    is_called_by,
    is_called_by_checkpoint,
    is_called_to_generate,
    saving_state,
)
from zerofx.compat.modules import (
    Entries,
    call_entries,
    own_buffers,
    own_children,
    own_parameters,
    put_call_entries,
)
from zerofx.errors import ArgumentError, PlanError, ShardError, as_sentence
from zerofx.ir.program import Planned
from zerofx.model.full_state import state_of
from zerofx.model.namespace import (
    Namespace,
    check_shards_stay,
    convert_buffers,
    make_scaler,
)
from zerofx.model.programs import ProgramTable
from zerofx.passes.order import Setting
from zerofx.runtime.engine import Engine
from zerofx.runtime.store.shards import ShardStore

T = TypeVar("T")


class Shortcut(Generic[T]):
    """A name of `model.zerofx` that the model exposes as well.

    An attribute of the model with the same name takes precedence, since this is not a data
    descriptor.
    """

    def __init__(self, read: Callable[[Namespace], T]) -> None:
        self._read = read

    @overload
    def __get__(self, model: None, kind: type) -> Shortcut[T]: ...
    @overload
    def __get__(self, model: nn.Module, kind: type) -> T: ...
    def __get__(self, model: nn.Module | None, kind: type) -> Shortcut[T] | T:
        return self if model is None else self._read(model.__dict__[SLOT])


class Hidden:
    """Hides a shortcut whose name is a parameter, buffer or child of the model."""

    def __get__(self, model: Any, kind: type | None = None) -> NoReturn:
        raise AttributeError  # nn.Module.__getattr__ then finds it


# -- The class of a compiled model -----------------------------------------------------------------


# -- CompiledModule: the nn.Module that a user trains ------------------------------------------ ---


class CompiledModule(nn.Module):
    """A model over shards: the user's own, called as before, with the same outputs and loop.

    It is the first base of every compiled model's class; the second is the user's class. It changes
    how forward runs, and extends methods that read or write parameters. All other names are the
    model's own. Everything else that zerofx adds is in `model.zerofx`. Its names are also available
    on the model (`model.programs`, `model.no_sync()`), unless the model already has that name.

    Example:
        model = zerofx.compile(MyModel(), zerofx.Plan(stage=3))
        assert isinstance(model, MyModel) and isinstance(model, zerofx.CompiledModule)
        model(x, y).backward()
        print(model.zerofx.programs[0].schedule())
    """

    _zerofx: Namespace  # set even if the model has its own attribute `zerofx`

    def __new__(cls, model: nn.Module, setting: Setting, engine: Engine) -> NoReturn:
        raise ArgumentError(
            "CompiledModule is the class of the result of zerofx.compile, and cannot be "
            "instantiated. Call zerofx.compile(model, plan)."
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the user's `__init_subclass__` from registering classes that zerofx creates."""

    # -- attributes that zerofx adds, unless the model has the name --------------------------
    zerofx = Shortcut(lambda own: own)
    programs = Shortcut(lambda own: own.programs)
    loss_scale = Shortcut(lambda own: own.loss_scale)
    # For tests and tools; zerofx itself uses `_zerofx`.
    _setting = Shortcut(lambda own: own.setting)
    _engine = Shortcut(lambda own: own.engine)
    _programs = Shortcut(lambda own: own.table)

    def adopt(
        self, program: Planned | str | os.PathLike[str], *, allow_changed_math: bool = False
    ) -> Planned:
        """Run a program in place of the compiled one: see `model.zerofx.adopt`."""
        return self._zerofx.adopt(program, allow_changed_math=allow_changed_math)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Sum gradients locally until the first backward outside: see `model.zerofx.no_sync`."""
        return self._zerofx.no_sync()

    def refresh(self) -> None:
        """Gather every resident parameter again at the next forward: see `model.zerofx.refresh`."""
        self._zerofx.refresh()

    def sharded_state_dict(self, *, flat: bool = False) -> dict[str, Any]:
        """Return torch.distributed.checkpoint's state: see `model.zerofx.sharded_state_dict`."""
        return self._zerofx.sharded_state_dict(flat=flat)

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ShardError("this model is already compiled by zerofx. Drop the call of compile().")

    # -- calls --------------------------------------------------------------------------------
    @torch.compiler.disable  # it is already compiled: torch.compile must not trace it
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; the first call of each signature compiles it."""
        return self._zerofx.call(MODEL, args, kwargs)

    # -- parameters and state -----------------------------------------------------------------
    def parameters(self, *args: Any, **kwargs: Any) -> Iterator[nn.Parameter]:
        """Return the parameters; refuse DataParallel, which would copy them to other GPUs."""
        if is_called_by("torch.nn.parallel.replicate"):
            raise self._zerofx.is_parallel("DataParallel")
        return super().parameters(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return names and parameters, after taking in values assigned in a parameter's place."""
        if names := applied(self):
            raise self._zerofx.is_parallel(names[0])
        if not self._zerofx.original.is_whole_in_part:
            store = self._zerofx.engine.store
            store.settle()
            store.check_bindings()
        return super().named_parameters(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load as the model did, after waiting for updates in progress."""
        store = self._zerofx.engine.store
        store.settle()
        found = super().load_state_dict(*args, **kwargs)
        if not getattr(found, "missing_keys", True):  # the model's own method may return anything
            store.ledger.half_made = None
        return found

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return full plain tensors under the model's own names, on the host, on every rank.

        This is a collective call: every rank must make it. One bucket is gathered at a time. If
        parameters live on NVMe, each value is gathered when it is read (see `LazyState`).

        For torch.distributed.checkpoint (`get_model_state_dict`, or the model given to its `save`
        and `load`), it returns `sharded_state_dict()`, so that no rank holds the whole model.
        """
        if is_called_by_checkpoint() and not (args or kwargs):
            return self._zerofx.sharded_state_dict()
        if self._zerofx.world.size > 1 and (accelerator := saving_state()) is not None:
            _check_optimizers(accelerator)
        return state_of(self, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompiledModule:
        """Run `to`, `half`, `cuda` and similar methods if they leave the shards unchanged.

        Buffers take another dtype, so the next call compiles again. Nothing is moved.
        """
        check_shards_stay(self._zerofx.engine, fn)
        convert_buffers(self, fn)
        return self

    # -- attributes ---------------------------------------------------------------------------
    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; drop programs that were compiled with the old value.

        Programs have the values of attributes baked in, so the next call captures again.
        """
        is_setting = self._zerofx.is_setting(name)
        super().__setattr__(name, value)
        if is_setting:
            self._zerofx.table.drop()

    def __repr__(self) -> str:
        plan, world = self._zerofx.plan, self._zerofx.world
        return f"CompiledModule(stage={plan.stage}, world={world.size}, {super().__repr__()})"

    # -- wrappers that it refuses -------------------------------------------------------------
    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Attribute that DistributedDataParallel reads first from a module that it wraps."""
        if is_called_by("torch.nn.parallel"):
            raise self._zerofx.is_parallel("DistributedDataParallel")
        raise AttributeError("_ddp_params_and_buffers_to_ignore")

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """Mark that FullyShardedDataParallel and fully_shard set on modules that they shard.

        transformers reads it in `generate`. If all ranks must run forwards together, a rank whose
        sequences have ended then keeps calling forward with the others.
        """
        return self._zerofx.world.size > 1 and is_called_to_generate()

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> None:
        raise self._zerofx.is_parallel("FullyShardedDataParallel (or fully_shard)")

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Attribute by which accelerate decides not to wrap the model: it must leave it as it is.

        Raises:
            PlanError: the accelerator's mixed precision would have no effect.
        """
        mixed = getattr(asking("accelerate.accelerator"), "mixed_precision", "no")
        compute = self._zerofx.plan.precision.compute
        if mixed not in ("no", compute):
            raise PlanError(
                f"mixed_precision = {mixed!r} (bf16 and fp16 of TrainingArguments) has no effect "
                f"on a model that was compiled with Plan(precision={compute!r}). Compile it with "
                f"Plan(precision={mixed!r}), or give the plain model to zerofx.integrations."
            )
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Ignore accelerate's own mark."""

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """Whether the ranks save together; transformers' Trainer reads this of a sharded model.

        The Trainer then calls save_pretrained on all ranks. It refuses at once to save the
        optimizer, which it would do on one rank only; `zerofx.integrations.transformers` saves it.
        """
        return self._zerofx.world.size > 1

    @property
    def _distribute_module_applied(self) -> bool:
        """Mark by which distribute_module recognises a module that it has already distributed."""
        if is_called_by("torch.distributed.tensor"):
            raise self._zerofx.is_parallel("distribute_module")
        return False

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardError(
            "a compiled model cannot be pickled (it is one rank's part of a running program). "
            "Save with zerofx.save(dir, model, optimizer) on all ranks; or take "
            "zerofx.full_state_dict(model) on all ranks, and torch.save it on rank 0."
        )

    # -- copies -------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """Return an independent model over shards of its own; the compiled programs are shared.

        As with any deepcopy of parameters, gradients are not copied: every p.grad is None.
        """
        own = self._zerofx
        store = own.engine.store
        for param in store.params.values():
            blank = torch.empty(param.shape, dtype=param.dtype, device="meta")
            memo[id(param)] = nn.Parameter(blank, param.requires_grad)
        memo[id(own)] = own  # the copy gets its own namespace below
        with original(self):
            made = copy.deepcopy(self, memo)
        made.__dict__.pop(SLOT, None)
        scaler = make_scaler(own.plan, store.world)
        if own.loss_scale is not None and scaler is not None:
            scaler.load_state_dict(own.loss_scale.state_dict())
        store.ledger.pending.join()
        copied = ShardStore.copy_of(store, made)
        poison, delayed = own.engine.slots.poison, own.plan.offload.delayed
        engine = Engine(copied, scaler, poison, delayed)
        later = copy.deepcopy(call_entries(self), memo)
        return keep_class(made, own.setting, engine, own.table, later)


def _check_optimizers(accelerator: Any) -> None:
    """Raise before an Accelerator's `save_state` writes files that only rank 0 could partly fill.

    Raises:
        ShardError: the Accelerator prepared an optimizer itself and would save it on rank 0 only.
    """
    if any(not hasattr(each, "snapshot") for each in accelerator._optimizers):
        raise ShardError(
            "Accelerator.save_state writes optimizers on rank 0 only, which has a part of their "
            "states. Prepare the loop with zerofx.integrations.accelerate.prepare, or save with "
            "zerofx.save(dir, model, optimizer)."
        )


# -- Making the class of a compiled model from the user's ------------------------------------------


# Names that CompiledModule adds; if the user's class or model has such a name, it takes precedence.
ADDED = (
    *("zerofx", "programs", "loss_scale", "_setting", "_engine", "_programs"),
    *("adopt", "no_sync", "refresh", "sharded_state_dict", "compile"),
)
_CLASSES: weakref.WeakValueDictionary[tuple[type, tuple[str, ...], tuple[str, ...]], type] = (
    weakref.WeakValueDictionary()
)


def compiled_class(model: nn.Module) -> type:
    """Return the class of a compiled model; there is one per user class.

    Its name is the user's, since libraries look models up by the name of their class. Calling it
    (`type(model)(...)`, or a slice of an nn.Sequential) creates a plain module of the user's class.
    """
    kind = type(model)
    held = (own_parameters(model), own_buffers(model), own_children(model))
    hidden = tuple(name for name in ADDED if any(name in entries for entries in held))
    reading = methods_reading(kind, own_parameters(model))
    if (kind, hidden, reading) in _CLASSES:
        return _CLASSES[kind, hidden, reading]

    @functools.wraps(kind.__init__)
    def plain(cls: type, *args: Any, **kwargs: Any) -> Any:
        return kind(*args, **kwargs)

    def run(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        return self._zerofx.call(MODEL, args, kwargs)

    forward: Any = functools.update_wrapper(torch.compiler.disable(run), kind.forward)
    forward.__signature__ = inspect.signature(kind.forward)
    del forward.__wrapped__  # accelerate follows it to restore a forward that it has wrapped

    body = {name: vars(kind)[name] for name in _NAMING if name in vars(kind)}
    body |= {"__new__": plain, "forward": forward}
    if kind.__call__ is not nn.Module.__call__:
        # The user's __call__ is captured, as the forward that it calls.
        body["__call__"] = nn.Module.__call__
    for base in reversed([each for each in kind.__mro__ if each not in nn.Module.__mro__]):
        body |= {name: vars(base)[name] for name in ADDED if name in vars(base)}
    body |= dict.fromkeys(hidden, Hidden())
    body |= {name: _entered(name, getattr(kind, name)) for name in reading}
    made = types.new_class(kind.__name__, (CompiledModule, kind), {}, lambda ns: ns.update(body))
    if not _fits(model, made):
        # Python takes the memory layout from the first base. An (ABC, nn.Module) has a different
        # layout than an nn.Module. In that case its own class comes first, but is looked up second.
        order = [CompiledModule, *kind.__mro__]
        meta = type(type(kind).__name__, (type(kind),), {"mro": lambda cls: [cls, *order]})
        bases = kind, CompiledModule
        made = types.new_class(
            kind.__name__, bases, {"metaclass": meta}, lambda ns: ns.update(body)
        )
    _CLASSES[kind, hidden, reading] = made
    return made


def methods_reading(kind: type, params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the methods of a class that name a parameter that the model itself registers.

    Methods of torch, and methods that set up or describe a model, are excluded: they run on shards.
    """
    found: dict[str, None] = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            continue
        for name, method in vars(base).items():
            is_plain = isinstance(method, types.FunctionType) and name not in vars(nn.Module)
            if not is_plain or inspect.isgeneratorfunction(method) or name.startswith(_SET_UP):
                continue
            if not params.keys().isdisjoint(method.__code__.co_names):
                found[name] = None
    return tuple(found)


_SET_UP = (
    *("__", "extra_repr", "reset", "_reset", "init", "_init", "load", "_load", "forward"),
    *("configure", "_configure"),  # optimizers, which take parameters as they are
)


def _entered(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that passes its call to a program of its own."""

    @functools.wraps(method)
    def entered(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        return self._zerofx.enter_method(name, args, kwargs)

    return entered


def _fits(model: nn.Module, kind: type) -> bool:
    """Return whether an object accepts a class; its own class stays."""
    before = type(model)
    try:
        set_class(model, kind)
    except TypeError:
        return False
    set_class(model, before)
    return True


# Attributes by which a class describes itself. __firstlineno__: read by inspect.getsource since
# Python 3.13.
_NAMING = ("__module__", "__qualname__", "__doc__", "__firstlineno__")


def check_class(model: nn.Module) -> None:
    """Raise unless the model's class can be subclassed for a compiled model; change nothing.

    Raises:
        ShardError: it is a compiled model.
        ArgumentError: its metaclass refuses a subclass.
    """
    kind = type(model)
    if isinstance(model, CompiledModule):
        raise ShardError(
            f"model is a {kind.__name__} that is already compiled. Compile it once: zerofx.compile "
            "returns the model that it is given."
        )
    try:
        set_class(model, compiled_class(model))
        set_class(model, kind)
    except TypeError as error:
        raise ArgumentError(
            f"model is a {kind.__name__}, of whose class zerofx cannot make a subclass: "
            f"{as_sentence(error)} Put the model in a module of your own (self.inner = model) and "
            "compile that."
        ) from error


def keep_class(
    model: nn.Module,
    setting: Setting,
    engine: Engine,
    other: ProgramTable | None = None,
    later: Entries | None = None,
) -> CompiledModule:
    """Turn a model whose parameters are shards into a compiled one; return that same object.

    other: the programs of the model that it is a copy of.
    later: the hooks and the forward that the other model got after it was compiled.
    """
    own = Namespace(model, setting, engine, other)
    if later is not None:
        put_call_entries(model, later)
    made = compiled_class(model)
    model.__dict__[SLOT] = own
    set_class(model, made)
    own.watch_calls()
    return cast(CompiledModule, model)
