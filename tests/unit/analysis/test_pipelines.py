"""A step of a whole pipeline on paper: published bubbles, and what `predict` says of all stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tensor_models import MODELS, batch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import zerofx
from zerofx.analysis.time.pipelines import StageTimes, run_on_paper
from zerofx.analysis.time.steps import Lane
from zerofx.ir.program import BACKWARD, FORWARD, Captured, Wire
from zerofx.policy.schedules import actions, orders
from zerofx.tools.cli.app import app
from zerofx.tools.views.prediction import PipelineView

HARDWARE = "dgx-h100"


def boundary(graph: str, source: int, target: int) -> Wire:
    return Wire("x", source, target, graph, 0, 0, torch.empty(0), "")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("size", "micro_batches"), [(2, 4), (4, 8), (8, 64)])
def test_the_bubble_is_the_published_one(schedule: str, size: int, micro_batches: int) -> None:
    """(p - 1) / m of the ideal time. Source: Narayanan et al. 2021, section 2.2.1."""
    times = [StageTimes(1.0, 2.0, 2.0, 0.0, ())] * size
    orders = [actions(schedule, size, position, micro_batches) for position in range(size)]
    wires = {boundary(FORWARD, p, p + 1): 0.0 for p in range(size - 1)}
    wires |= {boundary(BACKWARD, p + 1, p): 0.0 for p in range(size - 1)}
    runs = run_on_paper(orders, times, wires)
    ideal, step = 3.0 * micro_batches, max(each[-1].end_us for each in runs)
    assert (step - ideal) / ideal == pytest.approx((size - 1) / micro_batches)


@pytest.mark.parametrize(("size", "micro_batches"), [(2, 4), (4, 8), (4, 12), (8, 64)])
@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1.0, 1.0, 1.0), (1.0, 1.1, 0.9)])
def test_the_bubble_of_zero_bubble_is_the_published_one(
    size: int, micro_batches: int, forward: float, inputs: float, weights: float
) -> None:
    """(p - 1) (F + B - W) where 1F1B has (p - 1) (F + B + W). Source: Qi et al. 2023, table 2."""
    both = inputs + weights
    times = [StageTimes(forward, both, both, 0.0, (), weights)] * size
    wires = {boundary(FORWARD, p, p + 1): 0.0 for p in range(size - 1)}
    wires |= {boundary(BACKWARD, p + 1, p): 0.0 for p in range(size - 1)}
    idle = {}
    for schedule in ("1f1b", "zero-bubble"):
        runs = run_on_paper(orders(schedule, size, micro_batches), times, wires)
        idle[schedule] = max(r[-1].end_us for r in runs) - (forward + both) * micro_batches
    assert idle["1f1b"] == pytest.approx((size - 1) * (forward + both))
    assert idle["zero-bubble"] == pytest.approx((size - 1) * (forward + inputs - weights))


@pytest.mark.parametrize(
    ("size", "micro_batches", "interleave"), [(2, 4, 2), (4, 8, 2), (4, 16, 4)]
)
def test_interleaving_divides_the_bubble(size: int, micro_batches: int, interleave: int) -> None:
    """(p - 1) / (v m) of the ideal time. Source: Narayanan et al. 2021, section 2.2.2."""
    stages = size * interleave
    times = [StageTimes(1.0 / interleave, 2.0 / interleave, 2.0 / interleave, 0.0, ())] * stages
    made = orders("interleaved", size, micro_batches, interleave)
    wires = {boundary(FORWARD, p, p + 1): 0.0 for p in range(stages - 1)}
    wires |= {boundary(BACKWARD, p + 1, p): 0.0 for p in range(stages - 1)}
    runs = run_on_paper(made, times, wires)
    ideal, step = 3.0 * micro_batches, max(each[-1].end_us for each in runs)
    assert (step - ideal) / ideal == pytest.approx((size - 1) / (interleave * micro_batches))


def test_interleaved_stages_are_predicted_together() -> None:
    torch.manual_seed(0)
    captured = zerofx.capture(MODELS["deep"](), (), batch("deep"), outputs="loss")
    parallel = {"pipeline": 2, "schedule": "interleaved", "interleave": 2, "micro_batches": 4}
    plan = {"stage": 1, "kernels": "aten", "parallel": parallel}
    view = zerofx.predict(captured, plan, hardware=HARDWARE, world_size=4)
    assert isinstance(view, PipelineView)
    found = view.forecast
    assert len(found.stages) == 4 and len(found.runs) == len(found.idle) == 2
    assert "4 micro-batches, 2 stages on each rank" in str(view)
    alone = zerofx.predict(
        captured, {**plan, "parallel": {"pipeline": 2, "micro_batches": 4}}, hardware=HARDWARE,
        world_size=4,
    )  # fmt: skip
    # a rank holds as much for good, whatever it is cut into, and sends more
    states = [
        sum(s.nbytes for s in f.memory.storages if s.name == "states")
        for f in (found.stages[0], found.stages[2])
    ]
    assert states[0] == states[1] > 0
    assert found.sent_bytes > alone.forecast.sent_bytes


def test_what_is_sent_is_waited_for() -> None:
    times = [StageTimes(1.0, 1.0, 1.0, 0.0, ())] * 2
    orders = [actions("1f1b", 2, position, 1) for position in range(2)]
    wires = {boundary(FORWARD, 0, 1): 5.0, boundary(BACKWARD, 1, 0): 7.0}
    first, second = run_on_paper(orders, times, wires)
    assert (second[0].start_us, second[1].end_us) == (6.0, 8.0)
    assert first[1].start_us == 15.0


def captured_llama() -> Captured:
    torch.manual_seed(0)
    return zerofx.capture(MODELS["llama"](), (), batch("llama"), outputs="loss")


def test_all_stages_are_predicted_together() -> None:
    captured = captured_llama()
    plan = {"stage": 1, "kernels": "aten", "parallel": {"pipeline": 2, "micro_batches": 4}}
    view = zerofx.predict(captured, plan, hardware=HARDWARE, world_size=4)
    assert isinstance(view, PipelineView)
    programs = [
        zerofx.rewrite(captured, plan, world_size=4, hardware=HARDWARE, position=p)
        for p in range(2)
    ]
    alone = [zerofx.predict(program, hardware=HARDWARE) for program in programs]
    assert [m.peak_bytes for m in view.memories] == [p.memory().peak_bytes for p in programs]
    # it takes as long as the busier stage by itself, and no longer than both one after the other
    assert max(v.step_us for v in alone) <= view.step_us * 1.01
    assert view.step_us < sum(v.step_us for v in alone)
    found = view.forecast
    samples = batch("llama")["input_ids"].shape[0]
    assert found.samples_per_s.middle == pytest.approx(1e6 * samples * 4 * 2 / view.step_us)
    assert sum(found.busy_us) == pytest.approx(view.step_us * sum(1 - w for w in found.idle))
    # two data ranks, so that nothing is sent twice: one activation and one gradient each way
    wires = found.program.stage.wires
    assert found.sent_bytes == 4 * max(w.value.nbytes for w in wires)


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_gradients_and_one_reduction_or_neither(stage: int) -> None:
    """What is summed on a rank is counted in its memory, and each reduction in its time."""
    captured, made = captured_llama(), {}
    for accumulate in ("whole", "sharded"):
        parallel = {"pipeline": 2, "micro_batches": 4, "accumulate": accumulate}
        plan = {"stage": stage, "kernels": "aten", "parallel": parallel}
        made[accumulate] = zerofx.predict(captured, plan, hardware=HARDWARE, world_size=4)
    whole, sharded = made["whole"].forecast, made["sharded"].forecast
    for a, b in zip(whole.stages, sharded.stages, strict=True):
        layout = a.program.layout
        summed = [s.nbytes for s in a.memory.storages if s.name == "sum of no_sync"]
        assert sum(summed) == sum(b.numel * b.dtype.itemsize for b in layout.own_buckets)
        assert not any(s.name == "sum of no_sync" for s in b.memory.storages)
        assert a.memory.peak_bytes > b.memory.peak_bytes
    lane = Lane.REDUCE
    reduced = [found.lane_bytes()[lane] for found in (whole, sharded)]
    assert reduced[1] == pytest.approx(4 * reduced[0])


def test_ranks_that_share_layers_have_the_same_samples() -> None:
    captured = zerofx.capture(MODELS["llama"](), (), batch("llama"))
    view = zerofx.predict(captured, {"parallel": {"tensor": 2}}, hardware=HARDWARE, world_size=4)
    samples = batch("llama")["input_ids"].shape[0]
    assert view.forecast.samples_per_s.middle == pytest.approx(1e6 * samples * 2 / view.step_us)


def test_better_cuts_are_named_and_are_better() -> None:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        vocab_size=256, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config), torch.zeros(4, 64, dtype=torch.long)
    captured = zerofx.capture(model, (), {"input_ids": ids, "labels": ids}, outputs="loss")

    def predicted(cuts: list[str]) -> PipelineView:
        parallel = {"pipeline": 2, "micro_batches": 8, "cuts": cuts}
        view = zerofx.predict(captured, {"parallel": parallel}, hardware=HARDWARE, world_size=2)
        assert isinstance(view, PipelineView)
        return view

    before = predicted(["model.layers.1"])
    assert before.better is not None
    after = predicted([*before.better.cuts])
    assert after.better is None
    assert after.step_us < before.step_us
    assert max(after.forecast.idle) < max(before.forecast.idle)


def test_the_command(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 128, "use_cache": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = f"hf:{tmp_path}/config.json"
    given = ["--set", "parallel={pipeline: 2, micro_batches: 4}", "--world", "2"]
    shown = CliRunner().invoke(app, ["predict", model, *given, "--hardware", HARDWARE])
    assert shown.exit_code == 0, shown.output
    assert "pipeline of 2 stages, 1f1b, 4 micro-batches" in shown.output
    assert "waiting for other stages" in shown.output
