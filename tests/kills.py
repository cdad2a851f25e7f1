"""The kill matrix: one of two ranks is killed in every phase of a job, at every stage and tier.

    python tests/kills.py [--only background] [--seed 1]     # make faults

Each point starts a job of two ranks from a snapshot of step 2. It compiles, resumes, trains, saves
at step 4, once in the background and once not, and one rank is killed by SIGKILL within one phase:
after a fraction of the Python calls that the phase makes in an undisturbed job, or of the time that
a background save takes. A point is right if

- the survivor raises a zerofx error within `LIMIT_S` that names the killed rank, and
- the newest snapshot, which is at least the last one that a save has published, gives the values
  of parameters and optimizer states of an undisturbed job bit for bit, at worlds 1, 2, 3 and 4.

Everything else is a fault, and is printed with the point that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "support")]

from pool import Died, Pool  # noqa: E402  (found by the lines above)

import zerofx  # noqa: E402
import zerofx.api  # noqa: E402  (not at the first call, within a phase)
from zerofx.errors import ZerofxError  # noqa: E402

LIMIT_S = 5.0
TRIES = 4  # at earlier and earlier moments of a phase
FIRST, SAVED, LAST = 2, 4, 6  # steps: the snapshot to start from, the one that is saved, the end
PHASES = "compile", "resume", "forward", "backward", "step", "save", "background"
PLANS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 1, states on the host": {"stage": 1, "offload": {"optimizer": "cpu"}},
    "stage 2, states on the host": {"stage": 2, "offload": {"optimizer": "cpu"}},
    "stage 3, all on the host": {"offload": {"optimizer": "cpu", "parameters": "cpu"}},
    "stage 3, activations on the host": {"offload": {"activations": "cpu"}},
    "stage 2, states on NVMe": {"stage": 2, "offload": {"optimizer": "nvme"}},
    "stage 3, states on NVMe": {"offload": {"optimizer": "nvme"}},
    "stage 3, all on NVMe": {"offload": {"optimizer": "nvme", "parameters": "nvme"}},
}

States = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A moment at which a rank is killed. fraction: of the phase that has passed by then."""

    plan: str
    phase: str
    rank: int
    fraction: float = 0.0

    def __str__(self) -> str:
        return f"{self.plan}; rank {self.rank} {self.fraction:.0%} into {self.phase}"


