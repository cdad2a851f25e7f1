"""Flat runs of an optimizer's parameters and states; states are created when they are needed.

A *stretch* holds parameters of one group that are adjacent in a flat shard, with only padding
between them, and one flat tensor per state. A *run* is the part of a stretch that one step updates
as one flat tensor. It ends at a parameter without a gradient, where the layout of the gradients
differs from that of the parameters, and where the step counts differ.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerofx.compat.optim import foreach_add_
from zerofx.errors import OptimizerError
from zerofx.layout.buckets import Bucket
from zerofx.layout.tiers import Tier
from zerofx.runtime.tensors.piece import Ledger, ParameterPiece, piece_of
from zerofx.runtime.tensors.tensor import local_value

if TYPE_CHECKING:
    from zerofx.optim.flat import FlatOptimizer

# Whether the parameters of a ledger in a bucket are due (None: parameters of no compiled model).
IsDue = Callable[[Ledger | None, Bucket | None], bool]
Ranges = list[tuple[int, int]]  # half-open ranges of parameters


# -- parameters -----------------------------------------------------------------------------------
class OwnMemory:
    """A parameter of no compiled model, which has its own memory.

    It has the attributes of a `ParameterPiece` that an optimizer uses.

    Raises:
        OptimizerError: the parameter is not contiguous.
    """

    ledger = bucket = None
    index = shard_offset = 0
    is_cut = False

    def __init__(self, param: Tensor) -> None:
        if not param.is_contiguous():
            raise OptimizerError(
                f"a parameter of shape {list(param.shape)} has strides {list(param.stride())}, but "
                "zerofx.optim steps over flat memory. Make it contiguous "
                "(p.data = p.contiguous()), or use torch.optim for it."
            )
        self.shape, self.length = param.shape, param.numel()
        self.own = ((0, self.length),)

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def show(self, flat: Tensor) -> Tensor:
        return flat.view(self.shape)


Holding = ParameterPiece | OwnMemory  # the part of a parameter that this rank holds


def holding_of(param: Tensor) -> Holding:
    """Return the part of a parameter that this rank holds.

    Raises:
        OptimizerError: a parameter of no compiled model is not contiguous.
    """
    return piece_of(param) or OwnMemory(param)


def name_of(param: Tensor) -> str:
    """Return a parameter's name if it has one, else its shape; for error messages."""
    piece = piece_of(param)
    return f"a parameter of shape {list(param.shape)}" if piece is None else piece.name


def check_dtype(param: Tensor, optimizer: str, takes_half: bool) -> None:
    """Raise if the dtype of a parameter cannot represent this optimizer's updates.

    Raises:
        OptimizerError: the parameter is float16, complex or not a float; names it.
    """
    if param.dtype == torch.float16 and not takes_half:
        raise OptimizerError(
            f"{name_of(param)} is float16 without a float32 master copy, in which most updates of "
            f"{optimizer} vanish. Keep the model in float32 and compute in 16 bits with "
            'Plan(precision="fp16"), or use SGD.'
        )
    if not param.is_floating_point():
        raise OptimizerError(
            f"{name_of(param)} is {param.dtype}, but {optimizer} of zerofx.optim takes real floats "
            "only. Give it to the torch.optim optimizer of that name."
        )


def neighbours(holdings: Sequence[Holding]) -> list[list[int]]:
    """Group the indices of `holdings` so that only padding separates the members of a group.

    Members of one bucket without elements form their own group.
    """
    groups: list[list[int]] = []
    empty: dict[Any, list[int]] = {}
    last: Holding | None = None
    for number, held in sorted(enumerate(holdings), key=lambda m: (str(_buffer(m[1])), m[1].index)):
        buffer = _buffer(held)
        if held.length == 0:
            empty.setdefault(number if buffer is None else buffer, []).append(number)
            continue
        if last is not None and _is_before(last, held):
            groups[-1].append(number)
        else:
            groups.append([number])
        last = held
    return [*groups, *empty.values()]


