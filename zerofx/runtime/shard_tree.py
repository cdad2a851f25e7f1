"""The module tree's side of parameters: who holds each one, and putting another in its place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from zerofx.errors import ShardError
from zerofx.runtime.sharded_parameter import ReplicatedParameter, ShardedTensor

Holder = tuple[nn.Module, str]


class ParameterTree:
    """Every distinct parameter under its canonical (first) name, and all places that hold it."""

    def __init__(self, model: nn.Module) -> None:
        self.params: dict[str, nn.Parameter] = {}
        self.holders: dict[str, list[Holder]] = {}
        names: dict[int, str] = {}
        for module_name, module in model.named_modules():
            for key, param in module._parameters.items():
                if param is None:
                    continue
                full_name = f"{module_name}.{key}" if module_name else key
                name = names.setdefault(id(param), full_name)
                self.params.setdefault(name, param)
                self.holders.setdefault(name, []).append((module, key))

    def check(self) -> None:
        """Raise unless every parameter is plain, initialised or on meta, and without gradient.

        Raises:
            ShardError: names the parameter and the way out.
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
            if param.grad is not None:
                raise ShardError(
                    f"{name} has a gradient already, which sharding would drop; call "
                    "model.zero_grad() before zerofx.compile"
                )

    def place(self, name: str, new: nn.Parameter) -> None:
        """Put `new` wherever parameter `name` is held."""
        for module, key in self.holders[name]:
            put(module, key, new)
        self.params[name] = new

    def bindings(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield (name, module, key) for every place that holds a parameter."""
        for name, holders in self.holders.items():
            for module, key in holders:
                yield name, module, key


def put(module: nn.Module, key: str, param: nn.Parameter) -> None:
    """Set a module's parameter in place; an RNN's list of flat weights follows."""
    module._parameters[key] = param
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]


def attributes_of(param: torch.Tensor) -> dict[str, object]:
    """Return what users and libraries hung on a parameter (`p.no_weight_decay = True`)."""
    ours = ("_piece", "_ledger", "_zfx_name", "_grad")
    return {k: v for k, v in vars(param).items() if k not in ours}