# -- a job ----------------------------------------------------------------------------------------
class Model(nn.Module):
    """Blocks with a shape that no number of ranks divides, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 13)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(13, 29), nn.GELU(), nn.Linear(29, 13)) for _ in range(3)
        )
        self.head = nn.Linear(13, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Watch:
    """Counts the calls of each phase, or kills this process at one of them.

    kill_at: the phase and the number of its calls before the end; None to count only.
    mark: the file that receives the time of the kill.
    """

    def __init__(self, kill_at: tuple[str, float] | None, mark: Path) -> None:
        self.kill_at, self.mark = kill_at, mark
        self.counts: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        count, limit = 0, None
        if self.kill_at is not None and self.kill_at[0] == name:
            limit = self.kill_at[1]

        def called(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")
            if limit is not None and count > limit:
                self.die()

        sys.setprofile(called)
        try:
            yield
        finally:
            sys.setprofile(None)
        self.counts[name] = count

    def die(self) -> None:
        sys.setprofile(None)
        self.mark.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def plan_of(name: str, folder: Path) -> dict[str, Any]:
    plan = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 0} | PLANS[name]
    if "nvme" in PLANS[name].get("offload", {}).values():
        plan["offload"] = plan["offload"] | {"path": str(folder / "nvme")}
    return plan


def model_of() -> Model:
    torch.manual_seed(0)
    return Model()


def compiled(model: nn.Module, plan: dict[str, Any]) -> tuple[Any, Any]:
    model = zerofx.compile(model, plan)
    is_far = "nvme" in plan.get("offload", {}).values()
    kind = zerofx.optim.AdamW if is_far else torch.optim.AdamW
    return model, kind(model.parameters(), lr=1e-2)


def states_of(model: Any, optimizer: Any) -> States:
    """Return all values whole, on rank 0."""
    return {
        "model": {n: t.clone() for n, t in (zerofx.full_state_dict(model) or {}).items()},
        "optimizer": zerofx.full_optimizer_state_dict(model, optimizer),
    }


def job(
    name: str, folder_name: str, kill_at: tuple[str, float] | None, victim: int, keeps: bool
) -> tuple[Any, ...]:
    """Run the job; return this rank's counts and the states after each step.

    keeps: whether to collect states. If another rank is killed, return the time at which the error
    came, and its text.
    """
    folder, rank = Path(folder_name), int(os.environ["RANK"])
    watch = Watch(kill_at if rank == victim else None, folder / "mark")
    states: dict[int, States] = {}
    try:
        plain, plan = model_of(), plan_of(name, folder)
        with watch.phase("compile"):
            model, optimizer = compiled(plain, plan)
        with watch.phase("resume"):
            extra = zerofx.resume(folder / "run", model, optimizer)
        first = extra["step"] if extra else 0
        for step in range(first + 1, LAST + 1):
            draws = torch.Generator().manual_seed(2 * step + rank)
            ids = torch.randint(0, 11, (3, 5), generator=draws)
            with watch.phase("forward" if step == LAST - 1 else "early forward"):
                loss = model(ids)
            with watch.phase("backward" if step == LAST - 1 else "early backward"):
                loss.backward()
            with watch.phase("step" if step == LAST - 1 else "early step"):
                optimizer.step()
            optimizer.zero_grad()
            if keeps:
                states[step] = states_of(model, optimizer)
            if step in (FIRST, SAVED):
                save(watch, folder, (model, optimizer), step, rank)
    except ZerofxError as error:
        return "error", time.time(), f"{type(error).__name__}: {error}"
    except Exception as error:
        return "raw", time.time(), "".join(traceback.format_exception(error))
    return "ended", watch.counts, states


def save(watch: Watch, folder: Path, run: tuple[Any, Any], step: int, rank: int) -> None:
    """Save in the foreground, or in the background where that is to be killed."""
    model, optimizer = run
    is_killed = watch.kill_at is not None and watch.kill_at[0] == "background"
    in_background = (folder / "in background").exists() and step == SAVED
    began = time.perf_counter()
    with watch.phase("save" if step == SAVED else "early save"):
        future = zerofx.save(
            folder / "run", model, optimizer, {"step": step}, step=step, keep=3,
            background=in_background,
        )  # fmt: skip
    if in_background and is_killed:
        assert watch.kill_at is not None
        time.sleep(watch.kill_at[1])
        watch.die()
    if in_background:
        future.result()
        watch.counts["background"] = time.perf_counter() - began
    if rank == 0:
        (folder / "published").write_text(str(step))


def resumed(name: str, folder_name: str) -> tuple[int, States]:
    """Load the newest snapshot at this world size; return its step and values."""
    folder = Path(folder_name)
    model, optimizer = compiled(model_of(), plan_of(name, folder))
    extra = zerofx.resume(folder / "run", model, optimizer)
    assert extra is not None
    return extra["step"], states_of(model, optimizer)


# -- the matrix -----------------------------------------------------------------------------------
def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from leaves(each, f"{path}/{i}")
    else:
        yield path, value


def difference(found: States, wanted: States) -> str:
    """Return the first value that differs, or an empty string."""
    mine, theirs = dict(leaves(found)), dict(leaves(wanted))
    if mine.keys() != theirs.keys():
        return f"other keys: {sorted(mine.keys() ^ theirs.keys())[:3]}"
    for path, value in mine.items():
        other = theirs[path]
        both = isinstance(value, Tensor) and isinstance(other, Tensor)
        if not (torch.equal(value, other) if both else value == other):
            return path
    return ""


class Undisturbed:
    """The job of one plan without a kill: its start, its states, and the length of its phases."""

    def __init__(self, pool: Pool, plan: str, home: Path) -> None:
        self.start = home / "start"
        self.states: dict[int, States] = {}
        self.counts: list[dict[str, float]] = []
        self.background_s: list[float] = []
        for in_background in (True, False):  # the latter last: its phases are counted
            shutil.rmtree(home, ignore_errors=True)
            self.start.mkdir(parents=True)
            if in_background:
                (self.start / "in background").touch()
            answers = pool.run(2, job, plan, str(self.start), None, 0, True)
            assert all(kind == "ended" for kind, *_ in answers), answers
            if in_background:
                self.background_s = [counts["background"] for _, counts, _ in answers]
        self.states = answers[0][2]
        self.counts = [counts for _, counts, _ in answers]
        shutil.rmtree(self.start / "run" / f"step-{SAVED:06d}")
        (self.start / "run" / "latest").unlink()
        (self.start / "run" / "latest").symlink_to(f"step-{FIRST:06d}")
        (self.start / "published").write_text(str(FIRST))
        shutil.rmtree(self.start / "nvme", ignore_errors=True)
        # of a job that resumes, in new processes: compile and resume are those of a restart
        again = home / "again"
        shutil.copytree(self.start, again, symlinks=True)
        pool.renew()
        answers = pool.run(2, job, plan, str(again), None, 0, False)
        assert all(kind == "ended" for kind, *_ in answers), answers
        for mine, (_, counts, _) in zip(self.counts, answers, strict=True):
            mine.update(counts)


def kill(pool: Pool, point: Point, before: Undisturbed, folder: Path) -> tuple[str, float]:
    """Run one point; return its fault ("" if it is right), and the seconds until the error.

    A phase makes fewer calls than were counted where it waits less for the other rank; if it ends
    before the kill, an earlier moment of it is taken.
    """
    is_timed = point.phase == "background"
    length = (before.background_s if is_timed else before.counts)[point.rank]
    if not is_timed:
        length = length[point.phase]
    for number in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before.start, folder, symlinks=True)
        if is_timed:
            (folder / "in background").touch()
        kill_at = point.phase, point.fraction * length / 2**number
        pool.renew()  # so that a phase makes about as many calls as when they were counted
        try:
            answers = pool.run(
                2, job, point.plan, str(folder), kill_at, point.rank, False, may_die=True,
                timeout_s=30.0,
            )  # fmt: skip
        except TimeoutError as error:
            return f"a rank hangs: {error.__cause__}", 0.0
        if isinstance(answers[point.rank], Died):
            break
    fault, taken = of_survivor(answers, point, folder)
    return fault or of_snapshot(pool, point, before, folder), taken


def of_survivor(answers: list[Any], point: Point, folder: Path) -> tuple[str, float]:
    """Return what is wrong with the survivor's error, and the seconds until it came."""
    killed, survivor = answers[point.rank], answers[1 - point.rank]
    if not isinstance(killed, Died):
        return f"the rank was not killed: {killed[0]} {str(killed[2])[:300]}", 0.0
    if isinstance(survivor, Died) or survivor[0] != "error":
        said = survivor if isinstance(survivor, Died) else (survivor[0], str(survivor[2])[-300:])
        return f"the survivor: {said}", 0.0
    taken = survivor[1] - float((folder / "mark").read_text())
    if taken > LIMIT_S:
        return f"the error came after {taken:.1f} s", taken
    if f"rank {point.rank}" not in survivor[2]:
        return f"the error does not name rank {point.rank}: {survivor[2][:300]}", taken
    return "", taken


