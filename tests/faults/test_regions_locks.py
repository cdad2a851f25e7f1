"""The locks of compiled regions: a process that was stopped while it held one stops no other."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn
from torch._functorch._aot_autograd.autograd_cache import FXGraphCacheMiss

import zerofx
from zerofx.compat import inductor
from zerofx.compat.direct import direct_of
from zerofx.runtime.regions import cache as region_cache
from zerofx.runtime.regions.cache import CompileCount

HOLD = """
import fcntl, os, signal, socket, sys
files = [open(path, "w") for path in sys.argv[1:]]
for file in files:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(f"process {os.getpid()} of {socket.gethostname()}")
    file.flush()
print("held", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@contextmanager
def held(*locks: Path) -> Iterator[int]:
    """Have a stopped process hold these locks; yield its id."""
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLD, *map(str, locks)], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()


def step_of(model: Any) -> list[torch.Tensor]:
    """Return the gradients of one backward."""
    model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean().backward()
    return [p.grad for p in model.parameters()]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def trains_right() -> int:
    """Train compiled and plain, and return how many regions this process compiled for that."""
    before = CompileCount.compiled
    model = zerofx.compile(net(), {"kernels": "inductor"})
    for found, wanted in zip(step_of(model), step_of(net()), strict=True):
        local = found.to_local() if hasattr(found, "to_local") else found
        torch.testing.assert_close(local, wanted.view(local.shape) if local.numel() else local)
    return CompileCount.compiled - before


@pytest.fixture
def regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of regions of its own, in which a lock is waited for briefly."""
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(region_cache, "LOCK_WAIT_S", 0.3)
    return tmp_path / "regions"


def test_stopped_holder(regions: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = trains_right()
    assert made
    artifacts = sorted(regions.glob("*.bin"))
    for artifact in artifacts:
        artifact.unlink()
        direct_of(str(artifact)).unlink(missing_ok=True)
    lock = artifacts[0].with_suffix(".lock")
    with held(lock) as pid:
        started = time.monotonic()
        assert trains_right() == made
        assert time.monotonic() - started < 60
        said = [r.getMessage() for r in caplog.records if r.name == "zerofx"]
        # Other tests of this machine share Inductor's cache, whose locks may be busy too.
        (warning,) = [text for text in said if str(lock) in text]
        for text in (f"process {pid} of {socket.gethostname()}", "0.3 s"):
            assert text in warning
        assert sorted(regions.glob("*.bin")) == artifacts  # what was compiled privately is shared
        assert trains_right() == 0


def test_locks_name_their_holder(regions: Path) -> None:
    regions.mkdir()
    lock = regions / "x.lock"
    lock.write_text("process 1 of an earlier, longer holder" * 9)
    with region_cache._lock(lock, 0.0) as is_held:
        assert is_held
        assert lock.read_text() == f"process {os.getpid()} of {socket.gethostname()}"
        with region_cache._lock(lock, 0.0) as again:
            assert not again
        assert lock.read_text()  # looking at a lock leaves its holder's name


def test_a_library_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a library in Inductor's cache costs a compile elsewhere; any other one is an error."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    shared = os.environ["TORCHINDUCTOR_CACHE_DIR"]

    def load(folder: str) -> str:
        library = Path(folder, "ab", "half.so")
        if os.environ["TORCHINDUCTOR_CACHE_DIR"] == shared:
            library.parent.mkdir(parents=True)
            library.touch()
            module_from_spec(spec_from_file_location("half", library))  # type: ignore[arg-type]
        return os.environ["TORCHINDUCTOR_CACHE_DIR"]

    def missed(folder: str) -> str:
        if os.environ["TORCHINDUCTOR_CACHE_DIR"] == folder:
            raise FXGraphCacheMiss
        return os.environ["TORCHINDUCTOR_CACHE_DIR"]

    assert inductor._despite_cache(lambda: missed(shared), 1.0) != shared
    assert inductor._despite_cache(lambda: load(shared), 1.0) != shared
    assert f"{shared}/ab/half.so cannot be loaded" in caplog.text
    with pytest.raises(ImportError, match="file too short"):
        inductor._despite_cache(lambda: load(str(tmp_path)), 1.0)


def test_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert region_cache.lock_limit_s() == region_cache.LOCK_WAIT_S == 60
    monkeypatch.setenv("ZEROFX_TIMEOUT_S", "7")
    assert region_cache.lock_limit_s() == 7


# -- several ranks --------------------------------------------------------------------------------
def trained_right() -> int:
    """Train for two steps, compiled and plain; return how many regions this rank compiled."""
    before = CompileCount.compiled
    model, plain = zerofx.compile(net(), {"kernels": "inductor"}), net()
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            step_of(each)
            optimizer.step()
            optimizer.zero_grad()
    for name, value in zerofx.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    return CompileCount.compiled - before


def train_beside(folder: str) -> tuple[int, str]:
    """Train where rank 1 finds all locks held; return how many there are, and the warnings."""
    rank = os.environ["RANK"]
    os.environ["ZEROFX_CACHE_DIR"] = f"{folder}-{rank}"
    os.environ["ZEROFX_TIMEOUT_S"] = "8"
    made = trained_right()
    for artifact in Path(f"{folder}-{rank}").glob("regions/*.*"):
        if artifact.suffix != ".lock":
            artifact.unlink()
    locks = sorted(Path(f"{folder}-{rank}").glob("regions/*.lock"))
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerofx").addHandler(handler)
    try:
        with held(*locks) if rank == "1" else contextlib.nullcontext():
            assert trained_right() == made
    finally:
        logging.getLogger("zerofx").removeHandler(handler)
    return len(locks), " ".join(texts)


@pytest.mark.slow
def test_one_of_two_ranks_compiles_privately(pool: Pool, tmp_path: Path) -> None:
    """The ranks agree whoever compiled what; a rank that waits for a lock is busy meanwhile."""
    first, second = pool.run(2, train_beside, str(tmp_path / "cache"), timeout_s=250.0)
    assert "was locked" not in first[1]
    assert second[1].count("was locked for 8 s by process") == second[0] > 0


# -- a process that was really stopped ------------------------------------------------------------
TRAIN = """
import logging, os, signal, sys
from torch._inductor import cpp_builder
from zerofx.runtime.regions import cache as region_cache
import test_regions_locks as cases

