"""Whole parameters for eager code: `with zerofx.whole(model): ...`."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx.capture.original import ALL, SLOT, Entry
from zerofx.compat.modules import intercepted
from zerofx.compat.tensors import version_of
from zerofx.errors import ArgumentError, ShardError
from zerofx.model import islands
from zerofx.model.namespace import Namespace
from zerofx.runtime.store.state import FullReader


@contextlib.contextmanager
def whole(
    module: nn.Module, *, write_back: bool = False, gradients: bool = False
) -> Iterator[nn.Module]:
    """Let eager code use the whole parameters of a module, as plain `nn.Parameter`s.

    Inside the block, the module is the user's own again, with `model.zerofx`. It runs eagerly,
    and all code that reads parameters works (generate, merge_and_unload, save_pretrained,
    histograms, state_dict). This is a collective call: every rank must enter and leave. Until then,
    each rank holds all parameters of the module, on the device that it computes with. To hold less,
    enter unit by unit (`for block in model.blocks: with whole(block): ...`).

    In a forward that runs eagerly (an island), gradients of values computed inside reach the
    parameters, and each rank enters on its own, as its code runs.

    module: a compiled model, or a submodule of one.
    write_back: keep rank 0's changes of the values.
    gradients: make `p.grad` a whole copy of the gradient, where there is one. It takes as much
        memory as the parameters. By default `p.grad` is None inside the block.

    Raises:
        ArgumentError: the module is not part of a compiled model, or an option is set in an
            island, or `gradients` where the parameters are already whole.
        ShardError: a parameter was written to without `write_back`, or got a gradient, or its
            gradient was changed, which would be lost; names it. The writes are not kept.

    Example:
        with zerofx.whole(model), torch.no_grad():  # on all ranks
            tokens = model.generate(prompt, 256)
    """
    own, path = _place(module)
    if own.original.is_captured or own.is_covered(path):
        if gradients:
            raise ArgumentError(
                "zerofx.whole(gradients=True) was entered where the parameters are already whole. "
                "Give gradients=True to the outer zerofx.whole, and enter it outside of forward."
            )
        yield module  # its parameters are already whole
    elif own.engine.turns.is_forward:
        if write_back:
            raise ArgumentError(
                "zerofx.whole(write_back=True) was entered in the model's forward, which cannot "
                "change parameters. Write to them after optimizer.step()."
            )
        if gradients:
            raise ArgumentError(
                "zerofx.whole(gradients=True) was entered in the model's forward, before there are "
                "gradients of it. Read them after backward()."
            )
        with islands.gathered(own, Entry(path, ALL), "code in zerofx.whole"), _restored(own, path):
            yield module
    else:
        yield from _read(own, path, module, write_back, gradients)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole values of a parameter, a gradient or an optimizer state, as a plain tensor.

    It is `tensor.full_tensor()` of a sharded tensor, and a copy of a plain one. So a script that
    reads values runs on one process, or at stage 0, as on many ranks. If the tensor is sharded,
    this is a collective call: every rank must make it.

    Raises:
        ArgumentError: it is given something that is not a tensor, such as a p.grad that is None.

    Example:
        for name, p in model.named_parameters():  # on all ranks
            value = zerofx.full_tensor(p)
            if rank == 0:
                print(name, value.norm().item())
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError(
            f"zerofx.full_tensor was given a {type(tensor).__name__}, which is no tensor. Give it "
            "a parameter, or a p.grad that is not None."
        )
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            return tensor.full_tensor()
        return tensor.detach().clone()


@contextlib.contextmanager
def _restored(own: Namespace, path: str) -> Iterator[None]:
    """Restore the model's own class inside the block, if the model itself is whole.

    `model.zerofx` stays, for code that asks for the rank, unless the model has that name itself.
    """
    if path:
        yield
        return
    with own.original.restored(own.model):
        is_added = not hasattr(own.model, "zerofx")
        if is_added:
            own.model.__dict__["zerofx"] = own
        try:
            yield
        finally:
            if is_added:
                own.model.__dict__.pop("zerofx", None)


def _read(
    own: Namespace, path: str, module: nn.Module, write_back: bool, gradients: bool
) -> Iterator[nn.Module]:
    """Replace a module's parameters by plain ones; keep writes to them if `write_back`."""
    entry = Entry(path, ALL)
    params = islands.sharded(own, entry)
    params = {name: p for name, p in params.items() if not own.original.is_whole(p)}
    reader = FullReader(own.engine.store, own.device)
    names = {id(p): name for name, p in own.engine.store.params.items()}
    wanted = {names[id(p)] for p in params.values()}
    # In the order of the layout, so that each bucket is gathered once.
    values = {name: reader.read(name) for name in own.engine.store.layout.owned if name in wanted}
    tensors = [nn.Parameter(values.pop(names[id(p)]), p.requires_grad) for p in params.values()]
    del reader  # and with it the last bucket
    given = _give_gradients(own, params, tensors) if gradients else {}
    whole = dict(zip(params, tensors, strict=True))
    is_over, reached = _refuse_late_gradients(params, tensors)
    with contextlib.ExitStack() as stack:
        stack.enter_context(own.passing_through(path))
        stack.enter_context(own.original.standing_in(islands.places_of(own, entry, whole)))
        stack.enter_context(_restored(own, path))
        stack.enter_context(own.original.with_normed_weights(module))
        yield module
    is_over.set()
    named = list(zip(params, tensors, strict=True))
    reached |= {n for n, t in named if t.grad is not None and n not in given}
    if name := _on_any_rank(own, "trained", sorted(reached)):
        raise _lost(name)
    if gradients:
        edited = [n for n, t in named if n in given and _is_edited(t, *given[n])]
        if name := _on_any_rank(own, "changed", edited):
            raise ShardError(
                f"{name}: p.grad was changed inside zerofx.whole, where it is a copy, so the "
                "change is lost. Change it outside of the block."
            )
    if write_back:
        _write_back(own, params, tensors)
    elif name := _on_any_rank(own, "written", _written(own, params, tensors)):
        raise ShardError(
            f"{name} was written to inside zerofx.whole, and the new values are lost. Use "
            "zerofx.whole(model, write_back=True), which keeps those of rank 0."
        )


