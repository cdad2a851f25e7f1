"""benchmarks.bigger_than_memory: what it counts, whom it kills, and a model that it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import bigger_job, bigger_than_memory
from zerofx.errors import BudgetError

MIB = 1 << 20
SMALL = {"layers": 2, "width": 64, "heads": 2, "seq": 16}


def job(folder: Path | None, limit: int | None, **sizes: int) -> dict[str, Any]:
    where = None if folder is None else str(folder)
    model = {**SMALL, **sizes}
    return {"model": model, "batch": 1, "steps": 2, "folder": where, "limit": limit}


def test_offloaded_and_not_train_alike(tmp_path: Path) -> None:
    far, near = (bigger_job.run(job(folder, None)) for folder in (tmp_path, None))
    assert far["losses"] == near["losses"] and len(far["losses"]) == 2
    assert far["nvme_bytes"] > near["nvme_bytes"] == near["host_bytes"] == 0
    assert near["device_bytes"] > far["device_bytes"]
    assert far["peak_bytes"] > far["before_bytes"] > 0


def test_the_engine_refuses_what_exceeds_the_limit(tmp_path: Path) -> None:
    found = bigger_job.run(job(tmp_path, 1 << 40))
    too_little = bigger_job.status_bytes("VmRSS") + found["device_bytes"]
    with pytest.raises(BudgetError, match="host_budget: GPT holds"):
        bigger_job.run(job(tmp_path, too_little))


def test_a_row_is_met_where_all_of_it_is() -> None:
    far = {"before_bytes": 40, "device_bytes": 30, "host_bytes": 30, "peak_bytes": 105,
           "losses": [1.0]}  # fmt: skip
    near = {"losses": [1.0], "peak_bytes": 900}

    def met(limit: int = 110, is_too_much: bool = True, **change: Any) -> bool:
        changed = {**far, **change}
        return bigger_than_memory.row("m", 440, limit, changed, near, is_too_much)["met"]

    found = bigger_than_memory.row("m", 440, 110, far, near, True)
    assert found["error"] == pytest.approx(0.05) and found["times"] == pytest.approx(440 / 105)
    assert met() and not met(is_too_much=False) and not met(limit=104)
    assert not met(losses=[1.0000001]) and not met(peak_bytes=111) and not met(peak_bytes=89)


@pytest.mark.slow
def test_a_process_with_a_limit_is_ended_by_it() -> None:
    assert bigger_than_memory.is_killed(job(None, 100 * MIB))


@pytest.mark.slow
def test_it_trains_what_its_memory_cannot_hold(tmp_path: Path) -> None:
    """Smaller than the benchmark, in which interpreter and torch weigh more: twice its memory."""
    sizes = {"layers": 32, "width": 512, "heads": 8, "seq": 64}
    found = bigger_than_memory.measure(sizes, 1, 2, 2.0, str(tmp_path))
    assert found["met"], {k: v for k, v in found.items() if k not in ("far", "near")}
    assert found["times"] > 2
