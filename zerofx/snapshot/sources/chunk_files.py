"""Folders of torch.distributed.checkpoint, which FSDP2 and Megatron (`torch_dist`) write.

The index `.metadata` lists the boxes into which every tensor was cut, and the place of each box in
a file, where it is stored with torch.save. Names are those of a nested state dict, joined by dots:

    {"model": ..., "optim": ...}    model.<name>, optim.state.<name>.exp_avg, optim.param_groups...
    torchtitan, Accelerate, ...     other words in front, or none
    Megatron                        <name>, optimizer.state.exp_avg.<name>

The words in front are found by the names that the model has.

Source: torch 2.13, distributed/checkpoint; megatron-core 0.16, dist_checkpointing.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from zerofx import schema
from zerofx.errors import SnapshotError, as_sentence
from zerofx.schema import DAMAGE
from zerofx.snapshot.dcp import IndexUnpickler, check_index
from zerofx.snapshot.held import HeldFiles
from zerofx.snapshot.sources.source import Entry, OpenCheckpoint, StoredTensor, read_whole
from zerofx.snapshot.sources.torch_files import Inert, plain, read_torch_file, stand_in
from zerofx.snapshot.target import INDEX

# Folders within one folder that are read as one: those that Accelerate writes.
PARTS = ("pytorch_model_fsdp_0", "optimizer_0")
_COMMON = "common.pt"  # what of Megatron's is no tensor
_STATE, _GROUPS = "state.", "param_groups."
_COPY = "fp32_param"  # master weights, among Megatron's states
_FIRST = ("", "model.", "module.", "state_dict.", "model_state_dict.", "app.model.")


@dataclass(frozen=True)
class Chunk:
    """One box of a tensor, and its place in a file."""

    held: HeldFiles
    file: Path
    offset: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def entry(self) -> Entry:
        """The stored tensor, once its header has been read."""
        found = read_torch_file(self.held, str(self.file), self.offset, self.length).content
        if not isinstance(found, Entry) or (found.dtype, found.shape) != (self.dtype, self.sizes):
            raise SnapshotError(
                f"{self.file}: at offset {self.offset} there is no {self.dtype} tensor of "
                f"{list(self.sizes)}, as the index says."
            )
        return found


@dataclass(frozen=True)
class Boxed:
    """One tensor that was cut into boxes."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] = field(repr=False)

    def _runs(self, chunk: Chunk, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first flat element, first element of the box, count): runs of a box, in order.

        The elements of a run are consecutive both in the box and in the tensor.
        """
        if not math.prod(chunk.sizes):
            return
        ndim = len(self.shape)
        cut = next((d for d in reversed(range(ndim)) if chunk.sizes[d] != self.shape[d]), 0)
        inner = math.prod(self.shape[cut + 1 :])
        run = (chunk.sizes[cut] if ndim else 1) * inner
        strides = [math.prod(self.shape[d + 1 :]) for d in range(ndim)]
        base = chunk.offsets[cut] * strides[cut] if ndim else 0
        outer = [range(n) for n in chunk.sizes[:cut]]
        if outer:  # begin with the first rows that may overlap start:stop
            first = chunk.offsets[0]
            low = max(start // strides[0] - first, 0)
            high = min(-(-stop // strides[0]) - first, chunk.sizes[0])
            outer[0] = range(low, max(high, low))
        rows = math.prod(chunk.sizes[1:cut])
        number = outer[0].start * rows if outer else 0
        for place in itertools.product(*outer):
            at = base + sum(
                (chunk.offsets[d] + index) * strides[d] for d, index in enumerate(place)
            )
            low, high = max(start, at), min(stop, at + run)
            if low < high:
                yield low, number * run + low - at, high - low
            number += 1

    def check(self, start: int, stop: int) -> None:
        """Check that the files contain these elements."""
        for chunk in self.chunks:
            if any(True for _ in self._runs(chunk, start, stop)):
                chunk.entry.check(0, 0)

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, values) of the flat elements start:stop, part by part."""
        for chunk in self.chunks:
            runs = list(self._runs(chunk, start, stop))
            if not runs:
                continue
            waiting = iter(runs)
            at, begin, count = next(waiting)
            last = runs[-1][1] + runs[-1][2]
            for first, part in chunk.entry.read(begin, last):
                end = first + len(part)
                while begin < end:
                    low, high = max(begin, first), min(begin + count, end)
                    if low < high:
                        yield at + low - begin, part[low - first : high - first]
                    if begin + count > end:
                        break
                    at, begin, count = next(waiting, (0, last, 0))
                    if not count:
                        break


