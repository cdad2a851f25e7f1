"""Every private torch API that zerofx uses, grouped by who needs it, each with the reason why.

Works on torch 2.11 to 2.13; nothing else in the package imports a name of torch that begins with
an underscore.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

# --- capture -------------------------------------------------------------------------------------
# aot_export_joint_with_descriptors is the only tracer that keeps custom autograd functions and
# tensor hooks in the backward; it is private and its flags are module globals.


from torch._dynamo.eval_frame import OptimizedModule  # noqa: E402, F401
from torch._ops import OpOverload  # noqa: E402, F401
from torch._subclasses.fake_tensor import (  # noqa: E402
    DataDependentOutputException as DataDependentError,  # noqa: F401
)
from torch._subclasses.fake_tensor import (  # noqa: E402
    DynamicOutputShapeException as DynamicShapeError,  # noqa: F401
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402, F401
from torch._subclasses.functional_tensor import FunctionalTensor  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402, F401
from torch.utils._pytree import TreeSpec  # noqa: E402, F401
from torch.nn.utils.spectral_norm import SpectralNorm  # noqa: E402
from torch.nn.utils.weight_norm import WeightNorm  # noqa: E402

# The hook forms of these norms set a plain attribute before every forward.
NORM_HOOKS = (WeightNorm, SpectralNorm)


def forward_pre_hooks(module: torch.nn.Module) -> list[Any]:
    return list(module._forward_pre_hooks.values())


def global_module_hooks() -> list[dict[int, Any]]:
    """Return where torch keeps the hooks that it calls for every module."""
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return [getattr(torch.nn.modules.module, f"_global_{kind}") for kind in kinds]


def has_gradient_hooks(param: torch.Tensor) -> bool:
    """Tell whether `register_hook` or `register_post_accumulate_grad_hook` was called on a leaf."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(param._backward_hooks) or bool(param._post_accumulate_grad_hooks)


def op_argument(node: torch.fx.Node, name: str) -> Any:
    """Return what an ATen node passes for an argument of its schema, None if it has no such."""
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(name)
            return argument.default_value if given is None else given
    return None


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


def new_fake_mode() -> FakeTensorMode:
    """Make a fake mode with static shapes that lets the model's own constants in."""
    return FakeTensorMode(shape_env=None, allow_non_fake_inputs=True)


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


def trace_joint(module: torch.nn.Module, args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """Trace `module(*args)` (all fake) with its backward into one graph of ATen nodes.

    Placeholders carry `meta["desc"]`, and so does the output node (a list, one an element). Where
    nothing differentiable comes out the graph has no backward. Eager runs a backward outside the
    forward's autocast region, hence `backward_pass_autocast`.
    """
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with (
        config.patch(backward_pass_autocast="off", functionalize_rng_ops=False),
        traceable(),
        torch.fx.traceback.preserve_node_meta(),
        contextlib.ExitStack() as stack,
    ):
        return aot_export_joint_with_descriptors(stack, module, args).graph_module


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


@contextlib.contextmanager
def recording_autograd() -> Iterator[None]:
    """Record gradients inside an op's own body, which compiled code calls below autograd."""
    key = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for kind in (key.AutogradFunctionality, key.AutogradOther, key.AutogradNestedTensor):
        excluded = excluded.remove(kind)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


# --- end of capture ------------------------------------------------------------------------------

# --- shards --------------------------------------------------------------------------------------
# A sharded parameter is a DTensor whose local tensor has another number of dimensions than the
# global shape; the public constructors derive one from the other, so the wrapper, its spec and a
# mesh without process groups are made directly.


def shard_mesh(device_type: str, size: int, rank: int) -> Any:
    """Return a 1-D DeviceMesh of the shard axis that owns no process group."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(
        device_type, torch.arange(size), mesh_dim_names=("shard",), _init_backend=False, _rank=rank
    )


def shard_spec(mesh: Any, shape: torch.Size, dtype: torch.dtype) -> Any:
    """Return the DTensorSpec of a contiguous tensor of `shape`, placed `Shard(0)` on `mesh`."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    meta = TensorMeta(shape, tuple(reversed(stride)), dtype)
    return DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)


