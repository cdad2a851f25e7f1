"""What zerofx relies on of each private name of torch: one contract per name, checked in seconds.

A torch release that renames something, or changes what it does, fails here by name. The last tests
read the package and keep the list of contracts whole: a private name needs a contract, and is
reached through zerofx.compat only. `private_torch.py` says how names are written.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import operator
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from leftovers import python_dispatches
from private_torch import PACKAGE, defined_in, resolved, uses_in, uses_of_package
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from zerofx.compat import (
    autograd,
    callers,
    checkpoint,
    direct,
    graphs,
    groups,
    inductor,
    modules,
    operators,
    optim,
    strides,
    tensors,
    tracing,
)
from zerofx.compat.flops import counted_flops
from zerofx.compat.operators import results_in_inputs
from zerofx.compat.wrapper import trace

aten = torch.ops.aten
Check = Callable[[], None]
CONTRACTS: dict[str, Check] = {}


def contract(*names: str) -> Callable[[Check], Check]:
    """Note that a function checks these names."""

    def note(check: Check) -> Check:
        assert CONTRACTS.keys().isdisjoint(names)
        CONTRACTS.update(dict.fromkeys(names, check))
        return check

    return note


@contextlib.contextmanager
def one_rank() -> Iterator[dist.ProcessGroup]:
    """Make this process a job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


# -- modules --------------------------------------------------------------------------------------
@contract("._parameters", "._buffers", "._modules")
def own_dictionaries() -> None:
    """A module reads its entries from these dictionaries at every access, and keeps them."""
    module = nn.Sequential(nn.BatchNorm1d(2))
    norm = module[0]
    held = [modules.own_parameters(norm), modules.own_buffers(norm), modules.own_children(module)]
    owners = zip(modules.CONTAINERS, (norm, norm, module), held, strict=True)
    assert all(vars(owner)[name] is its for name, owner, its in owners)
    weight, mean, child = nn.Parameter(torch.ones(2)), torch.ones(2), nn.Identity()
    held[0]["weight"], held[1]["running_mean"], held[2]["0"] = weight, mean, child
    assert norm.weight is weight and norm.running_mean is mean and module[0] is child
    norm.weight, norm.running_mean, module[0] = nn.Parameter(mean), weight.detach(), norm
    assert held[0]["weight"] is norm.weight and held[2]["0"] is norm
    norm.register_parameter("none", None)
    assert held[0]["none"] is None and modules.own_parameters(norm) is held[0]


@contract("._non_persistent_buffers_set")
def unsaved_buffers() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("dropped", torch.ones(1), persistent=False)
    assert modules.unsaved_buffers(module) == {"dropped"}
    assert list(module.state_dict()) == ["kept"]


@contract("._flat_weights", "._flat_weights_names", "._flat_weight_refs")
def flat_weights() -> None:
    """An RNN computes from its flat weights; the attributes that a call may set are these."""
    lstm, x = nn.LSTM(2, 2), torch.ones(1, 1, 2)
    before = set(vars(lstm))
    for name, param in list(lstm.named_parameters()):
        modules.put_parameter(lstm, name, nn.Parameter(torch.zeros_like(param)))
    assert not lstm(x)[0].any()
    assert set(vars(lstm)) == before and before >= modules.FLAT_WEIGHTS


@contract("._reset_parameters")
def private_reset() -> None:
    module = nn.MultiheadAttention(2, 1)
    found = [getattr(module, name, None) for name in modules.RESETS]
    assert found[0] is None and not inspect.signature(found[1]).parameters


@contract(
    "._call_impl",
    "._compiled_call_impl",
    "._is_full_backward_hook",
    "._forward_hooks_with_kwargs",
    "._forward_hooks_always_called",
    "._forward_pre_hooks_with_kwargs",
)
def calls() -> None:
    """What is called in the place of a module is an attribute that copies lose.

    A module without the entries that decide how it is called is called by its class's forward.
    """
    inside, seen = nn.ReLU(), []
    outer, x = nn.Sequential(inside), torch.ones(1)
    inside.register_forward_hook(lambda module, args, kwargs, out: seen.append(1), with_kwargs=True)
    inside.forward = lambda x: x + 1
    modules.intercept(inside, lambda x: x + 10)
    assert outer(x).item() == 11 and not seen
    assert modules.intercepted(copy.deepcopy(inside)) is None
    assert modules.call_uncompiled(inside, (x,), {}).item() == 2 and seen == [1]
    before = modules.call_entries(inside)
    modules.put_call_entries(inside, modules.without_hooks(before))
    assert outer(-x).item() == 0 and seen == [1]
    modules.put_call_entries(inside, before)
    modules.intercept(inside, None)
    assert outer(x).item() == 2 and seen == [1, 1]


@contract("._metadata")
def metadata() -> None:
    """Versions travel on the state dict, and reach the modules that load it."""
    state = nn.BatchNorm1d(1).state_dict()
    assert modules.state_metadata(state) == {"": {"version": 2}}
    assert modules.state_metadata({}) is None
    del state["num_batches_tracked"]  # version 1 had none
    modules.note_state_metadata(state, {"": {"version": 1}})
    nn.BatchNorm1d(1).load_state_dict(state)


@contract(
    "._forward_hooks",
    "._forward_pre_hooks",
    "._backward_hooks",
    "._backward_pre_hooks",
    "._global*",
)
def hooks() -> None:
    """Each kind has its dictionary, in the order of `hooks_of`, by the handle's id."""
    module, kinds = (
        nn.Linear(1, 1),
        ("forward", "forward_pre", "full_backward", "full_backward_pre"),
    )
    registered = [getattr(module, f"register_{kind}_hook") for kind in kinds]
    everywhere = [getattr(nn.modules.module, f"register_module_{kind}_hook") for kind in kinds]
    found = [*modules.hooks_of(module), *modules.global_module_hooks()]
    for register, held in zip([*registered, *everywhere], found, strict=True):
        hook = lambda *_: None  # noqa: E731
        handle = register(hook)
        assert held[handle.id] is hook and type(handle).next_id == handle.id + 1
        handle.remove()
        assert not held
    module.register_forward_pre_hook(hook)
    assert list(modules.forward_hooks(module)) == modules.forward_pre_hooks(module) == [hook]
    weight = torch.ones(1, requires_grad=True)
    assert not autograd.has_gradient_hooks(weight)
    weight.register_hook(hook)
    assert autograd.has_gradient_hooks(weight)


@contract("._post_accumulate_grad_hooks")
def post_accumulate_hooks() -> None:
    weight = torch.ones(1, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: None)
    assert autograd.has_gradient_hooks(weight)


@contract("._apply")
def applied() -> None:
    """`to`, `half` and the like are one call of `_apply`, whose result they return."""
    seen = []

    class Whole(nn.Linear):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            seen.append(fn(torch.zeros(1)).dtype)
            return self

    module = Whole(1, 1)
    assert module.half() is module.to(torch.float64) is module.cpu() is module
    assert seen == [torch.float16, torch.float64, torch.float32]


class Refused(Exception):
    """Raised by a mark that torch looks for."""


def _mark(name: str) -> type[nn.Module]:
    """Return a module class that raises where its attribute `name` is read or set."""

    def refuse(*_: Any) -> None:
        raise Refused(name)

    return type("Marked", (nn.Linear,), {name: property(refuse, refuse)})


