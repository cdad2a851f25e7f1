"""The slow tests in slices: one slice fits into a CI run, and successive commits run all of them.

    python tests/slices.py run [K]  slice K; without K, the slice whose turn it is at this commit
    python tests/slices.py all      every slice that has not passed with these files; a summary
    python tests/slices.py table    enter the passes under build/slices into docs/testing.md
    python tests/slices.py times    enter the measured seconds into tests/slow_times.txt

In the order of collection the slow tests are one sequence. It is cut into NUM_SLICES stretches of
about equal expected time, so that tests of one file stay together except at a cut. docs/testing.md
describes the whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matrix_table

NUM_SLICES = 14  # each about 20 minutes on 2 cores
LIMIT_S = 40 * 60  # a slice that takes longer has failed
HANG_S = 20 * 60  # a single test that takes longer has failed, with all tracebacks
NUM_WORKERS = 2

ROOT = Path(__file__).parents[1]
TIMES = ROOT / "tests" / "slow_times.txt"
TABLE = ROOT / "docs" / "testing.md"
BUILD = ROOT / "build" / "slices"
TESTED = ("zerofx", "tests", "examples", "benchmarks", "pyproject.toml")
DEFAULT_S = 10.0  # expected of a test that was never timed
LISTED_S = 20.0  # a cell that takes longer has a line of its own in slow_times.txt

TIMES_HEAD = f"""\
# Seconds that slow tests take on one of 2 busy cores, measured: written by `make slow-times`, read
# when the slow tests are cut into slices. A test with several cells has the mean of its cells here;
# each cell above {LISTED_S:.0f} s has its own line and is left out of the mean.

"""
TABLE_HEAD = "| slice | files | tests | seconds | passed at | on |\n|---|---|---|---|---|---|\n"


@dataclass
class Outcome:
    """What one run of a slice found."""

    number: int
    num_slices: int = field(default_factory=lambda: NUM_SLICES)
    commit: str = ""
    edited: bool = False  # files differ from the commit's
    files: str = ""  # digest of all that the tests run
    date: str = ""
    seconds: float = 0.0
    passed: bool = False
    times: dict[str, float] = field(default_factory=dict)  # test -> seconds, as they ran
    failed: list[str] = field(default_factory=list)
    matrix: list[str] = field(default_factory=list)  # rows of build/training-matrix.md
    problem: str = ""  # why the slice failed, if not through a test

    @property
    def line(self) -> str:
        """Return the outcome in one line."""
        result = "passed" if self.passed else "FAILED"
        edited = ", with uncommitted changes," if self.edited else ""
        why = f": {self.problem}" if self.problem else ""
        at = f"at {self.commit[:10]}{edited} in {self.seconds:,.0f} s"
        return f"slice {self.number} of {self.num_slices} {result} {at}{why}"

    @property
    def row(self) -> str:
        """Return the row of docs/testing.md."""
        files = [test.partition(".py")[0] for test in (min(self.times), max(self.times))]
        cells = [f"{self.number} of {self.num_slices}", "{} to {}".format(*files)]
        cells += [str(len(self.times)), f"{self.seconds:,.0f}", self.commit[:10], self.date[:10]]
        return "| " + " | ".join(cells) + " |\n"


# --- cutting


def cut(tests: Sequence[str], number: int, num_slices: int, times: dict[str, float]) -> list[str]:
    """Return the tests of slice `number` (from 1): those whose middle lies in its share of time."""
    tests = sorted(tests, key=lambda test: test.partition("::")[0])  # stable: else as collected
    expected = [expected_s(test, times) for test in tests]
    share = sum(expected) / num_slices
    chosen, begin = [], 0.0
    for test, seconds in zip(tests, expected, strict=True):
        if number - 1 <= (begin + seconds / 2) / share < number:
            chosen.append(test)
        begin += seconds
    return chosen


def expected_s(test: str, times: dict[str, float]) -> float:
    """Return the seconds of this cell, else of its test's cells on average, else the default."""
    return times.get(test, times.get(test.partition("[")[0], DEFAULT_S))


