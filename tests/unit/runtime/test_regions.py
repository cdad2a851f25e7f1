"""Compiled regions: what Inductor has nothing to make of, and the cache."""

from __future__ import annotations

import copy
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.exc import CppCompileError, InductorError

import zerofx
from zerofx.compat import inductor
from zerofx.compat.direct import replace_file
from zerofx.errors import ProgramError
from zerofx.model import emitted
from zerofx.runtime.regions import cache as region_cache
from zerofx.runtime.regions.cache import CompileCount
from zerofx.runtime.regions.keys import artifact_key, artifact_path, cache_dir


class FlatTokens(nn.Module):
    """Its first region only views the token ids, as GPT-2's does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids.view(-1, ids.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Doubled(nn.Module):
    """Its first region is simplified away: a product with one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * 1).square().mean()


@pytest.mark.parametrize("make", [FlatTokens, Doubled])
def test_a_region_of_views_alone_runs_as_it_stands(
    make: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    plain = make()
    x = torch.randint(0, 97, (2, 16)) if make is FlatTokens else torch.randn(2, 4)
    plain(x).backward()
    for start in range(2):
        torch.manual_seed(0)
        before = CompileCount.compiled
        model = zerofx.compile(make(), zerofx.Plan(kernels="inductor"))
        model(x).backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
        assert (CompileCount.compiled == before) == (start == 1)


# -- keys -----------------------------------------------------------------------------------------
REGION = """
def region(args):
    x0, x1 = args
    args.clear()
    total = aten.add.Tensor(x0, x1)  # f32[4]  blocks.0  model.py:5
    return total
"""


def test_comments_are_not_in_the_key() -> None:
    """A line put in above the model moves the lines that comments name, and compiles nothing."""
    moved = REGION.replace("model.py:5", "model.py:6").replace("def", "# a region\ndef")
    assert moved != REGION
    assert artifact_key(moved, "cpu") == artifact_key(REGION, "cpu")
    for other in (
        REGION.replace("add.Tensor", "mul.Tensor"),
        REGION.replace("(x0, x1)  #", "(x1, x0)  #"),
        REGION.replace("Tensor(x0, x1)", "Tensor(x0, '# x1')"),
    ):
        assert other != REGION
        assert artifact_key(other, "cpu") != artifact_key(REGION, "cpu")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_threads_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a CPU are written for a number of threads, which may change at any time."""
    keys = []
    for count in (1, 4, 1):
        torch.set_num_threads(count)
        keys.append(artifact_key(REGION, "cpu"))
    assert keys[0] == keys[2] != keys[1]
    monkeypatch.setattr(os, "cpu_count", lambda: 4096)
    assert artifact_key(REGION, "cpu") != keys[0]


TRAIN = """
import sys
import torch, zerofx
from torch import nn
from zerofx.runtime.regions.cache import CompileCount

class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 1024)

    def forward(self, x):
        return torch.tanh(self.fc(x)).sin().square().mean()

for count in map(int, sys.argv[1:]):
    torch.set_num_threads(count)
    if "model" not in globals():
        torch.manual_seed(0)
        plain, x = Mean(), torch.randn(256, 64)
        model = zerofx.compile(plain, zerofx.Plan(kernels="inductor"))
        torch.manual_seed(0)
        plain = Mean()
    plain.zero_grad(); model.zero_grad()
    wanted, found = plain(x), model(x)
    wanted.backward(); found.backward()
    torch.testing.assert_close(found, wanted)
    for p, q in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(q.grad, p.grad)
print(CompileCount.compiled, CompileCount.cached)
"""


def trained(cache: Path, *threads: int) -> tuple[int, int]:
    """Return how many regions a process compiled and found that trains with these threads."""
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, *map(str, threads)],
        env=os.environ | {"ZEROFX_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    compiled, cached = done.stdout.split()
    return int(compiled), int(cached)


@pytest.mark.slow
def test_more_threads_than_compiled_for(tmp_path: Path) -> None:
    """A process with more threads takes artifacts of its own, and may raise their number later."""
    several = max(os.cpu_count() or 1, 2)  # one a core: Inductor would ask for it on each run
    made, found = trained(tmp_path, 1)
    assert made > 0
    assert found == 0
    assert trained(tmp_path, several, 8 * several, 1) == (made, 0)
    assert trained(tmp_path, 1, 16) == (0, made)
    assert trained(tmp_path, several, 8 * several) == (0, made)


# -- the cache ------------------------------------------------------------------------------------
def refused(*_: object, **__: object) -> None:
    raise OSError(30, "Read-only file system")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_cache_that_was_given_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new cache is the user's alone; in one that others may write to, a folder of it is."""
    root = tmp_path / "cache"
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(root))
    assert cache_dir() == root and mode_of(root) == 0o700
    for mode in (0o755, 0o500, 0o1777, 0o775):
        root.chmod(mode)
        found = cache_dir()
        assert mode_of(root) == mode
        assert found == (root / f"zerofx-{os.geteuid()}" if mode & 0o020 else root)
    assert mode_of(found) == 0o700
    found.chmod(0o770)
    with pytest.raises(ProgramError, match=r"may be written by other users \(mode 770\)"):
        cache_dir()
    root.chmod(0o777)
    with pytest.raises(ProgramError, match=r"may be written by any user.*ZEROFX_CACHE_DIR"):
        cache_dir()


