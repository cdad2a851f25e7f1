"""The tracer: one call of a module, and its backward, as a graph of ATen nodes.

aot_export_joint_with_descriptors is the only tracer that keeps custom autograd functions and
tensor hooks in the backward; it is private and its flags are module globals.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule
from torch._dynamo.source import ConstantSource
from torch._library.simple_registry import singleton
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentError
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicShapeError
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_modules
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.fx.node import has_side_effect
from torch.nn.modules import transformer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.printers import PythonPrinter

from zerofx.compat.graphs import FakeTensor, FakeTensorMode
from zerofx.compat.known import KnownValues

__all__ = [
    "DataDependentError",
    "DynamicShapeError",
    "OptimizedModule",
    "Symbols",
    "describe_placeholder",
    "describe_results",
    "expression",
    "is_outside_trace",
    "is_symbolic",
    "new_fake_mode",
    "rerun_on_fakes",
    "shown_by",
    "trace_joint",
]

FAKE_CALLS = 16384  # about 1 KiB each; a model with ever new shapes would fill the memory


def is_outside_trace(tensor: object) -> bool:
    """Tell whether a tensor met while tracing is no part of the trace: a constant, or its view.

    Tracing would write to it for real, and record no update.
    """
    mode = torch.utils._python_dispatch._detect_infra_mode(
        torch._C._TorchDispatchModeKey.FUNCTIONAL
    )
    if mode is None or not isinstance(tensor, torch.Tensor):
        return False
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not is_wrapped and not isinstance(tensor, FunctionalTensor)


def is_traced(value: object) -> bool:
    """Tell whether a value is a tensor that tracing made, which has no values."""
    return isinstance(value, (FunctionalTensor, FakeTensor))


def new_fake_mode() -> KnownValues:
    """Make a fake mode with static shapes that lets the model's own constants in."""
    if len(FakeTensorMode.cache) > FAKE_CALLS:  # torch's own, of a process, which never shrinks
        FakeTensorMode.cache_clear()
    return KnownValues(shape_env=None, allow_non_fake_inputs=True)


# -- Symbols for sizes: made before tracing, and read back from what tracing did with them ---------


class _Printer(PythonPrinter):
    """Writes an expression in the Python that emitted source has, without torch's own functions."""

    def _print_ToFloat(self, expr: Any) -> str:
        return f"float({self._print(expr.args[0])})"

    def _print_TruncToInt(self, expr: Any) -> str:
        return f"int({self._print(expr.args[0])})"


