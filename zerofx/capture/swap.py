"""State swaps: fake tensors replace a module's state, which is restored exactly."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import traceback as fx_traceback

from zerofx.capture.call import place
from zerofx.capture.effects import RESERVED, Change, Held, Unreadable, changes_of, is_alike
from zerofx.capture.formats import casting
from zerofx.capture.lines import MODULE
from zerofx.compat.modules import BatchNorm, own_buffers, own_parameters
from zerofx.compat.strides import TrueStrides
from zerofx.compat.tracing import describe_results
from zerofx.layout.placements import Part
from zerofx.layout.slices import Layered
from zerofx.runtime.tensors.piece import piece_of

Meta = tuple[tuple[int, ...], torch.dtype, bool]


def given_part(tensor: Tensor) -> Part | None:
    """Return the slice that forward computes with, of a compiled model that brings its own."""
    piece = piece_of(tensor)
    part = None if piece is None else piece.tensor_part
    return part if part is not None and part.is_given else None


def layered_of(tensor: Tensor) -> Layered | None:
    """Return how a compiled model's parameter lay over a mesh, if it was a DTensor."""
    piece = piece_of(tensor)
    return None if piece is None else piece.ledger.layered.get(piece.name)


class StateSwap:
    """Fakes for the whole state of a module, one per distinct tensor.

    Inside `installed()` the dictionaries of the module tree hold the fakes (one fake for all tied
    names). Afterwards they hold exactly their previous values again, including the modules' own
    attributes.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: TrueStrides,
        device: torch.device | None,
        param_meta: Mapping[str, Meta] | None,
        computes: Mapping[str, torch.dtype],
        ignored: Collection[str] = (),
    ) -> None:
        self.model = model
        self._modules = list(model.named_modules())
        self._held: list[Held] = []
        self._count = 0
        self._mode, self._device = mode, device
        self._fakes: dict[int, Tensor] = {}
        self._slots: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        self._ignored: list[tuple[dict[str, Any], str, Tensor, str]] = []  # by their first name
        first: dict[int, str] = {}
        self.held_dtypes: dict[str, torch.dtype] = {}  # by name, of the original tensors
        self.parts: dict[str, Part] = {}  # the slices that the model brings, by name
        pieces = filter(None, map(piece_of, model.parameters()))
        self.ledger = next((piece.ledger for piece in pieces), None)  # None: not compiled
        self._buffers = list(model.named_buffers(remove_duplicate=False))
        known = {} if param_meta is None else param_meta
        for prefix, module in self._modules:
            for holder in (own_parameters(module), own_buffers(module)):
                for key, tensor in holder.items():
                    if tensor is not None:
                        name = f"{prefix}.{key}" if prefix else key
                        if name in ignored and isinstance(tensor, nn.Parameter):
                            canonical = first.setdefault(id(tensor), name)
                            self._ignored.append((holder, key, tensor, canonical))
                            continue
                        meta, part = known.get(name), given_part(tensor)
                        if part is not None:
                            self.parts[name] = part
                            meta = meta or (part.local, tensor.dtype, tensor.requires_grad)
                        fake = self._fake(tensor, meta, computes.get(name))
                        self._slots.append((holder, key, tensor, fake))
                        held = known[name][1] if name in known else tensor.dtype
                        self.held_dtypes[name] = held

    def _fake(self, tensor: Tensor, meta: Meta | None, compute: torch.dtype | None) -> Tensor:
        if id(tensor) in self._fakes:
            return self._fakes[id(tensor)]
        shape, dtype, needs = meta or (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        dtype = compute or dtype
        with self._mode, torch.inference_mode(False), torch.no_grad():
            where = place(tensor, self._device)
            made: Tensor
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(torch.empty(shape, dtype=dtype, device=where), needs)
            else:
                made = torch.empty_strided(shape, tensor.stride(), dtype=dtype, device=where)
                if type(tensor) is Tensor and not tensor.is_meta and dtype == tensor.dtype:
                    self._mode.known.hold(made, tensor)
        self._fakes[id(tensor)] = made
        return made

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Install the fakes; afterwards restore them and every changed module attribute."""
        self._held = [Held.of(module) for _, module in self._modules]
        holders = [h for _, m in self._modules for h in (own_parameters(m), own_buffers(m))]
        before = [dict(holder) for holder in holders]
        for holder, key, *_ in self._ignored:
            del holder[key]
        self._count = sum(map(len, holders))
        try:
            for holder, key, _, fake in self._slots:
                holder[key] = fake
            yield
        finally:
            for holder, content in zip(holders, before, strict=True):
                _restore(holder, content)
            self.reset_attributes()

    @contextlib.contextmanager
    def layered(self) -> Iterator[None]:
        """Make modules hold DTensors of the parameters that were such before `zerofx.compile`.

        Hooks of `parallelize_module` expect them. Their collectives become nodes of the trace.
        """
        made: dict[int, Tensor] = {}
        places: list[tuple[dict[str, Any], str, Tensor]] = []
        for holder, key, tensor, _ in self._slots:
            if (lies := layered_of(tensor)) is not None:
                local = holder[key]
                if id(local) not in made:
                    made[id(local)] = lies.tensor(local, tensor.shape)
                places.append((holder, key, local))
                holder[key] = made[id(local)]
        try:
            yield
        finally:
            for holder, key, local in places:
                holder[key] = local

    @contextlib.contextmanager
    def given(self, params: Mapping[str, Tensor]) -> Iterator[None]:
        """Make modules hold the tensors that a call passes for ignored parameters, by first
        name."""
        places = [(h, k, name) for h, k, _, name in self._ignored if name in params]
        try:
            for holder, key, name in places:
                holder[key] = params[name]
            yield
        finally:
            for holder, key, _ in places:
                holder.pop(key, None)

    def has_read_updated(self, gm: fx.GraphModule) -> bool:
        """Return whether a trace depends on the value of a buffer that it updates."""
        results = describe_results(gm.graph.output_node())
        updated = {str(name) for kind, name in results if kind == "buffer-update"}
        return any(
            id(t) in self._mode.known.read and f"model.{n}" in updated for n, t in self._buffers
        )

    def is_disturbed(self) -> bool:
        """Return whether anything other than the fakes is registered now."""
        count = sum(len(own_parameters(m)) + len(own_buffers(m)) for _, m in self._modules)
        return count != self._count or any(h.get(k) is not f for h, k, _, f in self._slots)

    def reset_attributes(self) -> None:
        """Restore every module's attributes and children."""
        for held in self._held:
            held.restore()

    def changed_attribute(self) -> tuple[str, Held] | None:
        """Return (qualified name, the module's snapshot) of an attribute that changed, or None."""
        for (name, _), held in zip(self._modules, self._held, strict=True):
            for attribute in held.changed():
                return (f"{name}.{attribute}" if name else attribute), held
        return None

    def changes(self) -> list[Change] | None:
        """Return a forward's changes to attributes, or None if a later call cannot find them."""
        found: list[Change] = []
        for (name, _), held in zip(self._modules, self._held, strict=True):
            of_module = changes_of(name, held, self._mode.known.value_of)
            if of_module is None:
                return None
            found += of_module
        return found

    @contextlib.contextmanager
    def after(self, changes: Sequence[Change]) -> Iterator[None]:
        """Make forwards begin with these values in attributes."""
        before = self._held
        self.reset_attributes()
        for change in changes:
            change.apply(self.model)
        self._held = [Held.of(held.module) for held in before]
        try:
            yield
        finally:
            self._held = before
            self.reset_attributes()

    def reads(self, changes: Sequence[Change], run: Callable[[], None]) -> bool:
        """Return whether a forward reads the previous values of attributes that it sets."""
        hidden = [replace(change, value=Unreadable()) for change in changes]
        with self.after(hidden), self._mode.known.apart():
            try:
                run()
            except Exception:  # noqa: BLE001 - any effect of an object without a value
                return True
            left = {(c.path, c.name): c for c in self.changes() or ()}
            return any(not is_alike(left.get((c.path, c.name)), c) for c in changes)

    def links(self) -> Links:
        """Find the plain attributes that hold a parameter or buffer, alone or in a list or dict."""
        slots = [*self._slots, *self._ignored]
        owners = {id(tensor): (holder, key) for holder, key, tensor, _ in reversed(slots)}
        found: list[tuple[Any, Any, Any, dict[str, Any], str]] = []
        for module in self.model.modules():
            for name, value in module.__dict__.items():
                if name in RESERVED:
                    continue
                items: Any = ()
                if isinstance(value, Tensor):
                    items = [(module.__dict__, name, value)]
                elif type(value) is list:
                    items = [(value, i, v) for i, v in enumerate(value)]
                elif type(value) is dict:
                    items = [(value, k, v) for k, v in value.items()]
                found += [(c, k, v, *owners[id(v)]) for c, k, v in items if id(v) in owners]
        return Links(found)


