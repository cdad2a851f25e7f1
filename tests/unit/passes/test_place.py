"""place: cut over the tensor axis, models that were not written for it compute what they did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from placed_ranks import cut_for, run_ranks, run_whole, together_over, values_of
from task_cases import FlatPrices
from tensor_models import MODELS, batch, llama, padded
from torch import Tensor, nn

import zerofx
from zerofx.analysis.time.prices import Roofline
from zerofx.analysis.time.steps import Lane
from zerofx.analysis.time.tasks import tasks
from zerofx.analysis.time.traffic import traffic
from zerofx.errors import PlanError, ProgramError
from zerofx.hardware import hardware_for
from zerofx.ir.meta import Placed, Role, info, set_info, value
from zerofx.ir.program import JOINT, Planned
from zerofx.ir.verify import verify
from zerofx.layout.placements import Cut, P, Placement, R
from zerofx.layout.styles import styles_of
from zerofx.ops.placed import CONVERSIONS, gather_values, part, reduce_values, swap_values
from zerofx.passes.merge_tied import MergeTied
from zerofx.passes.open_attention import OpenAttention
from zerofx.passes.open_experts import OpenExperts
from zerofx.passes.order import Setting
from zerofx.passes.overlap_values import OverlapValues
from zerofx.passes.pipeline import run
from zerofx.passes.place import OpenLosses, OpenProducts, Place
from zerofx.plan.fields import Patterns
from zerofx.plan.parts import Parallel
from zerofx.plan.plan import Plan
from zerofx.tools.targets import Target

NAMES = ["llama", "gpt2", "bert", "t5", "vit"]
PADDED = " padded"


@cache
def captured(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = MODELS[name.removesuffix(PADDED)]()
    return model, zerofx.capture(model, (), given_to(name), outputs="loss")


def given_to(name: str) -> dict[str, Tensor]:
    base = name.removesuffix(PADDED)
    return batch(base) if base == name else padded(base)


def placed(name: str, parallel: Parallel) -> tuple[Planned, Planned]:
    return cut_over(captured(name)[1], parallel)


def cut_over(program: Any, parallel: Parallel) -> tuple[Planned, Planned]:
    """Return a program before and behind the pass."""
    whole = program.planned().clone()
    OpenProducts(parallel).run(whole)
    OpenLosses(parallel).run(whole)
    OpenAttention(parallel).run(whole)
    OpenExperts(parallel).run(whole)
    MergeTied().run(whole)
    cut = whole.clone()
    Place(parallel).run(cut)
    OverlapValues().run(cut)
    for each in (whole, cut):
        each.graphs[JOINT].graph.lint()
        each.graphs[JOINT].recompile()
    return whole, cut


# What these return is not defined before something is written to it.
UNINITIALISED = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default}


def check(name: str, parallel: Parallel) -> Planned:
    model, program = captured(name)
    cut, compared = compare(model, program, given_to(name), parallel)
    assert compared > 100
    return cut


def compare(
    model: nn.Module, program: Any, inputs: dict[str, Tensor], parallel: Parallel
) -> tuple[Planned, int]:
    """Run a placed graph on all ranks, and compare each value, joined, with the whole graph's."""
    whole, cut = cut_over(program, parallel)
    given = values_of(whole, model, inputs)
    results, values = run_whole(whole.graphs[JOINT], given)
    lies = [info(n).placed for n in cut.placeholders(JOINT)]
    each = [
        [cut_for(v, at, rank, parallel) for v, at in zip(given, lies, strict=True)]
        for rank in range(parallel.value_ranks)
    ]
    found, kept = run_ranks(cut.graphs[JOINT], each, parallel)
    by_name = {n.name: v for n, v in values.items()}
    compared = 0
    for node in cut.graphs[JOINT].graph.nodes:
        where = info(node).placed
        if node.op != "call_function" or where is None or node.name not in by_name:
            continue
        if node.target in UNINITIALISED:
            continue
        got = together_over([k[node] for k in kept], where, parallel)
        expected = by_name[node.name]
        got, expected = ([v] if isinstance(v, Tensor) else v for v in (got, expected))
        for mine, theirs in zip(got, expected, strict=True):
            if isinstance(theirs, Tensor) and mine.shape == theirs.shape:
                torch.testing.assert_close(
                    mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=node: f"{n}: {m}"
                )
                compared += 1
    for spec, *mine, expected in zip(whole.outputs[JOINT], *found, results, strict=True):
        if expected is None:
            continue
        due: dict[str, Placement] = {"tensor": R, "context": R}
        if spec.role is Role.GRAD:
            part = cut.params[spec.name].part
            due = {"tensor": part.cut if part else R, "context": P}
        note = None
        for axis in parallel.value_axes:
            note = Placed(due[axis], (), outer=note)
        got = together_over(mine, note, parallel)
        are_whole = all(due[axis] == R for axis in parallel.value_axes)
        assert not are_whole or all(torch.equal(m, mine[0]) for m in mine), spec
        torch.testing.assert_close(
            got, expected, rtol=1e-4, atol=1e-5, msg=lambda m, s=spec: f"{s}: {m}"
        )
    return cut, compared


