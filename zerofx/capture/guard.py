"""Guards: errors for models, arguments and calls that cannot be captured faithfully."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence

from zerofx.capture.lines import is_user_file, line_text, user_line
from zerofx.capture.original import MODEL, Entry
from zerofx.compat.autograd import has_gradient_hooks
from zerofx.compat.callers import DTensor, distributed_by, unwrapped
from zerofx.compat.graphs import FakeTensor, pytree, with_effects
from zerofx.compat.tracing import OptimizedModule
from zerofx.errors import CaptureError
from zerofx.ir.meta import info
from zerofx.runtime.tensors.piece import Ledger, piece_of
from zerofx.runtime.tensors.tensor import reads_values

_CONSTANT = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, functools.partial)


def check_arguments(names: list[str], leaves: list[Any]) -> None:
    """Raise on tensors that are not plain, and on constants that cannot be part of a key.

    Raises:
        CaptureError: names the argument.
    """
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, Tensor):
            check_constant(name, leaf)
            continue
        is_plain = type(leaf) in (Tensor, nn.Parameter) or isinstance(leaf, FakeTensor)
        if not is_plain or leaf.layout is not torch.strided or leaf.is_quantized:
            kind = str(leaf.layout).removeprefix("torch.") if is_plain else type(leaf).__name__
            raise CaptureError(
                f"capture: argument {name} is a tensor of kind {kind}. Pass a plain dense tensor."
            )


def check_constant(name: str, leaf: Any) -> None:
    """Raise on an argument that is neither a tensor nor a hashable constant without tensors inside.

    Raises:
        CaptureError: names the argument.
    """
    inside = _hidden_tensors(leaf)
    if inside:
        raise CaptureError(
            f"capture: argument {name} is a {type(leaf).__name__} that holds tensors ({inside}), "
            "which would be baked into the program. Pass them as tensors, in a dict or in a "
            "dataclass."
        )
    try:
        hash(leaf)
    except TypeError:
        raise CaptureError(
            f"capture: argument {name} is a {type(leaf).__name__}, which is neither a tensor nor "
            "a hashable constant, so no program can be kept for it. Pass a tensor "
            "(torch.as_tensor), a number, a string or a tuple of them."
        ) from None
    if has_hidden_state(leaf):
        raise CaptureError(
            f"capture: argument {name} is a {type(leaf).__name__}, whose attributes would be baked "
            "into the program and whose changes would go unnoticed (it hashes by identity). Pass "
            "tensors, numbers, or a dataclass of them."
        )


def has_hidden_state(leaf: Any) -> bool:
    """Return whether an object has attributes that its hash and equality ignore."""
    kind = type(leaf)
    if isinstance(leaf, types.MethodType):  # hashes by the identity of the object
        return has_hidden_state(leaf.__self__)
    if kind.__hash__ is not object.__hash__ or isinstance(leaf, _CONSTANT):
        return False
    slots = [vars(c).get("__slots__") or () for c in kind.__mro__]
    return bool(getattr(leaf, "__dict__", None)) or any(slots)


def _hidden_tensors(leaf: Any) -> str:
    """Return where an object that pytree does not open holds tensors, or "" if it holds none."""
    if isinstance(leaf, nn.Module):
        return "a module's parameters"
    for attribute, held in getattr(leaf, "__dict__", {}).items():
        values = held.values() if isinstance(held, dict) else held
        inside = values if isinstance(held, (dict, list, tuple)) else [held]
        if not isinstance(leaf, type) and any(isinstance(v, Tensor) for v in inside):
            return attribute
    return ""


def check_device(device: torch.device | None) -> None:
    """Raise if the device is a GPU that torch does not see: its fakes would have no kernels.

    Raises:
        CaptureError: the device is a GPU and torch sees none.
    """
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise CaptureError(
            f"capture: device {device} is not available. To plan for GPUs without one, capture for "
            "the CPU (device=None). The graph differs in a few operators only."
        )


def check_packed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on packed sequences, whose batch sizes depend on the data.

    Raises:
        CaptureError: an argument is a PackedSequence; the message says what to pass instead.
    """
    found = pytree.tree_leaves((args, kwargs), is_leaf=lambda v: isinstance(v, PackedSequence))
    if any(isinstance(v, PackedSequence) for v in found):
        raise CaptureError(
            "capture: an argument is a PackedSequence, whose batch sizes differ from batch to "
            "batch. Pass the padded tensor, and mask or gather by the lengths."
        )


