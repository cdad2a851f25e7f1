"""Initial values of shards: taken from rank 0's materialised model, or initialised from meta.

A model on meta is initialised module by module on the host, so that it is never whole in memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zerofx.comm.together import exchange
from zerofx.comm.world import World
from zerofx.compat.modules import RESETS, own_buffers, own_parameters, unsaved_buffers
from zerofx.errors import PlanError, ShardError, as_sentence
from zerofx.layout.placements import Cut, Part
from zerofx.layout.slices import HOW_TO_MARK, local_of
from zerofx.layout.tiles import cut
from zerofx.runtime.buffers import share_buffers
from zerofx.runtime.store.tree import ParameterTree, attributes_of
from zerofx.runtime.store.unmarked import crc_of

if TYPE_CHECKING:
    from zerofx.runtime.store.shards import ShardStore


def fill_shards(
    store: ShardStore,
    model: nn.Module,
    tree: ParameterTree,
    seed: int | None,
    given: Collection[str] = (),
) -> None:
    """Fill every shard with rank 0's values and swap the parameters, block by block.

    Parameters on meta on rank 0 are initialised instead, except for `given` names. Only one bucket
    (or one module, from meta) is whole at a time; old parameters are dropped once their bucket is
    done.
    """
    order = list(tree.params)
    on_meta = _meta_on_rank_0(store, model, tree)
    for block, owners in zip(store.layout.blocks, store.layout.owners, strict=True):
        present = [n for n in owners if n not in on_meta]
        if present:
            for bucket in block:
                _take_bucket(store, tree, bucket.index, present)
            for name in present:
                store.adopt(tree, name, tree.params[name])
            store.homes.rest()
    if on_meta:
        initialise_from_meta(store, model, tree, on_meta, seed, given)
    share_buffers(store.world, model)
    store.params = {name: store.params[name] for name in order}


def _meta_on_rank_0(store: ShardStore, model: nn.Module, tree: ParameterTree) -> set[str]:
    """Return the parameters and buffers without values on rank 0; the same set on every rank."""
    tensors = {**dict(model.named_buffers()), **tree.params}
    names = list(tensors)
    flags = torch.tensor([t.is_meta for t in tensors.values()], dtype=torch.uint8)
    flags = flags.to(store.world.device)
    store.world.broadcast(flags, 0).wait()
    return {name for name, is_meta in zip(names, flags.tolist(), strict=True) if is_meta}


@torch.no_grad()
def _take_bucket(store: ShardStore, tree: ParameterTree, index: int, names: list[str]) -> None:
    """Send rank 0's flat values of a bucket's parameters among `names`; keep this rank's slice."""
    layout, world = store.layout, store.world
    bucket = layout.buckets[index]
    if layout.tensor_size > 1:
        _take_parts(store, tree, index, names)
        return
    full = store.shards[index]
    is_apart = store.is_sharded or bucket.is_away
    if is_apart:
        full = torch.zeros(bucket.numel, dtype=bucket.dtype, device=world.device)
    if world.rank == 0:
        for param in (p for p in bucket.params if p.owner in names):
            values = tree.params[param.owner].detach()
            if param.tile is not None:
                values = param.tile.within(values)[0]
            full[param.offset : param.end].view(param.shape).copy_(values)
    world.broadcast(full, 0).wait()
    lo, hi = layout.shard_bounds(bucket, world.shard_rank)
    if is_apart:
        store.shards[index].copy_(full[lo:hi])


def _take_parts(store: ShardStore, tree: ParameterTree, index: int, names: list[str]) -> None:
    """Send rank 0's values parameter by parameter: tensor-axis ranks keep different parts.

    Slices that the model brings come from the first data rank that has the same ones.
    """
    world = store.world
    for param in (p for p in store.layout.buckets[index].params if p.owner in names):
        if param.tile is not None and param.tile.index:
            continue  # all tiles came with the first one
        piece = store.pieces[param.owner]
        if world.slices:
            mine = torch.empty(param.shape, dtype=piece.bucket.dtype, device=world.device)
            mine.copy_(local_of(tree.params[param.owner]))
            world.from_first(mine.view(-1)).wait()
            store.local_view(param.owner).copy_(cut(mine.view(-1), piece.own))
            continue
        whole = torch.empty(param.whole_shape, dtype=piece.bucket.dtype, device=world.device)
        if world.rank == 0:
            whole.copy_(tree.params[param.owner].detach())
        world.broadcast(whole.view(-1), 0).wait()
        store.local_view(param.owner).copy_(piece.cut(whole.view(-1)))


