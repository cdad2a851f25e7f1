"""Tracer: one call of a module, and its backward, as a graph of ATen nodes.

aot_export_joint_with_descriptors is the only tracer that keeps custom autograd functions and tensor
hooks in the backward. It is private, and its flags are module globals.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule
from torch._dynamo.source import ConstantSource
from torch._library.simple_registry import singleton
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentError
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicShapeError
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_modules
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.fx.node import has_side_effect
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import transformer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._sympy.printers import PythonPrinter

from zerofx.compat.graphs import FakeTensor, FakeTensorMode, pytree
from zerofx.compat.groups import traced_collectives
from zerofx.compat.strides import TrueStrides

__all__ = [
    "SIZE_FUNCTIONS",
    "DataDependentError",
    "DynamicShapeError",
    "KnownValues",
    "OptimizedModule",
    "Symbols",
    "argument_tensors",
    "describe_placeholder",
    "describe_results",
    "expression",
    "is_outside_trace",
    "is_symbolic",
    "new_fake_mode",
    "rerun_on_fakes",
    "shown_by",
    "trace_joint",
    "without_dispatch_modes",
]

aten = torch.ops.aten
FAKE_CALLS = 16384  # about 1 KiB each; a model with ever new shapes would fill the memory


def is_outside_trace(tensor: object) -> bool:
    """Return whether a tensor met while tracing is not part of the trace: a constant or its view.

    Tracing would write to it for real, and record no update.
    """
    mode = torch.utils._python_dispatch._detect_infra_mode(
        torch._C._TorchDispatchModeKey.FUNCTIONAL
    )
    if mode is None or not isinstance(tensor, Tensor):
        return False
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not is_wrapped and not isinstance(tensor, FunctionalTensor)


def is_traced(value: object) -> bool:
    """Return whether a value is a tensor that tracing created, which has no values."""
    return isinstance(value, (FunctionalTensor, FakeTensor))


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Hide the user's dispatch modes (a flop counter) from the operators of a compile."""
    return _disable_current_modes()  # type: ignore[no-any-return]


def new_fake_mode() -> TrueStrides:
    """Return a fake mode with static shapes that accepts the model's own constants."""
    if len(FakeTensorMode.cache) > FAKE_CALLS:  # torch's own per-process cache, which never shrinks
        FakeTensorMode.cache_clear()
    return TrueStrides(KnownValues(is_static=True), shape_env=None, allow_non_fake_inputs=True)


# -- Values that a trace knows: computed from constants only, and only if forward needs them ------
_NOTE = "_zerofx_origin"  # the attribute of a fake tensor that records how it was made
_READING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# Operators that use only a tensor's form; they fill the result from their arguments.
_FILLS: dict[Any, Callable[[Sequence[Any]], Any]] = {
    aten.zeros_like.default: lambda args: 0,
    aten.new_zeros.default: lambda args: 0,
    aten.ones_like.default: lambda args: 1,
    aten.new_ones.default: lambda args: 1,
    aten.zero.default: lambda args: 0,
    aten.full_like.default: lambda args: args[1],
    aten.fill.Scalar: lambda args: args[1],
    aten.new_full.default: lambda args: args[2],
}
# Results that have no value yet: uninitialised memory, and the inputs of a trace.
_UNSET = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default}
# Comparisons of a number in [0, 1) with another number, and the bounds (low, high) that decide
# them.
_BELOW = {aten.lt: True, aten.le: True, aten.gt: False, aten.ge: False}


@dataclass(frozen=True)
class _Facts:
    """What recording values needs to know about an operator.

    reads: it needs values, not only forms.
    writes: it changes an argument.
    is_noted: it makes tensors, which can be computed again from its arguments.
    """

    reads: bool
    writes: bool
    is_noted: bool


@cache
def _facts_of(func: Any) -> _Facts:
    is_random = torch.Tag.nondeterministic_seeded in func.tags and func is not aten.rand.default
    makes_tensors = any("Tensor" in str(result.type) for result in func._schema.returns)
    return _Facts(
        reads=any(tag in func.tags for tag in _READING),
        writes=func._schema.is_mutable,
        is_noted=makes_tensors and func not in _UNSET and not is_random,
    )