def sent(program: Planned) -> Counter[tuple[str, str, str]]:
    """Return the collectives by unit, phase and name."""
    found: Counter[tuple[str, str, str]] = Counter()
    for node in program.graph(JOINT).nodes:
        op = str(node.target)
        if op.startswith("zerofx.") and "_values" in op:
            found[info(node).unit, info(node).phase.value, op.split(".")[1]] += 1
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sequence", [False, True])
def test_every_value_is_that_of_the_whole_graph(name: str, sequence: bool) -> None:
    check(name, Parallel(tensor=2, sequence=sequence))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_on_four_ranks(name: str) -> None:
    check(name, Parallel(tensor=4))
    check(name, Parallel(tensor=4, sequence=True))


@pytest.mark.parametrize(
    ("name", "layer"), [("llama", "model.layers.1"), ("gpt2", "transformer.h.1")]
)
def test_a_layer_sends_what_megatrons_does(name: str, layer: str) -> None:
    """Two all-reduces each way; with sequence parallelism a gather and a scatter for each of them,
    and two gathers more in backward, of what forward had gathered (Korthikanti et al. 2022)."""
    found = sent(check(name, Parallel(tensor=2)))
    mine = {(phase, kind): n for (unit, phase, kind), n in found.items() if unit == layer}
    assert mine == {("forward", "reduce_values"): 2, ("backward", "reduce_values"): 2}
    found = sent(check(name, Parallel(tensor=2, sequence=True)))
    mine = {(phase, kind): n for (unit, phase, kind), n in found.items() if unit == layer}
    assert mine == {
        ("forward", "gather_values"): 2, ("forward", "scatter_values"): 2,
        ("backward", "gather_values"): 4, ("backward", "scatter_values"): 2,
    }  # fmt: skip


def test_the_loss_is_computed_where_the_logits_are() -> None:
    """Of each row the ranks exchange their largest logits, a sum and the label's logit."""
    cut = check("llama", Parallel(tensor=2))
    of_loss = [
        (str(node.target).split(".")[1], tuple(value(node).shape))
        for node in cut.graph(JOINT).nodes
        if "_values" in str(node.target) and not info(node).unit
    ]
    rows = 16
    assert of_loss == [
        ("gather_values", (rows, 2)), ("reduce_values", (rows, 1)), ("reduce_values", (rows,)),
    ]  # fmt: skip
    classes = 64
    values = [n.meta.get("val") for n in cut.graph(JOINT).nodes]
    shapes = [tuple(v.shape) for v in values if isinstance(v, Tensor)]
    assert (rows, classes) not in shapes, "a value of all classes"


def test_losses_of_heads_that_are_whole_stay_as_they_are() -> None:
    patterns = Patterns({"transformer.wte": "whole", "lm_head": "whole"})
    whole, _ = placed("gpt2", Parallel(tensor=2, placements=patterns))
    targets = [str(node.target) for node in whole.graph(JOINT).nodes]
    assert "aten.nll_loss_forward.default" in targets


def test_words_are_divided_in_models_without_a_plan() -> None:
    """A tied table and head, and the loss of the head's logits, which are not gathered for it."""
    _, program = placed("gpt2", Parallel(tensor=2))
    part = program.params["transformer.wte.weight"].part
    assert part is not None and part.cut == Cut(0)
    assert program.params["transformer.wpe.weight"].part is None
    targets = [str(node.target) for node in program.graph(JOINT).nodes]
    assert "aten.nll_loss_forward.default" not in targets


def test_a_table_is_known_by_its_head() -> None:
    class Words(nn.Module):
        def __init__(self, tables: int, is_tied: bool = False) -> None:
            super().__init__()
            for k in range(tables):
                setattr(self, f"table{k}", nn.Embedding(12, 4))
            self.head = nn.Linear(4, 12)
            if is_tied:
                self.head.weight = self.table0.weight  # type: ignore[assignment, union-attr]

    assert styles_of(Words(1)) == {"head": "colwise", "table0": "rowwise"}
    assert styles_of(Words(2)) == {}  # which of the two is not known
    assert styles_of(Words(2, is_tied=True)) == {"head": "colwise", "table0": "rowwise"}
    assert styles_of(nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 3))) == {}


@pytest.mark.parametrize(
    "name",
    ["mixtral", *(pytest.param(n, marks=pytest.mark.slow) for n in ("batched",))],
)
def test_experts_send_what_an_mlp_does(name: str) -> None:
    """One all-reduce each way, of the tokens; and in backward one of a number a chosen expert."""
    program = check(name, Parallel(tensor=2))
    cut = program.params["model.layers.1.mlp.experts.gate_up_proj"].part
    assert cut is not None and cut.cut == Cut(1, 2)
    cut = program.params["model.layers.1.mlp.experts.down_proj"].part
    assert cut is not None and cut.cut == Cut(2)
    shapes: Counter[tuple[str, int]] = Counter()
    for node in program.graph(JOINT).nodes:
        if node.target is reduce_values and "layers.1.mlp" in info(node).module:
            shapes[info(node).phase.value, value(node).numel()] += 1
    tokens, chosen, width = 16, 2, 32
    assert shapes["forward", tokens * width] <= 1  # that of the sum is in the block around it
    assert shapes["backward", tokens * chosen] == 1
    found = sent(program)
    mine = {(phase, kind): n for (unit, phase, kind), n in found.items() if "layers.1" in unit}
    assert mine["forward", "reduce_values"] == 2