@contract("._ddp_params_and_buffers_to_ignore")
def looked_for_by_ddp() -> None:
    """It asks from torch.nn.parallel."""

    def refuse(_: nn.Module) -> None:
        raise Refused(str(callers.is_called_by("torch.nn.parallel")))

    names = {"_ddp_params_and_buffers_to_ignore": property(refuse)}
    kind = type("Marked", (nn.Linear,), names)
    with one_rank(), pytest.raises(Refused, match="True"):
        nn.parallel.DistributedDataParallel(kind(1, 1))


@contract("._distribute_module_applied")
def looked_for_by_distribute_module() -> None:
    from torch.distributed.tensor import distribute_module, init_device_mesh

    with one_rank(), pytest.raises(Refused):
        distribute_module(_mark("_distribute_module_applied")(1, 1), init_device_mesh("cpu", (1,)))


@contract("._is_fsdp_managed_module")
def set_by_fsdp() -> None:
    """Both set the mark, FullyShardedDataParallel before it changes anything."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    module = _mark("_is_fsdp_managed_module")(1, 1)
    with one_rank():
        with pytest.raises(Refused):
            FullyShardedDataParallel(module, device_id=torch.device("cpu"))
        assert type(module.weight) is nn.Parameter
        with pytest.raises(Refused):
            fully_shard(module)


# -- tensors --------------------------------------------------------------------------------------
@contract("._is_view")
def views() -> None:
    """A view can be made a tensor of its own, which shares memory but no history."""
    base = torch.ones(2, 3)
    assert tensors.as_own_tensor(base) is base
    view = base.view(3, 2).t()
    own = tensors.as_own_tensor(view)
    assert view._is_view() and not own._is_view()
    assert own.data_ptr() == base.data_ptr() and own.stride() == view.stride()
    before = tensors.version_of(own)
    base.add_(1)
    assert tensors.version_of(own) == before and torch.equal(own, view)


@contract("._version", "torch.Tensor._version", "torch.Tensor._version.__get__")
def versions() -> None:
    """Writes count, through aliases too; reading goes through `__torch_function__`."""
    tensor = torch.ones(2)
    before = tensors.version_of(tensor)
    tensor.detach()[0] = 2
    assert tensors.version_of(tensor) == before + 1 == tensors.raw_version.__get__(tensor)
    seen = []

    class Noting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, *rest: Any) -> Any:
            seen.append(func)
            return 7

    assert torch.ones(1).as_subclass(Noting)._version == 7
    assert seen == [tensors.raw_version.__get__]


@contract("torch.autograd._unsafe_preserve_version_counter")
def kept_version() -> None:
    tensor = torch.ones(2)
    before = tensor._version
    with tensors.keep_version(tensor):
        tensor.add_(1)
    assert tensor._version == before and float(tensor[0]) == 2


@contract("._cdata")
def storage_identity() -> None:
    for device in ("cpu", "meta"):
        one, other = torch.empty(2, device=device), torch.empty(2, device=device)
        assert tensors.storage_identity(one) == tensors.storage_identity(one[1:])
        assert tensors.storage_identity(one) != tensors.storage_identity(other)


@contract("torch._C._storage_Use_Count")
def storage_uses() -> None:
    tensor = torch.ones(2)
    before = tensors.storage_uses(tensor)
    view = tensor[1:]
    assert tensors.storage_uses(tensor) == before + 1
    del view
    assert tensors.storage_uses(tensor) == before


@contract("torch.Tensor._make_subclass")
def subclasses() -> None:
    """An instance shares the memory; the mark makes it a parameter."""

    class Marked(torch.Tensor):
        _is_param = True

    tensor = torch.ones(2)
    made = tensors.make_subclass(Marked, tensor, True)
    assert type(made) is Marked and made.data_ptr() == tensor.data_ptr() and made.requires_grad
    assert isinstance(made, nn.Parameter) and not isinstance(tensor, nn.Parameter)


@contract("torch._C.DisableTorchFunctionSubclass")
def without_torch_function() -> None:
    class Failing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            raise AssertionError

    tensor = tensors.make_subclass(Failing, torch.ones(1), True)
    with tensors.DisableTorchFunctionSubclass():
        assert tensor.dtype is torch.float32 and tensor.requires_grad
    assert tensors.require_grad([tensor]) == [True]


@contract(
    "torch.Tensor._dtensor__new__",
    "._local_tensor",
    "._spec",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
)
def dtensors() -> None:
    """A wrapper is made of a flat local tensor and a spec, on a mesh without process groups."""
    local, shape = torch.ones(3), torch.Size([2, 3])
    mesh = tensors.shard_mesh("cpu", 2, 1)
    spec = tensors.shard_spec(mesh, shape, local.dtype)
    made = tensors.new_dtensor(callers.DTensor, local, spec, requires_grad=False)
    assert made.shape == shape and made.stride() == (3, 1)
    assert tensors.local_tensor(made) is local
    assert vars(made).keys() <= {*tensors.OF_DTENSORS} and all(
        hasattr(made, name) for name in tensors.OF_DTENSORS
    )
    assert (tensors.local_dtype(made), tensors.local_device(made)) == (local.dtype, local.device)
    tensors.set_local_tensor(made, other := torch.zeros(3))
    assert tensors.local_tensor(made) is other
    assert made.placements[0].is_shard(0) and made.device_mesh is mesh


@contract(
    "torch.optim.optimizer._foreach_supported_types",
    "torch.utils._foreach_utils._foreach_supported_types",
)
def foreach_types() -> None:
    """Both lists decide: optimizers' own, and the one of clipping."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    class Small(torch.Tensor):
        pass

    tensors.allow_foreach(Small)
    for home in (optimizer, _foreach_utils):
        known = home._foreach_supported_types
        assert known.count(Small) == 1 and torch.Tensor in known
        known.remove(Small)


@contract("torch._assert_async")
def asserts() -> None:
    tensors.assert_async(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="too small"):
        tensors.assert_async(torch.tensor(False), "too small")


# -- lists of tensors -----------------------------------------------------------------------------
def _pair() -> list[torch.Tensor]:
    return [torch.full((2,), 3.0), torch.full((1,), 4.0)]


@contract("torch._foreach_add_", "torch._foreach_mul_")
def foreach_arithmetic() -> None:
    values = _pair()
    optim.foreach_add_(values, _pair(), alpha=2)
    optim.foreach_mul_(values, 0.5)
    assert [v.tolist() for v in values] == [[4.5, 4.5], [6.0]]


@contract("torch._foreach_copy_", "torch._foreach_zero_", "torch._foreach_zero_.__name__")
def foreach_filling() -> None:
    values = _pair()
    tensors.foreach_copy_(values, [torch.ones(2), torch.ones(1)])
    assert [v.tolist() for v in values] == [[1.0, 1.0], [1.0]]
    tensors.foreach_zero_(values)
    assert not any(v.any() for v in values)
    assert tensors.foreach_zero_.__name__ == "_foreach_zero_"  # as __torch_function__ sees it


@contract("torch._foreach_norm")
def foreach_norm() -> None:
    assert [float(n) for n in tensors.foreach_norm([torch.tensor([3.0, 4.0])], 2.0)] == [5.0]


