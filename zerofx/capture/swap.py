"""Stand fake tensors in for a module's parameters and buffers, and put everything back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import traceback as fx_traceback

from zerofx import compat

Meta = tuple[tuple[int, ...], torch.dtype, bool]

RESERVED = frozenset({"_parameters", "_buffers", "_modules", "forward"})


def fake_input(mode: compat.FakeTensorMode, tensor: Tensor, device: torch.device | None) -> Tensor:
    """Make a fake of an argument: same shape, strides, dtype and requires_grad."""
    with mode, torch.inference_mode(False), torch.no_grad():
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_place(tensor, device)
        )
    return made.requires_grad_(tensor.requires_grad)


def _place(tensor: Tensor, device: torch.device | None) -> torch.device:
    """Return where a fake lies: on the tensor's device, or on `device` for one on meta."""
    return tensor.device if tensor.device.type != "meta" else device or torch.device("cpu")


class StateSwap:
    """Fakes for the whole state of a module, one for each distinct tensor.

    Inside `installed()` the module tree's dictionaries hold the fakes (tied names the same one),
    and afterwards again exactly what they held before, the modules' own attributes included.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: compat.FakeTensorMode,
        device: torch.device | None,
        param_meta: Mapping[str, Meta] | None,
    ) -> None:
        self.model = model
        self._mode, self._device = mode, device
        self._fakes: dict[int, Tensor] = {}
        self._slots: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        known = {} if param_meta is None else param_meta
        for prefix, module in model.named_modules():
            for holder in (module._parameters, module._buffers):
                for key, tensor in holder.items():
                    if tensor is not None:
                        meta = known.get(f"{prefix}.{key}" if prefix else key)
                        self._slots.append((holder, key, tensor, self._fake(tensor, meta)))

    def _fake(self, tensor: Tensor, meta: Meta | None) -> Tensor:
        if id(tensor) in self._fakes:
            return self._fakes[id(tensor)]
        shape, dtype, needs = meta or (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        with self._mode, torch.inference_mode(False), torch.no_grad():
            made = torch.empty(shape, dtype=dtype, device=_place(tensor, self._device))
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=needs)
        self._fakes[id(tensor)] = made
        return made

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Swap the fakes in; undo that and every change of a module's attributes afterwards."""
        modules = list(self.model.modules())
        before = [_copy_attributes(m) for m in modules]
        held = [(dict(m._parameters), dict(m._buffers), dict(m._modules)) for m in modules]
        try:
            for holder, key, _, fake in self._slots:
                holder[key] = fake
            yield
        finally:
            for module, attributes, (params, buffers, children) in zip(
                modules, before, held, strict=True
            ):
                _restore(module._parameters, params)
                _restore(module._buffers, buffers)
                _restore(module._modules, children)
                _restore_attributes(module, attributes)

    def links(self) -> list[Link]:
        """Find the plain attributes that hold a parameter or buffer, alone or in a list or dict.

        `nn.LSTM` keeps such a list; they must follow whatever stands in for the tensor.
        """
        owners = {id(tensor): (holder, key) for holder, key, tensor, _ in reversed(self._slots)}
        found: list[Link] = []
        for module in self.model.modules():
            for name, value in module.__dict__.items():
                if name in RESERVED:
                    continue
                if isinstance(value, Tensor):
                    items: Any = [(module.__dict__, name, value)]
                elif isinstance(value, list):
                    items = [(value, i, v) for i, v in enumerate(value)]
                elif isinstance(value, dict):
                    items = [(value, k, v) for k, v in value.items()]
                else:
                    continue
                found += [(c, k, *owners[id(v)]) for c, k, v in items if id(v) in owners]
        return found


Link = tuple[Any, Any, dict[str, Any], str]


def follow(links: list[Link]) -> None:
    """Point every link at what its owner holds now."""
    for container, key, holder, name in links:
        container[key] = holder[name]


def _copy_attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Keep each attribute of a module, with a shallow copy of those that are containers."""
    return {
        name: (value, type(value)(value) if type(value) in (list, dict, set) else None)
        for name, value in module.__dict__.items()
        if name not in ("_parameters", "_buffers", "_modules")
    }


def _restore(holder: dict[str, Any], held: dict[str, Any]) -> None:
    if list(holder) != list(held) or any(holder[k] is not v for k, v in held.items()):
        holder.clear()
        holder.update(held)


def _restore_attributes(module: nn.Module, attributes: dict[str, tuple[Any, Any]]) -> None:
    own = module.__dict__
    for name in [n for n in own if n not in attributes and n not in RESERVED]:
        del own[name]
    for name, (value, content) in attributes.items():
        own[name] = value
        if type(value) is list:
            value[:] = content
        elif content is not None:
            value.clear()
            value.update(content)


@contextlib.contextmanager
def annotated(model: nn.Module) -> Iterator[None]:
    """Mark every node that a submodule's forward makes with the submodule's qualified name."""
    wrapped: list[tuple[nn.Module, bool, Any]] = []
    try:
        for name, module in model.named_modules():
            own = module.__dict__.get("forward")
            wrapped.append((module, own is not None, own))
            module.__dict__["forward"] = _marking(module.forward, name)
        yield
    finally:
        for module, had_own, own in wrapped:
            if had_own:
                module.__dict__["forward"] = own
            else:
                module.__dict__.pop("forward", None)


def _marking(forward: Any, name: str) -> Any:
    @functools.wraps(forward)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with fx_traceback.annotate({"zfx_module": name}):
            return forward(*args, **kwargs)

    return marked
