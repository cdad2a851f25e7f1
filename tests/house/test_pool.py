"""The pool of test ranks: errors come back as they were, and the next job finds a sound team."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from pool import Died, Pool, RemoteTraceback
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zerofx
from zerofx.errors import PlanError


def who(greeting: str) -> tuple[str, int, int, int]:
    return greeting, dist.get_rank(), dist.get_world_size(), torch.get_num_threads()


def rank_one_errs() -> None:
    if dist.get_rank() == 1:
        raise PlanError("stage 7")
    dist.barrier()


def test_results_come_in_rank_order(pool: Pool) -> None:
    assert pool.run(2, who, "hello") == [("hello", 0, 2, 1), ("hello", 1, 2, 1)]
    assert pool.run(2, "test_pool:who", "again")[1] == ("again", 1, 2, 1)


def test_an_error_comes_back_with_its_traceback(pool: Pool) -> None:
    with pytest.raises(PlanError, match="stage 7") as caught:
        pool.run(2, rank_one_errs)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback) and "in rank_one_errs" in str(cause)
    assert pool.run(2, who, "hello")[1] == ("hello", 1, 2, 1)


def meshes_of_results() -> list[bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    return [each.device_mesh is mesh for each in (cut, torch.zeros_like(cut), cut + cut)]


def test_dtensors_lie_on_the_mesh_of_their_own_job(pool: Pool) -> None:
    for _ in range(2):
        assert pool.run(2, meshes_of_results) == [[True] * 3] * 2


def compiles() -> None:
    for _ in range(3):
        zerofx.compile(torch.nn.Linear(2, 2), {"kernels": "aten"})


def number_of_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_groups_of_a_job_end_with_it(pool: Pool) -> None:
    pool.renew()
    before = pool.run(2, number_of_threads)
    pool.run(2, compiles)
    assert pool.run(2, number_of_threads) == before


def dies() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_death_is_an_error_unless_expected(pool: Pool) -> None:
    with pytest.raises(RuntimeError, match=r"ranks died with exit codes \{0: -9\}"):
        pool.run(2, dies)
    assert pool.run(2, dies, may_die=True) == [Died(-9), None]


def hangs() -> None:
    time.sleep(60 if dist.get_rank() == 1 else 0)


def test_a_hang_is_named(pool: Pool) -> None:
    pool.run(2, dist.get_rank)  # starting the processes may take longer than the time limit
    with pytest.raises(TimeoutError, match=r"test_pool:hangs: ranks \[1\] of 2 ran over"):
        pool.run(2, hangs, timeout_s=5)


def environment(value: str | None) -> tuple[str | None, int]:
    before = os.environ.get("ZEROFX_TIMEOUT_S")
    if value is not None:
        os.environ["ZEROFX_TIMEOUT_S"] = value
    return before, int(torch.randint(1000, ()))


def test_jobs_do_not_see_each_other(pool: Pool) -> None:
    assert pool.run(1, environment, "3") == pool.run(1, environment, None)


def warns() -> None:
    warnings.warn("a new deprecation", DeprecationWarning, stacklevel=1)


def ignores() -> None:
    warnings.simplefilter("ignore")


def test_warnings_are_errors_in_workers_too(pool: Pool, pytestconfig: pytest.Config) -> None:
    assert "error" in pytestconfig.getini("filterwarnings")
    pool.run(1, ignores)  # as libraries do where they are imported
    with pytest.raises(DeprecationWarning, match="a new deprecation"):
        pool.run(1, warns)
