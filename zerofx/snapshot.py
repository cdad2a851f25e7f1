"""save and load, in reading order: a training run to a directory and back, at any world size.

    zerofx.save("run/step-1000", model, optimizer, extra={"step": 1000})
    extra = zerofx.load("run/step-1000", model, optimizer)

Kept are parameters, buffers, optimizer states and options, the random generators of torch, Python
and NumPy, and `extra`. Any number of ranks at any stage loads it. Ranks on several hosts need a
file system that all of them see. snapshot_files.py says what lies on disk, and how an interrupted
save leaves the one before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from zerofx import snapshot_files as files
from zerofx import snapshot_state as state
from zerofx.errors import SnapshotError
from zerofx.module import CompiledModule
from zerofx.runtime.shard_state import flat_state
from zerofx.snapshot_dcp import INDEX, LoadSteps, SaveSteps, written_files
from zerofx.snapshot_export import export
from zerofx.snapshot_random import random_states, set_random_states
from zerofx.snapshot_ranks import together
from zerofx.snapshot_values import pack, unpack

__all__ = ["export", "load", "save"]


def save(
    folder: str | os.PathLike[str],
    model: CompiledModule,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save a training run to a directory of its own; a collective call, all ranks make it.

    The directory appears whole or not at all: one that is there is replaced only once the new one
    is complete and on disk.

    extra: what else to keep, rank 0's: numbers, strings, tensors and containers of them, such as
        the `state_dict()` of a learning rate scheduler or of a GradScaler.

    Raises:
        SnapshotError: something cannot be saved, or the file system refuses; nothing is published.
        DesyncError: a rank did not make this call; names it.
    """
    job = _Save(files.place(folder), model, optimizer, extra)
    world, what = job.world, f"zerofx.save to {job.folder}"
    world.agree("zerofx.save", f"directory={job.folder.name};{_optimizer_item(optimizer)}")
    try:
        written = together(world, what, job.prepare)[0]
        assert written is not None
        plans = together(world, what, lambda: job.plan(written))
        parts = together(world, what, lambda: job.write(plans))
        together(world, what, lambda: job.publish(parts))
    finally:
        job.tidy()