# DTensor.__init__ costs more than the wrapper itself; this is its __new__.
new_dtensor = torch.Tensor._dtensor__new__

# What the wrapper keeps: the local tensor (a slot, so reading it costs no __torch_function__).
local_tensor: Callable[[Any], torch.Tensor] = operator.attrgetter("_local_tensor")
local_dtype: Callable[[Any], torch.dtype] = operator.attrgetter("_local_tensor.dtype")
local_device: Callable[[Any], torch.device] = operator.attrgetter("_local_tensor.device")

# Skips __torch_function__ of subclasses inside the block.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass


def allow_foreach(cls: type[torch.Tensor]) -> None:
    """Let optimizers and clipping choose foreach for tensors of `cls`, as DTensor itself does."""
    from torch.optim.optimizer import _foreach_supported_types as in_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as in_clipping

    for known in (in_optimizers, in_clipping):
        if cls not in known:
            known.append(cls)


# nn.Parameter's own way to make an instance over given memory, for subclasses of Tensor.
make_subclass: Callable[..., Any] = torch.Tensor._make_subclass

# The properties of Tensor behind those that a subclass overrides: `.__get__(t)`, `.__set__(t, v)`.
raw_data: Any = torch.Tensor.data
raw_version: Any = torch.Tensor._version

# What clipping and GradScaler call with whole lists.
foreach_norm: Callable[..., tuple[torch.Tensor, ...]] = torch._foreach_norm
unscale_and_check: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common which share a storage, also on meta."""
    return int(tensor.untyped_storage()._cdata)


def storage_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors, and how many names of the storage itself, share its storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


# --- process groups ------------------------------------------------------------------------------
# The flat collectives are renamed in 2.13, where the old names warn. A group's backend object is
# what torch.distributed's wrappers end in: point-to-point calls on it cost half as much Python.


def all_gather_flat(group: Any, out: torch.Tensor, shard: torch.Tensor) -> Any:
    """Launch an all-gather into one flat tensor; return its handle."""
    import torch.distributed as dist

    launch = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return launch(out, shard, group=group, async_op=True)


def reduce_scatter_flat(group: Any, out: torch.Tensor, full: torch.Tensor) -> Any:
    """Launch a reduce-scatter (sum) of one flat tensor; return its handle."""
    import torch.distributed as dist

    launch = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return launch(out, full, group=group, async_op=True)


def group_backend(group: Any, device: torch.device) -> Any:
    """Return the backend object that carries out the collectives of `group` on `device`."""
    return group._get_backend(device)


def default_store() -> Any:
    """Return the key-value store that the default process group was made with."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


# --- end of process groups -----------------------------------------------------------------------


# --- regions -------------------------------------------------------------------------------------
# standalone_compile is the only way to get one graph compiled by Inductor without Dynamo, saved,
# and loaded in another process; it is private until torch makes it public.


def inductor_problem() -> str:
    """Return why Inductor cannot compile here, empty where it can."""
    if torch.cuda.is_available():
        return ""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "no C++ compiler found; install g++, or set kernels='aten' to silence this"
    return ""


def probe_compiler() -> None:
    """Find out which vector instructions the C++ compiler has; Inductor remembers the answer."""
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.pick_vec_isa()


def import_inductor() -> None:
    """Import what compiling regions needs, so that a thread beside this one imports nothing."""
    import torch._inductor.compile_fx
    import torch._inductor.cpu_vec_isa
    import torch._inductor.standalone_compile  # noqa: F401