class _Unknown(Exception):
    """A value depends on something that varies from call to call."""


@dataclass
class _Origin:
    """The call that created a fake tensor.

    func: None for a tensor that no call created, such as a buffer; `value` is then the tensor
        itself.
    which: its index among several results, None for a single result.
    """

    func: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    which: int | None = None
    value: Tensor | None = None


class KnownValues:
    """Values of a fake mode's tensors that do not vary, for forwards that need them.

    A fake tensor has no values. But many values that a forward inspects depend on nothing that
    varies: a causal mask, the drop rates of `torch.linspace`, a table made from a shape. How such a
    tensor was made is recorded. It is computed for real if its values decide how the trace
    continues (`.item()`, `if`, `nonzero`, a mask as an index).

    is_static: no size varies.
    read: the tensors passed to `hold` whose values the trace has used, by id.
    holds: whether these values may be used.
    """

    def __init__(self, is_static: bool = False) -> None:
        self.is_static = is_static
        self.read: dict[int, Tensor] = {}
        self.holds = True
        self._written: set[StorageWeakRef | None] = set()

    def hold(self, fake: Tensor, real: Tensor) -> None:
        """Let a fake tensor have the value of a real tensor until it is written to."""
        fake.__dict__[_NOTE] = _Origin(None, value=real)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Forget, after the block, which tensors were written to."""
        before = set(self._written)
        try:
            yield
        finally:
            self._written = before

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of a traced tensor's value, or None if it varies."""
        while isinstance(tensor, FunctionalTensor):
            torch._sync(tensor)
            tensor = torch._from_functional_tensor(tensor.elem)
        try:
            with unset_fake_temporarily():
                return self._value(tensor).clone()
        except _Unknown:
            return None

    def answer(
        self, mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """Return the result of a call that needs values; None if they vary or none are needed."""
        if not _facts_of(func).reads:
            return None
        try:
            with mode:
                return (self._answer(func, tuple(args), kwargs),)
        except _Unknown:
            return None

    # -- recording of values -----------------------------------------------------------------------

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> None:
        """Record how the results of a call were made, if all of its arguments may be known."""
        facts = _facts_of(func)
        if not (facts.is_noted or facts.writes):
            return
        given = argument_tensors(args, kwargs)
        if facts.writes:
            self._written.update(map(memory_of, given))
            return
        if func in _FILLS and isinstance(made, FakeTensor):
            if self.is_static or not _has_symbols(made):
                form = {"dtype": made.dtype, "device": made.device}
                call = made.shape, made.stride(), _FILLS[func](args)
                made.__dict__[_NOTE] = _Origin(_filled, call, form)
            return
        if any(_is_foreign(t) for t in given):
            return
        if not self.is_static and _has_symbols((args, kwargs)):
            return
        results = made if isinstance(made, (tuple, list)) else [made]
        for which, each in enumerate(results):
            if isinstance(each, FakeTensor) and not any(each is t for t in given):
                place = None if each is made else which
                each.__dict__[_NOTE] = _Origin(func, args, kwargs, place)

    def _value(self, tensor: Tensor) -> Tensor:
        """Compute a tensor's value, after the values of the tensors that it was made from.

        Raises:
            _Unknown: it varies from call to call.
        """
        pending = [tensor]
        while pending:
            origin = self._origin(pending[-1])
            leaves = pytree.tree_leaves((origin.args, origin.kwargs))
            fakes = [v for v in leaves if isinstance(v, FakeTensor)]
            missing = [v for v in fakes if self._origin(v).value is None]
            if origin.value is None and missing:
                pending += missing
                continue
            pending.pop()
            if origin.value is None:
                made = self._run(origin.func, origin.args, origin.kwargs)
                origin.value = made if origin.which is None else made[origin.which]
        return self._real(tensor)

    def _origin(self, tensor: Tensor) -> _Origin:
        if not isinstance(tensor, FakeTensor):
            return _Origin(None, value=tensor)
        origin = tensor.__dict__.get(_NOTE)
        is_written = memory_of(tensor) in self._written
        if origin is None or is_written or origin.func is aten.rand.default:
            raise _Unknown
        if origin.func is None and not self.holds:
            raise _Unknown
        return origin

    def _real(self, value: Any) -> Any:
        """Return the computed value of a fake tensor, and any other value unchanged."""
        if not isinstance(value, FakeTensor):
            return value
        origin = self._origin(value)
        if origin.func is None and origin.value is not None:
            self.read[id(origin.value)] = origin.value
        return origin.value

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = pytree.tree_map(self._real, (args, dict(kwargs)))
        with unset_fake_temporarily(), torch._C.DisableTorchFunction(), torch.no_grad():
            return func(*args, **kwargs)

    # -- use of values ----------------------------------------------------------------------------

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call that needs values.

        Raises:
            _Unknown: the values vary from call to call.
        """
        if not self.is_static and _has_symbols((args, kwargs)):
            raise _Unknown
        if func is aten._local_scalar_dense.default and (drawn := self._drawn(args[0])) is not None:
            return drawn
        given = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, FakeTensor)]
        if func is aten.index.Tensor:
            return self._indexed(args[0], args[1])
        if func is aten.masked_select.default:
            given = [t for t in given if t is not args[0]]  # only its form is needed
        for tensor in given:
            self._value(tensor)
        if func is aten.masked_select.default:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            with unset_fake_temporarily():
                count = int(self._real(args[1]).expand(shape).sum())
            return args[0].new_empty(count)
        made = self._run(func, args, kwargs)
        if not isinstance(made, (Tensor, tuple, list)):
            return made
        fakes = [_like(t) for t in ([made] if isinstance(made, Tensor) else made)]
        for which, fake in enumerate(fakes):
            place = None if isinstance(made, Tensor) else which
            fake.__dict__[_NOTE] = _Origin(func, args, kwargs, place)
        return fakes[0] if isinstance(made, Tensor) else type(made)(fakes)

    def _indexed(self, source: Tensor, indices: Sequence[Tensor | None]) -> Any:
        """Index by the positions that masks select, if there are masks with known values."""
        plain: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                plain.append(index)
                continue
            mask = self._value(index)
            with unset_fake_temporarily():
                places = mask.nonzero().unbind(1)
            plain += map(_like, places)
        if len(plain) == len(indices) and all(a is b for a, b in zip(plain, indices, strict=True)):
            raise _Unknown
        made = aten.index.Tensor(source, plain)
        self.note(aten.index.Tensor, (source, list(indices)), {}, made)
        return made

    def _drawn(self, tensor: Tensor) -> bool | None:
        """Decide a comparison of numbers in [0, 1) with a number outside that range."""
        origin = tensor.__dict__.get(_NOTE) if isinstance(tensor, FakeTensor) else None
        packet = getattr(origin and origin.func, "overloadpacket", None)
        if origin is None or packet not in _BELOW:
            return None
        number, limit = origin.args[:2]
        drawn = number.__dict__.get(_NOTE) if isinstance(number, FakeTensor) else None
        if drawn is None or drawn.func is not aten.rand.default:
            return None
        if isinstance(limit, Tensor):
            with unset_fake_temporarily():
                limit = self._value(limit).item()
        if limit >= 1:
            return _BELOW[packet]
        is_below = limit < 0 or (limit == 0 and packet in (aten.lt, aten.ge))
        return not _BELOW[packet] if is_below else None


def memory_of(tensor: Tensor) -> StorageWeakRef | None:
    """Return an identifier of a tensor's memory, None for a sparse tensor."""
    return StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else None


def _like(real: Tensor) -> Tensor:
    """Create a fake tensor with the form of a tensor."""
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)


