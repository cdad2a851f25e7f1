"""Tensors to and from files, through the planners and storage of torch.distributed.checkpoint.

Its `save` and `load` are not called, because they use their own process group and unpickle any
object. The same steps are taken here one by one, and the ranks communicate through their world
between them. The files are an ordinary distributed checkpoint, which
`torch.distributed.checkpoint` can also read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
import os
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from zerofx.compat.checkpoint import INDEX_PARTS, file_of, storage_info
from zerofx.errors import SnapshotError, ZerofxError, as_sentence
from zerofx.runtime.tensors.checkpoint import FlatPiece, flat_piece
from zerofx.schema import DAMAGE, MOST, FormError
from zerofx.snapshot.held import HeldFiles
from zerofx.snapshot.target import INDEX


class _Writer(FileSystemWriter):
    """A writer of one file per rank and of an index that does not contain the path of the files."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class _SavePlanner(DefaultSavePlanner):
    """A planner that passes each tensor through `fetch` when the writer reaches it."""

    def __init__(self, fetch: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._fetch = fetch

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item)
        return self._fetch(found) if isinstance(found, Tensor) else found


class _LoadPlanner(DefaultLoadPlanner):
    """A planner that calls `done` with each tensor that has been filled."""

    def __init__(self, done: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._done = done

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._done(tensor)


class SaveSteps:
    """The steps of a save, in order: `local`, `combine`, `write`, and on rank 0 `finish`.

    fetch: copies a tensor from another tier, one at a time.
    """

    def __init__(
        self, folder: Path, rank: int, tensors: dict[str, Any], fetch: Callable[[Tensor], Tensor]
    ) -> None:
        self._folder, self._rank = folder, rank
        self._writer = _Writer(folder)
        self._planner = _SavePlanner(fetch)
        self._tensors = tensors
        self._metadata = Metadata({})
        self._held: dict[Any, Tensor] = {}

    def local(self) -> SavePlan:
        """Return the plan of everything that this rank could write."""
        is_first = self._rank == 0
        self._planner.set_up_planner(self._tensors, is_coordinator=is_first)
        self._writer.set_up_storage_writer(is_first)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def combine(self, plans: list[SavePlan]) -> list[int]:
        """Decide which rank writes what; return the number of bytes of each rank's tensors.

        Every rank computes the same result from the same plans.

        Raises:
            SnapshotError: the ranks' pieces do not form whole tensors.
        """
        try:
            combined, self._metadata = self._planner.create_global_plan(plans)
        except ValueError as error:
            raise SnapshotError(
                f"the ranks hold different parts of a state: {as_sentence(error)}"
            ) from error
        mine = self._writer.prepare_global_plan(combined)[self._rank]
        self._plan = self._planner.finish_plan(mine)
        return [sum(map(_num_bytes, plan.items)) for plan in combined]

    def hold(self) -> None:
        """Copy this rank's share to the host, so that `write` may run while training changes it."""
        items = self._plan.items
        self._held = {
            item.index: _on_host(self._planner.resolve_data(item), True) for item in items
        }
        self._tensors = {}

    def write(self) -> list[WriteResult]:
        """Write and sync this rank's file; tensors that were not held are fetched one by one."""
        return self._write(file_of(self._plan)) if self._plan.items else []

    def _write(self, name: str) -> list[WriteResult]:
        if not self._plan.items:
            return []
        try:
            with open(self._folder / name, "wb") as file:
                found = [self._put(item, file, name) for item in self._plan.items]
                file.flush()
                os.fsync(file.fileno())
        except ZerofxError:
            raise
        except RuntimeError as error:  # raised by torch.save if the file system refused a write
            raise SnapshotError(f"{self._folder / name}: {as_sentence(error)}") from error
        return found

    def _put(self, item: WriteItem, file: BinaryIO, name: str) -> WriteResult:
        tensor = self._held.pop(item.index, None)
        if tensor is None:
            tensor = _on_host(self._planner.resolve_data(item))
        offset = file.tell()
        torch.save(tensor, file)
        length = file.tell() - offset
        return WriteResult(item.index, length, storage_info(name, offset, length))

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Write the index."""
        self._writer.finish(self._metadata, results)

    def write_alone(self) -> list[str]:
        """Write all that this rank holds, and an index of that alone; return the files' names.

        Such an index has holes; `merged` fills them from those of other ranks.
        """
        combined, index = create_default_global_save_plan([self.local()])
        self._metadata = dataclasses.replace(index, planner_data=combined[0].planner_data)
        self._plan = self._planner.finish_plan(combined[0])
        name = rank_file(self._rank)
        results = self._write(name)
        self.finish([results])
        return [name] if results else []


def _on_host(tensor: Tensor, is_copy: bool = False) -> Tensor:
    """Return a tensor on the host with a storage of its own, because torch.save writes storages."""
    found = tensor.detach().cpu()
    is_all = found.untyped_storage().nbytes() == found.nbytes
    if not is_all or (is_copy and found.data_ptr() == tensor.data_ptr()):
        return found.clone()
    return found


def _num_bytes(item: WriteItem) -> int:
    said = item.tensor_data
    return math.prod(said.chunk.sizes) * said.properties.dtype.itemsize if said else 0


def written_files(results: list[WriteResult]) -> set[str]:
    """Return the names of the files that contain these results."""
    return {result.storage_data.relative_path for result in results}


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"__{rank}_0{DEFAULT_SUFFIX}"


class IndexUnpickler(pickle.Unpickler):
    """An unpickler that loads the parts of an index, and nothing else.

    stand_in: returns a class for the dotted path of any other class; without it, other classes are
        refused.
    """

    def __init__(self, file: BinaryIO, stand_in: Callable[[str], type] | None = None) -> None:
        super().__init__(file)
        self._stand_in = stand_in

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or f"{module}.{name}" in INDEX_PARTS:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if self._stand_in is not None:
            return self._stand_in(f"{module}.{name}")
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _member(kind: Any, name: str) -> Enum:
    """Return a member of an enumeration: some Pythons, such as 3.11.2, write `getattr` for it."""
    if isinstance(kind, EnumMeta) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError(f"it asks for the attribute {name!r} of {kind}")


class _HeldFileSystem(FileSystem):
    """A file system that gives torch's reader files that are already open."""

    def __init__(self, held: HeldFiles) -> None:
        self._held = held

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "rb"
        yield self._held.stream(os.path.basename(path))


class _Reader(FileSystemReader):
    def __init__(self, held: HeldFiles) -> None:
        assert held.folder is not None
        super().__init__(held.folder)
        self.fs = _HeldFileSystem(held)
        self._held = held

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index without running any code that it may contain."""
        path = self._held.path(INDEX)
        try:
            found = IndexUnpickler(self._held.stream(INDEX)).load()
            check_index(found)
        except DAMAGE as error:
            raise SnapshotError(
                f"{path}: not the index of a snapshot: {as_sentence(error)}"
            ) from error
        assert isinstance(found, Metadata)
        return found


def merged(indexes: Sequence[bytes], wanted: Collection[str] = ()) -> bytes:
    """Return the index of everything that indexes of single ranks list; the first one counts.

    wanted: the tensors that must be there.

    Raises:
        SnapshotError: it has holes, or is damaged.
    """
    found, places = Metadata({}, planner_data={}), {}
    try:
        for data in indexes:
            part = IndexUnpickler(io.BytesIO(data)).load()
            found.planner_data.update(part.planner_data or {})
            for key, entry in part.state_dict_metadata.items():
                whole: Any = found.state_dict_metadata.setdefault(
                    key, TensorStorageMetadata(entry.properties, entry.size, [])
                )
                if (whole.properties, whole.size) != (entry.properties, entry.size):
                    raise FormError(f"{key} has several forms")
                for chunk in entry.chunks:
                    at = MetadataIndex(key, chunk.offsets)
                    if at not in places:
                        places[at] = part.storage_data[at]
                        whole.chunks.append(chunk)
        found.storage_data = places
        check_index(found)
        if missing := sorted(set(wanted) - found.state_dict_metadata.keys()):
            raise FormError(f"{missing[0]} is missing")
    except DAMAGE as error:
        raise SnapshotError(as_sentence(error)) from error
    return pickle.dumps(found)


# -- the index: checks of its content -------------------------------------------------------------
_MOST_CUT = 10  # dimensions along which the chunks of one tensor may be cut


def check_index(index: Any, has_values: bool = False) -> None:
    """Check that an index lists tensors, chunks that tile them exactly, and one place per chunk.

    has_values: the index may also list values that are not tensors.

    Raises:
        FormError: names the tensor and what is wrong.
    """
    tensors = getattr(index, "state_dict_metadata", None)
    places = getattr(index, "storage_data", None)
    if not (isinstance(index, Metadata) and isinstance(tensors, dict) and isinstance(places, dict)):
        raise FormError("it does not list tensors and their places")
    if not isinstance(getattr(index, "planner_data", None), (dict, type(None))):
        raise FormError("planner_data is not a mapping")
    num_chunks = 0
    for key, entry in tensors.items():
        if has_values and isinstance(key, str) and isinstance(entry, BytesStorageMetadata):
            if MetadataIndex(key) not in places:
                raise FormError(f"{key} has no place")
            num_chunks += 1
            continue
        if not isinstance(key, str) or not isinstance(entry, TensorStorageMetadata):
            raise FormError(f"{key} is not a tensor")
        properties = getattr(entry, "properties", None)
        if not isinstance(getattr(properties, "dtype", None), torch.dtype):
            raise FormError(f"{key} has no dtype")
        size = _sizes(key, getattr(entry, "size", None))
        chunks = getattr(entry, "chunks", None)
        if not isinstance(chunks, list):
            raise FormError(f"{key} has no list of chunks")
        _check_tiling(key, size, [_box(key, chunk, size) for chunk in chunks])
        for chunk in chunks:
            if MetadataIndex(key, chunk.offsets) not in places:
                raise FormError(f"{key} lacks the place of its chunk at {list(chunk.offsets)}")
        num_chunks += len(chunks)
    if len(places) != num_chunks:
        raise FormError(f"it has places for {len(places)} chunks, but there are {num_chunks}")
    _check_places(places)


def _sizes(key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, torch.Size) or not all(0 <= n <= MOST for n in value):
        raise FormError(f"{key} has no size, or one that is too large")
    return tuple(value)


Box = tuple[tuple[int, int], ...]  # (begin, end) along each dimension


def _box(key: str, chunk: Any, size: tuple[int, ...]) -> Box:
    """Return the box of a tensor that a chunk holds."""
    offsets = _sizes(key, getattr(chunk, "offsets", None))
    sizes = _sizes(key, getattr(chunk, "sizes", None))
    inside = len(offsets) == len(sizes) == len(size) and all(
        at + n <= end for at, n, end in zip(offsets, sizes, size, strict=True)
    )
    if not (isinstance(chunk, ChunkStorageMetadata) and inside):
        said = f"the chunk at {list(offsets)} of {list(sizes)} exceeds {list(size)}"
        raise FormError(f"{key}: {said}")
    return tuple((at, at + n) for at, n in zip(offsets, sizes, strict=True))


def _check_tiling(key: str, size: tuple[int, ...], boxes: list[Box]) -> None:
    """Check that boxes cover every element of a tensor exactly once.

    A box is determined by its corners with alternating signs. If boxes tile a tensor, their signed
    corners add up to those of the tensor, since all inner corners cancel out; otherwise they do
    not.
    """
    held, total = sum(math.prod(b - a for a, b in box) for box in boxes), math.prod(size)
    if held != total:
        raise FormError(f"{key} has {held} of its {total} elements")
    if not total:
        return
    cut = [d for d, n in enumerate(size) if any(box[d] != (0, n) for box in boxes)]
    if len(cut) > _MOST_CUT:
        raise FormError(f"{key} is cut along {len(cut)} dimensions. {_MOST_CUT} are allowed")
    corners: Counter[tuple[int, ...]] = Counter()
    whole = tuple((0, n) for n in size)
    for box, sign in (*((box, 1) for box in boxes), (whole, -1)):
        if all(a < b for a, b in box):
            for ends in itertools.product((0, 1), repeat=len(cut)):
                corner = tuple(box[d][end] for d, end in zip(cut, ends, strict=True))
                corners[corner] += sign * (-1) ** sum(ends)
    if any(corners.values()):
        raise FormError(f"{key}: its chunks overlap, and leave elements out")


def _check_places(places: dict[Any, Any]) -> None:
    """Check that every chunk has bytes of its own."""
    taken = []
    for index, info in places.items():
        name, at, n = (getattr(info, k, None) for k in ("relative_path", "offset", "length"))
        if not (isinstance(name, str) and type(at) is type(n) is int and 0 <= at <= MOST >= n > 0):
            raise FormError(f"{getattr(index, 'fqn', index)} has no place in a file")
        if getattr(info, "transform_descriptors", None):
            raise FormError(
                f"{index.fqn} was transformed (for example, compressed). Only plain files are read"
            )
        taken.append((name, at, at + n, index.fqn))
    for (file, _, end, left), (other, start, _, right) in itertools.pairwise(sorted(taken)):
        if file == other and start < end:
            raise FormError(f"{left} and {right} overlap at {start} of {file}")


class LoadSteps:
    """The steps of a load: the constructor checks the index, `read` fills the tensors.

    held: the open files of the snapshot.
    file_bytes: the size of every file that belongs to the snapshot.
    done: is called with each tensor once it is filled.

    Raises:
        SnapshotError: the index is invalid, or a file that it refers to is missing or truncated.
    """

    def __init__(
        self, held: HeldFiles, file_bytes: Mapping[str, int], done: Callable[[Tensor], None]
    ) -> None:
        self._where, self._done = held.path(INDEX), done
        self._reader = _Reader(held)
        self.index = self._reader.read_metadata()
        self._check_pointers(file_bytes)

    def _check_pointers(self, file_bytes: Mapping[str, int]) -> None:
        """Check that every chunk lies within a file of the save."""
        where = self._where
        for index, info in (self.index.storage_data or {}).items():
            end = info.offset + info.length
            if not 0 <= info.offset <= end <= file_bytes.get(info.relative_path, -1):
                raise SnapshotError(
                    f"{where}: {index.fqn} should be at {info.offset}:{end} of "
                    f"{info.relative_path}, which has "
                    f"{file_bytes.get(info.relative_path, 0)} bytes."
                )

    def keys(self, part: str) -> set[str]:
        """Return the names that were saved under `part`."""
        names = self.index.state_dict_metadata
        return {n.removeprefix(f"{part}.") for n in names if n.startswith(f"{part}.")}

    def plan(self, tensors: dict[str, Any]) -> None:
        """Plan how to fill `tensors`, which may be a subset of what was saved."""
        self._planner = _LoadPlanner(self._done)
        try:
            self._planner.set_up_planner(self._as_saved(tensors), self.index, is_coordinator=True)
            self._reader.set_up_storage_reader(self.index, is_coordinator=True)
            local = self._reader.prepare_local_plan(self._planner.create_local_plan())
        except (RuntimeError, ValueError) as error:  # a missing key, or another size
            raise SnapshotError(f"{self._where}: {as_sentence(error)}") from error
        plans = self._planner.create_global_plan([local])
        self._plan: LoadPlan = self._planner.finish_plan(plans[0])

    def _as_saved(self, value: Any, key: str = "") -> Any:
        """Return tensors, in nested dicts, in the shapes in which they were saved.

        Snapshots of zerofx 0.1.0 have flat tensors instead of tensors of the parameters' shapes.
        """
        if isinstance(value, dict):
            return {k: self._as_saved(v, f"{key}.{k}" if key else k) for k, v in value.items()}
        saved = self.index.state_dict_metadata.get(key)
        if (
            isinstance(value, Tensor)
            and not isinstance(value, FlatPiece)
            and isinstance(saved, TensorStorageMetadata)
            and saved.size != value.size()
            and saved.size == torch.Size([value.numel()])
        ):
            return flat_piece(value)
        return value

    def files(self) -> set[str]:
        """Return the names of the files that contain the planned tensors."""
        places = self.index.storage_data or {}
        return {places[item.storage_index].relative_path for item in self._plan.items}

    def read(self) -> None:
        """Fill the planned tensors in place."""
        self._reader.read_data(self._plan, self._planner).wait()
