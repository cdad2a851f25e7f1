"""Rescue: when a rank is lost, the others save what they hold, and no step is lost with it.

    run/.rescue-5f0c…-000123.7-2/      what rank 2 held after step 123, its 7th note
    run/.rescue-5f0c…-000123.7-of-0/   empty: some rank of this host writes part 0 of the model

With replicas (stage 0, or shards within groups), the ranks that survive still have the values of
the lost one. They cannot talk any more, so each writes its shards by itself, as a snapshot with
holes. `resume` then looks at the parts of all hosts. If parts of one job and one step fill each
other's holes, which the check of a snapshot's index decides, they become the snapshot of that step.
Otherwise, training continues from the newest snapshot as usual.
"""

from __future__ import annotations

import copy
import io
import logging
import math
import os
import re
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from zerofx.comm.together import exchange, together
from zerofx.comm.world import World
from zerofx.errors import ArgumentError, SnapshotError, as_sentence
from zerofx.model.module import CompiledModule
from zerofx.runtime.store.state import sharded_state
from zerofx.runtime.store.whole_updates import needs_whole
from zerofx.runtime.tensors.checkpoint import FlatPiece
from zerofx.schema import DAMAGE
from zerofx.snapshot import files, series, state, target
from zerofx.snapshot.dcp import SaveSteps, merged, rank_file
from zerofx.snapshot.held import Replaced
from zerofx.snapshot.job import Job, Optimizers, optimizers_of, random_states, unpack
from zerofx.snapshot.spread import Hosts

log = logging.getLogger("zerofx")

_PART = re.compile(r"\.rescue-([0-9a-f]{16})-(\d{6,})\.(\d+)-(\d+)")
_ANY = re.compile(r"\.rescue-[0-9a-f]{16}-\d{6,}\.\d+-(of-)?\d+")
_PATIENCE_S = 10.0  # between SIGTERM and the error that says which rank is lost
_CLAIM_S = 10.0  # how long to wait for a rank that is writing the same
_LOOK_S = 0.1
_MOST_RANKS = 1 << 16