def stopping(owner, name, caller):
    real = getattr(owner, name)
    def call(*args, **kwargs):
        if sys._getframe(1).f_code.co_name == caller:
            print("stopped", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*args, **kwargs)
    setattr(owner, name, call)

stopping(region_cache, "compile_region", sys.argv[1])
stopping(cpp_builder.CppBuilder, "build", sys.argv[1])
logging.basicConfig(format="%(message)s")
print(cases.trains_right(), flush=True)
"""


@contextmanager
def training(folder: Path, stop_in: str, is_cold: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Have a process train that stops where this function calls a compiler.

    is_cold: Inductor's own caches are new, so that the compiler is asked for its instructions.
    """
    env = {"ZEROFX_CACHE_DIR": str(folder / "zerofx"), "ZEROFX_TIMEOUT_S": "3"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # kernels are compiled by this very process
    if is_cold:
        env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        env["TMPDIR"] = str(folder)  # there are the headers that Inductor has compiled
    found = subprocess.Popen(
        [sys.executable, "-c", TRAIN, stop_in],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield found
    finally:
        found.kill()
        found.communicate()


def proceed(process: subprocess.Popen[str]) -> None:
    """Continue a process that is about to stop itself: before it has stopped, that does nothing."""
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    os.kill(process.pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("stop_in", ["_compile", "check_build", "_worker_compile_cpp"])
def test_stopped_in(tmp_path: Path, stop_in: str) -> None:
    """A process is stopped while it has a region compiled, asks the compiler for its vector
    instructions, or compiles a kernel: the last two hold locks of Inductor's."""
    with training(tmp_path, stop_in) as stopped:
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "stopped\n"
        with training(tmp_path, "nowhere") as other:
            out, err = other.communicate(timeout=200)
        assert int(out) > 0, err
        assert "was locked" in err, err
        proceed(stopped)  # and finds its work done
        while (line := stopped.stdout.readline()) == "stopped\n":
            proceed(stopped)
        _, err = stopped.communicate(timeout=60)
        assert line.strip().isdigit(), f"it ended with {stopped.returncode}: {err}"


@pytest.mark.slow
def test_what_a_killed_compiler_left(tmp_path: Path) -> None:
    for said in "", "cannot be loaded":
        with training(tmp_path, "nowhere") as process:
            out, err = process.communicate(timeout=200)
        assert out.strip().isdigit() and said in err, err
        for library in (tmp_path / "inductor").rglob("*.main.so"):  # of kernels
            library.write_bytes(b"")
        shutil.rmtree(tmp_path / "zerofx")


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3, 5])
def test_killed_while_it_writes(tmp_path: Path, number: int) -> None:
    """What a writer left is whole or is not loaded."""
    killing = TRAIN.replace(
        "stopping(region_cache",
        f"""
count, real = [0], os.replace
def replace(*args):
    count[0] += 1
    if count[0] == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
os.replace = replace
stopping(region_cache""",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "TRAIN", killing)
        with training(tmp_path, "nowhere", is_cold=False) as killed:
            killed.communicate(timeout=200)
        assert killed.returncode == -signal.SIGKILL
    with training(tmp_path, "nowhere", is_cold=False) as other:
        out, err = other.communicate(timeout=200)
    assert int(out) > 0, err