@torch.no_grad()
def check_slices(
    world: World,
    model: nn.Module,
    parts: Mapping[str, Part],
    given: Collection[str] = (),
    ignored: Collection[str] = (),
) -> None:
    """Raise unless what is not marked as a slice is equal on the ranks that have different slices.

    Norms count such a parameter once, and snapshots hold it once. This is a collective call.

    given: names of parameters on meta whose values come later. ignored: names of parameters that
        are left as they are.

    Raises:
        PlanError: on all ranks; a parameter or a saved buffer differs, or a slice has no values.
    """
    wholes: dict[str, Tensor] = {}
    named = model.named_parameters()
    settled = {id(p) for name, p in named if name in parts or name in ignored}  # tied ones too
    for path, module in model.named_modules():
        for holder in (own_parameters(module), own_buffers(module)):
            for key, tensor in holder.items():
                name = f"{path}.{key}" if path else key
                if tensor is None or name in ignored or key in unsaved_buffers(module):
                    continue
                if name not in parts:
                    if id(tensor) not in settled:
                        wholes[name] = tensor
                elif tensor.is_meta and name not in given:
                    raise PlanError(
                        f"{name} is on meta and a slice along {world.slices}. Every rank would "
                        "initialise it alike. Build the model on the host, or pass weights=."
                    )
    axis = world.axis("tensor")
    mine = torch.tensor(
        [crc_of(t) for t in wholes.values()], dtype=torch.int64, device=world.device
    )
    found = mine.new_empty(axis.size * len(wholes))
    if wholes:
        axis.all_gather(found, mine, "digests of whole parameters").wait()
        world.broadcast(found, 0).wait()  # of rank 0 and its peers, whose values are used
    differ = (found.view(axis.size, -1) != found.view(axis.size, -1)[0]).any(0).tolist()
    for (name, tensor), is_other in zip(wholes.items(), differ, strict=True):
        if is_other and isinstance(tensor, nn.Parameter):
            raise PlanError(
                f"{name} {list(tensor.shape)} differs along the mesh axis {world.slices} "
                f"({axis.size} ranks), along which other parameters are slices. {HOW_TO_MARK}. If "
                "all ranks hold the same parameter, give them the same values."
            )
        if is_other:
            raise PlanError(
                f"buffer {name} {list(tensor.shape)} differs along the mesh axis {world.slices} "
                f"({axis.size} ranks), and a snapshot holds it once. Register it with "
                "persistent=False."
            )


