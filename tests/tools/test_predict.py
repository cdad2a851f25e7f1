"""zerofx.predict and `zerofx predict`: memory, time and what limits them, with ranges."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_cases import captured
from typer.testing import CliRunner

import zerofx
from zerofx import ops
from zerofx.analysis.time.forecast import Range, peak_flops_per_s, utilisation
from zerofx.analysis.time.steps import Lane
from zerofx.errors import PlanError, ProgramError
from zerofx.hardware import load_hardware
from zerofx.ir.program import Planned
from zerofx.passes.base import Report
from zerofx.passes.release import Release
from zerofx.tools.cli.app import app
from zerofx.tools.demo.gpt import GPT, GPTConfig
from zerofx.tools.views.prediction import PredictionView

TARGET = "zerofx.tools.demo.targets:byte_gpt"


def gpt(layers: int = 2, width: int = 64) -> Planned:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=layers, width=width))
        tokens = torch.zeros(4, 64, dtype=torch.long)
    return zerofx.capture(model, (tokens, tokens))


def predicted(program: Planned, plan: dict[str, Any], where: Any = "dgx-h100", world: int = 8) -> (
    PredictionView
):  # fmt: skip
    return zerofx.predict(program, plan, hardware=where, world_size=world)


def test_what_is_predicted() -> None:
    view = predicted(gpt(), {"stage": 3})
    shown = view.to_dict()
    for name in ("peak_bytes", "step_us", "exposed_us", "tokens_per_s", "mfu", "flops_per_s"):
        low, middle, high = shown[name].values()
        assert 0 < low <= middle <= high
        assert high - low <= 0.3 * middle, name
    tokens = 8 * 4 * 64
    assert shown["tokens_per_s"]["middle"] == pytest.approx(tokens / (view.step_us / 1e6))
    assert shown["lane_bytes"].keys() == {"gather", "reduce"}
    assert "tokens/s" in str(view)
    assert "largest at the peak" in str(view)
    assert json.loads(json.dumps(shown)) == shown
    assert "compute" in str(view.timeline)


def test_peak_memory_is_that_of_the_memory_report() -> None:
    program = zerofx.rewrite(gpt(), {"stage": 2}, 4, "dgx-h100")
    view = zerofx.predict(program, hardware="dgx-h100")
    assert view.peak_bytes == program.memory().peak_bytes


def test_layers_cost_nothing_more_to_price() -> None:
    from zerofx.analysis.time.prices import Roofline
    from zerofx.analysis.time.tasks import tasks

    known = []
    for layers in (4, 12):
        prices = Roofline(load_hardware("dgx-h100"), 8)
        tasks(zerofx.rewrite(gpt(layers), {"stage": 3}, 8), prices)
        known.append(len(prices.known))
    assert known[0] == known[1]


def test_recomputing_is_work_but_not_the_models() -> None:
    kept, again = (
        predicted(gpt(), {"stage": 3, "activations": a}).forecast for a in ("keep", "recompute")
    )
    assert again.flops > 1.2 * kept.flops
    assert again.model_flops == pytest.approx(kept.flops)
    assert again.mfu.middle < again.flops_per_s.middle / 1e12


def test_no_device_is_utilised_above_its_fastest_rate() -> None:
    """Curves of convolutions exceed the rate of matrix products; other models' curves do not."""
    here = load_hardware("cpu-box")
    rate = here.dense_flops_per_s["fp32"]
    convolutions = torch.nn.Sequential(*(torch.nn.Conv2d(128, 128, 3, padding=1) for _ in range(4)))
    program = zerofx.capture(convolutions, (torch.randn(8, 128, 16, 16),))
    plan = {"kernels": "aten", "stage": 0}
    found = zerofx.predict(program, plan, hardware=here).forecast
    assert found.step_us.inverse(1e6 * found.model_flops / rate).high > 1.1
    fastest = peak_flops_per_s(found.program, here)
    assert fastest > 2 * rate
    assert 0.4 < found.mfu.low < found.mfu.high <= 1.0
    assert found.mfu.middle == pytest.approx(
        1e6 * found.model_flops / fastest / found.step_us.middle
    )
    small = Range(*(found.step_us.middle / n for n in (4, 3, 2)))
    assert utilisation(small, found.model_flops, [found.program], here).high == 1.0
    products = predicted(gpt(), plan, here, 1).forecast
    assert peak_flops_per_s(products.program, here) == rate


def test_accumulation_multiplies_the_work_of_a_step() -> None:
    program = gpt()
    once, four = (
        zerofx.predict(program, {"stage": 2}, hardware="dgx-h100", world_size=8, accumulation=n)
        for n in (1, 4)
    )
    assert four.forecast.flops == 4 * once.forecast.flops
    assert 3 * once.step_us < four.step_us < 4 * once.step_us
    assert four.forecast.tokens_per_s.middle > once.forecast.tokens_per_s.middle


def test_slower_parts_make_slower_steps() -> None:
    here = load_hardware("dgx-h100")
    plan = {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}}
    program = gpt(2, 512)

    def step_us(where: Any) -> float:
        return zerofx.predict(program, plan, hardware=where, world_size=16, accumulation=2).step_us

    base = step_us(here)
    for name in (
        "memory_bytes_per_s", "network_bytes_per_s", "host_link_bytes_per_s",
        "host_update_elements_per_s", "host_memory_bytes_per_s",
    ):  # fmt: skip
        slower = dataclasses.replace(here, **{name: getattr(here, name) / 50})
        assert step_us(slower) > base, name


