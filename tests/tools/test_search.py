"""Search: extrapolation equals the whole, bounds are below prices, and pruning loses nothing."""

from __future__ import annotations

import dataclasses
import gc
import json
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from zerofx.analysis.time.forecast import forecast
from zerofx.errors import PlanError
from zerofx.hardware import Hardware, load_hardware
from zerofx.ir.program import Loop
from zerofx.passes.order import Setting
from zerofx.passes.pipeline import run
from zerofx.plan.plan import Plan
from zerofx.tools.demo.gpt import GPT, GPTConfig
from zerofx.tools.search.bounds import Bounds
from zerofx.tools.search.engine import Search, available_bytes
from zerofx.tools.search.family import Family, ModelFamily
from zerofx.tools.search.outcome import outcome
from zerofx.tools.search.space import Choice, Space
from zerofx.tools.targets import Target

MIB = 2**20
WORLD = 8


def gpt(layers: int, batch: int = 2, seq: int = 512) -> Target:
    """Return a wide GPT on meta: not what it launches but what it computes takes its time."""
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=layers, width=2048, heads=16, seq=seq, vocab=1024))
        tokens = torch.zeros(batch, seq, dtype=torch.long)
    return Target("gpt", model, (tokens, tokens), {})


def small_h100(memory_bytes: int = 80 * 2**30) -> Hardware:
    """Return a DGX H100 whose devices have little memory, beside what is reserved."""
    reserved = 80 * 2**30 - available_bytes(load_hardware("dgx-h100"))
    return dataclasses.replace(
        load_hardware("dgx-h100"), device_memory_bytes=memory_bytes + reserved
    )


def choice(samples: int = 2, accumulation: int = 1, no_sync: bool = False, **plan: Any) -> Choice:
    return Choice(Plan(kernels="aten", **plan), samples, accumulation, no_sync)


PLANS: list[Choice] = [
    choice(precision="bf16", prefetch=3),
    choice(precision="bf16", stage=2),
    choice(precision="bf16", activations="recompute", shard_axis_size=4, accumulation=2),
    choice(precision="bf16", offload={"optimizer": "cpu", "parameters": "cpu"}, prefetch=1),
    choice(precision="bf16", stage=1, accumulation=6, no_sync=True),
]


@pytest.fixture(scope="module")
def families() -> dict[tuple[str, int], Family]:
    return {}


def family_of(families: dict[tuple[str, int], Family], layers: int, chosen: Choice) -> Family:
    key = chosen.plan.precision.compute, layers
    if key not in families:
        plan = Plan(precision=chosen.plan.precision, kernels="aten")
        families[key] = ModelFamily(plan, target=gpt(layers))
    return families[key]


@pytest.fixture(scope="module")
def family() -> Family:
    return ModelFamily(Plan(precision="bf16", kernels="aten"), target=gpt(13))


@pytest.mark.parametrize("chosen", PLANS, ids=lambda c: c.words())
def test_what_is_extrapolated_equals_the_whole_and_bounds_are_below(
    chosen: Choice, family: Family
) -> None:
    """Two short models give the figures of all 13 layers, which are priced whole beside them."""
    assert family.lengths == (7, 9) and family.layers == 13
    hardware = small_h100()
    found = outcome(chosen, family, hardware, WORLD)
    whole = family._program(13, chosen.samples)
    setting = Setting(chosen.plan, WORLD, hardware, loop=Loop(chosen.accumulation, chosen.no_sync))
    expected = forecast(run(whole, setting), hardware)
    assert found.step_us == pytest.approx(expected.step_us.middle, rel=1e-3)
    assert found.peak_bytes == pytest.approx(expected.memory.peak_bytes, rel=1e-3)
    assert found.host_bytes == pytest.approx(expected.memory.host_bytes, rel=1e-3)
    assert found.tokens_per_s == pytest.approx(expected.tokens_per_s.middle, rel=1e-3)
    busy = {lane.value: us for lane, us in expected.timeline.busy_us.items() if us}
    assert found.lane("busy") == pytest.approx(busy, rel=1e-3)

    bounds = Bounds(family, hardware, WORLD, Choice(family.plan, 2, 1, False))
    for bound in (bounds.rough(chosen), bounds.of(chosen)):
        assert 0 < bound.peak_bytes <= found.peak_bytes
        assert 0 < bound.step_us <= found.step_us


# Fields that stay as they are where a test need not try them all.
PLAIN = {"offload": "none", "tiling": "off", "bucket_bytes": None, "update": "step"} | {
    "prefetch": "auto", "kernels": "aten", "parallel": "none",
}  # fmt: skip


def space_of(family: Family, hardware: Hardware, **changed: Any) -> Space:
    base = Plan(kernels="aten")
    given: dict[str, Any] = {
        "hardware": hardware, "world_size": 2, "global_samples": 4, "base": base,
        "settled": frozenset(PLAIN), "tiled": (), "nvme": "/nvme",
    }  # fmt: skip
    return Space(**(given | changed))


