"""The pipeline: its order is declared, checked whole, and recorded pass by pass."""

from __future__ import annotations

import pytest
from oracle_cases import Choice, captured, stages

from zerofx.errors import PlanError
from zerofx.ir.program import Fact, Planned
from zerofx.passes.base import Pass, Report
from zerofx.passes.order import build, check_order
from zerofx.passes.pipeline import run, run_pass

PASSES = build(Choice(3).setting()).passes
NAMES = [p.name for p in PASSES]


def test_the_order_in_reading_form() -> None:
    assert NAMES == [
        "cast",
        "fuse",
        "open-products",
        "open-losses",
        "open-attention",
        "open-experts",
        "tile",
        "merge-tied",
        "drop-copies",
        "place",
        "cut-stages",
        "split",
        "defer-weights",
        "overlap-values",
        "cut-regions",
        "offload-activations",
        "spill-activations",
        "assign-buckets",
        "shard-parameters",
        "join-sums",
        "shard-gradients",
        "quantize",
        "secondary-shards",
        "hierarchical",
        "sync-buffers",
        "release",
        "prefetch-gathers",
        "sink-waits",
        "offload-shards",
        "update-in-backward",
        "hand-over",
        "keep-gathered",
        "assign-slots",
    ]


@pytest.mark.parametrize("made", PASSES, ids=NAMES)
def test_a_pass_alone_misses_what_it_requires(made: Pass) -> None:
    missing = made.requires - {Fact.CAPTURED}
    if not missing:
        check_order([made])
        return
    with pytest.raises(PlanError, match=f"{made.name} runs before what it needs: ") as caught:
        check_order([made])
    for fact in missing:
        assert fact.name.lower().replace("_", "-") in str(caught.value)


@pytest.mark.parametrize("made", PASSES, ids=NAMES)
def test_a_pass_too_late_meets_what_it_conflicts_with(made: Pass) -> None:
    if made.conflicts:
        with pytest.raises(PlanError, match=f"{made.name} must run before: "):
            check_order([*PASSES, made])


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("split", "merge-tied", "split runs before what it needs: tied-merged"),
        ("cut-regions", "split", "cut-regions runs before what it needs: split"),
        ("shard-gradients", "shard-parameters", "needs: params-sharded"),
        ("prefetch-gathers", "release", "prefetch-gathers runs before what it needs: released"),
        ("assign-slots", "prefetch-gathers", "prefetch-gathers must run before: slots-assigned"),
        ("assign-slots", "sink-waits", "sink-waits must run before: slots-assigned"),
        ("assign-slots", "keep-gathered", "keep-gathered must run before: slots-assigned"),
        ("release", "shard-parameters", "release runs before what it needs: params-sharded"),
    ],
)
def test_exchanged_passes_are_refused(first: str, second: str, message: str) -> None:
    order = [p for p in PASSES if p.name != first]
    order.insert([p.name for p in order].index(second), PASSES[NAMES.index(first)])
    with pytest.raises(PlanError, match=message):
        check_order(order)


def test_specs_name_every_option() -> None:
    specs = {p.name: p.spec() for p in PASSES}
    assert specs["release"] == "release"
    assert specs["prefetch-gathers"] == "prefetch-gathers{distance=1}"
    assert specs["keep-gathered"] == "keep-gathered{budget_bytes=none}"
    assert specs["sync-buffers"] == "sync-buffers{enabled=true}"


def test_which_passes_change_numbers() -> None:
    changing = ["cast", "fuse", "open-products", "open-losses"]
    changing += ["open-attention", "open-experts", "tile", "place", "quantize", "hierarchical"]
    changing += ["sync-buffers"]
    assert [p.name for p in PASSES if not p.keeps_bits] == changing


class Lies(Pass):
    """Changes a graph and says it did not."""

    name = "lies"

    def run(self, program: Planned) -> Report:
        graph = program.graph("joint")
        node = next(n for n in graph.nodes if n.op == "call_function")
        with graph.inserting_after(node):
            graph.node_copy(node)
        return Report(False)


def test_a_pass_that_says_it_changed_nothing_has_changed_nothing() -> None:
    with pytest.raises(AssertionError, match="lies says it changed nothing"):
        run_pass(captured("chain").planned(), Lies())


def test_the_runner_leaves_the_given_program_alone() -> None:
    program = captured("chain").planned()
    after = run_pass(program, PASSES[NAMES.index("merge-tied")])
    assert after is not program
    assert after.graph("joint") is not program.graph("joint")
    assert Fact.TIED_MERGED in after.facts and Fact.TIED_MERGED not in program.facts


def test_the_history_has_one_entry_a_pass() -> None:
    program = run(captured("chain"), Choice(3).setting())
    assert [e.pass_spec.split("{")[0] for e in program.history] == ["capture", *NAMES]
    assert all(e.num_nodes > 0 and e.peak_bytes for e in program.history)


def test_running_up_to_a_pass() -> None:
    program = run(captured("chain"), Choice(3).setting(), until="split")
    assert set(program.graphs) == {"forward", "backward"}
    with pytest.raises(PlanError, match=r"no pass is named 'splat'. Did you mean 'split'\?"):
        run(captured("chain"), Choice(3).setting(), until="splat")


def test_two_runs_give_the_same_text() -> None:
    first, second = (stages(captured("gpt"), Choice(3))[-1][1] for _ in range(2))
    for name in first.graphs:
        assert str(first.graph(name)) == str(second.graph(name))
