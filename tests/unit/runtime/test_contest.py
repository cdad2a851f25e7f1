"""Which of a region's two forms runs: the faster one, measured once and remembered."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from zerofx.runtime.regions import contest
from zerofx.runtime.regions.contest import Both, choice_file, in_faster_form

CALLS = 2 * (contest.ROUNDS + contest.WARM_UP)


def slow(args: list[Any]) -> str:
    time.sleep(0.003)
    return "slow"


def fast(args: list[Any]) -> str:
    return "fast"


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "region.bin"
    path.write_bytes(b"machine code")
    return path


@pytest.mark.parametrize(("compiled", "plain"), [(fast, slow), (slow, fast)])
def test_the_faster_form_goes_on(artifact: Path, compiled: Any, plain: Any) -> None:
    region = Both(compiled, plain, artifact)
    made = [region([]) for _ in range(CALLS - 1)]
    assert made[:4] == [compiled([]), plain([]), plain([]), compiled([])]
    assert sorted(made[:-1]) == sorted(["fast", "slow"] * (CALLS // 2 - 1))
    assert not region.is_chosen
    region([])
    assert region.is_chosen
    assert region.is_aten == (plain is fast)
    assert [region([]) for _ in range(5)] == ["fast"] * 5
    assert choice_file(artifact).read_text() == ("aten" if plain is fast else "compiled")
    again = Both(plain, compiled, artifact)  # the choice is remembered, not the speed
    assert again.is_chosen
    assert again([]) == "slow"


def test_a_call_that_raises_is_not_timed(artifact: Path) -> None:
    calls = 0

    def fails_at_first(args: list[Any]) -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        return "fast"

    region = Both(fails_at_first, slow, artifact)
    with pytest.raises(KeyboardInterrupt):
        region([])
    assert region([]) == "fast"
    assert [region([]) for _ in range(3)] == ["slow", "slow", "fast"]


@pytest.mark.parametrize("said", [b"", b"\xff\xfe", b"aten\n", None])
def test_what_cannot_be_read_is_measured_again(artifact: Path, said: bytes | None) -> None:
    if said is None:
        choice_file(artifact).mkdir()
    else:
        choice_file(artifact).write_bytes(said)
    region = Both(slow, fast, artifact)
    assert not region.is_chosen
    for _ in range(CALLS):
        region([])
    assert region.is_aten  # also where it cannot be written


def test_a_folder_that_is_gone_is_no_error(artifact: Path) -> None:
    region = Both(slow, fast, artifact.parent / "gone" / artifact.name)
    for _ in range(CALLS):
        region([])
    assert region.is_aten


def test_only_regions_with_an_artifact_take_part(artifact: Path) -> None:
    regions = in_faster_form({"a": fast, "b": fast}, {"a": slow, "b": slow}, {"b": artifact})
    assert regions["a"] is fast
    assert isinstance(regions["b"], Both)
