"""Module tree and its parameters: which modules hold each one, and whether they still do.

A program runs on the modules and parameters that existed when it was captured.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zerofx.compat.autograd import has_gradient_hooks
from zerofx.compat.callers import DTensor
from zerofx.compat.modules import own_buffers, own_children, own_parameters, put_parameter
from zerofx.compat.tensors import OF_DTENSORS, memory_range, raw_data
from zerofx.errors import ShardError
from zerofx.layout.slices import local_of
from zerofx.runtime.tensors.piece import Ledger, ParameterPiece, piece_of

Holder = tuple[nn.Module, str]


# Dtypes that both gloo and NCCL reduce, and that torch itself adds.
SUMMABLE = frozenset(
    {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128}
)


class ParameterTree:
    """Every distinct parameter under its canonical (first) name, and all places that hold it.

    ignored: names of parameters that stay the user's; `left` contains them.
    """

    def __init__(self, model: nn.Module, ignored: Collection[str] = ()) -> None:
        self.params: dict[str, nn.Parameter] = {}
        self.left: dict[str, nn.Parameter] = {}
        self.holders: dict[str, list[Holder]] = {}
        self.modules = dict(model.named_modules())
        names: dict[int, str] = {}
        for module_name, module in self.modules.items():
            for key, param in own_parameters(module).items():
                if param is None:
                    continue
                full_name = f"{module_name}.{key}" if module_name else key
                if full_name in ignored:
                    self.left.setdefault(names.setdefault(id(param), full_name), param)
                    continue
                name = names.setdefault(id(param), full_name)
                self.params.setdefault(name, param)
                self.holders.setdefault(name, []).append((module, key))

    def check(self) -> None:
        """Raise unless every parameter is plain, initialised or on meta, and without gradient."""
        for name, param in self.params.items():
            if piece_of(param) is not None:
                raise ShardError(f"{name} belongs to a compiled model already. Compile it once.")
            if nn.parameter.is_lazy(param):
                raise ShardError(
                    f"{name} is a lazy parameter without a shape. Run the model once before "
                    "zerofx.compile."
                )
            torch_function = type(param).__torch_function__
            is_plain = torch_function is nn.Parameter.__torch_function__
            if not is_plain and not isinstance(param, DTensor):
                raise ShardError(
                    f"{name} is a {type(param).__name__}, and only plain parameters can be laid "
                    "out in flat shards. Compile before quantising or distributing it."
                )
            check_summable(name, param)
            if has_gradient_hooks(param):
                raise ShardError(
                    f"{name} has a gradient hook, which would never run: a program assigns p.grad "
                    "itself. Call register_post_accumulate_grad_hook on the parameter of the "
                    "compiled model instead, or hook the tensor inside forward."
                )
            if param.grad is not None:
                raise ShardError(
                    f"{name} already has a gradient, which sharding would drop. Call "
                    "model.zero_grad() before zerofx.compile."
                )
        for name, param in self.left.items():
            if param.is_meta:
                raise ShardError(
                    f"{name} is on meta, and Plan.ignored_params leaves it to you. Give it values "
                    "before zerofx.compile, or do not ignore it."
                )
        self._check_memory()

    def _check_memory(self) -> None:
        """Raise if a parameter shares memory with another parameter or with a buffer.

        Each gets memory of its own in a shard, so the shared memory would silently become two
        copies.
        """
        found: list[tuple[str, int, int, str, bool]] = []  # memory, first byte, end, name, param?
        params = {**self.params, **self.left}
        seen = {id(p) for p in params.values()}
        for name, param in params.items():
            found.append((*memory_range(local_of(param)), name, True))
        for path, module in self.modules.items():
            for key, buffer in own_buffers(module).items():
                if buffer is None or nn.parameter.is_lazy(buffer) or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                found.append((*memory_range(buffer), f"{path}.{key}" if path else key, False))
        reach: tuple[str, int, str, bool] | None = None  # the range, so far, with the highest end
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
        ShardError: names the parameter and its dtype.
    """
    if param.requires_grad and param.dtype not in SUMMABLE:
        raise ShardError(
            f"{name} is {param.dtype}, whose gradients no backend can sum over ranks. Keep it in "
            "float32 or bfloat16 and cast in forward, or freeze it (requires_grad_(False))."
        )