class Links:
    """Attributes that hold a tensor which a module also registers (`nn.LSTM` has such a list)."""

    def __init__(self, links: list[tuple[Any, Any, Any, dict[str, Any], str]]) -> None:
        self._links = links

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Point every link at the current replacement of its tensor."""
        for container, key, tensor, holder, name in self._links:
            container[key] = holder.get(name, tensor)  # it may be ignored and outside of this entry
        try:
            yield
        finally:
            for container, key, tensor, _, _ in self._links:
                container[key] = tensor


class State:
    """The registered parameters and buffers of a model before one forward."""

    def __init__(self, model: nn.Module) -> None:
        self._slots = [
            (f"{name}.{key}" if name else key, holder, key, tensor)
            for name, module in model.named_modules()
            for holder in (own_parameters(module), own_buffers(module))
            for key, tensor in holder.items()
        ]
        self._holders = [h for m in model.modules() for h in (own_parameters(m), own_buffers(m))]

    def settle(self) -> str:
        """Convert the rebinding of a buffer to an update of it, which eager's next call would see.

        Every other change is undone. Return a description of it ("rebinds fc.weight"), or "".
        """
        undone = ""
        for name, holder, key, tensor in self._slots:
            new = holder.get(key, self)
            if new is tensor:
                continue
            if _can_update(tensor, new) and not isinstance(tensor, nn.Parameter):
                with torch.no_grad():
                    tensor.copy_(new)
            else:
                undone = undone or f"rebinds {name}"
            holder[key] = tensor
        known = {(id(holder), key) for _, holder, key, _ in self._slots}
        for holder in self._holders:
            for key in [k for k in holder if (id(holder), k) not in known]:
                undone = undone or f"registers {key}"
                del holder[key]
        return undone


def _can_update(old: Any, new: Any) -> bool:
    is_pair = isinstance(old, Tensor) and isinstance(new, Tensor)
    return is_pair and old.shape == new.shape and old.dtype == new.dtype and not new.requires_grad


def _restore(holder: dict[str, Any], held: dict[str, Any]) -> None:
    if list(holder) != list(held) or any(holder[k] is not v for k, v in held.items()):
        holder.clear()
        holder.update(held)


@contextlib.contextmanager
def annotated(model: nn.Module, casts: Mapping[str, torch.dtype] | None = None) -> Iterator[None]:
    """Mark every node that a submodule's forward creates with the submodule's qualified name.

    casts: the format in which modules receive their floating-point inputs.
    """
    wrapped: list[tuple[nn.Module, bool, Any]] = []
    try:
        for name, module in model.named_modules():
            own = module.__dict__.get("forward")
            wrapped.append((module, own is not None, own))
            forward = module.forward
            if casts and name in casts:
                forward = casting(forward, name, casts[name])
            if isinstance(module, BatchNorm) and module.momentum is None:
                forward = _averaging(module, forward)
            module.__dict__["forward"] = _marking(forward, name)
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
        with fx_traceback.annotate({MODULE: name}):
            return forward(*args, **kwargs)

    return marked


def _averaging(norm: BatchNorm, forward: Any) -> Any:
    """Keep the cumulative averages of a batch norm without a momentum, whose weight is a number.

    The weight of a batch is 1 / (number of batches so far). That is a buffer's value, which is a
    tensor here.
    """

    @functools.wraps(forward)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        count = norm.num_batches_tracked
        if not norm.training or count is None:
            return forward(*args, **kwargs)
        buffers = own_buffers(norm)
        averages = {key: buffers[key] for key in ("running_mean", "running_var")}
        buffers.update({key: old.clone() for key, old in averages.items()})
        norm.momentum = 1.0  # to obtain this batch's own statistics
        try:
            out = forward(*args, **kwargs)
            latest = {key: buffers[key] for key in averages}
        finally:
            buffers.update(averages)
            norm.momentum = None
        with torch.no_grad():
            for key, old in averages.items():
                old.lerp_(latest[key], 1.0 / count)
        return out

    return averaged
