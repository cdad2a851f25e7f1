"""Islands: forwards that run eagerly, since no static graph of them can be made.

The forward of an island is the user's own code, and autograd records it. Around it zerofx gathers
parameters, by programs like any other (`capture.original`): where the island spans several units
those that its module itself registers, else all in it. Modules that it calls have programs of their
own, or are islands themselves, so that no more than one unit is whole at a time. What autograd
would keep of whole parameters for backward is dropped after forward and gathered again when
backward asks for it; the gradients go the way of every program's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zerofx.capture.formats import cast_inputs, dtype_at
from zerofx.capture.original import ALL, OWN, Entry, Place, original
from zerofx.compat.autograd import at_end_of_backward, backward_number
from zerofx.compat.graphs import pytree
from zerofx.compat.modules import own_parameters
from zerofx.compat.tensors import version_of
from zerofx.errors import CaptureError, ShardError
from zerofx.passes.placement import compute_dtype, module_dtypes
from zerofx.runtime.turns import Turns

if TYPE_CHECKING:
    from zerofx.model.namespace import Namespace


log = logging.getLogger("zerofx")


@dataclass(frozen=True)
class Island:
    """A function of the model that runs eagerly, and why.

    gathered: the entry whose program gives it whole parameters; None where it needs none.
    share: how much of the model's parameters that is, of 1.
    """

    entry: Entry
    reason: str
    gathered: Entry | None
    share: float

    def __str__(self) -> str:
        name = str(self.entry) or "the model"
        reason = self.reason.removeprefix("capture: ").rstrip(".")
        return f"{name}, {self.share:.0%} of the parameters gathered around it: {reason}"

    @property
    def is_whole(self) -> bool:
        """Whether all that it calls runs eagerly too, on the parameters gathered around it."""
        return self.gathered is not None and self.gathered.method == ALL


def island_of(own: Namespace, entry: Entry, error: CaptureError) -> Island:
    """Return the island that a function becomes whose capture raised `error`."""
    model = own.model
    with original(model):
        module = entry.module(model)
        ignored = own.engine.store.ignored
        names = [n for n, _ in module.named_parameters(entry.path, remove_duplicate=False)]
        names = [name for name in names if name not in ignored]
        units = {own.units[name] for name in names}
        if len(units) > 1:
            has_own = any(name.rpartition(".")[0] == entry.path for name in names)
            gathered = Entry(entry.path, OWN) if has_own else None
        else:
            gathered = Entry(entry.path, ALL) if units else None
        params = gathered.parameters(model) if gathered is not None else {}
        inside = sum(p.numel() for name, p in params.items() if name not in ignored)
        share = inside / max(1, sum(p.numel() for p in own.engine.store.params.values()))
    return Island(entry, str(error).partition("\n")[0], gathered, share)


class Whole:
    """Whole parameters of one module for code that runs eagerly, and for its backward.

    take: returns them, as a program's outputs; inside backward under no_grad.
    """

    def __init__(self, take: Callable[[], Sequence[Tensor]], turns: Turns) -> None:
        self._take, self._turns = take, turns
        self._tensors: list[Tensor] | None = None
        self._places: dict[int, int] = {}  # where a storage lies -> which tensor's

    def begin(self) -> Sequence[Tensor]:
        """Gather them for forward."""
        tensors = list(self._take())
        self._places = {t.untyped_storage().data_ptr(): i for i, t in enumerate(tensors)}
        self._tensors = tensors
        for tensor in tensors:
            if tensor.grad_fn is not None:  # one node for all of them, after all that used them
                tensor.grad_fn.register_hook(lambda *_: self.drop())
                break
        return tensors

    def drop(self) -> None:
        """Let go of the values."""
        self._tensors = None

    @contextlib.contextmanager
    def saved_as_places(self) -> Iterator[None]:
        """Have autograd save where in which parameter a tensor lies, in the place of its values."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, saved: Tensor) -> Any:
        which = self._places.get(_address(saved))
        if which is None or self._tensors is None:
            return saved
        whole = self._tensors[which]
        if saved.dtype is not whole.dtype:
            return saved
        return which, saved.size(), saved.stride(), saved.storage_offset()

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self._tensors is None:
            self._turns.begin_backward()
            with torch.no_grad():
                self._tensors = [t.detach() for t in self._take()]
            if backward_number() != -1:
                at_end_of_backward(self.drop)
        which, size, strides, offset = saved
        return self._tensors[which].as_strided(size, strides, offset)


def _address(tensor: Tensor) -> int:
    """Return where a tensor's memory begins, 0 for one that has none of its own."""
    if tensor.layout is not torch.strided or type(tensor) is not Tensor:
        return 0
    return tensor.untyped_storage().data_ptr()


def places_of(own: Namespace, entry: Entry, whole: Mapping[str, Tensor]) -> list[Place]:
    """Return where whole tensors, by the names of an entry's parameters, stand in for these."""
    with original(own.model):
        params = entry.parameters(own.model)
        tensors = {id(params[name]): tensor for name, tensor in whole.items()}
        module = entry.module(own.model)
        held = [
            (each, key, param)
            for each in ([module] if entry.method == OWN else module.modules())
            for key, param in own_parameters(each).items()
            if id(param) in tensors
        ]
    return [Place(each, key, param, tensors[id(param)]) for each, key, param in held]


