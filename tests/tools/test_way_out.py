"""What a prediction says of a plan that does not fit: what is missing, and what would fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from zerofx.hardware import load_hardware
from zerofx.ir.program import Planned
from zerofx.tools.demo.gpt import GPT, GPTConfig
from zerofx.tools.search.way_out import WayOut
from zerofx.tools.views.prediction import PredictionView

MIB = 2**20


def gpt(layers: int = 1, width: int = 128) -> Planned:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=layers, width=width))
        tokens = torch.zeros(4, 64, dtype=torch.long)
    return zerofx.capture(model, (tokens, tokens))


def predicted(
    program: Planned, plan: dict[str, Any], where: Any = "dgx-h100", world: int = 8
) -> PredictionView:
    return zerofx.predict(program, plan, hardware=where, world_size=world)


# What stands in a plan that does not fit a small device, and what is left to change.
WIDE = {"stage": 1, "kernels": "aten"}


def with_memory(nbytes: int) -> Any:
    """Return a DGX H100 of which programs may hold so many bytes of a device."""
    here = load_hardware("dgx-h100")
    return dataclasses.replace(here, device_memory_bytes=(1536 << 20) + nbytes)


def test_a_plan_that_does_not_fit_names_the_nearest_that_does() -> None:
    program = gpt()
    peak = predicted(program, WIDE, world=4).peak_bytes
    small = with_memory(int(0.9 * peak))
    view = predicted(program, WIDE, small, 4)
    (missing,) = view.missing_bytes.values()
    assert missing == peak - int(0.9 * peak)
    out = view.way_out
    assert isinstance(out, WayOut) and out.nearest is not None and out.plan is not None
    # One field was enough, and the plan that it gives does fit when it is predicted by itself.
    assert len(out.nearest.changed) == 1
    again = predicted(program, out.plan.to_dict(), small, 4)
    assert again.fits and again.way_out is None and again.missing_bytes == {}
    assert again.peak_bytes == pytest.approx(out.nearest.outcome.peak_bytes, rel=1e-3)
    text = str(view)
    (field,) = out.nearest.changed
    assert f"the nearest plan that fits changes {field} to " in text
    assert f"--set {field}=" in text or f"--set '{field}=" in text
    largest = text.splitlines()[2]
    assert "iB  " in largest and largest.startswith("  ")
    shown = json.loads(json.dumps(view.to_dict()))
    assert shown["way_out"]["nearest"]["changed"] == out.nearest.changed
    assert shown["shortages"][0]["missing_bytes"] == missing


def test_no_single_change_is_left_out_for_more() -> None:
    """Every plan with fewer changes than the nearest one is predicted by itself: none fits."""
    program = gpt(2)
    least = predicted(program, {"stage": 3, "activations": "recompute", "kernels": "aten"}, world=4)
    small = with_memory(least.peak_bytes + 1)
    view = predicted(program, {"stage": 0, "kernels": "aten"}, small, 4)
    out = view.way_out
    assert isinstance(out, WayOut) and out.nearest is not None
    assert len(out.nearest.changed) == 2 and out.tried <= 24
    for change in ({"stage": 3}, {"activations": "recompute"}, {"stage": 2}):
        assert not predicted(program, {"stage": 0, "kernels": "aten"} | change, small, 4).fits


def test_where_no_plan_fits_the_closest_and_its_ranks_are_named() -> None:
    out = predicted(gpt(), {"stage": 3}, with_memory(MIB), 2).way_out
    assert isinstance(out, WayOut) and out.plan is None and out.closest is not None
    text = "\n".join(out.lines())
    assert "no plan that fits was found for this world" in text
    assert "the closest plan: " in text and " missing" in text and "more ranks do not help" in text
    assert out.to_dict()["closest"]["missing_bytes"]["each device"] > 0


def test_a_device_smaller_than_what_the_framework_takes() -> None:
    text = str(predicted(gpt(), WIDE, with_memory(-(512 * MIB)), 4))
    assert ", 0 B available" in text and "no other plan could be tried" not in text


def test_what_the_loop_holds_counts_for_the_nearest_plan() -> None:
    program, small = gpt(1, 64), with_memory(4 * MIB)
    given = {"hardware": small, "world_size": 2, "optimizer_bytes": 64}
    out = zerofx.predict(program, WIDE, **given).way_out
    assert isinstance(out, WayOut) and out.nearest is not None
    again = zerofx.predict(program, out.plan, **given)
    assert again.fits
    assert again.peak_bytes == pytest.approx(out.nearest.outcome.peak_bytes, rel=1e-3)


class Constant(nn.Module):
    """A model whose call has no tensor, so that its micro-batch cannot be another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(MIB))

    def forward(self, scale: float) -> torch.Tensor:
        return (self.weight * scale).sum()


def test_a_model_without_samples_is_predicted_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "constant.py"
    path.write_text(
        "from test_way_out import Constant\ndef build(): return Constant(), (2.0,), {}\n"
    )
    view = zerofx.predict(f"{path}:build", hardware=with_memory(MIB), world_size=2)
    out = view.way_out
    assert isinstance(out, WayOut) and not view.fits
    assert out.problem and out.to_dict()["problem"] == out.problem
    assert "no other plan could be tried: " in str(view)


def test_budgets_and_patterns_do_not_stop_the_answer() -> None:
    for fields in (
        {"activations": "auto", "memory_budget": "1GiB"},
        {"activations": {"blocks.*": "recompute"}, "bucket_bytes": 12345},
    ):
        program, given = gpt(), {"stage": 1, "kernels": "aten", **fields}
        small = with_memory(int(0.9 * predicted(program, given, world=4).peak_bytes))
        out = predicted(program, given, small, 4).way_out
        assert isinstance(out, WayOut) and out.plan is not None and not out.problem
        assert predicted(program, out.plan.to_dict(), small, 4).fits


def test_a_finished_program_has_no_other_plan() -> None:
    program = zerofx.rewrite(gpt(), {"stage": 0}, 2)
    view = zerofx.predict(program, hardware=with_memory(MIB))
    assert not view.fits and view.way_out is None
    assert "its plan is fixed. Run zerofx search on its model" in str(view)
