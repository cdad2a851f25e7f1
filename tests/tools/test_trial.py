"""zerofx verify: what is proved of a program, and trials of it on real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from test_cli import STACK, run, run_json

from zerofx.errors import PlanError, TargetError
from zerofx.tools import cli
from zerofx.tools.targets import Target
from zerofx.tools.trial import launch, ranks
from zerofx.tools.trial.ranks import Comparison, vary
from zerofx.tools.trial.settings import Difference, Settings, Trial

SMALL = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 0}
PLAN = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]


def trial(
    plan: dict[str, Any], world: int, break_it: str = "", loop: dict[str, Any] | None = None
) -> Trial:
    """Run on a rank of the pool; with something broken, if that is named."""
    settings = Settings(STACK, {**SMALL, **plan}, world, **(loop or {}))
    if not break_it:
        return ranks.run(settings)
    with pytest.MonkeyPatch.context() as patch:
        {"gradient": _lose_a_gradient, "update": _lose_an_update, "loss": _other_batches}[break_it](
            patch
        )
        return ranks.run(settings)


def _lose_a_gradient(patch: pytest.MonkeyPatch) -> None:
    """Each rank keeps its own gradients of one bucket: what an exchange that is left out does."""
    from zerofx.runtime.gradients import Gradients
    from zerofx.runtime.schedule import Flight

    real = Gradients.reduce

    def reduce(self: Any, buffer: torch.Tensor, bucket: int, scale: float) -> Any:
        own = buffer.view(self._layout.shard_size, -1)[self._world.rank].clone()
        flight = real(self, buffer, bucket, scale)
        if bucket != 2:
            return flight
        return Flight(flight.wait().copy_(own), None, bucket)

    patch.setattr(Gradients, "reduce", reduce)


def _lose_an_update(patch: pytest.MonkeyPatch) -> None:
    from zerofx import optim

    real, steps = optim.SGD.step, []

    def step(self: Any, *args: Any) -> Any:
        steps.append(1)
        return None if len(steps) == 2 else real(self, *args)

    patch.setattr(optim.SGD, "step", step)


def _other_batches(patch: pytest.MonkeyPatch) -> None:
    """A rank that reads what another one should."""
    patch.setattr(ranks, "_on", lambda device, values: vary((values,), {}, 1)[0][0])


# -- on real ranks --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("plan", "loop"),
    [
        ({}, {}),
        ({"stage": 1, "update": "in-backward"}, {}),
        ({"tiling": {"layers.*.fc": 4}}, {"accumulation": 2, "no_sync": True}),
        pytest.param({"ignored_params": ["layers.0"]}, {}, marks=pytest.mark.slow),
    ],
    ids=["stage 3", "in-backward", "tiles", "ignored"],
)
def test_what_trains_alike(pool: Pool, plan: dict[str, Any], loop: dict[str, Any]) -> None:
    found, other = pool.run(2, trial, plan, 2, "", loop)
    assert found.is_equal, str(found)
    assert all(worst.error < 1e-5 for worst in found.largest.values())
    micros = loop.get("accumulation", 1)
    assert found.compared["loss"] == 3 * 2 * micros and found.compared["parameter"] == 3 * 12
    assert ("gradient" in found.compared) is (plan.get("update") != "in-backward")
    assert not other.compared, "rank 0 compares"


@pytest.mark.parametrize(
    ("what", "kind", "step"), [("gradient", "gradient", 0), ("update", "parameter", 1)]
)
def test_the_first_difference_is_named(pool: Pool, what: str, kind: str, step: int) -> None:
    found, _ = pool.run(2, trial, {}, 2, what)
    first = found.first
    assert first is not None and not found.is_equal
    assert (first.kind, first.step) == (kind, step)
    if what == "gradient":
        assert first.name.startswith("layers.2.fc")
    assert first.got != first.expected and f"DIFFERS: {kind} {first.name}[" in str(found)


def test_the_loss_comes_first() -> None:
    found = trial({}, 1, "loss")
    assert found.first is not None and found.first.kind == "loss" and found.first.step == 0
    again = Trial.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found


def test_one_rank() -> None:
    assert trial({"precision": "bf16"}, 1).is_equal


CLOSURE = """
import torch
class Closure(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = a = torch.nn.Linear(8, 8)
        self.f = lambda x: a(x).tanh()
    def forward(self, x):
        return self.f(x).square().mean()
def build():
    build.calls = getattr(build, "calls", 0) + 1
    torch.rand(build.calls)  # so that the second one has other weights
    return Closure(), (torch.randn(4, 8),), {}
one = Closure()
def same():
    one.f = one.a
    return one, (torch.ones(4, 8),), {}
"""


def closure(name: str, world: int) -> Trial:
    return ranks.run(Settings(name, {"kernels": "aten"}, world))


def test_a_model_whose_functions_hold_its_modules(pool: Pool, tmp_path: Path) -> None:
    """A copy of the model would compute with the modules of the model itself."""
    source = tmp_path / "closure.py"
    source.write_text(CLOSURE)
    for found in (closure(f"{source}:build", 1), pool.run(2, closure, f"{source}:build", 2)[0]):
        assert found.is_equal and found.compared["parameter"] == 3 * 2, str(found)
    assert closure(f"{source}:same", 1).is_equal, "the same model each time: a copy is compared"


def drops(world: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "resolve", lambda *_, **__: _dropout())
        try:
            return str(ranks.run(Settings("a", {"kernels": "aten"}, world)))
        except TargetError as error:
            return str(error)


def _dropout() -> Target:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    return Target("drops", model, (torch.randn(8, 4),), {})


def test_draws_of_each_rank_cannot_be_drawn_again(pool: Pool) -> None:
    for text in pool.run(2, drops, 2):
        assert "drops draws random numbers. Each of 2 ranks has a stream" in text
    assert "equal within" in drops(1)


# -- the command line -----------------------------------------------------------------------------
def test_proofs_for_several_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "verify", STACK, "--world", "2", "--world", "512", *PLAN)
    assert "proved for each of 2 ranks" in text and "each of 512 ranks" in text
    (one,) = run_json(capsys, "verify", STACK, "--world", "1", *PLAN)
    assert one["world"] == 1 and one["outputs"] == 13 and one["counts"]["reductions"] == 0


def test_a_run_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    proof, found = run_json(capsys, "verify", STACK, "--world", "1", "--run", *PLAN, "--steps", "1")
    assert proof["world"] == found["world"] == 1 and found["is_equal"]


def test_islands_are_tried_and_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = tmp_path / "gated.py"
    source.write_text(
        "import torch\n"
        "class Gated(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        x = self.a(x)\n"
        "        return (self.b(x) if x.sum().item() < 1e9 else x).square().mean()\n"
        "def gated():\n    return Gated(), (torch.ones(2, 4),), {}\n"
    )
    model = f"{source}:gated"
    said = run(capsys, "verify", model, "--world", "1", *PLAN, status=1)
    assert "gated.py:8" in said and "as an island, which cannot be proved" in said
    (found,) = run_json(capsys, "verify", model, "--world", "1", "--run", *PLAN, "--steps", "1")
    assert found["is_equal"]
    (island,) = found["islands"]
    assert island.startswith("the model, 0% of the parameters gathered around it: .item() reads")
    said = run(capsys, "verify", model, *PLAN, "--run", "--set", "islands=refuse", status=1)
    assert "CaptureError" in said and "island" not in said


def test_a_difference_ends_with_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Difference("gradient", "head.weight", 2, 0.5, (1, 3), 4.0, 8.0)
    found = Trial(2, 3, "cpu", 1e-4, {"gradient": 36}, {"gradient": first}, first)
    monkeypatch.setattr(launch, "run_trial", lambda settings: found)
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", STACK, "--run", *PLAN])
    assert ended.value.code == 1
    assert (
        "DIFFERS: gradient head.weight[1, 3] in step 2 is 4; plain training has 8 (relative "
        "error of the tensor: 5.0e-01)" in capsys.readouterr().out
    )


def test_what_cannot_be_tried(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far.py").write_text(
        "import torch\n"
        "def far():\n    return torch.nn.Linear(2, 2, device='meta'), (torch.ones(1, 2),), {}\n"
    )
    with pytest.raises(TargetError, match="far is on the meta device, without weights to train"):
        ranks.run(Settings(f"{tmp_path}/far.py:far", {}))
    offload = {"optimizer": "cpu", "delayed": True}
    delayed = {"update": "in-backward", "offload": offload}
    with pytest.raises(PlanError, match=r"delayed updates with gradients that are one step old"):
        ranks.run(Settings(STACK, delayed))
    with pytest.raises(SystemExit):
        cli.main(["verify", f"{tmp_path}/far.py:far", "--world", "1", "--run"])
    said = capsys.readouterr()
    assert "TrialError: verify --run:" in said.err
    assert "Linear: proved for its one rank" in said.out  # what came first is not lost
    said = run(capsys, "verify", str(tmp_path), "--run", status=1)
    assert "Error" in said


# -- comparing ------------------------------------------------------------------------------------
def test_what_counts_as_equal() -> None:
    nan = torch.tensor([float("nan"), float("inf"), 1.0])
    same = Comparison(1e-6)
    same.add("gradient", 0, {"w": (nan.clone(), nan)})
    assert same.first is None
    for other in (torch.tensor([0.0, float("inf"), 1.0]), nan[:2]):
        found = Comparison(1e-6)
        found.add("gradient", 0, {"w": (other, nan)})
        assert found.first is not None and not found.first.error <= 1
    small = Comparison(1e-3)  # a bias whose true gradient is 0 has rounding alone
    tiny = {"w": (torch.ones(3), torch.ones(3)), "b": (torch.full((3,), 1e-12), torch.zeros(3))}
    small.add("gradient", 0, tiny)
    assert small.first is None
    small.add("gradient", 0, tiny | {"b": (torch.ones(3), torch.zeros(3))})
    assert small.first is not None and small.first.name == "b"


def test_batches_differ_and_stay_within_what_models_know() -> None:
    tokens, pixels, mask = torch.arange(12).view(3, 4), torch.randn(5), torch.tensor([True])
    (first, noisy, kept), _ = vary((tokens, pixels, mask), {}, 0)
    (second, _, _), _ = vary((tokens, pixels, mask), {}, 1)
    assert sorted(first.flatten().tolist()) == list(range(12)) and not torch.equal(first, second)
    assert 0 < float((noisy - pixels).abs().max()) < 1 and kept is mask
    assert torch.equal(first, vary((tokens, pixels, mask), {}, 0)[0][0])