def read_times(path: Path = TIMES) -> dict[str, float]:
    """Return test or cell -> seconds."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    pairs = [line.split(maxsplit=1) for line in lines if line.strip() and line[0] != "#"]
    return {test: float(seconds) for seconds, test in pairs}


def write_times(measured: dict[str, float], path: Path = TIMES) -> None:
    """Write what was measured, cell by cell; lines of other tests stay."""
    short: dict[str, list[float]] = defaultdict(list)
    times: dict[str, float] = {}
    for cell, seconds in measured.items():
        if seconds > LISTED_S:
            times[cell] = seconds
        else:
            short[cell.partition("[")[0]].append(seconds)
    times |= {test: sum(found) / len(found) for test, found in short.items()}
    again = {cell.partition("[")[0] for cell in measured}
    kept = {
        test: seconds
        for test, seconds in read_times(path).items()
        if test not in measured and test not in again
    }
    lines = [f"{seconds:7.1f}  {test}\n" for test, seconds in sorted((kept | times).items())]
    path.write_text(TIMES_HEAD + "".join(lines), encoding="utf-8")


# --- outcomes


def name_of(nodeid: str) -> str:
    """Return `test_file.py::test[cell]` for a pytest node id."""
    path, _, test = nodeid.partition("::")
    return f"{path.rpartition('/')[2]}::{test}"


def report(number: int, reports: dict[str, list[Any]]) -> None:
    """Leave what pytest found of a slice where `run` looks for it. Called at the end of pytest."""
    outcome = Outcome(number)
    times: dict[str, float] = defaultdict(float)
    for found in (r for kind in reports.values() for r in kind if hasattr(r, "duration")):
        times[name_of(found.nodeid)] += found.duration
    broken = reports.get("failed", []) + reports.get("error", [])
    done = reports.get("passed", []) + reports.get("failed", [])
    outcome.times = {test: round(seconds, 2) for test, seconds in times.items()}
    outcome.failed = sorted({name_of(r.nodeid) for r in broken})
    outcome.matrix = matrix_table.rows(done)
    save(outcome)


def save(outcome: Outcome) -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    path = BUILD / f"{outcome.number}.json"
    path.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")


def saved(folder: Path | None = None) -> dict[int, Outcome]:
    """Return the outcome of each slice that has run, if slices were cut as they are now."""
    paths = (folder or BUILD).glob("*.json")
    outcomes = [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return {o.number: o for o in outcomes if o.num_slices == NUM_SLICES}


# --- what there is to test


def git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True)
    return result.stdout.decode().strip()


def files_digest() -> str:
    """Return a digest of all files that the slow tests run: names and bytes, committed or not."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *TESTED)
    digest = hashlib.sha256()
    for name in sorted(set(listed.split("\0"))):
        path = ROOT / name
        if path.is_file():
            digest.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def turn() -> int:
    """Return the slice of this commit: commits are counted, so that successive ones take turns."""
    if git("rev-parse", "--is-shallow-repository") == "true":
        print("A shallow clone cannot count its commits: the slice follows from the commit's name.")
        count = int(git("rev-parse", "HEAD"), 16)
    else:
        count = int(git("rev-list", "--count", "HEAD"))
    return count % NUM_SLICES + 1


# --- running


