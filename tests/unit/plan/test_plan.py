"""Plans: one stored form, exact round trips, and errors that name the way out."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofx.errors import PlanError
from zerofx.plan.fields import Patterns, covers, write_yaml
from zerofx.plan.parts import Offload, Precision
from zerofx.plan.plan import Plan, as_plan
from zerofx.plan.sizes import exact_bytes, format_bytes, parse_bytes
from zerofx.tools.cli.programs import with_fields

# What YAML 1.1 or 1.2 takes for something else than text, or nearly so.
WORDS = [
    "true", "True", "true_layer", "trueish", "falsework.*", "FALSE", "on", "off", "yes", "no", "y",
    "null", "~", "nullable", "0", "7", "010", "0x10", "1e3", "1_000", "+1", "1.5", ".5", ".inf",
    "nan", "1:30", "2024-01-01", "2024-01-01 10:00:00", "=", "<<", "-", "- a", "*", "*.mlp", "?",
    "!x", "&a", "%a", "@a", "a: b", "a #b", "[0]", "{}", "'", '"', "a\nb", "a\x0cb", "\x85", " a ",
]  # fmt: skip
NAMES = st.sampled_from(["blocks.*", "wte", "head", "blocks.0.mlp", *WORDS])
BYTES = st.one_of(st.integers(1, 2**45), st.sampled_from(["40GiB", "1.5 MiB", "100KB"]))

# Any combination of these is free of contradictions, but for what `_agreeing` leaves out.
FREE: dict[str, st.SearchStrategy[Any]] = {
    "stage": st.integers(1, 3),
    "precision": st.sampled_from(
        [
            "fp32",
            "bf16",
            "fp16",
            {"compute": "bf16", "reduce": "bf16"},
            Precision(compute="fp16", loss_scale=64),
        ]
    ),
    "memory_budget": BYTES,
    "activations": st.one_of(
        st.sampled_from(["keep", "recompute", 0, 1]),
        st.floats(0, 1),
        st.dictionaries(NAMES, st.sampled_from(["keep", "recompute"]), min_size=1),
    ),
    "tiling": st.one_of(st.just("off"), st.dictionaries(NAMES, st.integers(1, 9), min_size=1)),
    "offload": st.sampled_from(
        [None, "none", {"optimizer": "cpu", "device_fraction": 0.5}, Offload(activations="cpu")]
    ),
    "prefetch": st.one_of(st.just("auto"), st.integers(0, 9)),
    "persist_below": st.one_of(st.none(), st.just(0), BYTES),
    "bucket_bytes": st.one_of(st.none(), BYTES),
    "units": st.one_of(st.just("auto"), NAMES, st.lists(NAMES, min_size=1)),
    "shard_axis_size": st.one_of(st.none(), st.integers(1, 64)),
    "differentiate": st.sampled_from(["loss", "all"]),
    "update": st.sampled_from(["step", "in-backward"]),
    "buffers": st.sampled_from(["rank0", "local"]),
    "numerics": st.sampled_from(["bitwise", "fast"]),
    "kernels": st.sampled_from(["inductor", "auto", "aten"]),
    "max_programs": st.integers(1, 99),
    "sparse_gradients": st.booleans(),
    "debug": st.booleans(),
}


def _agreeing(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out updates in backward where something needs whole gradients: a scale, or tiles."""
    is_late = "fp16" in str(fields.get("precision")) or fields.get("tiling", "off") != "off"
    return {k: v for k, v in fields.items() if not (k == "update" and is_late)}


@given(st.fixed_dictionaries({}, optional=FREE).map(_agreeing))
def test_a_plan_comes_back_from_every_form(fields: dict[str, Any]) -> None:
    plan = Plan(**fields)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert Plan.from_json(plan.to_json()) == plan
    assert eval(repr(plan)) == plan
    assert hash(copy.deepcopy(plan)) == hash(pickle.loads(pickle.dumps(plan))) == hash(plan)


def test_values_are_stored_in_one_form() -> None:
    assert Plan(memory_budget="40GiB").memory_budget == 40 * 2**30
    assert Plan(precision="bf16").precision == Precision(compute="bf16")
    assert Plan(offload={"optimizer": "cpu"}) == Plan(offload=Offload(optimizer="cpu"))
    assert Plan(units="blocks.*").units == ("blocks.*",)
    assert Plan(activations=1).activations == 1.0


