"""load: open one save on all ranks, check all of it, and only then fill.

All data are checked in, and filled from, files that stay open from the first step to the last, so
that a save that replaces them meanwhile changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from zerofx.comm.together import exchange, together
from zerofx.errors import SnapshotError, ZerofxError, as_sentence
from zerofx.model.module import CompiledModule
from zerofx.runtime.store.state import sharded_state
from zerofx.schema import DAMAGE
from zerofx.snapshot import files, rescue, series, spread, state, target, whole_states
from zerofx.snapshot.dcp import LoadSteps
from zerofx.snapshot.held import read_settled
from zerofx.snapshot.job import (
    Job,
    Optimizers,
    optimizers_of,
    random_states,
    set_random_states,
    unpack,
)
from zerofx.snapshot.sources.recognise import recognise
from zerofx.snapshot.weights import Fill, Names, check_names

log = logging.getLogger("zerofx")

_REPAIRS = 3  # attempts to replace damaged files by copies


def load(
    folder: str | os.PathLike[str],
    model: CompiledModule,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    names: Names = None,
) -> dict[str, Any]:
    """Load a snapshot of `save` at any world size and stage, and return its `extra`.

    A collective call. Everything is checked on all ranks before anything is changed. Another job
    may save to the same directory meanwhile: everything that is loaded is from one save. Without an
    optimizer, the saved optimizer is ignored. At the world size of the save, each rank restores its
    own random generators; at another world size, all ranks use rank 0's.

    folder: a snapshot, or a directory with snapshots of several steps (`save(step=...)`), of which
        the newest undamaged one is loaded; a warning names damaged ones and the damage. It may also
        be a checkpoint that `load_weights` reads. From DeepSpeed, FSDP2 and Megatron, optimizer
        states are loaded too, and values stored next to them, such as global_steps, are returned.
    names: the `names` of `load_weights`, for such a checkpoint.

    Raises:
        SnapshotError: there is no undamaged snapshot of this model; names the file and the reason.
        DesyncError: a rank did not make this call; names it.

    Example:
        zerofx.save("run", model, optimizer, {"step": 100})
        extra = zerofx.load("run", model, optimizer)  # on all ranks, of any number
        assert extra["step"] == 100
    """
    target.check_call("zerofx.load(folder, model, optimizer)", folder)
    job = _Load(Path(os.path.abspath(folder)), model, optimizer)
    job.world.agree("zerofx.load", job.digest())
    check_names(names)
    found = _found(job)
    if found:
        extra = _load_newest(job, found)
    else:
        extra = _read_foreign(job, names) if _is_foreign(job) else _read(job)
    series.remember(target.place(folder), model)
    return extra


def resume(
    folder: str | os.PathLike[str],
    model: CompiledModule,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
) -> dict[str, Any] | None:
    """Load the newest undamaged snapshot, if there is one; return its `extra`, or else None.

    A collective call, for the beginning of a script that may have been restarted.

    folder: as for `load`. If it has no snapshot or does not exist, nothing is changed.

    Raises:
        SnapshotError: there are snapshots, but all are damaged or of another model.
        DesyncError: a rank did not make this call; names it.

    Example:
        extra = zerofx.resume("run", model, optimizer)  # on all ranks
        first = 0 if extra is None else extra["step"] + 1
    """
    target.check_call("zerofx.resume(folder, model, optimizer)", folder)
    job = _Load(Path(os.path.abspath(folder)), model, optimizer)
    job.world.agree("zerofx.resume", job.digest())
    found = _found(job)
    if not found and not _is_there(job):
        return None
    extra = _load_newest(job, found) if found else _read(job)
    series.remember(target.place(folder), model)
    return extra


def _found(job: _Load) -> list[spread.Candidate]:
    """Return the snapshots of a series, newest first, or a spread one; a collective call."""
    world, what = job.world, f"looking for {job.label}"
    if job.folder.name == series.LATEST:  # on some hosts, the link may be missing or an older one
        hosts = spread.Hosts.of(world, what, job.folder.parent)
        newest = spread.candidates(world, hosts, job.folder.parent)[:1]
        if newest and newest[0].sights is not None:
            job.hosts, job.folder = hosts, job.folder.parent
            return newest
    job.hosts = spread.Hosts.of(world, what, job.folder)
    rescue.restore(world, job.hosts, job.folder)
    return spread.candidates(world, job.hosts, job.folder)


def _is_there(job: _Load) -> bool:
    """Return whether rank 0 sees a snapshot, or the remains of an interrupted save."""
    what = f"looking for {job.label}"
    return together(job.world, what, lambda: files.is_there(job.folder), SnapshotError)[0]


def _is_foreign(job: _Load) -> bool:
    """Return whether rank 0 sees a checkpoint of another library; a collective call."""
    what, folder = f"looking at {job.label}", job.folder

    def look() -> bool:
        return not files.is_own(folder) and recognise(target.place(folder)) is not None

    return together(job.world, what, look, SnapshotError)[0]


def _read_foreign(job: _Load, names: Names) -> dict[str, Any]:
    """Load weights and states that another library has saved."""
    job.check_model()
    fill = Fill(job.model, job.folder, names, optimizers=job.optimizers.values())
    read_settled(job.world, f"zerofx.load of {job.label}", fill)
    return fill.extra


def _read(job: _Load) -> dict[str, Any]:
    read_settled(job.world, f"zerofx.load of {job.label}", job)
    return job.extra


def _load_newest(job: _Load, found: list[spread.Candidate]) -> dict[str, Any]:
    """Load the first undamaged snapshot of the list; a collective call.

    Raises:
        SnapshotError: all are damaged, or the first undamaged one does not fit the model.
    """
    problems, place = [], job.folder
    for each in found:
        job.folder, job.is_damaged = each.within(place), False
        try:
            if each.sights is None:
                return _read(job)
            return _read_spread(job, each)
        except SnapshotError as error:
            if not any(exchange(job.world, job.is_damaged, f"whether {job.label} is damaged")):
                raise SnapshotError(f"{job.folder}: {as_sentence(error)}") from error
            problems.append(str(error))
            if job.world.rank == 0:
                log.warning("zerofx: a damaged snapshot is skipped: %s", as_sentence(error))
        finally:
            job.needed, job.called = None, ""
    if len(found) == 1:
        raise SnapshotError(f"{job.folder} is damaged: {as_sentence(problems[0])}")
    raise SnapshotError(
        f"all {len(found)} snapshots in {place} are damaged: {as_sentence('; '.join(problems))}"
    )


def _read_spread(job: _Load, candidate: spread.Candidate) -> dict[str, Any]:
    """Load a snapshot from the disks of several hosts: bring what is needed where it is needed.

    Files that are here are verified while they are loaded. Only if that finds damage, each is
    verified before, and copies from other hosts replace the damaged ones.

    Raises:
        SnapshotError: a file is on no host, or damaged on all; or the model is another one.
    """
    world, hosts, folder = job.world, job.hosts, job.folder
    job.called = job.label
    what, small = f"zerofx.load of {job.called}", set(spread.SMALL)
    try:
        if missing := candidate.missing():
            everywhere = f"on none of {len(hosts.ranks)} hosts"
            raise spread.Lost(f"{folder}: {', '.join(missing)}: {everywhere}.")
        with spread.Gathering(world, hosts, candidate, folder) as gathering:
            gathering.get([small] * len(hosts.ranks))
            job.folder = gathering.path
            by_rank = together(world, what, job.survey, SnapshotError)
            needed = [small.union(*(by_rank[rank] for rank in ranks)) for ranks in hosts.ranks]
            job.needed = frozenset(needed[hosts.here])
            gathering.get(needed)
            extra = _read_repaired(job, gathering, needed)
            gathering.finish()
            return extra
    except spread.Lost:
        job.is_damaged = True
        raise


def _read_repaired(
    job: _Load, gathering: spread.Gathering, needed: list[set[str]]
) -> dict[str, Any]:
    """Load from the files that are here; files that turn out to be damaged are replaced first."""
    world, hosts = job.world, job.hosts
    for _ in range(_REPAIRS):
        job.is_damaged = False
        try:
            return _read(job)
        except SnapshotError:
            if not any(exchange(world, job.is_damaged, f"whether {job.label} is damaged")):
                raise
        what = f"zerofx.load of {job.label}"
        by_rank = together(world, what, job.damaged, SnapshotError)
        damaged = [set().union(*(by_rank[rank] for rank in ranks)) for ranks in hosts.ranks]
        gathering.drop(damaged)
        gathering.get(needed)
    job.is_damaged = False
    return _read(job)


class _Load(Job):
    """The steps of a load: open and check, which change nothing, and fill."""

    snapshot: files.OpenSnapshot | None = None
    is_damaged = False  # as opposed to a snapshot of another model
    hosts: spread.Hosts
    needed: frozenset[str] | None = None  # of a spread snapshot: the files for ranks of this host

    def __init__(self, folder: Path, model: CompiledModule, optimizer: Optimizers) -> None:
        super().__init__(folder, model, optimizer)
        self.states: dict[str, dict[str, Any]] = {}
        self.names: dict[str, list[list[str]]] = {}

    def open(self) -> str:
        """Open the snapshot; return the identity of this save."""
        with self._damages():
            self.snapshot = files.open_snapshot(self.folder)
        return self.snapshot.identity

    def close(self) -> None:
        """Close the snapshot."""
        if self.snapshot is not None:
            self.snapshot.close()
            self.snapshot = None

    def check(self) -> None:
        """Check everything that can be checked before the model is changed."""
        assert self.snapshot is not None
        self._check_model()
        share = (self.world.rank, self.world.size)
        if self.needed is not None:
            share = self.hosts.share
        with self._damages(), self.snapshot.watched():
            self.snapshot.check(*share, self.needed)
        self._plan()

    def survey(self) -> set[str]:
        """Return the files with what this rank loads."""
        self.open()
        try:
            self._check_model()
            self._plan()
            return self.steps.files()
        finally:
            self.close()

    def damaged(self) -> set[str]:
        """Return the damaged ones of this rank's share of the files that its host needs."""
        assert self.needed is not None
        self.open()
        try:
            assert self.snapshot is not None
            return self.snapshot.damaged(set(self.needed), *self.hosts.share)
        finally:
            self.close()

    def _check_model(self) -> None:
        assert self.snapshot is not None
        self.check_model()
        here = self.describe()
        for kind in ("parameters", "buffers"):
            state.check_same_model(kind, self.snapshot.manifest[kind], here[kind])

    def _plan(self) -> None:
        """Read what is not a tensor, and plan how to read the tensors."""
        assert self.snapshot is not None
        manifest, held = self.snapshot.manifest, self.snapshot.files
        with self._damages(), self.snapshot.watched():
            self.values = unpack(held.stream(target.VALUES), held.path(target.VALUES))
            self.extra: dict[str, Any] = self.values["extra"]
            file_bytes = {name: num_bytes for name, (num_bytes, _) in manifest["files"].items()}
            self.steps = LoadSteps(held, file_bytes, self.store.homes.release)
        self.saved_ranks = manifest["world_size"]
        self.steps.plan(self._targets(for_plan=True))

    @contextlib.contextmanager
    def _damages(self) -> Iterator[None]:
        """Treat SnapshotErrors within the block as damage of the snapshot."""
        try:
            yield
        except SnapshotError:
            self.is_damaged = True
            raise

    def _targets(self, for_plan: bool = False) -> dict[str, Any]:
        """Return the tensors to fill: shards and states in place, all others in new memory.

        for_plan: do not create states that the optimizer does not have yet.
        """
        saved_ranks = self.saved_ranks
        buffers = state.buffers_of(self.model)
        self.buffers = {n: torch.empty(b.shape, dtype=b.dtype) for n, b in buffers.items()}
        device = self.world.device
        saved = self.steps.keys("random")
        states = {k: v for k, v in random_states(device).items() if k in saved}
        self.random = {key: torch.empty_like(value) for key, value in states.items()}
        row = self.world.rank if saved_ranks == self.world.size else 0
        targets: dict[str, Any] = {
            "model": {**sharded_state(self.store), **self.buffers},
            "random": state.one_row(self.random, row, saved_ranks),
        }
        for name, each in self.optimizers.items():
            self.states[name] = self._optimizer_targets(name, each, for_plan)
            targets[name] = state.shards_of(self.states[name])
        return {key: part for key, part in targets.items() if part}

    def _optimizer_targets(self, name: str, optimizer: Optimizer, for_plan: bool) -> dict[str, Any]:
        saved = self._saved(name)
        self.names[name] = state.group_names(self.store, optimizer)
        state.check_same_groups(optimizer, self.names[name], saved)
        whole_states.check_kept_whole(optimizer, saved)
        if not for_plan:
            state.make_far_states(self.store, optimizer, saved["pieces"])
        return state.optimizer_targets(self.store, optimizer, saved, for_plan)

    def _saved(self, name: str) -> dict[str, Any]:
        """Return what was saved of one of the optimizers, without its tensors.

        Raises:
            SnapshotError: other optimizers were saved than are given; names both numbers.
        """
        saved = optimizers_of(self.values)
        if not saved:
            raise SnapshotError(
                f"{self.folder} was saved without an optimizer. Load it without one: "
                "zerofx.load(dir, model)."
            )
        if saved.keys() != self.optimizers.keys():
            kinds = ", ".join(each["type"] for each in saved.values())
            raise SnapshotError(
                f"{self.folder} was saved with {len(saved)} optimizers ({kinds}), but "
                f"{_count(len(self.optimizers))} given. Give the same ones, in the same order."
            )
        found: dict[str, Any] = saved[name]
        return found

    @torch.no_grad()
    def fill(self) -> None:
        """Read everything into its place, and count a write, so that no gathered copy is stale.

        Gradients of the old weights that no_sync has accumulated are dropped.
        """
        assert self.snapshot is not None
        try:
            self.steps.plan(self._targets())
            with self.snapshot.watched():
                self.steps.read()
            self._apply()
            self.store.ledger.half_made = None
        except ZerofxError:
            raise
        except (OSError, *DAMAGE) as error:
            raise SnapshotError(
                f"{as_sentence(error)} Reading failed after all checks had passed, so the model is "
                "loaded in part. Load a snapshot again before going on."
            ) from error
        finally:
            self.store.ledger.note_write()
            self.store.homes.rest()
            self.model._zerofx.engine.gradients.drop_unsynced()

    def _apply(self) -> None:
        for name, buffer in state.buffers_of(self.model).items():
            buffer.copy_(self.buffers[name])
        for path, module in state.extra_states_of(self.model):
            module.set_extra_state(self.values["modules"][path])
        for name, each in self.optimizers.items():
            saved, names = self._saved(name), self.names[name]
            state.load_optimizer(self.store, each, names, saved, self.states[name])
        if self.model.loss_scale is not None and self.values.get("loss_scale"):
            self.model.loss_scale.load_state_dict(self.values["loss_scale"])
        set_random_states(self.random, self.world.device)


def _count(number: int) -> str:
    return "1 optimizer is" if number == 1 else f"{number} optimizers are"
