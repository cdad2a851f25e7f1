"""Islands: forwards that run eagerly because they cannot be captured as a static graph.

The forward of an island is the user's own code, recorded by autograd. zerofx gathers parameters
around it with ordinary programs (`capture.original`). If the island spans several units, it gathers
the parameters that its module itself registers; otherwise all parameters in it. Modules that it
calls have programs of their own or are islands themselves, so that no more than one unit is whole
at a time. Whole parameters that autograd would keep for backward are dropped after forward and
gathered again when backward needs them. Their gradients are reduced like those of every program.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zerofx.capture import guard
from zerofx.capture.formats import cast_inputs, dtype_at
from zerofx.capture.original import ALL, OWN, Entry, Place, original
from zerofx.compat.autograd import at_end_of_backward, backward_number
from zerofx.compat.graphs import pytree
from zerofx.compat.modules import own_parameters
from zerofx.compat.tensors import version_of
from zerofx.errors import CaptureError, PlanError, ShardError, ZerofxError, as_sentence
from zerofx.passes.placement import compute_dtype, module_dtypes
from zerofx.plan.plan import Plan
from zerofx.plan.rules import without_islands
from zerofx.runtime.tensors.parameter import read_by
from zerofx.runtime.turns import Turns

if TYPE_CHECKING:
    from zerofx.model.namespace import Namespace


log = logging.getLogger("zerofx")


@dataclass(frozen=True)
class Island:
    """A function of the model that runs eagerly, and the reason.

    gathered: the entry whose program gathers whole parameters for it; None if it needs none.
    share: the fraction of the model's parameters that are gathered, between 0 and 1.
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
        """Whether everything that it calls runs eagerly too, on parameters gathered around it."""
        return self.gathered is not None and self.gathered.method == ALL


def named_islands(model: nn.Module, chosen: str | Sequence[str]) -> dict[str, str]:
    """Return the modules that a plan chooses to run eagerly: their names and the reasons.

    These are the modules that match a pattern of `chosen`, and those that contain one.

    Raises:
        PlanError: a pattern matches no module.
    """
    if isinstance(chosen, str):  # a rule, not patterns
        return {}
    names = [name for name, _ in model.named_modules()]
    found: dict[str, str] = {}
    for pattern in chosen:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise PlanError(
                f"Plan.islands: no module of {type(model).__name__} matches {pattern!r}. Its "
                f"modules are {', '.join(names[1:9])}{' and others' if len(names) > 9 else ''}."
            )
        found |= dict.fromkeys(matching, "Plan.islands names it")
    for name in [*found]:
        above = name
        while above:
            above = above.rpartition(".")[0]
            found.setdefault(above, f"{name}, which Plan.islands names, is in it")
    return found


def double_backward(model: nn.Module, plan: Plan) -> str:
    """Return what to do where a compiled backward would have to be differentiated, for errors.

    Inside forward, torch.autograd.grad(create_graph=True) is captured. Modules that run eagerly are
    differentiated twice by values, not by parameters, whose gradients pass through a program.
    """
    inside = "Call torch.autograd.grad(..., create_graph=True) inside the model's forward, "
    params = {name: own_parameters(m).values() for name, m in model.named_modules()}
    owners = [name for name, own in params.items() if any(p is not None for p in own)]
    if named_islands(model, plan.islands).keys() >= set(owners):
        return (
            "Modules that run eagerly have them for values alone, not for parameters. "
            f"{inside}without Plan.islands, where it is captured."
        )
    if without_islands(plan):
        return f"{inside}where it is captured."
    return (
        f"{inside}where it is captured. Or, for gradients of inputs, let the modules that have "
        f"parameters run eagerly: Plan(islands={_patterns(owners)})."
    )


def _patterns(names: Sequence[str], most: int = 8) -> list[str]:
    """Return patterns for `Plan.islands` that match these modules, at most so many."""
    numbered = [re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names]
    for patterns in (names, [*dict.fromkeys(numbered)]):
        if len(patterns) <= most:
            return [*patterns]
    return ["*"]