@contract("torch._amp_foreach_non_finite_check_and_unscale_")
def unscaling() -> None:
    values, found = _pair(), torch.zeros(1)
    tensors.unscale_and_check(values, found, torch.tensor([0.5]))
    assert values[0].tolist() == [1.5, 1.5] and not found
    tensors.unscale_and_check([torch.tensor([float("inf")])], found, torch.tensor([0.5]))
    assert float(found) == 1


@contract("._foreach_*")
def foreach_names() -> None:
    """Functions over lists are called after those of one tensor, and reach subclasses."""
    from zerofx.runtime.tensors.elementwise import FOREACH

    for in_place in (False, True):
        found = [n for n in optim.foreach_names(FOREACH, in_place=in_place) if hasattr(torch, n)]
        assert len(FOREACH) - len(found) <= 3, found  # clone_, and what is new in 2.13
    assert all(getattr(torch, name).__name__ == name for name in found)


def _adam(step: Callable[..., None]) -> float:
    """Return a weight of 1 after a step of Adam or AdamW with gradient 1 and decay 0.1."""
    weight, state = torch.ones(1), [torch.zeros(1) for _ in range(2)]
    step(
        [weight], [torch.ones(1)], [state[0]], [state[1]], [], [torch.tensor(1.0)],
        lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        grad_scale=None, found_inf=None,
    )  # fmt: skip
    return round(float(weight), 4)


@contract("torch._fused_adam_", "torch._fused_adamw_")
def fused_adam() -> None:
    assert _adam(optim.fused_adam_) == 0.9 and _adam(optim.fused_adamw_) == 0.89


@contract("torch._fused_sgd_")
def fused_sgd() -> None:
    weight, momentum = torch.ones(1), torch.zeros(1)
    optim.fused_sgd_(
        [weight], [torch.ones(1)], [momentum], weight_decay=0.0, momentum=0.9, lr=0.1,
        dampening=0.0, nesterov=False, maximize=False, is_first_step=True, grad_scale=None,
        found_inf=None,
    )  # fmt: skip
    assert round(float(weight), 4) == 0.9 and float(momentum) == 1


@contract("torch._fused_adagrad_")
def fused_adagrad() -> None:
    assert optim.fused_adagrad_.__name__ == "_fused_adagrad_"  # as __torch_function__ sees it


@contract("._step_supports_amp_scaling")
def scaled_steps() -> None:
    """GradScaler leaves its scale and what it found on an optimizer with the mark."""
    seen = []

    class Scaled(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> None:
            seen.append((float(self.grad_scale), float(self.found_inf)))

    weight = torch.ones(1, requires_grad=True)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), Scaled([weight])
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert seen == [(8.0, 0.0)] and float(weight.grad) == 8


# -- autograd -------------------------------------------------------------------------------------
class _Asking(torch.autograd.Function):
    """Calls `ask` within its backward."""

    ask: Callable[[], Any] = staticmethod(lambda: None)
    told: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _Asking.told = _Asking.ask()
        return grad