def _shared(one: str, other: str, are_parameters: bool) -> ShardError:
    way = (
        f"To tie them, make them one Parameter ({other} = {one})"
        if are_parameters
        else "Compute the buffer from the parameter in forward"
    )
    return ShardError(
        f"{one} and {other} share memory but are two tensors, and sharding would silently untie "
        f"them. {way}. To keep them apart, give one a copy (its .data.clone())."
    )


def attributes_of(param: torch.Tensor) -> dict[str, object]:
    """Return attributes that users and libraries set on a parameter (`p.tag = 1`)."""
    ours = ("zfx", "_grad", *OF_DTENSORS)
    return {k: v for k, v in vars(param).items() if k not in ours}


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_REBUILD = (
    ". Make the change before zerofx.compile, or build the changed model, load this one's "
    "zerofx.full_state_dict and compile that."
)

# id of a module's `_parameters` (a compiled model shares its root's) -> key -> the value assigned
# there (`module.weight = nn.Parameter(...)`, `load_state_dict(assign=True)`) since the last check
_assigned: dict[int, dict[str, nn.Parameter]] = {}


@cache
def _watch_assignments() -> None:
    """Distinguish assignments from writes that bypass them; installed once per process.

    `torch.func.functional_call` puts its values into `_parameters` for one call only. Treating them
    as a load would overwrite the weights permanently.
    """
    register_module_parameter_registration_hook(_note_assignment)


def _note_assignment(module: nn.Module, key: str, param: nn.Parameter) -> None:
    held = _assigned.get(id(own_parameters(module)))
    if held is not None:
        held[key] = param


