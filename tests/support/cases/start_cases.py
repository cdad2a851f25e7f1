"""Faults of a rank while a job starts up, and what the other ranks then see."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES

import zerofx
from zerofx import api
from zerofx.comm import groups, hosts
from zerofx.comm.world import World
from zerofx.errors import ZerofxError
from zerofx.model import programs
from zerofx.runtime.store import init as shard_init
from zerofx.runtime.tiers import homes

GPT = CASES["gpt"]
SILENT = ("absent", "killed")
RAISING = ("raises", "exits", "is interrupted", "has no memory")
LATER = ("forward", "state_dict", "save", "load")  # behind a compile that went well
INSIDE: dict[str, tuple[Any, str]] = {
    "plan": (api, "as_plan"),
    "meeting": (groups, "meet"),
    "groups": (groups, "_new_group"),
    "agreement": (World, "agree"),
    "weights": (shard_init, "_take_bucket"),
    "capture": (programs, "capture"),
    "folder": (homes, "prepare"),
}


@dataclass(frozen=True)
class Fault:
    """What happens to rank `odd` of `size`: its kind, where, and who makes the process group.

    made_by: "user", "zerofx" (rank 0 serves the store) or "torchrun" (zerofx, and the store is
        served by a process of its own).
    has_hosts: every rank is taken to have a host of its own.
    """

    kind: str
    point: str
    made_by: str
    stage: int
    size: int
    odd: int
    has_hosts: bool = False

    def __str__(self) -> str:
        return (
            f"rank {self.odd} of {self.size} {self.kind} at {self.point}, "
            f"group by {self.made_by}, stage {self.stage}{', each on a host' * self.has_hosts}"
        )

    @property
    def is_told(self) -> bool:
        """Whether the others learn of it at once; not inside torch's own wait for a new group."""
        return self.kind in RAISING and self.point != "groups"


@dataclass(frozen=True)
class Seen:
    """What a waiting rank saw, and how long after the fault (or its own start, if later)."""

    message: str
    after_s: float


