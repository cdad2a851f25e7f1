"""export: the full weights as safetensors files, for every program other than zerofx.

The place of every tensor in the files depends on the shapes only, so that each tensor is written as
soon as its bucket has been gathered, and nothing is held until the end.
"""

from __future__ import annotations

import functools
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zerofx.comm.together import together
from zerofx.errors import SnapshotError
from zerofx.model.module import CompiledModule
from zerofx.runtime.store.state import iter_full_state
from zerofx.snapshot.sources.tensor_files import DTYPES
from zerofx.snapshot.state import buffers_of
from zerofx.snapshot.target import (
    SavePlace,
    check_call,
    check_space,
    is_mount,
    place,
    sync_file,
    write_file,
)

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGN_BYTES = 8
_INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def export(
    target: str | os.PathLike[str],
    model: CompiledModule,
    *,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write the full weights and buffers as safetensors; a collective call, rank 0 writes.

    target: a name that ends in ".safetensors" for one file, or a directory. A directory gets
        "model.safetensors", or, if that would exceed `max_file_bytes`, the numbered files and the
        "model.safetensors.index.json" that other tools expect. Older files with these names are
        removed. Shared parameters are written once; their other names are in the header's metadata.

    Raises:
        SnapshotError: safetensors does not support a dtype, or the file system refuses.
        DesyncError: a rank did not make this call; names it.

    Example:
        zerofx.export("weights", model)  # on all ranks
        plain = MyModel()
        plain.load_state_dict(safetensors.torch.load_file("weights/model.safetensors"))
    """
    check_call("zerofx.export(target, model)", target)
    if not isinstance(model, CompiledModule):
        raise SnapshotError(
            f"{target}: export needs a model that zerofx.compile returned, but this is a plain "
            f"{type(model).__name__}. Use safetensors.torch.save_model."
        )
    path = place(target)
    world, what = model._zerofx.engine.world, f"zerofx.export to {path}"
    world.agree("zerofx.export", f"target={path.name}")
    if (posted := model._zerofx.engine.store.posted) is not None:
        posted.check(world, what)
    is_file = path.suffix == ".safetensors"
    plans = _plan(model, None if is_file else max_file_bytes)
    job = _Export(path, is_file, plans)
    is_writer = world.rank == 0
    try:
        together(world, what, job.begin if is_writer else _nothing, SnapshotError)
        problem = _fill(model, plans, job.written)
        finish = functools.partial(job.finish, problem)
        together(world, what, finish if is_writer else _nothing, SnapshotError)
    finally:
        if is_writer:
            job.tidy()


def _nothing() -> None:
    """Do nothing in a step of other ranks."""


@dataclass(frozen=True)
class _File:
    """One file: its header, and the offset of each tensor's bytes."""

    name: str
    header: bytes
    starts: dict[str, int]
    total_bytes: int


def _plan(model: CompiledModule, max_file_bytes: int | None) -> list[_File]:
    """Distribute the tensors over files, in the order in which they are gathered."""
    shares: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in _tensors(model):
        if max_file_bytes is not None and shares[-1] and filled + tensor.nbytes > max_file_bytes:
            shares.append({})
            filled = 0
        shares[-1][name] = tensor
        filled += tensor.nbytes
    aliases = _aliases(model)
    count = len(shares)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    if count == 1:
        names = ["model.safetensors"]
    return [_lay_out(name, share, aliases) for name, share in zip(names, shares, strict=True)]


def _tensors(model: CompiledModule) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor to write, on meta, with parameters in the order of the buckets."""
    for name, places in model._zerofx.engine.layout.owned.items():
        bucket, param = places[0]
        yield name, torch.empty(param.whole_shape, dtype=bucket.dtype, device="meta")
    for name, buffer in buffers_of(model).items():
        yield name, torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")


def _aliases(model: CompiledModule) -> dict[str, str]:
    """Return {other name: written name} of tensors that the model holds under several names."""
    held = {**model._zerofx.engine.store.params, **buffers_of(model)}
    written = {id(tensor): name for name, tensor in held.items()}
    both = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {n: written[id(t)] for n, t in both if id(t) in written and n not in held}


def _lay_out(name: str, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> _File:
    """Lay out tensors of wide elements first, so that each is aligned; build the header."""
    order = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    metadata = {"format": "pt", **{a: n for a, n in aliases.items() if n in tensors}}
    entries: dict[str, object] = {"__metadata__": metadata}
    starts, end = {}, 0
    for key, tensor in order:
        dtype = _NAMES.get(tensor.dtype)
        if dtype is None:
            raise SnapshotError(f"{key} is {tensor.dtype}, which safetensors files cannot hold.")
        starts[key], begin, end = end, end, end + tensor.nbytes
        entries[key] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    header = struct.pack("<Q", len(text)) + text
    return _File(name, header, {k: s + len(header) for k, s in starts.items()}, end)


def _fill(model: CompiledModule, plans: list[_File], hidden: Path) -> OSError | None:
    """Gather and write; return an error of rank 0, which keeps gathering with the others."""
    where = {name: plan for plan in plans for name in plan.starts}
    problem: OSError | None = None
    for name, tensor in iter_full_state(model._zerofx.engine.store, rank0_only=True):
        problem = problem or _put(hidden, where[name], name, tensor)
    if model._zerofx.engine.world.rank == 0:
        for name, buffer in buffers_of(model).items():
            problem = problem or _put(hidden, where[name], name, buffer.detach().cpu())
        for plan in plans:
            problem = problem or _put(hidden, plan, "", torch.empty(0))
    return problem


def _put(hidden: Path, plan: _File, name: str, tensor: Tensor) -> OSError | None:
    """Write one tensor's bytes at their offset; without a name, write the header."""
    try:
        handle = os.open(hidden / plan.name, os.O_WRONLY | os.O_CREAT, 0o666)
        with open(handle, "wb") as file:
            if not name:
                file.write(plan.header)
                return None
            file.seek(plan.starts[name])
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    except OSError as error:
        return error
    return None


class _Export:
    """The file operations of rank 0: begin, finish, tidy."""

    def __init__(self, path: Path, is_file: bool, plans: list[_File]) -> None:
        self._path, self._is_file, self._plans = path, is_file, plans
        self._hidden: SavePlace | None = None
        self._made: Path | None = None  # a directory that did not exist before
        self.written = path  # the directory to write into, once `begin` has made it

    def begin(self) -> None:
        """Check the target, lock it, and make a hidden directory on its file system."""
        path = self._path
        if self._is_file and (path.is_dir() or is_mount(path)):
            raise SnapshotError(f"{path} is a directory or a mount point. Give the name of a file.")
        if not self._is_file and os.path.lexists(path) and not path.is_dir():
            raise SnapshotError(
                f"{path} is a file. Give a directory, or a name ending in .safetensors."
            )
        parent, name = (path.parent, path.name) if self._is_file else (path, "export")
        if not os.path.lexists(parent):
            parent.mkdir(parents=True)
            self._made = parent
        self._hidden = SavePlace(parent, name, path)
        self.written = self._hidden.make()
        check_space(self.written, sum(len(p.header) + p.total_bytes for p in self._plans))

    def finish(self, problem: OSError | None) -> None:
        """Move the written files to their final places, the index last."""
        path, plans, hidden = self._path, self._plans, self._hidden
        assert hidden is not None
        if problem is not None:
            raise problem
        for plan in plans:
            sync_file(hidden.path / plan.name)
        hidden.check()
        self._made = None
        if self._is_file:
            os.replace(hidden.path / plans[0].name, path)
            sync_file(path.parent)
            return
        names = [plan.name for plan in plans]
        if len(plans) > 1:
            write_file(hidden.path / _INDEX, _index(plans))
            names.append(_INDEX)
            _remove_older(path, keep=())  # better no index than one over files of two exports
        for name in names:
            os.replace(hidden.path / name, path / name)
        _remove_older(path, keep=names)
        sync_file(path)

    def tidy(self) -> None:
        """Remove files of a failed export, and release the lock."""
        if self._hidden is not None:
            self._hidden.close()
        if self._made is not None:
            self._made.rmdir()


def _index(plans: list[_File]) -> bytes:
    total = sum(plan.total_bytes for plan in plans)
    where = {name: plan.name for plan in plans for name in plan.starts}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode()


def _remove_older(path: Path, keep: list[str] | tuple[()]) -> None:
    """Remove files of an earlier export, the index first."""
    found = [p for p in path.iterdir() if _OURS.fullmatch(p.name) and p.name not in keep]
    for each in sorted(found, key=lambda p: p.name != _INDEX):
        each.unlink()