def argument_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """List the tensors of an operator's arguments, also those in lists."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [each for each in value if isinstance(each, Tensor)]
    return found


def _is_foreign(tensor: Tensor) -> bool:
    """Return whether a tensor has no value that could be computed here."""
    if isinstance(tensor, FakeTensor):
        return _NOTE not in tensor.__dict__
    return type(tensor) not in (Tensor, torch.nn.Parameter)


def _filled(shape: Any, stride: Any, value: Any, **form: Any) -> Tensor:
    return torch.empty_strided(shape, stride, **form).fill_(value)


def _has_symbols(values: Any) -> bool:
    """Return whether values, or the forms of tensors among them, contain sizes that vary."""
    for each in pytree.tree_leaves(values):
        numbers = (*each.shape, *each.stride()) if isinstance(each, Tensor) else (each,)
        if any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in numbers):
            return True
    return False


# -- Symbols for sizes: created before tracing, and read back from the traced expressions ---------


class _Printer(PythonPrinter):
    """Writes an expression as Python for emitted source, without torch's own functions."""

    def _print_ToFloat(self, expr: Any) -> str:
        return f"float({self._print(expr.args[0])})"

    def _print_TruncToInt(self, expr: Any) -> str:
        return f"int({self._print(expr.args[0])})"


