"""The base of all optimizers: flat runs of parameters and states, a global norm, one update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from zerofx.compat.tensors import foreach_norm
from zerofx.errors import OptimizerError
from zerofx.layout.buckets import Bucket
from zerofx.optim.in_backward import BackwardUpdates, groups_as_now, is_stepped, settle
from zerofx.optim.nvme_steps import WholeSteps, divide, update_staged
from zerofx.optim.runs import (
    DenseStates,
    FlatGroup,
    FlatGroups,
    FlatRun,
    StretchStates,
    Work,
    check_dtype,
    ledgers_of,
    name_of,
)
from zerofx.runtime.tensors.piece import (
    CastCopy,
    Ledger,
    ParameterPiece,
    over_tensor_axis,
    piece_of,
)
from zerofx.runtime.tensors.refuse import refuse_partial_norm

# -- The global norm of gradients, and the factor that unscales and clips them in the update -------


# Each row's norm is accumulated in float32, and the sum of the rows in float64. The result is exact
# to 1e-8, where one float32 sum over 8 M elements was off by 2e-4.
ROW = 4096
_WHAT = "the norm of the gradients (max_grad_norm)"


def square_sum(flat: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor in float64; temporaries take 1 / 4096 of it."""
    if flat.device.type != "cpu":
        return foreach_norm([flat], dtype=torch.float32)[0].double().square()
    split = flat.numel() // ROW * ROW
    dtype = torch.float32 if flat.dtype in (torch.bfloat16, torch.float16) else None
    rows = torch.linalg.vector_norm(flat[:split].view(-1, ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[split:], dtype=dtype)
    return rows.double().square().sum() + rest.double().square()


def _order(piece: ParameterPiece) -> tuple[int, int]:
    """Return a sort key of a parameter within its model that is the same on all ranks."""
    return piece.bucket.index, piece.param.offset


def global_norm(work: Iterable[tuple[FlatRun, Tensor]]) -> Tensor:
    """Return the norm of all gradients over all ranks, float64 [], the same bits on every rank.

    Sharded gradients are summed over the ranks of the shard axis; those of parameters that are cut
    over the tensor axis, over that axis too. The ranks of a replicate axis hold equal gradients.
    There is one exchange per model and axis. Ranks that own no element take part in it.
    """
    sharded: dict[int, list[tuple[ParameterPiece, Tensor]]] = {}
    whole: list[Tensor] = []
    for run, grad in work:
        axes = "" if run.ledger is None else run.ledger.world.other_axes
        if axes:
            refuse_partial_norm(name_of(run.params[0]), "max_grad_norm", axes)
        pieces = [p for p in map(piece_of, run.params) if p is not None and p.is_cut]
        if pieces:
            piece = min(pieces, key=_order)
            sums = _square_sums(run, grad, pieces)
            sharded.setdefault(id(piece.ledger), []).append((piece, sums))
        else:
            whole.append(square_sum(grad))
    for found in sharded.values():
        partial = _sum([sums for _, sums in found])
        first = min((piece for piece, _ in found), key=_order)  # the same one on every rank
        sums = first.gather_partials(partial, _WHAT).sum(0)
        world = first.ledger.world
        total = over_tensor_axis(world, sums, _ARE_CUT, _over_ranks).sum().reshape(1)
        stages = world.axis("pipeline")
        if stages.size > 1:
            total = total.to(world.device)
            stages.all_reduce(total, 1.0, _WHAT).wait()
        whole.append(total.reshape(()))
    return _sum(whole).sqrt() if whole else torch.zeros((), dtype=torch.float64)


def _over_ranks(sums: Tensor) -> Tensor:
    return sums.sum(0)


_ARE_CUT = (False, True)  # the two sums are of parameters that are not, and are, cut over tensor


def _square_sums(run: FlatRun, grad: Tensor, pieces: Sequence[ParameterPiece]) -> Tensor:
    """Return this rank's sums of squares of a run, float64 [2], or [1] without other axes.

    Parameters that several pipeline stages share count in the first of them.
    """
    layout = pieces[0].ledger.layout
    if layout.tensor_size == layout.pipeline_size == 1:
        return square_sum(grad).reshape(1)
    sums = torch.zeros(len(_ARE_CUT), dtype=torch.float64, device=grad.device)
    for piece, (start, stop) in zip(pieces, run.bounds, strict=True):
        if piece.bucket.positions[0] == layout.position:
            sums[int(piece.tensor_part is not None)] += square_sum(grad[start:stop])
    return sums


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, some of which may be on a device and some on the host."""
    device = next((p.device for p in parts if p.device.type != "cpu"), parts[0].device)
    return torch.stack([part.to(device) for part in parts]).sum(0)


def divisor(
    norm: Tensor | None, max_norm: float | None, grad_scale: Tensor | None
) -> Tensor | None:
    """Return the divisor of the gradients: `grad_scale`, times the factor that clips to `max_norm`.

    `norm` is that of the gradients as stored, still scaled; the rule is that of clip_grad_norm_.
    Returns None if nothing changes, as far as this is known without waiting for a device.

    Shapes: all [], the result float32.
    """
    found = None if grad_scale is None else grad_scale.double().reshape(())
    if norm is not None and max_norm is not None:
        true_norm = norm if found is None else norm / found
        clip = torch.clamp((true_norm + 1e-6) / max_norm, min=1.0)
        found = clip if found is None else found * clip
    if found is None or (found.device.type == "cpu" and float(found) == 1.0):
        return None
    return found.float()


# -- The base class of all optimizers --------------------------------------------------------------


_Key = tuple[int, int | None]  # a ledger's id and a bucket; None: of no compiled model


def alike(work: Work) -> list[Work]:
    """Group runs by dtype and device, because one call of a fused kernel takes only one of each."""
    found: dict[Any, Work] = {}
    for run, grad in work:
        found.setdefault((run.param.dtype, run.param.device), []).append((run, grad))
    return list(found.values())


def near(scale: Tensor | None, run: FlatRun) -> Tensor | None:
    """Return the divisor of the gradients on the device of a run's parameters."""
    return None if scale is None else scale.to(run.param.device)


class StepCasts:
    """The slices of resident copies that are current when a step begins, and the step's writes.

    A slice stays current if the step also writes to it everything that it changes of the bucket.
    The elements of the step's runs are counted against those that kernels asked a place for. Any
    other slice becomes stale, which costs one cast at the next refresh.
    """

    def __init__(self, ledgers: Iterable[Ledger], runs: Iterable[FlatRun]) -> None:
        self._copies: dict[_Key, CastCopy] = {
            (id(ledger), bucket): copy
            for ledger in ledgers
            for bucket, copy in ledger.copies.items()
            if copy.is_current
        }
        self._left = dict.fromkeys(self._copies, 0)  # elements that are changed but not yet copied
        for run in runs:
            self._count(run, 1)

    def place_for(self, run: FlatRun) -> Tensor | None:
        """Return where else a run's new parameters must be written, rounded; None if nowhere."""
        copy = self._copies.get(_key(run))
        if copy is None:
            return None
        self._count(run, -1)
        return copy.part(run.offset, run.offset + run.numel)

    def end(self) -> None:
        """Mark the slices to which the step has written everything that it changed."""
        for key, copy in self._copies.items():
            if self._left[key] == 0:
                copy.mark()

    def _count(self, run: FlatRun, sign: int) -> None:
        key = _key(run)
        if key in self._left:
            self._left[key] += sign * sum(stop - start for start, stop in run.bounds)


def _key(run: FlatRun) -> _Key:
    return id(run.ledger), None if run.bucket is None else run.bucket.index


class FlatOptimizer(Optimizer, ABC):
    """An optimizer that steps flat runs of parameters, with torch.optim's states and groups.

    A subclass names its states and updates runs; closures, clipping, loss scales and loading are
    handled here. `grad_norm` is the norm of the last step's gradients over all groups and ranks
    before clipping: float64 [], or None without max_grad_norm.

    As in torch, parameters without a gradient are left out of a step. `GradScaler` passes its scale
    to the step, so that unscaling needs no separate pass. If it found an infinity (on any rank),
    the step changes nothing.

    Three parts do everything except the update, and hold no reference to the optimizer:
        _groups: the flat layout of parameters and states (`FlatGroups`).
        _backward: updates inside backward (`BackwardUpdates`).
        _whole: steps that either all ranks take or none (`WholeSteps`).
    """

    communicates: ClassVar[bool] = False  # whether an update communicates
    counts_writes: ClassVar[bool] = True  # so zerofx's hook after every step need not
    counts_steps: ClassVar[bool] = True
    takes_half: ClassVar[bool] = False
    _step_supports_amp_scaling = True

    max_grad_norm: float | None
    grad_norm: Tensor | None
    states_type: type[StretchStates] = DenseStates
    _casts: StepCasts | None = None  # set during a step

    def _begin(self, max_grad_norm: float | None) -> None:
        """Set the attributes that this class adds to torch's.

        Raises:
            OptimizerError: max_grad_norm is not positive.
        """
        if max_grad_norm is not None and not max_grad_norm > 0.0:
            raise OptimizerError(
                f"max_grad_norm is {max_grad_norm}, but must be positive. Give None not to clip."
            )
        self.max_grad_norm = max_grad_norm
        self.grad_norm = None
        self._groups = FlatGroups()
        self._backward = BackwardUpdates()
        self._whole = WholeSteps(type(self).__name__)

    # -- the interface of subclasses ------------------------------------------------------------
    @abstractmethod
    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the states, of a parameter's shape, that the group's options need."""

    def update(self, group: dict[str, Any], work: Work, scale: Tensor | None) -> None:
        """Update non-empty runs of one dtype and device; gradients are divided by `scale`.

        A subclass that needs work between groups or ranks overrides `update_groups` instead.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither update nor update_groups.")

    def update_groups(self, work: Sequence[tuple[dict[str, Any], Work]], scale: Any) -> None:
        """Update all groups; called on every rank, even if it owns no element of them."""
        for group, pairs in work:
            for part in alike([pair for pair in pairs if pair[0].numel]):
                self.update(group, part, near(scale, part[0][0]))

    def cast_place(self, run: FlatRun) -> Tensor | None:
        """Return where a kernel must also write new parameters, rounded; None if nowhere."""
        return None if self._casts is None else self._casts.place_for(run)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states on this rank, without step counts."""
        return self._groups.state_bytes

    # -- torch's interface --------------------------------------------------------------------
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        kind = type(self).__name__
        if group.get("differentiable"):
            raise OptimizerError(
                f"{kind}: differentiable=True would record every update for autograd. Use "
                f"torch.optim.{kind} on an uncompiled model for it."
            )
        for param in group["params"]:
            check_dtype(param, kind, self.takes_half)
        self._backward.take_over(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return what `closure` returns."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise OptimizerError(
                f"{type(self).__name__}: a step reads rates and step counts on the host, and a "
                "CUDA graph would repeat the same values at every replay. Step outside the graph."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._whole.check()
        self._backward.note_step(self)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0.0:
            return loss
        with torch.inference_mode(False):
            laid = self._groups.current(self)
            fresh = ledgers_of(p for each in laid for p in each.waiting if p.grad is not None)
            self._whole.make_states(
                fresh, lambda: self._groups.make_due_states(self, laid, is_stepped)
            )
            self._update_and_count(laid, self._groups.works(self, laid, is_stepped))
        return loss

    def _update_and_count(self, laid: Sequence[FlatGroup], work: Sequence[Work]) -> None:
        """Update runs; count one write to each model, even if the update fails partway."""
        found = {id(s.ledger): s.ledger for each in laid for s in each.stretches}
        ledgers = [ledger for ledger in found.values() if ledger is not None]
        casts = self._casts = StepCasts(ledgers, (run for pairs in work for run, _ in pairs))
        try:
            self._whole.update(ledgers, lambda: self._update_all(work))
        finally:
            self._casts = None
            for ledger in ledgers:
                ledger.note_update()
        casts.end()

    def _update_all(
        self, work: Sequence[Work], groups: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """Update runs of each group, with the options of the groups or of `groups` if given."""
        grad_scale = getattr(self, "grad_scale", None)
        norm = None
        if self.max_grad_norm is not None:
            norm = global_norm(pair for pairs in work for pair in pairs)
            self.grad_norm = norm if grad_scale is None else norm / grad_scale
        scale = divisor(norm, self.max_grad_norm, grad_scale)
        near, far = divide(work)

        def update(part: Sequence[Work]) -> None:
            self.update_groups(list(zip(groups or self.param_groups, part, strict=True)), scale)

        if any(near) or not far:
            update(near)
        update_staged(far, update, self.communicates)

    def state_dict(self) -> dict[str, Any]:
        """Return states and groups as the torch optimizer of this name would.

        States come in the order of the parameters, which is the same on all ranks. States are
        created in the order of the pieces on a rank, but gathering them is a collective call.
        """
        settle(self)
        found = super().state_dict()
        states = found["state"]
        numbers = [n for group in found["param_groups"] for n in group["params"] if n in states]
        order = [*numbers, *(states.keys() - set(numbers))]
        found["state"] = {
            k: dict(states[k]) if isinstance(states[k], Mapping) else states[k] for k in order
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        settle(self)
        super().load_state_dict(state_dict)
        self._groups.forget()
        self._whole.forget()
        with torch.inference_mode(False), torch.no_grad():
            self._groups.current(self)
        self._backward.note_load(self)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("max_grad_norm", "states_type")
        return {**super().__getstate__(), **{k: getattr(self, k) for k in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch also calls this when it loads a state_dict
        self._groups = FlatGroups()
        if "_backward" not in self.__dict__:
            self._backward, self._whole = BackwardUpdates(), WholeSteps(type(self).__name__)
        self.grad_norm = None
        super().__setstate__(state)

    # -- called by a backward that updates parameters (`BucketOptimizer`) -------------------------
    def update_in_backward(self) -> None:
        """Take over the updates of all parameters whose model updates them inside backward.

        Raises:
            ShardError: this optimizer clips, which needs all gradients first.
        """
        self._backward.take_over(self)

    @torch.no_grad()
    def make_states(self, params: Sequence[Tensor]) -> None:
        """Create zero states, with step count 0, for those of these parameters that have none."""
        with torch.inference_mode(False):
            self._groups.make_states(self, params)

    def begin_backward(self) -> None:
        """Check once per backward whether parameters, states and options have changed.

        Raises:
            ShardError: clipping was turned on since the last check.
        """
        self._backward.begin(self)
        with torch.inference_mode(False), torch.no_grad():
            self._groups.current(self)

    @torch.no_grad()
    def take_bucket(self, ledger: Ledger, bucket: int) -> Callable[[], None]:
        """Take the current gradients of a bucket's parameters; return a function that updates them.

        The update uses the options that the groups have now.
        """

        def is_due(of: Ledger | None, its: Bucket | None) -> bool:
            return of is ledger and its is not None and its.index == bucket

        with torch.inference_mode(False):
            work = self._groups.works(self, self._groups.latest(), is_due)
        groups = groups_as_now(self)

        @torch.no_grad()
        def update() -> None:
            with torch.inference_mode(False):
                self._update_all(work, groups)
            work.clear()  # it holds the gradients

        return update