class Bindings:
    """The parameters, their storages and the submodules of a compiled model, as of compile.

    `params` and `views` (the 1-D ranges of the flat shards) are keyed by canonical name, in the
    same order.
    """

    def __init__(
        self,
        tree: ParameterTree,
        ledger: Ledger,
        params: Mapping[str, nn.Parameter],
        pieces: Mapping[str, ParameterPiece],
        views: Mapping[str, Tensor],
    ) -> None:
        self._ledger, self._params, self._views = ledger, params, views
        self._bound = list(tree.bindings())
        self._holders = [module for _, module, _ in self._bound]
        self._modules = list(tree.modules.items())
        self._children = [own_children(m) for m in tree.modules.values()]
        self._expected = [dict(c) for c in self._children]
        # the object that carries each piece: its local tensor, or the parameter itself
        self._carriers = [pieces[name].local(p) for name, p in params.items()]
        self._shapes = [t.shape for t in self._carriers]
        self._pointers = [t.data_ptr() for t in self._carriers]
        _watch_assignments()
        for module in {id(m): m for _, m, _ in self._bound}.values():
            key = id(own_parameters(module))
            _assigned[key] = {}
            weakref.finalize(module, _assigned.pop, key, None)

    def check(self) -> None:
        """Make sure that modules and parameters are ours, and lie in their flat shards.

        Values that were assigned in a parameter's place are copied into its shard, and ours is put
        back.

        Raises:
            ShardError: a submodule was exchanged, values do not fit, or parameters were tied or
                untied; names it.
        """
        if self._children != self._expected:
            self._compare_children()
        params = self._params
        holders = map(own_parameters, self._holders)
        for (name, module, key), held in zip(self._bound, holders, strict=True):
            if held.get(key) is not params[name]:
                self._restore(name, module, key)
        if [t.data_ptr() for t in self._carriers] != self._pointers:
            self._return_storages()
        for name, (owner, other) in self._ledger.aliases.tied.items():
            where = "" if owner is self._ledger.aliases else " of another compiled model"
            raise ShardError(
                f"{name}: p.data was given the p.data of {other}{where}, which would tie the two "
                "in eager PyTorch, but each has memory of its own in a shard. Assign a copy "
                "(.data.clone()), or make them one Parameter before zerofx.compile."
            )

    # -- submodules ---------------------------------------------------------------------------
    def _compare_children(self) -> None:
        for i, (path, owner) in enumerate(self._modules):
            before, now = self._expected[i], own_children(owner)
            prefix = f"{path}." if path else ""
            for key, child in before.items():
                if now.get(key) is not child:
                    raise _exchanged(prefix + key, child, now.get(key))
            for key in now.keys() - before.keys():
                _check_addition(prefix + key, owner, now[key])
            self._expected[i] = dict(now)

    # -- parameters ---------------------------------------------------------------------------
    def _restore(self, name: str, module: nn.Module, key: str) -> None:
        found: Any = own_parameters(module).get(key, getattr(module, key, None))
        assigned = _assigned[id(own_parameters(module))]
        is_assigned = assigned.get(key) is found
        ours = self._params[name]
        if not isinstance(found, Tensor):
            raise ShardError(
                f"{name}: the module now holds {found!r} instead of its {ours.dtype} "
                f"parameter{_REBUILD}"
            )
        if isinstance(found, DTensor) and piece_of(found) is None:
            raise ShardError(
                f"{name}: a DTensor was put in the parameter's place, as parallelize_module, "
                "distribute_module and fully_shard do, but zerofx.compile has already sharded the "
                "model. Drop that call, and train the compiled model as it is."
            )
        if any(found is param for param in self._params.values()):
            raise ShardError(
                f"{name}: the module now holds another parameter of the model, which would tie the "
                f"two, but the compiled programs update each separately{_REBUILD}"
            )
        if not is_assigned:
            raise ShardError(
                f"{name}: a {type(found).__name__} was put in the parameter's place without using "
                "the module, as torch.func.functional_call and torch.export do, but a compiled "
                "model computes only from its shards. Make the call inside `with "
                "zerofx.whole(model):`, where it is the uncompiled one, or load the values "
                f"(model.load_state_dict, or module.{key} = nn.Parameter(...))."
            )
        for what, theirs, own in (
            ("dtype", found.dtype, ours.dtype),
            ("shape", list(found.shape), list(ours.shape)),
        ):
            if theirs != own:
                raise ShardError(
                    f"{name}: the module now holds a tensor of {what} {theirs} instead of "
                    f"{own}{_REBUILD}"
                )
        places = [(m, k) for other, m, k in self._bound if other == name]
        for other_module, other_key in places:
            other = own_parameters(other_module).get(other_key)
            if other is not found and (other is ours or not _equal(other, found)):
                raise ShardError(
                    f"{name}: it is held in {len(places)} places, and one of them now holds "
                    f"another tensor, which would untie it{_REBUILD}"
                )
        with torch.no_grad():
            ours.copy_(found)
        self._ledger.aliases.note_assignment(name, found)
        if found.requires_grad != ours.requires_grad:
            ours.requires_grad_(found.requires_grad)
        for module, key in places:
            put_parameter(module, key, ours)
            _assigned[id(own_parameters(module))].pop(key, None)

    def _return_storages(self) -> None:
        rows = zip(self._views.items(), self._carriers, self._shapes, strict=True)
        for (name, view), carrier, shape in rows:
            if carrier.data_ptr() == view.data_ptr():
                continue
            if carrier.numel() != view.numel() or carrier.dtype != view.dtype:
                raise ShardError(
                    f"{name}: its storage was replaced by {carrier.numel()} elements of "
                    f"{carrier.dtype}, but the shard holds {view.numel()} of {view.dtype}. Write "
                    "into the parameter in place."
                )
            with torch.no_grad():
                view.copy_(carrier.detach().reshape(-1))
            raw_data.__set__(carrier, view.view(shape))
            self._ledger.note_write()


def _equal(one: Any, other: Tensor) -> bool:
    is_plain = isinstance(one, Tensor) and not isinstance(one, DTensor)
    return is_plain and one.shape == other.shape and bool(torch.equal(one, other))


def _exchanged(name: str, before: nn.Module | None, now: nn.Module | None) -> ShardError:
    if now is None:
        what = f"the {type(before).__name__} there was removed"
    else:
        what = f"another module, a {type(now).__name__}, was put in its place"
    return ShardError(f"{name}: {what}, but the compiled programs run the old one{_REBUILD}")


def _check_addition(name: str, owner: nn.Module, child: nn.Module | None) -> None:
    """Raise unless a new child changes no captured call, as a loss or a metric does not."""
    if child is None:
        return
    if isinstance(owner, _CONTAINERS) or next(child.parameters(), None) is not None:
        raise ShardError(
            f"{name}: a {type(child).__name__} was added, but the compiled programs do not run "
            f"it{_REBUILD}"
        )