EXPERTS = {"blocks.*.up": "experts", "blocks.*.down": "experts"}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("mixtral", "model.layers.1"),
        pytest.param("qwen3-moe", "model.layers.1", marks=pytest.mark.slow),
    ],
)
def test_whole_experts_send_what_cut_ones_do(name: str, unit: str, ranks: int) -> None:
    """The same sums of the same shapes; each rank multiplies the rows of its experts alone."""
    found = []
    for experts in (True, False):
        program = check(name, Parallel(tensor=ranks, experts=experts))
        layer = [n for n in program.graph(JOINT).nodes if unit in info(n).module]
        found.append(
            Counter(
                (info(n).phase.value, str(n.target), tuple(value(n).shape))
                for n in layer
                if n.target in CONVERSIONS and n.target is not part
            )
        )
        part_of = program.params[f"{unit}.mlp.experts.down_proj"].part
        assert part_of is not None and part_of.cut == (Cut(0) if experts else Cut(2))
        own = [str(n.target).split(".")[1] for n in layer if "grouped_rows" in str(n.target)]
        assert own == (["grouped_rows"] * 2 + ["grouped_rows_backward"] * 2 if experts else [])
    assert found[0] == found[1]


def test_experts_of_any_model_are_divided_by_name() -> None:
    """Products of torch's own, whose gradients are products of rows and of columns."""
    program = check("mixture", Parallel(tensor=2, placements=Patterns(EXPERTS)))
    told = Counter(
        str(n.target).split(".")[1]
        for n in program.graph(JOINT).nodes
        if "grouped" in str(n.target)
    )
    assert told == {"grouped_rows": 8, "grouped_weights": 4}
    found = {key: n for key, n in sent(program).items() if key[0]}
    assert {kind for _, _, kind in found} == {"reduce_values"}
    # the first one's other sum is of the table of words
    assert [found[f"blocks.{i}", "forward", "reduce_values"] for i in range(2)] == [2, 1]


@pytest.mark.parametrize(
    ("name", "more", "capacity"),
    [
        ("mixtral", {"sequence": True}, 0.75),
        ("mixture", {"placements": Patterns(EXPERTS)}, 2.0),
        pytest.param("qwen3-moe", {"sequence": True}, 2.0, marks=pytest.mark.slow),
        pytest.param("mixtral", {"sequence": True, "tensor": 4}, 1.0, marks=pytest.mark.slow),
    ],
)
def test_rows_go_to_the_ranks_of_their_experts(
    name: str, more: dict[str, Any], capacity: float
) -> None:
    """Two all-to-alls of the slots each way in every layer of experts, and no rows besides."""
    parallel = Parallel(**{"tensor": 2, "experts": True, "capacity": capacity, **more})
    program = check(name, parallel)
    swaps: Counter[tuple[str, str]] = Counter()
    for node in program.graph(JOINT).nodes:
        if node.target is swap_values:
            swaps[info(node).unit, info(node).phase.value] += 1
    assert swaps and set(swaps.values()) == {2}
    assert not any("grouped" in str(n.target) for n in program.graph(JOINT).nodes)
    layers = 1 if name == "qwen3-moe" else 2
    assert len(swaps) == 2 * layers


def test_collectives_of_values_are_priced_as_those_between_pieces_of_compute() -> None:
    """Those of buckets, which are launched early, are priced as transfers by themselves."""
    plan = {"parallel": {"tensor": 2}, "stage": 3}
    found = tasks(zerofx.rewrite(captured("llama")[1], plan, 4), FlatPrices())
    sent = {lane: {t.us for t in found if t.kind == "transfer" and t.lane is lane} for lane in Lane}
    assert sent[Lane.VALUES] == {30} and sent[Lane.GATHER] == sent[Lane.REDUCE] == {10}


def test_whole_experts_take_the_operations_of_cut_ones() -> None:
    """With even loads; and a search takes experts as given, and prices them."""
    flops = {}
    for experts in (True, False):
        plan = {"parallel": {"tensor": 2, "experts": experts}, "stage": 3}
        program = zerofx.rewrite(captured("mixtral")[1], plan, 4)
        prices = Roofline.of(program.plan, hardware_for("cuda", "dgx-h100"), 4)
        flops[experts] = sum(task.flops for task in tasks(program, prices))
        assert zerofx.predict(program, hardware="dgx-h100").step_us > 0
    layers, rows, width, inner = 2, 16 * 2, 32, 64
    products = 3 * layers * 2 * rows * (2 * inner * width + inner * width) / 2  # of a rank
    assert flops[True] == flops[False] > products