def _buffer(held: Holding) -> tuple[int, int] | None:
    """Return a key that is shared by the parameters of one flat buffer."""
    return None if held.bucket is None else (id(held.ledger), held.bucket.index)


def _is_before(one: Holding, other: Holding) -> bool:
    """Return whether only padding lies between the elements of one parameter and the other's."""
    if one.ledger is None or other.bucket is None or _buffer(one) != _buffer(other):
        return False
    if other.index <= one.index:
        return False
    layout, rank = one.ledger.layout, one.ledger.world.shard_rank
    between = other.bucket.params[one.index + 1 : other.index]
    return not any(layout.piece(other.bucket, p, rank)[2] for p in between)


# -- runs -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class FlatRun:
    """Parameters `first:last` of a stretch, all stepped alike, as flat tensors.

    Shapes: param and each of states [numel] (or Codes); steps [last - first], equal numbers.
    bounds: the half-open range of each parameter's elements in the run.
    offset: the element of the bucket's shard at which the run begins.
    """

    first: int
    last: int
    params: tuple[Tensor, ...]
    bounds: tuple[tuple[int, int], ...]
    param: Tensor
    states: Mapping[str, Any]
    steps: Tensor
    is_first: bool  # whether the states were created for this very step
    ledger: Ledger | None
    bucket: Bucket | None
    offset: int

    @property
    def numel(self) -> int:
        return self.param.numel()


Work = list[tuple[FlatRun, Tensor]]  # runs with their flat gradients

# 256 KiB of float32: the temporaries of a part stay in a core's cache, so that an update reads and
# writes parameters, gradients and states once. An accelerator needs longer parts to be busy.
PART = 1 << 16
DEVICE_PART = 1 << 24


def parts(flat: Tensor) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of elements that cover a flat tensor and fit the processor's cache."""
    size = PART if flat.device.type == "cpu" else DEVICE_PART
    for start in range(0, flat.numel(), size):
        yield start, min(start + size, flat.numel())


