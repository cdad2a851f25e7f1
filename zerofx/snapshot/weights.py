"""load_weights: from safetensors files into the shards, wherever these live, tensor by tensor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from zerofx.comm.world import World
from zerofx.errors import SnapshotError
from zerofx.model.module import CompiledModule
from zerofx.snapshot.held import Replaced, is_stale, read_settled
from zerofx.snapshot.state import buffers_of, few
from zerofx.snapshot.target import check_call, place
from zerofx.snapshot.sources.source import Entry, describe
from zerofx.snapshot.sources.tensor_files import TensorSource


class Keys(NamedTuple):
    """What a load has left alone, as torch's load_state_dict returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_weights(
    model: CompiledModule, source: str | os.PathLike[str], *, strict: bool = True
) -> Keys:
    """Load parameters and buffers from safetensors; a collective call, all ranks make it.

    Every rank reads from the files only what it owns, and that in parts of a few MiB, straight to
    where it lives: no host ever holds the model, or a whole tensor. Values are cast to the model's
    formats. Everything is checked on all ranks before anything is changed.

    source: a ".safetensors" file, a ".safetensors.index.json", or a directory that has either (the
        form in which Hugging Face models and `zerofx.export` lie). All ranks need to see it.
    strict: the files must have the names of the model and no others. Of a shared parameter one of
        its names is enough.

    Raises:
        SnapshotError: names or shapes differ, or a file is not whole; names file and tensor.
        DesyncError: a rank did not make this call; names it.
    """
    check_call("zerofx.load_weights(model, source)", source)
    if not isinstance(model, CompiledModule):
        raise SnapshotError(
            f"{source}: load_weights takes what zerofx.compile returned, and this is a plain "
            f"{type(model).__name__}; use safetensors.torch.load_model"
        )
    path = Path(os.path.abspath(source))
    job = _Job(model, path, strict)
    world, what = model._zerofx.engine.world, f"zerofx.load_weights from {path}"
    world.agree("zerofx.load_weights", f"source={path.name};strict={strict}")
    read_settled(world, what, job)
    return job.keys


def names_of(world: World, source: str | os.PathLike[str]) -> list[str]:
    """Return the names of all tensors at a place; a collective call.

    Raises:
        SnapshotError: there are none for some rank, or a file is not whole.
    """
    path = Path(os.path.abspath(source))
    job = _Look(path)
    read_settled(world, f"a look at {path}", job)
    return job.names


class _Files:
    """The safetensors files at a place, open on this rank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: TensorSource | None = None

    def open(self) -> list[tuple[str, str]]:
        """Open the files; return what they have."""
        self._opened = TensorSource(place(self._path))
        entries = self._source.entries
        return [(name, f"{e.path.name}:{e.offset} {describe(e)}") for name, e in entries.items()]

    def close(self) -> None:
        """Let go of the files."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @property
    def _source(self) -> TensorSource:
        assert self._opened is not None
        return self._opened


class _Look(_Files):
    """A look at the names of the tensors."""

    names: list[str]

    def check(self) -> None:
        """Take the names of what was there when every rank had opened its files."""
        self._source.check_current()
        self.names = list(self._source.entries)

    def fill(self) -> None:
        """Change nothing: a look reads no values."""


class _Job(_Files):
    """One rank's part: check, which changes nothing, and fill."""

    def __init__(self, model: CompiledModule, path: Path, strict: bool) -> None:
        super().__init__(path)
        self._model, self._strict = model, strict
        self._store = model._zerofx.engine.store
        self._found: dict[str, Entry] = {}  # by canonical name
        self.keys = Keys([], [])

    def check(self) -> None:
        """Find every parameter and buffer in the files.

        Files that are still there now were there when the last rank had opened its own, so all
        ranks have the same ones. What `open` returns is alike for all exports of one model.
        """
        self._source.check_current()
        self._found.clear()
        self._store.settle()
        self._store.check_bindings()
        held = {**self._store.params, **buffers_of(self._model)}
        known = {id(tensor): name for name, tensor in held.items()}
        names = {
            alias: known[id(tensor)]
            for each in (self._model.named_parameters, self._model.named_buffers)
            for alias, tensor in each(remove_duplicate=False)
            if id(tensor) in known
        }
        entries = self._source.entries
        for alias, name in names.items():
            if alias in entries:
                self._found.setdefault(name, entries[alias])
        missing = [name for name in held if name not in self._found]
        self.keys = Keys(missing, [name for name in entries if name not in names])
        differ = [
            f"{name} is {describe(entry)} in {entry.path.name} and {list(held[name].shape)} in "
            "the model"
            for name, entry in self._found.items()
            if entry.shape != tuple(held[name].shape)
        ]
        way_out = ""
        if self._strict and (self.keys.missing_keys or self.keys.unexpected_keys):
            way_out = "; strict=False leaves such names alone"
            differ += [f"{name} is only in the model" for name in self.keys.missing_keys]
            differ += [f"{name} is only in the files" for name in self.keys.unexpected_keys]
        if differ:
            what = f"{self._path}: the files are of another model"
            raise SnapshotError(f"{what}: {few(differ)}{way_out}")

    @torch.no_grad()
    def fill(self) -> None:
        """Read what this rank owns; gradients that no_sync has summed before are dropped."""
        try:
            for name, entry in self._found.items():
                if name in self._store.params:
                    self._fill_piece(name, entry)
            for name, buffer in buffers_of(self._model).items():
                if name in self._found:
                    flat = torch.empty(buffer.numel(), dtype=buffer.dtype)
                    for first, part in self._found[name].read(0, buffer.numel()):
                        flat[first : first + len(part)] = part.to(buffer.dtype)
                    buffer.copy_(flat.view(buffer.shape))
            self._source.check_unwritten()
            if not self.keys.missing_keys:
                self._store.ledger.half_made = None
        except (OSError, SnapshotError) as error:
            if is_stale(error):
                raise Replaced(f"{self._path}: {error}") from error
            raise SnapshotError(
                f"{error}: reading failed after all checks had passed, so the model is loaded in "
                "part; load weights again before going on"
            ) from error
        finally:
            self._store.ledger.note_write()
            self._store.homes.rest()
            self._model._zerofx.engine.gradients.drop_unsynced()

    def _fill_piece(self, name: str, entry: Entry) -> None:
        """Fill this rank's ranges of a parameter, which lie one behind another in its shard."""
        local, at = self._store.local_view(name), 0
        for start, stop in self._store.pieces[name].ranges:
            for first, part in entry.read(start, stop):
                begin = at + first - start
                local[begin : begin + len(part)].copy_(part)
            at += stop - start
        self._store.homes.release(local)