def test_a_search_takes_experts_as_given() -> None:
    given = {"parallel": {"tensor": 2, "experts": True}, "offload": "none", "kernels": "aten"}
    target = Target("mixtral", captured("mixtral")[0], (), batch("mixtral"))
    view = zerofx.search(target, hardware="cpu-box", world_size=2, global_samples=2, plan=given)
    assert view.plan.parallel == Parallel(tensor=2, experts=True) and view.found.fits


def test_experts_that_nothing_divides_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """The number of experts is no multiple, or no plan of the model names them."""
    for name, ranks in (("mixtral", 8), ("llama", 2)):
        caplog.clear()
        program = placed(name, Parallel(tensor=ranks, experts=True))[1]
        assert "Plan.parallel.experts divides nothing" in caplog.text
        assert not any(p.part and p.part.cut == Cut(0) and len(p.part.shape) == 3
                       for p in program.params.values())  # fmt: skip


# -- sequences that are cut -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("gpt2", "transformer.h.1"),
        pytest.param("llama", "model.layers.1", marks=pytest.mark.slow),
        pytest.param("bert", "bert.encoder.layer.1", marks=pytest.mark.slow),
    ],
)
def test_a_layer_sends_what_ulysses_does(name: str, layer: str) -> None:
    """Queries, keys, values and outputs by an all-to-all each way; and the loss is summed once."""
    found = sent(check(name, Parallel(context=2)))
    assert found.pop(("", "forward", "reduce_values")) == 1
    assert {kind for _, _, kind in found} == {"swap_values"}
    mine = {(phase, kind): n for (unit, phase, kind), n in found.items() if unit == layer}
    assert mine == {("forward", "swap_values"): 4, ("backward", "swap_values"): 4}
    assert {unit for unit, _, _ in found} == {layer[:-1] + "0", layer}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("t5", 2), ("vit", 2), ("grouped", 4), ("llama", 4)])
def test_every_value_of_cut_sequences(name: str, ranks: int) -> None:
    check(name, Parallel(context=ranks))


BOTH = {"tensor": 2, "context": 2}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("llama", "model.layers.1"),
        pytest.param("gpt2", "transformer.h.1", marks=pytest.mark.slow),
    ],
)
def test_a_layer_of_both_sends_what_megatrons_and_ulysses_do(name: str, layer: str) -> None:
    """Two all-reduces each way over the tensor axis, and four all-to-alls over the context axis.

    The all-to-alls are of a part of the heads, and the all-reduces of a part of the sequence.
    """
    cut = check(name, Parallel(**BOTH))
    found = sent(cut)
    mine = {(phase, kind): n for (unit, phase, kind), n in found.items() if unit == layer}
    assert mine == {
        ("forward", "reduce_values"): 2, ("backward", "reduce_values"): 2,
        ("forward", "swap_values"): 4, ("backward", "swap_values"): 4,
    }  # fmt: skip
    batch_size, length, width = 2, 8, 32
    for node in cut.graph(JOINT).nodes:
        if info(node).unit == layer and node.target in (reduce_values, swap_values):
            assert node.args[1] == ("tensor" if node.target is reduce_values else "context")
            parts = 2 if node.target is reduce_values else 4
            assert value(node).numel() == batch_size * length * width // parts


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gpt2", {"sequence": True}),
        pytest.param("bert", {}, marks=pytest.mark.slow),
        pytest.param("llama", {"sequence": True}, marks=pytest.mark.slow),
        pytest.param("bert", {"sequence": True}, marks=pytest.mark.slow),
        pytest.param("grouped padded", {}, marks=pytest.mark.slow),
        pytest.param("t5", {}, marks=pytest.mark.slow),
        pytest.param("mixtral", {}, marks=pytest.mark.slow),
        ("mixtral", {"experts": True}),
        pytest.param("mixtral", {"experts": True, "sequence": True}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"experts": True, "attention": "ring"}, marks=pytest.mark.slow),
        pytest.param("mixture", {"placements": Patterns(EXPERTS)}, marks=pytest.mark.slow),
        pytest.param("vit", {}, marks=pytest.mark.slow),
        pytest.param("llama", {"attention": "ring"}, marks=pytest.mark.slow),
        pytest.param("gpt2 padded", {"attention": "ring"}, marks=pytest.mark.slow),
        pytest.param("llama", {"tensor": 4}, marks=pytest.mark.slow),
    ],
)
def test_every_value_of_layers_and_sequences(name: str, more: dict[str, Any]) -> None:
    check(name, Parallel(**BOTH | more))


