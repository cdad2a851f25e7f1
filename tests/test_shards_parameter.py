"""The sharded parameter: right or refused by name, whatever torch is asked to do with it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from shard_cases import deliver, gradients, on_ranks, small_model, whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx.compat import DisableTorchFunctionSubclass
from zerofx.errors import ShardError
from zerofx.runtime.param_elementwise import POINTWISE
from zerofx.runtime.param_foreach import FOREACH
from zerofx.runtime.shards import ShardStore
from zerofx.runtime.sharded_parameter import ReplicatedParameter, ShardedParameter, ShardedTensor
from zerofx.runtime.world import World

TRANSCENDENTAL = """
acos acosh arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh cos cosh
digamma erf erfc erfinv exp exp2 expm1 float_power hypot lgamma log log10 log1p log2 logaddexp
logaddexp2 logit pow sigmoid sin sinc sinh tan tanh xlogy
""".split()


def test_it_is_a_parameter_and_a_dtensor_of_the_global_shape() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p = model[0].weight
        assert isinstance(p, nn.Parameter) and isinstance(p, DTensor)
        assert (p.shape, p.ndim, p.numel(), len(p)) == (torch.Size([33, 13]), 2, 429, 33)
        assert (p.size(1), p.stride(), p.is_leaf, p.requires_grad) == (13, (13, 1), True, True)
        assert (p.dtype, p.device, p.grad) == (torch.float32, torch.device("cpu"), None)
        local = p.to_local()
        assert local.ndim == 1 and local.data_ptr() == store.local_view("0.weight").data_ptr()
        assert len(repr(p)) < 100 and repr(p).startswith("ShardedParameter(0.weight, [33, 13]")
        assert f"{p}" == repr(p)
        assert not isinstance(p.data, nn.Parameter) and not isinstance(p.grad, nn.Parameter)
        assert [n for n, _ in model.named_parameters()] == list(store.params)
        assert {id(p) for p in model.parameters()} == {id(p) for p in store.params.values()}

    on_ranks(2, body)


def domain() -> list[Tensor]:
    """Return three full tensors inside the domain of every pointwise function."""
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(33, 13, generator=generator) * 0.8 + 0.1 for _ in range(3)]


def arguments(name: str, a: Tensor, b: Tensor, c: Tensor) -> tuple[Any, ...]:
    """Return arguments for a pointwise function, all cut alike."""
    if name == "where":
        return (a > 0.5, b, c)
    if name == "masked_fill":
        return (a, b > 0.5, 3.0)
    if name in ("addcdiv", "addcmul"):
        return (a, b, c)
    if name == "lerp":
        return (a, b, 0.3)
    if name in ("clamp", "clip", "threshold"):
        return (a, 0.3, 0.6)
    if name in ("clamp_max", "clamp_min", "ldexp", "rsub"):
        return (a, 0.3) if name != "ldexp" else (a, b)
    if name.startswith("bitwise"):
        masks = (a > 0.5, b > 0.5)
        return masks[:1] if name == "bitwise_not" else masks
    binary = """arctan2 atan2 copysign div divide eq float_power floor_divide fmax fmin fmod ge
    greater greater_equal gt heaviside hypot isclose le less less_equal logaddexp logaddexp2
    logical_and logical_or logical_xor lt maximum minimum mul multiply ne nextafter not_equal pow
    remainder sub subtract add true_divide xlogy""".split()
    if name in binary:
        return (a, b)
    return (a + 1 if name in ("acosh", "arccosh") else a,)


def test_every_pointwise_function_equals_the_plain_one() -> None:
    """All names in the table, out of place."""

    def body(model: nn.Module, store: ShardStore, world: World) -> int:
        p = model[0].weight
        full = domain()
        with torch.no_grad():
            mine = [torch.zeros_like(p).copy_(t) for t in full]
        checked = 0
        for name in POINTWISE:
            func = getattr(torch, name, None) or getattr(torch.Tensor, name, None)
            if func is None:
                continue
            expected = func(*arguments(name, *full))
            got = func(*arguments(name, *mine))
            assert isinstance(got, ShardedTensor) and got.dtype == expected.dtype, name
            # Their vector and scalar forms differ in the last bit; which runs depends on the length.
            rtol = 1e-6 if name in TRANSCENDENTAL else 0
            torch.testing.assert_close(whole(got), expected, rtol=rtol, atol=0, msg=name)
            checked += 1
        return checked

    assert min(on_ranks(2, body)) == len(POINTWISE)


def test_operators_in_place_forms_and_casts() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p, before = model[0].weight, small_model()[0].weight.detach()
        with torch.no_grad():
            for got, expected in [
                (2 * p + 1, 2 * before + 1),
                (1 / (p + 3), 1 / (before + 3)),
                (-p.abs() ** 2, -before.abs() ** 2),
                (p.double(), before.double()),
                (p.to(torch.bfloat16).float(), before.to(torch.bfloat16).float()),
                (p > 0, before > 0),
                (~(p > 0), ~(before > 0)),
                (p * before, before * before),  # a full plain tensor takes part by its range
                (before - p, before - before),
                (p + before[0], before + before[0]),  # and so does what broadcasts to it
                (p * torch.tensor([2.0]), before * 2),
                (torch.where(p > 0, p, 0.0), before.clamp_min(0)),
            ]:
                assert torch.equal(whole(got), expected)
            assert p.float() is p and p.to("cpu") is p and p.contiguous() is p
            p.mul_(2).add_(1, alpha=3)
            p -= 1
            p[p > 1] = 0.5
            expected = before * 2 + 3 - 1
            expected[expected > 1] = 0.5
        assert torch.equal(whole(p), expected)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            p.add_(1)

    on_ranks(3, body)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda p: p @ p.to_local()[:1],
    "linear": lambda p: nn.functional.linear(torch.ones(1, 13), p),
    "__getitem__": lambda p: p[0],
    "__setitem__": lambda p: p.data.__setitem__(0, 1.0),
    "view": lambda p: p.view(-1),
    "reshape": lambda p: p.reshape(-1),
    "T": lambda p: p.T,
    "t": lambda p: p.t(),
    "sum": lambda p: p.sum(dim=0),
    "mean": lambda p: p.mean(-1),
    "norm": lambda p: p.norm(dim=1),
    "linalg_norm": lambda p: torch.linalg.norm(p, ord=2),
    "argmax": lambda p: p.argmax(),
    "sort": lambda p: torch.sort(p),
    "cumsum": lambda p: p.cumsum(0),
    "std": lambda p: p.std(),
    "where": lambda p: torch.where(p > 0),
    "item": lambda p: p.item(),
    "__bool__": lambda p: bool(p > 0),
    "tolist": lambda p: p.tolist(),
    "unbind": lambda p: list(p),
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p]),
    "numpy": lambda p: p.detach().numpy(),
    "__array__": np.asarray,
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "dropout": lambda p: nn.functional.dropout(p),
    "rand_like": torch.rand_like,
    "set_": lambda p: p.data.set_(torch.ones(3)),
    "resize_": lambda p: p.data.resize_(3),
    "redistribute": lambda p: p.redistribute(placements=[]),
    "expand": lambda p: p.expand(2, 33, 13),
    "flatten": lambda p: nn.utils.parameters_to_vector([p]),
    "as_subclass": lambda p: p.as_subclass(Tensor),
    "share_memory_": lambda p: p.share_memory_(),
    "module_load": lambda p: p.module_load(torch.zeros(33, 13)),
}


@pytest.mark.parametrize("op", REFUSED)
def test_refused_by_name_with_the_way_out(op: str) -> None:
    wording = {"flatten": "view"}.get(op, op)

    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        with pytest.raises(ShardError) as caught, torch.no_grad():
            REFUSED[op](model[0].weight)
        text = str(caught.value)
        assert f"0.weight: {wording} needs the whole tensor" in text
        assert "zerofx.full_state_dict(model)" in text and "[33, 13]" in text

    on_ranks(2, body)


def test_mixing_what_is_cut_differently_is_refused_on_every_rank() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        with torch.no_grad():
            with pytest.raises(ShardError, match="0.weight: add mixes it with 1.weight"):
                torch.add(model[0].weight, model[1].weight)
            with pytest.raises(ShardError, match="_foreach_add_ mixes it with 1.bias"):
                torch._foreach_add_([model[0].bias], [model[1].bias])
            with pytest.raises(ShardError, match=r"copy_ of a tensor of shape \[216\].*\[33, 13\]"):
                model[0].weight.copy_(torch.zeros(216))
            with pytest.raises(ShardError, match="plain tensor"):
                torch.zeros(33, 13).copy_(model[0].weight)
            with pytest.raises(ShardError, match="plain tensor in one list position"):
                torch._foreach_add_([torch.zeros(33)], [model[0].bias])

    on_ranks(2, body)


def test_deepcopy_and_pickling_of_a_parameter_are_refused() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p = model[0].weight
        with pytest.raises(ShardError, match="0.weight: deepcopy .* refused"):
            copy.deepcopy(p)
        with pytest.raises(ShardError, match=r"0.weight: pickling .*zerofx.save"):
            pickle.dumps(p)
        with pytest.raises(ShardError, match=r"0.weight: pickling .*zerofx.save"):
            torch.save({"state": torch.zeros_like(p)}, "/dev/null")
        state = torch.ones_like(p)
        twin = copy.deepcopy({"exp_avg": state})["exp_avg"]
        twin.zero_()
        assert bool((state == 1).all())

    on_ranks(2, body)


def test_gradient_hooks_are_refused() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        for method in ("register_hook", "register_post_accumulate_grad_hook"):
            with pytest.raises(ShardError, match=f"0.weight: {method} .* never run"):
                getattr(model[0].weight, method)(print)

    on_ranks(2, body)
    on_ranks(1, body)


def test_a_loss_term_outside_the_module_raises_in_backward_only() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p = model[0].weight
        assert p.norm().item() > 0  # for a log it is fine
        for term in (p.norm() ** 2, (p * 2).sum(), torch.linalg.vector_norm(p)):
            with pytest.raises(ShardError, match="0.weight: a loss term .* inside the model's"):
                term.backward()
        with torch.no_grad():
            assert not (p * 2).requires_grad
        assert p.grad is None

    on_ranks(2, body)


def test_reductions_are_of_the_whole() -> None:
    full = small_model()[0].weight.detach()

    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p = model[0].weight.detach()
        for name in ("max", "min", "amax", "amin", "any", "all", "count_nonzero"):
            assert torch.equal(getattr(torch, name)(p), getattr(torch, name)(full)), name
        for name in ("sum", "mean"):
            expected = getattr(full.double(), name)().float()
            torch.testing.assert_close(getattr(p, name)(), expected, rtol=1e-6, atol=0)
        assert not bool(p.isnan().any()) and bool((p < 9).all())
        assert (p > 0).sum() == (full > 0).sum() and (p > 0).sum().dtype == torch.int64
        assert torch.equal(p, full) and torch.equal(full, p) and p.allclose(full + 1e-9)
        changed = full.clone()
        changed[0, 0] += 1  # rank 0's piece only: every rank must say so
        assert not torch.equal(p, changed) and not torch.equal(p, full[:3])
        tiny = model[2].weight  # some ranks own nothing of it
        assert tiny.max().item() == small_model()[2].weight.max().item()

    on_ranks(3, body)


@pytest.mark.parametrize("order", [2.0, 1.0, 3.5, 0.0, float("inf"), -float("inf")])
@pytest.mark.parametrize("foreach", [True, False, None])
def test_clipping_equals_the_unsharded_total(order: float, foreach: bool | None) -> None:
    """Not bitwise: an unsharded norm sums all elements in one order, pieces in another."""
    expected = small_model()
    for name, grad in gradients(expected, 0).items():
        expected.get_parameter(name).grad = grad
    clip = nn.utils.clip_grad_norm_
    if order > 0:
        total = clip(expected.parameters(), 1.0, norm_type=order, foreach=foreach)
    else:
        total = nn.utils.get_total_norm([p.grad for p in expected.parameters()], order)

    def body(model: nn.Module, store: ShardStore, world: World) -> tuple[Tensor, list[Tensor]]:
        deliver(store, gradients(model, 0))
        sent = world.counters["all_gather"].calls if foreach else 0
        if order > 0:
            mine = clip(model.parameters(), 1.0, norm_type=order, foreach=foreach)
        else:
            mine = nn.utils.get_total_norm([p.grad for p in model.parameters()], order)
        if foreach and order > 0:
            assert world.counters["all_gather"].calls == sent + 1
        return mine, [whole(p.grad) for p in model.parameters()]

    for size in (2, 3):
        results = on_ranks(size, body)
        for mine, grads in results:
            assert torch.equal(mine, results[0][0]) and type(mine) is Tensor
            torch.testing.assert_close(mine, total, rtol=1e-6, atol=0)
            for ours, p in zip(grads, expected.parameters(), strict=True):
                torch.testing.assert_close(ours, p.grad, rtol=2e-6, atol=1e-9)


def test_clipping_on_a_shard_and_replicate_grid_by_value_and_nonfinite() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> Tensor:
        deliver(store, gradients(model, 0))
        total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        assert float(whole(model[0].weight.grad).abs().max()) <= 0.01
        full = gradients(model, 1)
        full["2.weight"][0, 0] = torch.nan  # in one rank's piece
        model.zero_grad()
        deliver(store, full)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        return total

    flat = torch.cat([g.reshape(-1) for g in gradients(small_model(), 0).values()])
    for total in on_ranks(4, body, shard_size=2):
        torch.testing.assert_close(total, flat.norm(), rtol=1e-6, atol=0)


def test_low_precision_norms_are_summed_in_single() -> None:
    model = small_model().to(torch.bfloat16)
    full = gradients(model, 0)

    def body(model: nn.Module, store: ShardStore, world: World) -> Tensor:
        deliver(store, {k: g.bfloat16() for k, g in full.items()})
        norm = torch.linalg.vector_norm(model[0].weight.grad)
        assert norm.dtype == torch.bfloat16
        return norm

    exact = full["0.weight"].bfloat16().float().norm()
    for norm in on_ranks(3, body, model):
        assert torch.equal(norm, exact.bfloat16())


def test_writes_are_counted_and_reads_are_not() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p = model[0].weight
        deliver(store, gradients(model, 0))
        params = list(model.parameters())

        def bumps(action: Callable[[], Any]) -> bool:
            before = store.writes
            action()
            return store.writes > before

        with torch.no_grad():
            for write in (
                lambda: p.add_(1),
                lambda: p.data.mul_(2),
                lambda: p.detach().zero_(),
                lambda: p.copy_(torch.ones(33, 13)),
                lambda: torch._foreach_mul_(params, 2.0),
                lambda: torch.mul(p, 2, out=p),
                lambda: setattr(p, "data", torch.zeros(33, 13)),
                lambda: nn.init.xavier_uniform_(p),
                lambda: p.data.__setitem__(p > 0, 0.0),
            ):
                assert bumps(write)
            for read in (
                lambda: p.data.norm(),
                lambda: p + 1,
                lambda: p.grad.mul_(2),
                lambda: torch.zeros_like(p).add_(p),
                lambda: nn.utils.clip_grad_norm_(params, 1.0),
                lambda: p.data,
                lambda: repr(p),
            ):
                assert not bumps(read)
        before = store.epoch
        local = p.to_local()
        assert store.epoch > before  # a plain alias was handed out
        before = store.writes
        local.add_(1)
        assert store.poll_writes() > before

    on_ranks(2, body)


def test_data_and_grad_setters() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p, full = model[0].weight, torch.randn(33, 13, generator=torch.Generator().manual_seed(3))
        address = p.to_local().data_ptr()
        p.data = full
        assert torch.equal(whole(p), full) and p.to_local().data_ptr() == address
        p.data = p.data * 2
        assert torch.equal(whole(p), full * 2) and p.to_local().data_ptr() == address
        with pytest.raises(ShardError, match=r"0.weight: p.data was given \[33, 13\].*float64"):
            p.data = full.double()
        with pytest.raises(ShardError, match=r"0.weight: p.data was given \[3\]"):
            p.data = torch.zeros(3)
        p.grad = torch.ones_like(p)
        assert torch.equal(whole(p.grad), torch.ones(33, 13))
        p.grad = p.grad * 0.5
        assert torch.equal(whole(p.grad), torch.full((33, 13), 0.5))
        with pytest.raises(ShardError, match="0.weight: p.grad was given a plain Tensor of shape"):
            p.grad = full
        with pytest.raises(ShardError, match="0.weight: p.grad was given .*not cut like"):
            p.grad = torch.zeros_like(model[1].weight)
        p.grad = None
        assert p.grad is None

    on_ranks(2, body)


def test_vectors_back_to_parameters() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        vector = torch.arange(sum(p.numel() for p in model.parameters()), dtype=torch.float32)
        nn.utils.vector_to_parameters(vector, model.parameters())
        pieces = torch.cat([whole(p).view(-1) for p in model.parameters()])
        assert torch.equal(pieces, vector)

    on_ranks(2, body)


@pytest.mark.parametrize(
    "init",
    [
        nn.init.uniform_,
        nn.init.normal_,
        nn.init.xavier_normal_,
        nn.init.kaiming_uniform_,
        nn.init.kaiming_normal_,
        nn.init.trunc_normal_,
        lambda t, generator: nn.init.ones_(t),
        lambda t, generator: nn.init.constant_(t, 0.3),
        lambda t, generator: t.data.normal_(0, 0.02, generator=generator),
        lambda t, generator: t.data.bernoulli_(0.5, generator=generator),
    ],
)
def test_initialisers_draw_what_an_unsharded_parameter_gets(init: Any) -> None:
    """Every rank draws the whole, so equal generators give the unsharded bits."""
    expected = torch.empty(33, 13)
    init(expected, generator=torch.Generator().manual_seed(5))

    def body(model: nn.Module, store: ShardStore, world: World) -> Tensor:
        init(model[0].weight, generator=torch.Generator().manual_seed(5))
        return whole(model[0].weight)

    for got in on_ranks(2, body):
        assert torch.equal(got, expected)


def test_every_foreach_function_equals_the_plain_one() -> None:
    two = {"add", "sub", "mul", "div", "maximum", "minimum", "copy", "pow"}
    three = {"addcdiv", "addcmul"}

    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        params = [model[0].weight, model[1].weight, model[2].weight]
        generator = torch.Generator().manual_seed(2)
        full = [torch.rand(p.shape, generator=generator) * 0.8 + 0.1 for p in params]
        with torch.no_grad():
            mine = [torch.zeros_like(p).copy_(t) for p, t in zip(params, full, strict=True)]
        for name in FOREACH:
            more = 1 if name in two else 2 if name in three else 0
            rest: tuple[Any, ...] = (0.3,) if name in ("clamp_max", "clamp_min") else ()
            for form in (name, f"{name}_"):
                func = getattr(torch, f"_foreach_{form}", None)
                if func is None:
                    continue
                extra = (0.5,) if name == "lerp" else ()
                count = 1 if name == "lerp" else more
                a, b = [t.clone() for t in full], [t.clone() for t in mine]
                expected = func(a, *[full] * count, *rest, *extra)
                got = func(list(b), *[mine] * count, *rest, *extra)
                results = zip(got or b, expected or a, strict=True)
                rtol = 1e-6 if name in TRANSCENDENTAL else 0
                for g, e in results:
                    torch.testing.assert_close(whole(g), e, rtol=rtol, atol=0, msg=form)

    on_ranks(2, body)


def test_replicated_parameters_are_plain_tensors() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        p = model[0].weight
        assert type(p) is ReplicatedParameter and isinstance(p, nn.Parameter)
        assert type(p @ p.T) is Tensor and type(p.detach()) is Tensor
        assert p.data_ptr() == store.shards[0].data_ptr()
        p.data = torch.ones(33, 13)
        assert p.data_ptr() == store.shards[0].data_ptr() and float(p.detach().sum()) == 429
        with pytest.raises(ShardError, match="0.weight: p.data was given"):
            p.data = torch.ones(33, 13, dtype=torch.float64)
        twin = copy.deepcopy(p)
        assert type(twin) is nn.Parameter and twin.data_ptr() != p.data_ptr()
        loaded = pickle.loads(pickle.dumps(p))
        assert torch.equal(loaded, p) and loaded.untyped_storage().nbytes() == 429 * 4
        before = store.poll_writes()
        with torch.no_grad():
            p.add_(1)
        assert store.poll_writes() > before

    on_ranks(1, body)


def test_dispatch_behind_torch_function_is_refused_too() -> None:
    """On 2.13 what slips past `__torch_function__` reaches our dispatch; 2.11 bypasses it."""
    if torch.__version__ < "2.12":
        pytest.skip("torch 2.11 dispatches DTensor subclasses in C++")

    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        assert type(model[0].weight) is ShardedParameter
        with DisableTorchFunctionSubclass(), pytest.raises(ShardError, match="0.weight: mm.default"):
            torch.ops.aten.mm.default(model[0].weight, torch.zeros(13, 2))

    on_ranks(2, body)