def overlaps(
    bounds: Sequence[tuple[int, int]], start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (index, begin, end) of the ranges that overlap start:stop, relative to start."""
    for number, (begin, end) in enumerate(bounds):
        if begin < stop and end > start:
            yield number, max(begin, start) - start, min(end, stop) - start


def flat_from(first: Tensor, numel: int) -> Tensor:
    """Return `numel` elements of the same storage, beginning with those of `first`."""
    return first.as_strided((numel,), (1,), first.storage_offset())


def joined(
    grads: Sequence[Tensor | None], pointers: Sequence[int], bounds: Sequence[tuple[int, int]]
) -> Ranges:
    """Return ranges of parameters whose gradients have the same relative layout as they have.

    pointers: the addresses of the parameters. bounds: the range of each parameter's elements.
    """
    ranges: Ranges = []
    last_delta: object = None
    for i, (grad, pointer) in enumerate(zip(grads, pointers, strict=True)):
        delta: object = None
        if grad is not None:
            # a transposed gradient, for example, is flat memory in another order
            delta = grad.data_ptr() - pointer if grad.is_contiguous() else object()
            if not bounds[-1][1]:
                delta = 0
            if delta == last_delta:
                ranges[-1] = ranges[-1][0], i + 1
            else:
                ranges.append((i, i + 1))
        last_delta = delta
    return [r for whole in ranges for r in _within_storage(whole, grads, bounds)]


def _within_storage(
    whole: tuple[int, int], grads: Sequence[Tensor | None], bounds: Sequence[tuple[int, int]]
) -> Ranges:
    """Return the range, or each parameter alone if its gradients only happen to be adjacent.

    If the storage of the first gradient extends over all of them, they share that storage.
    """
    first, last = whole
    grad = grads[first]
    assert grad is not None
    if last - first > 1:
        end = grad.storage_offset() + bounds[last - 1][1] - bounds[first][0]
        if end * grad.itemsize > grad.untyped_storage().nbytes():
            return [(i, i + 1) for i in range(first, last)]
    return [whole]


def split_by_steps(ranges: Sequence[tuple[int, int]], steps: Tensor) -> Ranges:
    """Split ranges where the step counts (Shape: [parameters], or empty) differ."""
    if not steps.numel():
        return list(ranges)
    counts = steps.tolist()
    found: Ranges = []
    for first, last in ranges:
        cuts = [k for k in range(first + 1, last) if counts[k] != counts[k - 1]]
        found += pairwise([first, *cuts, last])
    return found


def strided(grad: Tensor, param: Tensor) -> Tensor:
    """Return a gradient if it is dense.

    Raises:
        OptimizerError: the gradient is not dense; names the parameter.
    """
    if grad.layout is not torch.strided:
        raise OptimizerError(
            f"{name_of(param)}: its gradient is {grad.layout}, but zerofx.optim needs dense ones. "
            "Make it with sparse=False, or give the parameter to torch.optim.SparseAdam."
        )
    return grad


# -- stretches ------------------------------------------------------------------------------------
class StretchStates(ABC):
    """The states of one stretch: the form in which they are kept."""

    @abstractmethod
    def adopt(
        self,
        stretch: FlatStretch,
        old: Sequence[MutableMapping[str, Any]],
        keys: Sequence[str],
    ) -> Sequence[MutableMapping[str, Any]]:
        """Lay out the states `keys`: values from `old` (the states of each parameter), else zeros.

        Returns:
            Each parameter's states as users see them; values of other keys are unchanged.
        """

    @abstractmethod
    def of(self, first: int, last: int) -> dict[str, Any]:
        """Return the states of the parameters first:last in the form that a run has."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the states on this rank."""


class DenseStates(StretchStates):
    """States in the parameters' own dtype, each as one flat tensor in the bucket's tier."""

    def __init__(self) -> None:
        self._flats: dict[str, Tensor] = {}
        self._bounds: tuple[tuple[int, int], ...] = ()

    def adopt(
        self,
        stretch: FlatStretch,
        old: Sequence[MutableMapping[str, Any]],
        keys: Sequence[str],
    ) -> Sequence[MutableMapping[str, Any]]:
        kept = {key for key in keys if _lies_there(stretch, key, old)}
        others = [key for key in keys if key not in kept]
        new = [_detached(stretch, values, others) for values in old]
        self._bounds = stretch.bounds
        self._flats = {key: _zeros(stretch, key, key in kept) for key in keys}
        for number, (held, values) in enumerate(zip(stretch.holdings, new, strict=True)):
            start, stop = self._bounds[number]
            for key, flat in self._flats.items():
                view = held.show(flat[start:stop])
                if key not in kept and values.get(key) is not None:
                    fill(view, values[key], stretch.params[number], key)
                values[key] = view
        if stretch.ledger is not None:
            stretch.ledger.homes.rest()  # reading states on NVMe has used host memory
        return new

    def of(self, first: int, last: int) -> dict[str, Any]:
        if not self._flats:
            return {}
        start, stop = self._bounds[first][0], self._bounds[last - 1][1]
        return {key: flat[start:stop] for key, flat in self._flats.items()}

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self._flats.values())


