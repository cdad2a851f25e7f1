"""Whole parameters for eager code: `with zerofx.whole(model): ...`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from zerofx.capture.original import ALL, SLOT, Entry
from zerofx.compat.modules import intercepted
from zerofx.errors import ArgumentError, ShardError
from zerofx.model.islands import places_of
from zerofx.model.namespace import Namespace
from zerofx.runtime.store.state import FullReader


@contextlib.contextmanager
def whole(module: nn.Module, *, write_back: bool = False) -> Iterator[nn.Module]:
    """Let eager code use the parameters of a module whole, as plain `nn.Parameter`s.

    Inside, the module is the user's own again: it runs eagerly, and whatever reads parameters works
    (generate, merge_and_unload, save_pretrained, histograms, state_dict). A collective call: every
    rank must enter and leave. Each rank holds all parameters of the module meanwhile, on the device
    that it computes with; enter unit by unit (`for block in model.blocks: with whole(block): ...`)
    to hold less.

    module: a compiled model, or a submodule of one.
    write_back: keep what rank 0 has made of the values.

    Raises:
        ArgumentError: the module is no part of a compiled model.
        ShardError: a parameter was written to without `write_back`, or got a gradient, which would
            be lost; names it. What was written is not kept.
    """
    own, path = _place(module)
    if own.original.is_captured or own.is_covered(path):
        yield module  # its parameters are whole already
        return
    entry, ignored = Entry(path, ALL), own.engine.store.ignored
    params = {n: p for n, p in entry.parameters(own.model).items() if n not in ignored}
    reader = FullReader(own.engine.store, own.device)
    names = {id(p): name for name, p in own.engine.store.params.items()}
    values: dict[str, Tensor] = {}
    for name in own.engine.store.layout.owned:  # each bucket is gathered once
        if any(names[id(p)] == name for p in params.values()):
            values[name] = reader.read(name)
    tensors = [nn.Parameter(values.pop(names[id(p)]), p.requires_grad) for p in params.values()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(own.passing_through(path))
        stack.enter_context(own.original.standing_in(places_of(entry, own.model, ignored, tensors)))
        if not path:
            stack.enter_context(own.original.restored(own.model))
        yield module
    trained = [n for n, t in zip(params, tensors, strict=True) if t.grad is not None]
    if name := _on_any_rank(own, "trained", trained):
        raise ShardError(
            f"{name} got a gradient inside zerofx.whole, which ends here and is lost. Call the "
            "model outside zerofx.whole to train it"
        )
    if write_back:
        _write_back(own, params, tensors)
    elif name := _on_any_rank(own, "written", _written(own, params, tensors)):
        raise ShardError(
            f"{name} was written to inside zerofx.whole, and the new values are lost. Use "
            "zerofx.whole(model, write_back=True), which keeps those of rank 0"
        )


def _on_any_rank(own: Namespace, what: str, names: list[str]) -> str:
    """Return a name that some rank has, "" if none has any; a collective call."""
    mine = f"{what}={names[0] if names else ''}"
    found = own.world.agree_but_for("leaving zerofx.whole", "", mine)
    return max(each.partition("=")[2] for each in found)


@torch.no_grad()
def _written(
    own: Namespace, params: dict[str, nn.Parameter], tensors: list[nn.Parameter]
) -> list[str]:
    """Return the parameters whose values are others than the shards', as far as this rank has."""
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
    """Give every rank's shards what rank 0 has in these tensors."""
    world = own.world
    for param, tensor in zip(params.values(), tensors, strict=True):
        value = tensor.detach()
        if world.size > 1:
            value = value.contiguous()
            world.broadcast(value).wait()
        param.copy_(value.to(param.device))


def _place(module: nn.Module) -> tuple[Namespace, str]:
    """Return the namespace of the compiled model that a module is part of, and its name there."""
    if isinstance(module, nn.Module):
        if SLOT in module.__dict__:
            return module.__dict__[SLOT], ""
        call = intercepted(module)
        if isinstance(call, functools.partial):
            owner = getattr(call.func, "__self__", None)
            if isinstance(owner, Namespace):
                return owner, call.args[0]
    raise ArgumentError(
        f"zerofx.whole was given a {type(module).__name__} that is no part of a compiled model, or "
        "has no parameters. Give what zerofx.compile returned, or one of its submodules"
    )