def check_wrappers(model: nn.Module, takes_dtensors: bool = False) -> None:
    """Raise if the model is already distributed or compiled, or a parameter has no shape yet.

    This runs before anything is sharded, because the user should compile the plain module inside
    instead.

    takes_dtensors: whether parameters may be DTensors, of which `layout.slices` says more.

    Raises:
        CaptureError: names the module or parameter, and the framework.
    """
    for name, module in model.named_modules():
        where = name or "the model"
        inside = "_orig_mod" if isinstance(module, OptimizedModule) else unwrapped(module)
        if inside:
            outer = f"model.get_submodule({name!r})" if name else "model"
            raise CaptureError(
                f"capture: {where} is a {type(module).__name__}. Pass the plain module inside it "
                f"({outer}.{inside})."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"capture: {where} is a {type(module).__name__}, which has no Python forward to "
                "trace. Pass the plain module that it was made from."
            )
        if other := distributed_by(module):
            raise CaptureError(
                f"capture: {where} is distributed by {other} already. Build the model again "
                f"without {other} and compile that: Plan(stage=3) shards parameters, gradients and "
                "optimizer states, and Plan(stage=0) replicates them."
            )
    for name, param in model.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise CaptureError(
                f"capture: {name} has no shape yet. Run one batch through the lazy module first."
            )
        if isinstance(param, DTensor) and piece_of(param) is None and not takes_dtensors:
            raise CaptureError(
                f"capture: {name} is a DTensor with placements {param.placements}, as "
                "parallelize_module, distribute_module and replicate make them, and no axis "
                "of several ranks that they lie over is known. Build the model again without it "
                'and compile that, or pass mesh=mesh["dp"], the data axis of the mesh whose axis '
                '"tp" was given to parallelize_module.'
            )


def check_modules(model: nn.Module, entry: Entry = MODEL, ignored: Collection[str] = ()) -> None:
    """Raise on modules and parameters of an entry that cannot be traced faithfully.

    Ignored parameters may have any hooks.

    Raises:
        CaptureError: names the module or parameter.
    """
    check_wrappers(model)
    for name, param in entry.parameters(model).items():
        if name not in ignored and has_gradient_hooks(param):
            raise CaptureError(
                f"capture: {name} has a gradient hook, which a program would skip. Register it by "
                "register_post_accumulate_grad_hook after zerofx.compile, or hook the tensor "
                "inside forward."
            )