def test_defaults_are_the_contract() -> None:
    assert Plan().to_dict() == {
        "stage": 3,
        "precision": "fp32",
        "memory_budget": None,
        "host_budget": None,
        "activations": "keep",
        "tiling": "off",
        "offload": "none",
        "prefetch": "auto",
        "persist_below": None,
        "bucket_bytes": None,
        "units": "auto",
        "ignored_params": [],
        "shard_axis_size": None,
        "secondary_shard_size": None,
        "hierarchical_size": None,
        "parallel": "none",
        "differentiate": "loss",
        "outputs": "all",
        "update": "step",
        "sparse_gradients": False,
        "quantized_weights": False,
        "quantized_gradients": False,
        "buffers": "rank0",
        "numerics": "bitwise",
        "kernels": "auto",
        "cuda_graph": False,
        "max_programs": 16,
        "dynamic": "auto",
        "islands": "auto",
        "debug": False,
    }
    assert repr(Plan()) == "Plan(stage=3)"


def test_the_typed_signature_lists_every_field() -> None:
    source = inspect.getsource(Plan)
    stub = source[source.index("def __init__(") : source.index(") -> None: ...")]
    declared = [line.split(":")[0].strip() for line in stub.splitlines() if "= ...," in line]
    assert declared == [f.name for f in dataclasses.fields(Plan)]
    assert list(inspect.signature(Plan).parameters) == declared


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stge": 3}, "unknown plan field 'stge'. Did you mean 'stage'?"),
    ({"zzz": 3}, "unknown plan field 'zzz'. Known are stage, precision"),
    ({"stage": 4}, "Plan.stage = 4: allowed are 0, 1, 2, 3"),
    ({"stage": True}, "Plan.stage = True: allowed are 0, 1, 2, 3"),
    ({"stage": "3"}, "Plan.stage = '3'"),
    ({"precision": "fp8"}, "Plan.precision = 'fp8': allowed are 'fp32', 'bf16', 'fp16'"),
    ({"precision": {"compte": "bf16"}}, "Did you mean 'compute'?"),
    ({"precision": {"compute": "bf16", "loss_scale": 2}}, "only fp16 underflows"),
    ({"precision": {"compute": "bf16", "master": "fp16"}}, "contradicts compute = 'bf16'"),
    ({"memory_budget": "40G"}, "unknown unit 'G'. Allowed are B, KiB"),
    ({"memory_budget": -1}, "Plan.memory_budget = -1 is negative"),
    ({"memory_budget": 0}, "allowed are sizes from 1 B"),
    ({"memory_budget": 1.5}, "Plan.memory_budget = 1.5 is not a size"),
    ({"activations": "recompte"}, "Did you mean 'recompute'?"),
    ({"activations": 1.5}, "allowed are numbers from 0 to 1"),
    ({"activations": None}, "a fraction from 0 to 1, or {name pattern: choice}"),
    ({"activations": {"h.*": "drop"}}, "Plan.activations['h.*'] = 'drop'"),
    ({"activations": {}}, "non-empty mapping"),
    ({"activations": "auto"}, "Set memory_budget"),
    ({"tiling": {"h.*": 0}}, "Plan.tiling['h.*'] = 0: allowed are whole numbers from 1"),
    ({"offload": {"optimiser": "cpu"}}, "Did you mean 'optimizer'?"),
    ({"offload": "cpu"}, 'for example {"optimizer": "cpu"}'),
    ({"offload": {"optimizer": "nvme"}}, "tier 'nvme' needs a path"),
    ({"offload": {"optimizer": "cpu", "path": "/x"}}, "only tier 'nvme' needs a path"),
    ({"offload": {"parameters": "cpu", "delayed": True}}, "applies to the offloaded optimizer"),
    ({"stage": 2, "offload": {"parameters": "cpu"}}, "contradicts stage = 2"),
    (
        {
            "activations": "auto",
            "memory_budget": "1GiB",
            "offload": {"activations": "nvme", "path": "/x"},
        },
        "Plan.activations = 'auto' contradicts offload.activations = 'nvme'",
    ),
    ({"stage": 0, "offload": {"optimizer": "cpu"}}, "contradicts stage = 0"),
    ({"offload": {"optimizer": "cpu", "delayed": True}}, "contradicts update = 'step'"),
    ({"stage": 0, "shard_axis_size": 2}, "contradicts stage = 0"),
    ({"stage": 2, "secondary_shard_size": 2}, "needs stage = 3"),
    ({"stage": 0, "hierarchical_size": 2}, "contradicts stage = 0"),
    ({"secondary_shard_size": 2, "hierarchical_size": 4}, "both are the ranks per node"),
    ({"secondary_shard_size": 1}, "allowed are whole numbers from 2"),
    ({"host_budget": "1GiB"}, "nothing is offloaded"),
    ({"prefetch": -1}, "allowed are whole numbers from 0. 'auto' is allowed too."),
    ({"units": []}, "non-empty list of module name patterns"),
    ({"units": ["a", ""]}, "non-empty string"),
    ({"shard_axis_size": 0}, "allowed are whole numbers from 1"),
    ({"outputs": "loss", "differentiate": "all"}, "contradicts differentiate = 'all'"),
    ({"cuda_graph": True, "debug": True}, "contradicts debug = True"),
    ({"dynamic": "on"}, "Plan.dynamic = 'on': allowed are 'auto', 'off'"),
    ({"dynamic": {"ids": 512}}, "are dimensions of arguments, as in {'ids.shape[1]': 512}"),
    ({"dynamic": {"ids.shape[1]": 1}}, "allowed are whole numbers from 2"),
    ({"cuda_graph": True, "precision": "fp16"}, "a factor on the host"),
    ({"cuda_graph": True, "activations": {"h.*": "offload"}}, "contradicts offloaded activations"),
    ({"cuda_graph": True, "offload": {"activations": "cpu"}}, "contradicts offloaded activations"),
    ({"cuda_graph": True, "update": "in-backward"}, "contradicts update = 'in-backward'"),
    ({"cuda_graph": True, "offload": {"optimizer": "cpu"}}, "contradicts offloaded parameters and"),
    (
        {"cuda_graph": True, "offload": {"parameters": "cpu"}},
        "contradicts offloaded parameters and",
    ),
    ({"max_programs": 0}, "Plan.max_programs = 0: allowed are whole numbers from 1"),
    ({"debug": 1}, "Plan.debug = 1: allowed are False, True"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[str(f) for f, _ in WRONG])