def test_pruning_loses_nothing() -> None:
    """Pricing every choice finds no plan that is faster than the search's by more than its gap."""
    family = ModelFamily(Plan(kernels="aten"), target=gpt(2))
    every = {
        c: outcome(c, family, small_h100(), 2) for c in space_of(family, small_h100()).choices()
    }
    loosest = max(o.peak_bytes for o in every.values())
    for share in (2.0, 0.7):
        hardware = small_h100(round(loosest * share))
        space = space_of(family, hardware)
        search = Search(family, space, Bounds(family, hardware, 2, space.plainest))
        counts = (found := search.run()).counts
        fits = [o for o in every.values() if o.peak_bytes <= available_bytes(hardware)]
        assert len(every) == counts.considered > counts.priced
        assert min(o.step_us for o in fits) * 1.01 >= found.fits[0].step_us
        parts = counts.too_large + counts.too_slow + counts.priced + counts.refused
        assert parts == counts.considered
        # What a bound calls too large does not fit.
        bounded = search.bounded.items()
        too_large = {c for c, b in bounded if b.peak_bytes > available_bytes(hardware)}
        assert not {o.choice for o in fits} & too_large


def test_the_front_falls_in_memory_as_it_rises_in_time() -> None:
    view = zerofx.search(gpt(2), hardware="dgx-h100", world_size=4, plan=PLAIN)
    front = view.found.front
    assert [o.peak_bytes for o in front] == sorted((o.peak_bytes for o in front), reverse=True)
    assert all(o.step_us >= view.best.step_us * 0.999 for o in front)
    text = str(view)
    assert "plans considered" in text and view.best.choice.words() in text
    assert json.loads(json.dumps(view.to_dict()))["best"]["step_us"] == view.best.step_us
    assert Plan.from_yaml(view.to_yaml()) == view.plan
    assert view.plan.precision.compute == "bf16"
    second = view.found.runner_up
    assert second is not None and second is not view.best
    assert view.to_dict()["why"]


@pytest.mark.slow
def test_a_7b_llama_on_8_gpus() -> None:
    """At least 500 plans are considered, few of them priced; the time is in the design notes."""
    view = zerofx.search("zerofx.tools.demo.targets:llama_7b", hardware="dgx-h100", world_size=8)
    assert view.found.counts.considered >= 500 > 10 * view.found.counts.priced
    assert view.best.peak_bytes < 80 * 2**30
    assert view.plan.stage == 3  # stage 0 does not fit, and less memory is as fast


def test_only_one_stack_of_identical_layers_is_shortened() -> None:
    whole = ModelFamily(Plan(), target=gpt(8))
    assert whole.lengths == (0,) and whole.extrapolated((5.0,)) == 5.0
    assert ModelFamily(Plan(), target=gpt(20)).lengths == (6, 8)
    assert ModelFamily(Plan(), target=gpt(21)).lengths == (7, 9)
    assert ModelFamily(Plan(memory_budget="1GiB"), target=gpt(20)).lengths == (
        20,
    )  # met by all together
    odd = gpt(20)
    odd.module.blocks[3] = nn.Identity()  # type: ignore[index, operator]
    assert ModelFamily(Plan(), target=odd).stack == ""
    short = ModelFamily(Plan(), target=gpt(20))
    assert short.layer_numel * 20 < short.numel < short.layer_numel * 21
    assert short.tiled == ("blocks.*.mlp.fc1", "blocks.*.mlp.fc2") or short.tiled


def test_nothing_fits_says_what_is_missing_and_the_nearest_plan() -> None:
    target, settled = gpt(2), PLAIN | {"stage": 0, "activations": "keep", "precision": "fp32"}
    family = ModelFamily(Plan(kernels="aten"), target=target)
    kept = outcome(Choice(Plan(stage=0, kernels="aten"), 2, 1, False), family, small_h100(), 4)
    hardware = small_h100(kept.peak_bytes // 2)
    with pytest.raises(PlanError) as error:
        zerofx.search(target, hardware=hardware, world_size=4, plan=settled)
    text = str(error.value)
    assert "no plan fits 4 ranks of dgx-h100 with activations, bucket_bytes," in text
    assert "each device: " in text and "missing" in text
    assert "the nearest plan that fits changes parallel to " in text

    shards = PLAIN | {"stage": 3, "activations": "recompute", "precision": "fp32"}
    with pytest.raises(PlanError, match="more ranks do not help"):
        zerofx.search(target, hardware=small_h100(MIB), world_size=4, plan=shards)


def test_a_search_leaves_the_garbage_collector_as_it_was() -> None:
    before, was_on = gc.get_threshold(), gc.isenabled()
    zerofx.search(gpt(2), hardware="dgx-h100", world_size=2, plan=PLAIN)
    with pytest.raises(PlanError):
        zerofx.search(gpt(2), hardware="dgx-h100", world_size=0, plan=PLAIN)
    assert gc.get_threshold() == before and gc.isenabled() is was_on
