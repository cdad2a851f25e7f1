"""Whole-parameter optimizers: each parameter is updated by the one rank that owns it.

Muon orthogonalises matrices, Adafactor keeps means of their rows and columns, and Shampoo and SOAP
keep matrices of their own. None of them can step flat pieces. At `step()`, the owner of a parameter
receives the pieces of its gradient and of its values, steps them with the user's own optimizer
class, and sends the pieces of the new values back. Only the owner has the states. The owners are
the ranks that together hold one copy of the model: those of the shard axis and of the tensor axis.
In a pipeline these hold one stage, and step its parameters; a parameter that several stages hold is
stepped by each of them, alike.

Owners are chosen greedily, starting with the largest parameter. The owner is the rank that holds
most of the parameter, if its share of 1/N of all elements has room for it. Otherwise it is the rank
that owns least so far. So no rank owns more than 1/N of all elements plus one largest parameter.
Newton-Schulz iterations cost m * n * min(m, n). In a transformer, min(m, n) is nearly the same
everywhere, so this balances their time too.

Parameters are sent in rounds. In each round, every rank receives parameters of at most the size of
the largest one. While the owners compute, the next round and the results of the last one are in
flight; no more than these three are held.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from zerofx.comm.collectives import Work
from zerofx.compat.callers import is_within_checkpoint
from zerofx.compat.tensors import DisableTorchFunctionSubclass, make_subclass
from zerofx.errors import ArgumentError, ShardError
from zerofx.layout.buckets import Layout
from zerofx.runtime.store.tree import attributes_of
from zerofx.runtime.tensors.piece import Ledger, ParameterPiece, is_cut, piece_of
from zerofx.runtime.tensors.tensor import whole_of

O = TypeVar("O", bound=Optimizer)  # noqa: E741

# (module of the class, its name): optimizers that step each parameter by itself and need it whole
KNOWN = (
    ("torch.optim", "Muon"),
    ("torch.optim", "Adafactor"),
    ("transformers.optimization", "Adafactor"),
)
_DRIVER, _RUN = "_zerofx_whole", "_zerofx_run"
_HOOKS = "_optimizer_"  # prefix of the names of torch's own dicts of hooks


def whole_matrices(optimizer: O) -> O:
    """Let an optimizer step whole parameters of a compiled model, each on the rank that owns it.

    optimizer: any optimizer whose update of one parameter reads no other parameter, such as Shampoo
        and SOAP. `torch.optim.Muon`, `torch.optim.Adafactor` and transformers' Adafactor need no
        call.

    Returns:
        The same optimizer. Its class, its groups and the loop stay as they are.

    Raises:
        ArgumentError: it is not an optimizer.
        ShardError: it is known to need all parameters at once, or keeps parameters in an attribute.

    Example:
        optimizer = zerofx.optim.whole_matrices(SOAP(model.parameters(), lr=3e-3))
    """
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"optimizer is of type {type(optimizer).__name__}, not a torch.optim.Optimizer. Pass a "
            "built optimizer to zerofx.optim.whole_matrices(optimizer)."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ShardError(
            "LBFGS is not supported on sharded parameters: it keeps flat vectors of all "
            "parameters and needs a closure. Use Plan(stage=0)."
        )
    _check_attributes(optimizer)
    vars(optimizer).setdefault(_DRIVER, WholeUpdates())
    return optimizer


def needs_whole(optimizer: Optimizer) -> bool:
    """Return whether an optimizer steps whole parameters: by its class, or because it is marked."""
    if _DRIVER in vars(optimizer):
        return True
    return any(
        each.__name__ == name and each.__module__.startswith(module)
        for each in type(optimizer).__mro__
        for module, name in KNOWN
    )


def updates_of(optimizer: Optimizer) -> WholeUpdates | None:
    """Return the updates of an optimizer that needs whole parameters; None if none is sharded."""
    if not needs_whole(optimizer) or not any(map(is_cut, _params(optimizer))):
        return None
    driver: WholeUpdates = vars(optimizer).setdefault(_DRIVER, WholeUpdates())
    driver.attach(optimizer)
    return driver


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _check_attributes(optimizer: Optimizer) -> None:
    """Raise if an optimizer keeps parameters elsewhere than in its groups and states.

    Raises:
        ShardError: names the attribute.
    """
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state"):
            continue
        held = value.values() if isinstance(value, Mapping) else value
        items = list(held) if isinstance(value, (list, tuple, set, Mapping)) else [held]
        if any(isinstance(item, nn.Parameter) for item in items):
            kind = type(optimizer).__name__
            raise ShardError(
                f"{kind} keeps parameters in its attribute {name!r}, so its step would read pieces "
                "instead of whole matrices. Read them from param_groups, or use Plan(stage=0)."
            )


class WholeUpdates:
    """The updates of one optimizer: the owners of its parameters, and the steps of its own ones.

    `optimizer.state` holds the states of only those parameters that this rank owns.
    """

    def __init__(self) -> None:
        self._owners: dict[Tensor, int] = {}  # parameter -> rank, among those with one copy
        self._loads: dict[int, list[int]] = {}  # id(ledger) -> elements that each rank owns
        self._alone: dict[Tensor, LoneOptimizer] = {}
        self._attached = self._settled = False
        self._run: Callable[[], None] | None = None  # the step that `step()` is about to make
        self._kinds: dict[type, type] = {}

    # -- its optimizer ----------------------------------------------------------------------------
    def attach(self, optimizer: Optimizer) -> None:
        """Hook the optimizer's loads and state dicts; does nothing the second time."""
        if self._attached:
            return
        _check_attributes(optimizer)
        self._attached = True
        optimizer.register_load_state_dict_pre_hook(self._keep_owned)
        optimizer.register_load_state_dict_post_hook(self._note_load)
        optimizer.register_state_dict_post_hook(_guard)

    def owner(self, optimizer: Optimizer, param: Tensor) -> int:
        """Return the owner of a sharded parameter among the ranks that hold one copy."""
        if param not in self._owners:
            self._choose_owners(optimizer)
        return self._owners[param]

    def _choose_owners(self, optimizer: Optimizer) -> None:
        new = [p for p in _params(optimizer) if _is_held(p) and p not in self._owners]
        shares: dict[int, float] = {}
        for param in new:
            ledger = _piece(param).ledger
            _check_axes(ledger.layout, type(optimizer).__name__)
            size = ledger.world.copy_size
            loads = self._loads.setdefault(id(ledger), [0] * size)
            shares[id(ledger)] = shares.get(id(ledger), sum(loads) / size) + param.numel() / size
        for param in sorted(new, key=lambda p: -p.numel()):
            piece = _piece(param)
            loads = self._loads[id(piece.ledger)]
            held = [piece.num_given(rank, rank) for rank in range(len(loads))]
            share = shares[id(piece.ledger)]
            fits = [r for r, load in enumerate(loads) if load + param.numel() <= share]
            rank = max(fits, key=held.__getitem__) if fits else loads.index(min(loads))
            loads[rank] += param.numel()
            self._owners[param] = rank

    def owns(self, optimizer: Optimizer, param: Tensor) -> bool:
        """Return whether this rank steps a parameter: it owns it, or every rank has it whole."""
        if not is_cut(param):
            return True
        return (
            _is_held(param) and self.owner(optimizer, param) == _piece(param).ledger.world.copy_rank
        )

    def settle(self, optimizer: Optimizer) -> None:
        """Give states that were made or loaded elsewhere to their owners; a collective call.

        States that are cut like their parameter are gathered. Of whole ones, which all ranks have,
        the owner keeps its own.
        """
        if self._settled:
            return
        self._settled = True
        for param in [p for p in _params(optimizer) if is_cut(p) and p in optimizer.state]:
            whole = _gathered(param, optimizer.state[param])
            if self.owns(optimizer, param):
                optimizer.state[param] = whole
            else:
                del optimizer.state[param]

    def _keep_owned(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict that is about to be loaded, without the states of other ranks."""
        params = list(_params(optimizer))
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        if len(numbers) != len(params):
            return state_dict  # torch will refuse it
        owned = dict(zip(numbers, params, strict=True))
        state = {
            number: _mapped(states, _plain)
            for number, states in state_dict["state"].items()
            if number not in owned or self.owns(optimizer, owned[number]) or _has_cut(states)
        }
        return {**state_dict, "state": state}

    def _note_load(self, optimizer: Optimizer) -> None:
        self._alone.clear()
        self._settled = False

    def options_of_groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return, for each group, the values that steps on this rank have written into it."""
        found = []
        for group in optimizer.param_groups:
            alone = (self._alone.get(param) for param in group["params"])
            found.append(next((each.written() for each in alone if each is not None), {}))
        return found

    # -- a step ----------------------------------------------------------------------------------
    def arguments(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments for the user's `step` that make it call `run` instead of stepping.

        `step` is called on a proxy for the optimizer. Reading the proxy's `param_groups` steps the
        parameters and returns no groups. By then a closure has run, and so have the user's hooks.
        """
        closure: Any = args[1] if len(args) > 1 else kwargs.get("closure")
        waits = closure is not None

        def evaluate() -> Any:
            nonlocal waits
            loss = closure()
            waits = False
            return loss

        def run() -> None:
            if not waits and self._run is not None:
                self._run = None
                self.step(optimizer)

        self._run = run
        kind = type(optimizer)
        if kind not in self._kinds:
            self._kinds[kind] = type(kind.__name__, (kind,), {"param_groups": _NoGroups()})
        stand_in: Any = object.__new__(self._kinds[kind])
        vars(stand_in).update(vars(optimizer))
        vars(stand_in)[_RUN] = run
        if closure is None:
            return (stand_in, *args[1:]), kwargs
        if len(args) > 1:
            return (stand_in, evaluate, *args[2:]), kwargs
        return (stand_in,), {**kwargs, "closure": evaluate}

    def finish(self) -> None:
        """Make the step if the user's `step` has not triggered it."""
        if self._run is not None:
            self._run()

    def step(self, optimizer: Optimizer) -> None:
        """Step every parameter that has a gradient; a collective call."""
        self.settle(optimizer)
        ledgers: dict[int, tuple[Ledger, list[Tensor]]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if is_cut(param):
                    ledger = _piece(param).ledger
                    ledgers.setdefault(id(ledger), (ledger, []))[1].append(param)
                else:
                    self._step_in_place(optimizer, param, param.grad)
        for ledger, params in ledgers.values():
            self._step_together(optimizer, ledger, params)

    def _step_together(
        self, optimizer: Optimizer, ledger: Ledger, params: Sequence[Tensor]
    ) -> None:
        """Step the sharded parameters of one model, round by round."""
        world, kind = ledger.world, type(optimizer).__name__
        ledger.pending.join()
        names = ",".join(_piece(p).name for p in params)
        world.agree(f"a step of {kind}", f"{len(params)} parameters with a gradient: {names}")
        rounds = self._rounds(optimizer, [*filter(_is_held, params)], world.copy_size)
        try:
            arriving = _Arrival(ledger, rounds[0], kind) if rounds else None
            leaving: _Return | None = None
            for number, members in enumerate(rounds):
                assert arriving is not None, "each round is launched before the one before it ends"
                arrived = arriving.wait()
                if number + 1 < len(rounds):
                    arriving = _Arrival(ledger, rounds[number + 1], kind)
                updated = [
                    (param, self._step_alone(optimizer, param, value, grad))
                    for param, value, grad in arrived
                ]
                del arrived
                if leaving is not None:
                    leaving.land()
                leaving = _Return(ledger, members, updated, kind)
                del updated
            if leaving is not None:
                leaving.land()
            if ledger.layout.pipeline_size > 1:  # stages have different numbers of rounds
                world.level()
        except BaseException as error:
            world.report_failure(repr(error))
            world.drain()
            raise
        finally:
            ledger.note_write()

    def _rounds(
        self, optimizer: Optimizer, params: Sequence[Tensor], size: int
    ) -> list[list[list[Tensor]]]:
        """Return the rounds of a step: for each, the parameters that every rank steps.

        In a round, no rank has more elements than the largest parameter, and all have one dtype.
        """
        found: list[list[list[Tensor]]] = []
        for dtype in dict.fromkeys(p.dtype for p in params):
            alike = sorted((p for p in params if p.dtype == dtype), key=lambda p: -p.numel())
            shares: list[list[list[Tensor]]] = [[] for _ in range(size)]
            filled = [0] * size
            for param in alike:
                rank = self.owner(optimizer, param)
                if not shares[rank] or filled[rank] + param.numel() > alike[0].numel():
                    shares[rank].append([])
                    filled[rank] = 0
                shares[rank][-1].append(param)
                filled[rank] += param.numel()
            found += [[*row] for row in zip_longest(*shares, fillvalue=[])]
        return found

    def _step_in_place(self, optimizer: Optimizer, param: Tensor, grad: Tensor) -> None:
        """Step a parameter that every rank has whole."""
        value = param.detach()
        updated = self._step_alone(optimizer, param, value, grad)
        if updated.data_ptr() != value.data_ptr():  # its step has assigned `p.data`
            value.copy_(updated)

    def _step_alone(
        self, optimizer: Optimizer, param: Tensor, value: Tensor, grad: Tensor
    ) -> Tensor:
        """Step one whole parameter with the user's class; return its new values."""
        alone = self._alone.get(param)
        if alone is None:
            alone = self._alone[param] = LoneOptimizer(optimizer)
        return alone.step(optimizer, param, value, grad)


class _NoGroups:
    """`param_groups` of the proxy: reading them runs the step and returns no groups."""

    def __get__(self, stand_in: Any, kind: type | None = None) -> Any:
        if stand_in is not None:
            vars(stand_in)[_RUN]()
        return []

    def __set__(self, stand_in: Any, value: Any) -> None:
        """Ignore the groups: a proxy lasts one step."""


class LoneOptimizer:
    """A copy of the user's optimizer with one parameter, whole.

    Options of its group follow those of the user's group; values that its own steps write are kept.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        made: Optimizer = object.__new__(type(optimizer))
        for name, value in vars(optimizer).items():
            if name.startswith(_HOOKS):
                vars(made)[name] = OrderedDict()
            elif name not in (_DRIVER, "step", "param_groups", "state"):
                is_own = isinstance(value, (Tensor, list, dict, set)) and name != "defaults"
                vars(made)[name] = copy.deepcopy(value) if is_own else value
        made.state = defaultdict(dict)
        made.param_groups = [{"params": []}]
        self._made, self._given = made, dict[str, Any]()

    def step(self, optimizer: Optimizer, param: Tensor, value: Tensor, grad: Tensor) -> Tensor:
        """Step `value` with `grad`, both whole, and the states that `optimizer` has for `param`."""
        made, states = self._made, optimizer.state
        with torch.no_grad():
            whole = nn.Parameter(value, requires_grad=param.requires_grad)
        vars(whole).update(attributes_of(param))
        whole.grad = grad
        self._follow(optimizer, param)
        made.param_groups[0]["params"] = [whole]
        if param in states:
            made.state[whole] = states[param]
        type(made).step(made)
        made.param_groups[0]["params"] = []
        if whole in made.state:
            states[param] = made.state.pop(whole)
        return whole.detach()

    def _follow(self, optimizer: Optimizer, param: Tensor) -> None:
        """Copy the options of the parameter's group that have changed since the last step."""
        mine = self._made.param_groups[0]
        group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
        for key, option in group.items():
            if key == "param_names":
                position = next(i for i, p in enumerate(group["params"]) if p is param)
                mine[key] = [option[position]]
            elif key != "params" and (
                key not in self._given or not _is_same(option, self._given[key])
            ):
                mine[key] = self._given[key] = option

    def written(self) -> dict[str, Any]:
        """Return the options that steps have written."""
        return {
            key: option
            for key, option in self._made.param_groups[0].items()
            if key not in ("params", "param_names")
            and not (key in self._given and _is_same(option, self._given[key]))
        }


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    is_value = isinstance(one, (bool, int, float, str, tuple)) and not isinstance(other, Tensor)
    return is_value and type(one) is type(other) and bool(one == other)


# -- the pieces in flight to the owners and back ------------------------------------------------
class _Arrival:
    """The values and gradients of one round, in flight to the owners."""

    @torch.no_grad()
    def __init__(self, ledger: Ledger, members: list[list[Tensor]], kind: str) -> None:
        world = ledger.world
        self._mine, me = members[world.copy_rank], world.copy_rank
        dtype = next(p.dtype for share in members for p in share)
        self._sends = [
            _packed(_given(share, me, owner), dtype, world.device)
            for owner, share in enumerate(members)
        ]
        # for each rank: the values, then the gradients
        self._sizes = [
            [_piece(p).num_given(rank, me) for _ in range(2) for p in self._mine]
            for rank in range(len(members))
        ]
        self._parts = [
            torch.empty(sum(sizes), dtype=dtype, device=world.device) for sizes in self._sizes
        ]
        self._work: Work = world.all_to_all(self._parts, self._sends, f"gathering for {kind}")

    @torch.no_grad()
    def wait(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return (parameter, its values, its gradient), both whole, of each that this rank owns."""
        self._work.wait()
        self._sends = []
        split = [part.split(n) for part, n in zip(self._parts, self._sizes, strict=True) if n]
        self._parts = []
        count = len(self._mine)
        found = []
        for number, param in enumerate(self._mine):
            value, grad = (
                _piece(param).put_together([given[at] for given in split]).to(param.device)
                for at in (number, count + number)
            )
            found.append((param, value, grad))
        return found


class _Return:
    """The new values of one round, in flight back to the shards."""

    @torch.no_grad()
    def __init__(
        self,
        ledger: Ledger,
        members: list[list[Tensor]],
        updated: list[tuple[Tensor, Tensor]],
        kind: str,
    ) -> None:
        world = ledger.world
        self._members = members
        dtype = next(p.dtype for share in members for p in share)
        shares = [_piece(param).shares(value.reshape(-1)) for param, value in updated]
        self._sends = [
            _packed([each[rank] for each in shares], dtype, world.device)
            for rank in range(len(members))
        ]
        self._parts = [
            torch.empty(sum(_piece(p).length for p in share), dtype=dtype, device=world.device)
            for share in members
        ]
        self._work: Work = world.all_to_all(self._parts, self._sends, f"the updates of {kind}")

    @torch.no_grad()
    def land(self) -> None:
        """Write the received values into the shards."""
        self._work.wait()
        self._sends = []
        for share, part in zip(self._members, self._parts, strict=True):
            values = part.split([_piece(param).length for param in share]) if share else ()
            for param, value in zip(share, values, strict=True):
                _piece(param).local(param).copy_(value)


def _given(share: Sequence[Tensor], rank: int, owner: int) -> list[Tensor]:
    """Return this rank's pieces of the values, then of the gradients, to send to an owner."""
    given = [(p, p.grad) for p in share if _piece(p).num_given(rank, owner)]
    return [
        *(_piece(p).local(p) for p, _ in given),
        *(_piece(p).local(grad) for p, grad in given if grad is not None),
    ]


def _packed(pieces: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    if not pieces:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.cat([piece.to(device) for piece in pieces])


def _is_held(param: Tensor) -> bool:
    """Return whether a parameter is sharded over ranks that include this one."""
    return is_cut(param) and _piece(param).ledger.layout.has(_piece(param).bucket)


def _check_axes(layout: Layout, kind: str) -> None:
    """Raise if stages whose layers are cut over ranks would have to step together.

    Raises:
        ShardError: names both axes.
    """
    if layout.pipeline_size > 1 and layout.tensor_size > 1:
        raise ShardError(
            f"{kind}, which steps on whole matrices, does not support pipeline stages whose layers "
            f"are cut over ranks. Plan.parallel.pipeline is {layout.pipeline_size}, and tensor is "
            f"{layout.tensor_size}. Use one of the two, or an optimizer that steps element by "
            "element, such as AdamW."
        )


def _piece(param: Tensor) -> ParameterPiece:
    piece = piece_of(param)
    assert piece is not None
    return piece


# -- states -------------------------------------------------------------------------------------
class OwnedState(torch.Tensor):
    """A state in `optimizer.state_dict()` that only this rank has; it shares the state's memory."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardError(
            "pickling optimizer.state_dict() would save the states of one rank only, because only "
            "the rank that owns a matrix has its state. Use zerofx.save(dir, model, optimizer), "
            "or torch.save of zerofx.full_optimizer_state_dict(model, optimizer)."
        )


def _guard(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose states cannot be pickled.

    Raises:
        ShardError: called by torch.distributed.checkpoint, which assumes that every rank has all
            states.
    """
    if is_within_checkpoint():
        kind = type(optimizer).__name__
        raise ShardError(
            f"{kind} has the states of each matrix on one rank, which torch.distributed.checkpoint "
            "cannot gather. Use zerofx.save(dir, model, optimizer), or "
            "zerofx.full_optimizer_state_dict(model, optimizer)."
        )

    def guarded(value: Tensor) -> Tensor:
        return make_subclass(OwnedState, value.detach()) if value.ndim else value

    state = {key: _mapped(states, guarded) for key, states in state_dict["state"].items()}
    return {**state_dict, "state": state}


def _plain(value: Tensor) -> Tensor:
    return value.as_subclass(Tensor) if isinstance(value, OwnedState) else value


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return nested dicts, lists and tuples with each tensor mapped by `change`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(part, change) for part in value)
    return value


def _has_cut(states: Any) -> bool:
    """Return whether a tensor among nested states is cut like its parameter."""
    found: list[bool] = []
    _mapped(states, lambda tensor: found.append(is_cut(tensor)))
    return any(found)


def _gathered(param: Tensor, states: Any) -> Any:
    """Return a parameter's nested states with the cut ones gathered; a collective call."""
    piece = _piece(param)

    def gather(value: Tensor) -> Tensor:
        if is_cut(value):
            return piece.whole(piece.local(value), "gathering a state")
        if isinstance(value, DTensor):
            return whole_of(value, piece, "taking over a state")
        return value

    return _mapped(states, gather)