def _told(ask: Callable[[], Any], run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    """Return what `ask` says in a backward that `run` starts from a function of x."""
    _Asking.ask = staticmethod(ask)
    run(_Asking.apply(x).sum())
    return _Asking.told


@contract("torch._C._autograd._get_current_graph_task_keep_graph")
def kept_graphs() -> None:
    x = torch.ones(1, requires_grad=True)
    assert _told(autograd.keeps_graph, lambda y: y.backward(), x) is False
    assert _told(autograd.keeps_graph, lambda y: y.backward(retain_graph=True), x) is True


@contract(
    "torch._C._current_graph_task_id", "torch.autograd.Variable._execution_engine.queue_callback"
)
def end_of_backward() -> None:
    """Each backward has a number of its own; what is queued runs once, after everything else."""
    said: list[Any] = []
    x = torch.ones(1, requires_grad=True)

    def note(grad: torch.Tensor) -> None:
        said.append(autograd.backward_number())
        autograd.at_end_of_backward(lambda: said.append(x.grad is not None))

    assert autograd.backward_number() == -1
    for _ in range(2):
        x.grad, y = None, 2 * x
        y.register_hook(note)
        y.backward()
    first, is_set, second, is_set_again = said
    assert is_set and is_set_again and first != second and -1 not in (first, second)
    assert autograd.backward_number() == -1


@contract("torch._C._will_engine_execute_node")
def asked_gradients() -> None:
    x, other = (torch.ones(1, requires_grad=True) for _ in range(2))
    leaf = x.expand_as(x).grad_fn.next_functions[0][0]
    ask = functools.partial(autograd.asks_for, leaf)
    assert _told(ask, lambda y: y.backward(inputs=[x]), x) == "accumulate"
    assert _told(ask, lambda y: torch.autograd.grad(y, [x]), x) == "return"
    assert _told(ask, lambda y: (y + other.sum()).backward(inputs=[other]), x) != "accumulate"


@contract("torch.autograd._profiler_enabled")
def profiling() -> None:
    assert not autograd.is_profiling()
    with torch.autograd.profiler.profile():
        assert autograd.is_profiling()


@contract("torch.autograd.forward_ad._current_level")
def forward_mode() -> None:
    before = autograd.dual_level()
    with torch.autograd.forward_ad.dual_level():
        assert autograd.dual_level() == before + 1
    assert before == -1


@contract(
    "torch._C._ForceDispatchKeyGuard",
    "torch._C._dispatch_tls_local_exclude_set",
    "torch._C._dispatch_tls_local_include_set",
    "torch._C.DispatchKey",
    "torch._C.DispatchKey.AutogradFunctionality",
    "torch._C.DispatchKey.AutogradNestedTensor",
    "torch._C.DispatchKey.AutogradOther",
)
def recording_below_autograd() -> None:
    x = torch.ones(1, requires_grad=True)
    with torch._C._AutoDispatchBelowAutograd():
        assert (x * 2).grad_fn is None
        with autograd.recording_autograd():
            assert (x * 2).grad_fn is not None
        assert (x * 2).grad_fn is None


# -- operators and graphs -------------------------------------------------------------------------
@contract("._schema", "torch._ops.OpOverload")
def schemas() -> None:
    """Names and defaults of arguments, aliases of results, and whether an op writes."""
    schema = graphs.schema_of(aten.add.Tensor)
    assert isinstance(aten.add.Tensor, graphs.OpOverload) and graphs.schema_of(operator.add) is None
    assert [(a.name, a.default_value) for a in schema.arguments] == [
        ("self", None),
        ("other", None),
        ("alpha", 1),
    ]
    assert "Tensor" in str(schema.arguments[0].type) and len(schema.returns) == 1
    assert schema.name == "aten::add" and not schema.is_mutable
    assert graphs.schema_of(aten.add_.Tensor).is_mutable
    info = graphs.schema_of(aten.view.default).returns[0].alias_info
    assert info is not None and not info.is_write
    assert graphs.schema_of(aten.add_.Tensor).arguments[0].alias_info.is_write
    assert graphs.argument_names(aten.add.Tensor) == ("self", "other", "alpha")
    assert counted_flops(aten.mm.default, (torch.ones(2, 2),) * 2, {}, torch.ones(2, 2)) == 16


@contract("._overloadname")
def overload_names() -> None:
    assert graphs.op_name(aten.add.Tensor) == ("aten", "add", "Tensor")
    assert graphs.op_name(aten.mm.default) == ("aten", "mm", "default")


@contract("torch._C.DispatchKey.CompositeImplicitAutograd")
def undecided_views() -> None:
    """`reshape` is made of others, and so may be a view; `view` always is."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    seen = graph.call_function(aten.view.default, (x, [4]))
    output = graph.output((seen,))
    assert results_in_inputs(graph) == [(0, 0, False)]
    with graph.inserting_before(output):
        output.args = ((graph.call_function(aten.reshape.default, (seen, [2, 2])),),)
    assert results_in_inputs(graph) is None


@contract("torch._C._VariableFunctions", "torch._C._nn", "torch._C.TensorBase")
def bindings() -> None:
    """They have a function for each operator that regions call directly (test_operators.py)."""
    for name in (*operators.FUNCTIONS, *operators.METHODS):
        assert callable(operators.binding(name)), name


def test_sums_of_scaled_products() -> None:
    """Inductor is given no factor of a summand, which it forgets if the summand is a product."""
    scaled = fx.Graph()
    x, y = scaled.placeholder("x"), scaled.placeholder("y")
    product = scaled.call_function(aten.mm.default, (x, y))
    scaled.output((scaled.call_function(aten.add.Tensor, (x, product), {"alpha": 2}),))
    x, y = torch.ones(4, 4), torch.full((4, 4), 0.5)
    specs = tuple(("float32", (4, 4), (4, 1), "cpu") for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        gm = fx.GraphModule(nn.Module(), scaled)
        compiled = inductor.compile_region(gm, specs, str(Path(folder) / "region.bin"))
        assert compiled is not None
        (found,) = compiled([x, y])
    assert torch.equal(found, torch.add(x, x @ y, alpha=2))


@contract("torch._ops.HigherOrderOperator", "torch._higher_order_ops.utils.registered_hop_fake_fns")
def higher_order_operators() -> None:
    """Their rules on fake tensors are in one of two tables."""
    cond = torch.ops.higher_order.cond
    assert isinstance(cond, strides.HigherOrderOperator)
    in_class = graphs.FakeTensorMode in cond.python_key_table
    assert in_class or cond in strides.registered_hop_fake_fns


@contract("torch._higher_order_ops.effects.with_effects")
def effects() -> None:
    assert isinstance(graphs.with_effects, strides.HigherOrderOperator)
    assert graphs.with_effects.name() == "with_effects"


@contract("torch.utils._python_dispatch.TorchDispatchMode")
def dispatch_modes() -> None:
    seen = []

    class Noting(graphs.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Noting():
        torch.ones(1) + 1
    assert seen[-1] is aten.add.Tensor


@contract("torch.fx._lazy_graph_module._LazyGraphModule")
def lazy_modules() -> None:
    """A lazy module writes its Python when it is first called; assigning a graph is cheap."""
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    module = graphs.LazyGraphModule(nn.Module(), graph)
    assert "forward" not in vars(type(module)) or module._needs_recompile()
    assert module(3) == (3,)


@contract("._find_nodes_lookup_table", "._graph_namespace", "._insert", "._len")
def copied_nodes() -> None:
    """A copy is what `Graph.node_copy` makes, and the graph finds, counts and names it."""
    traced = fx.symbolic_trace(lambda x, y: torch.add(x, y, alpha=[x, 2][1]) + {"a": y}["a"])
    made, expected = fx.Graph(), fx.Graph()
    for node in traced.graph.nodes:
        node.meta["own"] = node.name
    for graph, append in ((made, graphs.copied_node), (expected, fx.Graph.node_copy)):
        env: dict[fx.Node, fx.Node] = {}
        for node in traced.graph.nodes:
            env[node] = append(graph, node, env.__getitem__)
    made.lint()
    assert str(made) == str(expected) and len(made.nodes) == len(expected.nodes)
    assert [n.meta for n in made.nodes] == [n.meta for n in expected.nodes]
    assert all(a.meta is not b.meta for a, b in zip(made.nodes, traced.graph.nodes, strict=True))
    (found,) = made.find_nodes(op="call_function", target=torch.add)
    assert list(found.users) and all(found in user.all_input_nodes for user in found.users)
    made.erase_node(made.output_node())
    expected.erase_node(expected.output_node())
    names = [graph.call_function(torch.add, ()).name for graph in (made, expected)]
    assert names[0] == names[1] and names[0] not in {n.name for n in traced.graph.nodes}
    fx.GraphModule(nn.Module(), made)
    with pytest.raises(AssertionError, match="hooks"):  # a module has a say in new nodes
        graphs.copied_node(made, found, lambda n: n)


@contract("._used_names")
def names_by_assignment() -> None:
    """A name that a node was given by assignment is given again, unless it is reserved."""
    graph = fx.Graph()
    for is_reserved in (False, True):
        node = graph.call_function(torch.add, ())
        node.name = f"expand_{int(is_reserved)}"
        if is_reserved:
            graphs.reserve_names(graph)
        again = graph.create_node("call_function", torch.add, (), name=node.name)
        assert (again.name != node.name) is is_reserved
        graph.erase_node(again)


@contract("torch.utils._python_dispatch._disable_current_modes")
def operators_that_no_mode_sees() -> None:
    with FlopCounterMode(display=False) as counter, tracing.without_dispatch_modes():
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert counter.get_total_flops() == 0


@contract("torch._dispatch.python.enable_python_dispatcher")
def operators_that_are_decomposed_in_python() -> None:
    symbols = tracing.Symbols({"s0": 5})
    with symbols.mode():
        made = torch.ops.aten.constant_pad_nd.default(torch.empty(symbols.sizes["s0"]), [0, 1])
    assert symbols.text(made.shape[0]) == "1 + s0" and not symbols.constants()


@contract("torch._dispatch.python.no_python_dispatcher")
def guards_that_end_in_another_order() -> None:
    """A guard restores what was there when it was made; the outermost one has the last word."""
    with tracing.no_python_dispatcher():
        theirs = strides.enable_python_dispatcher()
        ours = strides.enable_python_dispatcher()
        for guard in (theirs, ours):
            guard.__exit__(None, None, None)
        assert python_dispatches()
    assert not python_dispatches()


@contract("torch.fx._lazy_graph_module._use_lazy_graph_module")
def lazy_tracing() -> None:
    with tracing.use_lazy_graph_modules(True):
        module = fx.symbolic_trace(nn.Identity())
    assert isinstance(module, graphs.LazyGraphModule)


@contract(
    "torch.utils._pytree",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.GetAttrKey",
    "torch.utils._pytree.MappingKey",
    "torch.utils._pytree.SequenceKey",
    "torch.utils._pytree.register_pytree_node",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_flatten_with_path",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_structure",
    "torch.utils._pytree.tree_unflatten",
)
def trees() -> None:
    """Nested containers are leaves and a comparable spec; paths have `idx`, `key` or `name`."""
    from zerofx.capture.call import _Opened  # registered, with keys of its own

    p, tree = graphs.pytree, {"a": [1, (2,)]}
    leaves, spec = p.tree_flatten(tree)
    assert leaves == p.tree_leaves(tree) == [1, 2]
    assert isinstance(spec, graphs.TreeSpec) and spec == p.tree_structure(tree)
    assert p.tree_unflatten([3, 4], spec) == {"a": [3, (4,)]}
    assert p.tree_map(lambda x: -x, tree) == {"a": [-1, (-2,)]}
    paths = [path for path, _ in p.tree_flatten_with_path(tree)[0]]
    assert isinstance(paths[0][0], p.MappingKey) and paths[0][0].key == "a"
    assert isinstance(paths[0][1], p.SequenceKey) and paths[0][1].idx == 0
    path, leaf = p.tree_flatten_with_path(_Opened(dict, ("k",), [5]))[0][0]
    assert (path[0].key, leaf) == ("k", 5) and p.GetAttrKey("n").name == "n"


# -- fake tensors ---------------------------------------------------------------------------------
@contract(
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor",
)
def fake_tensors() -> None:
    mode = tracing.new_fake_mode()
    with mode:
        made = torch.ones(2, 3) @ torch.ones(3, 4)
    assert isinstance(made, graphs.FakeTensor) and made.fake_mode is mode and made.shape == (2, 4)
    assert tracing.is_traced(made)
    assert mode.allow_non_fake_inputs and mode.shape_env is None
    known = graphs.known_values(mode)
    known["a"] = made
    assert graphs.known_values(mode)["a"] is made


@contract(
    "torch._subclasses.fake_tensor.FakeTensorMode.cache",
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_clear",
)
def fake_cache() -> None:
    """The calls of a process are kept in one table, which can be emptied."""
    with tracing.new_fake_mode():
        torch.ones(2) + 1
    assert len(graphs.FakeTensorMode.cache) > 0
    graphs.FakeTensorMode.cache_clear()
    assert len(graphs.FakeTensorMode.cache) == 0


@contract(
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
)
def data_dependence() -> None:
    with tracing.new_fake_mode():
        made = torch.rand(2)
        with pytest.raises(tracing.DataDependentError):
            made.sum().item()
        with pytest.raises(tracing.DynamicShapeError):
            made.nonzero()


@contract(
    "torch._prims_common.compute_elementwise_output_strides",
    "torch._prims_common.suggest_memory_format",
)
def stride_rules() -> None:
    turned = torch.empty(2, 3).t()
    assert strides.compute_elementwise_output_strides(turned, turned) == turned.stride()
    last = torch.empty(1, 2, 3, 4).to(memory_format=torch.channels_last)
    assert strides.suggest_memory_format(last) is torch.channels_last
    assert strides.suggest_memory_format(last.contiguous()) is torch.contiguous_format


# -- tracing --------------------------------------------------------------------------------------
class _Traced(nn.Module):
    """Gives a result, updates a buffer, and needs a gradient of its parameter and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        _Traced.seen = (
            tracing.is_outside_trace(_OUTSIDE), tracing.is_outside_trace(x), tracing.is_traced(x),
            torch.compiler.is_compiling(), str(x),
        )  # fmt: skip
        return x * self.weight * self.count

    seen: tuple[Any, ...] = ()


_OUTSIDE = torch.ones(1)


@functools.cache
def _joint() -> fx.GraphModule:
    mode = tracing.new_fake_mode()
    module = _Traced()
    with mode:
        for held in (modules.own_parameters(module), modules.own_buffers(module)):
            for name, tensor in held.items():
                made = torch.empty_like(tensor)
                held[name] = nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made
        x = torch.ones(2, requires_grad=True)
    with tracing.shown_by(lambda tensor: "shown"):
        return tracing.trace_joint(module, (x,))


@contract(
    "torch._functorch.aot_autograd.aot_export_joint_with_descriptors",
    "torch._functorch._aot_autograd.descriptors",
    "torch._functorch._aot_autograd.descriptors.BufferAOTInput",
    "torch._functorch._aot_autograd.descriptors.GradAOTOutput",
    "torch._functorch._aot_autograd.descriptors.ParamAOTInput",
    "torch._functorch._aot_autograd.descriptors.PlainAOTInput",
    "torch._functorch._aot_autograd.descriptors.PlainAOTOutput",
    "torch._functorch._aot_autograd.descriptors.TangentAOTInput",
)
def joint_graphs() -> None:
    """The graph of forward and backward says what goes in and what comes out."""
    graph = _joint().graph
    assert [tracing.describe_placeholder(n) for n in graph.find_nodes(op="placeholder")] == [
        ("param", "weight"),
        ("buffer", "count"),
        ("input", 0),
        ("tangent", 0),
    ]
    assert tracing.describe_results(graph.output_node()) == [
        ("buffer-update", "count"),
        ("output", 0),
        ("grad", "weight"),
        ("unknown", "None"),  # a buffer has no gradient
        ("input-grad", 0),
    ]


@contract(
    "torch._functorch.config",
    "torch._functorch.config.patch",
)
def functorch_config() -> None:
    from torch._functorch import config

    before = config.backward_pass_autocast
    with config.patch(backward_pass_autocast="off", functionalize_rng_ops=False):
        assert config.backward_pass_autocast == "off"
    assert config.backward_pass_autocast == before


@contract(
    "torch._C._TorchDispatchModeKey.FUNCTIONAL",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch.utils._python_dispatch._detect_infra_mode",
    "torch._subclasses.functional_tensor.FunctionalTensor",
    "torch._subclasses.functional_tensor.FunctionalTensor.__repr__",
)
def traced_tensors() -> None:
    """While tracing, a constant is told from what is traced, which is shown as we say."""
    _joint()
    is_constant_outside, is_input_outside, is_traced, _, text = _Traced.seen
    assert is_constant_outside and not is_input_outside and is_traced and text == "shown"
    assert not tracing.is_outside_trace(_OUTSIDE)


@contract("torch.compiler._is_compiling_flag", "torch.compiler._is_exporting_flag")
def compiling() -> None:
    assert not torch.compiler.is_compiling()
    with tracing.compiling_flags():
        assert torch.compiler.is_compiling() and torch.compiler.is_exporting()
    assert not torch.compiler.is_compiling() and not torch.compiler.is_exporting()


@contract("torch._subclasses.fake_tensor.unset_fake_temporarily", "torch._C.DisableTorchFunction")
def known_values() -> None:
    """Inside a fake mode's own dispatch, real tensors can be computed."""
    with tracing.new_fake_mode():
        made = torch.arange(3) + 1
        assert made.sum().item() == 6 and made.nonzero().shape == (3, 1)


@contract("torch._sync", "torch._from_functional_tensor")
def functional_tensors() -> None:
    made = torch._to_functional_tensor(torch.ones(2))
    made.add_(1)
    torch._sync(made)
    assert torch.equal(torch._from_functional_tensor(made), torch.full((2,), 2.0))


@contract(
    "torch._library.simple_registry.singleton", "torch._library.simple_registry.singleton.find"
)
def linalg_checks() -> None:
    """A check of torch.linalg has an effect that can be taken away for a while."""
    with tracing.plain_checks():
        holder = tracing.singleton.find(tracing.CHECK_LINALG.name()).effect
        assert getattr(holder, "effect", None) is None


@contract("torch._C._functorch.maybe_current_level")
def transforms() -> None:
    from zerofx.compat import autograd

    seen = torch.func.vmap(lambda x: x * autograd.is_transforming())(torch.ones(1))
    assert seen.item() == 1.0 and not autograd.is_transforming()


@contract("torch._check_tensor_all_with")
def checks_of_values() -> None:
    assert [*inspect.signature(torch._check_tensor_all_with).parameters][:2] == [
        "error_type",
        "cond",
    ]
    assert "_check_tensor_all_with" in torch._check_tensor_all.__code__.co_names


@contract("torch.nn.modules.transformer._detect_is_causal_mask")
def causal_hints() -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    assert tracing.transformer._detect_is_causal_mask(mask)
    for kind in (nn.TransformerEncoder, nn.TransformerDecoder):
        assert "_detect_is_causal_mask" in kind.forward.__code__.co_names


@contract(
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
    "torch.distributed._composable.checkpoint_activation",
)
def checkpoints() -> None:
    from torch.utils import checkpoint

    taken = inspect.signature(checkpoint._checkpoint_without_reentrant_generator).parameters
    assert [*taken][:3] == ["fn", "preserve_rng_state", "context_fn"]
    copied = importlib.import_module("torch.distributed._composable.checkpoint_activation")
    assert hasattr(copied, "_checkpoint_without_reentrant_generator")


@contract("torch.nn.modules.batchnorm._BatchNorm")
def batch_norms() -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(kind, modules.BatchNorm)


@contract("torch.distributions.Distribution._validate_args")
def distribution_checks() -> None:
    kind = torch.distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(not before)
    assert kind._validate_args is (not before)
    kind.set_default_validate_args(before)


@contract("torch._dynamo.eval_frame.OptimizedModule")
def compiled_by_torch() -> None:
    inner = nn.Linear(1, 1)
    outer = torch.compile(inner)
    assert isinstance(outer, tracing.OptimizedModule) and outer._orig_mod is inner


# -- torch.distributed ----------------------------------------------------------------------------
@contract(
    "torch.distributed.distributed_c10d._get_default_store",
    "._get_backend",
    "._set_default_timeout",
)
def process_groups() -> None:
    with one_rank() as group:
        groups.default_store().set("key", "value")
        assert groups.default_store().get("key") == b"value"
        backend = groups.group_backend(group, torch.device("cpu"))
        assert callable(backend.send) and callable(backend.recv)
        groups.set_timeout(group, torch.device("cpu"), 7.5)
        out = torch.zeros(2)
        groups.all_gather_flat(group, out, torch.ones(2)).wait()
        groups.reduce_scatter_flat(group, out, torch.full((2,), 3.0)).wait()
        assert out.tolist() == [3.0, 3.0]


@contract("._allgather_base", "._reduce_scatter_base")
def traced_collectives() -> None:
    """The functions of torch.distributed end in methods of a group, which a trace replaces."""
    calls: list[Callable[[Any, Any], Any]] = [
        lambda out, x: dist.all_reduce(x),
        lambda out, x: dist.all_reduce(x, dist.ReduceOp.MAX),
        lambda out, x: dist.broadcast(x, 0),
        lambda out, x: dist.all_gather([out], x),
        lambda out, x: dist.reduce_scatter(out, [x]),
        lambda out, x: dist.all_to_all_single(out, x),
        lambda out, x: groups.all_gather_flat(dist.group.WORLD, out, x),
        lambda out, x: groups.reduce_scatter_flat(dist.group.WORLD, out, x),
    ]
    functional = ["all_reduce", "all_reduce", "broadcast", "all_gather_into_tensor"]
    functional += ["reduce_scatter_tensor", "all_to_all_single"]
    functional += ["all_gather_into_tensor", "reduce_scatter_tensor"]
    out, x = torch.zeros(4), torch.ones(4)
    with one_rank():
        for call, name in zip(calls, functional, strict=True):
            targets = {str(node.target) for node in _traced(call, out, x).nodes}
            assert f"_c10d_functional.{name}.default" in targets
        with groups.traced_collectives(lambda value: False):
            dist.all_gather([out], x)
    assert torch.equal(out, x)


def _traced(call: Callable[[Any, Any], Any], out: torch.Tensor, x: torch.Tensor) -> fx.Graph:
    """Trace a call, its collectives as functional ones."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        call(out, x)
        return out

    with groups.traced_collectives(lambda value: isinstance(value, torch.Tensor)):
        return make_fx(run)(out.clone(), x.clone()).graph


@contract("._get_root_mesh")
def root_meshes() -> None:
    with one_rank():
        mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        assert groups.root_mesh(mesh["shard"]) == mesh == groups.root_mesh(mesh)


@contract(
    "torch.distributed._composable.contract.REGISTRY_KEY",
    "torch.distributed._composable.contract.STATE_KEY",
)
def composable_marks() -> None:
    """A composable API notes itself in the module's `__dict__`, under its name."""
    from torch.distributed._composable import contract as composable

    @composable()
    def replicate(module: nn.Module) -> nn.Module:
        return module

    module = replicate(nn.Linear(1, 1))
    assert callers.REGISTRY_KEY in vars(module) and callers._STATE_KEY in vars(module)
    assert callers.distributed_by(module) == "replicate"
    assert callers.applied(module) == ["replicate"] and callers.applied(module) == []
    assert callers._STATE_KEY not in vars(module)


@contract(
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module",
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module._module_parameters",
)
def running_reducer() -> None:
    seen = []

    class Asking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(callers.reducer_of(self.parameters()))
            return super().forward(x)

    module = Asking(1, 1)
    assert callers.reducer_of(module.parameters()) == ""
    with one_rank():
        wrapped = nn.parallel.DistributedDataParallel(module)
        assert callers.unwrapped(wrapped) == "module"
        wrapped(torch.ones(1, 1))
        assert seen == ["DistributedDataParallel"]
        assert callers.reducer_of(nn.Linear(1, 1).parameters()) == ""


@contract("torch.distributed._state_dict_utils")
def full_states() -> None:
    """Rows are written into `to_local()` of a parameter, from this module."""
    home = importlib.import_module(callers._DISTRIBUTION)
    found = inspect.getsource(home._distribute_tensors)
    assert ".to_local().copy_(full_tensor[tuple(slices)])" in found


@contract("torch.distributed.checkpoint._state_dict_stager")
def staging() -> None:
    """`async_save` copies a tensor by `new_empty()` and its attributes, from this module."""
    home = importlib.import_module(callers._STAGER)
    found = inspect.getsource(home.StateDictStager)
    assert "x.new_empty(" in found and "x.data_ptr() != 0" in found and "x.__slots__" in found


@contract("._checkpoint_offset")
def places_in_files() -> None:
    """A load to meta notes where each storage lies in its file, and reads no values."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t.pt")
        torch.save({"a": torch.arange(5.0), "b": torch.arange(9)[3:], "c": {}}, path)
        found = torch.load(path, map_location="meta", weights_only=True)
        content = path.read_bytes()
        for name, value in (("a", torch.arange(5.0)), ("b", torch.arange(9))):
            at = checkpoint.storage_offset(found[name])
            assert found[name].is_meta and content[at:][: value.nbytes] == value.numpy().tobytes()
        assert found["b"].storage_offset() == 3


@contract(
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
)
def checkpoint_index() -> None:
    """What torch writes into an index of a checkpoint is on the list of what may be read."""
    import torch.distributed.checkpoint as dcp

    from zerofx.snapshot.dcp import IndexUnpickler, _Writer

    info = checkpoint.storage_info("file", 3, 5)
    assert (info.relative_path, info.offset, info.length) == ("file", 3, 5)
    saved = {"a": torch.ones(2, dtype=torch.bfloat16), "b": 1}
    with one_rank(), tempfile.TemporaryDirectory() as folder:
        dcp.save(saved, storage_writer=_Writer(folder))
        index = Path(folder, ".metadata")
        with index.open("rb") as file:
            read = IndexUnpickler(file).load()
        assert sorted(read.state_dict_metadata) == ["a", "b"]
        name = next(iter(read.storage_data.values())).relative_path
        assert Path(folder, name).exists() and name.endswith(checkpoint.DEFAULT_SUFFIX)
    assert all(resolved(name) is not None for name in checkpoint.INDEX_PARTS)


# -- Inductor -------------------------------------------------------------------------------------
@functools.cache
def _region() -> tuple[str, str, list[torch.Tensor], list[torch.Tensor], int, bool]:
    """Compile a region that needs no C++ compiler; return what is known of it.

    Its source, the last part of its name in the cache, inputs, results, how many inputs are left in
    its list, and whether it takes one.
    """
    graph = fx.Graph()
    x, w, c, k = (graph.placeholder(name) for name in "xwck")
    first = graph.call_function(aten.mm.default, (x, w))
    second = graph.call_function(aten.mm.default, (first, w))
    third = graph.call_function(aten.mm.default, (second, w))
    seen = graph.call_function(aten.view.default, (third, [2, 2, 4]))
    dropped = graph.call_function(aten.native_dropout.default, (second, 0.5, True))
    items = [graph.call_function(operator.getitem, (dropped, i)) for i in range(2)]
    convolved = graph.call_function(
        aten.convolution.default, (c, k, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    )
    graph.output((seen, *items, convolved, w))
    given = [torch.randn(4, 4), torch.randn(4, 4), torch.randn(1, 2, 8, 8), torch.randn(3, 2, 3, 3)]
    given = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in given]
    specs = tuple(("float32", tuple(t.shape), t.stride(), "cpu") for t in given)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "region.bin"))
        run = inductor.compile_region(fx.GraphModule(nn.Module(), graph), specs, path)
        assert run is not None
        source = Path(inductor.wrapper_of(path)).read_text()
        has_direct = direct.direct_of(path).exists()
        direct.direct_of(path).unlink(missing_ok=True)
        loaded = inductor.load_artifact(path)
    assert loaded is not None
    for function in (run, loaded):
        taken = list(given)
        results = list(function(taken))
    return source, path, given, results, len(taken), has_direct


@contract(
    "torch._inductor.standalone_compile",
    "torch._inductor.compile_fx",
    "torch._inductor.CompiledArtifact",
    "torch._inductor.CompiledArtifact.load",
    "torch._inductor.decomposition.select_decomp_table",
)
def compiled_regions() -> None:
    """A graph is compiled, saved and loaded without Dynamo, and computes what it did."""
    _, _, (x, w, c, k), results, _, _ = _region()
    assert torch.allclose(results[0], (x @ w @ w @ w).view(2, 2, 4))
    assert torch.allclose(results[3], torch.nn.functional.conv2d(c, k), atol=1e-5)
    assert results[2].dtype is torch.bool


@contract(
    "torch._inductor.graph.GraphLowering", "torch._inductor.graph.GraphLowering.save_output_code"
)
def generated_source() -> None:
    """The source is handed to one function, and its allocations can be read from it."""
    source = _region()[0]
    read = trace(source)
    assert read is not None
    held = [read.made_bytes(moment) for moment in read.moments]
    assert held[:2] == [64, 128] and held[-1] == max(held) == 576
    assert [out.input for out in read.outputs] == [-1, -1, -1, -1, 1]
    assert len(read.channels_last) == 1
    call = direct._generated_call(source)
    assert call is not None
    assert {"mm", "convolution"} <= set(direct._attributes_of(call, "extern_kernels"))


@contract(
    "torch._guards.TracingContext",
    "torch._guards.tracing",
    "torch._sym_sqrt",
)
def regions_of_any_size() -> None:
    """A graph that takes sizes is compiled once for all of them; what it asks of them is known."""
    graph = fx.Graph()
    x, w, s = (graph.placeholder(name) for name in "xws")
    twice = graph.call_function(operator.mul, (s, 2))
    first = graph.call_function(aten.mm.default, (x, w))
    seen = graph.call_function(aten.view.default, (first, [twice, 2]))
    graph.output((seen,))

    def specs(s: int) -> tuple[inductor.Spec, ...]:
        return ("float32", (s, 4), (4, 1), "cpu"), ("float32", (4, 4), (4, 1), "cpu")

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "region.bin"))
        gm = fx.GraphModule(nn.Module(), graph)
        run = inductor.compile_region(gm, specs, path, hints={"s": 13})
        assert run is not None and inductor.conditions_of(path) == ()
        direct.direct_of(path).unlink(missing_ok=True)
        loaded = inductor.load_artifact(path)
    assert loaded is not None
    for rows in (3, 5, 64):
        given = [torch.randn(rows, 4), torch.randn(4, 4)]
        for function in (run, loaded):
            assert torch.allclose(function([*given, rows])[0], (given[0] @ given[1]).view(-1, 2))
    assert tracing.SIZE_FUNCTIONS["math"].sqrt(4) == 2.0


@contract("._compiled_fn", "._boxed_call")
def boxed_calls() -> None:
    """Within an artifact is a function that takes a list and empties it."""
    assert _region()[4] == 0


@contract("torch._inductor.codecache.PyCodeCache", "torch._inductor.codecache.PyCodeCache.modules")
def generated_modules() -> None:
    """The module made of a source is found; it names `extern_kernels` and its kernels."""
    source, *_, has_direct = _region()
    module = direct._generated_module(source)
    assert module is not None and module.extern_kernels.mm is torch.mm
    assert has_direct and callable(module.call)


@contract(
    "torch._C._dynamo.guards",
    "torch._C._dynamo.guards._empty_strided_cpu",
    "torch._C._dynamo.guards._reinterpret_tensor",
    "torch._C._dynamo.guards.assert_alignment",
    "torch._C._dynamo.guards.assert_size_stride",
)
def generated_names() -> None:
    """What a generated call names is what the direct form gives it."""
    source = _region()[0]
    module = direct._generated_module(source)
    assert all(getattr(module, name) is thing for name, thing in direct._KNOWN.items())
    made = direct._KNOWN["empty_strided_cpu"]((2, 3), (3, 1), torch.float32)
    direct._KNOWN["assert_size_stride"](made, (2, 3), (3, 1))
    with pytest.raises(AssertionError):
        direct._KNOWN["assert_size_stride"](made, (3, 2), (2, 1))
    direct._KNOWN["assert_alignment"](made, 16)
    view = direct._KNOWN["reinterpret_tensor"](made, (2,), (1,), 1)
    assert view.data_ptr() == made[0, 1:].data_ptr()


@contract("torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr")
def generated_libraries() -> None:
    """A kernel's library is an extension module `kernel` that reads a pointer from a variable."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as bindings

    assert int(direct._GUARDS._torchinductor_pyobject_tensor_data_ptr) > 0
    text = bindings.suffix_template
    assert "PyInit_" in text or "PyModuleDef" in text
    assert 'getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")' in text
    assert bindings.entry_function == "kernel"


@contract("torch._inductor.config", "torch._inductor.config.patch")
def inductor_config() -> None:
    from torch._inductor import config

    wanted = {**inductor._config(), "cpp_cache_precompile_headers": False}
    with config.patch(wanted):
        assert config.fallback_random and not config.cpp_cache_precompile_headers
        assert config.cpp.threads == torch.get_num_threads()


@contract("torch._inductor.codecache", "torch._inductor.codecache.LOCK_TIMEOUT")
def locks() -> None:
    """The limit is read where a lock is taken; a lock that was not had names its file."""
    from torch._inductor import codecache, cpu_vec_isa
    from torch.utils._filelock import FileLock

    before = codecache.LOCK_TIMEOUT
    with inductor._impatient(2.5):
        assert codecache.LOCK_TIMEOUT == 3
    assert before == codecache.LOCK_TIMEOUT
    for home in (codecache, cpu_vec_isa):
        assert "LOCK_TIMEOUT" in inspect.getsource(home)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "lock"))
        with FileLock(path), pytest.raises(TimeoutError) as caught:
            FileLock(path, timeout=0).acquire()
        assert inductor._timed_out_lock(caught.value) == path


