"""Pipeline stages on paper: what each stage has, sends and takes, and what `verify` refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensor_models import MODELS, batch
from torch import Tensor, fx, nn

import zerofx
from zerofx.errors import CaptureError, PlanError, ProgramError
from zerofx.ir.meta import Role, info, set_info
from zerofx.ir.program import Planned
from zerofx.ir.verify import verify, verify_stages
from zerofx.passes.cut_stages import Cutting, balanced
from zerofx.policy.schedules import (
    BACKWARD,
    FORWARD,
    Hop,
    actions,
    fault_of,
    halves,
    mismatch,
    moments,
    moves,
    num_micro_batches,
    orders,
    stuck,
)


def stages(name: str, size: int, **fields: object) -> list[Planned]:
    torch.manual_seed(0)
    captured = zerofx.capture(MODELS[name](), (), batch(name), outputs="loss")
    plan = zerofx.Plan(kernels="aten", parallel={"pipeline": size, **fields})
    num = plan.parallel.num_stages
    return [zerofx.rewrite(captured, plan, world_size=2 * size, position=p) for p in range(num)]


@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("gpt2", 2), ("vit", 2), ("t5", 4)])
def test_stages_have_what_they_compute(name: str, size: int) -> None:
    found = stages(name, size)
    verify_stages(found)
    model = MODELS[name]()
    held = [set(program.params) for program in found]
    assert set.union(*held) == {n for n, _ in model.named_parameters()}
    wires = found[0].stage.wires
    for graph in (FORWARD, BACKWARD):
        ways = {(w.source, w.target) for w in wires if w.graph == graph}
        near = {(p, p + 1) if graph == FORWARD else (p + 1, p) for p in range(size - 1)}
        assert near <= ways
    if name in ("llama", "gpt2", "vit"):  # one activation and one gradient a boundary
        assert len(wires) == 2 * (size - 1)
    shared = set.intersection(held[0], held[-1])
    assert shared == {"gpt2": {"transformer.wte.weight"}, "t5": {"shared.weight"}}.get(name, set())
    numel = [
        sum(program.layout.shard_numel(b) for b in program.layout.buckets) for program in found
    ]
    assert all(0 < n < sum(p.numel() for p in model.parameters()) for n in numel)


def test_broken_stages_are_refused() -> None:
    found = stages("t5", 4)
    taken = [n for n in found[3].placeholders(FORWARD) if info(n).digest]
    first, second = taken[:2]
    before = info(first).digest
    set_info(first, digest=info(second).digest)
    with pytest.raises(ProgramError, match="does not compute what was captured"):
        verify(found[3])
    set_info(first, digest=before)
    verify_stages(found)
    wires = found[0].stage.wires
    wrong = (replace(wires[0], digest=wires[1].digest), *wires[1:])
    broken = [replace(p, stage=replace(p.stage, wires=wrong)) for p in found]
    with pytest.raises(ProgramError, match=f"to_later_{wires[0].name}. of pipeline stage 0 is not"):
        verify_stages(broken)
    swapped = (*wires[:-2], replace(wires[-1], leaf=wires[-2].leaf), wires[-2])
    others = [replace(p, stage=replace(p.stage, wires=swapped)) for p in found]
    with pytest.raises(ProgramError, match=r"reads from_\w+ as another value than it is sent"):
        verify_stages([found[0], *others[1:]])
    with pytest.raises(ProgramError, match="the program given as stage 0 of 4 is stage 1"):
        verify_stages([found[1], found[0], *found[2:]])
    with pytest.raises(ProgramError, match=r"to compute \(x\) are not those that were captured"):
        verify_stages([replace(p, stage=replace(p.stage, trained=("x",))) for p in found])


def first_only(cutting: Cutting, node: fx.Node, parts: list[fx.Node]) -> list[fx.Node]:
    return parts[:1]


def last_only(cutting: Cutting, node: fx.Node, parts: list[fx.Node]) -> list[fx.Node]:
    return parts[-1:]


def one_twice(cutting: Cutting, node: fx.Node, parts: list[fx.Node]) -> list[fx.Node]:
    return [*parts, parts[0]]


def one_for_all(cutting: Cutting, node: fx.Node, parts: list[fx.Node]) -> list[fx.Node]:
    return parts[-1:] * len(parts)


@pytest.mark.parametrize("wrong", [first_only, last_only, one_twice, one_for_all])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_parts_of_a_tied_gradient_that_are_not_the_whole_are_refused(
    name: str, wrong: Callable[..., list[fx.Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut that gives stages other summands than the captured sum has."""
    right = Cutting._summands
    monkeypatch.setattr(Cutting, "_summands", lambda self, n: wrong(self, n, right(self, n)))
    with pytest.raises(ProgramError, match=r"differ|leaves out|not in sum the captured"):
        verify_stages(stages(name, 2))


