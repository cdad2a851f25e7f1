"""What a forward reads past its arguments and attributes: seen when it changes, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.errors import CaptureError

ATEN = {"kernels": "aten"}
X = torch.linspace(-1, 1, 8).view(2, 4)
TEMPERATURE = 1.0
SETTINGS = {"temperature": 1.0}
TABLE = torch.ones(4)


def heat(x: Tensor) -> Tensor:
    return x * TEMPERATURE * SETTINGS["temperature"]


class Model(nn.Module):
    """Reads settings and tensors from everywhere that users keep them."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.options: dict[str, Any] = {"scale": {"inner": [1.0, 1.0]}}
        self.config = SimpleNamespace(scale=1.0, steps=0)
        self.weights, self.history = [1.0], [0]
        self.mask = torch.ones(4)
        power = 1.0

        def act(x: Tensor) -> Tensor:
            return x * power

        def set_power(value: float) -> None:
            nonlocal power
            power = value

        self.act, self.set_power = act, set_power

    @property
    def scale(self) -> float:
        return self.config.scale * self.options["scale"]["inner"][1]

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.fc(x)) * self.scale * self.mask * self.gain
        return heat(x * sum(self.weights) * TABLE).sum() * getattr(self, "late", 1.0)


def _set_global() -> None:
    global TEMPERATURE
    TEMPERATURE *= 2


SHARED: list[Callable[[], Any]] = [
    _set_global,
    lambda: SETTINGS.update(temperature=2.0),
    lambda: setattr(Model, "gain", 2.0),
    lambda: TABLE.mul_(2.0),
]
OWN: list[Callable[[Any], Any]] = [
    lambda m: m.set_power(2.0),
    lambda m: setattr(m.config, "scale", 2.0),
    lambda m: m.options["scale"]["inner"].__setitem__(1, 2.0),
    lambda m: m.weights.append(2.0),
    lambda m: m.mask.mul_(2.0),
    lambda m: setattr(m, "late", 2.0),
]


def test_what_changes_outside_is_seen() -> None:
    plain, net = Model(), Model()
    net.load_state_dict(plain.state_dict())
    model: Any = zerofx.compile(net, ATEN)
    for shared in SHARED:
        before = model(X)
        shared()
        assert model(X) == plain(X) != before
    for own in OWN:
        before = model(X)
        own(model)
        own(plain)
        assert model(X) == plain(X) != before
    model(X).backward()
    plain(X).backward()
    assert model.fc.bias.grad is not None and torch.equal(model.fc.bias.grad, plain.fc.bias.grad)


def test_what_no_forward_names_is_not_looked_at() -> None:
    model: Any = zerofx.compile(Model(), ATEN)
    model(X)
    for step in range(3):
        model.config.steps = step
        model.history.append(step)
        model(X)
    assert len(model.programs) == 1


def test_a_setting_that_forward_changes_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    calls = {"n": 0}

    def count(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        calls["n"] += 1
        return out * calls["n"]

    net = nn.Sequential(nn.Linear(4, 1))
    net[0].register_forward_hook(count)
    with caplog.at_level(logging.WARNING, "zerofx"):
        model: Any = zerofx.compile(net, ATEN)
        for _ in range(4):
            model(X)
    assert ["changes calls['n']" in text for text in caplog.messages] == [True]
    assert len(model.programs) == 1


class Default(nn.Module):
    """Gives a setting its default in its first call, as transformers does for problem_type."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.config = SimpleNamespace(problem=None)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.problem is None:
            self.config.problem = "regression"
        made = self.fc(x)
        return (made * made if self.config.problem == "regression" else made).sum()


def test_a_default_that_the_first_call_fills_in_is_part_of_its_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "zerofx"):
        model: Any = zerofx.compile(Default(), ATEN)
        first = model(X)
        assert torch.equal(model(X), first)
        assert len(model.programs) == 1
    assert not caplog.messages
    model.config.problem = "other"
    model(X)
    assert len(model.programs) == 2


class Seeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return torch.dropout(self.fc(x), 0.5, True).sum()


def test_a_seed_inside_forward_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"seeds torch's generator, and test_capture_outside.py"):
        zerofx.compile(Seeded(), {**ATEN, "islands": "refuse"})(X)


def test_what_runs_under_a_seed_runs_eagerly() -> None:
    plain, model = Seeded(), Seeded()
    model.load_state_dict(plain.state_dict())
    compiled = zerofx.compile(model, ATEN)
    assert torch.equal(compiled(X), plain(X)) and torch.equal(compiled(X), plain(X))


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return (self.fc(x) + self.fc(y)).sum()


def test_a_written_input_that_shares_memory_is_refused() -> None:
    model, x = zerofx.compile(Writes(), ATEN), torch.ones(4, 4)
    model(x[:2], x[2:]).backward()  # next to each other
    for other in (x[:2], x[1:3]):
        with pytest.raises(CaptureError, match=r"writes to input x .* input y shares memory"):
            model(x[:2], other)


def test_tensors_that_a_hook_keeps_are_named(caplog: pytest.LogCaptureFixture) -> None:
    features: dict[str, Tensor] = {}

    def keep(module: nn.Module, given: Any, out: Tensor) -> None:
        features["fc"] = out

    net = nn.Sequential(nn.Linear(4, 1))
    net[0].register_forward_hook(keep)
    with caplog.at_level(logging.WARNING, "zerofx"):
        zerofx.compile(net, ATEN)(X)
    assert ["keeps tensors in features" in text for text in caplog.messages] == [True]


STEP = 0


class Counted(nn.Module):
    """Reads an attribute that has the name of a global of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.STEP = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * self.STEP).sum()


def test_a_global_that_shares_its_name_with_an_attribute_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = zerofx.compile(Counted(), ATEN)
    for step in range(3):
        monkeypatch.setitem(globals(), "STEP", step)
        model(X).backward()
    assert len(model.programs) == 1