class FlatStretch:
    """Parameters of one group with only padding between them, and their states.

    Padding is zero in parameters, gradients and states, and every update keeps it zero. New states
    and step counts are zero. Step counts are on the host, because kernels take the count as a
    number.

    owner: a weak reference to the optimizer.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        holdings: Sequence[Holding],
        states: StretchStates,
        owner: weakref.ref[Any],
    ) -> None:
        self.params, self.holdings, self.states = tuple(params), tuple(holdings), states
        self.owner = owner
        first = holdings[0]
        self.ledger, self.bucket = first.ledger, first.bucket
        self.offset = start = first.shard_offset
        self.bounds = tuple(
            (h.shard_offset - start, h.shard_offset - start + h.length) if h.length else (0, 0)
            for h in holdings
        )
        self.numel = self.bounds[-1][1]
        # the tensors that own the memory: a local tensor, or the parameter itself
        self._carriers = [h.local(p) for h, p in zip(holdings, params, strict=True)]
        self._pointers = self._read_pointers()
        self.flat = flat_from(self._carriers[0].detach(), self.numel)
        self.steps = torch.zeros(0)
        self.is_first = True
        # per parameter: its states as in `state`, the same as a dict, and the values laid out there
        self._held: list[tuple[Tensor, Any, dict[str, Any], list[tuple[str, Any]]]] = []
        self._pattern: tuple[tuple[int, int], ...] = ()
        self._runs: list[FlatRun] | None = None

    def _read_pointers(self) -> list[int]:
        return [t.data_ptr() for t in self._carriers]

    def adopt(self, state: MutableMapping[Tensor, Any], keys: Sequence[str], counts: bool) -> None:
        """Lay out the states `keys` and the step counts, with the values that `state` has of them.

        `state[param]` then holds views of the flat tensors; values of other keys are unchanged.
        """
        old = [state.get(p) or {} for p in self.params]
        self.is_first = not any(d.get(key) is not None for d in old for key in keys)
        if not keys and not counts:
            return
        if counts:
            counted = [d.get("step") for d in old]
            self.steps = torch.tensor([0.0 if c is None else float(c) for c in counted])
        new = self.states.adopt(self, old, keys)
        for number, (param, values) in enumerate(zip(self.params, new, strict=True)):
            if counts:
                values["step"] = self.steps[number]
            state[param] = values
            held: Any = getattr(values, "held", values)
            names = (*keys, "step") if counts else keys
            self._held.append((param, values, held, [(name, held[name]) for name in names]))

    def is_intact(self, state: Mapping[Tensor, Any]) -> bool:
        """Return whether parameters and states are still those that were laid out."""
        return self._read_pointers() == self._pointers and all(
            state.get(param) is values and all(held.get(k) is v for k, v in known)
            for param, values, held, known in self._held
        )

    # -- a step -------------------------------------------------------------------------------
    def runs(self) -> Work:
        """Return the runs to be stepped, each with its flat gradient."""
        locals_ = [
            None if (grad := param.grad) is None else strided(held.local(grad), param)
            for held, param in zip(self.holdings, self.params, strict=True)
        ]
        pattern = tuple(joined(locals_, self._pointers, self.bounds))
        if self._runs is None or pattern != self._pattern:
            self._runs = [self._run(i, j) for i, j in split_by_steps(pattern, self.steps)]
            self._pattern = pattern
        found = self._runs
        if self.is_first:  # the runs of this step are marked first; the next step makes new ones
            self.is_first, self._runs = False, None
        return [(run, _flat_grad(locals_[run.first], run)) for run in found]

    def _run(self, first: int, last: int) -> FlatRun:
        start, stop = self.bounds[first][0], self.bounds[last - 1][1]
        return FlatRun(
            first,
            last,
            self.params[first:last],
            tuple((a - start, b - start) for a, b in self.bounds[first:last]),
            self.flat[start:stop],
            self.states.of(first, last),
            self.steps[first:last],
            self.is_first,
            self.ledger,
            self.bucket,
            self.offset + start,
        )


def _flat_grad(first: Tensor | None, run: FlatRun) -> Tensor:
    assert first is not None
    if run.last - run.first == 1:
        return first.reshape(-1)
    return flat_from(first, run.numel)


def _lies_there(stretch: FlatStretch, key: str, old: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a state of all parameters is already in its place on NVMe."""
    ledger, bucket = stretch.ledger, stretch.bucket
    if ledger is None or bucket is None or bucket.home is not Tier.NVME:
        return False
    start = ledger.homes.state_at(key, bucket, stretch.offset)
    rows = zip(old, stretch.holdings, stretch.bounds, strict=True)
    for values, held, (first, last) in rows:
        if start is None or not isinstance(values.get(key), Tensor):
            return False
        value = held.local(values[key])
        is_alike = value.dtype == stretch.flat.dtype and value.is_contiguous()
        if not is_alike or value.numel() != last - first:
            return False
        if last > first and value.data_ptr() != start + first * value.itemsize:
            return False
    return True