def of_snapshot(pool: Pool, point: Point, before: Undisturbed, folder: Path) -> str:
    """Return what is wrong with the newest snapshot, at any world."""
    least = int((folder / "published").read_text())
    for world in (1, 2, 3, 4):
        step, found = pool.run(world, resumed, point.plan, str(folder))[0]
        if step < least:
            return f"world {world}: step {step} is loaded, and {least} was published"
        if where := difference(found, before.states[step]):
            return f"world {world}: {where} of step {step} differs"
    return ""


def points(seed: int, phases: Sequence[str] = PHASES) -> list[Point]:
    rng = random.Random(seed)
    every = itertools.product(PLANS, PHASES, (0, 1))
    drawn = [Point(plan, phase, rank, rng.uniform(0.02, 0.98)) for plan, phase, rank in every]
    return [point for point in drawn if point.phase in phases]


def run(
    pool: Pool, chosen: Sequence[Point], home: Path, note: Callable[[str], None] = print
) -> tuple[Counter[str], list[str], list[float]]:
    """Run points; return how many were right by phase, the faults, and when each error came."""
    right: Counter[str] = Counter()
    faults, seconds = [], []
    for plan, of_plan in itertools.groupby(chosen, lambda point: point.plan):
        before = Undisturbed(pool, plan, home / "undisturbed")
        for point in of_plan:
            fault, taken = kill(pool, point, before, home / "job")
            shutil.rmtree(home / "job", ignore_errors=True)
            right[point.phase] += not fault
            if fault:
                faults.append(f"{point}: {fault}")
                note(faults[-1])
            else:
                seconds.append(taken)
    return right, faults, seconds


def command_line() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=PHASES, action="append")
    parser.add_argument("--plan", help="only plans with this text in their name")
    given = parser.parse_args()
    chosen = points(given.seed, given.only or PHASES)
    chosen = [point for point in chosen if (given.plan or "") in point.plan]
    began, pool = time.monotonic(), Pool()
    with tempfile.TemporaryDirectory() as home:
        try:
            right, faults, seconds = run(pool, chosen, Path(home))
        finally:
            pool.close()
    for phase in PHASES:
        count = sum(point.phase == phase for point in chosen)
        if count:
            print(f"{phase:<12}{right[phase]:>4} of {count}")
    if seconds:
        print(f"errors after {sorted(seconds)[len(seconds) // 2]:.2f} s (median), "
              f"{max(seconds):.2f} s (most)")  # fmt: skip
    print(f"{len(chosen)} points, {len(faults)} faults, {time.monotonic() - began:.0f} s")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(command_line())