RING = {"attention": "ring"}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("grouped", 2),
        pytest.param("gpt2", 4, marks=pytest.mark.slow),
        pytest.param("llama", 2, marks=pytest.mark.slow),
        pytest.param("bert", 2, marks=pytest.mark.slow),
        ("llama padded", 2),
        pytest.param("grouped padded", 4, marks=pytest.mark.slow),
        pytest.param("gpt2 padded", 2, marks=pytest.mark.slow),
        pytest.param("bert padded", 2, marks=pytest.mark.slow),
    ],
)
def test_a_layer_of_a_ring_moves_no_other_value(name: str, ranks: int) -> None:
    """Positions, rotary tables and labels are cut in the order in which ranks balance.

    Of a mask of padding each rank makes the rows of its own queries: it is whole nowhere.
    """
    cut = check(name, Parallel(context=ranks, **RING))
    assert sent(cut) == {("", "forward", "reduce_values"): 1}
    found = Counter(
        (info(n).unit, info(n).phase.value, str(n.target).split(".")[1])
        for n in cut.graph(JOINT).nodes
        if "attention" in str(n.target)
    )
    assert set(found.values()) == {1} and len(found) == 4  # two layers, forward and backward
    assert {op for *_, op in found} == {"ring_attention", "ring_attention_backward"}
    values = [value(n) for n in cut.graph(JOINT).nodes]
    squares = [v for v in values if isinstance(v, Tensor) and tuple(v.shape[-2:]) == (8, 8)]
    assert not any(v.dtype is torch.bool for v in squares), "a mask"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("t5", 2), ("vit", 2), ("llama", 4), ("dropout", 2)])
def test_every_value_of_a_ring(name: str, ranks: int) -> None:
    """T5 has a bias of positions, ViT no stream; attention of neither travels."""
    if name == "dropout":
        cut = placed(name, Parallel(context=ranks, **RING))[1]
        assert not any("ring" in str(n.target) for n in cut.graph(JOINT).nodes)
    else:
        check(name, Parallel(context=ranks, **RING))


class InGroups(nn.Module):
    """Three groups of hidden units that the next layer takes as one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).relu()).square().sum()


def test_parts_in_other_groups_are_no_all_to_all() -> None:
    """Of the part of one rank another one would get all or nothing."""
    torch.manual_seed(0)
    model, x = InGroups(), torch.randn(2, 4)
    program = zerofx.capture(model, (), {"x": x})
    chosen = {"fc1": "colwise/3", "fc2": "rowwise"}
    cut, compared = compare(model, program, {"x": x}, Parallel(tensor=2, placements=chosen))
    assert compared > 5 and {kind for *_, kind in sent(cut)} >= {"gather_values"}


class Attends(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.mix, self.norm = heads, nn.Linear(12, 36), nn.RMSNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.mix(self.norm(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Sums(nn.Module):
    """Has an operator without a rule between two products that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.renorm(self.fc1(x), 2, 0, 1.0)).sum()


def told_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [r for r in caplog.records if r.name == "zerofx" and r.levelname == "WARNING"]
    return [r.getMessage() for r in records]