@torch.no_grad()
def check_copies(world: World, model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Raise if slices would be taken for copies: marked parameters that differ between the ranks.

    A collective call.

    Raises:
        PlanError: on all ranks; names the parameter.
    """
    mine = {name: crc_of(p) for name, p in model.named_parameters() if name in cuts}
    first, *others = exchange(world, mine, "digests of parameters that are marked as slices")
    for rank, theirs in enumerate(others, 1):
        for name, digest in first.items():
            if theirs[name] != digest:
                raise PlanError(
                    f"{name} is marked as a slice (tensor_model_parallel), and differs between "
                    f"ranks 0 and {rank}, which would be copies of one model. If they have slices, "
                    'pass mesh=mesh["dp"], the data axis of a mesh that also has the axis of the '
                    "slices. If they have copies, build these with the same values."
                )


Hook = Callable[..., Any]


def initialise_from_meta(
    store: ShardStore,
    model: nn.Module,
    tree: ParameterTree,
    on_meta: set[str],
    seed: int | None,
    given: Collection[str] = (),
) -> None:
    """Fill the shards of parameters and the buffers in `on_meta`, children before parents.

    For every module that owns some: materialise them on the host, call its `reset_parameters()` and
    the nearest enclosing `_init_weights(module)`, keep this rank's slice, and drop the rest. All
    ranks run this with one seed, and the user's generator is left as it was.

    given: names whose values come later. They are set to zeros, and their modules are not
        initialised.

    Raises:
        ShardError: a module has no way to initialise what it owns, or left some of it unset.
    """
    unset: dict[str, nn.Module] = {}
    # inference_mode(False) enables gradients, so no_grad must come after it.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        kept = _values_to_keep(store, model, on_meta)
        torch.default_generator.manual_seed(_agreed_seed(store, seed))
        later = _leave_for_later(store, model, tree, on_meta, given)
        for path, module, hook in _children_first(model, "", None):
            params = _materialise_params(module, tree, on_meta)
            buffers = _materialise_buffers(module, path, on_meta)
            if id(module) in later and not (params or buffers):
                continue
            resets = _resets_of(module, hook)
            if params or buffers:
                _require(resets, path, module, [*params, *buffers])
            for i, reset in enumerate(resets):
                # A reset by itself is useless if there is nothing to fill.
                if i or params or buffers:
                    _call(reset, path, module)
            for name, original in params.items():
                if _is_unset(tree.params[name]):
                    unset[name] = module
                _keep_slice(store, tree, name, original)
            store.homes.rest()
            for name in buffers:
                if _is_unset(own_buffers(module)[name.rpartition(".")[2]]):
                    unset[name] = module
        for tensor, value in kept:
            tensor.copy_(value)
        _check_set(store, model, unset)


def _leave_for_later(
    store: ShardStore,
    model: nn.Module,
    tree: ParameterTree,
    on_meta: set[str],
    given: Collection[str],
) -> set[int]:
    """Set the `given` parameters, under any of their names, to zeros; return their modules' ids."""
    paths = {id(module): path for path, module in tree.modules.items()}
    found: set[int] = set()
    for name, holders in tree.holders.items():
        names = {f"{paths[id(m)]}.{key}".removeprefix(".") for m, key in holders}
        if name in on_meta and not names.isdisjoint(given):
            found.update(id(module) for module, _ in holders)
            on_meta.discard(name)
            store.adopt(tree, name, tree.params[name])
    for path, module in tree.modules.items():
        for key, buffer in own_buffers(module).items():
            name = f"{path}.{key}".removeprefix(".")
            if buffer is not None and name in on_meta and name in given:
                found.add(id(module))
                on_meta.discard(name)
                own_buffers(module)[key] = torch.zeros_like(buffer, device=store.world.device)
    return found


def _values_to_keep(
    store: ShardStore, model: nn.Module, on_meta: set[str]
) -> list[tuple[Tensor, Tensor]]:
    """Return (tensor, copy) of values that exist already: hooks initialise everything they see."""
    mine = [store.local_view(name) for name in store.params]
    mine += [b for name, b in model.named_buffers() if name not in on_meta]
    mine += [p for name, p in model.named_parameters() if name in store.ignored]
    return [(tensor, tensor.to("cpu", copy=True)) for tensor in mine]


def _agreed_seed(store: ShardStore, seed: int | None) -> int:
    """Return the seed, or rank 0's `torch.initial_seed()`; the same on every rank."""
    value = torch.initial_seed() if seed is None else seed
    high, low = divmod(value % 2**64, 2**32)
    box = torch.tensor([high, low], dtype=torch.int64, device=store.world.device)
    store.world.broadcast(box, 0).wait()
    high, low = box.tolist()
    return high * 2**32 + low


def _children_first(
    module: nn.Module, path: str, hook: Hook | None, seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module, Hook | None]]:
    """Yield (name, module, nearest enclosing `_init_weights`) in post-order, each module once."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    own = getattr(module, "_init_weights", None)
    if callable(own) and _num_required(own) == 1:
        hook = own
    for key, child in module.named_children():
        yield from _children_first(child, f"{path}.{key}" if path else key, hook, seen)
    yield path, module, hook


def _num_required(func: Hook) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    params = inspect.signature(func).parameters.values()
    return sum(p.kind in kinds and p.default is p.empty for p in params)


def _resets_of(module: nn.Module, hook: Hook | None) -> list[Hook]:
    """Return the initialisers of a module: its own reset first, then the enclosing hook."""
    names = (*RESETS, "_init_weights")
    found = [getattr(module, n, None) for n in names]
    own = [f for f in found if callable(f) and _num_required(f) == 0][:1]
    if hook is None:
        return own
    enclosing = hook
    return [*(own or [lambda: None]), lambda: enclosing(module)]


def _materialise_params(
    module: nn.Module, tree: ParameterTree, on_meta: set[str]
) -> dict[str, nn.Parameter]:
    """Replace the module's own parameters on meta by host memory filled with NaN."""
    done: dict[str, nn.Parameter] = {}
    for name, holders in _held_by(module, tree):
        param = tree.params[name]
        if name not in on_meta or isinstance(param, _Pending):
            continue
        if not any(m is module for m, _ in holders):
            continue
        host = _Pending(_unset_like(param), param.requires_grad)
        vars(host).update(attributes_of(param))
        done[name] = param
        tree.place(name, host)
        on_meta.discard(name)
    return done