class Rescue:
    """Saves what this rank holds if the block ends with an error, such as the loss of a rank.

    All ranks construct it. `zerofx.resume("run", model, optimizer)`, in the job that is started
    next, continues from the last noted step if the ranks that could write hold everything between
    them: with replicas, the other copies of what a lost rank held. Otherwise it continues from the
    newest snapshot. `folder` may be on a disk or in memory (/dev/shm/run) of each host's own.

    Within the block, SIGTERM, which torchrun sends to the ranks that survive, ends the process only
    after they have written, or after 10 s if no error comes.

    folder: the directory of `zerofx.save(step=...)`.
    optimizer: as for `save`.

    Raises:
        ArgumentError: the updates of this plan or optimizer end during the next step or on other
            ranks, so that a rank alone cannot save them.

    Example:
        with zerofx.Rescue("run", model, optimizer) as rescue:
            for step, batch in enumerate(loader, start=1):
                train(batch)
                rescue.note(step, {"step": step})
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: CompiledModule,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ) -> None:
        target.check_call("zerofx.Rescue(folder, model, optimizer)", folder)
        self._part = _OwnPart(target.place(folder), model, optimizer)
        self._before: Any = None
        self._timer: threading.Timer | None = None
        self._is_asked_to_end = False

    def note(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Note that the state is now that after a step, and what `save` would be given as extra.

        It copies buffers and random generators, which the next step changes before it may fail.
        """
        if type(step) is not int or step < 0:
            raise ArgumentError(
                f"Rescue.note was given step={step!r}. It must be a whole number of at least 0."
            )
        self._part.note(step, extra or {})

    def __enter__(self) -> Rescue:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, self._asked_to_end)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if isinstance(error, Exception):
            try:
                self._part.write()
            except Exception as problem:  # noqa: BLE001  (`error` must reach the user)
                log.warning("zerofx: this rank's state was not rescued: %s", as_sentence(problem))
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            if self._is_asked_to_end:
                signal.raise_signal(signal.SIGTERM)

    def _asked_to_end(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked_to_end:  # asked twice
            os._exit(128 + signal.SIGTERM)
        self._is_asked_to_end = True
        self._timer = threading.Timer(_PATIENCE_S, os._exit, (128 + signal.SIGTERM,))
        self._timer.daemon = True
        self._timer.start()


class _OwnPart(Job):
    """What this rank holds after the last noted step."""

    def __init__(self, folder: Path, model: CompiledModule, optimizer: Optimizers) -> None:
        super().__init__(folder, model, optimizer)
        self.check_model()
        if self.store.ledger.is_delayed:
            raise ArgumentError(
                "zerofx.Rescue cannot save a model whose plan has offload.delayed=True: its "
                "updates end during the next step. Use zerofx.save(background=True)."
            )
        for each in self.optimizers.values():
            if needs_whole(each):
                raise ArgumentError(
                    f"zerofx.Rescue cannot save {type(each).__name__}, whose states are each on "
                    "one rank only. Use zerofx.save(background=True)."
                )
        self.world.agree("zerofx.Rescue", self.digest())
        self.token = exchange(self.world, secrets.token_hex(8), "zerofx.Rescue")[0]
        self.step: int | None = None
        self.count = 0

    def note(self, step: int, extra: Mapping[str, Any]) -> None:
        self.store.settle()
        self.step, self.extra = step, copy.deepcopy(dict(extra))
        self.count += 1
        self.modules = copy.deepcopy(self.module_states())
        self.version = self._version()
        self.buffers = {n: b.detach().clone() for n, b in state.buffers_of(self.model).items()}
        self.random = random_states(self.world.device)
        self.options = {
            name: [
                copy.deepcopy({k: v for k, v in group.items() if k != "params"})
                for group in each.param_groups
            ]
            for name, each in self.optimizers.items()
        }
        self.scale = self.loss_scale()

    def _version(self) -> tuple[int, int, int]:
        """Return numbers that change with every write to parameters and states.

        Steps that have begun count too: if one fails, it may have changed the states alone.
        """
        self.store.poll_writes()
        ledger = self.store.ledger
        return ledger.writes, ledger.handouts, ledger.steps_begun

    @torch.no_grad()
    def write(self) -> None:
        """Write this part, unless another rank of this host writes an equal one."""
        if self.step is None:
            return
        self.store.settle()
        if self._version() != self.version or self.store.ledger.half_made is not None:
            log.warning(
                "zerofx: this rank's state was not rescued: it was being updated after step %d.",
                self.step,
            )
            return
        began, world = time.monotonic(), self.world
        self.folder.mkdir(parents=True, exist_ok=True)
        start = f".rescue-{self.token}-{self.step:06d}.{self.count}"
        part = self.folder / f"{start}-{world.rank}"
        if (part / target.MANIFEST).exists():  # an earlier error has ended the same step
            return
        tensors: dict[str, Any] = {}
        if not self._is_written_by_another(start):
            tensors["model"] = {**sharded_state(self.store), **self.buffers}
            for name, each in self.optimizers.items():
                pieces = state.optimizer_tensors(self.store, each)
                tensors |= {name: pieces} if pieces else {}
        target.discard(part)
        target.make(part)
        written = SaveSteps(part, world.rank, tensors, self.store.homes.fetch).write_alone()
        values = {}
        for name, each in self.optimizers.items():
            values[name] = state.optimizer_values(each, state.group_names(self.store, each))
            for group, options in zip(values[name]["groups"], self.options[name], strict=True):
                group.update(options)
        others = {"loss_scale": self.scale, "random": self.random}
        packed = self.packed(self.extra, values, self.modules, others)
        target.write_file(part / target.VALUES, packed)
        names = (*written, target.INDEX, target.VALUES)
        sums = {name: files.checksum(part / name) for name in names}
        facts = {**self.facts(self.step), "files": sums, "saved": round(time.time(), 3)}
        files.write_manifest(part, facts)
        target.sync_file(self.folder)
        log.warning(
            "zerofx: rank %d has saved its state after step %d to %s in %.1f s.",
            world.rank, self.step, part, time.monotonic() - began,
        )  # fmt: skip

    def _is_written_by_another(self, start: str) -> bool:
        """Return whether another rank of this host has written what this one holds.

        The first to come claims it. If it does not finish in time, this one writes it too.
        """
        world, alike = self.world, self.world.alike
        with suppress(FileExistsError):
            os.mkdir(self.folder / f"{start}-of-{alike[0]}")
            return False
        others = [self.folder / f"{start}-{rank}" for rank in alike if rank != world.rank]
        deadline = time.monotonic() + _CLAIM_S
        while time.monotonic() < deadline:
            if any((other / target.MANIFEST).exists() for other in others):
                return True
            time.sleep(_LOOK_S)
        return False


# -- at the next start ----------------------------------------------------------------------------
@dataclass(frozen=True)
class FoundPart:
    """A part that a host has: its directory's name, manifest, index, and other values, packed."""

    name: str
    facts: Mapping[str, Any]
    index: bytes
    values: bytes

    @property
    def key(self) -> tuple[str, int, int]:
        """The job, the step and the number of its note: equal for parts that belong together."""
        matched = _PART.fullmatch(self.name)
        assert matched is not None
        return matched[1], int(matched[2]), int(matched[3])

    @property
    def rank(self) -> int:
        return int(self.name.rpartition("-")[2])

    @property
    def is_sound(self) -> bool:
        """Whether it has the files of a part, of a rank that the job had."""
        ranks, own = self.facts["world_size"], {target.INDEX, target.VALUES, rank_file(self.rank)}
        fits = self.rank < ranks <= _MOST_RANKS and self.facts["files"].keys() <= own
        return fits and isinstance(self.facts.get("saved"), float)


def _look(folder: Path) -> list[FoundPart]:
    """Return the whole parts in a directory; a warning names the others."""
    found = []
    for name in _names(folder):
        if _PART.fullmatch(name):
            with files.damaged_left_out(folder / name):
                snapshot = files.OpenSnapshot(folder / name)
                with closing(snapshot), snapshot.watched():
                    snapshot.check(0, 1)
                    index = snapshot.files.stream(target.INDEX).read()
                    values = snapshot.files.stream(target.VALUES).read()
                    part = FoundPart(name, snapshot.manifest, index, values)
                    found += [part] if part.is_sound else []
    return found


def _names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if _ANY.fullmatch(name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def forget(folder: Path, saved: float) -> None:
    """Remove parts that are older than a snapshot. saved: when, in seconds since 1970."""
    for name in _names(folder):
        with suppress(FileNotFoundError):
            if (folder / name).stat().st_mtime < saved:
                target.discard(folder / name)


def restore(world: World, hosts: Hosts, folder: Path) -> None:
    """Make a snapshot of parts that survivors have written, if they are whole; collective.

    folder: of the series, on this host. Nothing is changed if there are no parts, if some are
    missing, or if there is a snapshot of that step already. If the snapshot cannot be made, the
    parts stay, and the newest one that is there is loaded.
    """
    what = f"looking for rescued states in {folder.name}"

    def look() -> tuple[list[FoundPart], float]:
        if not hosts.is_leader:
            return [], 0.0
        parts = _look(folder)
        saved = [series.saved_at(each)[0] for each in series.snapshots_in(folder)] if parts else []
        return parts, max(saved, default=0.0)

    views = together(world, what, look, SnapshotError)
    holders: dict[str, int] = {}  # of each part, the first host that sees it
    jobs: dict[tuple[str, int, int], list[FoundPart]] = {}
    for leader in hosts.leaders:
        for part in views[leader][0]:
            if holders.setdefault(part.name, leader) == leader:
                jobs.setdefault(part.key, []).append(part)
    last = {key[0]: 0.0 for key in jobs}  # of each job, when its parts were written
    for key, group in jobs.items():
        last[key[0]] = max(last[key[0]], *(part.facts["saved"] for part in group))
    later = max(saved for _, saved in views) + 1e-3  # than every snapshot, whatever its clock says
    for key in sorted(jobs, key=lambda key: (last[key[0]], key[2]), reverse=True):
        group = sorted(jobs[key], key=lambda part: part.rank)
        job = _Restoring(folder, group, holders, world.rank, max(later, last[key[0]]))
        try:
            if _restored(world, job):
                return
        except SnapshotError as error:
            if world.rank == 0:
                log.warning(
                    "zerofx: a rescued state is there but was not restored: %s", as_sentence(error)
                )


def _restored(world: World, job: _Restoring) -> bool:
    """Publish the snapshot of one job's and step's parts; return whether they are whole."""
    what, step = f"restoring rescued states in {job.series.name}", job.group[0].key[1]
    problems = together(world, what, job.problem, SnapshotError)
    if any(problems):
        if world.rank == 0:
            ranks = ", ".join(str(part.rank) for part in job.group)
            log.warning(
                "zerofx: the states of ranks %s after step %d, which they saved when another rank "
                "was lost, are not taken: %s", ranks, step,
                as_sentence(next(filter(None, problems))),
            )  # fmt: skip
        return False
    with ExitStack() as stack:
        together(world, what, lambda: job.begin(stack), SnapshotError)
        small = together(world, what, job.complete, SnapshotError)[job.acting[0]]
        together(world, what, lambda: job.fill(small), SnapshotError)
        together(world, what, job.publish, SnapshotError)
        together(world, what, job.tidy, SnapshotError)
    if world.rank == 0:
        log.warning(
            "zerofx: nothing is lost: the ranks that were left have saved the state after step %d.",
            step,
        )  # fmt: skip
    return True


class _Restoring:
    """One rank's part in making a snapshot of parts; the holders of parts act, others watch."""

    def __init__(
        self,
        folder: Path,
        group: Sequence[FoundPart],
        holders: Mapping[str, int],
        rank: int,
        saved: float,
    ) -> None:
        self.series, self.group, self.rank, self.saved = folder, group, rank, saved
        self.acting = sorted({holders[found.name] for found in group})
        self.mine = [found for found in group if holders[found.name] == rank]
        self.folder = series.place_of(folder, group[0].key[1])

    def problem(self) -> str:
        """Return why these parts are not a snapshot; "" if they are."""
        if self.rank in self.acting and self._is_saved():
            return f"{self.folder} has been saved"
        if self.rank != 0:
            return ""
        kept = [
            {k: v for k, v in found.facts.items() if k not in ("files", "saved")}
            for found in self.group
        ]
        if any(each != kept[0] for each in kept):
            return "their models differ"
        try:
            merged([found.index for found in self.group], self._tensors())
            self._generators(kept[0]["world_size"])
        except SnapshotError as error:
            return str(error)
        except DAMAGE as error:
            return f"a file is damaged: {error}"
        return ""

    def _is_saved(self) -> bool:
        """Return whether there is a snapshot of this step, other than an attempt to restore it."""
        if not self.folder.exists():
            return False
        try:
            snapshot = files.OpenSnapshot(self.folder)
        except (SnapshotError, OSError, Replaced):
            return False
        with closing(snapshot):
            return snapshot.manifest.get("rescued") != list(self.group[0].key)

    def _tensors(self) -> set[str]:
        """Return the names of all tensors of the model and the optimizers."""
        first = self.group[0]
        found = {f"model.{n}" for kind in ("parameters", "buffers") for n in first.facts[kind]}
        for name, saved in optimizers_of(self._values(first)).items():
            found |= {f"{name}.{p}.{key}" for p, keys in saved["pieces"].items() for key in keys}
        return found

    def _values(self, part: FoundPart) -> dict[str, Any]:
        return unpack(io.BytesIO(part.values), Path(part.name))

    def begin(self, stack: ExitStack) -> None:
        """Make the directory of the snapshot on every host that has a part."""
        if self.rank in self.acting:
            self.hidden = target.begin(self.folder)
            stack.callback(self.hidden.close)
            self.hidden.make()

    def complete(self) -> dict[str, bytes]:
        """On the first of these hosts, write everything but the shards; return these files."""
        if self.rank != self.acting[0]:
            return {}
        path, first = self.hidden.path, self.group[0]
        ranks = first.facts["world_size"]
        table = SaveSteps(path, ranks, {"random": self._generators(ranks)}, lambda t: t)
        table.write_alone()
        indexes = [*(found.index for found in self.group), (path / target.INDEX).read_bytes()]
        target.write_file(path / target.INDEX, merged(indexes))
        target.write_file(path / target.VALUES, first.values)
        sums = {n: s for found in self.group for n, s in found.facts["files"].items()}
        own = (target.INDEX, target.VALUES, rank_file(ranks))
        sums |= {name: files.checksum(path / name) for name in own}
        facts = {**first.facts, "files": sums, "saved": self.saved, "hosts": len(self.acting)}
        facts["rescued"] = list(first.key)
        files.write_manifest(path, facts)
        return {name: (path / name).read_bytes() for name in (target.MANIFEST, *own[:2])}

    def _generators(self, ranks: int) -> dict[str, FlatPiece]:
        """Return the states of all ranks' generators; a lost rank gets those of the first."""
        found = {part.rank: self._values(part)["random"] for part in self.group}
        first = found[self.group[0].rank]
        table = {
            key: torch.cat([found.get(rank, first)[key] for rank in range(ranks)]) for key in first
        }
        return state.one_row(table, 0, 1)

    def fill(self, small: Mapping[str, bytes]) -> None:
        """Put everything into the directory. The parts stay until all have published."""
        if self.rank not in self.acting:
            return
        for name, data in small.items():
            if self.rank != self.acting[0]:
                target.write_file(self.hidden.path / name, data)
        for part in self.mine:
            for name in part.facts["files"].keys() - {target.INDEX, target.VALUES}:
                there, here = self.series / part.name / name, self.hidden.path / name
                try:
                    os.link(there, here)
                except OSError:  # a file system without hard links
                    shutil.copy2(there, here)

    def publish(self) -> None:
        """Publish the directory."""
        if self.rank in self.acting:
            target.publish(self.hidden.path, self.folder)

    def tidy(self) -> None:
        """Remove the parts, which are in the snapshot now, and those of older failures."""
        if self.rank in self.acting:
            series.move_latest(self.series, self.folder.name)
            forget(self.series, math.inf)