class Symbols:
    """The symbols of one trace, each a size that is at least 2.

    hints: name -> the value at which control flow on sizes goes the way that this trace takes.
    The env notes each way that was taken as a guard; `conditions` are these guards.
    """

    def __init__(self, hints: Mapping[str, int]) -> None:
        # Two symbols with one hint stay two symbols: which sizes are equal is for the caller to say
        self.env = ShapeEnv(duck_shape=False, specialize_zero_one=True)
        self.sizes: dict[str, Any] = {}
        self._names: dict[Any, Any] = {}  # torch's symbols -> those that are called as we say
        for name, hint in hints.items():
            source = ConstantSource(name)
            symbol = self.env.create_symbol(hint, source, DimDynamic.DYNAMIC)
            self.sizes[name] = self.env.create_symintnode(symbol, hint=hint, source=source)
            self._names[symbol] = type(symbol)(name, integer=True, positive=True)

    def mode(self) -> KnownValues:
        """Make the fake mode whose tensors may have these sizes."""
        return KnownValues(shape_env=self.env, allow_non_fake_inputs=True)

    def text(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> str:
        """Return a value as a Python expression of the names."""
        return self._written(self.env.replace(value.node.expr))

    def _written(self, expr: Any) -> str:
        """Write an expression: torch's names are other ones in each process, and set the order."""
        return str(_Printer().doprint(expr.xreplace(self._names)))

    def conditions(self) -> tuple[str, ...]:
        """Return what must hold of the sizes for the trace to be theirs, as Python expressions.

        Nothing is said of those that the trace made constants.
        """
        known = {symbol: self.env.replace(symbol) for symbol in self._names}
        constants = {symbol: found for symbol, found in known.items() if found.is_number}
        guards = [guard.expr.xreplace(constants) for guard in self.env.guards]
        texts = dict.fromkeys(map(self._written, guards))
        return tuple(text for text in texts if text != "True")

    def constants(self) -> frozenset[str]:
        """Return the names of the sizes that the trace holds for one value of."""
        named = self._names.items()
        return frozenset(own.name for symbol, own in named if self.env.replace(symbol).is_number)


def is_symbolic(value: Any) -> bool:
    """Tell whether a value is a size, or computed from sizes, that has a symbol."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def expression(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """Return what two symbolic values of one trace have alike that are equal."""
    return value.node.expr


# -- The flags, classes and operators that make a module traceable ---------------------------------


@contextlib.contextmanager
def compiling_flags(value: bool = True) -> Iterator[None]:
    """Set what `torch.compiler.is_compiling()` and `is_exporting()` report, and put it back.

    Libraries (transformers) ask these to take their traceable paths.
    """
    old = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = value
    torch.compiler._is_exporting_flag = value
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = old


class _InlineCheckpoint:
    """Stands in for the reentrant checkpoint, which runs its own backward inside backward.

    What is kept or recomputed is the plan's choice; the values are the same.
    """

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        needs_grad = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(torch.is_grad_enabled() and needs_grad):
            return function(*args)


@contextlib.contextmanager
def inlined_checkpoints() -> Iterator[None]:
    """Make reentrant checkpoints plain calls; the other kind is transparent to the tracer.

    That takes contexts (`context_fn`) which are dispatch modes. Of others the one for forward is
    entered here; recomputing is up to the plan.
    """
    from torch.utils import checkpoint

    plain = checkpoint._checkpoint_without_reentrant_generator

    def in_context(fn: Any, preserve: bool, context_fn: Any, *args: Any, **kwargs: Any) -> Any:
        forward, recompute = context_fn()
        if all(isinstance(c, TorchDispatchMode) for c in (forward, recompute)):
            yield from plain(fn, preserve, lambda: (forward, recompute), *args, **kwargs)
            return
        with forward:
            yield from plain(fn, preserve, checkpoint.noop_context_fn, *args, **kwargs)

    with (
        mock.patch.object(checkpoint, "CheckpointFunction", _InlineCheckpoint),
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", in_context),
    ):
        yield


@contextlib.contextmanager
def optional_causal_hints() -> Iterator[None]:
    """Let `nn.TransformerEncoder` take a mask for what it is if its values are not known.

    It looks whether the mask is the causal one, which only decides how attention computes the same.
    """
    look = transformer._detect_is_causal_mask

    def detect(*args: Any, **kwargs: Any) -> bool:
        try:
            return look(*args, **kwargs)
        except (DataDependentError, GuardOnDataDependentSymNode):
            return False

    with mock.patch.object(transformer, "_detect_is_causal_mask", detect):
        yield


# Without a user and without an effect, tracing would drop it as dead.
CHECK_LINALG = has_side_effect(torch.ops.aten._linalg_check_errors.default)


def _check_all(kind: type[Exception], cond: torch.Tensor, message: Any = None) -> None:
    """Stand in for `torch._check_tensor_all_with`, which looks at the values."""
    said = message if isinstance(message, str) else "a check of the model's failed"
    torch._assert_async(cond.all(), f"{kind.__name__}: {said}")


@contextlib.contextmanager
def plain_checks() -> Iterator[None]:
    """Trace checks of values as operators: those of `torch.linalg`, and torch's function for them.

    They raise as in eager, wherever they are among the other operators.
    """
    with contextlib.ExitStack() as stack:
        holder = singleton.find(CHECK_LINALG.name()).effect
        if (
            getattr(holder, "effect", None) is not None
        ):  # an ordered effect; on torch 2.11 it is none
            stack.enter_context(mock.patch.object(holder, "_effect", None))
        stack.enter_context(mock.patch.object(torch, "_check_tensor_all_with", _check_all))
        yield


@contextlib.contextmanager
def traceable(says_compiling: bool = True) -> Iterator[None]:
    """Make torch's own Python code traceable and quiet: what fails is raised, not also printed."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    validates = torch.distributions.Distribution._validate_args
    log.setLevel(logging.CRITICAL)
    # Its argument checks are control flow on values.
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        with (
            compiling_flags(says_compiling),
            inlined_checkpoints(),
            optional_causal_hints(),
            plain_checks(),
            torch.compiler.set_stance("force_eager"),  # what the user compiled is traced through
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message="(?s).*(Anomaly Detection|Error detected in)")
            yield
    finally:
        log.setLevel(level)
        torch.distributions.Distribution.set_default_validate_args(validates)


@contextlib.contextmanager
def shown_by(show: Callable[[torch.Tensor], str]) -> Iterator[None]:
    """Have `show` turn traced tensors into text, in place of "FunctionalTensor(...)"."""
    before = FunctionalTensor.__repr__
    FunctionalTensor.__repr__ = lambda self, **_: show(self)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        FunctionalTensor.__repr__ = before  # type: ignore[method-assign,assignment]


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Say on a CPU what the operator runs: its fake kernel gives CUDA's strides there."""
    if grad.device.type != "cpu":
        return NotImplemented
    return grad * mask * scale


_DECOMPOSED = {torch.ops.aten.native_dropout_backward.default: _dropout_backward}


def trace_joint(
    module: torch.nn.Module, args: tuple[Any, ...], says_compiling: bool = True
) -> torch.fx.GraphModule:
    """Trace `module(*args)` (all fake) with its backward into one graph of ATen nodes.

    says_compiling: what `torch.compiler.is_compiling()` is. Some forwards raise if it is true.

    Placeholders carry `meta["desc"]`, and so does the output node (a list, one an element). Where
    nothing differentiable comes out the graph has no backward. Eager runs a backward outside the
    forward's autocast region, hence `backward_pass_autocast`. The graph's module is lazy: nothing
    runs it, and writing its Python twice takes as long as tracing a layer.
    """
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with (
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
    """Call `module(*args)` on fake tensors as tracing does, for its side effects only."""
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
    """Return what each element of a traced graph's output stands for.

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
