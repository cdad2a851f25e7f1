"""One answer: memory, predict, schedule and view agree on the peak, whatever the cache holds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.errors import PlanError
from zerofx.hardware import default_hardware
from zerofx.tools import cli
from zerofx.tools.targets import resolve

MODELS = """
import torch
from test_one_answer import Small

def loss():
    return Small(), (torch.zeros(512, 16), torch.zeros(512, 64)), {}

def several():
    return Small(several=True), (torch.zeros(512, 16), torch.zeros(512, 64)), {}
"""
PLANS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 3": {"stage": 3},
    "budget": {"stage": 3, "activations": "auto", "memory_budget": "1200KiB"},
    "recompute": {"stage": 2, "activations": "recompute"},
    "away": {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
}
SLOW = pytest.mark.slow
WHERE = [("cpu-box", 1), ("cpu-box", 2), ("dgx-h100", 2), ("dgx-h100", 16)]


class Small(nn.Module):
    """A loss, and with `several` what it is of; its activations are larger than its weights."""

    def __init__(self, several: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.several = nn.Linear(16, 64), nn.Linear(64, 64), several

    def forward(self, x: Tensor, y: Tensor) -> Any:
        found = self.down(torch.tanh(torch.relu(self.up(x)).exp() + 1).sin())
        loss = (found - y).square().mean()
        return {"loss": loss, "found": found} if self.several else loss


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        cli.main([*argv, "--json"])
    out = capsys.readouterr()
    assert ended.value.code in (0, 1) and out.out, out.err  # 1: it does not fit
    return json.loads(out.out)


def answers(
    capsys: pytest.CaptureFixture[str], target: str, plan: dict[str, Any], hardware: str,
    world: int, basis: str,
) -> tuple[dict[str, int], set[str]]:  # fmt: skip
    """Return the peak that each command and function gives, and the basis in their titles."""
    args = ["--hardware", hardware, "--world", str(world), "--basis", basis]
    for name, value in plan.items():
        args += ["--set", f"{name}={json.dumps(value)}"]
    named = resolve(target, 1, 128)
    program = zerofx.rewrite(zerofx.capture(named.module, named.args), plan, world, hardware)
    predicted = zerofx.predict(target, plan, hardware=hardware, world_size=world, basis=basis)
    schedule = printed(capsys, "schedule", target, *args)
    peaks = {
        "zerofx memory": (memory := printed(capsys, "memory", target, *args))["peak_bytes"],
        "zerofx predict": (shown := printed(capsys, "predict", target, *args))["peak_bytes"][
            "middle"
        ],
        "zerofx schedule": schedule["peak_bytes"],
        "zerofx view": printed(capsys, "view", target, "--no-passes", *args)["peak_bytes"],
        "memory()": program.memory(basis=basis).peak_bytes,
        "schedule()": program.schedule(basis).peak_bytes,
        "predict()": predicted.peak_bytes,
    }
    titles = {memory["title"], shown["title"], schedule["title"], predicted.title}
    assert all(f"on {hardware}" in title for title in titles), titles
    return peaks, {title.rpartition("   ")[2] for title in titles}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "one_answer_nets.py"
    path.write_text(MODELS)
    return str(path)


QUICK = [("several", "stage 3", 0), ("loss", "budget", 1), ("several", "recompute", 3)]
CELLS = [
    pytest.param(name, plan, *WHERE[at], marks=[] if (name, plan, at) in QUICK else SLOW)
    for name, plan, at in itertools.product(("loss", "several"), PLANS, range(len(WHERE)))
]


@pytest.mark.parametrize(("name", "plan", "hardware", "world"), CELLS)
def test_all_agree_on_the_aten_basis(
    capsys: pytest.CaptureFixture[str], models: str, name: str, plan: str, hardware: str, world: int
) -> None:
    peaks, titles = answers(capsys, f"{models}:{name}", PLANS[plan], hardware, world, "aten")
    assert len(set(peaks.values())) == 1, peaks
    assert titles == {"memory: regions as ATen"}


@pytest.mark.parametrize(
    ("name", "plan", "world"),
    [
        pytest.param("loss", "stage 3", 2, marks=SLOW),
        pytest.param("several", "stage 0", 1),
        pytest.param("loss", "recompute", 2, marks=SLOW),
        pytest.param("several", "away", 2, marks=SLOW),
        pytest.param("loss", "budget", 1, marks=SLOW),
    ],
)
def test_the_cache_changes_no_answer(
    capsys: pytest.CaptureFixture[str], models: str, name: str, plan: str, world: int
) -> None:
    """Each basis says the same with an empty cache and with a filled one."""
    given = capsys, f"{models}:{name}", PLANS[plan], "cpu-box", world
    cache = Path(models).parent / "cache"
    empty, titles = answers(*given, "aten")
    assert not list(cache.glob("regions/*.bin"))
    compiled, _ = answers(*given, "compiled")
    assert list(cache.glob("regions/*.bin"))
    assert answers(*given, "aten") == (empty, titles)
    assert answers(*given, "compiled") == (compiled, {"memory: regions as compiled"})
    assert len(set(empty.values())) == len(set(compiled.values())) == 1
    assert set(empty.values()) != set(compiled.values())  # else this has shown nothing


def test_what_compiled_cannot_say_is_refused(models: str) -> None:
    program = zerofx.rewrite(zerofx.capture(Small(), (torch.zeros(4, 16), torch.zeros(4, 64))))
    with pytest.raises(PlanError, match="basis = 'inductor': allowed are 'aten', 'compiled'"):
        program.memory(basis="inductor")
    with pytest.raises(PlanError, match=r"compiled for cpu, and dgx-h100 is cuda. Use basis='at"):
        zerofx.predict(program, hardware="dgx-h100", basis="compiled")
    assert program.hardware is default_hardware()  # what predict was given is not the program's


def test_an_emitted_program_keeps_its_hardware(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    captured = zerofx.capture(Small(), (torch.zeros(4, 16), torch.zeros(4, 64)))
    program = zerofx.rewrite(captured, {"stage": 2}, 4, "dgx-h100")
    folder = str(program.emit(tmp_path / "made"))
    loaded = zerofx.load_program(folder)
    assert loaded.hardware is program.hardware
    assert loaded.memory().peak_bytes == program.memory().peak_bytes
    peak = printed(capsys, "memory", folder)["peak_bytes"]
    assert peak == printed(capsys, "predict", folder)["peak_bytes"]["middle"]
    # On gloo a reduction receives into buffers of zerofx's own, which count.
    other = printed(capsys, "memory", folder, "--hardware", "cpu-box")
    assert other["peak_bytes"] >= peak and "on cpu-box" in other["title"]
    facts = Path(folder) / "fingerprint.json"
    said = json.loads(facts.read_text())
    del said["hardware"]  # as programs emitted before have it
    facts.write_text(json.dumps(said))
    assert zerofx.load_program(folder).hardware is default_hardware()
