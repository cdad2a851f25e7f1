"""Search over tensor, sequence, context and pipeline: figures, pruning, reasons, and training."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import zerofx
from zerofx.analysis.time.forecast import available_bytes
from zerofx.hardware import load_hardware
from zerofx.plan.plan import Plan
from zerofx.tools.cli.app import app
from zerofx.tools.predict import predict
from zerofx.tools.search.bounds import Bounds
from zerofx.tools.search.engine import Search
from zerofx.tools.search.family import ModelFamily
from zerofx.tools.search.outcome import outcome
from zerofx.tools.search.space import Choice, Space
from zerofx.tools.targets import Target

HARDWARE = load_hardware("dgx-h100")
# Fields that stay as they are where a test need not try them all.
PLAIN: dict[str, Any] = {"offload": "none", "tiling": "off", "bucket_bytes": None} | {
    "update": "step", "prefetch": "auto", "kernels": "aten", "shard_axis_size": None,
}  # fmt: skip


def llama(layers: int, batch: int = 1, seq: int = 256, **config: Any) -> Target:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1000}
    sizes["num_attention_heads"] = 8
    made = LlamaConfig(
        **(sizes | config), num_hidden_layers=layers, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(made).train()
        ids = torch.zeros(batch, seq, dtype=torch.long)
    return Target("llama", model, (), {"input_ids": ids, "labels": ids})


PIPELINES: list[tuple[int, dict[str, Any]]] = [
    (1, {"pipeline": 2, "micro_batches": 4}),
    (1, {"pipeline": 2, "micro_batches": 4, "shared": ["model.embed_tokens.weight"]}),
    (2, {"pipeline": 2, "tensor": 2, "sequence": True, "micro_batches": 4}),
    (0, {"pipeline": 4, "micro_batches": 8}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "parallel"), PIPELINES, ids=str)
def test_a_pipeline_priced_from_excerpts_is_that_of_predict(
    stage: int, parallel: dict[str, Any]
) -> None:
    """Few layers of one rank of each kind give the step, and the peak, of all stages of 23."""
    target, world = llama(23), 8
    plan = Plan(stage=stage, kernels="aten", precision="bf16", parallel=parallel)
    family = ModelFamily(plan, target=target)
    found = outcome(Choice(plan, 1, parallel["micro_batches"], False), family, HARDWARE, world)
    expected = predict(target, plan, hardware=HARDWARE, world_size=world)
    assert found.step_us == pytest.approx(expected.step_us, rel=1e-3)
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=1e-2)
    assert found.samples_per_s == pytest.approx(expected.forecast.samples_per_s.middle, rel=1e-3)
    lengths = {length for length, _, _ in family._programs}
    assert parallel["pipeline"] > 2 or max(lengths) < 23
    bounds = Bounds(family, HARDWARE, world, Choice(plan, 1, 1, False))
    for bound in (bounds.rough(found.choice), bounds.closer(found.choice), bounds.of(found.choice)):
        assert 0 < bound.peak_bytes <= found.peak_bytes
        assert 0 < bound.step_us <= found.step_us * (1 + 1e-6)


def test_the_whole_model_is_priced_where_it_has_few_layers() -> None:
    parallel = {"pipeline": 2, "schedule": "interleaved", "interleave": 2, "micro_batches": 4}
    plan = Plan(stage=1, kernels="aten", precision="bf16", parallel=parallel)
    target = llama(4)
    family = ModelFamily(plan, target=target)
    found = outcome(Choice(plan, 1, 4, False), family, HARDWARE, 4)
    expected = predict(target, plan, hardware=HARDWARE, world_size=4)
    assert found.step_us == pytest.approx(expected.step_us, rel=1e-6)
    assert found.peak_bytes == expected.peak_bytes


def searched(world: int, samples: int, **changed: Any) -> tuple[Search, Space]:
    plan = Plan(kernels="aten", precision="bf16")
    family = ModelFamily(plan, target=llama(2))
    settled = frozenset({*PLAIN, "precision", *changed})
    base = Plan.from_dict(plan.to_dict() | changed)
    space = Space(
        HARDWARE, world, samples, base, settled, (), "/nvme", most_stages=family.units,
        has_sequences=True,
    )  # fmt: skip
    return Search(family, space, Bounds(family, HARDWARE, world, space.plainest)), space


@pytest.mark.slow
def test_pruning_over_all_axes_finds_the_winner_of_pricing_every_plan() -> None:
    search, space = searched(4, 4, activations="keep")
    choices = list(space.choices())
    assert {tuple(c.plan.parallel.axes) for c in choices} >= {
        (), ("tensor",), ("context",), ("pipeline",), ("pipeline", "tensor"),
    }  # fmt: skip
    found = search.run()
    assert found.counts.priced < len(choices)
    every = [o for c in choices if (o := search.price(c)) is not None and o.fits]
    fastest = min(o.step_us for o in every)
    assert fastest * 1.01 >= found.best.step_us or fastest >= (found.least_left_us or 0) > 0
    for each in every:  # each bound is below what it bounds
        bound = search.bounds.rough(each.choice)
        assert bound.step_us <= each.step_us * (1 + 1e-6), each.choice.words()
        assert bound.peak_bytes <= each.peak_bytes, each.choice.words()


SHARED: list[tuple[int, Any, dict[str, Any]]] = [
    (1, "recompute", {"pipeline": 2}),
    (1, "recompute", {"pipeline": 2, "schedule": "gpipe"}),
    (2, "keep", {"pipeline": 2}),
    (2, "keep", {"pipeline": 2, "schedule": "zero-bubble"}),
    (1, "keep", {}),
    (3, "keep", {}),
]


def test_plans_that_share_programs_have_the_figures_of_each_by_itself() -> None:
    """One family prices all of them, from the same captured, placed and cut programs."""
    base, target = Plan(kernels="aten", precision="bf16", outputs="loss"), llama(2)
    shared = ModelFamily(base, target=target)
    bounds = Bounds(shared, HARDWARE, 2, Choice(base, 1, 1, False))
    for stage, activations, axes in SHARED:
        parallel = axes | ({"micro_batches": 4} if axes else {})
        fields = {"stage": stage, "activations": activations, "parallel": parallel or "none"}
        plan = Plan.from_dict(base.to_dict() | fields)
        choice = Choice(plan, 1, 4, False)
        bound = bounds.of(choice)
        found = outcome(choice, shared, HARDWARE, 2)
        alone = outcome(choice, ModelFamily(base, target=target), HARDWARE, 2)
        assert found.figures == alone.figures, choice.words()
        assert 0 < bound.step_us <= found.step_us * (1 + 1e-6), choice.words()
        assert 0 < bound.peak_bytes <= found.peak_bytes, choice.words()
    assert len(shared._placed) == 1  # without tensor and context, all begin with the same
    assert len(shared._stages) == 2  # of two ranks, for three schedules


class WithoutLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_every_schedule_that_a_model_can_have_is_proposed() -> None:
    _, space = searched(4, 8, activations="keep")
    pipelines = {(p.pipeline, p.schedule) for p in space.parallels() if p.pipeline > 1}
    every = {"1f1b", "gpipe", "zero-bubble", "interleaved"}
    assert {schedule for size, schedule in pipelines if size == 2} == every
    without = dataclasses.replace(space, has_loss=False)
    own = [p for p in without.parallels() if p.pipeline > 1]
    assert {p.schedule for p in own} == {"gpipe"}
    rows = {samples for p in own for samples, _ in without.batches(p)}
    assert rows and min(rows) >= 2  # of one sample the results cannot be told from the batch's


def test_a_model_without_a_loss_gets_a_pipeline_that_runs_all_forwards_first() -> None:
    with torch.device("meta"):
        target = Target("linears", WithoutLoss(), (torch.zeros(2, 8),), {})
    view = zerofx.search(
        target, hardware=HARDWARE, world_size=2, global_samples=8,
        plan=PLAIN | {"activations": "keep", "stage": 1},
    )  # fmt: skip
    pipelines = [o for o in view.found.priced if o.choice.plan.parallel.pipeline > 1]
    assert pipelines and {o.choice.plan.parallel.schedule for o in pipelines} == {"gpipe"}
    assert any(v.name == "pipeline" and "gpipe" in v.said for v in view.found.verdicts)


@pytest.mark.slow
def test_memory_that_shrinks_with_more_layers_is_priced_from_more_of_them() -> None:
    """Six layers of 70 B need more slots than eight; for 80 that would be -22.7 GiB."""
    target = llama(
        80, seq=4096, hidden_size=8192, intermediate_size=28672, vocab_size=128256,
        num_attention_heads=64,
    )  # fmt: skip
    offload = {"parameters": "cpu", "optimizer": "cpu"}
    plan = Plan(
        stage=3, precision="bf16", kernels="aten", outputs="loss", activations="recompute",
        parallel={"context": 2}, offload=offload,
    )  # fmt: skip
    family = ModelFamily(plan, target=target)
    found = outcome(Choice(plan, 4, 4, False), family, HARDWARE, 64)
    assert family.longer is not None and family.longer.lengths > family.lengths
    assert found.peak_bytes > 2**35


def test_a_batch_smaller_than_the_world_shares_samples() -> None:
    view = zerofx.search(
        llama(2), hardware=HARDWARE, world_size=4, global_samples=2, plan=PLAIN | {"stage": 1}
    )
    parallel = view.plan.parallel
    assert parallel.num_shared >= 2
    assert "ZeRO alone is not possible: the global batch cannot be divided" in str(view)
    found = predict(llama(2), view.plan, hardware=HARDWARE, world_size=4)
    if parallel.pipeline == 1 and view.best.choice.accumulation == 1:
        assert found.peak_bytes == view.best.peak_bytes
    assert Plan.from_yaml(view.to_yaml()) == view.plan


def test_every_family_has_a_verdict_with_figures() -> None:
    view = zerofx.search(
        llama(2), hardware=HARDWARE, world_size=4, plan=PLAIN | {"activations": "keep"}
    )
    names = [v.name for v in view.found.verdicts]
    assert names[0] == "ZeRO alone" and {"tensor", "pipeline", "context"} <= set(names)
    chosen = [v for v in view.found.verdicts if v.why == "chosen"]
    assert len(chosen) == 1 and chosen[0].best is view.best
    for verdict in view.found.verdicts:
        if verdict.why != "chosen":
            assert any(unit in verdict.said for unit in (" us", " ms", " GiB")), verdict.said
            assert verdict.said in str(view)
    assert json.loads(json.dumps(view.to_dict()))["families"][0]["axes"] == "ZeRO alone"


def test_a_pipeline_that_does_not_fit_gets_a_suggestion_that_does() -> None:
    plan = {"stage": 1, "kernels": "aten", "parallel": {"pipeline": 2, "micro_batches": 4}}
    fits = predict(llama(4), plan, hardware=HARDWARE, world_size=4)
    assert fits.way_out is None
    reserved = HARDWARE.device_memory_bytes - available_bytes(HARDWARE)
    small = dataclasses.replace(
        HARDWARE, device_memory_bytes=reserved + round(0.9 * fits.peak_bytes)
    )
    view = predict(llama(4), plan, hardware=small, world_size=4)
    assert not view.fits and "the nearest plan that fits changes" in str(view)
    assert view.way_out is not None and view.way_out.plan is not None
    again = predict(llama(4), view.way_out.plan, hardware=small, world_size=4)
    assert again.fits


def test_view_shows_each_pipeline_stage(tmp_path: Path) -> None:
    model = "zerofx.tools.demo.targets:byte_gpt"
    given = ["--set", "parallel={pipeline: 2, micro_batches: 2}", "--world", "2"]
    options = ["view", model, *given, "--hardware", "dgx-h100", "--set", "kernels=aten"]
    run = CliRunner().invoke
    text = run(app, options)
    assert text.exit_code == 0, text.output
    assert "pipeline stage 0" in text.output and "pipeline stage 1" in text.output
    run(app, [*options, "--no-passes", "--out", str(tmp_path / "page.html")])
    pages = sorted(path.name for path in tmp_path.iterdir())
    assert pages == ["page.stage0.html", "page.stage1.html"]
    assert len(json.loads(run(app, [*options, "--json"]).output)["stages"]) == 2


def measured(code: str) -> list[float]:
    """Run code in a process of its own; return its numbers, CPU seconds and MiB."""
    tail = (
        "\nimport resource; used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code + tail], cwd=root, capture_output=True, text=True, check=True
    )
    return [float(word) for word in done.stdout.split()]


@pytest.mark.slow
def test_a_trillion_parameters_over_tensor_pipeline_and_data() -> None:
    """Tensor 8 x pipeline 8 x data 8: planned and proved in 90 s of CPU time, and 3 GB."""
    cpu_s, mib = measured(
        "import zerofx\n"
        "plan = {'stage': 1, 'precision': 'bf16', 'activations': 'recompute',"
        " 'parallel': {'tensor': 8, 'pipeline': 8, 'micro_batches': 32}}\n"
        "view = zerofx.predict('zerofx.tools.demo.targets:gpt_1t', plan, hardware='dgx-h100',"
        " world_size=512)\n"
        "assert len(view.memories) == 8"
    )
    assert cpu_s < 90
    assert mib < 3000


class WithACumsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).cumsum(-1)).square().mean()


def test_warnings_are_given_once_for_the_plan_that_is_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each bound and each plan of other axes is planned by itself, and may warn."""
    with torch.device("meta"):
        target = Target("cumsum", WithACumsum(), (torch.zeros(8, 32, 64),), {})
    axes = {"tensor": 2, "placements": {"a": "colwise", "b": "rowwise"}}
    found = zerofx.search(
        target, hardware="dgx-h100", world_size=4, plan={**PLAIN, "parallel": axes}
    )
    assert found.plan.parallel.tensor == 2
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "no rule says how ranks compute parts of aten.cumsum.default" in warning
    assert not logging.getLogger("zerofx").filters
    family = ModelFamily(Plan(), target=target)
    caplog.clear()
    for length, text in ((2, "%s times"), (4, "%s times"), (4, "other %s")):
        with family.warned.withheld("axes", length):
            logging.getLogger("zerofx").warning(text, length)
    assert not caplog.records
    family.warned.give("axes")
    family.warned.give("other axes")
    assert [r.getMessage() for r in caplog.records] == ["4 times", "other 4"]
