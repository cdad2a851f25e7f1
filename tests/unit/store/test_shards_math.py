"""Arithmetic on pieces: every function of each element gives what it gives unsharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shard_cases import on_ranks, small_model, whole
from torch import Tensor, nn

from zerofx.comm.world import World
from zerofx.runtime.store.shards import ShardStore
from zerofx.runtime.tensors.elementwise import FOREACH, POINTWISE
from zerofx.runtime.tensors.tensor import ShardedTensor

TRANSCENDENTAL = """
acos acosh arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh cos cosh
digamma erf erfc erfinv exp exp2 expm1 float_power hypot lgamma log log10 log1p log2 logaddexp
logaddexp2 logit pow sigmoid sin sinc sinh tan tanh xlogy
""".split()


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
            # Vector and scalar forms differ in the last bit; which runs depends on the length.
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
                (-(p.abs() ** 2), -(before.abs() ** 2)),
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