def _give_gradients(
    own: Namespace, params: dict[str, nn.Parameter], tensors: list[nn.Parameter]
) -> dict[str, tuple[Tensor, int]]:
    """Give whole tensors copies of the gradients; return these and their versions, by name."""
    given: dict[str, tuple[Tensor, int]] = {}
    for (name, param), tensor in zip(params.items(), tensors, strict=True):
        if (gradient := param.grad) is not None:
            tensor.grad = full_tensor(gradient).to(own.device)
            given[name] = tensor.grad, version_of(tensor.grad)
    return given


def _is_edited(tensor: Tensor, given: Tensor, version: int) -> bool:
    return tensor.grad is not given or version_of(given) != version


def _refuse_late_gradients(
    params: Iterable[str], tensors: list[nn.Parameter]
) -> tuple[threading.Event, set[str]]:
    """Return an event to set at the end, and the names of what backwards have reached by then.

    A backward that reaches a parameter later raises.
    """
    is_over, reached = threading.Event(), set[str]()

    def check(name: str, _: Tensor) -> None:
        reached.add(name)
        if is_over.is_set():
            raise _lost(name)

    for name, tensor in zip(params, tensors, strict=True):
        if tensor.requires_grad:
            tensor.register_post_accumulate_grad_hook(functools.partial(check, name))
    return is_over, reached


def _lost(name: str) -> ShardError:
    return ShardError(
        f"{name} got a gradient that was computed inside zerofx.whole, whose parameters are "
        "temporary, so it is lost. Call the model outside zerofx.whole to train it."
    )


def _on_any_rank(own: Namespace, what: str, names: list[str]) -> str:
    """Return a name that some rank has, or "" if none has any; a collective call."""
    mine = f"{what}={names[0] if names else ''}"
    found = own.world.agree_but_for("leaving zerofx.whole", "", mine)
    return max(each.partition("=")[2] for each in found)


@torch.no_grad()
def _written(
    own: Namespace, params: dict[str, nn.Parameter], tensors: list[nn.Parameter]
) -> list[str]:
    """Return the parameters whose values differ from the shards, on this rank."""
    pieces = {id(p): own.engine.store.pieces[name] for name, p in own.engine.store.params.items()}
    found = []
    for (name, param), tensor in zip(params.items(), tensors, strict=True):
        piece = pieces[id(param)]
        mine = piece.cut(tensor.detach().reshape(-1))
        held = piece.local(param).reshape(-1)
        if not torch.equal(mine.to(held.device), held):
            found.append(name)
    return found


@torch.no_grad()
def _write_back(
    own: Namespace, params: dict[str, nn.Parameter], tensors: list[nn.Parameter]
) -> None:
    """Write rank 0's values of these tensors to every rank's shards."""
    world = own.world
    for param, tensor in zip(params.values(), tensors, strict=True):
        value = tensor.detach()
        if world.size > 1:
            value = value.contiguous()
            world.broadcast(value).wait()
        param.copy_(value.to(param.device))


def _place(module: nn.Module) -> tuple[Namespace, str]:
    """Return the compiled model's namespace that a module belongs to, and its name there."""
    if isinstance(module, nn.Module):
        if SLOT in module.__dict__:
            return module.__dict__[SLOT], ""
        call = intercepted(module)
        if isinstance(call, functools.partial):
            owner = getattr(call.func, "__self__", None)
            if isinstance(owner, Namespace):
                return owner, call.args[0]
    raise ArgumentError(
        f"zerofx.whole was given a {type(module).__name__} that is not part of a compiled model, "
        "or has no parameters. Give it the result of zerofx.compile, or one of its submodules."
    )