class _Pending(nn.Parameter):
    """A parameter on the host that is waiting for its module's initialisation."""


def _held_by(module: nn.Module, tree: ParameterTree) -> list[tuple[str, list[Any]]]:
    mine = {id(p) for p in own_parameters(module).values() if p is not None}
    return [(n, tree.holders[n]) for n, p in tree.params.items() if id(p) in mine]


def _materialise_buffers(module: nn.Module, path: str, on_meta: set[str]) -> list[str]:
    done = []
    for key, buffer in own_buffers(module).items():
        name = f"{path}.{key}" if path else key
        if buffer is not None and name in on_meta:
            own_buffers(module)[key] = _unset_like(buffer)
            done.append(name)
    return done


def _unset_like(tensor: Tensor) -> Tensor:
    """Return host memory filled with values that `_is_unset` recognises."""
    out = torch.empty_like(tensor, device="cpu")
    if out.is_floating_point() or out.is_complex():
        return out.fill_(float("nan"))
    return out.zero_() if out.dtype == torch.bool else out.fill_(torch.iinfo(out.dtype).min)


def _is_unset(tensor: Tensor | None) -> bool:
    if tensor is None or tensor.dtype == torch.bool or not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.uint8 and bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _require(resets: list[Hook], path: str, module: nn.Module, names: list[str]) -> None:
    if not resets:
        raise ShardError(
            f"{names[0]} is on meta, and its module {path or 'the model'} "
            f"({type(module).__name__}) has no reset_parameters(). Give it one (or the model an "
            "_init_weights(module)), or build the model on the host."
        )


def _call(reset: Hook, path: str, module: nn.Module) -> None:
    try:
        reset()
    except Exception as error:
        raise ShardError(
            f"initialising {path or 'the model'} ({type(module).__name__}) from meta failed: "
            f"{as_sentence(error)} Build the model on the host instead."
        ) from error


def _keep_slice(store: ShardStore, tree: ParameterTree, name: str, original: nn.Parameter) -> None:
    piece = store.pieces[name]
    full = tree.params[name].detach().reshape(-1)
    store.local_view(name).copy_(piece.cut(full))
    store.adopt(tree, name, original)


def _check_set(store: ShardStore, model: nn.Module, unset: dict[str, nn.Module]) -> None:
    """Raise for values that are still unset after all enclosing modules were initialised."""
    for name, module in unset.items():
        value: Tensor | None = store.params.get(name)
        if value is None:
            value = model.get_buffer(name)
        if _is_unset(value):
            raise ShardError(
                f"{name} is on meta, and neither {type(module).__name__}.reset_parameters() nor an "
                "enclosing _init_weights set all of it. Build the model on the host, or set it "
                "there."
            )