def test_what_stages_say_of_a_tied_gradient_is_proved() -> None:
    found = stages("gpt2", 2)
    [(name, (early, late))] = found[0].stage.sums.items()
    assert name == "transformer.wte.weight"
    assert found[0].stage.summands(name).keys() == {0, 1}
    for sums, said in (
        ({name: early}, "not in sum the captured one"),
        ({name: (early, early)}, "not in sum the captured one"),
        ({name: ((1 - early[0], early[1]), late)}, "is not what was captured"),
        ({}, "is not what was captured"),
    ):
        for stage in found:
            with pytest.raises(ProgramError, match=said):
                verify(replace(stage, stage=replace(stage.stage, sums=sums)))


def test_a_stage_that_leaves_out_a_gradient_is_refused() -> None:
    [_, last] = stages("llama", 2)
    graph = last.graph(BACKWARD)
    specs, results = last.outputs[BACKWARD], last.results(BACKWARD)
    at = next(i for i, s in enumerate(specs) if s.role is Role.INPUT_GRAD)
    other = next(n for n in graph.nodes if n.op == "call_function" and n.meta["val"] is not None)
    same = [
        n for n in graph.nodes
        if isinstance(n.meta.get("val"), Tensor) and n is not results[at]
        and n.op == "call_function" and n.meta["val"].shape == results[at].meta["val"].shape
    ]  # fmt: skip
    assert same and other
    graph.output_node().args = (tuple(same[-1] if i == at else r for i, r in enumerate(results)),)
    with pytest.raises(ProgramError):
        verify(last)


class Skipping(nn.Module):
    """Reads the embedding's table in its last layer, outside of any module that has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x).tanh()
        return (x @ self.embed.weight.t()).square().mean()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Writing(Normed):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x * 1)
        x.add_(1)
        return found


class Returns(nn.Module):
    """Returns something besides logits that micro-batches do not make up."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        x = self.last(self.first(x))
        more = {"table": self.table * 2, "mean": x.mean(0, keepdim=True), "number": len(x)}
        return x, more[self.kind]


def capture_of(model: nn.Module, x: Tensor, size: int, cuts: Sequence[str] | str = "auto") -> None:
    plan = zerofx.Plan(kernels="aten", parallel={"pipeline": size, "cuts": cuts})
    zerofx.rewrite(zerofx.capture(model, (x,)), plan, world_size=size)


def test_each_stage_updates_the_buffers_of_its_layers() -> None:
    captured = zerofx.capture(Normed(), (torch.randn(4, 4),))
    plan = zerofx.Plan(kernels="aten", parallel={"pipeline": 2})
    stages = [zerofx.rewrite(captured, plan, world_size=2, position=p) for p in range(2)]
    for position, (block, program) in enumerate(zip("01", stages, strict=True)):
        updated = {s.name for s in program.outputs["forward"] if s.role is Role.BUFFER_UPDATE}
        assert updated == {
            f"blocks.{block}.1.{name}"
            for name in ("running_mean", "running_var", "num_batches_tracked")
        }
        assert {n for n, at in program.stage.written.items() if at == position} == updated
    verify_stages(stages)


