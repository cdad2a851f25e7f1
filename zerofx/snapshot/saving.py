"""save: prepare, plan, write, publish; each step ends on all ranks before the next begins."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from zerofx.comm.together import together, together_apart
from zerofx.errors import SnapshotError
from zerofx.model.module import CompiledModule
from zerofx.runtime.store.optimizer import check_optimizer
from zerofx.runtime.store.state import sharded_state
from zerofx.runtime.store.whole_updates import needs_whole
from zerofx.snapshot import files, series, state, target, whole_states
from zerofx.snapshot.dcp import SaveSteps, written_files
from zerofx.snapshot.job import Job, Optimizers, pack, random_states, write_in_background
from zerofx.snapshot.lock import Lock


def save(
    folder: str | os.PathLike[str],
    model: CompiledModule,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    background: bool = False,
) -> Future[Path] | None:
    """Save a training run to a directory of its own; a collective call, all ranks make it.

    The snapshot appears whole or not at all: an existing one is replaced only once the new one is
    complete and on disk. If the previous save is still being written, this call waits for it first.

    optimizer: an optimizer, or a list of several; pass the same to `load`.
    extra: other values to save, from rank 0: numbers, strings, tensors and containers of them, such
        as the `state_dict()` of a learning rate scheduler or of a GradScaler.
    step: save to `folder/step-000100`, next to the snapshots of other steps, and make
        `folder/latest` refer to it. `load` and `resume` of `folder` use the newest one.
    keep: how many snapshots to keep in `folder`; older ones are removed. Default: all.
    background: copy the data to host memory, and return while a thread writes them. The next save
        or load, and the end of the process, wait for it.

    Returns:
        With `background`, a future of the snapshot's path; it raises if the save has failed.

    Raises:
        ArgumentError: `step` or `keep` is not a valid number.
        SnapshotError: a value cannot be saved, or the file system refuses; nothing is published.
            With `background`, the next save or load raises errors of writing.
        DesyncError: a rank did not make this call; names it.
    """
    target.check_call("zerofx.save(folder, model, optimizer)", folder)
    series.check_options(step, keep)
    job = _Save(target.place(folder), model, optimizer, extra, step, keep)
    world, what = job.world, f"zerofx.save to {job.folder}"
    options = f"step={step};keep={keep};background={background}"
    world.agree("zerofx.save", f"{job.digest()};{options}")
    is_left = False
    try:
        surveys: list[dict[str, state.Survey]] = [{}] * world.size
        if any(map(needs_whole, job.optimizers.values())):
            job.settle()
            surveys = together(world, what, job.survey, SnapshotError)
        written = together(world, what, lambda: job.prepare(surveys), SnapshotError)[0]
        assert written is not None
        plans = together(world, what, lambda: job.plan(written), SnapshotError)
        if background:
            together(world, what, lambda: job.hold(plans), SnapshotError)
            is_left = True
            return write_in_background(
                job.store, f"zerofx-save-{job.folder.name}", job.finish_apart
            )
        together(world, what, lambda: job.combine(plans), SnapshotError)
        parts = together(world, what, job.write, SnapshotError)
        together(world, what, lambda: job.publish(parts), SnapshotError)
    finally:
        if not is_left:
            job.tidy()
    return None


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
    ) -> None:
        super().__init__(
            folder if step is None else series.place_of(folder, step), model, optimizer
        )
        self.series = folder if step is not None else None
        self.step, self.keep = step, keep
        self.extra = {} if extra is None else extra
        self.hidden: target.SavePlace | None = None  # on rank 0
        self.lock: Lock | None = None  # on rank 0, for a series

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
        if self.world.rank != 0:
            return None
        if not isinstance(self.extra, Mapping):
            raise SnapshotError(f"extra is a {type(self.extra).__name__}. Give a dict")
        modules = {path: m.get_extra_state() for path, m in state.extra_states_of(self.model)}
        scaler = self.model.loss_scale
        self.values = pack(
            {
                "extra": dict(self.extra),
                "optimizer": values.get("optimizer", {}),
                "optimizers": {} if "optimizer" in values else values,
                "modules": modules,
                "loss_scale": scaler.state_dict() if scaler is not None else {},
            }
        )
        facts = {"world_size": self.world.size, "torch": torch.__version__, "step": self.step}
        plan = self.model._zerofx.setting.plan.to_dict()
        self.facts = {**facts, **self.describe(), "plan": plan}
        if self.series is not None:
            series.check_place(self.series)
            self.series.mkdir(parents=True, exist_ok=True)
            self.lock = Lock(target.beside(self.series / series.LOCK, "lock"), self.series)
        self.hidden = target.begin(self.folder)
        return self.hidden.path

    def plan(self, written: Path) -> Any:
        """Return the plan of everything that this rank could write."""
        if not written.is_dir():
            raise SnapshotError(
                f"{written}, which rank 0 made, does not exist here. Save to a file system that "
                "all ranks share"
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
        """Decide which rank writes what; on rank 0, check that there is enough space."""
        num_bytes = self.steps.combine(plans)
        if self.world.rank == 0:
            target.check_space(self.written, num_bytes + len(self.values))

    @torch.no_grad()
    def hold(self, plans: list[Any]) -> None:
        """Copy what this rank writes, so that training may continue."""
        self.combine(plans)
        self.steps.hold()

    @torch.no_grad()
    def write(self) -> tuple[list[Any], dict[str, Any]]:
        """Write this rank's file; return the positions of its tensors, and its checksum."""
        results = self.steps.write()
        sums = {n: files.checksum(self.written / n) for n in sorted(written_files(results))}
        return results, sums

    def publish(self, parts: list[tuple[list[Any], dict[str, Any]]]) -> None:
        """On rank 0, add the other values and the manifest, and rename the directory."""
        if self.world.rank != 0:
            return
        self.steps.finish([results for results, _ in parts])
        target.write_file(self.written / target.VALUES, self.values)
        sums = {name: checksum for _, part in parts for name, checksum in part.items()}
        sums.update({n: files.checksum(self.written / n) for n in (target.INDEX, target.VALUES)})
        facts = {"files": sums, "saved": round(time.time(), 3), **self.facts}
        files.write_manifest(self.written, facts)
        target.check_written(self.written, sums, self.folder)
        assert self.hidden is not None
        self.hidden.check()
        target.publish(self.written, self.folder)
        if self.series is not None:
            series.move_latest(self.series, self.folder.name)
            if self.keep is not None:
                series.prune(self.series, self.keep)

    def finish_apart(self, topic: str) -> Path:
        """Write and publish, in a thread of every rank; return the path of the snapshot."""
        what = f"zerofx.save to {self.folder} in the background"
        try:
            parts = together_apart(self.world, what, f"{topic}/0", self.write, SnapshotError)
            publish = partial(self.publish, parts)
            together_apart(self.world, what, f"{topic}/1", publish, SnapshotError)
        finally:
            self.tidy()
        return self.folder

    def tidy(self) -> None:
        """Remove files of a failed save (a published save has left none), and release the lock."""
        if self.hidden is not None:
            self.hidden.close()
        if self.lock is not None:
            self.lock.release()
