"""How a search is asked and answers: batches, names of devices, what is said, bad calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_search import PLAIN, gpt, small_h100, space_of
from torch import nn

import zerofx
from zerofx.errors import PlanError, TargetError
from zerofx.plan.plan import Plan
from zerofx.tools.cli import main
from zerofx.tools.cli.searched import read_devices
from zerofx.tools.search.bounds import Bounds
from zerofx.tools.search.engine import Search
from zerofx.tools.search.family import ModelFamily
from zerofx.tools.targets import Target
from zerofx.tools.views.timeline import format_rate


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hardware": "dgx-h10"}, "unknown hardware 'dgx-h10'. Did you mean 'dgx-h100'?"),
        (
            {"global_samples": 7, "plan": {"parallel": "none"}},
            "7 samples per step cannot be divided among 4 ranks. Give 8, the nearest",
        ),
        (
            {"batch_tokens": 64},
            "64 tokens per step are less than a sample of 512 on each of 4 ranks. Give 2,048",
        ),
        ({"global_samples": 8, "batch_tokens": 64}, "is given in samples and in tokens"),
        ({"plan": {"stag": 3}}, "unknown plan field 'stag'"),
        ({"hardware": 3}, "hardware is an object of type int. Give the name of a preset"),
        ({"target": 3}, "search was given an object of type int. It takes a name such as"),
        (
            {"plan": {"shard_axis_size": 3, "parallel": "none"}},
            "search: no valid plan exists: Plan.shard_axis_size = 3 does not divide the world of 4",
        ),
    ],
)
def test_bad_calls_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        named = {"target": gpt(2), "hardware": "dgx-h100", "world_size": 4}
        zerofx.search(**(named | given))  # type: ignore[arg-type]


def images(batch: int = 4) -> Target:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))
        x = torch.zeros(batch, 3, 8, 8)
        model(x)
    return Target("images", model, (x,), {})


def test_without_tokens_samples_are_counted() -> None:
    view = zerofx.search(images(), hardware="dgx-h100", world_size=2, plan=PLAIN | {"stage": 1})
    assert "samples/s" in str(view) and "tokens/s" not in str(view)
    best = view.to_dict()["best"]
    assert best["tokens_per_s"] == 0
    assert best["samples_per_s"] == pytest.approx(8e6 / view.best.step_us)
    assert f"{format_rate(view.best.samples_per_s)} samples/s" in view.to_yaml()
    assert " us " in str(view) and "0.0 ms" not in str(view)  # a step of less than a millisecond
    with pytest.raises(PlanError, match="100 tokens per step are given, and no input of 'images'"):
        zerofx.search(images(), hardware="dgx-h100", world_size=2, batch_tokens=100)


def test_tokens_that_are_no_multiple_are_rounded_aloud() -> None:
    def notes(tokens: int) -> tuple[str, ...]:
        plan = PLAIN | {"stage": 3, "activations": "keep", "shard_axis_size": None}
        view = zerofx.search(
            gpt(1, 1, 64), hardware="dgx-h100", world_size=2, plan=plan, batch_tokens=tokens
        )
        assert list(view.notes) == view.to_dict()["notes"]
        assert all(note in str(view) for note in view.notes)
        return view.notes

    assert notes(128) == ()
    (note,) = notes(200)
    assert "200 tokens per step were given and 128 are used: 2 samples of 64" in note


class FixedBatch(nn.Module):
    """Its forward knows the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).view(4, 2, 4).sum()


def fixed() -> Target:
    with torch.device("meta"):
        return Target("fixed", FixedBatch(), (torch.zeros(4, 8),), {})


def test_micro_batches_that_a_model_does_not_take_are_left_out() -> None:
    family = ModelFamily(Plan(kernels="aten"), target=fixed())
    space = space_of(family, small_h100(), global_samples=8)
    search = Search(family, space, Bounds(family, small_h100(), 2, space.plainest))
    halved = next(c for c in space.choices() if c.samples == 2)
    assert (
        search.exactly(halved) is None
        and "with 2 samples. Its example call" in search.refused[halved]
    )
    assert {o.choice.samples for o in search.run().priced} == {4}
    message = "'fixed' cannot be captured with 8 samples. Its example call has 4, .*[.]py:"
    with pytest.raises(TargetError, match=message):
        zerofx.search(fixed(), hardware="dgx-h100", world_size=2, global_samples=16, plan=PLAIN)


def test_what_is_done_is_said() -> None:
    said: list[tuple[str, bool]] = []
    zerofx.search(
        fixed(), hardware="dgx-h100", world_size=2, plan=PLAIN | {"stage": 1},
        says=lambda what, is_passing: said.append((what, is_passing)),
    )  # fmt: skip
    passing = [what for what, is_passing in said if is_passing]
    assert any("capturing 'fixed', 4 samples" in what for what in passing)
    assert "1 plan priced" in passing
    assert any(
        "the fastest within 78.5 GiB per device" in what for what, passed in said if not passed
    )


def test_a_call_without_samples_is_refused() -> None:
    with pytest.raises(TargetError, match="an example call without a batch dimension"):
        zerofx.search(Target("odd", nn.Linear(2, 2), (), {}), hardware="dgx-h100")


def test_devices_are_read_as_people_write_them() -> None:
    for text, ranks, name in (
        ("8x H100", 8, "dgx-h100"), ("16 x A100 80GB", 16, "dgx-a100-80gb"),
        ("512x V100-32GB", 512, "dgx2-v100-32gb"), ("72 NVIDIA GB200", 72, "gb200"),
        ("4xmi300x", 4, "mi300x"), ("2x cpu-box", 2, "cpu-box"),
        ("8 DGX A100 40 GB", 8, "dgx-a100-40gb"),
    ):  # fmt: skip
        found = read_devices(text)
        assert (found[0], found[1].name) == (ranks, name)
    for text, message in (
        ("8x A100", "A100 is dgx-a100-40gb or dgx-a100-80gb. Write one"),
        ("H100", 'Write a number and a name, such as "8x H100"'),
        ("0x H100", "Write a number and a name"),
        ("8x K80", "unknown hardware 'K80'"),
        ("8x H10", r"unknown hardware 'H10'\. Did you mean 'dgx-h100'\? Give cpu-box, "),
    ):
        with pytest.raises(PlanError, match=message):
            read_devices(text)


def test_the_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model.py"
    target.write_text(
        "import torch\nfrom torch import nn\n\ndef build():\n"
        "    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))\n"
        "    return model, (torch.zeros(4, 8),), {}\n"
    )
    out = tmp_path / "plan.yaml"
    for argv, said in (
        (["search", f"{target}:build", "--hardware", "dgx-h100", "--world", "2"], "considered"),
        (
            ["search", f"{target}:build", "--hardware", "h200", "--stage", "3", "--json"],
            '"best"',
        ),
        (["plan-for", "2x H100", "--target", f"{target}:build", "--out", str(out)], "plan.yaml: "),
        (["plan-for", "2x H100", "--target", f"{target}:build"], "# The fastest plan found for 2"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert not ended.value.code
        assert said in capsys.readouterr().out
    assert isinstance(Plan.load(out), Plan)
    with pytest.raises(SystemExit):
        main(["plan-for", "2x H100", "--target", f"{target}:build", "--out", "plan.txt"])
    assert "Give a name that ends in .yaml or .yml" in capsys.readouterr().err
