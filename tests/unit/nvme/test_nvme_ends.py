"""How engines, files and processes end: what was submitted has ended, and nothing is left."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from nvme_cases import Disk, random_bytes

from zerofx import nvme
from zerofx.errors import NvmeError

MIB, KIB = 1 << 20, 1 << 10


def test_an_engine_that_is_closed(tmp_path: Path, disk: Disk) -> None:
    before = threading.active_count()
    engine = nvme.IOEngine(2, 256 * KIB)
    with nvme.File(tmp_path / "file", "w", engine=engine) as file:
        disk.gate.clear()
        x = random_bytes(MIB)
        file.submit_write(x)
        read = file.submit_read(torch.empty_like(x))
        closer = threading.Thread(target=engine.close)
        closer.start()
        disk.gate.set()
        closer.join(30)
        assert not closer.is_alive() and threading.active_count() == before
        assert torch.equal(read.wait(), x)  # what was submitted has ended
        with pytest.raises(NvmeError, match=r"the engine is closed. Create another"):
            file.submit_read(x)
        engine.close()


def test_an_engine_that_is_dropped(tmp_path: Path) -> None:
    """Its threads end what was submitted, and then go."""
    engine = nvme.IOEngine(2, 256 * KIB)
    file = nvme.File(tmp_path / "file", "w", engine=engine)
    file.write(torch.ones(10))
    mine = list(engine._threads)
    request = file.submit_write(torch.ones(MIB))
    del file, engine
    gc.collect()
    request.wait()
    for thread in mine:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # that is what it is about
def test_files_do_not_follow_a_fork(file: Any) -> None:
    file.write(torch.ones(10))
    pid = os.fork()
    if pid == 0:  # pragma: no cover - another process
        try:
            file.submit_read(torch.ones(10))
        except NvmeError as error:
            os._exit(0 if "do not survive a fork" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    file.read(torch.ones(10))


AT_EXIT = """
import sys, torch
from zerofx import nvme
store = nvme.NvmeStore.create(sys.argv[1], {"w": 40_000_000}, label="left")
file = nvme.File(sys.argv[1] + "/file", "w")
file.submit_write(torch.full((10_000_000,), 7, dtype=torch.int32))
store.write("w", torch.ones(10_000_000))
print(store.path)
"""


def test_the_interpreter_ends_in_peace(tmp_path: Path) -> None:
    """With requests under way and nothing closed: they end, the store goes, nothing is printed."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", AT_EXIT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert not Path(run.stdout.strip()).exists()
    data = torch.frombuffer(bytearray((tmp_path / "file").read_bytes()), dtype=torch.int32)
    assert data.numel() == 10_000_000 and bool((data == 7).all())
