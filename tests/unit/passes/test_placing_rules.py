"""The rule table: each way of each operator, run on parts and joined, is the whole call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # it registers operators
from placed_ranks import Meeting, ThreadAxis, on_axes, together
from torch import Tensor

from zerofx import ops
from zerofx.ir.meta import Hole, filled
from zerofx.ir.placing import RULES, Operand, Way, WholeCall, viewed, ways
from zerofx.ir.spec import Kind, spec_of_target
from zerofx.layout.placements import (
    Cut,
    Owned,
    P,
    Placement,
    R,
    fits,
    in_order_of,
    memory_order,
    part,
)
from zerofx.plan.parts import Parallel
from zerofx.runtime import capacity
from zerofx.runtime.graph_calls import GraphCalls

aten = torch.ops.aten
RANKS = 2


@pytest.mark.parametrize("after", [(2, 8, 16), (2, 8, 64), ()])
def test_a_view_of_another_number_of_elements_contains_no_cut(after: tuple[int, ...]) -> None:
    """A program edited by hand may have one; it is refused as one that no rule takes."""
    assert list(viewed((16, 32), after, Cut(1))) == []


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) + 0.5


def ids(*shape: int, top: int = 4) -> Tensor:
    return torch.randint(0, top, shape)


MASK = torch.rand(4, 6) > 0.5
X, Y = rand(4, 6), rand(4, 6)
Q, K, V = (torch.rand(2, 4, 3, 8) for _ in range(3))
OUT, LSE = aten._scaled_dot_product_flash_attention_for_cpu(Q, K, V)
NORMED, MEAN, RSTD = aten.native_layer_norm(rand(2, 4, 6), [6], rand(6), rand(6), 1e-5)

# The attention operators of CUDA have no kernels for a CPU: in this process they get plain ones,
# with the results and the order of arguments of CUDA's.
DEVICE = torch.library.Library("aten", "IMPL")


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Any:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def attend_back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> list[Tensor]:
    eye = torch.eye(k.shape[-2]).expand(*k.shape[:2], -1, -1)
    weights, scale = attend(q, k, eye, *more)[0], q.shape[-1] ** -0.5
    up = grad @ v.mT
    scores = weights * (up - (up * weights).sum(-1, keepdim=True)) * scale
    return [scores @ k, scores.mT @ q, weights.mT @ grad]


def of_flash(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False,
             return_debug_mask: bool = False, *, scale: float | None = None) -> Any:  # fmt: skip
    none = torch.zeros(2, dtype=torch.int64)
    empty = torch.zeros(0)
    return *attend(q, k, v, None, causal), empty, empty, 3, 3, none, empty, empty


def of_flash_back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Any:
    return tuple(attend_back(grad, q, k, v, None, more[7]))


def of_efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sums: bool, dropout: float = 0.0,
    causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    seed = torch.zeros((), dtype=torch.int64)
    return *attend(q, k, v, bias, causal), seed, seed


def of_efficient_back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, *more: Any) -> Any:
    return (*attend_back(grad, q, k, v, bias, len(more) > 6 and more[6]), torch.zeros(0))


def of_cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sums: bool,
             dropout: float = 0.0, causal: bool = False, return_debug_mask: bool = False,
             *, scale: float | None = None) -> Any:  # fmt: skip
    seed, empty = torch.zeros((), dtype=torch.int64), torch.zeros(0)
    return *attend(q, k, v, bias, causal), empty, empty, 3, 3, seed, seed, empty


def of_cudnn_back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Any:
    return tuple(attend_back(grad, q, k, v, more[4], more[10]))


for name, kernel in (
    ("flash_attention", of_flash), ("flash_attention_backward", of_flash_back),
    ("efficient_attention", of_efficient), ("efficient_attention_backward", of_efficient_back),
    ("cudnn_attention", of_cudnn), ("cudnn_attention_backward", of_cudnn_back),
):  # fmt: skip
    DEVICE.impl(f"_scaled_dot_product_{name}", kernel, "CPU")
GRAD, BIAS, SEED = rand(2, 4, 3, 8).float(), torch.rand(2, 1, 3, 3), torch.zeros(2).long()
NO = torch.zeros(0)

ONE = """
neg detach alias clone _to_copy rsqrt sqrt reciprocal exp log cos sin tanh sigmoid silu gelu relu
abs sgn erf logical_not hardtanh leaky_relu softplus elu mish hardswish
""".split()
TWO = "tanh_backward sigmoid_backward silu_backward gelu_backward maximum minimum logical_and logical_or".split()  # noqa: E501
COMPARED = "eq ne le lt ge gt".split()

ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)  # of three groups of rows, one of them empty
GROUPED = torch.ops.transformers.grouped_mm_fallback.default
GROUPED_BACKWARD = torch.ops.transformers.grouped_mm_fallback_backward.default

PICKED = rand(4, 6).argsort(1)[:, :2]  # no position twice in a row
CHOSEN = ids(16)  # the experts of rows, of which two ranks have parts of two samples
ROWS, SLOTS = capacity.expert_slots(None, CHOSEN, "layer", 4, 3, 2, RANKS)

CASES: list[tuple[Any, tuple[Any, ...]]] = [
    *((getattr(aten, name).default, (X,)) for name in ONE),
    *((getattr(aten, name).default, (X, Y)) for name in TWO),
    *((getattr(aten, name).Tensor, (X, Y)) for name in (*COMPARED, "add", "sub", "mul", "div")),
    *((getattr(aten, name).Scalar, (X, 1.0)) for name in COMPARED),
    (aten.add.Tensor, (rand(2, 4, 6), rand(6))), (aten.mul.Tensor, (X, 3.0)),
    (aten.mul.Tensor, (rand(4, 1), Y)), (aten.div.Tensor, (X, 2.0)),
    (aten.add.Scalar, (X, 1.0)), (aten.sub.Scalar, (X, 1.0)), (aten.rsub.Scalar, (X, 1.0)),
    (aten.mul.Scalar, (X, 2.0)), (aten.div.Scalar, (X, 2.0)),
    (aten.pow.Tensor_Scalar, (X, 2)), (aten.pow.Tensor_Tensor, (X, Y)),
    (aten.clamp.default, (X, 0.6, 1.0)), (aten.clamp_min.default, (X, 0.7)),
    (aten.where.self, (MASK, X, Y)), (aten.where.ScalarOther, (MASK, X, 0.0)),
    (aten.remainder.Scalar, (X, 0.3)), (aten.floor_divide.default, (X, 0.3)),
    (aten.masked_fill.Scalar, (X, MASK, 0.0)),
    (aten.bitwise_and.Tensor, (MASK, ~MASK)), (aten.bitwise_or.Tensor, (MASK, ~MASK)),
    (aten.bitwise_not.default, (MASK,)), (aten.threshold_backward.default, (X, Y, 0.8)),
    (aten.hardtanh_backward.default, (X, Y, 0.6, 0.9)),
    (aten.leaky_relu_backward.default, (X, Y, 0.1, False)),
    (aten.softplus_backward.default, (X, Y, 1.0, 20.0)),
    (aten.native_dropout_backward.default, (X, MASK, 2.0)),
    (aten.view.default, (rand(2, 8, 4), [16, 4])), (aten.view.default, (rand(16, 12), [2, 8, 12])),
    (aten.view.default, (rand(2, 3, 12), [2, 3, 4, 3])),
    (aten.view.default, (rand(4, 12), [4, 3, 4])),
    (aten._unsafe_view.default, (rand(8, 6), [2, 4, 6])), (aten.reshape.default, (X, [24])),
    (aten.t.default, (X,)), (aten.transpose.int, (rand(2, 4, 6), 1, -1)),
    (aten.permute.default, (rand(2, 4, 6), [2, 0, 1])), (aten.unsqueeze.default, (X, 1)),
    (aten.squeeze.dim, (rand(4, 1, 6), 1)), (aten.squeeze.dims, (rand(4, 1, 6, 1), [1, 3])),
    (aten.expand.default, (rand(4, 1, 6), [2, 4, 5, 6])),
    (aten.slice.Tensor, (rand(4, 12), 1, 4, 8)), (aten.slice.Tensor, (rand(4, 12), 1, 0, 9999)),
    (aten.slice.Tensor, (rand(4, 12), 0, 1, 3)), (aten.slice.Tensor, (rand(4, 12), 1, -6, None)),
    (aten.slice_backward.default, (rand(4, 4), [4, 12], 1, 4, 8, 1)),
    (aten.slice_backward.default, (rand(4, 12), [8, 12], 0, 2, 6, 1)),
    (aten.select.int, (rand(4, 3, 6), 1, 2)), (aten.select_backward.default, (X, [4, 3, 6], 1, 2)),
    (aten.split.Tensor, (rand(4, 12), 4, 1)),
    (aten.split_with_sizes.default, (rand(4, 12), [6, 6], 1)),
    (aten.split.Tensor, (rand(4, 12), 3, -1)), (aten.unbind.int, (rand(4, 3, 6), 1)),
    (aten.cat.default, ([X, Y], 1)), (aten.cat.default, ([X, Y, X], 0)),
    (aten.cat.default, ([torch.empty(0, dtype=torch.float64), X], -1)),
    (aten.stack.default, ([X, Y], 1)),
    (aten.mm.default, (rand(4, 6), rand(6, 8))), (aten.bmm.default, (rand(2, 4, 6), rand(2, 6, 8))),
    (aten._grouped_mm.default, (rand(8, 24).float(), rand(3, 24, 24).float(), ENDS)),
    (aten._grouped_mm.default, (rand(24, 8).float(), rand(8, 24).float(), ENDS)),
    (GROUPED, (rand(8, 12), rand(3, 12, 12), ENDS)),
    (GROUPED_BACKWARD, (rand(8, 12), rand(3, 12, 12), ENDS, rand(8, 12))),
    (aten.addmm.default, (rand(8), rand(4, 6), rand(6, 8))),
    (aten.addmm.default, (rand(4, 8), rand(4, 6), rand(6, 8))),
    (aten.sum.dim_IntList, (rand(2, 4, 6), [0, 1])), (aten.sum.dim_IntList, (X, [1], True)),
    (aten.sum.default, (X,)), (aten.mean.dim, (rand(2, 4, 6), [-1], True)),
    (aten.amax.default, (rand(2, 4, 6), [1])), (aten.amin.default, (X, [0], True)),
    (aten._softmax.default, (rand(2, 4, 6), -1, False)),
    (aten._safe_softmax.default, (rand(2, 4, 6), -1)), (aten._log_softmax.default, (X, 1, False)),
    (aten.cumsum.default, (X, 1)),
    (aten._softmax_backward_data.default, (X, Y, 1, torch.float64)),
    (aten._log_softmax_backward_data.default, (X, Y, -1, torch.float64)),
    (aten.embedding.default, (rand(6, 4), ids(2, 4))),
    (aten.embedding_dense_backward.default, (rand(2, 4, 6), ids(2, 4), 8, -1, False)),
    (aten.embedding_dense_backward.default, (rand(2, 4, 6), ids(2, 4), 8, 0, True)),
    (aten.index.Tensor, (rand(4, 6), [ids(8)])),
    (aten.index_put.default, (rand(4, 6), [ids(8)], rand(8, 6), True)),
    (aten.index_put.default, (rand(4, 6), [torch.tensor([[2, 0]])], rand(1, 2, 6))),
    (aten.new_zeros.default, (rand(4, 6), [2, 4, 6])), (aten.new_zeros.default, (X, [4, 3])),
    (aten.gather.default, (X, 1, ids(4, 2))), (aten.scatter.src, (X, 1, PICKED, rand(4, 2))),
    (aten.topk.default, (X, 2)), (aten.topk.default, (rand(2, 4, 6), 2, 1)),
    (aten.max.dim, (rand(2, 4, 6), -1)), (aten.min.dim, (rand(2, 4, 6), 0, True)),
    (ops.expert_slots, (CHOSEN, "layer", 4, 3, 2, RANKS)),
    (ops.rows_to_slots, (rand(8, 6), ROWS, 2, RANKS, 2)),
    (ops.rows_to_slots, (rand(16, 6), ROWS, 2, RANKS, 1)),
    (ops.rows_from_slots, (rand(4, 3 * RANKS, 6), SLOTS, 2, RANKS)),
    (aten.nll_loss_backward.default,
     (rand(1)[0], rand(4, 6), ids(4), None, 1, 2, torch.tensor(3.0, dtype=torch.float64))),
    (aten.native_layer_norm.default, (rand(2, 4, 6), [6], rand(6), rand(6), 1e-5)),
    (aten.native_layer_norm_backward.default,
     (rand(2, 4, 6), rand(2, 4, 6), [6], MEAN, RSTD, rand(6), rand(6), [True, True, True])),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, (Q, K, V)),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, (Q, K, V, 0.0, True)),
    (aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
     (rand(2, 4, 3, 8).float(), Q, K, V, OUT, LSE, 0.0, False)),
    (aten._scaled_dot_product_flash_attention.default, (Q, K, V, 0.0, True)),
    (aten._scaled_dot_product_flash_attention_backward.default,
     (GRAD, Q, K, V, OUT, LSE, NO, NO, 3, 3, 0.0, False, SEED, SEED)),
    (aten._scaled_dot_product_efficient_attention.default, (Q, K, V, None, True, 0.0, True)),
    (aten._scaled_dot_product_efficient_attention.default, (Q, K, V, BIAS, True)),
    (aten._scaled_dot_product_efficient_attention_backward.default,
     (GRAD, Q, K, V, BIAS, OUT, LSE, SEED, SEED, 0.0, [True, True, True, False], False)),
    (aten._scaled_dot_product_cudnn_attention.default, (Q, K, V, BIAS, True)),
    (aten._scaled_dot_product_cudnn_attention.default, (Q, K, V, None, True, 0.0, True)),
    (aten._scaled_dot_product_cudnn_attention_backward.default,
     (GRAD, Q, K, V, OUT, LSE, SEED, SEED, BIAS, NO, NO, 3, 3, 0.0, False)),
    (ops.attention, (Q, K, V, True, 0.3)),
    (ops.attention_backward, (GRAD, Q, K, V, OUT, LSE, False, 8**-0.5)),
    (ops.attention, (Q, K, V, False, 0.3, BIAS)),
    (ops.attention, (Q, K, V, False, 0.3, BIAS[:, :1])),
    (ops.attention_backward, (GRAD, Q, K, V, OUT, LSE, False, 8**-0.5, BIAS)),
]  # fmt: skip


def placements(x: Tensor) -> Iterator[Placement]:
    yield R
    if x.is_floating_point():
        yield P
    for dim, groups in itertools.product(range(x.dim()), (1, 2, 3)):
        cut = Cut(dim, groups)
        if fits(x.shape, cut, RANKS):
            yield cut


def laid(x: Tensor, lies: Placement, rank: int, seed: int, zigzag: bool) -> Tensor:
    """Return what a rank has of a tensor that lies so; summands are drawn."""
    if isinstance(lies, Cut):
        return part(x, lies, rank, RANKS, zigzag)
    if lies == P:
        generator = torch.Generator().manual_seed(seed)
        first = torch.rand(x.shape, dtype=x.dtype, generator=generator)
        return first if rank == 0 else x - first
    return x


def holed(args: Any) -> tuple[Any, list[Tensor]]:
    """Return arguments with a hole for each tensor, and the tensors."""
    tensors: list[Tensor] = []

    def hole(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            tensors.append(argument)
            return Hole(len(tensors) - 1)
        if isinstance(argument, (list, tuple)):
            return type(argument)(hole(a) for a in argument)
        return argument

    return hole(args), tensors


def run(way: Way, call: WholeCall, tensors: list[Tensor]) -> Any:
    """Run a way on all ranks; return the whole of what they give."""
    found = []
    for rank in range(RANKS):
        mine = [
            laid(t, n, rank, i, call.zigzag)
            for i, (t, n) in enumerate(zip(tensors, way.needs, strict=True))
        ]
        args = way.args if way.args is not None else call.args
        made = called(call.target, filled(args, mine))
        found.append(list(made) if isinstance(made, (list, tuple)) else made)
    return together(found, way.gives, call.zigzag)


def called(target: Any, args: Any) -> Any:
    with GraphCalls(None).active():  # type: ignore[arg-type]
        return target(*args)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{n} {CASES[n][0]}")
def test_every_way_gives_the_whole_result(number: int) -> None:
    assert len(checked(number, zigzag=False)) > 1, "every rank does all of it"


def test_every_way_in_zigzag_order() -> None:
    """The same rules, for parts of two chunks; a few sizes have no four."""
    cut = 0
    for number in range(len(CASES)):
        cut += sum(any(isinstance(n, Cut) for n in way.needs) for way in checked(number, True))
    assert cut > 150


def checked(number: int, zigzag: bool) -> set[Way]:
    """Compare every way of a case with the whole call; return the ways."""
    target, given = CASES[number]
    args, tensors = holed(given)
    whole = called(target, given)
    seen: set[Way] = set()
    for now in itertools.product(*(list(placements(t)) for t in tensors[:3])):
        now += (R,) * (len(tensors) - len(now))
        if len(tensors) > 3:  # of many, those with as many dimensions as the first lie as it does
            first = next(i for i, t in enumerate(tensors) if t.dim())
            same = [t.dim() == tensors[first].dim() for t in tensors]
            now = tuple(now[first] if is_same else R for is_same in same)
        operands = [Operand(tuple(t.shape), n) for t, n in zip(tensors, now, strict=True)]
        call = WholeCall(target, tuple(args), {}, tuple(operands), whole, RANKS, zigzag=zigzag)
        for way in ways(call):
            if way in seen or way.op:
                continue
            seen.add(way)
            got = run(way, call, tensors)
            for mine, theirs in zip(
                *([v] if isinstance(v, Tensor) else v for v in (got, whole)), strict=True
            ):
                if isinstance(theirs, Tensor):
                    torch.testing.assert_close(
                        mine, theirs, rtol=1e-5, atol=1e-5, msg=lambda m, w=way: f"{w}: {m}"
                    )
    return seen


# -- rows that one rank has ------------------------------------------------------------------------
FOUR = torch.tensor([2, 2, 3, 8], dtype=torch.int32)  # the ends of two groups on each rank
OF_FOUR: list[tuple[Any, tuple[Any, ...]]] = [
    (aten._grouped_mm.default, (rand(8, 24).float(), rand(4, 24, 24).float(), FOUR)),
    (aten._grouped_mm.default, (rand(24, 8).float(), rand(8, 24).float(), FOUR)),
    (GROUPED, (rand(8, 12), rand(4, 12, 10), FOUR)),
    (GROUPED_BACKWARD, (rand(8, 12), rand(4, 12, 10), FOUR, rand(8, 10))),
    (aten.pow.Tensor_Scalar, (X, -1)), (aten.add.Tensor, (X, 1.0)),
    (aten.mul.Tensor, (rand(4, 6), rand(4, 1))), (aten.view.default, (rand(8, 6), [8, 2, 3])),
    (aten.cat.default, ([rand(8, 4), rand(8, 4)], -1)),
]  # fmt: skip
MINE, OTHER = "0123456789abcdef", "fedcba9876543210"  # digests of ends


def lying(x: Tensor) -> Iterator[Placement]:
    yield R
    if x.is_floating_point():
        yield from (Owned(0, MINE), Owned(0, OTHER))
        yield from [Owned(1, MINE)] if x.dim() > 1 else []
        yield from [Cut(0)] if x.dim() == 3 and x.shape[0] == 4 else []


def owned(x: Tensor, lies: Placement, rank: int) -> Tensor:
    """Return what a rank has of rows that lie so: the first two are rank 0's, others rank 1's."""
    if not isinstance(lies, Owned):
        return laid(x, lies, rank, 0, False)
    theirs = (torch.arange(x.shape[lies.dim]) < 2) == (rank == 1)
    return x.masked_fill(theirs.view([-1 if d == lies.dim else 1 for d in range(x.dim())]), 0)


def on_rank(rank: int, target: Any, args: Any) -> Any:
    axis = ThreadAxis(rank, Meeting(RANKS))
    engine: Any = SimpleNamespace(world=SimpleNamespace(axis=lambda name: axis))
    with GraphCalls(engine).active():
        return target(*args)


def owned_ways(target: Any, given: tuple[Any, ...]) -> int:
    """Compare the ways that read or give rows of one rank with the whole call; count them."""
    args, tensors = holed(given)
    whole, seen = called(target, given), set[Way]()
    for now in itertools.product(*(list(lying(t)) for t in tensors[:4])):
        lies = now + (R,) * (len(tensors) - len(now))
        operands = [Operand(tuple(t.shape), n, MINE) for t, n in zip(tensors, lies, strict=True)]
        call = WholeCall(target, tuple(args), {}, tuple(operands), whole, RANKS)
        for way in ways(call):
            gives = way.gives if isinstance(way.gives, tuple) else (way.gives,)
            of = {each.ends for each in (*way.needs, *gives) if isinstance(each, Owned)}
            if not of or way in seen:
                continue
            assert len(of) == 1, f"{way} takes rows of two owners for those of one"
            seen.add(way)
            local = way.args if way.args is not None else call.args
            op = getattr(ops, way.op) if way.op else target
            made = []
            for rank in range(RANKS):
                mine = [owned(t, n, rank) for t, n in zip(tensors, way.needs, strict=True)]
                made.append(on_rank(rank, op, filled(local, mine)))
            got = together([list(m) if isinstance(m, tuple) else m for m in made], way.gives)
            for one, other in zip(
                *([v] if isinstance(v, Tensor) else v for v in (got, whole)), strict=True
            ):
                torch.testing.assert_close(
                    one, other, rtol=1e-5, atol=1e-5, msg=lambda m, w=way: f"{w}: {m}"
                )
    return len(seen)


def test_rows_of_one_rank_stay_there() -> None:
    """Two ranks never have one row, and none is lost; what zeros do not stay in has no way."""
    found: dict[str, int] = {}
    for target, given in [*CASES, *OF_FOUR]:
        name = str(target).removesuffix(".default")
        found[name] = found.get(name, 0) + owned_ways(target, given)
    kept = {name.removeprefix("aten.") for name, number in found.items() if number}
    assert kept >= {
        "_grouped_mm", "transformers.grouped_mm_fallback", "mul.Tensor", "silu", "gelu",
        "transformers.grouped_mm_fallback_backward", "silu_backward", "split.Tensor", "cat", "t",
        "transpose.int", "view", "_to_copy", "slice.Tensor", "slice_backward", "add.Tensor",
    }  # fmt: skip
    lost = {"sigmoid", "exp", "cos", "add.Scalar", "rsub.Scalar", "softplus", "where.self", "mm"}
    assert not kept & lost
    assert not owned_ways(aten.pow.Tensor_Scalar, (X, -1))
    assert not owned_ways(aten.add.Tensor, (X, 1.0))


@pytest.mark.parametrize(
    ("target", "given"),
    [
        (aten._scaled_dot_product_flash_attention.default, (Q, K, V, 0.1)),
        (aten._scaled_dot_product_efficient_attention.default, (Q, K, V, None, True, 0.1)),
        (aten._scaled_dot_product_efficient_attention_backward.default,
         (GRAD, Q, K, V, BIAS, OUT, LSE, SEED, SEED, 0.0, [True] * 4, False)),
        (aten._scaled_dot_product_cudnn_attention.default, (Q, K, V, None, True, 0.1)),
        (aten._scaled_dot_product_flash_attention.default, (Q, K[:, :2], V[:, :2])),
    ],
)  # fmt: skip
def test_attention_that_cannot_be_cut_is_whole(target: Any, given: Any) -> None:
    """Draws, gradients of a bias, and fewer heads of keys, which may still be cut by sample."""
    args, tensors = holed(given)
    operands = tuple(Operand(tuple(t.shape), R) for t in tensors)
    result = [R] * len(target._schema.returns)
    call = WholeCall(target, tuple(args), {}, operands, result, RANKS)
    assert all(way.needs[0] in (R, Cut(0)) for way in ways(call))


# -- conversions over the tensor axis, of what is cut over the context axis -----------------------
TABLE, GRAD_OF_IDS = rand(2, 6), rand(4, 8, 6)
IDS = ids(4, 8)
ELSEWHERE: list[tuple[Any, tuple[Any, ...]]] = [
    (ops.reduce_values, (rand(4, 8), "tensor")),
    (ops.summand, (rand(4, 8), "tensor")),
    (ops.gather_values, (rand(4, 8), "tensor", 1, 1, 2)),
    (ops.gather_values, (rand(8, 4), "tensor", 0, 2, 2)),
    (ops.padded, (rand(4, 8), "tensor", 0, 1, 2)),
    (ops.scatter_values, (rand(4, 16), "tensor", 1, 1, 2)),
    (ops.scatter_values, (rand(16, 4), "tensor", 0, 2, 2)),
    (ops.part, (rand(4, 16), "tensor", 1, 1, 2)),
    (ops.swap_values, (rand(4, 16, 8), "tensor", 0, 1, 1, 1, 2)),
    (ops.swap_values, (rand(4, 16, 8), "tensor", 2, 2, 1, 2, 2)),
    (ops.reduce_joined, ([rand(4), rand(2, 3)], "tensor")),
    (ops.embedding_rows, (TABLE, IDS, "tensor", 2)),
    (ops.embedding_rows_backward, (GRAD_OF_IDS, IDS, "tensor", 2, 1)),
    (ops.joined_value, (rand(10), 1, 4, [2, 3])),
]  # fmt: skip
BOTH = Parallel(tensor=2, context=RANKS)


def of_rank(given: Any, rank: int) -> Any:
    """Return what a rank of the tensor axis has in the place of these tensors; ids are the same."""
    return [t if not t.is_floating_point() else t * (1 + rank) for t in given]


def converted(target: Any, args: Any, engine: Any) -> Any:
    with GraphCalls(engine).active(), torch.no_grad():
        made = target(*args)
        is_launch = spec_of_target(target).kind is Kind.LAUNCH
        return ops.wait(made) if is_launch else made


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("number", range(len(ELSEWHERE)), ids=lambda n: f"{n} {ELSEWHERE[n][0]}")
def test_what_is_converted_over_another_axis(number: int, zigzag: bool) -> None:
    """Each rank of the context axis gets its part of what the tensor axis alone would give."""
    target, given = ELSEWHERE[number]
    args, tensors = holed(given)
    parallel = replace(BOTH, attention="ring") if zigzag else BOTH
    alone = Parallel(tensor=2)

    def whole_of(rank: int, engine: Any) -> Any:
        return converted(target, filled(args, of_rank(tensors, rank)), engine)

    expected = on_axes(alone, whole_of)
    seen: set[Way] = set()
    for now in itertools.product(*(list(placements(t)) for t in tensors)):
        operands = tuple(Operand(tuple(t.shape), n) for t, n in zip(tensors, now, strict=True))
        call = WholeCall(
            target, tuple(args), {}, operands, expected[0], RANKS, axis="context", zigzag=zigzag
        )
        for way in ways(call):
            if way in seen:
                continue
            seen.add(way)

            def mine(rank: int, engine: Any, way: Way = way) -> Any:
                place = rank // 2
                own = [
                    laid(t, n, place, i, zigzag)
                    for i, (t, n) in enumerate(
                        zip(of_rank(tensors, rank % 2), way.needs, strict=True)
                    )
                ]
                return converted(target, filled(args, own), engine)

            found = on_axes(parallel, mine)
            for rank in range(2):
                got = together(found[rank::2], way.gives, zigzag)
                torch.testing.assert_close(got, expected[rank], msg=lambda m, w=way: f"{w}: {m}")
    assert len(seen) > 1, "every rank does all of it"


def test_every_rule_has_a_case() -> None:
    cases = [target for target, _ in (*CASES, *ELSEWHERE)]
    tested = {*cases, *map(str, cases)}
    assert not RULES.keys() - tested, RULES.keys() - tested


def test_expanded_dimensions_keep_their_place_in_memory() -> None:
    """A part of a value has its memory order; what is expanded has none of its own."""
    x = torch.randn(2, 1, 8, 6).expand(2, 4, 8, 6)
    assert memory_order(x) == [0, 1, 2, 3]
    assert memory_order(x.transpose(1, 2)) == [0, 1, 2, 3]
    assert memory_order(torch.randn(2, 8, 1, 6).expand(2, 8, 4, 6).transpose(1, 2)) == [0, 1, 2, 3]
    assert memory_order(torch.randn(2, 8, 6).transpose(1, 2)) == [0, 2, 1]
    assert part(x, Cut(1), 1, 2).stride() == (96, 48, 6, 1)
    assert in_order_of(x, x).is_contiguous() and torch.equal(in_order_of(x, x), x)
    last = torch.randn(3, 5, 1).expand(3, 5, 4)
    assert memory_order(last) == [0, 1, 2] and in_order_of(last, last).is_contiguous()
