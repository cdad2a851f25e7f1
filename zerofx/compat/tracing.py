"""The tracer: one call of a module, and its backward, as a graph of ATen nodes.

aot_export_joint_with_descriptors is the only tracer that keeps custom autograd functions and
tensor hooks in the backward; it is private and its flags are module globals.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentError
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicShapeError
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_modules
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from zerofx.compat.graphs import FakeTensor, FakeTensorMode
from zerofx.compat.strides import TrueStrides

__all__ = [
    "SIZE_FUNCTIONS",
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


def new_fake_mode() -> FakeTensorMode:
    """Make a fake mode with static shapes that lets the model's own constants in."""
    if len(FakeTensorMode.cache) > FAKE_CALLS:  # torch's own, of a process, which never shrinks
        FakeTensorMode.cache_clear()
    return TrueStrides(shape_env=None, allow_non_fake_inputs=True)


# -- Symbols for sizes: made before tracing, and read back from what tracing did with them ---------


class _Printer(PythonPrinter):
    """Writes an expression in the Python that emitted source has, without torch's own functions."""

    def _print_ToFloat(self, expr: Any) -> str:
        return f"float({self._print(expr.args[0])})"

    def _print_TruncToInt(self, expr: Any) -> str:
        return f"int({self._print(expr.args[0])})"


class Symbols:
    """The symbols of one trace, each a size that is at least 2, or a fraction.

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
            if isinstance(hint, float):
                made: Any = self.env.create_symfloatnode(symbol, hint=hint, source=source)
                self._names[symbol] = type(symbol)(name, real=True)
            else:
                made = self.env.create_symintnode(symbol, hint=hint, source=source)
                self._names[symbol] = type(symbol)(name, integer=True, positive=True)
            self.sizes[name] = made

    def mode(self) -> FakeTensorMode:
        """Make the fake mode whose tensors may have these sizes."""
        return TrueStrides(shape_env=self.env, allow_non_fake_inputs=True)

    def text(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> str:
        """Return a value as a Python expression of the names."""
        return self._written(self.env.replace(value.node.expr))

    def _written(self, expr: Any) -> str:
        """Write an expression: torch's names are other ones in each process, and set the order."""
        named = expr.xreplace(self._names)
        return str(_Printer().doprint(named.canonical if named.is_Relational else named))

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


# What stands for these functions while an expression of sizes becomes nodes of a graph.
SIZE_FUNCTIONS: dict[str, Any] = {
    "max": torch.sym_max,
    "min": torch.sym_min,
    "int": torch.sym_int,
    "float": torch.sym_float,
    "math": SimpleNamespace(sqrt=torch._sym_sqrt),  # type: ignore[attr-defined]
}


def is_symbolic(value: Any) -> bool:
    """Tell whether a value is a size, or computed from sizes, that has a symbol."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def expression(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """Return what two symbolic values of one trace have alike that are equal."""
    return value.node.expr


# -- The flags, classes and operators that make a module traceable ---------------------------------


@contextlib.contextmanager
def compiling_flags() -> Iterator[None]:
    """Set what `torch.compiler.is_compiling()` and `is_exporting()` report, and put it back.

    Libraries (transformers) ask these to take their traceable paths.
    """
    old = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = True
    torch.compiler._is_exporting_flag = True
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
    """Make reentrant checkpoints plain calls; the other kind is transparent to the tracer."""
    from torch.utils import checkpoint

    old = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _InlineCheckpoint  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = old  # type: ignore[misc]


@contextlib.contextmanager
def traceable() -> Iterator[None]:
    """Make torch's own Python code traceable and quiet: what fails is raised, not also printed."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    validates = torch.distributions.Distribution._validate_args
    log.setLevel(logging.CRITICAL)
    # Its argument checks are control flow on values.
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        with (
            compiling_flags(),
            inlined_checkpoints(),
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


def trace_joint(module: torch.nn.Module, args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """Trace `module(*args)` (all fake) with its backward into one graph of ATen nodes.

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
        traceable(),
        torch.fx.traceback.preserve_node_meta(),
        contextlib.ExitStack() as stack,
    ):
        joint = aot_export_joint_with_descriptors(stack, module, args, decompositions=_DECOMPOSED)  # type: ignore[arg-type]
        return joint.graph_module


def rerun_on_fakes(module: torch.nn.Module, args: tuple[Any, ...], mode: FakeTensorMode) -> None:
    """Call `module(*args)` on fake tensors as tracing does, for its side effects only."""
    with traceable(), torch.random.fork_rng(devices=[]), mode:
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