def load(
    folder: str | os.PathLike[str], model: CompiledModule, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Load what `save` saved, at any world size and stage, and return its `extra`.

    A collective call. Everything is checked on all ranks before anything is changed. Without an
    optimizer the saved one is left alone. At the world size of the save each rank gets its own
    random generators back, at another one all ranks get rank 0's.

    Raises:
        SnapshotError: there is no whole snapshot of this model: names the file and the reason.
        DesyncError: a rank did not make this call; names it.
    """
    job = _Load(files.place(folder), model, optimizer)
    world, what = job.world, f"zerofx.load of {job.folder}"
    world.agree("zerofx.load", f"directory={job.folder.name};{_optimizer_item(optimizer)}")
    found = together(world, what, job.check)
    for rank, identity in enumerate(found):
        if identity != found[0]:
            raise SnapshotError(
                f"{what}: rank {rank} sees another save there than rank 0; all ranks need one file "
                "system"
            )
    together(world, what, job.fill)
    return job.extra


def _optimizer_item(optimizer: Optimizer | None) -> str:
    return f"optimizer={'none' if optimizer is None else type(optimizer).__name__}"


class _Job:
    """One rank's part in a save or a load."""

    def __init__(self, folder: Path, model: CompiledModule, optimizer: Optimizer | None) -> None:
        if not isinstance(model, CompiledModule):
            raise SnapshotError(
                f"{folder}: a snapshot is of what zerofx.compile returned, and this is a plain "
                f"{type(model).__name__}; use torch.save(model.state_dict(), ...)"
            )
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.store = model._engine.store
        self.world = self.store.world

    def describe(self) -> dict[str, Any]:
        """Return the names, dtypes and shapes that a save and a model must share."""
        return {
            "parameters": state.describe(self.store.params),
            "buffers": state.describe(state.buffers_of(self.model)),
        }


class _Save(_Job):
    """The steps of a save: prepare, plan, write, publish."""

    def __init__(
        self,
        folder: Path,
        model: CompiledModule,
        optimizer: Optimizer | None,
        extra: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(folder, model, optimizer)
        self.extra = {} if extra is None else extra
        self.written: Path | None = None  # the hidden directory, known to rank 0

    def prepare(self) -> Path | None:
        """Make sure that all can be saved; on rank 0 return the directory to write into."""
        optimizer, values = self.optimizer, {}
        if optimizer is not None:
            values = state.optimizer_values(optimizer, state.group_names(self.store, optimizer))
        if self.world.rank != 0:
            return None
        if not isinstance(self.extra, Mapping):
            raise SnapshotError(f"extra is a {type(self.extra).__name__}; give a dict")
        modules = {path: m.get_extra_state() for path, m in state.extra_states_of(self.model._model)}
        self.values = pack({"extra": dict(self.extra), "optimizer": values, "modules": modules})
        files.check_place(self.folder)
        self.written = files.begin(self.folder)
        return self.written

    def plan(self, written: Path) -> Any:
        """Return what this rank could write."""
        if not written.is_dir():
            raise SnapshotError(
                f"{written}, which rank 0 made, is not here; save to a file system that all ranks "
                "share"
            )
        random = state.one_row(random_states(self.world.device), self.world.rank, self.world.size)
        tensors: dict[str, Any] = {"model": dict(flat_state(self.store)), "random": random}
        if self.world.rank == 0:
            buffers = state.buffers_of(self.model)
            tensors["model"].update({n: b.detach() for n, b in buffers.items()})
        if self.optimizer is not None:
            pieces = state.optimizer_tensors(self.store, self.optimizer)
            tensors.update({"optimizer": pieces} if pieces else {})
        self.steps = SaveSteps(written, self.world.rank, tensors)
        self.target = written
        return self.steps.local()

    @torch.no_grad()
    def write(self, plans: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Write this rank's file; return what lies where, and its checksum."""
        self.steps.combine(plans)
        results = self.steps.write()
        sums = {n: files.checksum(self.target / n) for n in sorted(written_files(results))}
        return results, sums

    def publish(self, parts: list[tuple[list[Any], dict[str, Any]]]) -> None:
        """On rank 0 add what is no tensor and the manifest, and give the directory its name."""
        if self.world.rank != 0:
            return
        self.steps.finish([results for results, _ in parts])
        files.write_file(self.target / files.VALUES, self.values)
        sums = {name: checksum for _, part in parts for name, checksum in part.items()}
        sums.update({n: files.checksum(self.target / n) for n in (INDEX, files.VALUES)})
        facts = {"files": sums, "world_size": self.world.size, "torch": torch.__version__}
        plan = self.model._setting.plan.to_dict()
        files.write_manifest(self.target, {**facts, **self.describe(), "plan": plan})
        files.publish(self.target, self.folder)

    def tidy(self) -> None:
        """Remove what a failed save has written (a published one has left nothing there)."""
        if self.written is not None:
            files.discard(self.written)


class _Load(_Job):
    """The steps of a load: check, which changes nothing, and fill."""

    def check(self) -> str:
        """Check everything there is to check; return what tells this save from any other."""
        found = files.locate(self.folder)
        manifest = files.read_manifest(found)
        here = self.describe()
        for kind in ("parameters", "buffers"):
            state.check_same_model(kind, manifest[kind], here[kind])
        sums = manifest["files"]
        files.check_files(found, sums, self.world.rank, self.world.size)
        self.values = unpack(found / files.VALUES)
        self.extra: dict[str, Any] = self.values["extra"]
        self.steps = LoadSteps(found, {name: num_bytes for name, (num_bytes, _) in sums.items()})
        self.steps.plan(self._targets(manifest["world_size"]))
        return files.identity(manifest)

    def _targets(self, saved_ranks: int) -> dict[str, Any]:
        """Return what is to be filled: shards and states in place, the rest in new memory."""
        buffers = state.buffers_of(self.model)
        self.buffers = {n: torch.empty(b.shape, dtype=b.dtype) for n, b in buffers.items()}
        device = self.world.device
        saved = self.steps.keys("random")
        states = {k: v for k, v in random_states(device).items() if k in saved}
        self.random = {key: torch.empty_like(value) for key, value in states.items()}
        row = self.world.rank if saved_ranks == self.world.size else 0
        targets: dict[str, Any] = {
            "model": {**flat_state(self.store), **self.buffers},
            "random": state.one_row(self.random, row, saved_ranks),
        }
        if self.optimizer is not None:
            self.states = self._optimizer_targets(self.optimizer)
            targets["optimizer"] = state.pieces_of(self.states)
        return {key: part for key, part in targets.items() if part}

    def _optimizer_targets(self, optimizer: Optimizer) -> dict[str, Any]:
        saved = self.values["optimizer"]
        if not saved:
            raise SnapshotError(
                f"{self.folder} was saved without an optimizer; load it without one: "
                "zerofx.load(dir, model)"
            )
        self.names = state.group_names(self.store, optimizer)
        state.check_same_groups(optimizer, self.names, saved)
        return state.optimizer_targets(self.store, optimizer, saved["pieces"])

    @torch.no_grad()
    def fill(self) -> None:
        """Read everything into its place; the weight epoch moves on, so that no gather is stale."""
        try:
            self.steps.read()
            self._apply()
        except (OSError, RuntimeError, ValueError) as error:
            raise SnapshotError(
                f"{error}: reading failed after all checks had passed, so the model is loaded in "
                "part; load a snapshot again before going on"
            ) from error
        finally:
            self.store.ledger.writes += 1

    def _apply(self) -> None:
        for name, buffer in state.buffers_of(self.model).items():
            buffer.copy_(self.buffers[name])
        for path, module in state.extra_states_of(self.model._model):
            module.set_extra_state(self.values["modules"][path])
        if self.optimizer is not None:
            saved = self.values["optimizer"]
            state.load_optimizer(self.optimizer, self.names, saved, self.states)
        set_random_states(self.random, self.world.device)
