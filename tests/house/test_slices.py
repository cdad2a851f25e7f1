"""The slices of the slow tests: every test in exactly one, about equal times, passes kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
import slices

TESTS = [f"test_{file}.py::test_it[{cell}]" for file in "abc" for cell in range(20)]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let slices keep outcomes and the table in a folder of this test; there are three slices."""
    (tmp_path / "testing.md").write_text(f"# Tests\n\n{slices.TABLE_HEAD}")
    monkeypatch.setattr(slices, "ROOT", tmp_path)
    monkeypatch.setattr(slices, "BUILD", tmp_path / "build" / "slices")
    monkeypatch.setattr(slices, "NUM_SLICES", 3)
    monkeypatch.setattr(slices, "files_digest", lambda: "these")
    monkeypatch.setattr(slices, "TABLE", tmp_path / "testing.md")
    return tmp_path


def outcome(number: int, **fields: object) -> slices.Outcome:
    known = {"num_slices": 3, "commit": "c0ffee" * 6, "files": "these", "passed": True}
    times = {"test_a.py::test_it[0]": 1.0, "test_b.py::test_it[0]": 2.0}
    return slices.Outcome(number, **{**known, "date": "2026-01-31T", "times": times, **fields})


@pytest.mark.parametrize("num_slices", [1, 3, 7])
def test_every_test_is_in_one_slice(num_slices: int) -> None:
    times = {"test_a.py::test_it": 1.0, "test_b.py::test_it[3]": 50.0, "test_c.py::test_it": 4.0}
    parts = [slices.cut(TESTS, k + 1, num_slices, times) for k in range(num_slices)]
    assert [test for part in parts for test in part] == TESTS  # and each is one stretch
    seconds = [sum(slices.expected_s(test, times) for test in part) for part in parts]
    assert max(seconds) - min(seconds) <= 2 * 50.0


def test_cells_have_their_own_time_their_tests_or_the_default() -> None:
    times = {"a.py::test_it": 2.0, "a.py::test_it[long]": 60.0}
    expected = [
        slices.expected_s(f"a.py::test_{cell}", times) for cell in ("it[long]", "it[0]", "")
    ]
    assert expected == [60.0, 2.0, slices.DEFAULT_S]


def test_measured_times_replace_those_of_the_same_tests_only(tmp_path: Path) -> None:
    path = tmp_path / "times.txt"
    slices.write_times({"a.py::test_it[long]": 60.0, "b.py::test_it[x y]": 90.0}, path)
    slices.write_times({"a.py::test_it[0]": 1.0, "a.py::test_it[1]": 3.0}, path)
    assert slices.read_times(path) == {
        "a.py::test_it": 2.0,
        "a.py::test_it[long]": 60.0,
        "b.py::test_it[x y]": 90.0,
    }


def test_times_are_of_tests_that_exist() -> None:
    files = {path.name: path for path in (slices.ROOT / "tests").rglob("test_*.py")}
    gone = []
    for test in slices.read_times():
        file, name = test.partition("[")[0].split("::", 1)
        if file not in files or f"def {name.rpartition('::')[2]}(" not in files[file].read_text():
            gone.append(test)
    assert not gone, "remove these lines from slow_times.txt"


def test_passes_are_entered_and_other_slices_keep_theirs(build: Path) -> None:
    slices.write_table([outcome(1), outcome(2, edited=True), outcome(3, passed=False)])
    slices.write_table([outcome(3, commit="decade" * 6, seconds=1140.2)])
    table = (build / "testing.md").read_text().partition(slices.TABLE_HEAD)[2]
    assert table.splitlines() == [
        "| 1 of 3 | test_a to test_b | 2 | 0 | c0ffeec0ff | 2026-01-31 |",
        "| 2 of 3 | | | | not yet | |",
        "| 3 of 3 | test_a to test_b | 2 | 1,140 | decadedeca | 2026-01-31 |",
    ]


def test_rows_of_other_slices_go_when_the_number_changes(
    build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices.write_table([outcome(1)])
    monkeypatch.setattr(slices, "NUM_SLICES", 2)
    slices.write_table([])
    assert "c0ffee" not in (build / "testing.md").read_text()


@pytest.mark.parametrize("last_passes", [True, False])
def test_all_goes_on_where_it_stopped(
    build: Path, monkeypatch: pytest.MonkeyPatch, last_passes: bool
) -> None:
    ran = []

    def run(number: int, limit_s: int) -> None:
        ran.append(number)
        slices.save(outcome(number, passed=number < 3 or last_passes, matrix=[f"| {number} |\n"]))

    slices.save(outcome(1, matrix=["| 1 |\n"]))
    slices.save(outcome(2, files="others"))
    monkeypatch.setattr(slices, "run", run)
    assert slices.run_all(1) is last_passes
    assert ran == [2, 3]
    assert (build / "build" / "training-matrix.md").read_text().endswith("| 1 |\n| 2 |\n| 3 |\n")


def test_what_pytest_found_is_kept(build: Path) -> None:
    def found(test: str, seconds: float) -> SimpleNamespace:
        return SimpleNamespace(nodeid=f"tests/test_a.py::{test}", duration=seconds)

    stats = {"": [found("test_x", 0.5), found("test_y", 0.5)], "passed": [found("test_x", 1.0)]}
    slices.report(2, {**stats, "failed": [found("test_y", 2.0)], "error": [found("test_z", 0.0)]})
    kept = slices.saved()[2]
    assert kept.times == {
        "test_a.py::test_x": 1.5,
        "test_a.py::test_y": 2.5,
        "test_a.py::test_z": 0,
    }
    assert kept.failed == ["test_a.py::test_y", "test_a.py::test_z"]
    assert not kept.passed


@pytest.mark.parametrize("answer, slice_", [({"shallow": "false"}, 2), ({"shallow": "true"}, 3)])
def test_commits_take_turns(
    build: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, str], slice_: int
) -> None:
    def git(*arguments: str) -> str:
        if "--is-shallow-repository" in arguments:
            return answer["shallow"]
        return "7" if "--count" in arguments else "ff5"  # 0xff5 = 2 modulo 3

    monkeypatch.setattr(slices, "git", git)
    assert slices.turn() == slice_


def test_a_listed_slow_cell_that_is_gone_fails_its_file(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = request.node.getparent(pytest.Module)
    for listed, expected in (request.node.name, "passed"), ("test_gone[0]", "failed"):
        monkeypatch.setattr(conftest, "SLOW_CELLS", {module.path.name: {listed}})
        hook = conftest.pytest_make_collect_report(module)
        next(hook)
        with pytest.raises(StopIteration) as end:
            hook.send(SimpleNamespace(passed=True, outcome="passed", result=[request.node]))
        assert end.value.value.outcome == expected