def test_a_host_that_launches_slowly_holds_the_device_up() -> None:
    here = load_hardware("dgx-h100")
    slow = dataclasses.replace(here, launch_us=100.0)
    found = predicted(gpt(), {"stage": 0}, slow, 1).forecast.timeline
    assert found.exposed_us[Lane.HOST] > 0.8 * found.step_us


def test_what_does_not_fit_is_said_with_both_numbers() -> None:
    small = dataclasses.replace(load_hardware("dgx-h100"), device_memory_bytes=1537 << 20)
    view = predicted(gpt(1, 128), {"stage": 0}, small, 2)
    (shortage,) = view.forecast.shortages
    assert not view.fits
    assert shortage.needed_bytes == view.peak_bytes
    assert shortage.available_bytes == 1 << 20
    assert "does not fit: each device" in str(view)
    off = {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme", "path": "/x"}}
    no_disk = dataclasses.replace(load_hardware("dgx-h100"), nvme_bytes=0)
    (missing,) = predicted(gpt(), off, no_disk, 2).forecast.shortages
    assert missing.tier == "nvme of a node"


def test_a_finished_program_keeps_its_plan() -> None:
    program = zerofx.rewrite(captured("chain"), {"stage": 3}, 2)
    with pytest.raises(PlanError, match="finished for world 2"):
        zerofx.predict(program, {"stage": 1}, hardware="dgx-h100")


def test_refusals() -> None:
    with pytest.raises(PlanError, match="Did you mean 'dgx-h100'"):
        zerofx.predict(TARGET, hardware="dgx-h10")
    with pytest.raises(PlanError, match="no rate for matrix products in bf16"):
        zerofx.predict(TARGET, {"precision": "bf16"}, hardware="dgx2-v100-32gb")


def test_the_command() -> None:
    run = CliRunner().invoke
    options = ["predict", TARGET, "--hardware", "dgx2-v100-32gb", "--world", "32", "--stage", "3"]
    text = run(app, options)
    assert text.exit_code == 0, text.output
    assert "dgx2-v100-32gb, 2 nodes" in text.output
    shown = json.loads(run(app, [*options, "--json", "--clip"]).output)
    assert shown["world_size"] == 32
    assert shown["fits"] is True and shown["way_out"] is None


def test_a_view_goes_without_times_where_the_hardware_lacks_what_is_used(tmp_path: Path) -> None:
    """cpu-box has no NVMe, a V100 multiplies no bf16: the schedule is shown all the same."""
    offload = "offload={optimizer: nvme, path: /scratch}"
    for option, hardware, why in (
        (offload, "cpu-box", "NVMe, and cpu-box has none"),
        ("precision=bf16", "dgx2-v100-32gb", "no rate for matrix products in bf16"),
    ):
        page = tmp_path / f"{hardware}.html"
        options = ["view", TARGET, "--set", option, "--set", "kernels=aten", "--hardware", hardware]
        shown = CliRunner().invoke(app, options)
        assert shown.exit_code == 0, shown.output
        (line,) = [x for x in shown.output.splitlines() if x.startswith("no predicted times: ")]
        assert why in line and "schedule: " in shown.output and "predicted: " not in shown.output
        CliRunner().invoke(app, [*options, "--no-passes", "--out", str(page)])
        assert "no predicted times" in page.read_text() and why in page.read_text()
    assert why in json.loads(CliRunner().invoke(app, [*options, "--json"]).output)["unpriced"]
    wrong = CliRunner().invoke(app, ["view", TARGET, "--hardware", "cpu-bx"])
    assert isinstance(wrong.exception, PlanError)  # a name that is unknown still ends it


def test_hardware_without_nvme_is_named() -> None:
    plan = {"offload": {"optimizer": "nvme", "path": "/scratch"}}
    with pytest.raises(PlanError, match=r"NVMe, and cpu-box has none\. Use another tier"):
        predicted(gpt(), plan, "cpu-box", 1)


def test_a_wrong_pass_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is verified once, at the end; what fails there is looked for pass by pass."""
    right = Release.run

    def wrong(self: Release, program: Planned) -> Report:
        report = right(self, program)
        graph = program.graph("forward")
        release = next(n for n in graph.nodes if n.target is ops.release)
        release.args[0].append(release)  # behind its wait, in front of the reader
        return report

    plan = {"stage": 3, "persist_below": 0}
    assert predicted(gpt(), plan).fits
    monkeypatch.setattr(Release, "run", wrong)
    with pytest.raises(ProgramError, match=r"^release: .* after its release"):
        predicted(gpt(), plan)


@pytest.mark.slow
def test_a_trillion_parameters_on_512_gpus() -> None:
    """In two thirds of the 90 s that are allowed, beside other work, and half of 3 GB."""
    code = (
        "import resource, zerofx\n"
        "zerofx.predict('zerofx.tools.demo.targets:gpt_1t', 'examples/plans/infinity.yaml',"
        " hardware='dgx2-v100-32gb', world_size=512)\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    cpu_s, kib = map(float, done.stdout.split()[-2:])
    assert cpu_s < 60
    assert kib < 1.5e6
