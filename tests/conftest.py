"""What every test gets: one thread, repeatable examples, and a reason where a GPU is missing."""

from __future__ import annotations

import os
import sys

# Before torch is imported: its thread pools are made once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("COLUMNS", None)  # printed lines stay whole, whatever terminal runs the tests

from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import matrix_table
import pytest
import slices
import torch
from hypothesis import HealthCheck, settings
from leftovers import python_dispatches
from nvme_cases import disk, engine, file, kept, store_engine  # noqa: F401  (fixtures)
from pool import pool  # noqa: F401  (a fixture: real gloo ranks)
from triton_interpreter import interpreted  # noqa: F401  (a fixture: a process of its own)

# No deadlines: a busy machine is not a failure. Derandomized: a red run is red again.
settings.register_profile(
    "zerofx",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("zerofx")


def _listed_slow_cells() -> dict[str, set[str]]:
    """Return the tests that slow_cells.txt names, by file."""
    tests = Path(__file__).parent
    listed: dict[str, set[str]] = defaultdict(set)
    for line in (tests / "slow_cells.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            file, _, name = line.partition("::")
            listed[file].add(name)
    absent = listed.keys() - {path.name for path in tests.rglob("test_*.py")}
    assert not absent, f"slow_cells.txt names files that are gone: {sorted(absent)}"
    return listed


SLOW_CELLS = _listed_slow_cells()
LAUNCHER = "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"


@pytest.fixture(autouse=True)
def _import_path() -> Iterator[None]:
    """Take back what a test added to the import path, which new test ranks would inherit.

    The command line adds the folder of the file that it is given.
    """
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def _no_launcher() -> Iterator[None]:
    """Take back the launcher's variables that a library has set, as Lightning does.

    A process that starts later would take itself for a rank of that job.
    """
    before = {name: os.environ.get(name) for name in LAUNCHER}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def _operators_are_not_python() -> Iterator[None]:
    yield
    assert not python_dispatches()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice",
        type=int,
        choices=range(1, slices.NUM_SLICES + 1),
        help="run this slice of the slow tests only (tests/slices.py)",
    )


@pytest.hookimpl(wrapper=True, trylast=True)  # what the file holds, before anything is selected
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail the collection of a file that lacks a cell which slow_cells.txt lists for it."""
    report = yield
    if isinstance(collector, pytest.Module) and report.passed:
        absent = SLOW_CELLS.get(collector.path.name, set()) - {node.name for node in report.result}
        if absent:
            report.outcome = "failed"
            report.longrepr = f"slow_cells.txt lists tests that are not there: {sorted(absent)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With ZEROFX_NEEDS_ALL, a test that lacks a package fails instead of being skipped."""
    report = yield
    if report.skipped and os.environ.get("ZEROFX_NEEDS_ALL") and "CUDA" not in str(report.longrepr):
        report.outcome = "failed"
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in SLOW_CELLS.get(item.path.name, ()):
            item.add_marker(pytest.mark.slow)
    if number := config.getoption("slice"):
        # keywords would not do: they hold the names of the folders above, too
        marked = [item for item in items if item.get_closest_marker("slow")]
        slow = {slices.name_of(item.nodeid): item for item in marked}
        chosen = set(slices.cut(list(slow), number, slices.NUM_SLICES, slices.read_times()))
        kept = [item for name, item in slow.items() if name in chosen]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write what a slice found; else how training compared, where that was tested, as a table."""
    if hasattr(config, "workerinput"):
        return  # one of several processes, which knows of its own tests only
    stats = terminalreporter.stats
    if number := config.getoption("slice"):
        slices.report(number, stats)
        return
    reports = [r for kind in ("passed", "failed") for r in stats.get(kind, [])]
    path = matrix_table.write(Path(__file__).parents[1] / "build", matrix_table.rows(reports))
    if path is not None:
        terminalreporter.write_line(f"how training compared: {path}")
