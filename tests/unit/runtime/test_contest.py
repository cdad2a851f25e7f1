"""Which of a region's two forms runs: measured, agreed on between ranks, and remembered."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from zerofx.runtime.regions import contest
from zerofx.runtime.regions.contest import Contest, choice_file


def slow(args: list[Any]) -> str:
    time.sleep(0.003)
    return "slow"


def fast(args: list[Any]) -> str:
    return "fast"


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / f"{name}.bin" for name in ("gains", "loses", "rare")}
    for path in found.values():
        path.write_bytes(b"machine code")
    return found


def a_contest(paths: dict[str, Path]) -> Contest:
    plain = {"gains": slow, "loses": fast, "rare": fast, "sizes": fast}
    return Contest(plain, {"gains": fast, "loses": slow, "rare": slow, "sizes": slow}, paths)


def run(regions: dict[str, Any], *names: str) -> list[str]:
    rounds = 2 * (contest.ROUNDS + contest.WARM_UP)
    return [regions[name]([]) for _ in range(rounds) for name in names]


def test_a_region_keeps_the_form_that_takes_less_time(paths: dict[str, Path]) -> None:
    one = a_contest(paths)
    assert one.said(5) == "7/0"  # of gains, loses and rare none is decided
    regions = one.begin(5, {"7/0"})
    assert run(regions, "gains")[:4] == ["fast", "slow", "fast", "slow"]
    assert run(regions, "loses")[:4] == ["slow", "fast", "slow", "fast"]
    assert regions["sizes"]([]) == "slow"  # it takes no part
    assert one.said(6) == "4/2"
    assert one.chosen({"4/2"}) is None
    late = one.said(5 + contest.CALLS)
    assert late == "0/2"  # "rare" runs compiled, and is measured by another run
    assert one.said(5 + contest.CALLS, is_held=True) == "7/2"
    assert one.chosen({late}) == {"loses"}
    chosen = one.regions({"loses"})
    assert [chosen[name]([]) for name in ("gains", "loses", "rare")] == ["fast", "fast", "slow"]
    kept = {
        name: choice_file(p).exists() and choice_file(p).read_text() for name, p in paths.items()
    }
    assert kept == {"gains": "compiled", "loses": "aten", "rare": False}
    again = a_contest(paths)
    assert again.said(0) == "4/2"
    assert run(again.begin(0, {"4/2"}), "loses")[:3] == ["fast"] * 3


def test_ranks_agree_on_what_all_of_them_found(paths: dict[str, Path]) -> None:
    for name, form in (("gains", "aten"), ("loses", "aten"), ("rare", "compiled")):
        choice_file(paths[name]).write_text(form)
    one = a_contest(paths)
    assert one.said(0) == "0/3"
    # another host has other records: "gains" is to be measured, by all ranks in the same calls
    regions = one.begin(0, {"0/3", "1/0"})
    assert run(regions, "gains")[:2] == ["fast", "slow"]
    assert regions["loses"]([]) == "slow"  # there it runs compiled
    assert one.said(20) == "0/0"
    assert one.chosen({"0/0", "0/3"}) == set()
    assert choice_file(paths["gains"]).read_text() == "compiled"
    assert choice_file(paths["loses"]).read_text() == "aten"  # not measured, hence not changed


def test_a_cache_that_cannot_be_written_to_is_no_error(paths: dict[str, Path]) -> None:
    one = a_contest({name: path.parent / "gone" / path.name for name, path in paths.items()})
    run(one.begin(0, {one.said(0)}), "gains", "loses", "rare")
    assert one.chosen({one.said(14)}) == {"loses", "rare"}
