"""save: prepare, plan, write, publish; each step ends on all ranks before the next begins."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.optim.optimizer import Optimizer

from zerofx.comm.together import together, together_apart
from zerofx.errors import SnapshotError, as_sentence
from zerofx.model.module import CompiledModule
from zerofx.runtime.store.optimizer import check_optimizer
from zerofx.runtime.store.state import sharded_state
from zerofx.runtime.store.whole_updates import needs_whole
from zerofx.snapshot import files, rescue, series, spread, state, target, whole_states
from zerofx.snapshot.dcp import SaveSteps, written_files
from zerofx.snapshot.job import Job, Optimizers, random_states, write_in_background

T = TypeVar("T")


def save(
    folder: str | os.PathLike[str],
    model: CompiledModule,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    background: bool = False,
    copies: int | None = None,
) -> Future[Path] | None:
    """Save a training run to a directory of its own; a collective call, all ranks make it.

    The snapshot appears whole or not at all: an existing one is replaced only once the new one is
    complete and on disk. If the previous save is still being written, this call waits for it first.
    Snapshots of another model are never replaced or removed: give each model its own folder.

    optimizer: an optimizer, or a list of several; pass the same to `load`.
    extra: other values to save, from rank 0: numbers, strings, tensors and containers of them, such
        as the `state_dict()` of a learning rate scheduler or of a GradScaler.
    step: save to `folder/step-000100`, next to the snapshots of other steps, and make
        `folder/latest` refer to it. `load` and `resume` of `folder` use the newest one.
    keep: how many snapshots to keep in `folder`; older ones are removed. Default: all.
    background: copy the data to host memory, and return while a thread writes them. The next save
        or load, and the end of the process, wait for it.
    copies: hosts do not share a file system, and `folder` is on a disk of each host's own. Every
        rank writes to its host's disk, and each file is copied to so many other hosts: with 1, the
        loss of any one host loses nothing. Needs `step`. `load` and `resume` find out by
        themselves, and bring files to hosts that lack them.

    Returns:
        With `background`, a future of the snapshot's path; it raises if the save has failed.

    Raises:
        ArgumentError: `step`, `keep` or `copies` is not a valid number.
        SnapshotError: a value cannot be saved, the folder has a snapshot of a model with other
            parameters, or the file system refuses; nothing is published.
            With `background`, the next save or load raises errors of writing.
        DesyncError: a rank did not make this call; names it.

    Example:
        zerofx.save("run", model, optimizer, {"step": 100}, step=100, keep=3)  # on all ranks
    """
    target.check_call("zerofx.save(folder, model, optimizer)", folder)
    series.check_options(step, keep, copies)
    job = _Save(target.place(folder), model, optimizer, extra, step, keep, copies)
    world, what = job.world, f"zerofx.save to {job.label}"
    options = f"step={step};keep={keep};background={background};copies={copies}"
    world.agree("zerofx.save", f"{job.digest()};{options}")
    if job.store.posted is not None:
        job.store.posted.check(world, what)
    is_left = False
    try:
        surveys: list[dict[str, state.Survey]] = [{}] * world.size
        if any(map(needs_whole, job.optimizers.values())):
            job.settle()
            surveys = together(world, what, job.survey, SnapshotError)
        job.find_hosts(what)
        written = together(world, what, lambda: job.prepare(surveys), SnapshotError)
        plans = together(world, what, lambda: job.plan(written), SnapshotError)
        if background:
            together(world, what, lambda: job.hold(plans), SnapshotError)
            is_left = True
            return write_in_background(
                job.store, f"zerofx-save-{job.folder.name}", job.finish_apart
            )
        together(world, what, lambda: job.combine(plans), SnapshotError)

        def step_of_all(step: Callable[[], T]) -> list[T]:
            return together(world, what, lambda: job.busily(step), SnapshotError)

        job.finish(step_of_all)
    finally:
        if not is_left:
            job.tidy()
    return None


Part = tuple[list[Any], dict[str, Any]]  # positions of the tensors that a rank wrote, its files


class OfAll(Protocol):
    """Runs a step on all ranks, and returns all results in rank order."""

    def __call__(self, step: Callable[[], T]) -> list[T]: ...


class _Save(Job):
    """The steps of a save: prepare, plan, write, publish."""

    def __init__(
        self,
        folder: Path,
        model: CompiledModule,
        optimizer: Optimizers,
        extra: Mapping[str, Any] | None,
        step: int | None,
        keep: int | None,
        copies: int | None,
    ) -> None:
        super().__init__(
            folder if step is None else series.place_of(folder, step), model, optimizer
        )
        self.series = folder if step is not None else None
        self.step, self.keep, self.copies = step, keep, copies
        self.extra = {} if extra is None else extra
        self.saved = round(time.time(), 3)  # before later changes to the model
        self.hosts: spread.Hosts | None = None  # with copies
        self.sums: dict[str, Any] = {}  # on ranks that publish: the checksums of their files
        self.copied: set[str] = set()  # the files that came from other hosts
        self.hidden: target.SavePlace | None = None  # on ranks that publish
        self.lock: target.Lock | None = None  # on ranks that publish, for a series

    def find_hosts(self, what: str) -> None:
        """With copies, find out which ranks share a disk; a collective call."""
        if self.copies is None:
            return
        assert self.series is not None
        place, world = self.series, self.world
        together(world, what, lambda: place.mkdir(parents=True, exist_ok=True), SnapshotError)
        self.hosts = spread.Hosts.of(world, what, place)
        self.hosts.check_copies(self.copies)
        together(world, what, self.hosts.connect, SnapshotError)

    @property
    def publishes(self) -> bool:
        """Whether this rank publishes a directory: rank 0, or the first rank of each host."""
        return self.world.rank == 0 if self.hosts is None else self.hosts.is_leader

    def settle(self) -> None:
        """Bring the states of whole-parameter optimizers to their owners; a collective call."""
        for optimizer in self.optimizers.values():
            if needs_whole(optimizer):
                check_optimizer(optimizer)
                whole_states.settle(optimizer)

    def survey(self) -> dict[str, state.Survey]:
        """Return what this rank holds of optimizers that step whole parameters."""
        return {
            name: state.Survey.of(self.store, each)
            for name, each in self.optimizers.items()
            if needs_whole(each)
        }

    def prepare(self, surveys: list[dict[str, state.Survey]]) -> Path | None:
        """Check that everything can be saved; on rank 0, return the directory to write into."""
        self.check_model()
        values = {}
        for name, each in self.optimizers.items():
            names = state.group_names(self.store, each)
            if needs_whole(each):
                found = [survey[name] for survey in surveys]
                values[name] = state.whole_values(each, names, found)
            else:
                values[name] = state.optimizer_values(each, names)
        if self.world.rank == 0:
            self.values = self.packed(
                self.extra, values, self.module_states(), {"loss_scale": self.loss_scale()}
            )
            self.about = self.facts(self.step)
            if self.hosts is not None:
                self.about["hosts"] = len(self.hosts.ranks)
        if not self.publishes:
            return None
        try:
            if self.series is not None:
                series.check_place(self.series)
                self.series.mkdir(parents=True, exist_ok=True)
                self.lock = target.Lock(
                    target.beside(self.series / series.LOCK, "lock"), self.series
                )
            self.hidden = target.begin(self.folder)
        except SnapshotError as error:
            if self.hosts is None or self.world.rank == 0:
                raise
            raise SnapshotError(
                f"{as_sentence(error)} If that process is a rank of this job, the hosts share a "
                "file system. Leave copies out."
            ) from error
        series.check_owner(self.folder, self.model, self.facts(self.step))
        return self.hidden.make()

    def plan(self, places: Sequence[Path | None]) -> Any:
        """Return the plan of everything that this rank could write.

        places: the directory to write into, of each rank that publishes one.
        """
        written = places[0 if self.hosts is None else self.hosts.leader(self.world.rank)]
        assert written is not None
        if not written.is_dir():
            raise SnapshotError(
                f"{written}, which rank 0 made, does not exist here. Save to a file system that "
                "all ranks share, or to a disk of each host with copies=1."
            )
        random = state.one_row(random_states(self.world.device), self.world.rank, self.world.size)
        tensors: dict[str, Any] = {"model": dict(sharded_state(self.store)), "random": random}
        if self.world.rank == 0:
            buffers = state.buffers_of(self.model)
            tensors["model"].update({n: b.detach() for n, b in buffers.items()})
        for name, optimizer in self.optimizers.items():
            pieces = state.optimizer_tensors(self.store, optimizer)
            tensors.update({name: pieces} if pieces else {})
        self.steps = SaveSteps(written, self.world.rank, tensors, self.store.homes.fetch)
        self.written = written
        return self.steps.local()

    def combine(self, plans: list[Any]) -> None:
        """Decide which rank writes what, and check that there is enough space for it."""
        num_bytes = self.steps.combine(plans)
        if not self.publishes:
            return
        here = sum(num_bytes)
        if self.hosts is not None:
            hosts, copies = self.hosts, self.copies or 0
            of_host = [sum(num_bytes[rank] for rank in ranks) for ranks in hosts.ranks]
            here = of_host[hosts.here] + sum(
                of_host[other]
                for other in range(len(of_host))
                if hosts.here in hosts.copied_to(other, copies)
            )
        target.check_space(self.written, here + (len(self.values) if self.world.rank == 0 else 0))

    @torch.no_grad()
    def hold(self, plans: list[Any]) -> None:
        """Copy what this rank writes, so that training may continue."""
        self.combine(plans)
        self.steps.hold()

    def busily(self, step: Callable[[], T]) -> T:
        """Run a step that may take long; the other ranks wait for it without a time limit."""
        with self.world.busy(f"saving to {self.folder}"):
            return step()

    def finish(self, of_all: OfAll) -> None:
        """Write and publish. of_all: runs a step on all ranks and returns all results."""
        parts: list[Part] = of_all(self.write)
        small = of_all(lambda: self.complete(parts))[0]
        if self.hosts is not None:
            of_all(lambda: self.copy([part for _, part in parts], small))
            of_all(self.check_copies)
        of_all(self.publish)
        if self.keep is not None:  # once all hosts have published
            of_all(self.prune)

    @torch.no_grad()
    def write(self) -> Part:
        """Write this rank's file; return the positions of its tensors, and its checksum."""
        results = self.steps.write()
        sums = {n: files.checksum(self.written / n) for n in sorted(written_files(results))}
        return results, sums

    def complete(self, parts: list[Part]) -> dict[str, Any]:
        """On rank 0, add the other values and the manifest; return the checksums of these files."""
        if self.world.rank != 0:
            return {}
        self.steps.finish([results for results, _ in parts])
        target.write_file(self.written / target.VALUES, self.values)
        sums = {name: checksum for _, part in parts for name, checksum in part.items()}
        sums.update({n: files.checksum(self.written / n) for n in (target.INDEX, target.VALUES)})
        facts = {"files": sums, "saved": self.saved, **self.about}
        files.write_manifest(self.written, facts)
        self.sums = sums
        return {name: files.checksum(self.written / name) for name in spread.SMALL}

    def copy(self, sums: list[dict[str, Any]], small: dict[str, Any]) -> None:
        """Send the other hosts copies of this host's files, and receive copies of theirs.

        sums: the checksums of each rank's files. small: those of the files that all hosts have.
        """
        assert self.hosts is not None
        if not self.hosts.is_leader:
            return
        deliveries = spread.copies_of(self.hosts, self.copies or 0, sums)
        deliveries += spread.to_all(self.hosts, small)
        own = {name for rank in self.hosts.ranks[self.hosts.here] for name in sums[rank]}
        every = {**small, **{name: found for held in sums for name, found in held.items()}}
        self.copied = {
            delivery.name for delivery in deliveries if delivery.target == self.world.rank
        }
        self.sums = {name: every[name] for name in (*spread.SMALL, *own, *self.copied)}
        self.hosts.carry(deliveries, self.written, self.written)

    def check_copies(self) -> None:
        """Check the files that came from other hosts."""
        for name in sorted(self.copied):
            if files.checksum(self.written / name) != self.sums[name]:
                raise SnapshotError(f"{self.written / name}: arrived damaged from another host.")

    def publish(self) -> None:
        """Rename the complete directory."""
        if not self.publishes:
            return
        assert self.hidden is not None
        target.check_written(self.written, self.sums, self.folder)
        self.hidden.check()
        series.remember(self.folder, self.model, is_saved=True)
        target.publish(self.written, self.folder)
        if self.series is not None:
            series.move_latest(self.series, self.folder.name)
            rescue.forget(self.series, self.saved)

    def prune(self) -> None:
        """Remove older snapshots."""
        if self.publishes and self.series is not None and self.keep is not None:
            series.prune(self.series, self.keep)

    def finish_apart(self, topic: str) -> Path:
        """Write and publish, in a thread of every rank; return the path of the snapshot."""
        what, number = f"zerofx.save to {self.label} in the background", itertools.count()

        def of_all(step: Callable[[], T]) -> list[T]:
            return together_apart(self.world, what, f"{topic}/{next(number)}", step, SnapshotError)

        try:
            self.finish(of_all)
        finally:
            self.tidy()
        return self.folder

    def tidy(self) -> None:
        """Remove files of a failed save (a published save has left none), and release the lock."""
        if self.hidden is not None:
            self.hidden.close()
        if self.lock is not None:
            self.lock.release()