def _zeros(stretch: FlatStretch, key: str, keeps: bool) -> Tensor:
    """Return zeros like the parameters for a state, in the tier of their bucket.

    keeps: its place in that tier already has content, which is kept.
    """
    ledger, bucket = stretch.ledger, stretch.bucket
    if ledger is None or bucket is None or not bucket.is_away:
        return torch.zeros_like(stretch.flat)
    return ledger.homes.state(key, bucket, stretch.numel, stretch.offset, stretch.owner, keeps)


def _detached(
    stretch: FlatStretch, values: MutableMapping[str, Any], keys: Sequence[str]
) -> dict[str, Any]:
    """Return a parameter's states, copied off the place on NVMe that new states will use."""
    found = dict(values)
    if stretch.bucket is not None and stretch.bucket.home is Tier.NVME:
        found |= {k: found[k].clone() for k in keys if found.get(k) is not None}
    return found


def fill(view: Tensor, value: Tensor, param: Tensor, key: str) -> None:
    """Copy a loaded state, whole or cut like the parameter, into its view of the flat tensor.

    Raises:
        ShardError, OptimizerError: it has another shape; names the parameter and both shapes.
    """
    piece = piece_of(view)
    if piece is not None:
        target: Any = view
        piece.local(view).copy_(local_value(target, value, f"the state {key!r}"))
        return
    if value.shape != view.shape:
        raise OptimizerError(
            f"{name_of(param)}: the loaded state {key!r} has shape {list(value.shape)}, but the "
            f"parameter has {list(view.shape)}."
        )
    view.copy_(value)


# -- groups ---------------------------------------------------------------------------------------
@dataclass
class FlatGroup:
    """The flat layout of one parameter group."""

    params: list[Tensor]
    keys: tuple[str, ...]
    stretches: list[FlatStretch]
    waiting: list[Tensor]  # parameters without states, because they had no gradient so far