@pytest.mark.parametrize("styles", ["cut", "whole"])
def test_an_operator_without_a_rule_is_told_with_its_line(
    styles: str, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = {"fc1": "colwise", "fc2": "rowwise"} if styles == "cut" else {"fc1": "whole"}
    program = zerofx.capture(Sums(), (torch.randn(2, 4),))
    plan = Plan(parallel={"tensor": 2, "placements": chosen}, kernels="aten")
    verify(run(program, Setting(plan, 2, hardware_for("cpu", None)), until="place"))
    line = Sums.forward.__code__.co_firstlineno + 1
    said = told_by(caplog)
    assert len(said) == (styles == "cut")
    if said:
        assert f"aten.renorm.default (test_place.py:{line})" in said[0]
        assert "inputs are gathered, and each of 2 ranks computes all of it" in said[0]


@pytest.mark.parametrize(("heads", "is_told"), [(3, True), (2, False)])
def test_heads_that_tensor_does_not_divide_are_told(
    heads: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    program = zerofx.capture(Attends(heads), (torch.randn(1, 8, 12),))
    plan = Plan(parallel={"tensor": 2, "placements": {"mix": "colwise/3"}}, kernels="aten")
    verify(run(program, Setting(plan, 2, hardware_for("cpu", None)), until="place"))
    said = [text for text in told_by(caplog) if "heads" in text]
    assert bool(said) is is_told
    if is_told:
        assert "test_place.py" in said[0]
        assert (
            "3 heads are not divided by Plan.parallel.tensor = 2: attention is gathered" in said[0]
        )


@pytest.mark.parametrize(
    ("heads", "length", "said"),
    [
        (2, 8, ""),
        (3, 8, "3 heads are not divided by Plan.parallel.context = 2: attention is gathered"),
        (2, 7, "a sequence of 7 positions is not cut over Plan.parallel.context = 2"),
    ],
)
def test_what_cannot_be_cut_runs_whole_and_is_told(
    heads: int, length: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a model that is given its sequences as values, and whose gradients of them come back."""
    x = torch.randn(1, length, 12, requires_grad=True)
    program = zerofx.capture(Attends(heads), (x,), differentiate="all")
    plan = Plan(parallel={"context": 2}, differentiate="all", kernels="aten")
    made = run(program, Setting(plan, 2, hardware_for("cpu", None)), until="place")
    verify(made)
    found = {kind: n for (_, phase, kind), n in sent(made).items() if phase == "forward"}
    told = [
        r.getMessage() for r in caplog.records if r.name == "zerofx" and r.levelname == "WARNING"
    ]
    assert len(told) == bool(said) and said in "".join(told)
    assert found == {
        "": {"swap_values": 4, "gather_values": 1}, "3": {"gather_values": 3}, "a": {},
    }[said[:1]]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "heads", "length", "said"),
    [
        ({}, 4, 8, ""),
        (
            {},
            2,
            8,
            "1 head left by Plan.parallel.tensor = 2 is not divided by Plan.parallel.context",
        ),
        ({}, 4, 7, "7 positions is not cut over Plan.parallel.context = 2, which does not"),
        ({"sequence": True}, 4, 6, "6 positions is not cut over Plan.parallel.context = 2 x tens"),
    ],
)
def test_what_two_axes_cannot_cut_is_told(
    more: dict[str, Any], heads: int, length: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(1, length, 12, requires_grad=True)
    program = zerofx.capture(Attends(heads), (x,), differentiate="all")
    parallel = BOTH | more | {"placements": {"mix": "colwise/3"}}
    plan = Plan(parallel=parallel, differentiate="all", kernels="aten")
    verify(run(program, Setting(plan, 4, hardware_for("cpu", None)), until="place"))
    told = told_by(caplog)
    assert len(told) == bool(said) and said in "".join(told)


@pytest.mark.parametrize(("length", "said"), [(8, ""), (6, "which twice does not divide it")])
def test_what_a_ring_cannot_cut_is_told(
    length: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(1, length, 12, requires_grad=True)
    program = zerofx.capture(Attends(3), (x,), differentiate="all")
    plan = Plan(parallel={"context": 2} | RING, differentiate="all", kernels="aten")
    made = run(program, Setting(plan, 2, hardware_for("cpu", None)), until="place")
    verify(made)
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said in "".join(told)
    has_ring = any("ring_attention" in str(n.target) for n in made.graph(JOINT).nodes)
    assert has_ring is (not said)


def rung(name: str = "grouped", world: int = 4, **plan: Any) -> Planned:
    fields = {"parallel": {"context": 2} | RING, "kernels": "aten", "stage": 3}
    return proved(name, fields | plan, world)


def test_a_ring_is_proved_priced_and_counted(tmp_path: Path) -> None:
    """A transfer is under way beside the block before the one that needs it."""
    program = rung()
    verify(program)
    assert program.layout.mesh.zigzag and "RING v" in str(program.schedule())
    kinds = traffic(program).kinds
    layers, batch_size, heads, local, width = 2, 2, 2, 4, 8
    numel = 2 * batch_size * heads * local * width  # of keys and values, which are unrepeated
    assert kinds["send"].calls == layers * 3
    assert kinds["send"].sent_bytes == layers * 3 * numel * 4
    assert zerofx.predict(program, hardware="dgx-h100").step_us > 0
    prices = Roofline.of(program.plan, hardware_for("cuda", "dgx-h100"), 4)
    steps = {t.name: t for t in tasks(program, prices) if t.name.startswith("forward")}
    ring = next(n for n in steps if " RING v" in n)
    blocks = [f"forward attention {ring.split()[-1]} block {k}" for k in (0, 1)]
    assert steps[ring].us > 0 and steps[blocks[0]].us > 0
    assert [steps[ring].index in steps[name].needs for name in blocks] == [False, True]
    program.emit(tmp_path)
    text = (tmp_path / "schedule.py").read_text()
    assert text.count("rt.ring_attention(") == text.count("rt.ring_attention_backward(") == layers
    verify(zerofx.load_program(tmp_path))


def changes(program: Planned) -> Iterator[tuple[str, Planned]]:
    """Yield programs in which one call of a ring is another one."""
    rings = [n.name for n in program.graph(JOINT).nodes if "ring_attention" in str(n.target)]
    for name in rings:
        for kind in ("axis", "ranks", "causal", "scale", "swap", "alone", "gone"):
            changed = program.clone()
            graph = changed.graph(JOINT)
            node = next(n for n in graph.nodes if n.name == name)
            *given, axis, ranks, causal, scale = node.args
            if kind == "axis":
                axis = "shard"
            elif kind == "ranks":
                ranks = 4
            elif kind == "causal":
                causal = not causal
            elif kind == "scale":
                scale = 0.5
            elif kind == "swap":
                at = len(given) - 2 if len(given) == 3 else 2
                given[at], given[at + 1] = given[at + 1], given[at]
            node.args = (*given, axis, ranks, causal, scale)
            if kind == "alone":  # each rank attends to its own keys
                backward = "backward" in str(node.target)
                node.target = zerofx.ops.attention_backward if backward else zerofx.ops.attention
                node.args = (*given, causal, scale)
            elif kind == "gone":  # the queries for what they find
                item = next(u for u in node.users if u.args[1] == 0)
                item.replace_all_uses_with(given[len(given) == 6])
            yield f"{kind} {name}", changed


def test_wrong_rings_are_refused() -> None:
    program = proved(
        "llama", {"parallel": {"context": 2} | RING, "kernels": "aten"}, 2, until="place"
    )
    verify(program)
    for what, mutant in changes(program):
        with pytest.raises(ProgramError):
            verify(mutant)
            pytest.fail(f"{what} is accepted")


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_cut_sequences_are_proved(name: str) -> None:
    """The whole pipeline, each pass proved: states are sharded over all four ranks."""
    program = proved(name, {"parallel": {"context": 2}, "kernels": "aten", "stage": 3}, 4)
    verify(program)
    mesh = program.layout.mesh
    assert mesh.sizes == (1, 1, 4, 1) and (mesh.context, mesh.num_data_ranks) == (2, 2)
    assert [mesh.position("context", rank) for rank in range(4)] == [0, 1, 0, 1]
    assert "A2A values" in str(program.schedule())
    sent = traffic(program).kinds
    assert sent["all_to_all"].calls == 16
    assert zerofx.predict(program, hardware="dgx-h100").step_us > 0
    whole = proved(name, {"kernels": "aten", "stage": 3}, 4)
    assert program.memory().peak_bytes < whole.memory().peak_bytes


def test_gradients_of_cut_sequences_are_summed_once() -> None:
    """A mean over data ranks, of sums over those that share a sequence; no other scale passes."""
    program = proved("gpt2", {"parallel": {"context": 2}, "kernels": "aten", "stage": 2}, 4)
    node = next(n for n in program.graph("backward").nodes if "reduce_scatter" in str(n.target))
    assert node.args[3] == 0.5
    node.args = (*node.args[:3], 0.25)
    with pytest.raises(ProgramError, match="The mean over 2 ranks"):
        verify(program)


def test_fewer_heads_of_keys_than_ranks() -> None:
    check("grouped", Parallel(tensor=4))


def proved(name: str, plan: dict[str, Any], world: int, until: str | None = None) -> Planned:
    setting = Setting(Plan(**plan), world, hardware_for("cpu", None))
    return run(captured(name)[1], setting, until=until)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sequence", [False, True])
def test_it_is_proved(name: str, sequence: bool) -> None:
    """The whole pipeline, each pass proved, over tensor 2 x data 2."""
    parallel = {"tensor": 2, "sequence": sequence}
    program = proved(name, {"parallel": parallel, "kernels": "aten", "stage": 3}, 4)
    verify(program)
    cut = [p for p in program.params.values() if p.part is not None]
    assert len(cut) >= 8 and program.layout.mesh.sizes == (1, 1, 2, 2)


def mutants(program: Planned) -> Iterator[tuple[str, Planned]]:
    """Yield programs in each of which one conversion is another one, or gone."""
    names = [n.name for n in program.graph(JOINT).nodes if n.target in CONVERSIONS]
    for name in names if len(names) < 9 else names[::3]:
        for kind in ("gone", "twice", "axis", "dim", "groups", "other"):
            changed = program.clone()
            graph = changed.graph(JOINT)
            node = next(n for n in graph.nodes if n.name == name)
            source, _, *more = node.args
            if kind == "gone":
                node.replace_all_uses_with(source)
                graph.erase_node(node)
            elif kind == "twice":
                with graph.inserting_after(node):
                    again = graph.node_copy(node, lambda n: n)
                again.meta = dict(node.meta)
                node.replace_all_uses_with(again)
                again.args = (node, *node.args[1:])
            elif kind == "axis":
                node.args = (source, "shard", *more)
            elif kind == "other" and node.target is not reduce_values:
                node.target = {part: gather_values, gather_values: part}.get(
                    node.target, node.target
                )
            elif more and kind == "dim":
                node.args = (source, node.args[1], (more[0] + 1) % value(node).dim(), *more[1:])
            elif more and kind == "groups":
                node.args = (source, node.args[1], more[0], more[1] + 1, *more[2:])
            else:
                continue
            if [n.args for n in graph.nodes] != [n.args for n in program.graph(JOINT).nodes] or (
                kind == "other"
            ):
                yield f"{kind} {name}", changed


@pytest.mark.parametrize(
    "parallel",
    [{"tensor": 2}, {"tensor": 2, "sequence": True}, {"context": 2}, {"context": 2} | RING],
)
def test_wrong_conversions_are_refused(parallel: dict[str, Any]) -> None:
    program = proved("llama", {"parallel": parallel, "kernels": "aten"}, 2, until="place")
    verify(program)
    tried = 0
    for what, mutant in mutants(program):
        same = str(mutant.graph(JOINT)) == str(program.graph(JOINT))
        if same:
            continue
        tried += 1
        with pytest.raises(ProgramError):
            verify(mutant)
            pytest.fail(f"{what} is accepted")
    assert tried > 10


def test_a_call_cannot_pass_for_a_copy_of_its_argument() -> None:
    program = proved("llama", {"parallel": {"tensor": 2}, "kernels": "aten"}, 2, until="place")
    node = next(n for n in program.graph(JOINT).nodes if n.target is torch.ops.aten.neg.default)
    set_info(node, placed=replace(info(node).placed, is_same=True))
    verify(program)  # what the note says of it counts for nothing
    node.target = torch.ops.aten.abs.default
    set_info(node, placed=replace(info(node).placed, target=node.target))
    with pytest.raises(ProgramError, match="does not compute what was captured"):
        verify(program)


def test_memory_and_time_are_told() -> None:
    plan = {"kernels": "aten", "stage": 3}
    whole = proved("llama", plan, 2)
    cut = proved("llama", plan | {"parallel": {"tensor": 2}}, 4)
    assert cut.memory().peak_bytes < whole.memory().peak_bytes
    sent = traffic(cut).kinds
    assert sent["all_reduce"].calls >= 9 and sent["all_gather"].calls > 0
    assert zerofx.predict(cut, hardware="dgx-h100").step_us > 0
    assert "AR values" in str(cut.schedule())


def test_dropout_is_drawn_alike_where_values_are_whole() -> None:
    program = captured("dropout")[1]
    setting = Setting(Plan(parallel={"tensor": 2}), 2, hardware_for("cpu", None))
    made = run(program, setting, until="place")
    drawn = [n for n in made.graph(JOINT).nodes if info(n).is_random]
    assert drawn and all(info(a).placed.gives == R for n in drawn for a in n.all_input_nodes)


# -- refusals -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"parallel": {"tensor": 0}}, "Plan.parallel.tensor"),
        ({"parallel": {"tensors": 2}}, "tensor"),
        ({"parallel": {"sequence": True}}, "Set tensor, or drop sequence"),
        ({"parallel": {"experts": True}}, "contradicts tensor = 1: zerofx divides experts"),
        ({"parallel": {"tensor": 2, "capacity": 1.0}}, "contradicts experts = False"),
        ({"parallel": {"tensor": 2, "experts": True, "capacity": 0}}, "numbers above 0"),
        ({"parallel": {"tensor": 2, "experts": True, "capacity": 1}}, "numerics = 'bitwise'"),
        (
            {"parallel": {"tensor": 2, "experts": True, "capacity": 1, "context": 2}},
            "contradicts context = 2",
        ),
        ({"parallel": {"tensor": 2, "placements": {"*": "columns"}}}, "'colwise/3' for groups"),
        ({"parallel": {"pipeline": 2}, "tiling": {"*": 2}}, "does not support tiling yet"),
        (
            {"parallel": {"pipeline": 2}, "offload": {"activations": "cpu"}},
            "does not support offload of activations yet",
        ),
        (
            {"parallel": {"pipeline": 2}, "offload": {"optimizer": "nvme", "path": "/nvme"}},
            "does not support offload to NVMe yet",
        ),
        (
            {
                "parallel": {"pipeline": 2, "schedule": "interleaved", "interleave": 2},
                "memory_budget": "1GiB",
            },
            "does not support schedule = 'interleaved' and memory_budget yet",
        ),
        (
            {
                "parallel": {"pipeline": 2, "schedule": "zero-bubble"},
                "offload": {"optimizer": "cpu"},
            },
            "does not support schedule = 'zero-bubble' and offload yet",
        ),
        (
            {"parallel": {"tensor": 2}, "sparse_gradients": True},
            "does not support sparse_gradients",
        ),
    ],
)
def test_plans_that_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan(**fields)


def test_a_world_that_does_not_divide() -> None:
    with pytest.raises(PlanError, match="tensor = 4 does not divide the world of 6 ranks"):
        proved("llama", {"parallel": {"tensor": 4}}, 6)


def test_one_process_is_told() -> None:
    with pytest.raises(PlanError, match=r"this is a single process. Launch"):
        zerofx.compile(llama(), {"parallel": {"tensor": 2}})


def test_layers_are_known_by_the_names_that_implementations_use() -> None:
    for name in ("gpt2", "bert", "t5", "vit"):
        styles = styles_of(MODELS[name]())
        assert {s.partition("/")[0] for s in styles.values()} == {"colwise", "rowwise"}, name
    assert styles_of(MODELS["llama"]())["model.layers.0.self_attn.o_proj"] == "rowwise"
    assert not styles_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_the_plan_says_what_is_cut() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    placements = {"0": "colwise", "2": "rowwise"}
    plan = Plan(parallel={"tensor": 2, "placements": placements}, differentiate="all")
    program = zerofx.capture(model, (torch.randn(4, 8),), differentiate="all")
    made = run(program, Setting(plan, 2, hardware_for("cpu", None)))
    cuts = {n: p.part.cut if p.part else None for n, p in made.params.items()}
    assert cuts == {
        "0.weight": Cut(0), "0.bias": Cut(0), "2.weight": Cut(1), "2.bias": None,
    }  # fmt: skip
    assert plan == Plan.from_dict(plan.to_dict()) and "placements" in plan.to_yaml()