def test_wrong_plans_say_what_and_the_way_out(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan(**fields)
    assert message in str(error.value)
    with pytest.raises(PlanError):
        Plan.from_dict(fields)


def test_positional_fields_are_refused() -> None:
    with pytest.raises(PlanError, match=r"by name. Write Plan\(stage=3\)"):
        Plan(3)  # type: ignore[misc]


def test_axis_sizes() -> None:
    assert Plan(stage=0).axis_sizes(8) == (1, 8)
    assert Plan(stage=3).axis_sizes(8) == (8, 1)
    assert Plan(stage=2, shard_axis_size=4).axis_sizes(8) == (4, 2)
    with pytest.raises(PlanError, match="shard_axis_size = 3 does not divide the world of 8"):
        Plan(shard_axis_size=3).axis_sizes(8)
    nodes = Plan(secondary_shard_size=4)
    assert [nodes.node_size(ranks) for ranks in (1, 2, 4, 8, 16)] == [1, 1, 1, 4, 4]
    with pytest.raises(PlanError, match="secondary_shard_size = 4 does not divide the 6 ranks"):
        nodes.axis_sizes(6)
    with pytest.raises(PlanError, match="secondary_shard_size = 4 does not divide the 6 ranks"):
        Plan(secondary_shard_size=4, shard_axis_size=6).axis_sizes(12)
    with pytest.raises(PlanError, match="hierarchical_size = 4 does not divide the 6 ranks"):
        Plan(hierarchical_size=4).axis_sizes(6)
    # of the 4 ranks of a node, 2 share each layer, and 2 share buckets
    cut = Plan(secondary_shard_size=4, parallel={"tensor": 2})
    assert [cut.node_size(ranks) for ranks in (1, 2, 4, 6)] == [1, 1, 2, 2]
    with pytest.raises(PlanError, match="size = 4 does not divide the 6 ranks that share buckets"):
        cut.node_size(3)
    with pytest.raises(PlanError, match=r"hierarchical_size = 3 is no multiple of .*tensor = 2"):
        Plan(hierarchical_size=3, parallel={"tensor": 2}).node_size(4)
    with pytest.raises(PlanError, match="hierarchical_size = 8 has no effect"):
        Plan(numerics="fast", quantized_weights=True, quantized_gradients=True, hierarchical_size=8)


def test_as_plan_takes_every_form(tmp_path: Path) -> None:
    plan = Plan(stage=2, prefetch=1)
    (tmp_path / "p.yaml").write_text(plan.to_yaml())
    (tmp_path / "p.json").write_text(plan.to_json())
    assert as_plan(None) == Plan()
    forms = [plan, plan.to_dict(), tmp_path / "p.yaml", str(tmp_path / "p.json")]
    assert [as_plan(form) for form in forms] == [plan] * 4
    with pytest.raises(PlanError, match=r"plan is of type int\. Give a Plan, a dict"):
        as_plan(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.yaml", None, "No such file"),
        ("p.txt", "stage: 3", "must end in .yaml, .yml or .json"),
        ("p.yaml", "stage: [", "is not YAML"),
        ("p.json", "{", "is not JSON"),
        ("p.yaml", "- 3", "holds list, not a mapping"),
        ("p.yaml", "stages: 3", "Did you mean 'stage'?"),
        ("p.yaml", "3: 3", "unknown plan field '3'"),
    ],
)
def test_bad_plan_files_are_named(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(PlanError) as error:
        as_plan(tmp_path / name)
    assert message in str(error.value)


def test_yaml_words_stay_words() -> None:
    plan = Plan.from_yaml("tiling: off\ndebug: true\noffload: none\nmemory_budget: 1 GiB\n")
    assert (plan.tiling, plan.debug, plan.memory_budget) == ("off", True, 2**30)
    plan = Plan.from_yaml("units: [true_layer, falsework.*, off]\ntiling: {true: 2, 0: 3, on: 4}\n")
    assert plan.units == ("true_layer", "falsework.*", "off")
    assert plan.tiling == Patterns({"true": 2, "0": 3, "on": 4})


@settings(max_examples=60)
@given(st.one_of(st.sampled_from(WORDS), st.text(min_size=1)))
def test_any_name_is_read_back_from_files_and_command_lines(name: str) -> None:
    plan = Plan(units=(name, "x"), activations={name: "recompute"})
    assert Plan.from_yaml(plan.to_yaml()) == Plan.from_json(plan.to_json()) == plan
    given = plan.to_dict()
    fields = [f"{k}={write_yaml(given[k], is_flow=True)}" for k in ("units", "activations")]
    assert with_fields(Plan(), "--set", fields) == plan


def test_command_lines_read_values_as_files_do() -> None:
    plan = with_fields(Plan(tiling={"a": 2}), "--set", ["tiling=off", "units=true_layer"])
    assert (plan.tiling, plan.units) == ("off", ("true_layer",))
    for said, message in (
        ("units=[0]", "quote it: '0'"),
        ("units=[", "--set units=[ is not YAML"),
        ("activations={a: keep, a: recompute}", "'a' is given twice"),
    ):
        with pytest.raises(PlanError, match=re.escape(message)):
            with_fields(Plan(), "--set", [said])
    with pytest.raises(PlanError, match="'stage' is given twice"):
        Plan.from_json('{"stage": 1, "stage": 2}')


def test_patterns_match_in_order_and_stay_within_a_component() -> None:
    choices = Patterns({"blocks.0": "keep", "blocks.*": "recompute"})
    assert choices.match("blocks.0.mlp.fc1") == "keep"
    assert choices.match("blocks.11") == "recompute"
    assert choices.match("head") is None
    assert not covers("*.mlp", "blocks.3.mlp")
    assert covers("blocks.?.mlp", "blocks.3.mlp.fc1")
    assert Patterns({"a": 1, "b": 2}) != Patterns({"b": 2, "a": 1})


@given(st.integers(0, 2**60))
def test_exact_sizes_come_back(num_bytes: int) -> None:
    assert parse_bytes(exact_bytes(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB"), (96 * 2**20, "96.0 MiB"), (-2048, "-2.0 KiB")],
)
def test_sizes_are_shown_in_binary_units(num_bytes: int, shown: str) -> None:
    assert format_bytes(num_bytes) == shown