def all_faults() -> list[Fault]:
    """Return 60 faults, in which every kind meets every point where it makes sense."""
    silent = ["start", "meeting", "groups", "agreement", "weights", *LATER]
    raising = ["plan", "meeting", "groups", "agreement", "weights", "capture"]
    pairs = [(kind, point) for point in silent for kind in SILENT]
    pairs += [(kind, point) for point in raising for kind in RAISING]
    pairs += [(kind, "folder") for kind in (*SILENT, "raises", "exits")]
    faults = []
    for i, (kind, point) in enumerate(pairs):
        size = 2 + i % 2
        made_by = ("user", "zerofx", "torchrun")[i % 3]
        faults.append(Fault(kind, point, made_by, (i // 2) % 4, size, (i // 3) % size))
    early = [(k, "start") for k in SILENT] + [("raises", "plan"), ("exits", "plan")]
    makers = ("user", "zerofx", "torchrun")
    for (size, odd), made_by, (kind, point) in product(((3, 0), (2, 1)), makers, early):
        fault = Fault(kind, point, made_by, len(faults) % 4, size, odd)
        seen = {(f.kind, f.point, f.made_by, f.size, f.odd) for f in faults}
        if len(faults) < 60 and (kind, point, made_by, size, odd) not in seen:
            faults.append(fault)
    assert len(set(faults)) == len(faults) == 60
    return faults


@dataclass(frozen=True)
class Again:
    """Ranks that are given a wrong plan first, and the rank that comes later than the other."""

    refusing: tuple[int, ...]
    late: int


AGAIN = [Again((0,), 1), Again((1,), 0), Again((0, 1), 0), Again((0, 1), 1)]


def start_again(made_by: str, port: int) -> list[str]:
    """Compile, and once more where that raised, on two ranks; return what was raised at first."""
    rank = int(os.environ["RANK"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ZEROFX_TIMEOUT_S="30")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(made_by == "torchrun")
    said = []
    for again in AGAIN:
        dist.destroy_process_group()
        if rank == again.late:
            time.sleep(0.3)
        started = time.monotonic()
        plan = {"stage": 3, "kernels": "aten"}
        model = torch.nn.Linear(4, 4)
        with pytest.raises(ZerofxError) as info:
            zerofx.compile(model, plan | {"shape": 1} if rank in again.refusing else plan)
        compiled: Any = zerofx.compile(model, plan)
        compiled(torch.ones(2, 4)).sum().backward()
        assert time.monotonic() - started < 25, "a rank was waited for in vain"
        said.append(f"{info.typename}: {info.value}")
        del compiled
    return said


def run(fault: Fault, limit_s: float, folder: str, port: int) -> Seen | str:
    """Start up and train for one step, on every rank; return what this rank saw."""
    with pytest.MonkeyPatch.context() as patch:
        if fault.has_hosts:
            patch.setattr(hosts, "host_key", lambda: f"host-{os.environ['RANK']}")
        return _run(fault, limit_s, folder, port)


def _run(fault: Fault, limit_s: float, folder: str, port: int) -> Seen | str:
    rank, marks = int(os.environ["RANK"]), Path(folder)
    os.environ["ZEROFX_TIMEOUT_S"] = str(limit_s)
    if fault.made_by != "user":
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(fault.made_by == "torchrun")
    if rank == fault.odd:
        return _odd(fault, marks, limit_s)
    started = time.time()
    try:
        for _ in _points(fault, folder):
            pass
    except ZerofxError as error:
        ended, at = time.time(), marks / "fault"
        begun = max(started, float(at.read_text()) if at.exists() else 0.0)
        (marks / f"done-{rank}").touch()
        if (marks / "stopped").exists():
            os.kill(int((marks / "stopped").read_text()), signal.SIGCONT)
        return Seen(str(error), ended - begun)
    return "nothing was raised"


def _odd(fault: Fault, marks: Path, limit_s: float) -> str:
    """Run up to the fault. Whatever is raised is caught: the process goes on for a while."""

    def trip(*_: Any, **__: Any) -> Any:
        (marks / "fault").write_text(str(time.time()))
        return _happen(fault, marks, limit_s)

    said = "nothing was raised"
    with pytest.MonkeyPatch.context() as patch:
        if fault.point in INSIDE:
            patch.setattr(*INSIDE[fault.point], trip)
        try:
            for point in _points(fault, str(marks)):
                if point == fault.point:
                    trip()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
            _wait(fault, marks, limit_s)
    return said


def _happen(fault: Fault, marks: Path, limit_s: float) -> None:
    if fault.kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "stopped":
        (marks / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.kind in ("absent", "stopped"):
        _wait(fault, marks, limit_s)
        raise RuntimeError("it came too late")
    if fault.kind == "exits":
        sys.exit("enough")
    if fault.kind == "is interrupted":
        raise KeyboardInterrupt
    if fault.kind == "has no memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    raise ValueError("a fault")


def _wait(fault: Fault, marks: Path, limit_s: float) -> None:
    """Stay alive until the other ranks have raised."""
    deadline = time.monotonic() + limit_s + 30
    while time.monotonic() < deadline and len(list(marks.glob("done-*"))) < fault.size - 1:
        time.sleep(0.05)


def _points(fault: Fault, folder: str) -> Iterator[str]:
    """Compile, train a step, save and load; yield the name of what comes next."""
    plan: dict[str, Any] = {"stage": fault.stage, "kernels": "aten", "bucket_bytes": 4096}
    if fault.point == "folder":
        plan["offload"] = {"activations": "nvme", "path": folder}
    yield "start"
    model: Any = zerofx.compile(GPT.make(), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield "forward"
    text = torch.randint(0, 32, (2, 8))
    model(text, text).backward()
    optimizer.step()
    todo: dict[str, Callable[[], Any]] = {
        "state_dict": model.state_dict,
        "save": lambda: zerofx.save(f"{folder}/saved", model, optimizer),
        "load": lambda: zerofx.load(f"{folder}/saved", model, optimizer),
    }
    for point, do in todo.items():
        yield point
        do()