def sharded(own: Namespace, entry: Entry) -> dict[str, nn.Parameter]:
    """Return the parameters of an entry that lie in shards, by name: all but the ignored ones."""
    with original(own.model):
        params = entry.parameters(own.model)
    return {n: p for n, p in params.items() if n not in own.engine.store.ignored}


@contextlib.contextmanager
def gathered(own: Namespace, entry: Entry, code: str) -> Iterator[None]:
    """Have the parameters of an entry whole inside, for code that runs eagerly and its backward.

    code: what errors call that code.
    """
    whole = Whole(lambda: own.call(entry, (), {}), own.engine.turns)
    with contextlib.ExitStack() as stack:
        stack.callback(whole.drop)
        names = sharded(own, entry)
        places = places_of(own, entry, dict(zip(names, whole.begin(), strict=True)))
        stack.enter_context(own.original.standing_in(places))
        if torch.is_grad_enabled():
            stack.enter_context(whole.saved_as_places())
        if entry.method == ALL:
            stack.enter_context(own.passing_through(entry.path))
        versions = []
        if not torch.is_inference_mode_enabled():  # tensors made there count no versions
            versions = [version_of(p.whole) for p in places]
        yield
        for place, version in zip(places, versions, strict=False):
            if version_of(place.whole) != version:
                raise ShardError(
                    f"{code} changes its parameter {place.key} in place, which a program, and a "
                    "shard, would not see. Make it a buffer, or change it after optimizer.step(), "
                    "under torch.no_grad()"
                )


def run(own: Namespace, island: Island, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an island's forward; return what it returns. If it raises, the other ranks are told."""
    try:
        return _run(own, island, args, kwargs)
    except BaseException as error:
        own.engine.world.report_failure(repr(error))
        raise


def _run(own: Namespace, island: Island, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    model = own.model
    module, name = island.entry.module(model), island.entry.describe(model)
    precision = own.plan.precision
    dtype = dtype_at(island.entry.path, compute_dtype(precision), module_dtypes(precision))
    args, kwargs = cast_arguments(args, kwargs, dtype)
    if own.world.size > 1:  # ranks would put off sums of different modules
        own.engine.gradients.no_sync = False
    with contextlib.ExitStack() as stack:
        stack.enter_context(own.engine.turns.taken())
        if island.gathered is not None:
            stack.enter_context(gathered(own, island.gathered, name))
        if module is model:
            stack.enter_context(own.original.restored(model))
        before = _buffer_versions(own)
        result = island.entry.call(model, args, kwargs)
        if changed := _changed(before, _buffer_versions(own)):
            own.engine.turns.share_buffers(name, changed)
        return result


def _buffer_versions(own: Namespace) -> dict[str, int]:
    """Return how often each buffer was written to, if this island's writes have to be shared."""
    turns = own.engine.turns
    is_shared = turns.are_taken and turns.is_outermost and own.plan.buffers == "rank0"
    if not is_shared or torch.is_inference_mode_enabled():
        return {}
    return {n: version_of(b) for n, b in own.model.named_buffers() if not b.is_inference()}


def _changed(before: dict[str, int], after: dict[str, int]) -> tuple[str, ...]:
    """Return the buffers of modules one of whose buffers was written to.

    A batch norm counts its batches in one; its statistics change without a count of versions.
    """
    written = {name.rpartition(".")[0] for name, count in after.items() if before[name] != count}
    return tuple(name for name in after if name.rpartition(".")[0] in written)


def cast_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments in the format that code computes in, as programs take them."""
    if dtype is None:
        return args, kwargs

    def cast(leaf: Any) -> Any:
        return cast_inputs((leaf,), dtype)[0] if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(cast, (args, kwargs))  # type: ignore[no-any-return]


def say(own: Namespace, island: Island) -> None:
    """Tell the user that a function has become an island, and what that means.

    Raises:
        CaptureError: the plan cuts layers or sequences, which an eager forward cannot be.
    """
    parallel = own.plan.parallel
    if parallel.value_ranks > 1:
        raise CaptureError(
            f"{island.entry.describe(own.model)} cannot be captured "
            f"({island.reason.removeprefix('capture: ').rstrip('.')}), and what runs eagerly "
            f"cannot be cut over Plan.parallel.{parallel.value_axis} = {parallel.value_ranks} ranks"
        )
    if own.world.rank != 0:
        return
    name = island.entry.describe(own.model)
    log.warning(
        "%s runs eagerly, as no static graph of it can be made: %s. %s Plan(islands='refuse') "
        "makes this an error.",
        name, island.reason.removeprefix("capture: ").rstrip("."),
        "All in it runs eagerly, on parameters gathered around it." if island.is_whole else
        "The modules that it calls have programs of their own.",
    )  # fmt: skip
