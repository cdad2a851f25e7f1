"""benchmarks.runs: which file each run wrote, of which zerofx/, and what is measured again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, runs
from benchmarks.runs import RUNS, Run

NOW = {"commit": "0123abcd", "package": "digest", "edited": False}
WRITES = """\
import pathlib, sys
(pathlib.Path("{results}") / "tried-1.json").write_text('{{"results": []}}')
print("written to benchmarks/results/tried-1.json")
sys.exit({status})
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty checkout in which runs are measured."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()  # else the installed package comes first
    for name, place in (("ROOT", ""), ("RESULTS", ""), ("BUILD", "build")):
        monkeypatch.setattr(runs, name, tmp_path / place)
    monkeypatch.setattr(runs, "CURRENT", tmp_path / "current.json")
    (tmp_path / "current.json").write_text("{}")
    monkeypatch.setattr(runs, "source", lambda: NOW)
    return tmp_path


def benchmark(folder: Path, status: int = 0) -> None:
    text = WRITES.format(results=folder, status=status)
    (folder / "benchmarks" / "tried.py").write_text(text)


def test_every_run_has_a_file_and_a_module() -> None:
    assert set(runs.current()) == {run.name for run in RUNS}
    for run in RUNS:
        assert (report.RESULTS / f"{runs.file_of(run.name)}.json").exists()
        assert (report.RESULTS.parent / f"{run.arguments.split()[0]}.py").exists()


@pytest.mark.parametrize(
    ("of", "same"),
    [
        (NOW, True),
        (NOW | {"package": "other"}, False),
        (NOW | {"edited": True}, False),
        ({}, False),
    ],
)
def test_a_file_is_of_this_package_or_not(of: dict[str, Any], same: bool, folder: Path) -> None:
    (folder / "a-1.json").write_text(json.dumps({"source": of} if of else {}))
    runs.enter("a", "a-1")
    assert runs.state("a", NOW) == {"file": "a-1", "commit": of.get("commit"), "same": same}
    assert not runs.state("a", NOW | {"edited": True})["same"]


@pytest.mark.parametrize("status", [0, 1])
def test_what_was_measured_is_remembered(
    status: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark(folder, status)  # one that misses its own target has written its file, too
    assert runs.again([Run("tried", "tried")], folder, force=False)
    assert runs.current() == {"tried": "tried-1"} and "tried: tried-1, " in capsys.readouterr().out


def test_what_is_of_this_package_is_not_measured_again(folder: Path) -> None:
    (folder / "a-1.json").write_text(json.dumps({"source": NOW}))
    runs.enter("tried", "a-1")
    benchmark(folder)
    assert runs.again([Run("tried", "tried")], folder, force=False)
    assert runs.current() == {"tried": "a-1"}
    assert runs.again([Run("tried", "tried")], folder, force=True)
    assert runs.current() == {"tried": "tried-1"}


def test_a_run_without_a_file_fails_and_the_next_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "benchmarks" / "broken.py").write_text("import time; time.sleep(60)")
    benchmark(folder)
    chosen = [
        Run("slow", "broken", limit_s=1), Run("needy", "tried", packages=("no_such_package",)),
        Run("peer", "tried {peers}"), Run("tried", "tried"),
    ]  # fmt: skip
    assert not runs.again(chosen, folder / "missing", force=False)
    told = capsys.readouterr().out
    assert "slow: not after 1 s" in told and "slow: no file" in told
    assert "needy: left out, as it needs the package no_such_package" in told
    assert "peer: left out, as it needs" in told and "missing" in told
    assert runs.current() == {"tried": "tried-1"}


def test_the_list_and_an_unknown_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.main([]) == 0
    assert f" of {len(RUNS)} are of zerofx/ as it is now" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        runs.main(["--measure", "stap time"])
    assert "'step time'" in capsys.readouterr().err


def test_source_names_this_checkout() -> None:
    commit = subprocess.run(
        ["git", "-C", str(report.RESULTS), "rev-parse", "HEAD"], capture_output=True, text=True,
        check=False,
    ).stdout  # fmt: skip
    found = report.source()
    assert (found["commit"] or "") == commit[:8]
    assert bool(found["package"]) == bool(commit)