class ChunkSource(OpenCheckpoint):
    """A folder with an index, or several such folders that Accelerate has put into one."""

    def _found(self) -> dict[str, StoredTensor]:
        self.found = "checkpoint of torch.distributed.checkpoint"
        folders = [self._source]
        if not (self._source / INDEX).is_file():
            folders = [self._source / name for name in PARTS if (self._source / name).is_dir()]
        tensors: dict[str, StoredTensor] = {}
        self._bytes: dict[str, tuple[Path, int, int]] = {}
        for folder in folders:
            tensors |= self._indexed(folder)
        common = self._source / _COMMON
        if common.is_file():
            self.found = "Megatron checkpoint (torch_dist)"
        entries = self._weights(tensors)
        entries |= {k: v for k, v in self._states(tensors).items() if k in entries}
        if common.is_file():
            self._take_common(common)
        return entries

    def _indexed(self, folder: Path) -> dict[str, StoredTensor]:
        """Return the tensors of one index, and record the places of other values."""
        path = folder / INDEX
        file = self._held.stream(str(path))
        try:
            index = IndexUnpickler(file, stand_in).load()
            check_index(index, has_values=True)
            for info in index.storage_data.values():
                schema.file_path(info.relative_path, "the name of a file")
        except DAMAGE as error:
            raise SnapshotError(
                f"{path}: not the index of a checkpoint: {as_sentence(error)}"
            ) from error
        assert isinstance(index, Metadata) and index.storage_data is not None
        cut = getattr(index, "mcore_data", None)  # what Megatron has flattened, by name
        cut = cut if isinstance(cut, dict) else {}
        found: dict[str, StoredTensor] = {}
        for key, entry in index.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                info = index.storage_data[MetadataIndex(key)]
                self._bytes[key] = folder / info.relative_path, info.offset, info.length
            elif isinstance(entry, TensorStorageMetadata) and key not in cut:
                found[key] = self._boxed(folder, key, entry, index)
        return found

    def _boxed(
        self, folder: Path, key: str, entry: TensorStorageMetadata, index: Metadata
    ) -> Boxed:
        assert index.storage_data is not None
        dtype, chunks = entry.properties.dtype, []
        for chunk in entry.chunks:
            info = index.storage_data[MetadataIndex(key, chunk.offsets)]
            file = folder / info.relative_path
            total = self._held.num_bytes(str(file))
            if info.offset + info.length > total:
                raise SnapshotError(
                    f"{file} is cut short: {key} ends at offset {info.offset + info.length}, the "
                    f"file at {total}."
                )
            place = tuple(chunk.offsets), tuple(chunk.sizes)
            chunks.append(Chunk(self._held, file, info.offset, info.length, *place, dtype))
        path = chunks[0].file if chunks else folder
        return Boxed(path, dtype, tuple(entry.size), tuple(chunks))

    # -- which of them are the model's, and the optimizer's ---------------------------------------
    def _weights(self, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the model's tensors by its names.

        Raises:
            SnapshotError: two parts of the folder have all of its names.
        """
        count: Counter[str] = Counter()
        for key in tensors:
            count.update(front for front, name in _splits(key) if name in self._wanted)
        most = max(count.values(), default=0)
        best = [front for front, number in count.items() if number == most and most]
        usual = [front for front in _FIRST if front in best]
        if len(best) > 1 and not usual:
            raise SnapshotError(
                f"{self._source} has the model's names under {', '.join(sorted(best))}. Say which "
                "by names=, a function from the model's names to those in the files."
            )
        front = (usual or best or [""])[0]
        heads = {name.partition(".")[0] for name in self._wanted}
        if not best:  # a checkpoint of another model: errors should list its names
            front = "model." if any(key.startswith("model.") for key in tensors) else ""
            heads = {key.partition(".")[0] for key in tensors if f".{_STATE}" not in f".{key}"}
        return {
            key.removeprefix(front): stored
            for key, stored in tensors.items()
            if key.startswith(front) and (front or key.partition(".")[0] in heads)
        }

    def _states(self, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Assign tensors to the optimizer; return its fp32 copies of weights."""
        copies: dict[str, StoredTensor] = {}
        for key, stored in tensors.items():
            for name, state in _state_of(key, self._wanted):
                if state == _COPY:
                    copies[name] = stored
                elif stored.shape:
                    self.optimizer.tensors.setdefault(name, {})[state] = stored
                else:
                    self.optimizer.values.setdefault(name, {})[state] = read_whole(stored)
        for key in self._bytes:
            for name, state in _state_of(key, self._wanted):
                self.optimizer.values.setdefault(name, {})[state] = self._value(key)
        self._take_options()
        return copies

    def _take_options(self) -> None:
        groups: dict[str, dict[str, Any]] = {}
        for key in self._bytes:
            _, is_there, rest = f".{key}".rpartition(f".{_GROUPS}")
            name, _, option = rest.rpartition(".")
            if not is_there or not name:
                continue
            if name in self._wanted:
                self.optimizer.options.setdefault(name, {})
                self.optimizer.options[name] = {
                    **self.optimizer.options[name], option: self._value(key)
                }  # fmt: skip
            elif name.isdecimal():
                groups.setdefault(name, {})[option] = self._value(key)
        for group in groups.values():
            members = group.pop("params", [])
            for name in members if isinstance(members, list) else ():
                self.optimizer.options[name] = group

    def _value(self, key: str) -> Any:
        file, offset, length = self._bytes[key]
        return plain(read_torch_file(self._held, str(file), offset, length).content)

    def _take_common(self, path: Path) -> None:
        """Read steps and options of Megatron's optimizer, which are equal for all parameters."""
        content = read_torch_file(self._held, str(path)).content
        if not isinstance(content, dict):
            raise SnapshotError(f"{path} has a {type(content).__name__} and no state.")
        self.extra = {
            k: plain(v)
            for k, v in content.items()
            if isinstance(v, (int, float, str, bool)) and not isinstance(v, Inert)
        }
        groups = _param_groups(content.get("optimizer"))
        steps = {group["step"] for group in groups if isinstance(group.get("step"), int)}
        for name in self.optimizer.tensors:
            if len(steps) == 1:
                self.optimizer.values.setdefault(name, {}).setdefault("step", next(iter(steps)))
            if len(groups) == 1:
                kept = {k: plain(v) for k, v in groups[0].items() if k not in ("params", "step")}
                self.optimizer.options.setdefault(name, kept)


def _splits(key: str) -> Iterator[tuple[str, str]]:
    """Yield every way to split a key before a word: ("model.", "fc.weight")."""
    yield "", key
    for at, letter in enumerate(key):
        if letter == ".":
            yield key[: at + 1], key[at + 1 :]


def _state_of(key: str, wanted: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (parameter, state), at most once, if a key names a state."""
    _, is_there, rest = f".{key}".partition(f".{_STATE}")
    while is_there:
        name, _, state = rest.rpartition(".")
        if name in wanted:
            yield name, state
            return
        state, _, name = rest.partition(".")
        if name in wanted:
            yield name, state
            return
        _, is_there, rest = f".{rest}".partition(f".{_STATE}")


def _param_groups(value: Any, depth: int = 0) -> Sequence[dict[str, Any]]:
    """Return the parameter groups of a state dict, at whatever depth they are."""
    if not isinstance(value, dict) or depth > 3:
        return []
    groups = value.get("param_groups")
    if isinstance(groups, list):
        return [group for group in groups if isinstance(group, dict)]
    return [g for part in value.values() for g in _param_groups(part, depth + 1)]