class FlatGroups:
    """The part of an optimizer that lays out its parameters and states, group by group.

    It holds no reference to the optimizer, which passes itself to each call, so that an optimizer
    that is dropped frees its states immediately.
    """

    def __init__(self) -> None:
        self._laid: dict[int, FlatGroup] = {}

    @property
    def state_bytes(self) -> int:
        """Bytes of the states on this rank, without step counts."""
        return sum(s.states.nbytes for laid in self._laid.values() for s in laid.stretches)

    def forget(self) -> None:
        """Discard the layout, so that the next request makes it again."""
        self._laid.clear()

    def current(self, optimizer: FlatOptimizer) -> list[FlatGroup]:
        """Return the layout of each group, made again if parameters or states were replaced.

        States that were loaded, or created by torch's own optimizer, are copied to flat tensors.
        """
        return [self._current(optimizer, n) for n in range(len(optimizer.param_groups))]

    def latest(self) -> list[FlatGroup]:
        """Return the result of the last `current`, without checking for changes."""
        return [self._laid[number] for number in range(len(self._laid))]

    def make_states(self, optimizer: FlatOptimizer, params: Sequence[Tensor]) -> None:
        """Create zero states, with step count 0, for those of these parameters that have none."""
        wanted = set(map(id, params))
        for laid in self.current(optimizer):
            fresh = [p for p in laid.waiting if id(p) in wanted]
            laid.stretches += self._stretches(optimizer, fresh, laid.keys)
            laid.waiting = [p for p in laid.waiting if id(p) not in wanted]

    def make_due_states(
        self, optimizer: FlatOptimizer, laid: Sequence[FlatGroup], is_due: IsDue
    ) -> None:
        """Create the states of parameters that are due and have their first gradient."""
        for each in laid:
            fresh = [p for p in each.waiting if _is_due(p, is_due) and p.grad is not None]
            if fresh:
                each.stretches += self._stretches(optimizer, fresh, each.keys)
                made = set(map(id, fresh))
                each.waiting = [p for p in each.waiting if id(p) not in made]

    def works(
        self, optimizer: FlatOptimizer, laid: Sequence[FlatGroup], is_due: IsDue
    ) -> list[Work]:
        """Return each group's runs that are due and have gradients, and count a step of each.

        Missing states are created first, for all groups before any step is counted, because space
        may be short.
        """
        self.make_due_states(optimizer, laid, is_due)
        return [_work(each, is_due, optimizer.counts_steps) for each in laid]

    def _current(self, optimizer: FlatOptimizer, number: int) -> FlatGroup:
        group = optimizer.param_groups[number]
        params, keys = group["params"], optimizer.state_keys(group)
        laid = self._laid.get(number)
        if laid is not None and _is_current(optimizer, laid, params, keys):
            return laid
        self._laid.pop(number, None)
        for param in params:
            check_dtype(param, type(optimizer).__name__, optimizer.takes_half)
        has_state = [p for p in params if _has_state(optimizer, p, keys)]
        known = set(map(id, has_state))
        waiting = [p for p in params if id(p) not in known]
        stretches = self._stretches(optimizer, has_state, keys)
        laid = self._laid[number] = FlatGroup(list(params), keys, stretches, waiting)
        return laid

    def _stretches(
        self, optimizer: FlatOptimizer, params: Sequence[Tensor], keys: tuple[str, ...]
    ) -> list[FlatStretch]:
        holdings = [holding_of(p) for p in params]
        made = []
        for numbers in neighbours(holdings):
            stretch = FlatStretch(
                [params[i] for i in numbers],
                [holdings[i] for i in numbers],
                optimizer.states_type(),
                weakref.ref(optimizer),
            )
            stretch.adopt(optimizer.state, keys, optimizer.counts_steps)
            made.append(stretch)
        return made


def _is_current(
    optimizer: FlatOptimizer, laid: FlatGroup, params: list[Tensor], keys: tuple[str, ...]
) -> bool:
    return (
        laid.keys == keys
        and len(laid.params) == len(params)
        and all(map(is_, laid.params, params))
        and all(stretch.is_intact(optimizer.state) for stretch in laid.stretches)
        and not any(_has_state(optimizer, p, keys) for p in laid.waiting)
    )


def _has_state(optimizer: FlatOptimizer, param: Tensor, keys: tuple[str, ...]) -> bool:
    needed = (*keys, "step") if optimizer.counts_steps else keys
    if not needed:
        return True
    held = optimizer.state.get(param) or {}
    return all(held.get(key) is not None for key in needed)


def _is_due(param: Tensor, is_due: IsDue) -> bool:
    held = holding_of(param)
    return is_due(held.ledger, held.bucket)


def _work(laid: FlatGroup, is_due: IsDue, counts_steps: bool) -> Work:
    work: Work = []
    for stretch in laid.stretches:
        if is_due(stretch.ledger, stretch.bucket):
            work += stretch.runs()
    if work and counts_steps:
        foreach_add_([run.steps for run, _ in work], 1)
    return work


def ledgers_of(params: Iterable[Tensor]) -> list[Ledger]:
    """Return the distinct ledgers of the compiled models to which parameters belong."""
    pieces = (piece_of(p) for p in params)
    return list({id(p.ledger): p.ledger for p in pieces if p is not None}.values())