def island_of(own: Namespace, entry: Entry, error: CaptureError) -> Island:
    """Return the island for a function whose capture raised `error`."""
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

    take: returns them, as a program's outputs; inside backward it runs under no_grad.
    """

    def __init__(self, take: Callable[[], Sequence[Tensor]], turns: Turns) -> None:
        self._take, self._turns = take, turns
        self._tensors: list[Tensor] | None = None
        self._places: dict[int, int] = {}  # address of a storage -> index of its tensor

    def begin(self) -> Sequence[Tensor]:
        """Gather the parameters for forward."""
        tensors = list(self._take())
        self._places = {t.untyped_storage().data_ptr(): i for i, t in enumerate(tensors)}
        self._tensors = tensors
        for tensor in tensors:
            # One node for all of them, which runs after all their uses.
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_hook(lambda *_: self.drop())
                break
        return tensors

    def drop(self) -> None:
        """Drop the values."""
        self._tensors = None

    @contextlib.contextmanager
    def saved_as_places(self) -> Iterator[None]:
        """Make autograd save a tensor's position within a parameter instead of its values."""
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
    """Return the address of a tensor's memory, 0 if it has none of its own."""
    if tensor.layout is not torch.strided or type(tensor) is not Tensor:
        return 0
    return tensor.untyped_storage().data_ptr()


def places_of(own: Namespace, entry: Entry, whole: Mapping[str, Tensor]) -> list[Place]:
    """Return the places where whole tensors (by parameter name) replace an entry's parameters."""
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
    """Return the sharded parameters of an entry by name: all except the ignored ones."""
    with original(own.model):
        params = entry.parameters(own.model)
    return {n: p for n, p in params.items() if n not in own.engine.store.ignored}