@contextmanager
def dense_tables(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let tables with `sparse=True` have gradients of a fixed size within the block.

    Optimizers that take sparse gradients change the parameters in the same way with dense ones,
    except torch.optim.SparseAdam, which raises on them. Plan(sparse_gradients=True) sends rows.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    asking = [module for module in modules if isinstance(module, kinds) and module.sparse]
    for module in asking:
        module.sparse = False
    try:
        yield
    finally:
        for module in asking:
            module.sparse = True


def check_graph(gm: fx.GraphModule) -> None:
    """Raise on problems that only the traced and labelled graph shows.

    Raises:
        CaptureError: an operator has effects that a program would drop; or a tensor requires grad
            but is no registered parameter, and would silently not be trained. The message gives the
            line.
    """
    for node in gm.graph.nodes:
        line = info(node).line
        at = f" at {line}" if line else ""
        if node.target is with_effects:
            raise CaptureError(
                f"capture: {node.args[1]}{at} has an effect besides its results, which a program "
                "would not keep. Call it outside the model."
            )
        if node.op == "get_attr":
            held = getattr(gm, node.target)
            if isinstance(held, Tensor) and held.requires_grad:
                raise CaptureError(
                    f"capture: forward uses a tensor of shape {list(held.shape)}{at} that "
                    "requires grad but is no parameter of the model, so it would not be trained. "
                    "Register it (nn.Parameter, nn.ModuleList), pass it in, or detach it."
                )


# -- Parts of other compiled models ----------------------------------------------------------------


# A forward may reach them through a closure or a plain attribute. A call of another compiled model
# runs programs of its own, on shards of its own. Tracing cannot look inside it, and its collectives
# would be launched on fake tensors, which have no memory. The forward then runs eagerly, where such
# a call works.
#
# It is a mistake in a copy that reaches the model it was copied from: `copy.deepcopy` copies
# modules, but shares functions, so a lambda that refers to a submodule still refers to the
# original's.


@dataclass(frozen=True)
class UserForward:
    """The model whose forward runs now, as the user's code.

    ledger: that of its parameters; None if it is not compiled.
    is_traced: it is being captured; otherwise it runs eagerly.
    """

    model: nn.Module
    ledger: Ledger | None
    is_traced: bool


_RUNNING: ContextVar[UserForward | None] = ContextVar("zerofx_running", default=None)


@contextmanager
def running(model: nn.Module, ledger: Ledger | None, is_traced: bool) -> Iterator[None]:
    """Refuse parts of other models that a forward inside the block must not reach."""
    token = _RUNNING.set(UserForward(model, ledger, is_traced))
    try:
        yield
    finally:
        _RUNNING.reset(token)


def check_foreign_call(name: str, ledger: Ledger, is_model: bool) -> None:
    """Raise if the forward that runs now must not call a function of another compiled model.

    name: of the function. ledger: of the model that it belongs to.
    is_model: it is the forward of the whole model.

    Raises:
        CaptureError: the forward is being captured, or belongs to a copy of that model.
    """
    now = _RUNNING.get()
    if now is None or now.ledger is ledger:
        return
    if _is_original(ledger, now) and not is_model:
        _refuse_original(now, "calls", name)
    if now.is_traced:
        line = user_line(sys._getframe(1))
        raise CaptureError(
            f"capture: forward calls {name} at {line}, which belongs to another compiled model and "
            "has programs of its own. To capture this forward, make the other model a submodule "
            "before zerofx.compile, or call it outside and pass in what it returns."
        )


def check_foreign_read(func: Any, args: tuple[Any, ...], tensor: Tensor) -> None:
    """Raise if the forward of a copy reads a parameter of the model that it was copied from.

    func, args: the torch function that is called, and its arguments, of which `tensor` is one.

    Raises:
        CaptureError: it does.
    """
    now, piece = _RUNNING.get(), piece_of(tensor)
    if now is None or piece is None or not _is_original(piece.ledger, now):
        return
    if reads_values(func, args):
        _refuse_original(now, "reads", piece.name)


def _is_original(ledger: Ledger, now: UserForward) -> bool:
    return now.ledger is not None and ledger.number in now.ledger.copied_from


def _refuse_original(now: UserForward, does: str, name: str) -> NoReturn:
    kind = type(now.model).__name__
    error = CaptureError(
        f"capture: {_reaching(now.model, sys._getframe(2))} {does} {name} of the {kind} that this "
        "one is a copy of, since copy.deepcopy copies modules but shares functions and what they "
        f"refer to. Make it a method that uses self, or build a new {kind}, compile it, and load "
        "the state with new.load_state_dict(model.state_dict())."
    )
    error.is_final = True
    raise error


def _reaching(model: nn.Module, frame: FrameType | None) -> str:
    """Name the user's function that reached another model: `M.f (lam.py:7)`."""
    functions = [
        (".".join(filter(None, (type(model).__name__, path, key))), value)
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__closure__
    ]
    first = user_line(frame)
    while frame is not None:
        code = frame.f_code
        for name, function in functions if is_user_file(code.co_filename) else ():
            if _runs(function, frame):
                return f"{name} ({line_text(code.co_filename, code.co_firstlineno)})"
        frame = frame.f_back
    return f"forward at {first}"


def _runs(function: FunctionType, frame: FrameType) -> bool:
    """Return whether a frame is that of a function, with the same closure."""
    if function.__code__ is not frame.f_code:
        return False
    held = zip(frame.f_code.co_freevars, function.__closure__ or (), strict=True)
    found = frame.f_locals
    return all(found.get(name, held) is cell.cell_contents for name, cell in held)