def compile_region(
    gm: torch.fx.GraphModule, specs: tuple[tuple[Any, ...], ...], path: str
) -> Callable[[list[torch.Tensor]], Any] | None:
    """Compile a region's graph for inputs of these (dtype, shape, strides, device type).

    The artifact is saved at `path`, beside it the source that Inductor wrote (`wrapper_of`); the
    result takes one list of tensors, which it empties. None where there is nothing to compile.
    """
    from torch._inductor import standalone_compile

    if all(_is_view(n.target) for n in gm.graph.nodes if n.op == "call_function"):
        return None  # Inductor makes no code of views, and warns that it has nothing to save
    fakes: list[Any] = []
    with FakeTensorMode():
        for dtype, shape, stride, device in specs:
            made = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
            fakes.append(made)
    # Inductor's own random numbers would differ from eager's
    options = {"config_patches": {"fallback_random": True}}
    with torch.no_grad(), _generated_source() as sources:
        artifact = standalone_compile(
            gm, fakes, dynamic_shapes="from_example_inputs", options=options
        )
    if not sources:  # all was simplified away
        return None
    Path(wrapper_of(path)).write_text("".join(sources), encoding="utf-8")
    artifact.save(path=path, format="binary")
    return _boxed(artifact)


def _is_view(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    return all(r.alias_info and not r.alias_info.is_write for r in target._schema.returns)


def wrapper_of(path: str) -> str:
    """Return where the source generated for the artifact at `path` lies."""
    return f"{path.removesuffix('.bin')}.py"


@contextlib.contextmanager
def _generated_source() -> Iterator[list[str]]:
    """Collect the module that Inductor generates, or finds in its cache, within the block."""
    from torch._inductor.graph import GraphLowering

    sources: list[str] = []
    before = GraphLowering.save_output_code
    GraphLowering.save_output_code = sources.append
    try:
        yield sources
    finally:
        GraphLowering.save_output_code = before


def load_artifact(path: str) -> Callable[[list[torch.Tensor]], Any] | None:
    """Load what `compile_region` saved; None where this torch cannot read it."""
    from torch._inductor import CompiledArtifact

    try:
        return _boxed(CompiledArtifact.load(path=path, format="binary"))
    except (AssertionError, RuntimeError, EOFError):  # another torch's key or serialisation
        return None


def _boxed(artifact: Any) -> Callable[[list[torch.Tensor]], Any]:
    def run(args: list[torch.Tensor]) -> Any:
        taken = tuple(args)
        args.clear()
        return artifact(*taken)

    return run


# --- reload --------------------------------------------------------------------------------------
# Reading emitted source back needs to see every op as it is dispatched on fake tensors; the mode
# that shows them has no public home yet.
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402, F401

# --- autograd ------------------------------------------------------------------------------------
# Whether retain_graph was asked for, and which gradients, has no public accessor: saved values can
# be freed during backward only if it was not, and autograd.grad must leave p.grad alone.


def keeps_graph() -> bool:
    """Return whether the backward now running was called with retain_graph=True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def will_run(node: Any) -> bool:
    """Return whether the backward now running will reach this node of autograd's graph."""
    return bool(torch._C._will_engine_execute_node(node))


# --- many small tensors --------------------------------------------------------------------------
# One call over a list of tensors has no public name.

foreach_copy_: Callable[..., None] = torch._foreach_copy_
foreach_zero_: Callable[..., None] = torch._foreach_zero_

# --- graphs --------------------------------------------------------------------------------------
# The class of operator namespaces, and the parts of an operator's name, are not public.

OpNamespace: type = type(torch.ops.aten)


def op_name(op: OpOverload) -> tuple[str, str, str]:
    """Return (namespace, name, overload) of an operator: ("aten", "mm", "default")."""
    space, name = op._schema.name.split("::")
    return space, name, op._overloadname


@functools.cache
def argument_names(op: Any) -> tuple[str, ...]:
    """Return the names of an operator's arguments, in order."""
    return tuple(argument.name for argument in op._schema.arguments)


# A GraphModule writes and compiles its Python at every assignment of its graph, a second for a deep
# model, though only a graph that is run needs it; torch's lazy form is not public.
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule  # noqa: E402, F401