def test_what_cannot_be_cut_is_named() -> None:
    ids = torch.randint(8, (2, 3))
    with pytest.raises(PlanError, match=r"reads embed.weight, which is in pipeline stage 0"):
        capture_of(Skipping(), ids, 2)
    with pytest.raises(CaptureError, match=r"forward writes to the input x\. With"):
        capture_of(Writing(), torch.randn(4, 4), 2)
    two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(CaptureError, match="forward returns no loss, and under"):
        capture_of(two, torch.randn(2, 4), 2)
    plan = zerofx.Plan(kernels="aten", parallel={"pipeline": 2, "schedule": "gpipe"})
    two.append(nn.Flatten(0))
    with pytest.raises(CaptureError, match=r"output has the shape \[8\] for a micro-batch of 2"):
        zerofx.rewrite(zerofx.capture(two, (torch.randn(2, 4),)), plan, world_size=2)
    with pytest.raises(CaptureError, match="a micro-batch has 1 sample"):
        zerofx.rewrite(zerofx.capture(two[:2], (torch.randn(1, 4),)), plan, world_size=2)
    for kind, said in (
        ("table", r"\[1\] has the shape \[2, 4\]"),
        ("mean", r"\[1\] has the shape \[1, 4\]"),
        ("number", r"\[1\] is the number 2 for a micro-batch of 2"),
    ):
        with pytest.raises(CaptureError, match=said):
            zerofx.rewrite(zerofx.capture(Returns(kind), (torch.randn(2, 4),)), plan, world_size=2)
    with pytest.raises(PlanError, match="pipeline = 9 stages, and the model has 5 units"):
        capture_of(Skipping(), ids, 9)
    with pytest.raises(PlanError, match=r"no unit is named 'block.2'. Did you mean"):
        capture_of(Skipping(), ids, 2, ["block.2"])
    with pytest.raises(PlanError, match="must grow"):
        capture_of(Skipping(), ids, 3, ["blocks.2", "blocks.1"])
    with pytest.raises(PlanError, match="cuts has 2 modules, but pipeline is 2"):
        capture_of(Skipping(), ids, 2, ["blocks.1", "blocks.2"])
    with pytest.raises(PlanError, match="contradicts pipeline = 1"):
        zerofx.Plan(parallel={"micro_batches": 4})
    with pytest.raises(PlanError, match="position is 2"):
        zerofx.rewrite(
            zerofx.capture(Skipping(), (ids,)), zerofx.Plan(parallel={"pipeline": 2}), 2, position=2
        )