@pytest.mark.parametrize("place", ["file", "/proc/nowhere", "x" * 300])
def test_a_cache_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path / place))
    with pytest.raises(ProgramError, match="Set ZEROFX_CACHE_DIR"):
        cache_dir()


def test_code_of_others_in_the_cache_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that others may write to, from when a cache was open, are removed, with a warning."""
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    path = artifact_path("x = 1", "cpu")
    ours = [path, path.with_suffix(".json"), path.with_suffix(".0.so")]
    for file in ours:
        replace_file(file, b"code")
    assert artifact_path("x = 1", "cpu") == path and all(file.exists() for file in ours)
    for planted in (*ours, path.with_suffix(".sizes"), path.with_suffix(".py")):
        caplog.clear()
        for file in ours:
            replace_file(file, b"code")
        planted.write_text("planted")
        planted.chmod(0o666)
        assert artifact_path("x = 1", "cpu") == path
        assert not any(file.exists() for file in (*ours, planted))
        assert f"{planted} may be written by other users (mode 666)" in caplog.text
    path.parent.chmod(0o777)
    with pytest.raises(ProgramError, match="may be written by other users"):
        artifact_path("x = 1", "cpu")
    path.parent.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(path.parent, 4711, -1)
        with pytest.raises(ProgramError, match="belongs to user 4711"):
            artifact_path("x = 1", "cpu")


def test_modules_of_others_in_the_cache_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region that somebody has put among those of a program, and a program that is another's."""
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))

    def bound() -> Path:
        model = zerofx.compile(nn.Linear(3, 3), {"kernels": "aten"})
        model(torch.zeros(2, 3))
        return next(iter(model._programs.known.values()))[1]

    directory = bound()
    harm = f"from pathlib import Path\nPath({str(tmp_path / 'harm')!r}).touch()\n"
    (directory / "regions" / "planted.py").write_text(harm)
    (directory / "schedule.py").write_text(harm)
    assert bound() == directory
    (directory / "regions" / "planted.py").write_text(harm)
    directory.chmod(0o777)
    assert bound() == directory and mode_of(directory) == 0o700
    assert not (directory / "regions" / "planted.py").exists()
    assert not (tmp_path / "harm").exists()


def test_programs_are_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By age and by size, the oldest first, once a day; a model writes its own again."""
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    model = zerofx.compile(nn.Linear(3, 3), {"kernels": "aten"})
    model(torch.zeros(2, 3))
    key, (_, own) = next(iter(model._programs.known.items()))
    programs = own.parent
    days = {f"{n:016x}": age for n, age in enumerate((0, 2, 3, 29, 31))}
    for name, age in days.items():
        (programs / name).mkdir()
        (programs / name / "schedule.py").write_bytes(bytes(100))
        os.utime(programs / name, (time.time() - age * 86_400,) * 2)
    (programs / "notes").mkdir()
    emitted.prune(programs)
    assert all((programs / name).exists() for name in days)  # not again today
    monkeypatch.setattr(emitted, "KEPT_BYTES", 250)
    (programs / ".pruned").unlink()
    emitted.prune(programs)
    assert {n for n in days if (programs / n).exists()} == {f"{0:016x}"}
    assert (programs / "notes").exists() and own.exists()
    shutil.rmtree(own)
    model._programs._give_up(key)
    model(torch.zeros(2, 3)).sum().backward()
    assert model._programs.known[key][1].exists()


def test_read_only_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves what is in it; where others may write to it, it does not."""
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    os.chmod(tmp_path, 0o755)
    monkeypatch.setattr(os, "mkdir", refused)
    assert cache_dir() == tmp_path
    os.chmod(tmp_path, 0o1777)
    with pytest.raises(ProgramError, match=r"Read-only.*ZEROFX_CACHE_DIR"):
        cache_dir()