def run(number: int, limit_s: int) -> Outcome:
    """Run one slice in a pytest process of its own, within its limit; keep what it found."""
    path = BUILD / f"{number}.json"
    path.unlink(missing_ok=True)
    commit, files = git("rev-parse", "HEAD"), files_digest()
    edited = bool(git("status", "--porcelain", "--", *TESTED))
    began = time.monotonic()
    # An interrupt lets pytest still report what it has found. A shell may have had it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = ["timeout", "--foreground", "--signal=INT", "--kill-after=60", str(limit_s)]
    command += [sys.executable, "-m", "pytest", "-n", str(NUM_WORKERS), "--dist", "worksteal"]
    command += ["-o", f"faulthandler_timeout={HANG_S}", "--slice", str(number)]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    outcome = saved().get(number, Outcome(number))
    outcome.commit, outcome.edited, outcome.files = commit, edited, files
    outcome.date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    outcome.seconds = round(time.monotonic() - began, 1)
    outcome.passed = code == 0
    if files_digest() != files:
        outcome.passed, outcome.problem = False, "files changed while it ran"
    elif code in (124, 137):
        outcome.problem = f"it ran over its limit of {limit_s} s"
    elif code and not outcome.failed:
        outcome.problem = f"pytest ended with exit status {code}"
    save(outcome)
    conclude(outcome)
    return outcome


def conclude(outcome: Outcome) -> None:
    """Print the failures and the last line of a slice; append that line to build/slices/log.txt."""
    for test in outcome.failed:
        print(f"FAILED {test}")
    print(outcome.line, flush=True)
    with (BUILD / "log.txt").open("a", encoding="utf-8") as log:
        log.write(outcome.line + "\n")


def run_all(limit_s: int) -> bool:
    """Run each slice that has not passed with these files; return whether all have now."""
    files = files_digest()
    for number in range(1, NUM_SLICES + 1):
        before = saved().get(number)
        if before is not None and before.passed and before.files == files:
            print(f"{before.line}, with the same files: not run again", flush=True)
        else:
            run(number, limit_s)
    outcomes = saved()
    write_table(outcomes.values())
    matrix_table.write(ROOT / "build", [row for o in outcomes.values() for row in o.matrix])
    print("\nthe slow tests:")
    for _, outcome in sorted(outcomes.items()):
        print(" ", outcome.line)
        for test in outcome.failed:
            print("     FAILED", test)
    return len(outcomes) == NUM_SLICES and all(o.passed for o in outcomes.values())


def write_table(outcomes: Iterable[Outcome]) -> None:
    """Enter passes into the table at the end of docs/testing.md; other slices keep their rows.

    Rows of another number of slices go, since those slices were others. A pass with uncommitted
    changes belongs to no commit and is not entered.
    """
    text, head, old = TABLE.read_text(encoding="utf-8").partition(TABLE_HEAD)
    assert head, f"{TABLE} has no table of slices"
    names = [f"{number} of {NUM_SLICES}" for number in range(1, NUM_SLICES + 1)]
    rows = {name: f"| {name} | | | | not yet | |\n" for name in names}
    for row in old.splitlines(keepends=True):
        name = row.split("|")[1].strip()
        if name in rows:
            rows[name] = row
    rows |= {names[o.number - 1]: o.row for o in outcomes if o.passed and not o.edited}
    TABLE.write_text(text + head + "".join(rows.values()), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/slices.py")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="run one slice")
    one.add_argument("number", type=int, nargs="?", choices=range(1, NUM_SLICES + 1))
    every = commands.add_parser("all", help="run every slice that has not passed with these files")
    for runs in (one, every):
        runs.add_argument("--limit-s", type=int, default=LIMIT_S, help="of one slice, in seconds")
    for name in ("table", "times"):
        merge = commands.add_parser(name, help=f"merge what runs found into the {name}")
        merge.add_argument("folder", type=Path, nargs="?", help="default: build/slices")
    options = parser.parse_args()
    if options.command == "run":
        return 0 if run(options.number or turn(), options.limit_s).passed else 1
    if options.command == "all":
        return 0 if run_all(options.limit_s) else 1
    if options.command == "table":
        write_table(saved(options.folder).values())
    else:
        found = saved(options.folder).values()
        write_times({test: s for outcome in found for test, s in outcome.times.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