class Scaled(Skipping):
    """Has a parameter of its own, which its last lines read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x).tanh()
        return (x * self.scale).square().mean()


def test_the_models_own_parameters_lie_in_every_stage() -> None:
    captured = zerofx.capture(Scaled(), (torch.randint(8, (2, 3)),))
    plan = zerofx.Plan(kernels="aten", parallel={"pipeline": 3})
    found = [zerofx.rewrite(captured, plan, 3, position=p) for p in range(3)]
    verify_stages(found)
    assert all("scale" in program.params for program in found)
    assert ["embed.weight" in program.params for program in found] == [True, False, False]


def test_stages_are_balanced() -> None:
    assert balanced([0, 4, 4, 4, 4, 2], 2) == [0, 3]
    assert balanced([1, 1, 1, 9], 2) == [0, 3]
    assert balanced([1, 1, 1], 3) == [0, 1, 2]
    assert balanced([5, 0, 0, 0], 2) == [0, 1]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_schedules_end_and_keep_few_under_way(schedule: str) -> None:
    for size in (2, 3, 4, 8):
        for num in (1, 2, 3, size, 2 * size, 4 * size):
            orders = [actions(schedule, size, p, num) for p in range(size)]
            for order in orders:
                expected = sorted([*map(str, range(num))] * len(halves(order)))
                assert sorted(str(a)[1:] for a in order) == expected
            near = [Hop(FORWARD, p, p + 1) for p in range(size - 1)]
            near += [Hop(BACKWARD, p + 1, p) for p in range(size - 1)]
            skips = [Hop(FORWARD, p, q) for p in range(size) for q in range(p + 1, size)]
            skips += [Hop(BACKWARD, q, p) for p in range(size) for q in range(p + 1, size)]
            assert stuck(moves(orders, near)) == []
            assert stuck(moves(orders, skips)) == []
            under_way = [1 + max(sum(m.others[0]) for m in moments(order)) for order in orders]
            if schedule == "1f1b":
                assert under_way == [min(num, size - p) for p in range(size)]
            if schedule == "zero-bubble":  # as many on each rank as on 1f1b's first one
                assert under_way == [min(num, size)] * size


@pytest.mark.parametrize("interleave", [2, 3, 4])
def test_interleaved_orders_end_and_pair(interleave: int) -> None:
    for size in (2, 3, 4):
        stages = size * interleave
        for num in (size, 2 * size, 4 * size):
            found = orders("interleaved", size, num, interleave)
            for order in found:
                assert len(set(map(str, order))) == len(order) == 2 * num * interleave
            near = [Hop(FORWARD, p, p + 1, "x") for p in range(stages - 1)]
            near += [Hop(BACKWARD, p + 1, p, "dx") for p in range(stages - 1)]
            skips = [Hop(FORWARD, 0, p, "e") for p in range(2, stages)]
            skips += [Hop(BACKWARD, p, 0, "de") for p in range(2, stages)]
            for hops in (near, near + skips):
                done = moves(found, hops)
                assert mismatch(done) == "" and stuck(done) == []
                for rank, mine in enumerate(done):
                    own = range(rank, stages, size)
                    assert fault_of(rank, size, mine, hops, own, num) == ""
                    assert sum(move.reduces for move in mine) == interleave
            # Megatron-LM's number of forwards ahead of the first backward
            ahead = [2 * (size - p - 1) + (interleave - 1) * size + 1 for p in range(size)]
            begun = [[a.graph for a in order].index(BACKWARD) for order in found]
            assert begun == [min(n, num * interleave) for n in ahead]


def test_a_schedule_that_waits_for_itself_is_found() -> None:
    orders = [actions("1f1b", 2, p, 2) for p in range(2)]
    orders[0] = tuple(reversed(orders[0]))
    links = [Hop(FORWARD, 0, 1), Hop(BACKWARD, 1, 0)]
    held = stuck(moves(orders, links))
    assert [(m.verb, m.micro_batch) for m in held if m] == [("backward", 1), ("forward", 0)]


def test_interleaved_stages_are_proved() -> None:
    found = stages("deep", 2, schedule="interleaved", interleave=2)
    verify_stages(found)
    assert [program.stage.position for program in found] == [0, 1, 2, 3]
    wires = found[0].stage.wires
    assert len(wires) == 2 * 3  # one activation and one gradient a boundary
    first, second = ({*found[rank].params} for rank in range(2))
    assert first == {*found[2].params} and second == {*found[3].params}  # of both stages
    assert not first & second
    with pytest.raises(ProgramError, match="of another pipeline"):
        verify_stages(found[::2])


def test_what_interleaving_needs_is_said() -> None:
    for fields, said in (
        ({"pipeline": 2, "schedule": "interleaved"}, "interleave = 1 contradicts schedule"),
        ({"pipeline": 2, "interleave": 2}, "contradicts schedule = '1f1b'"),
        ({"schedule": "interleaved", "interleave": 2}, "contradicts pipeline = 1"),
        (
            {"pipeline": 4, "schedule": "interleaved", "interleave": 2, "micro_batches": 6},
            "6 is no multiple of pipeline = 4",
        ),
        ({"schedule": "zero-bubble"}, "'zero-bubble' contradicts pipeline = 1"),
        (
            {"pipeline": 2, "schedule": "zero-bubble", "interleave": 2},
            "interleave = 2 contradicts schedule = 'zero-bubble'",
        ),
    ):
        with pytest.raises(PlanError, match=said):
            zerofx.Plan(parallel=fields)
    assert num_micro_batches("auto", 12, 4, 2) == 12
    assert num_micro_batches("auto", 6, 4, 2) == 0


def test_micro_batches_divide_the_batch() -> None:
    assert num_micro_batches("auto", 12, 2) == 6
    assert num_micro_batches("auto", 7, 2) == 7
    assert num_micro_batches("auto", 11, 2) == 1
    assert num_micro_batches(4, 12, 2) == 4
    assert num_micro_batches(5, 12, 2) == 0
    assert num_micro_batches("auto", 0, 2) == 0