class Symbols:
    """The symbols of one trace, each a size that is at least 2, or a fraction.

    hints: name -> the value for which control flow on sizes takes the branches of this trace.

    The shape environment records each branch taken as a guard; `conditions` are these guards.
    """

    def __init__(self, hints: Mapping[str, int]) -> None:
        # Two symbols with one hint stay two symbols: the caller decides which sizes are equal.
        self.env = ShapeEnv(duck_shape=False, specialize_zero_one=True)
        self.sizes: dict[str, Any] = {}
        self._names: dict[Any, Any] = {}  # torch's symbols -> those with our names
        for name, hint in hints.items():
            source = ConstantSource(name)
            symbol = self.env.create_symbol(hint, source, DimDynamic.DYNAMIC)
            if isinstance(hint, float):
                made: Any = self.env.create_symfloatnode(symbol, hint=hint, source=source)
                self._names[symbol] = type(symbol)(name, real=True)
            else:
                made = self.env.create_symintnode(symbol, hint=hint, source=source)
                self._names[symbol] = type(symbol)(name, integer=True, positive=True)
            self.sizes[name] = made

    def mode(self) -> TrueStrides:
        """Return the fake mode whose tensors may have these sizes."""
        return TrueStrides(KnownValues(), shape_env=self.env, allow_non_fake_inputs=True)

    def text(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> str:
        """Return a value as a Python expression of the names."""
        return self._written(self.env.replace(value.node.expr))

    def _written(self, expr: Any) -> str:
        """Write an expression with our names: torch's differ per process and set the order."""
        named = expr.xreplace(self._names)
        return str(_Printer().doprint(named.canonical if named.is_Relational else named))

    def conditions(self) -> tuple[str, ...]:
        """Return the conditions on the sizes under which the trace is valid, as Python expressions.

        They do not mention sizes that the trace made constants.
        """
        known = {symbol: self.env.replace(symbol) for symbol in self._names}
        constants = {symbol: found for symbol, found in known.items() if found.is_number}
        guards = [guard.expr.xreplace(constants) for guard in self.env.guards]
        texts = dict.fromkeys(map(self._written, guards))
        return tuple(text for text in texts if text != "True")

    def constants(self) -> frozenset[str]:
        """Return the names of the sizes that the trace specialised to one value."""
        named = self._names.items()
        return frozenset(own.name for symbol, own in named if self.env.replace(symbol).is_number)


# Replacements for these functions while an expression of sizes becomes nodes of a graph.
SIZE_FUNCTIONS: dict[str, Any] = {
    "max": torch.sym_max,
    "min": torch.sym_min,
    "int": torch.sym_int,
    "float": torch.sym_float,
    "math": SimpleNamespace(sqrt=torch._sym_sqrt),  # type: ignore[attr-defined]
}


def is_symbolic(value: Any) -> bool:
    """Return whether a value is a size with a symbol, or computed from such sizes."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def expression(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """Return a key that is the same for equal symbolic values of one trace."""
    return value.node.expr


# -- The flags, classes and operators that make a module traceable ---------------------------------


@contextlib.contextmanager
def compiling_flags(value: bool = True) -> Iterator[None]:
    """Set what `torch.compiler.is_compiling()` and `is_exporting()` report, and restore it.

    Libraries (transformers) check these to choose their traceable paths.
    """
    old = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = value
    torch.compiler._is_exporting_flag = value
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = old


class _InlineCheckpoint:
    """Replaces the reentrant checkpoint, which runs its own backward inside backward.

    The plan decides what is kept or recomputed; the values are the same.
    """

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        needs_grad = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(torch.is_grad_enabled() and needs_grad):
            return function(*args)


@contextlib.contextmanager
def inlined_checkpoints() -> Iterator[None]:
    """Make reentrant checkpoints plain calls; the other kind is transparent to the tracer.

    The tracer supports contexts (`context_fn`) that are dispatch modes. For others, this enters the
    one for forward; the plan decides about recomputation.
    """
    from torch.utils import checkpoint

    without_reentry = checkpoint._checkpoint_without_reentrant_generator

    def in_context(fn: Any, preserve: bool, context_fn: Any, *args: Any, **kwargs: Any) -> Any:
        forward, recompute = context_fn()
        if all(isinstance(c, TorchDispatchMode) for c in (forward, recompute)):
            yield from without_reentry(fn, preserve, lambda: (forward, recompute), *args, **kwargs)
            return
        with forward:
            yield from without_reentry(fn, preserve, checkpoint.noop_context_fn, *args, **kwargs)

    # The composable checkpoint, used with FSDP2, has imported the function by its name.
    composable = sys.modules.get("torch.distributed._composable.checkpoint_activation")
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(checkpoint, "CheckpointFunction", _InlineCheckpoint))
        for module in filter(None, (checkpoint, composable)):
            name = "_checkpoint_without_reentrant_generator"
            enter(mock.patch.object(module, name, in_context))
        yield


@contextlib.contextmanager
def optional_causal_hints() -> Iterator[None]:
    """Let `nn.TransformerEncoder` treat a mask generically if its values are unknown.

    It checks whether the mask is causal, which only selects how attention computes the same result.
    """
    look = transformer._detect_is_causal_mask

    def detect(*args: Any, **kwargs: Any) -> bool:
        try:
            return look(*args, **kwargs)
        except (DataDependentError, GuardOnDataDependentSymNode):
            return False

    with mock.patch.object(transformer, "_detect_is_causal_mask", detect):
        yield


# Without a user and without an effect, tracing would remove it as dead code.
CHECK_LINALG: Any = has_side_effect(torch.ops.aten._linalg_check_errors.default)


def _check_all(kind: type[Exception], cond: Tensor, message: Any = None) -> None:
    """Replace `torch._check_tensor_all_with`, which reads the values."""
    said = message if isinstance(message, str) else "a check of the model failed"
    torch._assert_async(cond.all(), f"{kind.__name__}: {said}")


@contextlib.contextmanager
def plain_checks() -> Iterator[None]:
    """Trace checks of values as operators: those of `torch.linalg`, and torch's check function.

    They raise as in eager, wherever they are among the other operators.
    """
    with contextlib.ExitStack() as stack:
        holder = singleton.find(CHECK_LINALG.name()).effect
        if getattr(holder, "effect", None) is not None:  # it is ordered; on torch 2.11 it is not
            stack.enter_context(mock.patch.object(holder, "_effect", None))
        before = torch._check_tensor_all_with
        torch._check_tensor_all_with = _check_all  # type: ignore[assignment]
        try:
            yield
        finally:
            torch._check_tensor_all_with = before


@contextlib.contextmanager
def traceable(says_compiling: bool = True) -> Iterator[None]:
    """Make torch's own Python code traceable and quiet: failures are raised, not also printed."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    validates = torch.distributions.Distribution._validate_args
    log.setLevel(logging.CRITICAL)
    # Their argument checks are control flow on values.
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        with (
            compiling_flags(says_compiling),
            inlined_checkpoints(),
            optional_causal_hints(),
            plain_checks(),
            traced_collectives(is_traced),
            # Code that the user compiled is traced through.
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message="(?s).*(Anomaly Detection|Error detected in)")
            yield
    finally:
        log.setLevel(level)
        torch.distributions.Distribution.set_default_validate_args(validates)


@contextlib.contextmanager
def shown_by(show: Callable[[Tensor], str]) -> Iterator[None]:
    """Make `show` convert traced tensors to text, instead of "FunctionalTensor(...)"."""
    before = FunctionalTensor.__repr__
    FunctionalTensor.__repr__ = lambda self, **_: show(self)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        FunctionalTensor.__repr__ = before  # type: ignore[method-assign,assignment]


def _dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Spell out the operator's CPU computation: its fake kernel returns CUDA's strides there."""
    if grad.device.type != "cpu":
        return NotImplemented
    return grad * mask * scale


_DECOMPOSED = {torch.ops.aten.native_dropout_backward.default: _dropout_backward}


def trace_joint(
    module: torch.nn.Module, args: tuple[Any, ...], says_compiling: bool = True
) -> torch.fx.GraphModule:
    """Trace `module(*args)` (all fake) with its backward into one graph of ATen nodes.

    says_compiling: the result of `torch.compiler.is_compiling()`. Some forwards raise if it is
        true.

    Placeholders carry `meta["desc"]`, and so does the output node (a list, one per element). If no
    result is differentiable, the graph has no backward. Eager runs a backward outside the forward's
    autocast region, hence `backward_pass_autocast`. The graph's module is lazy: nothing runs it,
    and generating its Python twice takes as long as tracing a layer.

    For symbolic sizes torch enables the Python dispatcher before it enters the fake mode, and
    restores it before it leaves the mode, which would enable it once more. The outermost guard here
    restores what the caller had. Left enabled it would slow down every operator of the process and
    hold the GIL during collectives, where gloo's thread can wait for it forever.
    """
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with (
        no_python_dispatcher(),
        config.patch(backward_pass_autocast="off", functionalize_rng_ops=False),
        use_lazy_graph_modules(True),
        traceable(says_compiling),
        torch.fx.traceback.preserve_node_meta(),
        contextlib.ExitStack() as stack,
    ):
        joint = aot_export_joint_with_descriptors(stack, module, args, decompositions=_DECOMPOSED)  # type: ignore[arg-type]
        return joint.graph_module


def rerun_on_fakes(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    mode: FakeTensorMode,
    says_compiling: bool = True,
) -> None:
    """Call `module(*args)` on fake tensors as tracing does, only for its side effects."""
    with traceable(says_compiling), torch.random.fork_rng(devices=[]), mode:
        module(*args)


def describe_placeholder(node: torch.fx.Node) -> tuple[str, str | int]:
    """Return ("param" | "buffer", name), ("input", position) or ("tangent", output position)."""
    from torch._functorch._aot_autograd import descriptors as d

    desc = node.meta["desc"]
    if isinstance(desc, d.ParamAOTInput):
        return "param", desc.target
    if isinstance(desc, d.BufferAOTInput):
        return "buffer", desc.target
    if isinstance(desc, d.PlainAOTInput):
        return "input", desc.idx
    if isinstance(desc, d.TangentAOTInput) and isinstance(desc.output, d.PlainAOTOutput):
        return "tangent", desc.output.idx
    return "unknown", repr(desc)


def describe_results(output: torch.fx.Node) -> list[tuple[str, Any]]:
    """Return the meaning of each element of a traced graph's output.

    ("output", position), ("grad", name), ("input-grad", position), ("param-update", name),
    ("buffer-update", name), ("input-update", position) or ("unknown", text).
    """
    from torch._functorch._aot_autograd import descriptors as d

    def one(desc: Any) -> tuple[str, Any]:
        if isinstance(desc, d.PlainAOTOutput):
            return "output", desc.idx
        source = getattr(desc, "grad_of", None) or getattr(desc, "mutated_input", None)
        kind = "grad" if isinstance(desc, d.GradAOTOutput) else "update"
        if isinstance(source, d.ParamAOTInput):
            return ("grad" if kind == "grad" else "param-update"), source.target
        if isinstance(source, d.BufferAOTInput):
            return f"buffer-{kind}", source.target
        if isinstance(source, d.PlainAOTInput):
            return f"input-{kind}", source.idx
        return "unknown", repr(desc)

    return [one(desc) for desc in output.meta["desc"]]