@contextlib.contextmanager
def gathered(
    own: Namespace, entry: Entry, code: str, keeps: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Make the parameters of an entry whole inside the block, for eager code and its backward.

    code: the name of that code in errors. keeps: let autograd keep the values that it needs for
    backward, instead of gathering them again.

    Yields:
        The whole tensors by parameter name.
    """
    whole = Whole(lambda: own.call(entry, (), {}), own.engine.turns)
    with ExitStack() as stack:
        stack.callback(whole.drop)
        names = sharded(own, entry)
        found = dict(zip(names, whole.begin(), strict=True))
        places = places_of(own, entry, found)
        stack.enter_context(own.original.standing_in(places))
        if torch.is_grad_enabled() and not keeps:
            stack.enter_context(whole.saved_as_places())
        if entry.method == ALL:
            stack.enter_context(own.passing_through(entry.path))
        versions = []
        if not torch.is_inference_mode_enabled():  # inference tensors have no version counter
            versions = [version_of(p.whole) for p in places]
        yield found
        for place, version in zip(places, versions, strict=False):
            if version_of(place.whole) != version:
                raise ShardError(
                    f"{code} changes its parameter {place.key} in place, which a program, and a "
                    "shard, would not see. Make it a buffer, or change it after optimizer.step(), "
                    "under torch.no_grad()."
                )


def run(own: Namespace, island: Island, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an island's forward and return its result. If it raises, tell the other ranks.

    An error of zerofx then says as well why the forward runs eagerly, unless the plan names it: at
    its first call, the user has not been told yet (see `say`).
    """
    try:
        return _run(own, island, args, kwargs)
    except BaseException as error:
        if isinstance(error, ZerofxError) and not own.is_named(island.entry.path):
            _add_reason(own, island, error)
        own.engine.world.report_failure(repr(error))
        raise


def _add_reason(own: Namespace, island: Island, error: ZerofxError) -> None:
    """Append to an error's text why an island runs eagerly; the innermost island's reason counts.

    A CaptureError has a reason of its own.
    """
    said = "runs eagerly here, because it cannot be captured as a static graph"
    if isinstance(error, CaptureError) or said in str(error):
        return
    reason = as_sentence(island.reason.removeprefix("capture: "))
    error.args = (f"{error}\n{island.entry.describe(own.model)} {said}: {reason}",)


def _run(own: Namespace, island: Island, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    model = own.model
    module, name = island.entry.module(model), island.entry.describe(model)
    precision = own.plan.precision
    dtype = dtype_at(island.entry.path, compute_dtype(precision), module_dtypes(precision))
    args, kwargs = cast_arguments(args, kwargs, dtype)
    if own.world.size > 1:  # ranks would postpone sums of different modules
        own.engine.gradients.no_sync = False
    with ExitStack() as stack:
        stack.enter_context(own.engine.turns.taken())
        if island.gathered is not None:
            stack.enter_context(gathered(own, island.gathered, name))
        if module is model:
            stack.enter_context(own.original.restored(model))
        stack.enter_context(read_by(own.engine.store.ledger, _reader(own, stack, name)))
        before = _buffer_versions(own)
        stack.enter_context(guard.running(model, own.engine.store.ledger, is_traced=False))
        result = island.entry.call(model, args, kwargs)
        if changed := _changed(before, _buffer_versions(own)):
            own.engine.turns.share_buffers(name, changed)
        return result


def _reader(own: Namespace, stack: ExitStack, code: str) -> Callable[[str], Tensor | None]:
    """Return what gives eager code a parameter of a module that it does not call, as a whole.

    The parameters that the module registers are gathered once, and stay until the stack is closed.
    """
    found: dict[str, Tensor] = {}

    def read(name: str) -> Tensor | None:
        if own.original.is_captured:
            return None
        if name not in found:
            entry = Entry(name.rpartition(".")[0], OWN)
            found.update(stack.enter_context(gathered(own, entry, code, keeps=True)))
        return found[name]

    return read


def _buffer_versions(own: Namespace) -> dict[str, int]:
    """Return the version of each buffer, if this island's buffer writes have to be shared."""
    turns = own.engine.turns
    is_shared = turns.are_taken and turns.is_outermost and own.plan.buffers == "rank0"
    if not is_shared or torch.is_inference_mode_enabled():
        return {}
    return {n: version_of(b) for n, b in own.model.named_buffers() if not b.is_inference()}


def _changed(before: dict[str, int], after: dict[str, int]) -> tuple[str, ...]:
    """Return the buffers of all modules with at least one buffer that was written to.

    A batch norm increments its count of batches, while its statistics change without a new version.
    """
    written = {name.rpartition(".")[0] for name, count in after.items() if before[name] != count}
    return tuple(name for name in after if name.rpartition(".")[0] in written)


def cast_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments in the dtype that the code computes in, as programs take them."""
    if dtype is None:
        return args, kwargs

    def cast(leaf: Any) -> Any:
        return cast_inputs((leaf,), dtype)[0] if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(cast, (args, kwargs))  # type: ignore[no-any-return]


def say(own: Namespace, island: Island) -> None:
    """Tell the user that a function has become an island, and the consequences.

    Raises:
        CaptureError: the plan cuts layers or sequences, which an eager forward cannot be.
    """
    parallel = own.plan.parallel
    if parallel.brings_slices:
        raise CaptureError(
            f"{island.entry.describe(own.model)} cannot be captured "
            f"({island.reason.removeprefix('capture: ').rstrip('.')}), and code that runs eagerly "
            f"would read whole parameters in place of the slices along {own.world.slices}. Correct "
            "what prevents its capture."
        )
    if axes := parallel.value_axes:
        named = " and ".join(f"Plan.parallel.{axis}" for axis in axes)
        raise CaptureError(
            f"{island.entry.describe(own.model)} cannot be captured "
            f"({island.reason.removeprefix('capture: ').rstrip('.')}), and code that runs eagerly "
            f"cannot be cut over {named} = {parallel.value_ranks} ranks. Correct "
            f"what prevents its capture, or set {named} = 1."
        )
    if own.world.rank != 0:
        return
    name = island.entry.describe(own.model)
    reason = island.reason.removeprefix("capture: ").rstrip(".")
    share = (
        "Everything in it runs eagerly, on parameters gathered around it."
        if island.is_whole
        else "The modules that it calls have programs of their own."
    )
    if own.islands:
        log.warning("%s runs eagerly, too: %s. %s", name, reason, share)
        return
    log.warning(
        "%s runs eagerly, because it cannot be captured as a static graph: %s. %s "
        "Plan(islands='refuse') makes this an error.",
        name, reason, share,
    )  # fmt: skip