@contract("torch._functorch._aot_autograd.autograd_cache.FXGraphCacheMiss")
def hidden_misses() -> None:
    """An artifact whose code cannot be loaded is a miss, whatever the reason was."""
    from torch._functorch._aot_autograd import aot_autograd_result
    from torch._functorch._aot_autograd.autograd_cache import FXGraphCacheMiss

    assert issubclass(FXGraphCacheMiss, Exception)
    assert "raise FXGraphCacheMiss" in inspect.getsource(aot_autograd_result)


@contract("torch._inductor.runtime.cache_dir_utils.cache_dir")
def cache_folder() -> None:
    """It is looked up again each time, so that a cache of one's own holds within a block only."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    before = cache_dir()
    with inductor._own_cache():
        assert cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"] != before
    assert cache_dir() == before


@contract("torch._inductor.cpu_vec_isa", "torch._inductor.cpu_vec_isa.pick_vec_isa")
def vector_instructions() -> None:
    from torch._inductor import cpu_vec_isa

    assert not inspect.signature(cpu_vec_isa.pick_vec_isa).parameters
    assert callable(cpu_vec_isa.valid_vec_isa_list.cache_info)  # asked once per process
    assert "valid_vec_isa_list()" in inspect.getsource(cpu_vec_isa.pick_vec_isa)


@contract("torch._inductor.cpp_builder.get_cpp_compiler", "torch._inductor.exc.InvalidCxxCompiler")
def cpp_compiler() -> None:
    from torch._inductor import config, cpp_builder, exc

    found = cpp_builder.get_cpp_compiler
    getattr(found, "cache_clear", lambda: None)()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(exc.InvalidCxxCompiler):
        found()
    assert inductor.inductor_problem() == ""


@contract(
    "torch._inductor.exc",
    "torch._inductor.exc.CppCompileError",
    "torch._inductor.exc.GPUTooOldForTriton",
    "torch._inductor.exc.TritonMissing",
)
def compile_errors() -> None:
    """The machine's faults have classes of their own; a compiler's output is kept."""
    from torch._inductor import exc

    error = exc.CppCompileError(["g++"], "a.cpp: error: no such thing\nmore")
    assert inductor.first_line(error) == "CppCompileError: a.cpp: error: no such thing"
    assert inductor.is_fault_of_machine(exc.CppCompileError(["g++"], "g++: Killed"))
    for kind in (exc.TritonMissing, exc.GPUTooOldForTriton):
        assert issubclass(kind, Exception)


@contract(
    "torch._dynamo.source.ConstantSource",
    "torch.utils._sympy.printers.PythonPrinter",
    "._print_ToFloat",
    "._print_TruncToInt",
)
def symbols() -> None:
    """Sizes are symbols while tracing; what control flow asks of them is known afterwards."""
    made = tracing.Symbols({"rows": 12, "columns": 20, "fixed": 4})
    rows, columns, fixed = made.sizes.values()
    with made.mode():
        x = torch.empty(rows, columns, fixed)
    assert made.text(x.view(-1).shape[0] // 2) == "(columns*fixed*rows) // 2"
    assert made.text(torch.sym_float(rows) / 2.0) == "((float(rows)) / 2.0000000000000000)"
    assert made.conditions() == () and not made.constants()
    assert rows < columns and int(fixed) == 4
    assert made.conditions() == (
        "columns > rows",
    )  # one form, whatever torch calls them and made.constants() == {"fixed"}


# -- the contracts --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_torch_keeps(name: str) -> None:
    """The private name is there, and does what zerofx relies on."""
    if name.startswith("torch.") and "_active_ddp_module." not in name:
        resolved(name)
    CONTRACTS[name]()


def test_each_private_name_has_a_contract() -> None:
    missing = [str(use) for use in uses_of_package() if use.name not in CONTRACTS]
    assert not missing, "write a contract for each in this file: " + "; ".join(missing)
    unused = CONTRACTS.keys() - {use.name for use in uses_of_package()}
    assert not unused, f"no longer used: {sorted(unused)}"


def test_private_torch_is_reached_through_compat_only() -> None:
    found = [
        str(use)
        for use in uses_of_package()
        if use.kind == "reach" and use.path.parent != PACKAGE / "compat"
    ]
    assert not found, "move these behind a function in zerofx/compat/: " + "; ".join(found)


def test_private_names_are_seen(tmp_path: Path) -> None:
    """The reader sees aliases, nested imports, what compat passes on, strings and overrides."""
    path = tmp_path / "sample.py"
    path.write_text(
        "import torch, torch.distributed as dist\n"
        "from torch import fx, nn\n"
        "from zerofx.compat.graphs import pytree\n"
        "def f(target, self):\n"
        "    from torch._inductor import config\n"
        "    dist._functional_collectives.x(fx.Node._args, nn.functional.relu.__name__)\n"
        "    pytree.tree_map(getattr(target, '_schema'), target._version, target._own)\n"
        "    return torch.ops.aten._softmax.default, self._own, f'_foreach_{target}'\n"
        "class C(nn.Module):\n"
        "    def _apply(self): return self._own, self._buffers\n"
        "    def __init__(self): self._own = 1\n"
    )
    found = [(u.line, u.name, u.kind) for u in uses_in(path, defined_in([path]))]
    assert found == [
        (5, "torch._inductor.config", "reach"),
        (6, "torch.distributed._functional_collectives.x", "reach"),
        (6, "torch.fx.Node._args", "reach"),
        (7, "._schema", "reach"),
        (7, "._version", "reach"),
        (7, "torch.utils._pytree.tree_map", "passed on"),
        (8, "._foreach_*", "reach"),
        (9, "._apply", "override"),
        (10, "._buffers", "reach"),
    ]
