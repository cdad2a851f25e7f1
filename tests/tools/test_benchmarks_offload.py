"""benchmarks.offload and benchmarks.overlap: who takes part, what is refused, which ratios."""

from __future__ import annotations

import argparse
import sys

import pytest

from benchmarks import peers, systems
from benchmarks.offload import DEEPSPEED, DEFAULT, LOSS_TOLERANCE, Field, check, line
from benchmarks.overlap import LANES
from benchmarks.overlap import line as overlap_line
from benchmarks.step_time import Rounds

PLAIN = [[4.0, 3.0], [5.0, 2.0]]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    systems.add_options(parser, DEFAULT)
    for package in peers.PACKAGES:
        parser.add_argument(f"--{package}-python")
    return parser.parse_args(words)


def rounds(*wall_s: float, losses: list[list[float]] | None = None) -> Rounds:
    once = list(wall_s)
    return Rounds(once, once, once, PLAIN if losses is None else losses)


def test_peers_without_an_interpreter_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    options = parsed()
    field = Field(options)
    assert field.left_out == {
        "deepspeed-offload": "no --deepspeed-python",
        "torchao-offload": "no --torchao-python",
    }
    assert not set(field.left_out) & set(field.names)
    assert "deepspeed-offload left out: no --deepspeed-python" in capsys.readouterr().err
    assert not hasattr(options, "deepspeed_python")  # a result file does not say where they lie


@pytest.mark.parametrize("python", [sys.executable, "/nowhere/python"])
def test_an_interpreter_without_the_package_is_named(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = systems.System(lambda model: model, package="no_such_peer")
    monkeypatch.setitem(systems.SYSTEMS, "absent-offload", absent)
    field = Field(parsed("--systems", "fsdp2"))
    field.names.append("absent-offload")
    field._find("no_such_peer", python)
    assert field.names == ["fsdp2"]
    assert field.left_out["absent-offload"].startswith(f"{python} has no no_such_peer: ")


def test_all_means_what_needs_no_other_environment() -> None:
    names = systems.chosen(parsed("--systems", "all"))
    assert not any(systems.SYSTEMS[name].package for name in names)
    assert "fsdp2-offload" in names


def test_another_training_is_refused() -> None:
    near = [[4.0, 3.0], [5.0, 2.0 * (1 + LOSS_TOLERANCE / 2)]]
    far = [[4.0, 3.0], [5.0, 2.0 * (1 + LOSS_TOLERANCE * 2)]]
    check("zerofx-3-host", "4x128", rounds(losses=near), PLAIN)
    with pytest.raises(SystemExit, match="zerofx-3-host at 4x128: losses differ from plain"):
        check("zerofx-3-host", "4x128", rounds(losses=far), PLAIN)
    # processes that do not talk agree at their first step alone
    check("torchao-offload", "4x128", rounds(losses=far), PLAIN)


def test_ratios_are_taken_within_rounds() -> None:
    data = {
        "fsdp2": rounds(1.0, 2.0, 4.0),
        "zerofx-3-host": rounds(0.5, 1.5, 1.0),
        DEEPSPEED: rounds(2.0, 2.0, 8.0),
    }
    row = line("4x128", "zerofx-3-host", data)
    assert (row["time_ratio"], row["deepspeed_ratio"], row["target"]) == (0.5, 0.25, 1.0)
    del data[DEEPSPEED]
    assert line("4x128", "zerofx-3-host", data)["deepspeed_ratio"] is None


@pytest.mark.parametrize("states", ["cpu", "nvme"])
def test_a_step_is_held_against_the_longest_lane_of_its_round(states: str) -> None:
    alone = ([1.0, 2.0], [0.5, 4.0], [0.5, 0.5], [0.25, 0.5])[: len(LANES[states])]
    found = dict(zip(LANES[states], alone, strict=True))
    found |= {"after": [2.0, 6.5], "step": [1.1, 4.4]}
    row = overlap_line("4x1024", 1, states, found)
    in_turn = [sum(lane[0] for lane in alone) / 1.0, sum(lane[1] for lane in alone) / 4.0]
    assert row["ratio"] == pytest.approx(1.1) and row["met"]
    assert row["in_turn"] == pytest.approx(sum(in_turn) / 2)