def test_compiling_into_a_read_only_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A region that is not there says where it cannot be written, and the way out."""
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("builtins.open", refused)
    with (
        pytest.raises(ProgramError, match=r"cannot be written to.*Read-only.*ZEROFX_CACHE_DIR"),
        region_cache._lock(cache_dir() / "x.lock", True),
    ):
        pass


# -- regions that Inductor cannot compile ----------------------------------------------------------
class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Exception | None]]:
    """Let compiling regions raise what the test puts into this list, and count the attempts.

    Without an error, a region has nothing to compile; a probe always compiles.
    """
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    raised: list[Exception | None] = []
    attempts: list[str] = []

    def compile_region(*given: object) -> None:
        attempts.append(str(given[2]))
        if raised and raised[0] is not None:
            raise raised[0]

    monkeypatch.setattr(region_cache, "compile_region", compile_region)
    monkeypatch.setattr(inductor, "_compile_probe", lambda lock_limit_s: None)
    yield raised
    assert attempts


def check_trains_as_plain() -> zerofx.CompiledModule:
    torch.manual_seed(0)
    plain, x = TwoLayers(), torch.randn(3, 4)
    plain(x).backward()
    torch.manual_seed(0)
    model = zerofx.compile(TwoLayers(), zerofx.Plan(kernels="inductor"))
    model(x).backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    return model


def test_a_region_that_cannot_be_compiled_runs_as_aten(
    failing: list[Exception | None], caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning per program; the cache remembers it, and reports still answer."""
    failing.append(NotImplementedError("no lowering for aten.strange\nand more lines"))
    model = check_trains_as_plain()
    (told,) = [r.getMessage() for r in caplog.records if "Inductor cannot compile" in r.message]
    assert "blocks_forward (of blocks.0): NotImplementedError: no lowering for aten.strange" in told
    assert "more lines" not in told
    assert "blocks" in str(model.programs[0].memory(basis="compiled"))
    failing[0] = AssertionError("it is tried again")
    caplog.clear()
    check_trains_as_plain()
    assert sum("Inductor cannot compile" in r.message for r in caplog.records) == 1


def test_another_version_tries_again(
    failing: list[Exception | None], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    failing.append(NotImplementedError("no lowering"))
    check_trains_as_plain()
    failing[0] = None
    monkeypatch.setattr(region_cache, "compiled_by", lambda: "another version")
    caplog.clear()
    check_trains_as_plain()
    assert not [r for r in caplog.records if r.name == "zerofx"]
    assert not list(cache_dir().glob("regions/*.failed"))


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        MemoryError("cannot allocate"),
        CppCompileError(["g++"], "g++: fatal error: Killed signal terminated program cc1plus"),
        InductorError(OSError(28, "No space left on device"), None),
    ],
)
def test_errors_of_the_machine_are_raised(
    failing: list[Exception | None], error: Exception
) -> None:
    """They say nothing of the region, and nothing of them is kept."""
    failing.append(error)
    with pytest.raises(ProgramError, match=r"region \w+ could not be compiled on this machine"):
        check_trains_as_plain()
    assert not list(cache_dir().glob("regions/*.failed"))
    failing[0] = None
    check_trains_as_plain()


def test_a_machine_on_which_nothing_compiles(
    failing: list[Exception | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is to blame for an error that does not say, a graph shows that is known to compile."""

    def fails() -> None:
        raise RuntimeError("C++ compile error")

    failing.append(RuntimeError("C++ compile error"))
    monkeypatch.setattr(inductor, "_compile_probe", fails)
    with pytest.raises(ProgramError, match="could not be compiled on this machine"):
        check_trains_as_plain()


class Masked(torch.nn.Module):
    """Chooses between two tensors that it makes of nothing, as masks of attention are made."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.where(x > 0, torch.zeros(()), torch.full((), -1.0))
        return (self.a(x).tanh() + bias).square().sum()


@pytest.mark.parametrize("dynamic", ["off", "auto"])
def test_regions_that_make_tensors_are_compiled(
    dynamic: str, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    plain = Masked()
    model = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(dynamic=dynamic, kernels="inductor"))
    for length in (3, 5, 7):
        x = torch.randn(length, 4)
        torch.testing.assert_close(model(x), plain(x))
    assert not [r for r in caplog.records if "Inductor cannot compile" in r.message]
