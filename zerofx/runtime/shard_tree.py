"""The module tree's side of parameters: who holds each one, and putting another in its place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from zerofx.compat.autograd import has_gradient_hooks
from zerofx.compat.modules import own_buffers, own_parameters, put_parameter
from zerofx.compat.tensors import memory_range
from zerofx.errors import ShardError
from zerofx.runtime.sharded_parameter import ReplicatedParameter, ShardedTensor

Holder = tuple[nn.Module, str]


# What gloo and NCCL both reduce, and torch itself adds.
SUMMABLE = frozenset(
    {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128}
)


class ParameterTree:
    """Every distinct parameter under its canonical (first) name, and all places that hold it."""

    def __init__(self, model: nn.Module) -> None:
        self.params: dict[str, nn.Parameter] = {}
        self.holders: dict[str, list[Holder]] = {}
        self.modules = dict(model.named_modules())
        names: dict[int, str] = {}
        for module_name, module in self.modules.items():
            for key, param in own_parameters(module).items():
                if param is None:
                    continue
                full_name = f"{module_name}.{key}" if module_name else key
                name = names.setdefault(id(param), full_name)
                self.params.setdefault(name, param)
                self.holders.setdefault(name, []).append((module, key))

    def check(self) -> None:
        """Raise unless every parameter is plain, initialised or on meta, and without gradient.

        Raises:
            ShardError: names the parameter and the fix.
        """
        for name, param in self.params.items():
            if isinstance(param, (ShardedTensor, ReplicatedParameter)):
                raise ShardError(f"{name} belongs to a compiled model already; compile once")
            if nn.parameter.is_lazy(param):
                raise ShardError(
                    f"{name} is a lazy parameter without a shape; run the model once before "
                    "zerofx.compile"
                )
            torch_function = type(param).__torch_function__
            if torch_function is not nn.Parameter.__torch_function__:
                raise ShardError(
                    f"{name} is a {type(param).__name__}, and only plain parameters can be laid "
                    "out in flat shards; compile before quantising or distributing it"
                )
            check_summable(name, param)
            if has_gradient_hooks(param):
                raise ShardError(
                    f"{name} has a gradient hook, which would never run: a program assigns p.grad "
                    "itself. Hook the tensor inside forward, or change p.grad after backward()."
                )
            if param.grad is not None:
                raise ShardError(
                    f"{name} has a gradient already, which sharding would drop; call "
                    "model.zero_grad() before zerofx.compile"
                )
        self._check_memory()

    def _check_memory(self) -> None:
        """Raise where a parameter shares memory with another one or with a buffer.

        Each gets memory of its own in a shard, so that what was one would silently become two.
        """
        found: list[tuple[str, int, int, str, bool]] = []  # memory, first byte, end, name, param?
        seen = {id(p) for p in self.params.values()}
        for name, param in self.params.items():
            found.append((*memory_range(param), name, True))
        for path, module in self.modules.items():
            for key, buffer in own_buffers(module).items():
                if buffer is None or nn.parameter.is_lazy(buffer) or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                found.append((*memory_range(buffer), f"{path}.{key}" if path else key, False))
        reach: tuple[str, int, str, bool] | None = None  # the range so far that ends last
        for memory, start, end, name, is_param in sorted(found):
            if start == end:
                continue
            if reach and reach[0] == memory and start < reach[1] and (is_param or reach[3]):
                raise _shared(reach[2], name, is_param and reach[3])
            if not reach or reach[0] != memory or end > reach[1]:
                reach = memory, end, name, is_param

    def place(self, name: str, new: nn.Parameter) -> None:
        """Put `new` wherever parameter `name` is held."""
        for module, key in self.holders[name]:
            put_parameter(module, key, new)
        self.params[name] = new

    def bindings(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield (name, module, key) for every place that holds a parameter."""
        for name, holders in self.holders.items():
            for module, key in holders:
                yield name, module, key


def check_summable(name: str, param: torch.Tensor) -> None:
    """Raise for a trained parameter whose gradients cannot be summed over ranks.

    Raises:
        ShardError: names the parameter and its format.
    """
    if param.requires_grad and param.dtype not in SUMMABLE:
        raise ShardError(
            f"{name} is {param.dtype}, of which no backend sums gradients over ranks; keep it in "
            "float32 or bfloat16 and cast in forward, or freeze it (requires_grad_(False))"
        )


def _shared(one: str, other: str, are_parameters: bool) -> ShardError:
    way = (
        f"to tie them, make them one Parameter ({other} = {one})"
        if are_parameters
        else "compute the buffer from the parameter in forward"
    )
    return ShardError(
        f"{one} and {other} share memory but are two tensors, and sharding would silently untie "
        f"them; {way}; to keep them apart, give one a copy (its .data.clone())"
    )


def attributes_of(param: torch.Tensor) -> dict[str, object]:
    """Return what users and libraries hung on a parameter (`p.no_weight_decay = True`)."""
    ours = ("_piece", "_ledger", "_zfx_name", "_grad")
    return {k: v for k, v in vars(param).items() if k not in ours}
